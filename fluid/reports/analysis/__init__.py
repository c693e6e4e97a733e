"""What is computed of a run: costs, idle time, importance, resizes, restores, cohorts, forecasts."""
