"""The planners: the portfolio, which is the default, FIFO, and every planner by its name.

It imports :mod:`fluid.planning`, and ``static_fluid`` and ``dynamic_fluid`` (the paper's planners), and numpy.
Start reading in :mod:`fluid.planners.portfolio`; a new planner goes into the table of :mod:`fluid.planners.by_name`.
"""
