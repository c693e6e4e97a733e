"""What a backend is: it starts and stops things, and reports what happened. It decides nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.resources import Device
from fluid.trainables.payload import TrialPayload


class Sharing(NamedTuple):
    """How lanes share a GPU.

    Attributes:
        way: ``"mps"`` (at the same time) or ``"timeslice"`` (in turns).
        why: why it is not MPS, though that was asked for where it can be had; empty otherwise.
    """

    way: str
    why: str = ""


@runtime_checkable
class Backend(Protocol):
    """What runs the engine's commands.

    One thread calls it, but for ``wake``, which may be called from any.
    """

    @property
    def sharing(self) -> Sharing:
        """How lanes that are started now share a GPU; without MPS they always do so in turns."""
        ...

    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        ...

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes further devices known, before a command names them.

        Raises:
            InvalidFieldError: there is no such device.
        """
        ...

    def now(self) -> float:
        """Returns the time, seconds, on the clock of the events."""
        ...

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Says what a trial is, before a command names it."""
        ...

    def forget(self, trial_id: str) -> None:
        """Says that no command will name a trial any more; its checkpoints are deleted."""
        ...

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out, per lane in the order given. Never waits for a lane.

        Raises:
            FluidError: a command cannot be carried out by this backend; then none of them was.
        """
        ...

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits until something has happened, :meth:`wake` is called or ``timeout`` seconds have passed.

        Returns:
            What happened, in order; of times that never go back. An empty list if nothing did.
        """
        ...

    def wake(self) -> None:
        """Makes :meth:`poll`, the one in progress or else the next, return."""
        ...

    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""
        ...


class LaneConnected(NamedTuple):
    """A lane that was launched has connected.

    Attributes:
        host: name of its machine; ``"localhost"`` shares the driver's clock.
    """

    lane_id: int
    socket: socket.socket
    host: str = "localhost"


class LaneExited(NamedTuple):
    """A lane is gone, or could not be launched.

    Attributes:
        reason: what happened to it, to be read after "lane 3".
    """

    lane_id: int
    reason: str


class Watchdog(Protocol):
    """Watches what all lanes depend on (:class:`fluid.backends.lanes.mps_watchdog.MpsWatchdog`). Never waits."""

    @property
    def problem(self) -> str:
        """Why no lane can be relied on any more, until :meth:`restart` is called; empty if all is well."""
        ...

    @property
    def is_checking(self) -> bool:
        """Whether a look was asked for and its outcome is not known yet."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether lanes may be started."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Begins to watch, and calls ``wake``, in another thread, whenever there is something to look at."""
        ...

    def request_check(self) -> None:
        """Has it looked after now, as a lane has died."""
        ...

    def restart(self) -> None:
        """Says that all lanes were ended, and what they depend on is to be started again."""
        ...

    def close(self) -> None:
        """Ends what lanes depend on. The only method that may wait."""
        ...


class Launcher(Protocol):
    """Starts processes that run :func:`fluid.lane.serve.serve`. No method waits, but ``close``."""

    @property
    def wants_to_write(self) -> bool:
        """Whether to call :meth:`news` also when :meth:`fileno` becomes writable."""
        ...

    def launch(self, lane_id: int, device: Device) -> LaneConnected | None:
        """Starts a lane; ``None`` if it connects later, which :meth:`news` tells."""
        ...

    def kill(self, lane_id: int) -> None:
        """Kills a lane; :meth:`news` tells when it is gone."""
        ...

    def preload(self, modules: Sequence[str]) -> None:
        """Says what trials are going to import, so that lanes launched later need not."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable when there is news; -1 if there is none at present. May change."""
        ...

    def news(self) -> list[LaneConnected | LaneExited]:
        """Returns what has happened since it was last asked."""
        ...

    def culprit(self, lane_id: int) -> str | None:
        """Returns the trial whose code ran when a lane that is gone died, if that is known."""
        ...

    def close(self) -> None:
        """Ends every process; none is left when it returns."""
        ...

    def abandon(self) -> None:
        """Called in a process forked from the driver: lets go of descriptors that are not its own."""
        ...
