"""Drains: saves the trials on devices that are about to go, or of a whole session, before a deadline.

A drained device is closed to further trials. Each trial that runs there is paused at the end of its iteration, saved to
disk and queued, to go on elsewhere; states that the device keeps are saved too. Then the device is removed, at the
latest at the deadline. A drain of the session does the same on all devices, and removes none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fluid.engine.claims import Claims
from fluid.engine.commands import Persist
from fluid.engine.core import SessionState
from fluid.engine.events import Checkpoint, DeviceDraining, DeviceLost, SessionDraining, TrialSaved
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.notices import NoteDrained
from fluid.engine.records import Stage, TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.errors import InvalidFieldError, require_number
from fluid.trialgroup import TrialState


@dataclass(slots=True)
class _Drain:
    """A drain under way.

    Attributes:
        is_due: whether its deadline has come.
        unsaved: ids of the trials whose progress would be lost if it ended now.
        looked: whether checkpoints in host memory were looked for since the latest answer about a copy.
        asked: the checkpoint in memory that its host was told to copy, by trial, until it answers.
        failed: paths of the checkpoints that could not be copied.
    """

    is_due: bool = False
    unsaved: list[str] = field(default_factory=list)
    looked: bool = False
    asked: dict[str, Checkpoint] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DrainEnd:
    """Key of the deadline of a drain: of a device, or of the session where that is ``None``."""

    device_id: int | None


class Drains:
    """Drains devices and sessions.

    Args:
        core: the session.
        lifecycle, residency, resizing: the parts whose transitions a drain causes.
        remove: removes a device, as if it were lost.
    """

    def __init__(
        self,
        core: SessionState,
        lifecycle: Lifecycle,
        residency: Residency,
        resizing: Resizing,
        remove: Callable[[DeviceLost], None],
    ) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        self._remove = remove
        self._of_device: dict[int, _Drain] = {}
        self._of_session: _Drain | None = None
        #: Whether the end of the session's drain was told.
        self._told = False
        #: Whether a device or the session drains; a session that has drained stays so. Read at every instant.
        self.under_way = False

    # -- requests ------------------------------------------------------------------------------------------

    def check_device(self, event: DeviceDraining, claims: Claims) -> None:
        """Refuses to drain a device that is not in use."""
        if event.device_id not in self._core.occupancy.residents:
            raise InvalidFieldError("device", event.device_id, "is not in use")
        require_number("deadline", event.deadline, at_least=0.0)

    def device_draining(self, event: DeviceDraining) -> None:
        """Begins to drain a device; one that drains already gets a new deadline."""
        core = self._core
        core.scheduling.close_device(event.device_id)
        core.changed = True
        self._of_device.setdefault(event.device_id, _Drain())
        self.under_way = True
        core.deadlines.set(DrainEnd(event.device_id), event.deadline)

    def check_session(self, event: SessionDraining, claims: Claims) -> None:
        """Refuses a deadline that is no time."""
        require_number("deadline", event.deadline, at_least=0.0)

    def session_draining(self, event: SessionDraining) -> None:
        """Begins to drain the session: no trial starts any more."""
        core = self._core
        core.drained = core.changed = True
        for device in core.occupancy.open_devices:
            core.scheduling.close_device(device.index)
        self._of_session, self._told = _Drain(), False
        self.under_way = True
        core.deadlines.set(DrainEnd(None), event.deadline)

    def is_draining(self, device_id: int) -> bool:
        """Whether a device drains by itself."""
        return device_id in self._of_device

    def due(self, key: DrainEnd) -> None:
        """The deadline of a drain has come."""
        drain = self._of_session if key.device_id is None else self._of_device.get(key.device_id)
        if drain is not None:
            drain.is_due = True

    def copied(self, event: TrialSaved) -> None:
        """A host has copied a checkpoint to disk, or could not."""
        trial = self._core.trials.get(event.trial_id)
        for drain in (*self._of_device.values(), self._of_session):
            asked = None if drain is None else drain.asked.get(event.trial_id)
            if drain is None or asked is None:
                continue
            if asked.iteration != event.checkpoint.iteration:
                continue  # It was asked for before.
            del drain.asked[event.trial_id]
            drain.looked = False
            if event.checkpoint.in_memory:
                drain.failed.add(asked.path)
            elif trial is not None:
                self._residency.copied(trial, asked, event.checkpoint)

    # -- after each instant --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Pauses and saves what can be now; ends the drains that have nothing left to save, or no time."""
        core = self._core
        for device, drain in list(self._of_device.items()):
            there = device in core.occupancy.residents
            if not there or self._has_ended(drain, [device]):
                unsaved = self._unsaved(drain, [device] if there else [])
                del self._of_device[device]
                core.deadlines.clear(DrainEnd(device))
                core.commands.append(NoteDrained(core.now, device_id=device, unsaved=unsaved))
                if there:
                    self._remove(DeviceLost(core.now, device))
        self.under_way = bool(self._of_device) or self._of_session is not None
        session, devices = self._of_session, list(core.occupancy.residents)
        if session is not None and self._has_ended(session, devices) and not self._told:
            self._told = True
            core.deadlines.clear(DrainEnd(None))
            unsaved = self._unsaved(session, devices, everywhere=True)
            core.commands.append(NoteDrained(core.now, device_id=None, unsaved=unsaved))

    def _has_ended(self, drain: _Drain, devices: list[int]) -> bool:
        """Makes trials leave these closed devices; returns whether nothing is left to save, or no time."""
        core = self._core
        for device in devices:
            self._clear(device)
        drain.unsaved = [trial_id for device in devices for trial_id in self._unsaved_on(device)]
        if core.changed or not drain.looked or not self._waits(drain):
            drain.looked = True
            # With the session all machines go, also those of which it has no device any more.
            self._copy_checkpoints(drain, None if drain is self._of_session else self._hosts_left(devices))
        return drain.is_due or not self._waits(drain)

    def _waits(self, drain: _Drain) -> bool:
        """Whether something is left to save; a copy is not waited for where its trial was saved to disk since."""
        trials = map(self._core.trials.get, drain.asked)
        return bool(drain.unsaved) or any(trial is not None and is_only_in_memory(trial, None) for trial in trials)

    def _clear(self, device: int) -> None:
        """Pauses the trials that run on a closed device, and saves the states that it keeps."""
        core = self._core
        for row in list(core.occupancy.residents[device]):
            trial = core.trials.by_row.get(row)
            if trial is not None:
                self._interrupt(trial)
        for _, trial_id in core.lanes.kept_on(device):
            trial = core.trials[trial_id]
            is_called = any(call.lane_id is not None for call in trial.calls)
            if not (_is_settled(trial) or trial.residence.saving or is_called):
                self._residency.save_out(trial)

    def _interrupt(self, trial: TrialRecord) -> None:
        place = trial.placement
        if trial.state is TrialState.STARTING and not place.launched:
            self._core.release(trial)
            self._core.enqueue(trial, "its device is drained")
        # Others may be by now on a device that it is to share: then it moves there first.
        elif place.move is not None and place.move.stage is not Stage.MOVING and trial.width >= 1.0:
            self._resizing.call_off(trial, "its device is drained")
        if trial.state is TrialState.RUNNING and place.preemption is None and trial.spec.can_save:
            why = "is told to pause, as its device is drained"
            self._lifecycle.preempt(trial, why=why)
            self._core.tell(trial, why)

    def _unsaved_on(self, device: int) -> list[str]:
        """Ids of the trials that run on a closed device, or leave it, or whose state it keeps unsaved."""
        core = self._core
        holders = [core.trials.by_row.get(row) for row in core.occupancy.residents[device]]
        running = [trial.trial_id for trial in holders if trial is not None and trial.state is not TrialState.STOPPING]
        leaving = [
            trial.trial_id
            for trial in core.resizing.values()
            if trial.placement.move is not None and device in trial.placement.move.old_devices
        ]
        kept = [core.trials[trial_id] for _, trial_id in core.lanes.kept_on(device)]
        return [*running, *leaving, *(trial.trial_id for trial in kept if not _is_settled(trial))]

    def _unsaved(self, drain: _Drain, devices: list[int], *, everywhere: bool = False) -> tuple[str, ...]:
        """Ids of the trials that lose progress if these devices go now; ``everywhere``: if every machine goes."""
        hosts = None if everywhere else self._hosts_left(devices)
        lost = [
            trial.trial_id
            for trial in self._core.trials.values()
            if is_only_in_memory(trial, hosts) or (trial.residence.device in devices and _is_stuck(trial))
        ]
        return tuple(dict.fromkeys([*drain.unsaved, *lost]))

    def _hosts_left(self, devices: list[int]) -> set[str]:
        """The machines of these devices on which no other device is used."""
        occupancy = self._core.occupancy
        return {occupancy.device(device).host for device in devices} - {one.host for one in occupancy.open_devices}

    # -- checkpoints in host memory ------------------------------------------------------------------------

    def _copy_checkpoints(self, drain: _Drain, hosts: set[str] | None) -> None:
        """Has checkpoints copied to disk from the memory of these machines; ``None`` for all."""
        core = self._core
        for trial in () if hosts == set() else sorted(core.trials.values(), key=_is_about_to_be_saved):
            checkpoint = trial.residence.checkpoint
            if checkpoint is None or checkpoint.path in drain.failed or trial.trial_id in drain.asked:
                continue
            if is_only_in_memory(trial, hosts):
                drain.asked[trial.trial_id] = checkpoint
                core.commands.append(Persist(trial.trial_id, checkpoint))


