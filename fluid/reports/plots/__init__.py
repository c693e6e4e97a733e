"""Plots of a sweep's trials from Python: what :meth:`fluid.SweepResult.plot_history` and its like draw.

:mod:`fluid.reports.plots.trials` has what they show, as plain data; :mod:`fluid.reports.plots.by_matplotlib` and
:mod:`fluid.reports.plots.by_plotly` draw it.
"""
