"""What a session leaves behind: its trials, their results and checkpoints, read from the run folder.

Start reading with :mod:`fluid.results.records`, which has the records that users get, and :mod:`fluid.results.loading`,
which reads them. Reports build on the same readers.
"""
