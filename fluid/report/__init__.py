"""What a finished run, a plan or a machine looks like: tables, text, PNG pictures and an HTML page.

It imports :mod:`fluid.display` (formats), :mod:`fluid.session` (the run folder), :mod:`fluid.simulation` and lower
packages, rich and matplotlib. Start reading in :mod:`fluid.report.run`, then :mod:`fluid.report.loader`.
"""
