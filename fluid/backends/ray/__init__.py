"""The Ray backend: lanes are actors in a placement group, on one machine or on many.

Ray gives devices and starts processes; everything else goes over a socket between each lane and the driver, as on one
machine: a message takes a tenth of the time of a call, and the end of the connection shows at once that a lane is gone.
"""

from fluid.backends.ray.backend import RayBackend

__all__ = ["RayBackend"]
