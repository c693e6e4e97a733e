"""How the lanes of this machine share a GPU: in turns, or side by side under NVIDIA MPS."""

from __future__ import annotations

from collections.abc import Sequence

from fluid.backends.base import Sharing
from fluid.backends.hosts.mps_watchdog import MpsWatchdog
from fluid.errors import InvalidFieldError
from fluid.gpu.nvml import describe_gpus
from fluid.mps import MpsDaemon, start_or_warn, try_start

#: Ways to share, as they may be asked for.
WAYS = ("auto", "mps", "timeslice")


class LaneSharing:
    """Decides how lanes share their devices, and starts MPS if need be.

    Args:
        wanted: one of :data:`WAYS`.
        tokens: UUIDs of the GPUs in use; CPU cores have none.
        program: control program that is used without asking whether MPS can be; ``None`` for the installed one.

    Attributes:
        watchdog: of the daemon, to be closed; ``None`` without a daemon.

    Raises:
        InvalidFieldError: MPS was asked for and cannot be had.
    """

    def __init__(self, wanted: str, tokens: Sequence[str], *, program: str | None = None) -> None:
        self.watchdog: MpsWatchdog | None = None
        self._why = ""
        if wanted == "timeslice" or (wanted == "auto" and not tokens):
            return
        daemon, self._why = _start(wanted, list(tokens), program)
        if daemon is not None:
            self.watchdog = MpsWatchdog(daemon)
        elif wanted == "mps":
            raise InvalidFieldError("sharing", wanted, f"MPS cannot be used: {self._why}")

    @property
    def sharing(self) -> Sharing:
        """How lanes that are started now share a GPU."""
        if self.watchdog is None:
            return Sharing("timeslice", self._why)
        return Sharing("timeslice", self.watchdog.given_up) if self.watchdog.given_up else Sharing("mps")

    def lane_environment(self, token: str) -> tuple[tuple[str, str], ...]:
        """What is added to the environment of a lane on a GPU, for it to be a client of MPS; nothing without."""
        return () if self.watchdog is None else self.watchdog.lane_environment(token)

    def close(self) -> None:
        """Ends the daemon, for a caller that has not handed the watchdog on."""
        if self.watchdog is not None:
            self.watchdog.close()


def _start(wanted: str, tokens: list[str], program: str | None) -> tuple[MpsDaemon | None, str]:
    if program is not None:
        return MpsDaemon(tokens, program=program), ""
    if not tokens:
        return None, "the devices are CPU cores, and it is for GPUs"
    gpus = [gpu for gpu in describe_gpus() if gpu.token in tokens]
    if len(gpus) < len(tokens):
        return None, "not all GPUs answer"
    return start_or_warn(gpus) if wanted == "auto" else try_start(gpus)
