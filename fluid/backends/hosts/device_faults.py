"""What a host keeps back while it is not known whether a death was that of one lane, or of what all lanes depend on.

Under MPS the fatal fault of one client ends the others on its GPU. So a death is reported only once the watchdog has
checked the daemon, and no lane is launched before the daemon runs again. Lanes that died before the fault was found
are the suspects, by the trials that ran in them; the trials of lanes that are ended because of it are not to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fluid.backends.base import LaneExited
from fluid.backends.hosts.mps_watchdog import MpsWatchdog


class Finding(NamedTuple):
    """What the watchdog knows.

    Attributes:
        problem: why all lanes are to be ended, and :meth:`DeviceFaults.restart` called; empty if they need not be.
        is_clear: whether deaths that were kept back can be reported, once those lanes were ended.
    """

    problem: str
    is_clear: bool


class DeviceFaults:
    """Deaths of lanes that are not reported yet.

    Args:
        watchdog: of what all lanes depend on, owned by this object from now on; ``None`` if they depend on nothing.
        wake: called in another thread when there is something to look at.
    """

    def __init__(self, watchdog: MpsWatchdog | None, wake: Callable[[], None]) -> None:
        self._watchdog = watchdog
        self._deaths: list[LaneExited] = []
        if watchdog is not None:
            watchdog.start(wake)

    @property
    def may_launch(self) -> bool:
        """Whether lanes can be launched now."""
        return self._watchdog is None or self._watchdog.is_ready

    def keeps_back(self, death: LaneExited) -> bool:
        """Whether a death cannot be reported now; it is then among :meth:`due_deaths` later."""
        if self._watchdog is None:
            return False
        self._watchdog.request_check()  # A successor is of no use if what lanes depend on has failed, too.
        if not self._watchdog.is_checking:
            return False
        self._deaths.append(death)
        return True

    def look(self) -> Finding:
        """Returns what the watchdog knows."""
        if self._watchdog is None:
            return Finding("", is_clear=True)
        # In this order: a check ends once it has found a problem.
        is_checking, problem = self._watchdog.is_checking, self._watchdog.problem
        return Finding(problem, is_clear=bool(problem) or not is_checking)

    def restart(self) -> None:
        """Starts again what lanes depend on; all of them were ended."""
        if self._watchdog is not None:
            self._watchdog.restart()

    def close(self) -> None:
        """Ends what lanes depend on; may wait."""
        if self._watchdog is not None:
            self._watchdog.close()

    def due_deaths(self) -> list[LaneExited]:
        """Returns the deaths that were kept back; call it where a finding is clear."""
        deaths, self._deaths = self._deaths, []
        return deaths
