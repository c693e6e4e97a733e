"""What goes wrong: trials that raise, lanes that die, devices that go."""

from __future__ import annotations

import math
from dataclasses import replace

from fluid.engine.calls import Calls
from fluid.engine.commands import NoteDeviceLost
from fluid.engine.core import SessionState
from fluid.engine.events import DeviceAdded, DeviceLost, Failure, LaneLost, LaneReady, TrialFailed
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.records import LaneRecord, TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.trialgroup import TrialState


class Failures:
    """Takes trials off lanes and devices that are gone, and decides which of them are tried again.

    Args:
        core: the session.
        calls, lifecycle, residency, resizing: whose transitions this makes.
        max_failures: times a trial is queued again after it failed, and a device is tried again on which no lane
            starts.
    """

    def __init__(
        self,
        core: SessionState,
        calls: Calls,
        lifecycle: Lifecycle,
        residency: Residency,
        resizing: Resizing,
        max_failures: int,
    ) -> None:
        self._core = core
        self._calls = calls
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        self._max_failures = max_failures
        #: device -> lanes in a row that did not start
        self._false_starts: dict[int, int] = {}
        #: Why the last device was given up, where no lane could be started on any; ``None`` otherwise.
        self._why_nothing_starts: str | None = None
        self._devices_changed = False

    # -- trials that raise ---------------------------------------------------------------------------------

    def trial_failed(self, event: TrialFailed) -> None:
        """A trial raised, and has left that lane."""
        core = self._core
        if core.lanes.drained(event.lane_id, event.trial_id):
            self._lifecycle.lane_usable(event.lane_id)
            return
        trial = core.trials.get(event.trial_id)
        if trial is None:
            core.lanes.remove_resident(event.lane_id, event.trial_id)  # forgotten while it was saved
            core.changed = True
            return
        if event.lane_id == trial.residence.lane:
            self._failed_to_save(trial, event.failure)
            return
        if event.lane_id in trial.placement.stopping_lanes:
            self._lifecycle.left(trial, event.lane_id, "failed while it was being stopped")
            return
        if (
            trial.placement.move is not None
            and not trial.stopping
            and event.lane_id in set(trial.placement.lanes) - set(trial.placement.hosts)
        ):
            self._resizing.refused(trial, event.failure.message)
            return
        if core.holder(event.trial_id, event.lane_id) is None:
            if event.lane_id in core.lanes:
                core.lanes.remove_resident(event.lane_id, event.trial_id)
            return
        if trial.stopping:
            return  # the lanes it was to move to have been told to stop it
        self._failed(trial, event.lane_id, event.failure)

    def _failed(self, trial: TrialRecord, lane_id: int, failure: Failure) -> None:
        core = self._core
        neighbours = core.estimates.co_residents(trial)
        others = tuple(host for host in trial.placement.stays_in if host != lane_id)
        devices = [core.lanes[lane].device_id for lane in trial.placement.stays_in]
        core.release(trial)
        core.drain(trial, others)
        self._residency.lose_state(trial, failure.message)
        if failure.kind != "out_of_memory":
            self._count(trial, failure)
        elif neighbours > 1:
            # It costs nobody their progress: it runs again with fewer neighbours.
            trial.limits.packing_cap = neighbours - 1
            core.enqueue(trial, f"out of memory beside {neighbours - 1} others")
        elif self._others_leave(devices):
            self._count(trial, failure)
        else:
            trial.limits.failure = replace(failure, message=self._what_there_was(trial, failure, devices))
            core.end(trial, TrialState.FAILED, failure.message)

    def _others_leave(self, devices: list[int]) -> bool:
        """Evicts the states, and ends idle lanes, that were on devices while a trial ran out of memory there."""
        core = self._core
        for device in devices:
            core.lanes.retire(device, math.inf, core.commands)
        retired = core.lanes.have_retired(devices)
        kept = [core.trials[trial_id] for device in devices for _, trial_id in core.lanes.kept_on(device)]
        done = [trial for trial in kept if trial.state is TrialState.DONE and not trial.calls]
        evicted = [trial for trial in done if trial.spec.can_save]
        for trial in evicted:
            self._residency.evict(trial)
        return bool(evicted) or retired

    def _what_there_was(self, trial: TrialRecord, failure: Failure, devices: list[int]) -> str:
        need = self._core.estimates.need(trial)
        rooms = [room for device in devices if (room := self._core.memory.usable_bytes(device))]
        text = f"{failure.message}: it ran alone on its device"
        if rooms:
            text += f", with {min(rooms):.0f} bytes usable"
        return text + (f", and needs {need.peak_bytes:.0f}" if need is not None else "")

    def _failed_to_save(self, trial: TrialRecord, failure: Failure) -> None:
        """Its state is gone: one that waits to go on does so from its newest checkpoint."""
        core = self._core
        self._residency.lose_state(trial, f"could not be saved: {failure.message}")
        core.changed = True
        if trial.state is TrialState.STARTING:
            core.release(trial)
            self._count(trial, failure)
        elif trial.state is TrialState.QUEUED:
            trial.limits.failures += 1
            trial.limits.failure = failure
            if _is_final(trial, failure):
                core.unqueue(trial)
                core.end(trial, TrialState.FAILED, failure.message)

    def _count(self, trial: TrialRecord, failure: Failure) -> None:
        """Queues a trial again, or ends it if it failed too often."""
        trial.limits.failures += 1
        trial.limits.failure = failure
        if trial.limits.failures > self._max_failures or _is_final(trial, failure):
            self._core.end(trial, TrialState.FAILED, failure.message)
        else:
            self._core.enqueue(trial, f"failure {trial.limits.failures} of {self._max_failures}: {failure.message}")

    # -- lanes ---------------------------------------------------------------------------------------------

    def lane_ready(self, event: LaneReady) -> None:
        """A lane is warm."""
        lanes = self._core.lanes
        if event.lane_id in lanes:
            lanes.ready(event.lane_id, event.own_bytes)
            self._false_starts.pop(lanes[event.lane_id].device_id, None)
            self._lifecycle.lane_usable(event.lane_id)

    def lane_lost(self, event: LaneLost) -> None:
        """A lane died, or could not be started."""
        core = self._core
        if event.lane_id not in core.lanes:
            return
        lane = core.lanes.lose(event.lane_id)
        core.changed = True
        if lane.ready or event.blameless:
            self._evacuate(lane, event.reason, culprit=event.culprit, blameless=event.blameless)
            core.lanes.start(lane.device_id, core.commands)
            return
        # A device on which no lane starts is tried a few times more, and then given up.
        failed = self._false_starts[lane.device_id] = self._false_starts.get(lane.device_id, 0) + 1
        self._evacuate(lane, event.reason, blameless=True)
        if failed > self._max_failures:
            self.device_lost(DeviceLost(event.at, lane.device_id))
            if not core.occupancy:
                self._why_nothing_starts = event.reason

    def fail_what_waits(self) -> None:
        """Fails all that waits if the last device was given up because no lane starts: waiting would not help."""
        core, reason = self._core, self._why_nothing_starts
        if reason is None:
            return
        waiting = [*core.arrivals.values(), *(core.trials.by_row[row] for row in core.scheduling.queue)]
        for trial in waiting:
            core.unqueue(trial)
            self._residency.drop(trial)
            trial.limits.failure = Failure("lane_lost", f"no lane could be started on any device: {reason}")
            core.end(trial, TrialState.FAILED, trial.limits.failure.message)

    def _evacuate(self, lane: LaneRecord, reason: str, *, culprit: str | None = None, blameless: bool = False) -> None:
        """Sets the trials of a lane that is gone back to their newest checkpoint.

        Args:
            lane: it is no longer among the lanes.
            reason: why it is gone.
            culprit: whose code killed it, if that is known.
            blameless: whether no trial is to blame.
        """
        core = self._core
        for trial_id in list(lane.residents):
            trial = core.trials[trial_id]
            if not blameless and culprit in (None, trial_id):
                self._calls.blame(trial, reason, self._max_failures)
            self._residency.lose_state(trial, reason)
            if trial.state is TrialState.STARTING:  # elsewhere, or here; it waited for its state
                core.release(trial)
                core.enqueue(trial, reason)
        if lane.trial_id is None or not core.trials[lane.trial_id].state.holds_devices:
            return
        trial = core.trials[lane.trial_id]
        if trial.stopping:
            self._stopped_by_loss(trial, lane.lane_id, reason)
        elif not trial.placement.launched:
            core.release(trial)
            core.enqueue(trial, reason)
        elif lane.lane_id not in trial.placement.hosts:
            self._resizing.call_off(trial)  # it was still to go there
            core.top_up(trial)
        elif self._resizing.survivors(trial, lane.lane_id) and self._may_go_on(trial, reason, culprit, blameless):
            self._resizing.go_on_without(trial, lane.lane_id, reason)
        else:
            self._killed(trial, lane.lane_id, reason, culprit=culprit, blameless=blameless)

    def _may_go_on(self, trial: TrialRecord, reason: str, culprit: str | None, blameless: bool) -> bool:
        """Counts the loss of one of a trial's lanes; returns whether it has not had too many."""
        if blameless or culprit not in (None, trial.trial_id):
            return True
        if trial.limits.failures >= self._max_failures:
            return False
        trial.limits.failures += 1
        trial.limits.failure = Failure("lane_lost", reason)
        self._calls.blame(trial, reason, self._max_failures)
        return True

    def _stopped_by_loss(self, trial: TrialRecord, lane_id: int, reason: str) -> None:
        """The others may wait for the one that is gone: they leave when they can, and the trial is over."""
        others = tuple(lane for lane in trial.placement.stopping_lanes if lane != lane_id and lane in self._core.lanes)
        self._core.release(trial)
        self._core.drain(trial, others, told=True)
        self._core.end(trial, TrialState.STOPPED, reason)

    def _killed(self, trial: TrialRecord, lane_id: int, reason: str, *, culprit: str | None, blameless: bool) -> None:
        core = self._core
        others = tuple(host for host in trial.placement.stays_in if host != lane_id and host in core.lanes)
        core.release(trial)
        core.drain(trial, others)
        blameless = blameless or culprit not in (None, trial.trial_id)
        if not blameless:
            self._calls.blame(trial, reason, self._max_failures)
        self._residency.lose_state(trial, reason)
        if blameless:
            core.enqueue(trial, reason)
            return
        if culprit is not None:
            trial.limits.packing_cap = 1  # what kills a lane may kill its neighbours': it runs alone from now on
        self._count(trial, Failure("lane_lost", reason))

    # -- devices -------------------------------------------------------------------------------------------

    def device_added(self, event: DeviceAdded) -> None:
        """A device can be used: it is planned with, and a lane is warmed on it."""
        core = self._core
        core.scheduling.add_device(event.device)
        self._why_nothing_starts = None
        self._false_starts.pop(event.device.index, None)
        core.lanes.start(event.device.index, core.commands)
        core.changed = self._devices_changed = True

    def device_lost(self, event: DeviceLost) -> None:
        """A device is gone, and every lane on it."""
        core = self._core
        if event.device_id not in core.occupancy.residents:
            return
        for lane in core.lanes.stop_device(event.device_id, core.commands):
            self._evacuate(lane, "its device was lost", blameless=True)
        device = core.occupancy.device(event.device_id)
        core.scheduling.remove_device(event.device_id)
        if all(other.host != device.host for other in core.occupancy.devices):
            self._residency.lose_host(device.host)
        core.commands.append(NoteDeviceLost(device.index, core.now))
        core.changed = self._devices_changed = True

    def end_misfits(self) -> None:
        """Ends queued trials that no device there is can hold, with an error that says so."""
        core = self._core
        waiting = list(core.arrivals.values())
        if self._devices_changed:
            waiting += [core.trials.by_row[row] for row in core.scheduling.queue]
        self._devices_changed = False
        for trial in waiting:
            if not core.estimates.could_hold(trial.spec.memory):
                need, most = core.estimates.need(trial), core.estimates.most_usable()
                assert need is not None
                text = f"needs {need.peak_bytes:.0f} bytes and the device with the most has {most:.0f} usable"
                core.unqueue(trial)
                self._residency.drop(trial)
                trial.limits.failure = Failure("out_of_memory", text)
                core.end(trial, TrialState.FAILED, text)


def _is_final(trial: TrialRecord, failure: Failure) -> bool:
    """Whether a trial that raised is not to be tried again."""
    return failure.kind == "error" and not trial.spec.retry_errors
