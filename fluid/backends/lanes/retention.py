"""Tells lanes which checkpoints are to outlive the run, and brings such checkpoints to the driver's machine."""

from __future__ import annotations

from fluid.backends.base import Launcher
from fluid.backends.lanes.connections import LaneConnection, LaneConnections
from fluid.backends.retention import FetchingLauncher
from fluid.keeping import WorstKept
from fluid.lane.protocol import KeepBar


class LaneRetention:
    """What a backend of real lanes does of :class:`fluid.backends.retention.KeepingBackend`.

    Args:
        lanes: the connections.
        launcher: knows where the checkpoints of other machines are served.
    """

    def __init__(self, lanes: LaneConnections, launcher: Launcher) -> None:
        self._lanes = lanes
        self._launcher = launcher
        #: By group.
        self._bars: dict[str, KeepBar] = {}

    def set_bar(self, group: str, bar: WorstKept | None, room: int | None) -> None:
        """Tells all lanes what is worth keeping."""
        message = self._bars[group] = KeepBar(group, bar, room)
        for lane in self._lanes:
            if not lane.leaving:
                self._lanes.put(lane, message)
        self._lanes.flush()

    def tell(self, lane: LaneConnection) -> None:
        """Tells a lane that is being started what is worth keeping."""
        for bar in self._bars.values():
            self._lanes.put(lane, bar)

    def fetch(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine.

        Raises:
            OSError: it cannot be fetched.
        """
        if not isinstance(self._launcher, FetchingLauncher):
            raise FileNotFoundError(f"{path} is on {host}")
        self._launcher.fetch(host, path, target)
