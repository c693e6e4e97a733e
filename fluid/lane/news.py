"""What a lane tells of itself after a trial's first iteration and at rest: its own memory, and what it has loaded.

Modules that a trial's code names are loaded by the fork server before any lane. Of those that it finds in other ways,
such as by ``importlib``, or that a library loads once it is used, as PyTorch does for its first optimizer, the driver
learns here, so that lanes that are started later have them from the start. Only modules of installed packages are
told: to load the user's own code is for the trials, which may count on it that nothing of it ran before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fluid.engine.events import LaneMeasured
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.protocol import ModulesLoaded

#: Folders of installed packages, wherever they are.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_OWN = f"{__name__.partition('.')[0]}."
#: Modules that the fork server had loaded. A lane that made its own set of them would write to, and so copy, every page
#: of memory that it shares with the others and that has one of these names.
_before_fork: frozenset[str] = frozenset()


def note_modules_before_fork() -> None:
    """Called in the fork server after it has loaded modules, for the lanes that it forks from now on."""
    global _before_fork
    _before_fork = frozenset(sys.modules)


class LaneNews:
    """Finds out what has changed.

    Args:
        own_memory: what the lane takes for itself.
        lane_id: its number.
    """

    def __init__(self, own_memory: OwnMemory, lane_id: int) -> None:
        self._own_memory = own_memory
        self._lane_id = lane_id
        #: Modules that were there at the start, and how many there were at the last look.
        self._known = _before_fork or frozenset(sys.modules)
        self._count = len(sys.modules)
        #: Modules that were told, or are not to be.
        self._seen: set[str] = set()

    def since_last(self, held: float, now: float) -> Iterator[LaneMeasured | ModulesLoaded]:
        """What is to be told.

        Args:
            held: bytes that the trials in the lane hold, while no memory is cached.
            now: the time, seconds.
        """
        own_bytes = self._own_memory.changed(held)
        if own_bytes is not None:
            yield LaneMeasured(now, self._lane_id, own_bytes)
        if len(sys.modules) != self._count and (loaded := self._new_modules()):
            yield ModulesLoaded(loaded)

    def _new_modules(self) -> tuple[str, ...]:
        """Modules of installed packages since the last look, in the order in which their loading began."""
        self._count, new = len(sys.modules), []
        for name in reversed(sys.modules):
            if name in self._known:
                break  # New ones come last.
            if name not in self._seen:
                new.append(name)
        self._seen.update(new)
        return tuple(name for name in reversed(new) if _is_installed(name))


def _is_installed(name: str) -> bool:
    """Whether a module was loaded, under its own name, from the folder of installed packages, or is Fluid's own."""
    if name.startswith(_OWN):  # Also where Fluid is installed as a link to its sources.
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str) or getattr(spec, "name", None) != name:
        return False
    return any(folder in origin.replace("\\", "/") for folder in _INSTALLED)
