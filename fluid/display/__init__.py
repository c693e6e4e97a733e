"""The live view of a session on a terminal, and the formats and colours that all views and reports share.

It imports :mod:`fluid.session` (the status) and rich; ``format`` and ``palette`` import nothing.
Start reading in :mod:`fluid.display.live` (when it redraws), then :mod:`fluid.display.dashboard` (what it draws).
"""
