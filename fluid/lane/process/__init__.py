"""The process in which user code runs: its settings, generators, threads and logs, and how it ends."""
