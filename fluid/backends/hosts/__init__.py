"""A host: the processes and folders by which one machine runs lanes, in the driver's process or beside it.

It has a fork server with its guardian, the checkpoints in host memory, and the MPS daemon. Backends import it, never
the other way round. Start reading in :mod:`fluid.backends.hosts.host`.
"""
