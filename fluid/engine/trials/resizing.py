"""RUNNING <-> RESIZING: a running trial goes to another width between two iterations.

The new devices are reserved and their lanes warmed while the trial runs on; then it is paused, moved, and runs again.
Until it has been moved, the resize can be called off, which costs next to nothing. A trial that loses some of its lanes
is resized onto the others.
"""

from __future__ import annotations

from dataclasses import replace

from fluid.engine.commands import Pause, Resize, StopTrial
from fluid.engine.core import SessionState
from fluid.engine.events import PausePurpose, ResizeDone, TrialPaused
from fluid.engine.records import Move, Stage, TrialRecord
from fluid.engine.trials.calls import Calls
from fluid.trialgroup import TrialState


class Resizing:
    """The transitions of a resize."""

    def __init__(self, core: SessionState, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    def begin(self, trial: TrialRecord, width: float, device: int | None = None) -> None:
        """RUNNING -> RESIZING: reserves the new devices and warms their lanes.

        Args:
            trial: a trial that runs; one that is being resized already is left to that.
            width: its new width.
            device: the idle device that it goes to, if it is still idle; ``None`` for any devices of that width.
        """
        core, occupancy, place = self._core, self._core.occupancy, trial.placement
        if trial.state is not TrialState.RUNNING:
            return
        need = core.estimates.need(trial)
        old_devices = occupancy.held[trial.row]
        # While others wait, a trial that is narrowed below its device lets them in; it does not join others elsewhere.
        stays = width < 1.0 and trial.width == 1.0 and bool(core.queue)
        allowed = core.scheduling.placing.allowed(trial) if core.scheduling.placing.restricts else None
        by_model = core.estimates.by_model(trial)
        devices: tuple[int, ...] | None
        if device is not None:
            devices = None if occupancy.residents[device] else (device,)
        else:
            devices = old_devices if stays else occupancy.devices_for(trial.row, width, need, allowed, by_model)
        if devices is not None and width > 1.0:
            part = core.estimates.fastest_part(trial, devices)
            if part != devices:
                devices, width = part, float(len(part))
                if part == old_devices or core.estimates.seconds_gained(trial, width, part) <= 0.0:
                    return  # it would wait for slower devices at each step
        if devices is None or (devices != old_devices and not trial.spec.can_save):
            return
        if devices == old_devices:
            core.allocations.allow_packing(trial, width)
            core.log(trial, f"lets others share its device, up to {round(1.0 / width)} at once")
            return
        if by_model is not None:
            there = by_model[occupancy.device(devices[0]).model]
            need = there.need
            width = max(width, 1.0 / there.packing) if width < 1.0 else width
        if device is not None:
            gain = core.estimates.seconds_gained_on(trial, device)
        else:
            gain = core.estimates.seconds_gained(trial, width, devices)
            if gain <= 0.0 and width > trial.width and occupancy.is_unlike:
                return  # planners do not know that the idle devices are slower than those that it has
        old_need, old_devices_row = core.memory.placed_need_of(trial.row), core.trials.new_row()
        beside = {row for index in (*old_devices, *devices) for row in occupancy.residents[index]} - {trial.row}
        stall, left = core.estimates.epsilon * (1 + len(beside)), max(0, trial.progress.left - 1)
        move = Move(place.lanes, old_devices, trial.width, old_devices_row, old_need, begun_at=core.now, gain=gain)
        move.stall_s, move.left = stall, left
        core.allocations.move(trial, devices, width, need, old_devices_row=old_devices_row)
        lane_of = dict(zip(old_devices, place.lanes, strict=True))
        new = [device for device in devices if device not in lane_of]
        lanes = core.lanes.acquire_all(new, trial, core.commands, core.policies.company_of(trial, new))
        lane_of.update(zip(new, [lane.lane_id for lane in lanes], strict=True))
        self._set_lanes(trial, tuple(lane_of[device] for device in devices))
        place.move = move
        core.resizing[trial.row] = trial
        why = f"from devices {list(old_devices)} to width {width:g} on {list(devices)}"
        core.set_state(trial, TrialState.RESIZING, why)
        self.pause_when_ready(trial)

    def pause_when_ready(self, trial: TrialRecord) -> None:
        """Pauses a trial that is being resized once the lanes it goes to are warm."""
        lanes, move = self._core.lanes, trial.placement.move
        if trial.state is not TrialState.RESIZING or move is None or move.stage is not Stage.WARMING:
            return
        new_lanes = trial.placement.lanes
        if all(lanes[lane_id].usable for lane_id in new_lanes):
            move.stage = Stage.PAUSING
            lanes.use(new_lanes)
            purpose = PausePurpose.RESIZE
            self._core.commands.append(Pause(trial.trial_id, move.old_lanes, purpose=purpose, next_lane_ids=new_lanes))

    def paused(self, event: TrialPaused) -> TrialRecord | None:
        """Moves a paused trial, or lets it stay; returns it if its budget is used up."""
        core = self._core
        trial = core.holder(event.trial_id, event.lane_id)
        if trial is None or trial.state is not TrialState.RESIZING:
            return None
        move, progress = trial.placement.move, trial.progress
        if move is None or move.stage is not Stage.PAUSING:
            return None
        if event.iteration != progress.done:
            core.distrust(trial, event.lane_id, f"paused at iteration {event.iteration} after {progress.done}")
            return None
        if progress.done >= progress.budget:
            self.call_off(trial, "it has ended")
            self._stay(trial)
            return trial
        if move.called_off:
            progress.grant(progress.done)  # the Pause cancelled the others
            self._stay(trial)
            return None
        move.stage = Stage.MOVING
        self._resize(trial, move, progress.grant(self._core.limit_of(trial)))
        return None

    def done(self, event: ResizeDone) -> TrialRecord | None:
        """RESIZING -> RUNNING; returns the trial if its budget is used up. A trial that is STOPPING stays so."""
        core = self._core
        trial = core.trials.get(event.trial_id)
        if trial is None:
            return None
        place, move = trial.placement, trial.placement.move
        if move is None or move.stage is not Stage.MOVING:
            return None
        if event.lane_id is not None and event.lane_id not in place.lanes:
            return None
        if not move.after_loss:
            core.measuring.observe_resize(event.seconds)
        core.watching.launched(trial, core.now, iterates=True)
        core.timing.invalidate(trial)
        core.allocations.release_old_devices(move)
        core.lanes.release(trial.trial_id, [lane_id for lane_id in move.old_lanes if lane_id not in place.lanes])
        place.move = None
        del core.resizing[trial.row]
        core.timing.invalidate(trial)
        core.allocations.mark_running(trial)
        core.note_resize(trial, move, event.seconds)
        core.changed |= bool(core.queue) or core.occupancy.free_count > 0
        if trial.state is TrialState.STOPPING:
            return None
        core.set_state(trial, TrialState.RUNNING, f"resized in {event.seconds:.3f} s")
        if trial.progress.done >= trial.progress.budget:
            return trial
        self._calls.deliver(trial)
        core.top_up(trial)
        return None

    def call_off(self, trial: TrialRecord, why: str) -> None:
        """Lets a trial that has not moved yet stay where it is, at the width it had; ``why`` is for people."""
        core, move = self._core, trial.placement.move
        if move is None or move.called_off:
            return
        planned = trial.width
        self._give_back(trial, move)
        core.note(trial, f"stays at width {move.old_width:g} instead of going to {planned:g}: {why}")
        if move.stage is Stage.WARMING:
            self._stay(trial)

    def stays(self, trial: TrialRecord, why: str) -> None:
        """Lets a trial that could not leave its lane go on there, or, if it was stopped meanwhile, stops it there."""
        core, move = self._core, trial.placement.move
        assert move is not None
        self._give_back(trial, move)
        core.note(trial, f"stays where it is: {why}")
        if trial.state is TrialState.STOPPING:
            self._end_move(trial)
            trial.placement.stopping_lanes = frozenset(move.old_lanes)
            core.commands.append(StopTrial(trial.trial_id, move.old_lanes))
            return
        trial.progress.grant(trial.progress.done)  # the Pause cancelled the others
        self._stay(trial)

    def refused(self, trial: TrialRecord, why: str) -> None:
        """Lets a trial stay where it is because a new lane could not set it up; it is not widened again."""
        assert trial.placement.move is not None
        trial.limits = replace(trial.limits, width_cap=max(1, round(trial.placement.move.old_width)))
        self.call_off(trial, f"it could not be set up on further devices: {why}")

    # -- losses --------------------------------------------------------------------------------------------

    def survivors(self, trial: TrialRecord, lane_id: int) -> tuple[int, ...]:
        """The lanes in which a trial can go on without a lost one: each of them has the trial's whole state."""
        if trial.state is not TrialState.RUNNING and trial.state is not TrialState.RESIZING:
            return ()
        place, move = trial.placement, trial.placement.move
        if move is None or move.stage is not Stage.MOVING:
            lanes = place.hosts
        else:
            lanes = place.lanes if set(place.lanes) <= set(move.old_lanes) else ()
        lanes = lanes if lane_id in lanes else ()
        known = self._core.lanes
        return tuple(other for other in lanes if other != lane_id and other in known and known[other].killing is None)

    def go_on_without(self, trial: TrialRecord, lane_id: int, reason: str) -> None:
        """Resizes a trial onto the lanes that are left of those it had, from the end of its last iteration."""
        core, place = self._core, trial.placement
        lanes = self.survivors(trial, lane_id)
        width = float(len(lanes))
        if place.move is not None and place.move.stage is not Stage.MOVING and not place.move.called_off:
            if place.lanes == lanes:
                width = trial.width  # less than 1 if it was to share that device, where others may be by now
            self._give_back(trial, place.move)
        place.preemption = None  # The loss answers a Pause as well.
        core.timing.invalidate(trial)
        devices = tuple(core.lanes[other].device_id for other in lanes)
        need = core.memory.need_of(trial.row)
        core.allocations.move(trial, devices, width, need)
        move = place.move
        if move is None or move.stage is not Stage.MOVING:
            move = place.move = Move(lanes, devices, width, core.trials.new_row(), need, Stage.MOVING)
        else:
            left = dict(zip(move.old_lanes, move.old_devices, strict=True))
            left.pop(lane_id)
            move.old_lanes, move.old_devices, move.old_width = tuple(left), tuple(left.values()), float(len(left))
        move.after_loss = True
        place.lost_lanes |= {lane_id}
        if any(call.lane_id == lane_id for call in trial.calls):
            self._calls.recall(trial)  # first, as a call that waits bounds how far the trial is told to run
        self._set_lanes(trial, lanes)
        core.resizing[trial.row] = trial
        why = f"goes on without lane {lane_id}, on devices {list(devices)}: {reason}"
        core.tell(trial, why)
        if trial.state is TrialState.RESIZING:
            core.log(trial, why)
        else:
            core.set_state(trial, TrialState.RESIZING, why)
        self._resize(trial, move, trial.progress.grant(max(trial.progress.done, self._core.limit_of(trial))))

    def _resize(self, trial: TrialRecord, move: Move, iterations: int) -> None:
        """Tells a trial's lanes to bring it to its new ones."""
        lanes, done = trial.placement.lanes, trial.progress.done
        self._core.watching.answered(trial, self._core.now)
        trial.placement.iterates = False
        self._core.commands.append(Resize(trial.trial_id, lanes, move.old_lanes, iterations=iterations, done=done))

    def _give_back(self, trial: TrialRecord, move: Move) -> None:
        """Gives a trial that has not moved the lanes and devices that it had."""
        lanes = [lane_id for lane_id in trial.placement.lanes if lane_id not in move.old_lanes]
        self._core.lanes.release(trial.trial_id, lanes)
        self._core.allocations.move_back(trial, move)
        self._set_lanes(trial, move.old_lanes)
        move.called_off = True
        self._core.changed = True

    def _set_lanes(self, trial: TrialRecord, lanes: tuple[int, ...]) -> None:
        """Gives a trial lanes of the devices that it was just given."""
        trial.placement.lanes = lanes
        for placed in self._core.policies.placed:  # When devices are given, the ledger forgets with whom it shares one.
            placed(trial)

    def give_way(self) -> bool:
        """Calls off the latest widening that has not happened yet, so that a queued trial gets its devices.

        Returns:
            Whether there was one.
        """
        for trial in reversed(self._core.resizing.values()):
            move = trial.placement.move
            if move is None or move.called_off or move.stage is Stage.MOVING or trial.width < move.old_width:
                continue
            self.call_off(trial, "a queued trial needs the devices")
            return True
        return False

    def _stay(self, trial: TrialRecord) -> None:
        """RESIZING -> RUNNING where it was."""
        self._end_move(trial)
        self._core.set_state(trial, TrialState.RUNNING, "goes on at the width it had")
        for resized in self._core.policies.resized:
            resized(trial)
        self._calls.deliver(trial)
        self._core.top_up(trial)

    def _end_move(self, trial: TrialRecord) -> None:
        self._core.watching.answered(trial, self._core.now)
        trial.placement.move = None
        del self._core.resizing[trial.row]
        self._core.allocations.mark_running(trial)
