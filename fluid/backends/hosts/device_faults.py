"""What a host keeps back while it is not known whether a death was that of one lane, or of what several depend on.

Under MPS the fatal fault of one client ends the others on its GPU. So a death is reported only once the watchdog of the
GPU has checked its daemon, and no lane is launched there before the daemon runs. Lanes that died before the fault was
found are the suspects, by the trials that ran in them; the trials of lanes that are ended because of it are not to
blame. Lanes of other GPUs, and lanes that are no clients, go on. A daemon that Fluid did not start serves all GPUs and
does not say on which the fault is: there it is taken to be on those where lanes have died.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fluid.backends.base import LaneExited
from fluid.backends.hosts.mps_watchdog import MpsWatchdog


class Finding(NamedTuple):
    """What the watchdogs know.

    Attributes:
        failed: lanes that are to be killed, with the reason.
        deaths: that were kept back and can be reported, once those lanes were killed.
    """

    failed: dict[int, str]
    deaths: list[LaneExited]


class DeviceFaults:
    """Deaths of lanes that are not reported yet."""

    def __init__(self) -> None:
        #: And the GPUs of each lane.
        self._deaths: dict[MpsWatchdog, list[tuple[LaneExited, str]]] = {}

    def add(self, watchdogs: Iterable[MpsWatchdog]) -> None:
        """Takes watchdogs of what lanes depend on."""
        self._deaths.update({watchdog: [] for watchdog in watchdogs})

    def may_launch(self, token: str) -> bool:
        """Whether a lane on these GPUs, UUIDs divided by commas, can be launched now."""
        watchdog = self._watchdog(token)
        return watchdog is None or watchdog.is_ready

    def keeps_back(self, death: LaneExited, token: str) -> bool:
        """Whether the death of a lane on these GPUs cannot be reported now; a later finding then has it."""
        watchdog = self._watchdog(token)
        if watchdog is None:
            return False
        watchdog.request_check()  # A successor is of no use if what lanes depend on has failed, too.
        if not watchdog.is_checking:
            return False
        self._deaths[watchdog].append((death, token))
        return True

    def look(self, running: Mapping[int, str]) -> Finding:
        """Returns what the watchdogs know, and has daemons recover that have failed.

        Args:
            running: the GPUs of each lane that runs.
        """
        finding = Finding({}, [])
        for watchdog, deaths in self._deaths.items():
            # In this order: a check ends once it has found a problem.
            is_checking, problem = watchdog.is_checking, watchdog.problem
            if problem:
                suspects = [token for _, token in deaths] if watchdog.foreign else watchdog.devices
                failed = set(",".join(suspects).split(","))
                clients = [lane for lane, token in running.items() if watchdog.covers(token)]
                affected = [lane for lane in clients if failed.intersection(running[lane].split(","))]
                finding.failed.update(dict.fromkeys(affected, problem))
                watchdog.recover()
            if problem or not is_checking:
                finding.deaths.extend(death for death, _ in deaths)
                deaths.clear()
        return finding

    def _watchdog(self, token: str) -> MpsWatchdog | None:
        return next((watchdog for watchdog in self._deaths if watchdog.covers(token)), None)
