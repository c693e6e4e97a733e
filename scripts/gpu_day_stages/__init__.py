"""The stages of gpu_day.py that are no benchmarks: each is a function that measures one thing and records figures."""
