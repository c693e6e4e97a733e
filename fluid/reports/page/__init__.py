"""The HTML page of runs: its data, what changes of it, and the server of a live one."""
