"""The planners: what one gets and returns, the portfolio, which is the default, and every planner by its name.

Pure. It imports :mod:`fluid.measure`, ``static_fluid`` and ``dynamic_fluid`` (the paper's planners), and numpy.
Start reading in :mod:`fluid.planners.planner` (what a planner is), then :mod:`fluid.planners.portfolio`, which has the
table of names too.
"""
