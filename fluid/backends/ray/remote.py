"""Runs Fluid's code in Ray's processes, which find it where the driver does.

Ray would import the code before its processes know where to look. So what Ray is given is pickled by value, and
imports nothing until ``sys.path`` is set: classes and functions that are defined in a function.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from fluid._imports import try_import

with try_import("Ray", extra="ray"):
    import ray


def make_host_class() -> Any:
    """Returns the class of a host's actor, whose method ``run`` makes a call (:func:`pickled`) in its main thread."""

    class FluidHost:
        def run(self, call: tuple[list[str], bytes]) -> None:
            import pickle
            import sys

            sys.path += [path for path in call[0] if path not in sys.path]
            function, arguments = pickle.loads(call[1])
            function(*arguments)

    return ray.remote(FluidHost)


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of Fluid in a process of Ray; returns Ray's reference to what the function returns.

    Args:
        function: one that can be imported by name.
        arguments: its arguments.
        options: where the process is to be, as options of a Ray task.
    """

    def run(call: tuple[list[str], bytes]) -> Any:
        import pickle
        import sys

        sys.path += [path for path in call[0] if path not in sys.path]
        function, arguments = pickle.loads(call[1])
        return function(*arguments)

    return ray.remote(run).options(**{"num_cpus": 0, "max_retries": 0, **options}).remote(pickled(function, *arguments))


def pickled(function: Callable[..., Any], *arguments: Any) -> tuple[list[str], bytes]:
    """Returns a call as a process of Ray can read it before it has imported anything."""
    return list(sys.path), pickle.dumps((function, arguments))
