"""For those who write their own parts of Fluid, and for its tests: checks of the whole state of an engine."""
