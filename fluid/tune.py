"""Drop-in for ``ray.tune``: all of its names, with ``run`` and ``Tuner`` taking an ``executor``.

    from fluid import FluidExecutor, tune

    tune.run(trainable, config=..., scheduler=ASHAScheduler(...), executor=FluidExecutor())

Without an executor they are Ray Tune's own. They close a given executor when the sweep has ended, unless it is in a
``with`` block, which keeps its lanes warm for the next sweep. Ray is imported when a name is first looked up.
"""

from __future__ import annotations

import importlib
from typing import Any

from fluid._imports import try_import


def _drop_in() -> Any:
    names: Any = None
    with try_import("Ray Tune", extra="ray") as imports:
        names = importlib.import_module("fluid.integrations.ray_tune.drop_in")
    imports.check()
    return names


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_drop_in(), name)


def __dir__() -> list[str]:
    return dir(_drop_in())
