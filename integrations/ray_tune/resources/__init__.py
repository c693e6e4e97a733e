"""What trials of Tune request, and what Fluid's devices offer."""
