"""How the lanes of this machine share a GPU: in turns, or side by side under NVIDIA MPS.

Each GPU has an MPS daemon of its own, so that a fault on one leaves the lanes of the others alone. GPUs in exclusive
mode have one in common: it is the only process that may use them, so a lane on several of them must be its client.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from fluid.backends.base import Sharing
from fluid.backends.hosts.lane_killing import MpsControl
from fluid.backends.hosts.mps_watchdog import MpsWatchdog
from fluid.errors import InvalidFieldError
from fluid.gpu.mps_control import PIPE_VARIABLE, MpsError
from fluid.gpu.mps_refusals import forget_refusal, recall_refusal, remember_refusal
from fluid.gpu.mps_support import foreign_daemon, unsupported_reason_here
from fluid.gpu.nvml import GpuState, describe_gpus
from fluid.mps import MpsDaemon

_log = logging.getLogger(__name__)

#: Ways to share, as they may be asked for.
WAYS = ("auto", "mps", "timeslice")
#: Longest that a daemon and its first server may take to start, seconds: as the user asked for MPS, or did not.
_START_S = {"mps": 30.0, "auto": 10.0}


class LaneSharing:
    """Decides how lanes share their devices, and starts MPS daemons if need be.

    With ``"auto"`` the daemons start in the background: see :attr:`MpsWatchdog.is_ready`.

    Args:
        wanted: one of :data:`WAYS`.
        tokens: UUIDs of the GPUs in use; CPU cores have none.
        wake: called in another thread whenever a watchdog has news.
        program: control program that is used without asking whether MPS can be; ``None`` for the installed one.

    Attributes:
        watchdogs: of the daemons, to be closed.

    Raises:
        InvalidFieldError: MPS was asked for and cannot be had.
    """

    def __init__(
        self,
        wanted: str,
        tokens: Sequence[str],
        wake: Callable[[], None] = lambda: None,
        *,
        program: str | None = None,
    ) -> None:
        self.watchdogs: tuple[MpsWatchdog, ...] = ()
        self._why = ""
        #: Pipe folder of a daemon that Fluid did not start, of which every lane on a GPU is a client.
        self._foreign = foreign_daemon(os.environ) if tokens and program is None else None
        if wanted == "timeslice" or (wanted == "auto" and not tokens):
            return
        groups, self._why = _groups(tokens, wanted, program)
        if self._why and wanted == "auto":
            _log.warning("trials share GPUs by time slices, without MPS: %s", self._why)
        if not self._why or wanted == "auto":
            self.watchdogs = tuple(MpsWatchdog(group, _starter(group, wanted, program), wake) for group in groups)
        if wanted == "mps":
            self._require_mps(wanted)

    @property
    def sharing(self) -> Sharing:
        """How lanes that are started now share a GPU: by MPS if that is so on every GPU."""
        whys = {", ".join(watchdog.devices): watchdog.given_up for watchdog in self.watchdogs if watchdog.given_up}
        why = "; ".join(filter(None, [self._why, *(f"{devices}: {why}" for devices, why in whys.items())]))
        return Sharing("timeslice", why) if why or not self.watchdogs else Sharing("mps")

    def lane_environment(self, token: str) -> tuple[tuple[str, str], ...]:
        """What is added to the environment of a lane on a GPU, for it to be a client of MPS; nothing without.

        Where CUDA uses a daemon that Fluid did not start, the lane gets its folder, and so knows that the clients on a
        GPU fail together.
        """
        if self._foreign is not None and token:
            return ((PIPE_VARIABLE, self._foreign),)
        return next((one.lane_environment(token) for one in self.watchdogs if one.covers(token)), ())

    def control(self, token: str) -> MpsControl | None:
        """Where the MPS daemon is whose clients the lanes of a GPU are; ``None`` without."""
        return next((one.control for one in self.watchdogs if one.covers(token)), None)

    def close(self) -> None:
        """Ends the daemons, all at once."""
        for watchdog in self.watchdogs:
            watchdog.request_end()
        for watchdog in self.watchdogs:
            watchdog.close()

    def _require_mps(self, wanted: str) -> None:
        try:
            for watchdog in self.watchdogs:
                self._why = self._why or watchdog.await_start()
        except BaseException:
            self.close()
            raise
        if self._why:
            self.close()
            raise InvalidFieldError("sharing", wanted, f"MPS cannot be used: {self._why}")


def _starter(devices: Sequence[str], wanted: str, program: str | None) -> Callable[[Callable[[], bool]], MpsDaemon]:
    def start(is_cancelled: Callable[[], bool]) -> MpsDaemon:
        try:
            daemon = MpsDaemon(devices, program=program, start_timeout=_START_S[wanted], is_cancelled=is_cancelled)
        except MpsError as error:
            if program is None and not is_cancelled():
                remember_refusal(devices, str(error))
            raise
        forget_refusal(devices)
        return daemon

    return start


def _groups(tokens: Sequence[str], wanted: str, program: str | None) -> tuple[list[tuple[str, ...]], str]:
    """Returns the GPUs that can use MPS, in groups that have one daemon, and why the others cannot."""
    if program is not None:
        return [(token,) for token in tokens], ""
    if not tokens:
        return [], "the devices are CPU cores, and it is for GPUs"
    states = {gpu.token: gpu for gpu in describe_gpus()}
    reasons = {token: _reason(token, states.get(token), wanted) for token in tokens}
    usable = [states[token] for token in tokens if not reasons[token]]
    exclusive = tuple(gpu.token for gpu in usable if (gpu.compute_mode or "").startswith("EXCLUSIVE"))
    alone = [(gpu.token,) for gpu in usable if gpu.token not in exclusive]
    why = "; ".join(dict.fromkeys(filter(None, reasons.values())))
    return alone + ([exclusive] if exclusive else []), why


def _reason(token: str, state: GpuState | None, wanted: str) -> str:
    if state is None:
        return f"{token} does not answer"
    return unsupported_reason_here([state]) or (recall_refusal(token) if wanted == "auto" else "")
