"""What runs the engine's commands: ``simulated`` (a virtual clock), ``local`` (processes), ``ray`` (a cluster).

:mod:`fluid.backends.lanes` holds what the real backends share. Backends never import each other, and decide nothing.
They import :mod:`fluid.engine` (events, commands), :mod:`fluid.lane` (messages) and lower packages.
Start reading in :mod:`fluid.backends.base`, the interface.
"""
