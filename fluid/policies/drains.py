"""Drains: saves the trials on devices that are about to go, or of a whole session, before a deadline.

A drained device is closed to further trials. Each trial that runs there is paused at the end of its iteration, saved to
disk and queued, to go on elsewhere; states that the device keeps are saved too. Then the device is removed, at the
latest at the deadline. A drain of the session does the same on all devices, and removes none.

It is there for safety, and has no figure: without it, what a device or a machine that is taken away had not saved is
lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fluid.engine.commands import NoteDrained, Persist
from fluid.engine.core import Claims, SessionState
from fluid.engine.events import (
    Checkpoint,
    DeviceDraining,
    DeviceLost,
    DeviceRetained,
    DeviceRetiring,
    Event,
    SessionDraining,
    TrialSaved,
)
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import Stage, TrialRecord
from fluid.engine.trials.lifecycle import Lifecycle
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.errors import InvalidFieldError, require_number
from fluid.resources import TOLERANCE
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


class Drains(Policy):
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

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """What is to be drained, and checkpoints that were copied for it."""
        return {
            DeviceDraining: (self.check_device, self.device_draining),
            SessionDraining: (self.check_session, self.session_draining),
            TrialSaved: (None, self._saved),
        }

    def deadlines(self) -> Mapping[type, Handler]:
        """When a drain ends in any case."""
        return {DrainEnd: self.due}

    def _saved(self, event: TrialSaved) -> None:
        if event.copied and event.kept is None:
            self.copied(event)

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

    def after_events(self) -> None:
        """Goes on with what is under way."""
        if self.under_way:
            self.advance()

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
    if checkpoint is None or not checkpoint.in_memory or trial.state.is_over:
        return False
    on_them = hosts is None or checkpoint.host in hosts
    return on_them and (durable is None or durable.iteration < checkpoint.iteration)


def _is_stuck(trial: TrialRecord) -> bool:
    """Whether a trial that waits has progress that cannot be saved."""
    waits = trial.state is TrialState.QUEUED or trial.state is TrialState.PAUSED
    return trial.pinned and waits and trial.progress.done > 0


# -- demand --------------------------------------------------------------------------------------
#
# Demand: what further devices the waiting trials could use, and which devices are idle. Autoscaling reads it.


class DeviceDemand:
    """Reads the demand off the queue; nothing here takes longer with more trials or devices.

    Args:
        core: the session.
    """

    def __init__(self, core: SessionState) -> None:
        self._core = core

    @property
    def devices(self) -> int:
        """How many devices the waiting trials could use beyond those in use.

        A trial that is to be packed counts for its share of a device, and an elastic one for one device, as those
        that it could be widened onto are not worth asking for. One of a fixed width counts for all its devices. A trial
        that can go on only in the lane that keeps its state does not count.
        """
        core = self._core
        if core.drained:
            return 0
        shares = sum(count * min(width, 1.0) for width, count in core.queue.unbound.items())
        arriving = sum(trial.fixed_width or 1 for trial in core.arrivals.values())
        further = sum(count * (width - 1) for asked, count in core.queue.constraints.items() if (width := asked.width))
        return arriving + further + math.ceil(shares - TOLERANCE)

    @property
    def trials_wait(self) -> bool:
        """Whether a trial waits that could start on any device."""
        return bool(self._core.queue.unbound or self._core.arrivals)

    @property
    def idle_since(self) -> Mapping[int, float]:
        """Since when each idle device is idle, seconds; one that drains is left out."""
        return self._core.occupancy.idle_since

    def may_give_back(self, device_id: int) -> bool:
        """Whether an idle device can go without loss.

        It cannot while it keeps the state of a trial that is called, or of one that may run again and cannot be saved.
        The last device of a machine cannot, either, while that machine alone has the state of a trial that may run
        again.
        """
        core = self._core
        host = core.occupancy.device(device_id).host
        is_last = all(device.host != host for device in core.occupancy.devices if device.index != device_id)
        for _, trial_id in core.lanes.kept_on(device_id):
            trial = core.trials[trial_id]
            if trial.calls or (may_run_again(trial) and (is_last or not trial.spec.can_save)):
                return False
        trials = core.trials.values() if is_last else ()
        return not any(may_run_again(trial) and is_only_in_memory(trial, {host}) for trial in trials)


def may_run_again(trial: TrialRecord) -> bool:
    """Whether a trial has not ended, or its search algorithm has said that it may be extended."""
    return not trial.state.ended or (trial.state is TrialState.DONE and trial.progress.follow_up_iterations > 0)


# -- retiring ------------------------------------------------------------------------------------
#
# Retiring devices: they take no further trial, and go once the trials that run there have left by themselves.
#
# Unlike a drain (:mod:`fluid.policies.drains`), this interrupts nothing: the trials run on to their end or their next
# rung, so no iteration waits for a save. A device that may be needed after all is retained, and takes trials again.


#: Seconds to save the states that an idle device keeps; then it goes as it is.
SAVING_S = 300.0


class Retirements(Policy):
    """Retires devices.

    Args:
        core: the session.
        drains: saves the states that an empty device keeps, and removes it.
        demand: says which device can go without loss.

    Attributes:
        devices: those that retire and still run trials, by index.
        under_way: whether there are any. Read at every instant.
    """

    def __init__(self, core: SessionState, drains: Drains, demand: DeviceDemand) -> None:
        self._core = core
        self._drains = drains
        self._demand = demand
        self.devices: set[int] = set()
        self.under_way = False

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Devices that are to be given back, or to stay."""
        return {
            DeviceRetiring: (self.check_retiring, self.device_retiring),
            DeviceRetained: (self.check_retained, self.device_retained),
        }

    def may_retire(self, device_id: int) -> bool:
        """Whether a device takes trials, another one does, too, and no trial that may run again needs this one."""
        occupancy = self._core.occupancy
        if device_id not in occupancy.residents or occupancy.is_closed(device_id) or self._core.drained:
            return False
        return len(occupancy) > 1 and not self._is_needed(device_id)

    def check_retiring(self, event: DeviceRetiring, claims: Claims) -> None:
        """Refuses to retire a device that is not in use, or is needed."""
        if event.device_id not in self._core.occupancy.residents:
            raise InvalidFieldError("device", event.device_id, "is not in use")
        if event.device_id not in self.devices and not self.may_retire(event.device_id):
            raise InvalidFieldError("device", event.device_id, "is needed, or about to go already")
        claims.claim("device", event.device_id)

    def device_retiring(self, event: DeviceRetiring) -> None:
        """Begins to retire a device."""
        if len(self._core.occupancy) > 1 and not self._core.occupancy.is_closed(event.device_id):
            self._core.scheduling.close_device(event.device_id)
            self.devices.add(event.device_id)
            self._core.changed = self.under_way = True

    def check_retained(self, event: DeviceRetained, claims: Claims) -> None:
        """Refuses to retain a device that does not retire, or whose states are being saved already."""
        if event.device_id not in self.devices:
            raise InvalidFieldError("device", event.device_id, "does not retire")

    def device_retained(self, event: DeviceRetained) -> None:
        """Places trials on a device again."""
        self._reopen(event.device_id)

    def after_events(self) -> None:
        """Goes on with what is under way."""
        if self.under_way:
            self.advance()

    def advance(self) -> None:
        """Removes the retiring devices that are empty, and retains those that are needed meanwhile."""
        core = self._core
        for device in sorted(self.devices):
            if device not in core.occupancy.residents or core.drained or self._drains.is_draining(device):
                self.devices.discard(device)
            elif not core.occupancy.residents[device]:
                if self._demand.may_give_back(device) and not self._is_needed(device):
                    self.devices.discard(device)
                    self._drains.device_draining(DeviceDraining(core.now, device, core.now + SAVING_S))
                else:  # It keeps the state of a trial that can go on only there, or has become the only one that fits.
                    self._reopen(device)
        if not core.occupancy and not core.drained:  # The others were lost.
            for device in sorted(self.devices):
                self._reopen(device)
        self.under_way = bool(self.devices)

    def some_wait_for_others(self) -> bool:
        """Whether a queued trial could not run on the devices that take trials, so that it waits for others."""
        core, here = self._core, self._core.occupancy.open_devices
        trials = [*(core.trials.by_row[row] for row in core.queue), *core.arrivals.values()]
        asked = {(trial.spec.memory, trial.constraint) for trial in trials}
        return not all(core.feasibility.is_possible_on(here, need, constraint) for need, constraint in asked)

    def problems(self) -> Iterator[str]:
        """What is broken of the invariants: a device that retires is in use and closed, beside an open one."""
        occupancy = self._core.occupancy
        for device in self.devices:
            if device not in occupancy.residents or not occupancy.is_closed(device):
                yield f"device {device} retires, and is gone or open"
        if self.devices and not occupancy:
            yield f"devices {self.devices} retire, and no other takes trials"

    def _is_needed(self, device_id: int) -> bool:
        """Whether a trial that may run again could run on no other devices that take trials."""
        core = self._core
        rest = [device for device in core.occupancy.open_devices if device.index != device_id]
        trials = (trial for trial in core.trials.values() if may_run_again(trial))
        asked = {(core.estimates.need(trial), trial.constraint) for trial in trials}
        return not all(core.feasibility.is_possible_on(rest, need, constraint) for need, constraint in asked)

    def _reopen(self, device_id: int) -> None:
        self.devices.discard(device_id)
        self._core.scheduling.reopen_device(device_id)
        self._core.changed = True
