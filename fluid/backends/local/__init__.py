"""The backend of this machine: lanes are forked from a warm process of the driver's own.

It imports :mod:`fluid.backends.lanes` and lower packages.
Start reading in :mod:`fluid.backends.local.backend`.
"""
