"""What a session leaves behind: its trials, their results and checkpoints, read from the run folder.

Start reading with :mod:`fluid.results.records`, which has the records that users get, and :mod:`fluid.results.loading`,
which makes them of what :func:`fluid.results.stored_run.read_run` reads. So do reports, loggers and rehearsals.
"""
