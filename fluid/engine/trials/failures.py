"""Failures: trials that raise, lanes that die, devices that are lost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fluid.engine import tuning
from fluid.engine.commands import NoteDeviceLost
from fluid.engine.core import Claims, SessionState
from fluid.engine.events import DeviceAdded, DeviceLost, Failure, LaneLost, LaneReady, TrialFailed
from fluid.engine.policy import Handler, Policy
from fluid.engine.records import Killing, LaneRecord, TrialRecord
from fluid.engine.trials.calls import Calls
from fluid.engine.trials.lifecycle import Lifecycle
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.trialgroup import TrialState

# -- lane losses ---------------------------------------------------------------------------------
#
# Lost lanes: what becomes of the trials that held one, or whose state it kept.


class LaneLoss(NamedTuple):
    """A lane that is gone.

    Attributes:
        lane: its record.
        reason: why it is gone.
        culprit: the trial whose code killed it, if known.
        blameless: whether no trial is to blame.
        failure: what the culprit is to blame for; ``None`` for the loss of the lane.
        trials: how many held it.
    """

    lane: LaneRecord
    reason: str
    culprit: str | None
    blameless: bool
    failure: Failure | None
    trials: int

    def blames(self, trial_id: str) -> bool:
        """Whether a trial is to blame, or may be."""
        return not self.blameless and self.culprit in (None, trial_id)


class LaneLosses:
    """Takes trials off lanes that are gone.

    Args:
        core: the session.
        calls, residency, resizing: the parts whose transitions a loss causes.
        max_failures: times that a failed trial is queued again.
        count: queues a trial again after a failure, or ends it if it failed too often.
    """

    def __init__(
        self,
        core: SessionState,
        calls: Calls,
        residency: Residency,
        resizing: Resizing,
        max_failures: int,
        count: Callable[[TrialRecord, Failure], None],
    ) -> None:
        self._core = core
        self._calls = calls
        self._residency = residency
        self._resizing = resizing
        self._max_failures = max_failures
        self._count = count

    def evacuate(
        self,
        lane: LaneRecord,
        reason: str,
        *,
        culprit: str | None = None,
        blameless: bool = False,
        failure: Failure | None = None,
    ) -> None:
        """Sets the trials of a lane that was removed back to their newest checkpoint; arguments: see LaneLoss."""
        core = self._core
        loss = LaneLoss(lane, reason, culprit, blameless, failure, len(lane.holders))
        for trial_id in list(lane.residents):
            trial = core.trials[trial_id]
            if loss.blames(trial_id):
                self._calls.blame(trial, reason, self._max_failures)
            self._residency.lose_state(trial, reason)
            if trial.state is TrialState.STARTING:  # here or elsewhere, and waits for its state
                core.release(trial)
                core.enqueue(trial, reason)
        for trial_id in list(lane.holders):
            trial = core.trials[trial_id]
            if trial.state.holds_devices:
                self._take_off(trial, loss)

    def _take_off(self, trial: TrialRecord, loss: LaneLoss) -> None:
        """Sets a trial that held a lost lane back, or lets it go on in the lanes that are left."""
        core, lane, reason = self._core, loss.lane, loss.reason
        if trial.state is TrialState.STOPPING:
            self._stopped_by_loss(trial, lane.lane_id, reason)
        elif not trial.placement.launched:
            core.release(trial)
            core.enqueue(trial, reason)
        elif lane.lane_id not in trial.placement.hosts:
            self._resizing.call_off(trial, f"a lane that it was to go to is gone: {reason}")
            core.top_up(trial)
        elif (
            trial.fixed_width is None and self._resizing.survivors(trial, lane.lane_id) and self._may_go_on(trial, loss)
        ):
            self._resizing.go_on_without(trial, lane.lane_id, reason)
        else:
            self._killed(trial, loss)

    def _may_go_on(self, trial: TrialRecord, loss: LaneLoss) -> bool:
        """Counts the loss of one of a trial's lanes as a failure; returns whether the trial may still go on."""
        if not loss.blames(trial.trial_id):
            return True
        if trial.limits.failures >= self._max_failures:
            return False
        trial.add_failure(Failure("lane_lost", loss.reason))
        self._calls.blame(trial, loss.reason, self._max_failures)
        return True

    def _stopped_by_loss(self, trial: TrialRecord, lane_id: int, reason: str) -> None:
        """STOPPING -> STOPPED: the other lanes may hang waiting for the lost one, and are drained."""
        others = tuple(lane for lane in trial.placement.stopping_lanes if lane != lane_id and lane in self._core.lanes)
        self._core.release(trial)
        self._core.drain(trial, others, told=True)
        self._core.end(trial, TrialState.STOPPED, reason)

    def _killed(self, trial: TrialRecord, loss: LaneLoss) -> None:
        core, lane, reason = self._core, loss.lane, loss.reason
        others = tuple(host for host in trial.placement.stays_in if host != lane.lane_id and host in core.lanes)
        core.release(trial)
        core.drain(trial, others)
        blamed = loss.blames(trial.trial_id)
        if blamed:
            self._calls.blame(trial, reason, self._max_failures)
        self._residency.lose_state(trial, reason)
        if blamed and loss.culprit is None and loss.trials > 1:
            # One of the trials in the lane killed it: with half of them at a time, in the end it runs alone.
            trial.limits = replace(trial.limits, packing_cap=loss.trials // 2)
            blamed = False
        if not blamed:
            core.enqueue(trial, reason)
        elif loss.failure is not None:
            self._timed_out(trial, loss.failure)
        else:
            if loss.culprit is not None:
                # A trial that kills its lane may kill those of its neighbours.
                trial.limits = replace(trial.limits, packing_cap=1)
            self._count(trial, Failure("lane_lost", reason))

    def _timed_out(self, trial: TrialRecord, failure: Failure) -> None:
        """Queues a trial again whose lanes were killed because it gave no result; the second time it has failed."""
        trial.limits = replace(trial.limits, timeouts=trial.limits.timeouts + 1, failure=failure)
        if trial.limits.timeouts > tuning.MOST_TIMEOUTS:
            self._core.end(trial, TrialState.FAILED, failure.message)
        else:
            self._core.enqueue(trial, f"timed out: {failure.message}", kind=failure.kind)


# -- lane starts ---------------------------------------------------------------------------------
#
# Lanes that do not start: how often in a row on each device, and the caps of devices that take no further process.
#
# A lane that cannot start beside others leaves its device with the trials that it has: its memory is full, or MPS or
# its compute mode refuse a further client. Neither need last, so the cap ends after a while, and sooner once memory
# was freed there. If a lane is refused again, the next cap lasts twice as long, so that a long sweep sees few such
# starts.


@dataclass(frozen=True, slots=True)
class CapDeadline:
    """When to lift the cap of a device."""

    device: int


@dataclass(slots=True)
class _DeviceCap:
    """What there was on a device when it took no further process.

    Attributes:
        at: when that was, seconds.
        lasts: for how long the cap is to hold, seconds.
        lanes: lanes on the device.
        taken: bytes taken there, as far as they are known.
        is_eased: whether memory or a process has gone since, so that the cap is lifted sooner.
    """

    at: float
    lasts: float
    lanes: int
    taken: float
    is_eased: bool = False


class LaneStarts(Policy):
    """Counts lanes that did not start, caps devices at the trials that they have, and lifts the caps.

    A device that falls idle loses its cap at once.
    """

    def __init__(self, core: SessionState) -> None:
        self._core = core
        #: device -> lanes in a row that did not start, though none ran there
        self._failed: dict[int, int] = {}
        self._caps: dict[int, _DeviceCap] = {}
        #: device -> for how long the last cap was to hold, seconds; absent once a lane could start beside others
        self._lasted: dict[int, float] = {}

    def refused(self, device: int) -> None:
        """Caps a device on which a lane could not start beside others, at the trials that it has."""
        core = self._core
        before = self._lasted.get(device)
        lasts = self._lasted[device] = tuning.CAP_S if before is None else min(2.0 * before, tuning.LONGEST_CAP_S)
        lanes, taken = len(core.lanes.on(device)), core.memory.taken_bytes(device)
        self._caps[device] = _DeviceCap(core.now, lasts, lanes, taken)
        core.occupancy.cap(device, len(core.occupancy.residents[device]))
        core.deadlines.set(CapDeadline(device), core.now + lasts)

    def failed(self, device: int) -> int:
        """Counts a lane that did not start on a device without others; returns how many that are in a row."""
        count = self._failed[device] = self._failed.get(device, 0) + 1
        return count

    def succeeded(self, device: int) -> None:
        """A lane has started on a device; where it did beside others, the device refuses no further ones."""
        self._failed.pop(device, None)
        if device not in self._core.occupancy.caps and sum(lane.ready for lane in self._core.lanes.on(device)) > 1:
            self._lasted.pop(device, None)

    def forget(self, device: int) -> None:
        """Counts anew for a device that has joined."""
        self._failed.pop(device, None)
        self._lasted.pop(device, None)

    def deadlines(self) -> Mapping[type, Handler]:
        """When caps are lifted."""
        return {CapDeadline: self.due}

    def at_end(self) -> None:
        """Brings the end of caps forward where a process has ended, or known memory was freed, since the refusal."""
        core = self._core
        for device, cap in list(self._caps.items()):
            if device not in core.occupancy.caps:  # The device has fallen idle, or is gone.
                del self._caps[device]
                core.deadlines.clear(CapDeadline(device))
            elif not cap.is_eased and self._has_room(device, cap):
                cap.is_eased = True
                core.deadlines.set(CapDeadline(device), max(core.now, cap.at + cap.lasts * tuning.EASED_CAP))

    def _has_room(self, device: int, cap: _DeviceCap) -> bool:
        freed = cap.taken - self._core.memory.taken_bytes(device)
        return len(self._core.lanes.on(device)) < cap.lanes or freed > self._core.lanes.usual_bytes

    def due(self, key: CapDeadline) -> None:
        """Lifts a cap whose time has come, so that trials that wait may try the device again."""
        if self._caps.pop(key.device, None) is not None:
            self._core.occupancy.lift_cap(key.device)
            self._core.changed = True


# -- failures ------------------------------------------------------------------------------------


class Failures:
    """Takes trials off lost lanes and devices, and decides which of them are tried again; writes their `Limits`.

    Args:
        core: the session.
        calls, lifecycle, residency, resizing: the parts whose transitions a failure causes.
        max_failures: times a failed trial is queued again, and a lane that did not start is started again on a device.
        gives_up_early: whether a trial that can only fail again is not queued so often.

    Attributes:
        starts: counts lanes that do not start.
    """

    def __init__(
        self,
        core: SessionState,
        calls: Calls,
        lifecycle: Lifecycle,
        residency: Residency,
        resizing: Resizing,
        max_failures: int,
        *,
        gives_up_early: bool,
    ) -> None:
        self._core = core
        self._calls = calls
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        self._max_failures = max_failures
        self._gives_up_early = gives_up_early
        self._losses = LaneLosses(core, calls, residency, resizing, max_failures, self._count)
        self.starts = LaneStarts(core)
        #: Why no lane starts, if that cost the session its last device; ``None`` otherwise.
        self._why_nothing_starts: str | None = None
        self._devices_changed = False

    # -- trials that raise ---------------------------------------------------------------------------------

    def trial_failed(self, event: TrialFailed) -> None:
        """A trial raised, and has left the lane, which ends now if it can use its device no more."""
        core = self._core
        if event.failure.kind == "device" and event.lane_id in core.lanes:
            core.lanes[event.lane_id].killing = Killing(event.trial_id)
        if core.lanes.drained(event.lane_id, event.trial_id):
            self._lifecycle.lane_drained(event.lane_id)
            return
        trial = core.trials.get(event.trial_id)
        if trial is None:
            core.lanes.remove_resident(event.lane_id, event.trial_id)  # the trial was forgotten while it was saved
            core.changed = True
            return
        if event.lane_id == trial.residence.lane:
            self._failed_to_save(trial, event.failure)
            return
        place = trial.placement
        if event.lane_id in place.stopping_lanes:
            self._lifecycle.left(trial, event.lane_id, "failed while it was being stopped")
            return
        if trial.state is TrialState.RESIZING and event.lane_id in set(place.lanes) - set(place.hosts):
            self._resizing.refused(trial, event.failure.message)
            return
        if core.holder(event.trial_id, event.lane_id) is None:
            if event.lane_id in core.lanes:
                core.lanes.remove_resident(event.lane_id, event.trial_id)
                core.changed = True  # the memory that it held is free
            return
        if trial.state is TrialState.STOPPING:
            return  # a lane that it was to leave by a Resize; the lanes it was to move to were told to stop it
        self._failed(trial, event.lane_id, event.failure)

    def _failed(self, trial: TrialRecord, lane_id: int, failure: Failure) -> None:
        core = self._core
        neighbours = core.estimates.co_residents(trial)
        others = tuple(host for host in trial.placement.stays_in if host != lane_id)
        devices = [device for lane in trial.placement.stays_in for device in core.lanes[lane].device_ids]
        own = core.lanes[lane_id].device_ids
        if failure.kind == "error":
            self._note_raised(lane_id)
        core.release(trial)
        core.drain(trial, others)
        self._residency.lose_state(trial, failure.message)
        if failure.kind == "infeasible":
            trial.limits = replace(trial.limits, failure=failure)
            core.end(trial, TrialState.INFEASIBLE, failure.message)
        elif failure.kind == "device":
            self._left_device_unusable(trial, replace(failure, kind="error"), own)
        elif failure.kind != "out_of_memory":
            self._count(trial, failure)
        elif neighbours > 1:
            # The trial runs again with fewer neighbours, and this does not count as a failure.
            fused = trial.sharing_group is not None
            trial.limits = replace(trial.limits, packing_cap=neighbours // 2 if fused else neighbours - 1)
            core.enqueue(trial, f"out of memory beside {neighbours - 1} others", kind=failure.kind)
        elif self._others_leave(devices):
            self._count(trial, failure)
        elif failure.squeezed or any(core.occupancy.device(device).kind == "cpu" for device in devices):
            # Processes that are no lanes use that memory, too, and have filled it; of a CPU's, they may have.
            self._count(trial, failure, lambda: self._what_there_was(trial, failure, devices))
        else:
            shown = replace(failure, message=self._what_there_was(trial, failure, devices))
            trial.limits = replace(trial.limits, failure=shown)
            core.end(trial, TrialState.FAILED, failure.message)

    def _note_raised(self, lane_id: int) -> None:
        """Counts a trial that raised in a lane; after a few in a row, no other one is placed there."""
        lane = self._core.lanes[lane_id]
        lane.failed += 1
        if lane.failed >= tuning.MOST_RAISED:
            self._core.lanes.spend(lane_id)

    def _left_device_unusable(self, trial: TrialRecord, failure: Failure, devices: tuple[int, ...]) -> None:
        core = self._core
        if any(excuses(trial, failure, devices) for excuses in core.policies.excuses):
            trial.limits = replace(trial.limits, failure=failure)
            core.enqueue(trial, f"device {devices[0]} answered no more after: {failure.message}", kind="device")
        else:
            self._count(trial, failure)

    def _others_leave(self, devices: list[int]) -> bool:
        """Evicts states and ends idle lanes on devices where a trial ran out of memory; returns whether any goes."""
        core = self._core
        for device in devices:
            for memory_short in core.policies.memory_short:
                memory_short(device)
            core.lanes.retire(device, core.commands)
        retired = core.lanes.have_retired(devices)
        kept = [core.trials[trial_id] for device in devices for _, trial_id in core.lanes.kept_on(device)]
        evicted = [trial for trial in kept if trial.rests and not trial.calls and trial.spec.can_save]
        for trial in evicted:
            self._residency.evict(trial)
        return bool(evicted) or retired

    def _what_there_was(self, trial: TrialRecord, failure: Failure, devices: list[int]) -> str:
        need = self._core.estimates.need(trial)
        rooms = [room for device in devices if (room := self._core.memory.usable_bytes(device))]
        text = f"{failure.message}: it ran alone on its device"
        if trial.limits.failures > 1:
            text += f" and failed {trial.limits.failures} times"
        if rooms:
            text += f", with {min(rooms):.0f} bytes usable"
        return text + (f", and needs {need.peak_bytes:.0f}" if need is not None else "")

    def _failed_to_save(self, trial: TrialRecord, failure: Failure) -> None:
        """Sets a trial whose state could not be saved, and is gone, back to its newest checkpoint."""
        core = self._core
        if failure.kind in ("device", "infeasible"):  # Saving decides nothing about a config.
            failure = replace(failure, kind="error")
        self._residency.lose_state(trial, f"could not be saved: {failure.message}")
        core.changed = True
        if trial.state is TrialState.STARTING:
            core.release(trial)
            self._count(trial, failure)
        elif trial.state in (TrialState.QUEUED, TrialState.PAUSED) and failure.kind != "not_saved":
            trial.add_failure(failure)
            if _is_final(trial, failure):
                core.unqueue(trial)
                core.end(trial, TrialState.FAILED, failure.message)

    def _count(self, trial: TrialRecord, failure: Failure, at_last: Callable[[], str] | None = None) -> None:
        """Queues a trial again, or ends it if it failed too often.

        Args:
            trial: the trial.
            failure: why it cannot go on.
            at_last: makes the message if it has failed too often; ``None`` for that of the failure.
        """
        if failure.kind == "not_saved":  # the disk is to blame
            self._core.enqueue(trial, f"could not be saved: {failure.message}", kind=failure.kind)
            return
        before = trial.limits.failure
        trial.add_failure(failure)
        is_vain = self._gives_up_early and _is_vain(failure, before)
        if trial.limits.failures > self._max_failures or is_vain or _is_final(trial, failure):
            if at_last is not None:
                failure = replace(failure, message=at_last())
                trial.limits = replace(trial.limits, failure=failure)
            self._core.end(trial, TrialState.FAILED, failure.message)
        else:
            why = f"failure {trial.limits.failures} of {self._max_failures}: {failure.message}"
            self._core.enqueue(trial, why, kind=failure.kind)

    # -- lanes ---------------------------------------------------------------------------------------------

    def lane_ready(self, event: LaneReady) -> None:
        """A lane is warm."""
        if event.lane_id in self._core.lanes:
            lane = self._core.lanes[event.lane_id]
            if 0.0 < event.own_bytes < lane.own_bytes:
                self._core.changed |= bool(self._core.queue)  # it was expected to take more; queued trials may fit
            self._core.lanes.ready(event.lane_id, event.own_bytes)
            self._core.timing.lane_launched(lane, event.at - event.seconds)
            for device in lane.device_ids:
                self.starts.succeeded(device)
            self._lifecycle.lane_usable(event.lane_id)

    def lane_lost(self, event: LaneLost) -> None:
        """A lane died, or could not be started."""
        core = self._core
        if event.lane_id not in core.lanes:
            return
        lane = core.lanes.lose(event.lane_id)
        core.changed = True
        if any(takes_lost(lane, blameless=event.blameless) for takes_lost in core.policies.takes_lost):
            return
        if lane.killing is not None:
            self._losses.evacuate(lane, event.reason, culprit=lane.killing.trial_id, failure=lane.killing.failure)
            return
        if lane.ready or event.blameless:
            self._losses.evacuate(lane, event.reason, culprit=event.culprit, blameless=event.blameless)
            return
        device = lane.device_ids[event.failed_position or 0]
        self._losses.evacuate(lane, event.reason, blameless=True)
        if event.failed_position is not None and any(other.ready for other in core.lanes.on(device)):
            # The device works, and takes no further process: its memory is full, or MPS or its compute mode refuse it.
            if core.occupancy.residents[device]:
                self.starts.refused(device)
                return
            if self._others_leave([device]):
                return
        # A device on which no lane starts is tried a few more times, and then removed.
        failed = self.starts.failed(device)
        if failed > self._max_failures:
            why = f"{failed} lanes in a row could not be started there, the last because it {event.reason}"
            self.device_lost(DeviceLost(event.at, device, why))
            if not core.occupancy.devices:
                self._why_nothing_starts = event.reason

    def fail_what_waits(self) -> None:
        """Fails all queued trials if the last device was removed because no lane starts there."""
        core, reason = self._core, self._why_nothing_starts
        if reason is None or core.drained:
            return
        for trial in [*core.arrivals.values(), *(core.trials.by_row[row] for row in core.queue)]:
            core.unqueue(trial)
            self._residency.drop(trial)
            failure = Failure("lane_lost", f"no lane could be started on any device: {reason}")
            trial.limits = replace(trial.limits, failure=failure)
            core.end(trial, TrialState.FAILED, failure.message)

    # -- devices -------------------------------------------------------------------------------------------

    def check_device(self, event: DeviceAdded, claims: Claims) -> None:
        """Refuses a device whose index is taken."""
        claims.claim("device", event.device.index, self._core.occupancy.residents)

    def device_added(self, event: DeviceAdded) -> None:
        """Plans with a new device, and warms a lane on it."""
        core = self._core
        core.scheduling.add_device(event.device)
        if core.drained:
            core.scheduling.close_device(event.device.index)
        self._why_nothing_starts = None
        self.starts.forget(event.device.index)
        core.given_up.pop(event.device.index, None)
        core.lanes.start(event.device.index, core.commands)
        core.changed = self._devices_changed = True

    def device_lost(self, event: DeviceLost) -> None:
        """Removes a lost device and every lane on it."""
        core = self._core
        if event.device_id not in core.occupancy.residents:
            return
        for lane in core.lanes.stop_device(event.device_id, core.commands):
            self._losses.evacuate(lane, "its device was lost", blameless=True)
        device = core.occupancy.device(event.device_id)
        core.scheduling.remove_device(event.device_id)
        core.allocations.update_speeds()
        if all(other.host != device.host for other in core.occupancy.devices):
            self._residency.lose_host(device.host)
        if event.reason:
            core.given_up[device.index] = event.reason
        core.commands.append(NoteDeviceLost(device.index, core.now, event.reason))
        core.changed = self._devices_changed = True

    def end_misfits(self) -> None:
        """Fails queued trials that no device can ever run, or that need more memory than any has."""
        core = self._core
        waiting = list(core.arrivals.values())
        if self._devices_changed:
            waiting += [core.trials.by_row[row] for row in core.queue]
        self._devices_changed = False
        fitting: set[Hashable] = set()  # Most trials ask for the same.
        for trial in waiting:
            asked = trial.spec.memory, trial.constraint
            problem = None if asked in fitting else core.feasibility.problem(*asked)
            if problem is None:
                fitting.add(asked)
            else:
                field, value, reason = problem
                kind = "out_of_memory" if field == "memory" else "no_device"
                self._end_misfit(trial, Failure(kind, f"{field}={value}: {reason}"))

    def _end_misfit(self, trial: TrialRecord, failure: Failure) -> None:
        self._core.unqueue(trial)
        self._residency.drop(trial)
        trial.limits = replace(trial.limits, failure=failure)
        self._core.end(trial, TrialState.FAILED, failure.message)


def _is_vain(failure: Failure, before: Failure | None) -> bool:
    """Whether no further try can succeed: the trainable cannot be run, or the last try has failed in the same way."""
    return failure.is_form or (before is not None and bool(failure.site) and failure.site == before.site)


def _is_final(trial: TrialRecord, failure: Failure) -> bool:
    """Whether a failure ends its trial at once: the trial raised, and is not to be tried again."""
    return failure.kind == "parted" or (failure.kind == "error" and not trial.spec.retry_errors)
