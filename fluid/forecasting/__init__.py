"""When groups end, with which odds: pure, of what was measured so far. It imports :mod:`fluid.measure` and numpy."""
