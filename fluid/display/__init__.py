"""What a terminal shows while trials run, and how numbers, states and colours look everywhere.

It imports :mod:`fluid.session` (the status) and rich; ``format`` and ``palette`` import nothing.
Start reading in :mod:`fluid.display.live` (when it redraws), then :mod:`fluid.display.dashboard` (what).
"""
