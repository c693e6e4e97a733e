"""When the groups of a session will end: what is left of their trials, forecasts, and how these came true."""
