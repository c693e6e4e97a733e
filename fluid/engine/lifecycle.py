"""A trial's life on its lanes: start or go on, iterate, finish, stop."""

from __future__ import annotations

from fluid.engine.calls import Calls
from fluid.engine.commands import Pause, Report, RunIteration, StartTrial, StopTrial
from fluid.engine.core import SessionState
from fluid.engine.events import IterationDone, TrialPaused, TrialReleased, TrialSaved, TrialStarted
from fluid.engine.records import Stage, TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.trialgroup import TrialState


class Lifecycle:
    """The transitions QUEUED -> STARTING -> RUNNING -> DONE or STOPPED."""

    def __init__(self, core: SessionState, calls: Calls, residency: Residency, resizing: Resizing) -> None:
        self._core = core
        self._calls = calls
        self._residency = residency
        self._resizing = resizing

    # -- start ---------------------------------------------------------------------------------------------

    def start(self, trial: TrialRecord) -> None:
        """Takes lanes for a trial that was just placed."""
        core = self._core
        devices = core.occupancy.held[trial.row]
        lanes = [core.lanes.acquire(device, trial.trial_id, core.commands) for device in devices]
        trial.placement.lanes = tuple(lane.lane_id for lane in lanes)
        core.set_state(trial, TrialState.STARTING, f"width {trial.placement.width:g} on devices {list(devices)}")
        core.invalidate_timing(trial)
        self._residency.clear_for(trial)
        self.launch_when_ready(trial)

    def launch_when_ready(self, trial: TrialRecord) -> None:
        """Has a STARTING trial run, once its lanes and its state are there."""
        core = self._core
        if trial.state is not TrialState.STARTING or trial.placement.launched or trial.residence.saving:
            return
        if not all(core.lanes[lane_id].usable for lane_id in trial.placement.lanes) or not self._residency.is_clear(
            trial
        ):
            return
        if trial.residence.lane is None:
            self._launch(trial)
        elif trial.placement.lanes == (trial.residence.lane,):
            self._resume(trial)
        elif trial.residence.checkpoint_is_current:
            # The lane that keeps it may be busy for long. Calls that it was told to make are made where it goes on.
            self._residency.drop(trial)
            self._calls.recall(trial)
            self._launch(trial)
        else:
            self._residency.save_out(trial)  # it goes on here once its state has been fetched, see saved()

    def _launch(self, trial: TrialRecord) -> None:
        trial.progress.done = trial.residence.restart_at
        trial.placement.launched, trial.progress.granted = True, trial.limit
        iterations = trial.progress.granted - trial.progress.done
        self._core.commands.append(
            StartTrial(
                trial.trial_id, trial.placement.lanes, iterations=iterations, checkpoint=trial.residence.checkpoint
            )
        )

    def _resume(self, trial: TrialRecord) -> None:
        core = self._core
        core.lanes.remove_resident(trial.placement.lanes[0], trial.trial_id)
        trial.residence.lane = trial.residence.device = None
        trial.placement.launched, trial.progress.granted = (
            True,
            trial.progress.budget,
        )  # no call waits: its lane was told of them all
        core.commands.append(RunIteration(trial.trial_id, trial.placement.lanes, trial.progress.left))
        core.set_state(trial, TrialState.RUNNING, "resumed where it was")
        core.report_start(trial)

    def started(self, event: TrialStarted) -> None:
        """STARTING -> RUNNING."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if trial is None or trial.state is not TrialState.STARTING or event.lane_id != trial.placement.lanes[0]:
            return
        if event.iteration > trial.progress.done:
            raise core.error(
                trial, f"started at iteration {event.iteration}, beyond its checkpoint's {trial.progress.done}"
            )
        core.measuring.observe_start(trial, event.seconds)
        trial.progress.granted -= trial.progress.done - event.iteration
        trial.residence.checkpoint_is_current &= event.iteration == trial.progress.done
        trial.progress.done = event.iteration
        core.set_state(trial, TrialState.RUNNING, f"started at iteration {event.iteration}")
        core.report_start(trial)
        if trial.progress.done >= trial.progress.budget and not trial.stopping:
            self.finish(trial)  # it lost its lane after its last iteration, or was woken
        else:
            self._calls.deliver(trial)
            core.top_up(trial)

    def saved(self, event: TrialSaved) -> None:
        """Notes a checkpoint, and lets a trial go on that waited for it."""
        trial = self._residency.saved(event)
        if trial is not None:
            self.launch_when_ready(trial)

    # -- iterate -------------------------------------------------------------------------------------------

    def iteration_done(self, event: IterationDone) -> None:
        """Books an iteration; ends the trial if it was the last."""
        core = self._core
        trial = core.trials.get(event.trial_id)
        if trial is None or not trial.placement.launched or trial.state is TrialState.STARTING:
            return
        if event.lane_id == trial.placement.hosts[0]:
            trial.placement.lost_lanes.clear()
        elif event.lane_id not in trial.placement.lost_lanes:
            return  # it has left that lane, or is led by another one: rank 0 reports for all
        progress = event.iteration - trial.progress.done
        if progress != 1 and not (progress == 0 and event.finished):
            raise core.error(trial, f"reports iteration {event.iteration} after {trial.progress.done}")
        trial.progress.done, trial.residence.checkpoint_is_current = event.iteration, False
        trial.progress.granted = max(
            trial.progress.granted, trial.progress.done
        )  # by a lane that is gone it may have been asked for more
        if progress:
            self._learn(trial, event)
            self._report(trial, event)
        if event.finished:
            trial.progress.finished_early, trial.progress.budget = True, trial.progress.done
            self._residency.forget_later_checkpoints(trial)
        core.allocations.update_work(trial)
        if trial.calls:
            self._calls.deliver(trial)  # some wait until it is as far as it was before it lost its lane
            core.top_up(trial)
        if trial.progress.done < trial.progress.budget or trial.stopping or trial.preempting:
            return
        if trial.placement.move is not None:
            if trial.placement.move.stage is not Stage.WARMING:
                return  # it ends when it has answered
            self._resizing.call_off(trial)
        self.finish(trial)

    def _learn(self, trial: TrialRecord, event: IterationDone) -> None:
        if not trial.pace.disturbed and trial.state is TrialState.RUNNING:
            self._core.measuring.observe(trial, event.seconds, event.memory, event.busy)
        elif event.memory is not None:
            self._core.measuring.observe_memory(trial, event.memory)
        trial.pace.disturbed = False

    def _report(self, trial: TrialRecord, event: IterationDone) -> None:
        if event.iteration <= trial.progress.reported or trial.stopping:
            return
        core, move = self._core, trial.placement.move
        trial.progress.reported = event.iteration
        devices = tuple([core.lanes[lane_id].device_id for lane_id in trial.placement.hosts])
        width = trial.placement.width if move is None or move.called_off else move.old_width
        core.commands.append(
            Report(
                trial.trial_id,
                trial.group_id,
                iteration=event.iteration,
                metrics=event.metrics,
                seconds=event.seconds,
                width=width,
                device_ids=devices,
                at=event.at,
            )
        )

    def finish(self, trial: TrialRecord) -> None:
        """RUNNING -> DONE. Its state stays resident in its first lane."""
        core, lanes = self._core, trial.placement.lanes
        core.release(trial)
        core.drain(trial, lanes[1:])
        core.end(trial, TrialState.DONE, f"done after {trial.progress.done} iterations")
        self._residency.keep(trial, lanes[0])

    # -- make way ------------------------------------------------------------------------------------------

    def preempt(self, trial: TrialRecord, successor: TrialRecord | None = None) -> None:
        """Has a trial pause after its iteration, and go on later, where it is if that is free.

        Args:
            trial: one that runs.
            successor: the trial that is to run in its place; ``None`` if it hinders its neighbours more than it gets
                done, and leaves the device to them.
        """
        core = self._core
        trial.preempting = True
        core.commands.append(Pause(trial.trial_id, trial.placement.lanes))
        if successor is not None:
            trial.successor = successor.row
            core.log(trial, f"is to make way for {successor.trial_id!r}")
            return
        core.log(trial, f"is to make way: {core.estimates.co_residents(trial)} on a device are too many")

    def paused(self, event: TrialPaused) -> bool:
        """Queues a trial that was to make way; returns whether it was that."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if trial is None or not trial.preempting:
            return False
        successor, trial.preempting, trial.successor = trial.successor, False, None
        if trial.stopping:
            return True
        if event.iteration != trial.progress.done:
            raise core.error(trial, f"paused at iteration {event.iteration} after {trial.progress.done}")
        if trial.progress.done >= trial.progress.budget:
            self.finish(trial)
            return True
        (lane_id,) = trial.placement.lanes
        core.release(trial)
        self._residency.keep(trial, lane_id)
        if successor is None:
            core.enqueue(trial, "made way")
        else:
            core.queue_again(trial, "made way")
            self._take_over(successor, core.lanes[lane_id].device_id)
        return True

    def _take_over(self, row: int, device: int) -> None:
        """Starts the trial for which another one made way, if it still waits."""
        scheduling = self._core.scheduling
        if row in scheduling.queue and scheduling.start_on(self._core.trials.by_row[row], device):
            self.start(self._core.trials.by_row[row])

    # -- stop ----------------------------------------------------------------------------------------------

    def stop(self, trial: TrialRecord) -> None:
        """Has a trial stop, in whatever state it is."""
        core = self._core
        if trial.stopping or trial.state in (TrialState.STOPPED, TrialState.FAILED):
            return
        if trial.placement.launched:
            if trial.placement.move is not None and trial.placement.move.stage is not Stage.MOVING:
                self._resizing.call_off(trial)
            trial.placement.stopping_lanes = set(trial.placement.lanes)
            core.commands.append(StopTrial(trial.trial_id, trial.placement.lanes))
            core.log(trial, "is to stop")
            return
        if trial.state is TrialState.QUEUED:
            core.unqueue(trial)
        elif trial.state is TrialState.STARTING:
            core.release(trial)
        self._residency.drop(trial)
        when = "after it was done" if trial.state is TrialState.DONE else "before it started"
        core.end(trial, TrialState.STOPPED, f"stopped {when}")

    def forget(self, trial: TrialRecord) -> None:
        """Drops a trial that has ended; what its lane still says of it is no news."""
        core = self._core
        self._residency.drop(trial)
        core.refuse_calls(trial)
        core.trials.remove(trial)
        group = core.groups[trial.group_id]
        del group.trial_ids[trial.trial_id]
        group.past_iterations += trial.progress.done
        if trial.outcome != "PAUSED":  # else it is counted when it comes back
            group.past[trial.outcome or trial.state.value] += 1
        core.forgotten.add(trial.trial_id)

    def released(self, event: TrialReleased) -> None:
        """Takes the news that a trial has left a lane."""
        core = self._core
        if core.lanes.drained(event.lane_id, event.trial_id):
            self.lane_usable(event.lane_id)
            return
        trial = core.trials.get(event.trial_id)
        if trial is not None and event.lane_id in trial.placement.stopping_lanes:
            self.left(trial, event.lane_id, "stopped")
            return
        if event.lane_id in core.lanes and event.trial_id in core.lanes[event.lane_id].reserved:
            core.lanes.remove_resident(event.lane_id, event.trial_id)  # a resident that was let go
            core.changed = True

    def left(self, trial: TrialRecord, lane_id: int, why: str) -> None:
        """One of the lanes of a trial that is being stopped is rid of it."""
        trial.placement.stopping_lanes.discard(lane_id)
        if not trial.placement.stopping_lanes:
            self._core.release(trial)
            self._core.end(trial, TrialState.STOPPED, why)

    def lane_usable(self, lane_id: int) -> None:
        """Has the trial that waits for a lane go on."""
        holder = self._core.lanes[lane_id].trial_id
        if holder is not None:
            trial = self._core.trials[holder]
            if trial.state is TrialState.RESIZING:
                self._resizing.pause_when_ready(trial)
            else:
                self.launch_when_ready(trial)
