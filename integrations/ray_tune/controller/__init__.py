"""What Tune's controller asks of Fluid, and where its requests and the engine's events meet."""
