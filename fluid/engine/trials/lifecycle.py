"""A trial's life on its lanes: start or resume, iterate, finish, be preempted, stop."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from fluid.engine.commands import (
    NotePreempted,
    Pause,
    Report,
    ReportSetBack,
    ReportUnsavable,
    RunIteration,
    StartTrial,
    StopTrial,
)
from fluid.engine.core import SessionState, last_to_keep
from fluid.engine.events import (
    IterationDone,
    LaneMeasured,
    LaneOutdated,
    LaneSpent,
    PausePurpose,
    SavabilityChanged,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSetBack,
    TrialStarted,
)
from fluid.engine.records import NO_LANES, PendingPreemption, Stage, TrialRecord
from fluid.engine.trials.calls import Calls
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.trialgroup import TrialState

# -- learning ------------------------------------------------------------------------------------
#
# What the engine learns from an iteration: its trial's pace, its key's overheads, and what its like will take.


def learn_from(core: SessionState, trial: TrialRecord, event: IterationDone) -> None:
    """Learns from an iteration that a trial has finished, or once from a run of several.

    Args:
        core: the state of the session.
        trial: the trial, which still holds its devices.
        event: its iterations.
    """
    pace, place = trial.pace, trial.placement
    if place.settled_after is not None:
        core.measuring.observe_warm_up(trial, place.settled_after - event.typical_seconds)
        place.settled_after = None
    before = pace.observed
    _observe(core, trial, event)
    for iterated in core.policies.iterated:
        iterated(trial, event, pace.observed - before)


def _observe(core: SessionState, trial: TrialRecord, event: IterationDone) -> None:
    place = trial.placement
    for observes in core.policies.observes:
        if observes(trial, event):
            place.settled, place.disturbed = True, False
            return
    # One that is not settled has prepared something, as a self-check and a capture of a pack of one: it is no pace.
    is_usual = event.settled and not place.disturbed and place.move is None
    co_residents = core.timing.co_residents(trial) if is_usual else None
    if co_residents is not None:
        core.measuring.observe(trial, co_residents, event)
    elif event.memory is not None:
        core.measuring.observe_memory(trial, event.memory)
    if not place.settled:
        core.timing.settle(trial, core.now, is_usual=core.estimates.of_key(trial).is_usual(event.typical_seconds))
    place.disturbed = False


# -- lifecycle -----------------------------------------------------------------------------------


#: When a trial was stopped that was not queued, and was not about to start.
_WHEN_STOPPED = {TrialState.DONE: "after it was done", TrialState.PAUSED: "while it was paused"}


class Lifecycle:
    """The transitions QUEUED -> STARTING -> RUNNING -> DONE, PAUSED or STOPPING -> STOPPED."""

    def __init__(self, core: SessionState, calls: Calls, residency: Residency, resizing: Resizing) -> None:
        self._core = core
        self._calls = calls
        self._residency = residency
        self._resizing = resizing

    # -- start ---------------------------------------------------------------------------------------------

    def start(self, trial: TrialRecord) -> None:
        """QUEUED -> STARTING: takes lanes for a trial that was just placed."""
        core = self._core
        devices = core.occupancy.held[trial.row]
        lanes = core.lanes.acquire_all(devices, trial, core.commands, core.policies.company_of(trial, devices))
        trial.placement.lanes = tuple(lane.lane_id for lane in lanes)
        for placed in core.policies.placed:
            placed(trial)
        core.timing.placed(trial, lanes, core.now)
        trial.placement.is_first = not core.estimates.of_key(trial).starts
        core.set_state(trial, TrialState.STARTING, f"width {trial.width:g} on devices {list(devices)}")
        core.note_placed(trial, devices)
        core.timing.invalidate(trial)
        core.measuring.observe_arrival(trial)
        self._residency.clear_for(trial)
        self.launch_when_ready(trial)

    def launch_when_ready(self, trial: TrialRecord) -> None:
        """Launches a STARTING trial once its lanes are warm, its state is at hand and its devices are clear."""
        core, place, residence = self._core, trial.placement, trial.residence
        if trial.state is not TrialState.STARTING or place.launched or residence.saving:
            return
        if not all(core.lanes[lane_id].usable for lane_id in place.lanes) or not self._residency.is_clear(trial):
            return
        if residence.lane is None and any(waits_for(trial) for waits_for in core.policies.waits_for):
            core.release(trial)
            core.enqueue(trial, "the state from which it starts is gone")
        elif residence.lane is None:
            self._launch(trial)
        elif place.lanes == (residence.lane,):
            self._resume(trial)
        elif residence.checkpoint_is_current:
            # The lane that keeps the state may be busy for long. Calls that it was told to make are made elsewhere.
            self._residency.drop(trial)
            self._calls.recall(trial)
            self._launch(trial)
        else:
            self._residency.save_out(trial)  # saved() launches it once its state has been fetched

    def _launch(self, trial: TrialRecord) -> None:
        trial.progress.go_back_to(trial.residence.restart_at)
        self._core.memory.note_change(trial.row)
        self._core.lanes.use(trial.placement.lanes)
        trial.placement.launched = True
        self._residency.is_measured_again(trial)
        self._core.watching.launched(trial, self._core.now, iterates=False)
        iterations, checkpoint = trial.progress.grant(self._core.limit_of(trial)), trial.residence.checkpoint
        self._core.commands.append(
            StartTrial(
                trial.trial_id,
                trial.placement.lanes,
                iterations=iterations,
                checkpoint=checkpoint,
                must_restore=trial.spec.start is not None,  # Its own beginning is another trial.
            )
        )

    def _resume(self, trial: TrialRecord) -> None:
        """STARTING -> RUNNING in the lane that keeps the trial's state."""
        core, lanes = self._core, trial.placement.lanes
        self._residency.leave_lane(trial)
        trial.placement.launched = True
        core.watching.launched(trial, core.now, iterates=True)
        core.commands.append(RunIteration(trial.trial_id, lanes, trial.progress.grant(self._core.limit_of(trial))))
        core.set_state(trial, TrialState.RUNNING, "resumed where it was")
        for resumed in core.policies.resumed:
            resumed(trial)
        core.report_start(trial)
        if trial.progress.done >= trial.progress.budget:
            self.finish(trial)  # it was to be restored for a call elsewhere, and could not be saved

    def started(self, event: TrialStarted) -> None:
        """STARTING -> RUNNING; a trial that was told to stop meanwhile stays STOPPING."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        starting = (TrialState.STARTING, TrialState.STOPPING)
        if trial is None or event.lane_id != trial.placement.lanes[0] or trial.state not in starting:
            return
        progress = trial.progress
        if event.iteration > progress.done:
            why = f"started at iteration {event.iteration}, beyond its checkpoint's {progress.done}"
            core.distrust(trial, event.lane_id, why)
            return
        core.measuring.observe_start(trial, event.seconds, event.restoring)
        core.watching.launched(trial, core.now, iterates=True)
        self._residency.restored(trial, event.iteration)
        progress.restart(event.iteration)
        for started in core.policies.started:
            started(trial, event)
        if trial.state is TrialState.STOPPING:
            return
        core.set_state(trial, TrialState.RUNNING, f"started at iteration {event.iteration}")
        core.timing.started(trial)
        core.report_start(trial)
        if progress.done >= progress.budget:
            self.finish(trial)  # it lost its lane after its last iteration, or was restored for a call
        else:
            self._calls.deliver(trial)
            core.top_up(trial)

    def set_back(self, event: TrialSetBack) -> None:
        """Sets a trial back to the state that its lane could restore, before the lane reports that it has started.

        A trial whose own code cannot load its checkpoints is moved no more: it would lose all its work each time.
        """
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if trial is None or event.lane_id != trial.placement.lanes[0] or trial.state is TrialState.RUNNING:
            return
        progress, checkpoint = trial.progress, event.checkpoint
        iteration, lost = checkpoint.iteration if checkpoint is not None else 0, progress.done
        if iteration > lost:
            why = f"was set back to iteration {iteration}, beyond its checkpoint's {lost}"
            core.distrust(trial, event.lane_id, why)
            return
        progress.restart(iteration)
        self._residency.set_back(trial, checkpoint)
        known = event.cannot_load and trial.limits.cannot_load
        if event.cannot_load:
            trial.limits = replace(trial.limits, cannot_load=True)
            trial.spec = structs.replace(trial.spec, can_save=False)
        core.allocations.update_work(trial)
        text = f"goes on from iteration {iteration} instead of {lost}: {event.reason}"
        core.log(trial, text)
        core.tell(trial, text)
        if known:
            return  # one warning is enough for code that does not work
        core.commands.append(
            ReportSetBack(
                trial.trial_id,
                trial.group_id,
                at=core.now,
                lost=lost,
                checkpoint=checkpoint,
                reason=event.reason,
                cannot_load=event.cannot_load,
            )
        )

    def saved(self, event: TrialSaved) -> None:
        """Records a checkpoint, and launches a trial that waited for it."""
        running = self._core.holder(event.trial_id, event.lane_id)
        if running is not None:
            self._core.watching.answered(running, self._core.now)  # saving takes no time from its next iteration
        trial = self._residency.saved(event)
        if trial is not None:
            self.launch_when_ready(trial)

    # -- iterate -------------------------------------------------------------------------------------------

    def iteration_done(self, event: IterationDone) -> None:
        """Counts an iteration; ends the trial after its last one."""
        core = self._core
        trial = core.trials.get(event.trial_id)
        if trial is None:
            return
        place, progress = trial.placement, trial.progress
        if not place.launched or trial.state is TrialState.STARTING:
            return
        if event.lane_id == place.hosts[0]:
            place.lost_lanes = NO_LANES
        elif event.lane_id not in place.lost_lanes:
            return  # the trial has left that lane, or another one is its rank 0, which reports for all
        further = event.iteration - progress.done
        if further != event.count and not (further == 0 and event.finished):
            core.distrust(trial, event.lane_id, f"reports iteration {event.iteration} after {progress.done}")
            return
        progress.count(event.iteration)
        core.watching.answered(trial, core.now)
        trial.outdate_checkpoint()
        if further:
            core.estimates.of_key(trial).add_iterations(event)
            if (lane := core.lanes.get(event.lane_id)) is not None:
                lane.failed = 0
            learn_from(core, trial, event)
            self._report(trial, event)
        if event.finished:
            progress.finish_early()
            self._residency.forget_later_checkpoints(trial)
        core.allocations.update_work(trial)
        if trial.calls:
            self._calls.deliver(trial)  # some wait until the trial has repeated what it had done
            core.top_up(trial)
        if progress.done < progress.budget or trial.state is TrialState.STOPPING or place.preemption is not None:
            return
        if place.move is not None:
            if place.move.stage is not Stage.WARMING:
                return  # it ends when the Pause or the Resize is answered
            self._resizing.call_off(trial, "it has ended")
        self.finish(trial)

    def _report(self, trial: TrialRecord, event: IterationDone) -> None:
        if event.iteration <= trial.progress.reported:
            return  # It is repeated. One that a trial finishes while it stops counts.
        core, place = self._core, trial.placement
        unreported = event.iteration - trial.progress.reported  # Of a run that repeats iterations, the rest is news.
        trial.progress.reported = event.iteration
        move = place.move
        width = trial.width if move is None or move.called_off else move.old_width
        if move is None:
            devices = core.occupancy.held[trial.row]
        else:
            devices = tuple([core.lanes[lane_id].device_id for lane_id in place.hosts])
        report = Report(
            trial.trial_id,
            trial.group_id,
            iteration=event.iteration,
            metrics=event.metrics,
            seconds=event.seconds,
            width=core.lanes.width_of(trial, width, fused=event.rows > 1),
            device_ids=devices,
            at=event.at,
            rows=event.rows,
            run=None if event.run is None else event.run.last(unreported),
            usage=event.usage,
        )
        core.commands.append(report)
        for reported in core.policies.reported:
            reported(trial, report)

    def finish(self, trial: TrialRecord) -> None:
        """RUNNING -> DONE; the trial's state stays resident in its first lane if the trial may go on there."""
        core, lanes = self._core, trial.placement.lanes
        core.release(trial)
        core.drain(trial, lanes[1:])
        core.end(trial, TrialState.DONE, f"done after {trial.progress.done} iterations")
        core.commands += last_to_keep(trial, lanes[0])  # Before anything that ends its residence.
        self._residency.keep(trial, lanes[0])
        self._residency.let_go(trial)

    # -- preemption ----------------------------------------------------------------------------------------

    def preempt(
        self,
        trial: TrialRecord,
        successor: TrialRecord | None = None,
        *,
        why: str | None = None,
        urgent_group: str | None = None,
    ) -> None:
        """Pauses a running trial after its iteration; it goes on later, in its lane if that is free.

        Args:
            trial: a trial that runs.
            successor: the trial that takes its device over; ``None`` if there is none, or too many trials share the
                device, which is left to the others.
            why: for its story, if it is not paused for other trials.
            urgent_group: the successor's group, if that preempts.
        """
        core = self._core
        core.commands.append(Pause(trial.trial_id, trial.placement.lanes, purpose=PausePurpose.PREEMPT))
        trial.placement.preemption = PendingPreemption(None if successor is None else successor.row, urgent_group)
        if why is not None:
            core.log(trial, why)
        else:
            beside, heir = core.estimates.co_residents(trial), None if successor is None else successor.trial_id
            note = NotePreempted(
                trial.trial_id, at=core.now, successor=heir, co_residents=beside, urgent_group=urgent_group
            )
            core.commands.append(note)
            too_many = f": {beside} trials on its device are too many"
            core.log(trial, f"is preempted{too_many if heir is None else f' for {heir!r}'}")

    def paused(self, event: TrialPaused) -> None:
        """RUNNING -> PAUSED: a trial leaves its device; its state stays in its lane. It is QUEUED if it may go on."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if trial is None or trial.placement.preemption is None:
            return
        if event.iteration != trial.progress.done and trial.state is not TrialState.STOPPING:
            core.distrust(trial, event.lane_id, f"paused at iteration {event.iteration} after {trial.progress.done}")
            return
        pending, trial.placement.preemption = trial.placement.preemption, None
        successor = pending.successor
        if trial.state is TrialState.STOPPING:
            return
        if trial.progress.done >= trial.progress.budget:
            self.finish(trial)
            return
        lane_id, *others = trial.placement.lanes
        core.release(trial)
        core.drain(trial, tuple(others))
        core.set_state(trial, TrialState.PAUSED, f"left its device; its state stays in lane {lane_id}")
        self._residency.keep(trial, lane_id)
        if successor is None or trial.held:
            core.enqueue(trial, trial.held or "waits to go on")
        else:
            core.queue_again(trial, pending.why)
        if successor is not None:
            self._take_over(successor, core.lanes[lane_id].device_id)

    def _take_over(self, row: int, device: int) -> None:
        """Starts the trial for which another one was preempted, if it still waits."""
        core = self._core
        if row in core.queue and core.scheduling.start_on(core.trials.by_row[row], device):
            self.start(core.trials.by_row[row])

    # -- stop ----------------------------------------------------------------------------------------------

    def stop(self, trial: TrialRecord, *, now: bool = False) -> None:
        """Stops a trial in whatever state it is; one that runs ends its iteration first, or ``now`` loses its lanes."""
        core, place = self._core, trial.placement
        if trial.state.is_over:
            return
        if place.launched and now:
            lanes = place.hosts
            self.stop(trial)
            reason = f"was killed to stop trial {trial.trial_id!r} at once"
            core.commands += core.watching.kill(trial.trial_id, lanes, reason, core.now)
            return
        if trial.state is TrialState.STOPPING:
            return
        if place.launched:
            if place.move is not None and place.move.stage is not Stage.MOVING:
                self._resizing.call_off(trial, "it was stopped")
            place.stopping_lanes = frozenset(place.lanes)
            keep = trial.spec.keep_last and trial.spec.can_save
            core.commands.append(StopTrial(trial.trial_id, place.lanes, keep=keep))
            core.set_state(trial, TrialState.STOPPING, f"lanes {list(place.lanes)} were told to stop it")
            return
        if trial.state is TrialState.QUEUED:
            core.unqueue(trial)
        elif trial.state is TrialState.STARTING:
            core.release(trial)
        self._residency.drop(trial, ends=True)
        when = _WHEN_STOPPED.get(trial.state, "before it started")
        core.end(trial, TrialState.STOPPED, f"stopped {when}")

    def released(self, event: TrialReleased) -> None:
        """A trial has left a lane."""
        core = self._core
        core.watching.left(event.trial_id, event.lane_id)
        if core.lanes.dropped(event.lane_id, event.trial_id):
            core.changed = True
            return
        if core.lanes.drained(event.lane_id, event.trial_id):
            self.lane_drained(event.lane_id)
            return
        trial = core.trials.get(event.trial_id)
        if trial is not None and event.lane_id in trial.placement.stopping_lanes:
            self.left(trial, event.lane_id, "stopped")

    def left(self, trial: TrialRecord, lane_id: int, why: str) -> None:
        """A STOPPING trial has left one of its lanes; it is STOPPED when it has left the last."""
        trial.placement.stopping_lanes -= {lane_id}
        if not trial.placement.stopping_lanes:
            self._core.release(trial)
            self._core.end(trial, TrialState.STOPPED, why)

    def lane_drained(self, lane_id: int) -> None:
        """Continues the trial that waits for a lane that another one has left; its memory may let queued ones start."""
        self._core.changed |= bool(self._core.queue or self._core.clearing)
        self.lane_usable(lane_id)

    def lane_measured(self, event: LaneMeasured) -> None:
        """A lane takes another amount of memory for itself; if it is less, queued trials may fit."""
        if event.lane_id in self._core.lanes:
            self._core.lanes.measured(event.lane_id, event.own_bytes)
            self._core.changed |= bool(self._core.queue)

    def lane_spent(self, event: LaneSpent) -> None:
        """A trial has changed a lane's process for good: no other one runs there, nor one that was about to start."""
        core, lane_id = self._core, event.lane_id
        core.lanes.spend(lane_id)
        lane = core.lanes.get(lane_id)
        for trial_id in [] if lane is None else list(lane.holders):
            trial = core.trials[trial_id]
            is_new = trial.state is TrialState.STARTING and trial.residence.lane != lane_id
            if is_new and trial.placement.lanes == (lane_id,):
                launched = trial.placement.launched
                core.release(trial)
                core.drain(trial, (lane_id,) if launched else ())
                core.enqueue(trial, f"its lane is of no use to it: {event.reason}")
            elif trial.state is TrialState.RESIZING and lane_id not in trial.placement.hosts:
                # It is on its way there, and would be refused.
                why = f"was killed: trial {trial_id!r} was to move there, and {event.reason}"
                core.commands += core.watching.kill(trial_id, (lane_id,), why, core.now)

    def lane_outdated(self, event: LaneOutdated) -> None:
        """Ends a lane, if nothing has run in it: the trial to come waits less for a new one than for the imports."""
        lane = self._core.lanes.get(event.lane_id)
        if lane is not None and lane.is_unused:
            self._core.lanes.stop(lane.lane_id, self._core.commands)

    def lane_usable(self, lane_id: int) -> None:
        """Continues the trials that wait for a lane, which can run them now."""
        for trial_id in list(self._core.lanes[lane_id].holders):
            trial = self._core.trials[trial_id]
            if trial.state is TrialState.RESIZING:
                self._resizing.pause_when_ready(trial)
            else:
                self.launch_when_ready(trial)


