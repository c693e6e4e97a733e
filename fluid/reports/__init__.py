"""Reports on recorded runs, plans, simulations and machines: tables, text, figures and an HTML page.

It imports :mod:`fluid.display` (formats), :mod:`fluid.session` (the run folder), :mod:`fluid.simulation` and lower
packages, rich and matplotlib. Start reading in :mod:`fluid.reports.run.run`, then :mod:`fluid.reports.run.loader`.
"""
