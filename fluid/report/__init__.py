"""Reports: what a run or a simulation did, as tables and figures."""
