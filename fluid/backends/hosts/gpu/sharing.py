"""How the lanes of this machine share a GPU: in turns, or side by side under NVIDIA MPS.

Each GPU has an MPS daemon of its own, so that a fault on one leaves the lanes of the others alone. GPUs in exclusive
mode have one in common: it is the only process that may use them, so a lane on several of them must be its client.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fluid._logs import logger_of
from fluid.backends.base import GpuSharing, LaneExited
from fluid.backends.hosts.forkserver.guardian import MpsControl
from fluid.backends.hosts.gpu.mps_watchdog import MpsWatchdog
from fluid.errors import InvalidFieldError
from fluid.gpu.mps_control import PIPE_VARIABLE, PROGRAM, MpsError, find_program
from fluid.gpu.mps_foreign import ForeignDaemon
from fluid.gpu.mps_refusals import forget_refusal, recall_refusal, remember_refusal
from fluid.gpu.mps_support import foreign_daemon, unsupported_reason_here
from fluid.gpu.nvml import GpuState, describe_gpus
from fluid.mps import MpsDaemon
from fluid.packing import MPS, TIMESLICE, Packing, gpu_way_of

_log = logger_of(__name__)

#: Longest that a daemon and its first server may take to start, seconds: where there must be MPS, and elsewhere.
_NEEDED_S, _TRIED_S = 30.0, 10.0


class LaneSharing:
    """Decides how lanes share their devices, and starts MPS daemons if need be.

    Where MPS is not needed, the daemons start in the background: see :attr:`MpsWatchdog.is_ready`.

    Args:
        wanted: one of :data:`fluid.packing.GPU_WAYS`, by name.
        tokens: UUIDs of the GPUs in use; CPU cores have none. :meth:`add` takes further ones.
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
        self._wanted = gpu_way_of(wanted)
        self._wake = wake
        self._program = program
        self._tokens: set[str] = set()
        #: Why GPUs do not use MPS, though that was asked for.
        self._whys: list[str] = []
        #: Pipe folder of a daemon that Fluid did not start, of which every lane on a GPU is a client.
        self._foreign = foreign_daemon(os.environ) if program is None else None
        if self._wanted.needs_mps and not tokens:
            raise self._refusal("the devices are CPU cores, and it is for GPUs")
        self.add(tokens)
        if self._wanted.needs_mps:
            self._await_start()

    def add(self, tokens: Iterable[str]) -> tuple[MpsWatchdog, ...]:
        """Decides how lanes share further GPUs, and starts their daemons in the background.

        Args:
            tokens: UUIDs of the GPUs; those that are known are left out.

        Returns:
            The watchdogs of their daemons.

        Raises:
            InvalidFieldError: MPS was asked for and cannot be used there. A daemon that does not start is no error.
        """
        new = [token for token in dict.fromkeys(tokens) if token not in self._tokens]
        if not new:
            return ()
        groups: list[tuple[str, ...]] = []
        if self._wanted.tries_mps:
            groups, why = _groups(new, self._wanted, self._program)
            if why and self._wanted.needs_mps:
                raise self._refusal(why)
            if why:
                _log.warning("trials share GPUs by time slices, without MPS: %s", why)
                self._whys.append(why)
        self._tokens.update(new)
        made = [MpsWatchdog(group, _starter(group, self._wanted, self._program), self._wake) for group in groups]
        if self._foreign is not None:
            made += _foreign_watchdogs(new, self._foreign, self._wake)
        self.watchdogs += tuple(made)
        return tuple(made)

    @property
    def sharing(self) -> GpuSharing:
        """How lanes that are started now share a GPU: by MPS if that is so on every GPU."""
        own = [watchdog for watchdog in self.watchdogs if not watchdog.foreign]
        given_up = [f"{', '.join(watchdog.devices)}: {watchdog.given_up}" for watchdog in own if watchdog.given_up]
        why = "; ".join(dict.fromkeys([*self._whys, *given_up]))
        return GpuSharing(TIMESLICE.name, why) if why or not own else GpuSharing(MPS.name)

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

    def _await_start(self) -> None:
        try:
            why = next(filter(None, [watchdog.await_start() for watchdog in self.watchdogs]), "")
        except BaseException:
            self.close()
            raise
        if why:
            self.close()
            raise self._refusal(why)

    def _refusal(self, why: str) -> InvalidFieldError:
        return InvalidFieldError("sharing", self._wanted.name, f"MPS cannot be used: {why}")


def _starter(devices: Sequence[str], wanted: Packing, program: str | None) -> Callable[[Callable[[], bool]], MpsDaemon]:
    def start(is_cancelled: Callable[[], bool]) -> MpsDaemon:
        timeout = _NEEDED_S if wanted.needs_mps else _TRIED_S
        try:
            daemon = MpsDaemon(devices, program=program, start_timeout=timeout, is_cancelled=is_cancelled)
        except MpsError as error:
            if program is None and not is_cancelled():
                remember_refusal(devices, error)
            raise
        forget_refusal(devices)
        return daemon

    return start


def _foreign_watchdogs(tokens: Sequence[str], folder: str, wake: Callable[[], None]) -> list[MpsWatchdog]:
    """Watches a daemon that Fluid did not start, if the control program is there."""
    program = find_program()
    if program is None:
        _log.warning("faults of the MPS daemon in %s cannot be noticed: %s is not installed", folder, PROGRAM)
        return []
    return [MpsWatchdog(tokens, lambda is_cancelled: ForeignDaemon(program, folder), wake, foreign=True)]


def _groups(tokens: Sequence[str], wanted: Packing, program: str | None) -> tuple[list[tuple[str, ...]], str]:
    """Returns the GPUs that can use MPS, in groups that have one daemon, and why the others cannot."""
    if program is not None:
        return [(token,) for token in tokens], ""
    states = {gpu.token: gpu for gpu in describe_gpus()}
    reasons = {token: _reason(token, states.get(token), wanted) for token in tokens}
    usable = [states[token] for token in tokens if not reasons[token]]
    exclusive = tuple(gpu.token for gpu in usable if (gpu.compute_mode or "").startswith("EXCLUSIVE"))
    alone = [(gpu.token,) for gpu in usable if gpu.token not in exclusive]
    why = "; ".join(dict.fromkeys(filter(None, reasons.values())))
    return alone + ([exclusive] if exclusive else []), why


def _reason(token: str, state: GpuState | None, wanted: Packing) -> str:
    if state is None:
        return f"{token} does not answer"
    return unsupported_reason_here([state]) or ("" if wanted.needs_mps else recall_refusal(token))


# -- device faults -------------------------------------------------------------------------------
#
# What a host keeps back while it is not known whether a death was that of one lane, or of what several depend on.
#
# Under MPS the fatal fault of one client ends the others on its GPU. So a death is reported only once the watchdog of
# the GPU has checked its daemon, and no lane is launched there before the daemon runs. Lanes that died before the
# fault was found are the suspects, by the trials that ran in them; the trials of lanes that are ended because of it
# are not to blame. Lanes of other GPUs, and lanes that are no clients, go on. A daemon that Fluid did not start serves
# all GPUs and does not say on which the fault is: there it is taken to be on those where lanes have died.


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
