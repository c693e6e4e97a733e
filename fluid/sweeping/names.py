"""Names of sweeps: none of two in one executor has the same, as it is part of the trials' ids."""

from __future__ import annotations

import itertools
import threading
from weakref import WeakKeyDictionary

from fluid.executor import FluidExecutor

#: Names of sweeps by executor, also of those that have not submitted a group yet, as threads may share an executor.
_claimed: WeakKeyDictionary[FluidExecutor, set[str]] = WeakKeyDictionary()
_naming = threading.Lock()


def new_name(name: str, executor: FluidExecutor) -> str:
    """Returns a name that no group of the executor has, as it is part of the trials' ids."""
    with _naming:
        claimed = _claimed.setdefault(executor, set())
        taken = {handle.name for handle in executor.handles} | claimed
        candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        claimed.add(chosen := next(candidate for candidate in candidates if candidate not in taken))
        return chosen
