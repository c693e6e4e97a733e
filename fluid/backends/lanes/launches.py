"""The starts of lanes: each has a limit, and is tried again where what was wrong may pass.

A lane that cannot use its GPU ends before it is ready. The engine gives a device up after a few such lanes in a row, so
what passes by itself must not use these up within a second:

* An MPS server that is not ready refuses its clients for a moment. CUDA remembers in a process that it could not be
  initialised, so another process is started in the lane's place, for a few seconds, before the lane counts as lost.
* Another program may fill the GPU for a moment, so further lanes are launched on that device seconds later.
* A lane may hang in the driver while it makes its GPU ready. It is killed, and then it is one that cannot use its GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fluid._clock import Clock
from fluid.backends.base import DeviceBinding, Launcher
from fluid.backends.lanes.connections import LaneConnection, LaneConnections
from fluid.engine.events import LaneReady
from fluid.errors import FluidError
from fluid.lane.protocol import LaneUnusable, LaneWarming

#: Longest that a lane may take to make its GPU ready, seconds. A context takes seconds, a minute where eight GPUs are
#: initialised at once, and lanes of a GPU may wait for each other (:mod:`fluid.lane.device.own_memory`).
_LONGEST_WARM_UP_S = 300.0
#: Seconds since it was refused first in which a client of MPS is started again, and between two attempts.
_PATIENCE_S = 8.0
_PAUSE_S = 0.5
#: Seconds before the next lane is launched on a device that the last one could not use; each time so many times longer,
#: up to the longest.
_FIRST_WAIT_S = 2.0
_LONGER = 4.0
_LONGEST_WAIT_S = 30.0


@dataclass(slots=True, eq=False)
class _Start:
    """A lane that is not ready.

    Attributes:
        launch_at: when to launch it; ``None`` once it was launched.
        kill_at: when it has taken too long to make its GPU ready; ``None`` while it does not.
        may_pass: whether it has ended, or is about to, as an MPS server was not ready.
        refused_at: when that was so the first time; ``None`` before.
    """

    lane: LaneConnection
    binding: DeviceBinding
    launch_at: float | None
    kill_at: float | None = None
    may_pass: bool = False
    refused_at: float | None = None


@dataclass(slots=True)
class _DeviceWait:
    """How long lanes of a device wait, seconds, and until when."""

    seconds: float
    until: float


class LaneLaunches:
    """Launches lanes and watches them until they are ready.

    Args:
        launcher: starts them.
        lanes: the connections.
        tell: tells a lane that is launched what every lane has to know.
        clock: of the driver.

    Attributes:
        due_at: when to call :meth:`act`, seconds; infinite for never.
    """

    def __init__(
        self, launcher: Launcher, lanes: LaneConnections, tell: Callable[[LaneConnection], None], clock: Clock
    ) -> None:
        self._launcher = launcher
        self._lanes = lanes
        self._tell = tell
        self._clock = clock
        self._starts: dict[int, _Start] = {}
        #: By device, of those that the last lane could not use.
        self._waits: dict[int, _DeviceWait] = {}
        self.due_at = math.inf

    def begin(self, lane: LaneConnection, binding: DeviceBinding) -> None:
        """Launches a lane, later if the last one could not use its device.

        Raises:
            FluidError, OSError: it cannot be launched.
        """
        now = self._clock.now()
        at = max((self._waits[device].until for device in binding.device_ids if device in self._waits), default=now)
        start = self._starts[lane.lane_id] = _Start(lane, binding, launch_at=at)
        if at <= now:
            self._launch(start)
        else:
            self.due_at = min(self.due_at, at)

    def hear(self, lane: LaneConnection, message: Any) -> bool:
        """Takes a message of a lane; returns whether it is about its start only."""
        start = self._starts.get(lane.lane_id)
        if isinstance(message, LaneWarming):
            if start is not None:
                start.kill_at = self._clock.now() + _LONGEST_WARM_UP_S
                self.due_at = min(self.due_at, start.kill_at)
            return True
        if isinstance(message, LaneUnusable):
            if not lane.killed_because:  # Else that made its work on the device fail.
                lane.killed_because = f"cannot use its device: {message.reason}"
                lane.failed_position = message.position
                if start is not None:
                    start.may_pass = message.may_pass
            return True
        if isinstance(message, LaneReady):
            if lane.host != "localhost":
                lane.offset = self._clock.now() - message.at
            if start is not None:
                del self._starts[lane.lane_id]
                for device in start.binding.device_ids:
                    self._waits.pop(device, None)
        return False

    def again(self, lane: LaneConnection) -> bool:
        """Puts a lane whose process has ended off to its next process, if an MPS server may be ready then."""
        start, now = self._starts.get(lane.lane_id), self._clock.now()
        if start is None or not start.may_pass or lane.leaving:
            return False
        if start.refused_at is None:
            start.refused_at = now
        if now - start.refused_at > _PATIENCE_S:
            return False
        self._lanes.disconnect(lane)
        lane.killed_because, lane.failed_position, lane.kill_at = "", None, None
        start.may_pass, start.kill_at, start.launch_at = False, None, now + _PAUSE_S
        self.due_at = min(self.due_at, start.launch_at)
        return True

    def cancel(self, lane: LaneConnection) -> bool:
        """Launches a lane no more that is to end; returns whether it has no process."""
        start = self._starts.get(lane.lane_id)
        if start is None:
            return False
        waits, start.launch_at, start.may_pass = start.launch_at is not None, None, False
        return waits

    def ended(self, lane: LaneConnection, *, blameless: bool) -> None:
        """Takes note of a lane that is gone; after one that could not use its device, the next ones there wait.

        Args:
            lane: the lane.
            blameless: whether that was as what lanes depend on had failed, which is well when the next one is launched.
        """
        start = self._starts.pop(lane.lane_id, None)
        if start is None or lane.failed_position is None or lane.leaving or blameless:
            return
        device = start.binding.device_ids[lane.failed_position]
        before = self._waits.get(device)
        seconds = _FIRST_WAIT_S if before is None else min(_LONGER * before.seconds, _LONGEST_WAIT_S)
        self._waits[device] = _DeviceWait(seconds, self._clock.now() + seconds)

    def act(self, lost: Callable[[LaneConnection, str], None], kill: Callable[[LaneConnection], None]) -> None:
        """Launches the lanes whose time has come, and ends those that have taken too long to make their GPU ready.

        Args:
            lost: is told of lanes that cannot be launched, with the reason.
            kill: kills a lane.
        """
        now = self._clock.now()
        for start in list(self._starts.values()):
            lane = start.lane
            if start.launch_at is not None and now >= start.launch_at:
                try:
                    self._launch(start)
                except (FluidError, OSError) as error:
                    lost(lane, f"could not be started: {error}")
            elif start.kill_at is not None and now >= start.kill_at:
                start.kill_at = None
                if not lane.killed_because:
                    lane.killed_because = f"cannot use its device: it was not ready after {_LONGEST_WARM_UP_S:g} s"
                    lane.failed_position = 0
                    kill(lane)
        times = [at for start in self._starts.values() for at in (start.launch_at, start.kill_at) if at is not None]
        self.due_at = min(times, default=math.inf)

    def _launch(self, start: _Start) -> None:
        start.launch_at = None
        self._tell(start.lane)
        connected = self._launcher.launch(start.lane.lane_id, start.binding)
        if connected is not None:
            self._lanes.connect(connected)
