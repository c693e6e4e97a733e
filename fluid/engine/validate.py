"""What is always true of the engine between two events. Tests call it after every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fluid.engine.core import EngineError
from fluid.engine.records import LaneRecord, Stage, TrialRecord
from fluid.engine.state import EngineState
from fluid.planning.runtime_model import residents_at
from fluid.trialgroup import TrialState

_ROUNDING = 1e-6


def validate_state(state: EngineState) -> None:
    """Checks every invariant.

    Raises:
        EngineError: names all that are broken, with the stories of the trials concerned.
    """
    broken = [*_devices(state), *_groups(state), *_queue(state), *_work(state)]
    for lane in state.lanes:
        broken += [f"lane {lane.lane_id}: {what}" for what in _lane(state, lane)]
    for trial in state.trials.values():
        wrong = list(_trial(state, trial))
        if wrong:
            broken += [f"trial {trial.trial_id!r} ({trial.state.value}): {what}" for what in wrong]
            broken += [f"    {at:.3f} s  {text}" for at, text in trial.story]
    if broken:
        raise EngineError("broken invariants:\n" + "\n".join(broken))


def _devices(state: EngineState) -> Iterator[str]:
    """No device is over c, or was over its memory when trials were let on; what is held adds up.

    A need that grew since may exceed it, with neighbours that were there before.
    """
    occupancy, records = state.occupancy, state.trials.by_row
    ghosts = {
        trial.placement.move.old_devices_row: trial
        for trial in state.trials.values()
        if trial.placement.move is not None
    }
    on_devices: Counter[int] = Counter()
    for device, rows in occupancy.residents.items():
        on_devices.update(rows)
        if len(set(rows)) < len(rows):
            yield f"device {device}: a trial is on it twice"
        held = [records[row] if row in records else ghosts[row] for row in rows if row in records or row in ghosts]
        if len(held) < len(rows):
            yield f"device {device}: held by a ghost of nobody"
        if len(rows) > occupancy.limit(device):
            yield f"device {device}: {len(rows)} trials, and {occupancy.limit(device)} tolerated"
        usable, filled = state.memory.usable_bytes(device), state.memory.placed_bytes(device)
        if usable is not None and filled > usable * (1.0 + _ROUNDING) and len(rows) > 1:
            yield f"device {device}: {filled:.0f} bytes held, and {usable:.0f} usable"
        kept = sum(sum(lane.reserved.values()) for lane in state.lanes.on(device))
        reserved = state.memory.reserved.get(device, 0.0)
        if abs(kept - reserved) > _ROUNDING * max(1.0, kept):
            yield f"device {device}: {reserved} bytes reserved, and residents hold {kept}"
        yield from _lane_bytes(state, device)
        yield from _kept_bytes(state, device)
    for row, devices in occupancy.held.items():
        if on_devices[row] != len(devices):
            yield f"row {row} holds {devices} and is on {on_devices[row]} devices"
    free = sum(not rows for rows in occupancy.residents.values())
    if free != occupancy.free_count:
        yield f"{free} devices are idle, and {occupancy.free_count} are said to be"
    if set(occupancy.residents) != {device.index for device in state.occupancy.devices}:
        yield "placement and scheduling know different devices"


def _lane_bytes(state: EngineState, device: int) -> Iterator[str]:
    """All lanes but one count, whether or not trials run in them."""
    own = sum(lane.own_bytes for lane in state.lanes.on(device))
    counted = state.memory.lane_bytes(device, 0)
    if abs(max(0.0, own - state.lanes.usual_bytes) - counted) > _ROUNDING * max(1.0, own):
        yield f"device {device}: its lanes take {own:.0f} bytes, and {counted:.0f} are counted"


def _kept_bytes(state: EngineState, device: int) -> Iterator[str]:
    """A device keeps states that can be fetched back only while all there is fits."""
    lanes = state.lanes.on(device)
    usable = state.memory.usable_bytes(device)
    if usable is None:
        return
    kept = {
        name: state.trials[name] for lane in lanes for name in lane.residents if not state.trials[name].residence.saving
    }
    held = {name: memory for lane in lanes for name, memory in lane.reserved.items()}
    taken = state.memory.taken_bytes(device) - sum(memory for name, memory in held.items() if name not in kept)
    idle = (TrialState.DONE, TrialState.QUEUED)
    for name, trial in kept.items():
        could_go = trial.spec.can_save and trial.state in idle and not trial.calls
        if taken > usable * (1.0 + _ROUNDING) and could_go and held.get(name, 0.0) > 0.0:
            yield f"device {device}: {taken:.0f} bytes taken, {usable:.0f} usable, and the state of {name!r} is kept"


def _groups(state: EngineState) -> Iterator[str]:
    for group in state.groups.values():
        unended = sum(not state.trials[trial_id].state.ended for trial_id in group.trial_ids)
        if group.open != unended:
            yield f"group {group.group_id!r}: {group.open} trials open, and {unended} have not ended"


def _queue(state: EngineState) -> Iterator[str]:
    """Who waits is QUEUED and either has a width and a place in the queue, or neither."""
    scheduling = state.scheduling
    queued = set(scheduling.queue)
    arrivals = {trial.row for trial in state.arrivals}
    waiting = {trial.row for trial in state.trials.values() if trial.state is TrialState.QUEUED}
    if len(queued) != len(scheduling.queue):
        yield "the queue does not know its length"
    if queued & arrivals:
        yield f"rows {queued & arrivals} arrive though they are in the queue"
    if queued | arrivals != waiting:
        yield f"rows {queued | arrivals} wait, and {waiting} are QUEUED"
    if arrivals and state.occupancy:
        yield "trials arrived, and were not planned"
    running = {
        trial.row
        for trial in state.trials.values()
        if trial.state is TrialState.STARTING or trial.state is TrialState.RUNNING
    }
    planned = set(state.allocations.running)
    if running != planned:
        yield f"rows {planned} are planned as running, and {running} are"


def _work(state: EngineState) -> Iterator[str]:
    known, total = state.allocations.work.by_row, state.allocations.work.total
    expected = {
        trial.row for trial in state.trials.values() if trial.state.holds_devices or trial.row in state.scheduling.queue
    }
    if known.keys() != expected:
        yield f"work is known of rows {set(known)}, and {expected} run or wait"
    if abs(total - sum(known.values())) > _ROUNDING * max(1.0, total):
        yield f"work adds up to {sum(known.values())}, and {total} is said"


def _lane(state: EngineState, lane: LaneRecord) -> Iterator[str]:
    if lane.device_id not in state.occupancy.residents:
        yield f"is on device {lane.device_id}, which is gone"
    if lane.trial_id is not None:
        holder = state.trials[lane.trial_id]
        places = (
            holder.placement.lanes
            if holder.placement.move is None
            else (*holder.placement.lanes, *holder.placement.move.old_lanes)
        )
        if lane.lane_id not in places:
            yield f"says that {lane.trial_id!r} runs there, which does not"
    if not lane.ready and (lane.residents or lane.draining or lane.reserved):
        yield "keeps something though it is not ready"
    for trial_id in lane.residents:
        if state.trials[trial_id].residence.lane != lane.lane_id:
            yield f"keeps {trial_id!r}, which is not there"
    if lane.own_bytes < 0.0 or any(memory < 0.0 for memory in lane.reserved.values()):
        yield f"reserves {lane.reserved}, and {lane.own_bytes} for itself"


def _trial(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    yield from _progress(trial)
    yield from _place(state, trial)
    if trial.calls or trial.restored_for_call:
        yield from _calls(trial)
    if trial.placement.move is not None:
        yield from _move(state, trial)
    if (trial.placement.move is not None) != (trial.state is TrialState.RESIZING):
        yield "is being resized, or RESIZING, but not both"
    if trial.residence.checkpoint_is_current and (
        trial.residence.checkpoint is None or trial.residence.checkpoint.iteration != trial.progress.done
    ):
        yield f"its state after {trial.progress.done} iterations is taken to be that of {trial.residence.checkpoint}"
    if trial.residence.lane is not None:
        if trial.residence.lane not in state.lanes:
            yield f"its state is in lane {trial.residence.lane}, which is gone"
        else:
            lane = state.lanes[trial.residence.lane]
            if trial.trial_id not in lane.residents or lane.device_id != trial.residence.device:
                yield f"its state is in lane {trial.residence.lane}, which does not know it"
        if trial.placement.launched or trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED:
            yield "runs or has ended, and its state is kept"
    elif trial.residence.device is not None or trial.residence.saving:
        yield "is said to have a state in a lane"
    if trial.residence.given_up and (trial.spec.can_save or not trial.state.ended):
        yield "goes on though its state was given up"


def _progress(trial: TrialRecord) -> Iterator[str]:
    if not 0 <= trial.progress.done <= trial.progress.budget:
        yield f"{trial.progress.done} iterations done, of {trial.progress.budget}"
    if trial.progress.reported > trial.progress.budget and not trial.progress.finished_early:
        yield f"iteration {trial.progress.reported} reported, of {trial.progress.budget}"
    if trial.placement.launched and not trial.progress.done <= trial.progress.granted <= max(
        trial.progress.budget, trial.progress.granted * trial.progress.finished_early
    ):
        yield f"{trial.progress.done} done, asked up to {trial.progress.granted} of {trial.progress.budget}"
    if trial.preempting and trial.state is not TrialState.RUNNING:
        yield "is to make way, and does not run"
    if trial.successor is not None and not trial.preempting:
        yield f"has row {trial.successor} for a successor, and is not to make way"
    at_work = trial.state is TrialState.RUNNING and not trial.stopping and not trial.preempting
    if at_work and trial.progress.granted < trial.limit:
        yield f"asked up to {trial.progress.granted} only, of {trial.limit}"
    if trial.state is TrialState.DONE and trial.progress.done < trial.progress.budget:
        yield f"{trial.progress.done} of {trial.progress.budget} done"


def _calls(trial: TrialRecord) -> Iterator[str]:
    """Calls are made in order, where the trial's state is, and none waits without need."""
    if trial.restored_for_call and trial.state.ended:
        yield "ended, and was woken"
    made = [call for call in trial.calls if call.lane_id is not None]
    waiting = trial.calls[len(made) :]
    if any(call.lane_id is not None for call in waiting):
        yield "a call was made before an older one"
    if (
        not trial.progress.finished_early
        and sorted(trial.calls, key=lambda call: (call.after, call.before)) != trial.calls
    ):
        yield "later calls wait for less than older ones"
    if trial.calls and (trial.state in (TrialState.STOPPED, TrialState.FAILED) or trial.residence.given_up):
        yield "will not run again, and calls wait"
    place = trial.residence.lane if trial.residence.lane is not None else next(iter(trial.placement.hosts), None)
    if any(call.lane_id != place for call in made):
        yield f"calls were made in lanes other than {place}"
    if (
        made
        and trial.placement.move is not None
        and trial.placement.move.stage is Stage.MOVING
        and not trial.placement.move.after_loss
    ):
        yield "moves before calls were answered"
    if trial.state is TrialState.DONE and (waiting or trial.residence.saving):
        yield "its state is leaving, or has left, though it is to be called"
    at_work = trial.state is TrialState.RUNNING and not trial.stopping
    able = at_work or (trial.residence.lane is not None and not trial.residence.saving)
    if able and waiting and trial.progress.done >= min(waiting[0].after, trial.progress.budget):
        yield "a call waits that could be made"


