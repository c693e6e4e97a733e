"""Trials that start from another trial's state, and runs that several trials share."""
