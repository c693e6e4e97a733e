"""Handles of Ray's actors and references to Ray's objects, in what users give.

Ray unpickles them only in a process that is connected to its cluster. To connect takes a second, so lanes do not until
they have to: each handle is pickled with the cluster that it belongs to, which a process joins as it unpickles the
first one.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Variables by which Ray finds its token. The token itself is not sent: a payload is also written to the run folder.
_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
#: Most ids that a process draws ahead of connecting to Ray, about 1 microsecond each.
_MOST_IDS = 9973
_joining = threading.Lock()


class RayCluster(NamedTuple):
    """A cluster of Ray, as further processes of its driver join it.

    Attributes:
        address: where they do.
        namespace: of the driver's job, in which names of actors are looked up.
        authentication: environment variables by which they find the cluster's token.
    """

    address: str
    namespace: str
    authentication: Mapping[str, str]

    @classmethod
    def of_driver(cls) -> RayCluster:
        """Returns the cluster that this process is connected to."""
        context = importlib.import_module("ray").get_runtime_context()
        authentication = {name: os.environ[name] for name in _AUTHENTICATION if name in os.environ}
        return cls(context.gcs_address, context.namespace, authentication)

    def join(self) -> None:
        """Connects this process, unless it is connected."""
        ray = importlib.import_module("ray")
        with _joining:
            if ray.is_initialized():
                return
            self._authenticate(ray)
            draw_ids_apart()
            # The lane's log shows the trial's output, so Ray must neither log to it nor configure logging.
            ray.init(
                address=self.address,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
                ignore_reinit_error=True,
            )

    def be_default(self) -> None:
        """Makes it the cluster that this process joins where its code uses Ray first, or calls ``ray.init()``."""
        ray: Any = importlib.import_module("ray")
        os.environ["RAY_ADDRESS"] = self.address
        init = getattr(ray.init, _ORIGINAL, ray.init)

        @functools.wraps(init)
        def init_in_namespace(*args: Any, **options: Any) -> Any:
            draw_ids_apart()
            return init(*args, **{"namespace": self.namespace, **options})

        setattr(init_in_namespace, _ORIGINAL, init)
        ray.init = init_in_namespace

    def _authenticate(self, ray: Any) -> None:
        """Has Ray use its token if the cluster asks for it: lanes may be older than the cluster, which says so."""
        if self.authentication:
            os.environ.update(self.authentication)
            config = getattr(ray._raylet, "Config", None)
            if config is not None:
                config.initialize("")  # Reads the settings anew, which it did when it was imported.


#: Attribute of what replaces ``ray.init``.
_ORIGINAL = "_fluid_original"


def is_handle(value: Any) -> bool:
    """Whether a value is a handle of an actor of Ray, or a reference to one of its objects."""
    ray = sys.modules.get("ray")
    actor = sys.modules.get("ray.actor")
    return issubclass(type(value), (getattr(ray, "ObjectRef", ()), getattr(actor, "ActorHandle", ())))


def reduce_handle(value: Any) -> Any:
    """Returns what ``pickle`` is to make of a handle; ``NotImplemented`` for any other value."""
    if not is_handle(value):
        return NotImplemented
    pickled = importlib.import_module("ray.cloudpickle").dumps(value)
    return _unpickle_joined, (*RayCluster.of_driver(), pickled)


def _unpickle_joined(address: str, namespace: str, authentication: Mapping[str, str], pickled: bytes) -> Any:
    RayCluster(address, namespace, authentication).join()
    return pickle.loads(pickled)


def draw_ids_apart() -> None:
    """Has this process draw other random ids than its siblings; to be called by the thread that connects to Ray.

    Processes forked from one that has imported Ray draw the same ids. A process that connects to Ray puts an object
    under such an id; if another one does so at that moment, Ray ends the process.
    """
    ray = importlib.import_module("ray")
    for _ in range(os.getpid() % _MOST_IDS):
        ray.ObjectRef.from_random()
