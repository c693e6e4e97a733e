"""Runs Fluid's code in Ray's processes, which find it where the driver does.

Ray would import the code before its processes know where to look. So what Ray is given is pickled by value, and
imports nothing until ``sys.path`` is set: classes and functions that are defined in a function.

Ray puts the driver's working directory before all else in ``sys.path``. Where the driver does not import from there, it
goes to the end: a file in it may have any name.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from fluid._imports import try_import
from fluid.processes.interpreters import import_path
from fluid.wire import VERSION

with try_import("Ray", extra="ray"):
    import ray

#: Where to import from, what comes last there, the version of Fluid, and the pickled function and arguments.
Call = tuple[list[str], str, str, bytes]


def make_host_class() -> Any:
    """Returns the class of a host's actor, whose method ``run`` makes a call (:func:`pickled`) in its main thread."""
    make = _made_by_value()

    class FluidHost:
        def run(self, call: Call) -> None:
            make(call)

    return ray.remote(FluidHost)


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of Fluid in a process of Ray; returns Ray's reference to what the function returns.

    Args:
        function: one that can be imported by name.
        arguments: its arguments.
        options: where the process is to be, as options of a Ray task.
    """
    task = ray.remote(_made_by_value()).options(**{"num_cpus": 0, "max_retries": 0, **options})
    return task.remote(pickled(function, *arguments))


def _made_by_value() -> Callable[[Call], Any]:
    def make(call: Call) -> Any:
        import pickle
        import sys

        told, last, version, data = call
        own = [path for path in sys.path if path != last]
        sys.path[:] = [*own, *(path for path in told if path not in own), *([last] if last in sys.path else ())]
        from fluid._version import __version__

        if __version__ != version:  # Its classes may have other fields.
            raise ImportError(f"this node has Fluid {__version__} and the driver {version}: install the same on both")
        function, arguments = pickle.loads(data)
        return function(*arguments)

    return make


def pickled(function: Callable[..., Any], *arguments: Any) -> Call:
    """Returns a call as a process of Ray can read it before it has imported anything.

    With it go the places from which this process imports, the one that is to be the last, which is the working
    directory if it is none of them, else an empty text, and the version of Fluid, which must be the same there.
    """
    path = import_path()
    try:
        here = os.getcwd()
    except OSError:  # It was deleted.
        here = ""
    return path, "" if here in path else here, VERSION, pickle.dumps((function, arguments))
