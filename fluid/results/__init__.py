"""What a session leaves behind: its trials, their results and checkpoints, read from the run folder.

Start reading with :mod:`fluid.results.records`, which has the records that users get, and :mod:`fluid.results.loading`,
which makes them of what :func:`fluid.results.read_run` reads. So do reports, loggers and rehearsals.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluid.results.stored_run import read_run

__all__ = ["read_run"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'fluid.results' has no attribute {name!r}")
    return getattr(importlib.import_module("fluid.results.stored_run"), name)
