"""The worker process: a lane is bound to one device, hosts resident trials and runs one iteration at a time.

It imports :mod:`fluid.trainables`, :mod:`fluid.elastic`, :mod:`fluid.gpu` and lower modules; torch where a trial has
loaded it. The driver imports :mod:`fluid.lane.protocol` only, which is what both ends say to each other.
Start reading in :mod:`fluid.lane.serve` (the loop of a lane).
"""