# -- savability ----------------------------------------------------------------------------------
#
# Whether a trial's state can be saved, as its lane finds out while the trial runs.
#
# Some functions yield a state that cannot be pickled, and functions for Ray Tune can be saved once they have reported
# a checkpoint. A lane tells when that changes, and answers a Save that it cannot carry out: the trial stays in its
# lane.


class Savability:
    """Takes over what lanes find: writes ``can_save`` of a trial's spec."""

    def __init__(self, core: SessionState, calls: Calls, residency: Residency, resizing: Resizing) -> None:
        self._core = core
        self._calls = calls
        self._residency = residency
        self._resizing = resizing

    def changed(self, event: SavabilityChanged) -> None:
        """Records whether a trial can be saved; one that was to leave its lane stays there if it cannot."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None:
            return
        residence, place = trial.residence, trial.placement
        if event.refuses and residence.saving and residence.lane == event.lane_id:
            self._set(trial, event)
            self._stays_resident(trial)
        elif event.refuses and place.move is not None and place.move.stage is Stage.MOVING:
            if event.lane_id in place.move.old_lanes:
                self._set(trial, event)
                self._resizing.stays(trial, f"it cannot be saved: {event.reason}")
        elif not residence.saving and event.lane_id in (residence.lane, *place.hosts):
            self._set(trial, event)  # If it is being saved, the answer to that is still to come.

    def _set(self, trial: TrialRecord, event: SavabilityChanged) -> None:
        core, can_save = self._core, event.can_save
        if trial.spec.can_save is can_save or (can_save and trial.limits.cannot_load):
            return
        waits = trial.state is TrialState.QUEUED
        if waits:
            core.unqueue(trial)
        trial.spec = structs.replace(trial.spec, can_save=can_save)
        if waits:
            core.enqueue(trial, "can be saved now" if can_save else "can go on only where its state is")
        core.changed = True
        if can_save:
            core.lanes.check_memory(trial.residence.lane)  # its state may leave now
        if event.reason:
            core.tell(trial, f"its state cannot be saved: {event.reason}")
            notice = ReportUnsavable(trial_id=trial.trial_id, group_id=trial.group_id, at=core.now, reason=event.reason)
            core.commands.append(notice)

    def _stays_resident(self, trial: TrialRecord) -> None:
        """Leaves a trial where its state is; if it was about to start elsewhere, it waits for that lane instead."""
        core = self._core
        trial.residence = replace(trial.residence, saving=False)
        core.changed = True
        if trial.state is TrialState.STARTING:
            core.release(trial)
            core.enqueue(trial, "goes on where its state is, which cannot be saved")
        core.lanes.check_memory(trial.residence.lane)
        self._calls.deliver(trial)
        self._residency.let_go(trial, saves=False)
