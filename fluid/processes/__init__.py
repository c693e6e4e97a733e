"""What a process that starts others asks of Linux: to be told of deaths, to adopt orphans, to leave nothing behind.

It imports the clock only. All of it is in :mod:`fluid.processes.children`.
"""
