"""RUNNING <-> RESIZING: a running trial goes to another width between two iterations.

The new place is reserved and its lanes are warmed while the trial runs on; then it is paused, moved, and runs again.
Until it has been moved, the resize can be called off, which costs next to nothing.
"""

from __future__ import annotations

from fluid.engine.commands import Pause, Resize, RunIteration
from fluid.engine.core import Core
from fluid.engine.events import ResizeDone, TrialPaused
from fluid.engine.records import Move, Stage, TrialRecord, TrialState


class Resizing:
    """The transitions of a resize."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, trial: TrialRecord, width: float) -> None:
        """Reserves the new place and warms its lanes."""
        core, occupancy = self._core, self._core.scheduling.occupancy
        need = core.scheduling.need(trial)
        old_devices = occupancy.held[trial.row]
        # While others wait, a trial that is due less than its device lets them in; it does not go and join others.
        stays = width < 1.0 and trial.width == 1.0 and bool(core.scheduling.queue)
        devices = old_devices if stays else occupancy.devices_for(trial.row, width, need)
        if devices is None or (devices != old_devices and not trial.spec.can_save):
            return
        if devices == old_devices:
            core.scheduling.let_in(trial, width)
            core.tell(trial, f"lets others in, width {width:g}")
            return
        move = Move(trial.lanes, old_devices, trial.width, core.next_row(), occupancy.need_of(trial.row))
        occupancy.move(trial.row, devices, width, need, ghost=move.ghost)
        by_device = dict(zip(old_devices, trial.lanes, strict=True))
        trial.lanes = tuple(
            by_device[device]
            if device in by_device
            else core.lanes.acquire(device, trial.trial_id, core.commands).lane_id
            for device in devices
        )
        trial.move, trial.width = move, width
        core.resizing[trial.row] = trial
        core.scheduling.set_aside(trial)
        core.become(
            trial, TrialState.RESIZING, f"from devices {list(old_devices)} to width {width:g} on {list(devices)}"
        )
        self.pause_when_ready(trial)

    def pause_when_ready(self, trial: TrialRecord) -> None:
        """Interrupts the trial, once the lanes it goes to are ready."""
        lanes, move = self._core.lanes, trial.move
        if move is None or move.stage is not Stage.WARMING or trial.stopping:
            return
        if all(lanes[lane_id].usable for lane_id in trial.lanes):
            move.stage = Stage.PAUSING
            self._core.commands.append(Pause(trial.trial_id, move.old_lanes))

    def paused(self, event: TrialPaused) -> TrialRecord | None:
        """Moves a paused trial on, or back to work; returns it if it has done all it was to do."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if trial is None or trial.move is None or trial.move.stage is not Stage.PAUSING or trial.stopping:
            return None
        move = trial.move
        if event.iteration != trial.done:
            raise core.error(trial, f"paused at iteration {event.iteration} after {trial.done}")
        if trial.done >= trial.budget:
            self.call_off(trial)
            self._stay(trial)
            return trial
        trial.asked = trial.budget
        if move.called_off:
            core.commands.append(RunIteration(trial.trial_id, trial.lanes, trial.iterations_left))
            self._stay(trial)
            return None
        move.stage = Stage.MOVING
        core.commands.append(Resize(trial.trial_id, trial.lanes, move.old_lanes, trial.iterations_left))
        return None

    def done(self, event: ResizeDone) -> TrialRecord | None:
        """RESIZING -> RUNNING; returns the trial, unless it is being stopped."""
        core = self._core
        trial = core.trials.get(event.trial_id)
        if trial is None or trial.move is None or trial.move.stage is not Stage.MOVING:
            return None
        if event.lane_id is not None and event.lane_id not in trial.lanes:
            return None
        core.scheduling.profile.observe_resize(event.seconds)
        core.disturb(trial)
        self._leave_ghost(trial.move)
        core.lanes.release(lane_id for lane_id in trial.move.old_lanes if lane_id not in trial.lanes)
        trial.move = None
        del core.resizing[trial.row]
        core.disturb(trial)
        core.scheduling.enter(trial)
        core.become(trial, TrialState.RUNNING, f"resized in {event.seconds:.3f} s")
        scheduling = core.scheduling
        core.changed |= bool(scheduling.queue) or scheduling.occupancy.free_count > 0
        return trial if not trial.stopping else None

    def call_off(self, trial: TrialRecord) -> None:
        """Lets a trial that has not moved yet stay where it is, at the width it had."""
        core, move = self._core, trial.move
        if move is None or move.called_off:
            return
        occupancy = core.scheduling.occupancy
        core.lanes.release(lane_id for lane_id in trial.lanes if lane_id not in move.old_lanes)
        occupancy.release(trial.row)
        self._leave_ghost(move)
        occupancy.hold(trial.row, move.old_devices, move.old_width, move.old_need)
        trial.lanes, trial.width = move.old_lanes, move.old_width
        move.called_off = True
        core.changed = True
        core.tell(trial, "stays where it is")
        if move.stage is Stage.WARMING:
            self._stay(trial)

    def give_way(self) -> bool:
        """Calls off a widening that has not happened yet, so that a queued trial gets its devices.

        Returns:
            Whether there was one.
        """
        for trial in reversed(self._core.resizing.values()):
            move = trial.move
            if move is None or move.called_off or move.stage is Stage.MOVING or trial.width < move.old_width:
                continue
            self.call_off(trial)
            return True
        return False

    def _stay(self, trial: TrialRecord) -> None:
        trial.move = None
        del self._core.resizing[trial.row]
        self._core.scheduling.enter(trial)
        self._core.become(trial, TrialState.RUNNING, "goes on at the width it had")

    def _leave_ghost(self, move: Move) -> None:
        if move.ghost in self._core.scheduling.occupancy.held:
            self._core.scheduling.occupancy.release(move.ghost)
