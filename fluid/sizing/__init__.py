"""How many devices to hold: a deadline, a budget and a price in; the fewest devices that meet them out. Pure.

It imports :mod:`fluid.planners` and lower packages. Start reading in :mod:`fluid.sizing.sizer`.
"""
