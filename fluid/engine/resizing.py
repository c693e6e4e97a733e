"""RUNNING <-> RESIZING: a running trial goes to another width between two iterations.

The new place is reserved and its lanes are warmed while the trial runs on; then it is paused, moved, and runs again.
Until it has been moved, the resize can be called off, which costs next to nothing. A trial that loses some of its lanes
goes on in the others, by the same road.
"""

from __future__ import annotations

from fluid.engine.calls import Calls
from fluid.engine.commands import Pause, Resize
from fluid.engine.core import SessionState
from fluid.engine.events import ResizeDone, TrialPaused
from fluid.engine.records import Move, Stage, TrialRecord
from fluid.trialgroup import TrialState


class Resizing:
    """The transitions of a resize."""

    def __init__(self, core: SessionState, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    def begin(self, trial: TrialRecord, width: float) -> None:
        """Reserves the new place and warms its lanes."""
        core, occupancy = self._core, self._core.occupancy
        need = core.estimates.need(trial)
        old_devices = occupancy.held[trial.row]
        # While others wait, a trial that is due less than its device lets them in; it does not go and join others.
        stays = width < 1.0 and trial.placement.width == 1.0 and bool(core.scheduling.queue)
        devices = old_devices if stays else occupancy.devices_for(trial.row, width, need)
        if devices is None or (devices != old_devices and not trial.spec.can_save):
            return
        if devices == old_devices:
            core.allocations.allow_packing(trial, width)
            core.log(trial, f"lets others in, width {width:g}")
            return
        move = Move(
            trial.placement.lanes,
            old_devices,
            trial.placement.width,
            core.trials.new_row(),
            core.memory.placed_need_of(trial.row),
        )
        core.allocations.move(trial, devices, width, need, old_devices_row=move.old_devices_row)
        by_device = dict(zip(old_devices, trial.placement.lanes, strict=True))
        trial.placement.lanes = tuple(
            by_device[device]
            if device in by_device
            else core.lanes.acquire(device, trial.trial_id, core.commands).lane_id
            for device in devices
        )
        trial.placement.move = move
        core.resizing[trial.row] = trial
        core.set_state(
            trial, TrialState.RESIZING, f"from devices {list(old_devices)} to width {width:g} on {list(devices)}"
        )
        self.pause_when_ready(trial)

    def pause_when_ready(self, trial: TrialRecord) -> None:
        """Interrupts the trial, once the lanes it goes to are ready."""
        lanes, move = self._core.lanes, trial.placement.move
        if move is None or move.stage is not Stage.WARMING or trial.stopping:
            return
        if all(lanes[lane_id].usable for lane_id in trial.placement.lanes):
            move.stage = Stage.PAUSING
            self._core.commands.append(Pause(trial.trial_id, move.old_lanes, trial.placement.lanes))

    def paused(self, event: TrialPaused) -> TrialRecord | None:
        """Moves a paused trial on, or back to work; returns it if it has done all it was to do."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if (
            trial is None
            or trial.placement.move is None
            or trial.placement.move.stage is not Stage.PAUSING
            or trial.stopping
        ):
            return None
        move = trial.placement.move
        if event.iteration != trial.progress.done:
            raise core.error(trial, f"paused at iteration {event.iteration} after {trial.progress.done}")
        if trial.progress.done >= trial.progress.budget:
            self.call_off(trial)
            self._stay(trial)
            return trial
        if move.called_off:
            trial.progress.granted = trial.progress.done
            self._stay(trial)
            return None
        trial.progress.granted = trial.limit
        move.stage = Stage.MOVING
        iterations = trial.progress.granted - trial.progress.done
        core.commands.append(
            Resize(
                trial.trial_id, trial.placement.lanes, move.old_lanes, iterations=iterations, done=trial.progress.done
            )
        )
        return None

    def done(self, event: ResizeDone) -> TrialRecord | None:
        """RESIZING -> RUNNING; returns the trial if it has done all it was to do."""
        core = self._core
        trial = core.trials.get(event.trial_id)
        if trial is None or trial.placement.move is None or trial.placement.move.stage is not Stage.MOVING:
            return None
        if event.lane_id is not None and event.lane_id not in trial.placement.lanes:
            return None
        if not trial.placement.move.after_loss:
            core.measuring.observe_resize(event.seconds)
        core.invalidate_timing(trial)
        core.allocations.release_old_devices(trial.placement.move)
        core.lanes.release(
            lane_id for lane_id in trial.placement.move.old_lanes if lane_id not in trial.placement.lanes
        )
        trial.placement.move = None
        del core.resizing[trial.row]
        core.invalidate_timing(trial)
        core.allocations.mark_running(trial)
        core.set_state(trial, TrialState.RUNNING, f"resized in {event.seconds:.3f} s")
        core.note_resize(trial, event.seconds)
        core.changed |= bool(core.scheduling.queue) or core.occupancy.free_count > 0
        if trial.progress.done >= trial.progress.budget and not trial.stopping:
            return trial
        self._calls.deliver(trial)
        core.top_up(trial)
        return None

    def call_off(self, trial: TrialRecord) -> None:
        """Lets a trial that has not moved yet stay where it is, at the width it had."""
        core, move = self._core, trial.placement.move
        if move is None or move.called_off:
            return
        self._give_back(trial, move)
        core.log(trial, "stays where it is")
        if move.stage is Stage.WARMING:
            self._stay(trial)

    def refused(self, trial: TrialRecord, why: str) -> None:
        """Lets a trial stay where it is that could not be set up where it was to go; it is not widened any more."""
        assert trial.placement.move is not None
        trial.limits.width_cap = max(1, round(trial.placement.move.old_width))
        self._core.log(trial, f"could not be set up on further devices: {why}")
        self.call_off(trial)

    # -- losses --------------------------------------------------------------------------------------------

    def survivors(self, trial: TrialRecord, lane_id: int) -> tuple[int, ...]:
        """The lanes in which a trial can go on without one that is gone: those that have its state by themselves."""
        move = trial.placement.move
        if not trial.placement.launched or trial.stopping or trial.state is TrialState.STARTING:
            return ()
        if move is None or move.stage is not Stage.MOVING:
            lanes = trial.placement.hosts
        else:
            lanes = trial.placement.lanes if set(trial.placement.lanes) <= set(move.old_lanes) else ()
        lanes = lanes if lane_id in lanes else ()
        return tuple(other for other in lanes if other != lane_id and other in self._core.lanes)

    def go_on_without(self, trial: TrialRecord, lane_id: int, reason: str) -> None:
        """Has a trial go on in the lanes that are left of those it had, from the end of its last iteration."""
        core = self._core
        lanes = self.survivors(trial, lane_id)
        if (
            trial.placement.move is not None
            and trial.placement.move.stage is not Stage.MOVING
            and not trial.placement.move.called_off
        ):
            self._give_back(trial, trial.placement.move)
        core.invalidate_timing(trial)
        devices = tuple(core.lanes[other].device_id for other in lanes)
        need = core.memory.need_of(trial.row)
        core.allocations.move(trial, devices, float(len(lanes)), need)
        if trial.placement.move is None or trial.placement.move.stage is not Stage.MOVING:
            trial.placement.move = Move(lanes, devices, float(len(lanes)), core.trials.new_row(), need, Stage.MOVING)
        else:
            left = dict(zip(trial.placement.move.old_lanes, trial.placement.move.old_devices, strict=True))
            left.pop(lane_id)
            trial.placement.move.old_lanes, trial.placement.move.old_devices = tuple(left), tuple(left.values())
            trial.placement.move.old_width = float(len(left))
        trial.placement.move.after_loss = True
        trial.placement.lost_lanes.add(lane_id)
        if any(call.lane_id == lane_id for call in trial.calls):
            self._calls.recall(trial)  # before it is told how far to run: what comes after a call waits for it
        trial.placement.lanes = lanes
        trial.progress.granted = max(trial.progress.done, trial.limit)
        core.resizing[trial.row] = trial
        core.set_state(
            trial, TrialState.RESIZING, f"goes on without lane {lane_id}, on devices {list(devices)}: {reason}"
        )
        iterations = trial.progress.granted - trial.progress.done
        core.commands.append(
            Resize(
                trial.trial_id, lanes, trial.placement.move.old_lanes, iterations=iterations, done=trial.progress.done
            )
        )

    def _give_back(self, trial: TrialRecord, move: Move) -> None:
        """Leaves a trial that has not moved with the lanes and devices it has."""
        self._core.lanes.release(lane_id for lane_id in trial.placement.lanes if lane_id not in move.old_lanes)
        self._core.allocations.move_back(trial, move)
        trial.placement.lanes = move.old_lanes
        move.called_off = True
        self._core.changed = True

    def give_way(self) -> bool:
        """Calls off a widening that has not happened yet, so that a queued trial gets its devices.

        Returns:
            Whether there was one.
        """
        for trial in reversed(self._core.resizing.values()):
            move = trial.placement.move
            if move is None or move.called_off or move.stage is Stage.MOVING or trial.placement.width < move.old_width:
                continue
            self.call_off(trial)
            return True
        return False

    def _stay(self, trial: TrialRecord) -> None:
        trial.placement.move = None
        del self._core.resizing[trial.row]
        self._core.allocations.mark_running(trial)
        self._core.set_state(trial, TrialState.RUNNING, "goes on at the width it had")
        self._calls.deliver(trial)
        self._core.top_up(trial)