def _is_about_to_be_saved(trial: TrialRecord) -> bool:
    """Whether a trial's lane is to save a newer state, unless it hangs: a copy of the one before is less urgent."""
    return trial.state.holds_devices or trial.residence.lane is not None


def _is_settled(trial: TrialRecord) -> bool:
    """Whether a state that a lane keeps is on disk too, or can never be."""
    residence = trial.residence
    checkpoint = residence.checkpoint
    saved = residence.checkpoint_is_current and checkpoint is not None and not checkpoint.in_memory
    return saved or not trial.spec.can_save


def is_only_in_memory(trial: TrialRecord, hosts: set[str] | None) -> bool:
    """Whether a trial that may go on would lose its newest checkpoint with these machines; ``None`` for all."""
    checkpoint, durable = trial.residence.checkpoint, trial.residence.durable
    if checkpoint is None or not checkpoint.in_memory or trial.state in (TrialState.STOPPED, TrialState.FAILED):
        return False
    on_them = hosts is None or checkpoint.host in hosts
    return on_them and (durable is None or durable.iteration < checkpoint.iteration)


def _is_stuck(trial: TrialRecord) -> bool:
    """Whether a trial that waits has progress that cannot be saved."""
    waits = trial.state is TrialState.QUEUED or trial.state is TrialState.PAUSED
    return trial.pinned and waits and trial.progress.done > 0