def _place(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    occupancy = state.occupancy
    held = occupancy.held.get(trial.row, ())
    if not trial.state.holds_devices:
        if held or trial.placement.lanes or trial.placement.launched or trial.placement.stopping_lanes:
            yield f"holds devices {held} and lanes {trial.placement.lanes}"
        return
    if len(held) != max(1, round(trial.placement.width)):
        yield f"width {trial.placement.width:g} and devices {held}"
    if any(lane not in state.lanes for lane in trial.placement.lanes):
        yield f"runs in lanes {trial.placement.lanes}, of which some are gone"
        return
    if tuple(state.lanes[lane].device_id for lane in trial.placement.lanes) != held:
        yield f"runs in lanes {trial.placement.lanes} and holds devices {held}"
    if any(state.lanes[lane].trial_id != trial.trial_id for lane in trial.placement.lanes):
        yield f"runs in lanes {trial.placement.lanes}, which others hold"
    if (
        trial.placement.launched
        and trial.placement.move is None
        and not all(state.lanes[lane].usable for lane in trial.placement.lanes)
    ):
        yield f"runs in lanes {trial.placement.lanes}, of which some are not ready"
    if not trial.placement.launched and trial.state is not TrialState.STARTING:
        yield "runs though nobody told it to"
    if trial.row in state.clearing and (trial.placement.launched or trial.state is not TrialState.STARTING):
        yield "waits for others to leave, and does not wait"
    if not trial.placement.stopping_lanes <= set(trial.placement.lanes):
        yield f"is to leave lanes {trial.placement.stopping_lanes}"
    if (
        trial.limits.packing_cap is not None
        and not trial.stopping
        and occupancy.limit(held[0]) > max(trial.limits.packing_cap, residents_at(trial.placement.width))
    ):
        yield f"tolerates {trial.limits.packing_cap}, and device {held[0]} {occupancy.limit(held[0])}"


def _move(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    move, occupancy = trial.placement.move, state.occupancy
    assert move is not None
    left = tuple(device for device in move.old_devices if device not in occupancy.held[trial.row])
    old_devices_row = occupancy.held.get(move.old_devices_row, ())
    if old_devices_row != (() if move.called_off else left):
        yield f"leaves devices {left}, and its ghost holds {old_devices_row}"
    if move.called_off and (move.stage is not Stage.PAUSING or trial.placement.lanes != move.old_lanes):
        yield "was to stay where it was"
    if any(lane not in state.lanes for lane in move.old_lanes) and not trial.stopping:
        yield f"comes from lanes {move.old_lanes}, of which some are gone"
