"""The Ray backend: a host on each node of a cluster, which forks lanes for the devices that Ray gives.

Ray gives devices and starts the hosts; everything else goes over a connection between each lane, or host, and the
driver: a message takes a tenth of the time of a call to an actor, and the end of a connection shows at once that a
process is gone.
"""

from fluid.backends.ray.backend import RayBackend

__all__ = ["RayBackend"]
