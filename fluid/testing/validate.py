"""The engine's invariants, which hold between any two events. Tests check them after every one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from fluid.engine import tuning
from fluid.engine.core import EngineError, IterationDeadline
from fluid.engine.records import EndedTrial, LaneRecord, Stage, TrialRecord
from fluid.engine.trials.submissions import is_leaving
from fluid.measure.runtime_model import residents_at
from fluid.policies.engine import EngineState
from fluid.policies.owners.owners import is_by_itself
from fluid.trialgroup import TrialState

# -- validate waiting ----------------------------------------------------------------------------
#
# The engine's invariants of trials that wait: none waits in vain, and none for ever.


def waiting_problems(state: EngineState) -> Iterator[str]:
    """What is broken of them."""
    yield from _idle_devices(state)
    yield from _stalls(state)


def _idle_devices(state: EngineState) -> Iterator[str]:
    """No device is idle while a trial is queued that could start there."""
    occupancy = state.occupancy
    idle = [index for index, rows in occupancy.residents.items() if not rows and not occupancy.is_closed(index)]
    reserved = state.placing.reserved_devices
    for row in state.queue if idle else ():
        trial = state.trials.by_row[row]
        eligible = occupancy.eligible.of(trial.constraint)
        fitting = [at for at in idle if (eligible is None or at in eligible) and _could_start(state, trial, at)]
        if any(device in reserved for device in fitting) or trial.constraint in state.gangs.awaiting_faster_constraints:
            continue
        if fitting := _enough(state, trial, fitting):
            yield f"devices {fitting} are idle, and {trial.trial_id!r} of width {trial.width:g} waits"


def _could_start(state: EngineState, trial: TrialRecord, device: int) -> bool:
    """Whether memory, and the lane of a trial that cannot be saved, let it start on an idle device."""
    residence = trial.residence
    lane = None if residence.lane is None else state.lanes[residence.lane]
    if trial.pinned and lane is not None and (device not in lane.device_ids or lane.holders):
        return False
    own_state = 0.0
    stays = trial.width <= 1.0 or trial.spec.gang
    if lane is not None and device in lane.device_ids and not residence.saving and stays:
        own_state = state.lanes.kept_bytes(lane.lane_id, trial.trial_id)
    return state.memory.fits(device, state.estimates.need_on(trial, device), own_state=own_state)


def _stalls(state: EngineState) -> Iterator[str]:
    """While a trial waits that could have an idle device, something is to come that makes the engine look again.

    That is a tick, an alarm, or what a lane will say: one that runs a trial, comes, ends or gives up a state.
    """
    if state.drained or state.wants_tick or state.alarm_at is not None:
        return
    if any(not lane.ready or lane.draining or lane.dismissed or lane.killing for lane in state.lanes):
        return
    trials = state.trials.values()
    if any(trial.state.holds_devices or trial.residence.saving or _is_called(trial) for trial in trials):
        return
    occupancy = state.occupancy
    idle = {index for index in occupancy.residents if not occupancy.is_closed(index)}
    # A state that cannot be saved stays until its user lets the trial go on.
    idle -= {trial.residence.device for trial in trials if trial.held and not trial.spec.can_save}
    for row in state.queue:
        trial = state.trials.by_row[row]
        eligible = occupancy.eligible.of(trial.constraint)
        devices = _enough(state, trial, sorted(idle if eligible is None else idle & eligible))
        if devices and not state.awaits_devices(trial.trial_id):
            yield f"{trial.trial_id!r} waits, devices {devices} are idle, and nothing is to come"


def _enough(state: EngineState, trial: TrialRecord, devices: list[int]) -> list[int]:
    """Those of the devices among which there are as many as a trial needs, of one host for a gang; else none."""
    if trial.spec.gang:
        hosts = Counter(state.occupancy.device(device).host for device in devices)
        devices = [at for at in devices if hosts[state.occupancy.device(at).host] >= trial.width]
    return devices if len(devices) >= round(trial.width) else []


def _is_called(trial: TrialRecord) -> bool:
    return any(call.lane_id is not None for call in trial.calls)


# -- validate ------------------------------------------------------------------------------------


_ROUNDING = 1e-6


def validate_state(state: EngineState) -> None:
    """Checks every invariant.

    Raises:
        EngineError: some are broken; it names them, with the stories of the trials concerned.
    """
    broken = [*_devices(state), *_drains(state), *_groups(state), *_queue(state), *waiting_problems(state)]
    broken += [*_work(state), *_copies(state), *chain(*(policy.problems() for policy in state.policies))]
    broken += [f"lane {lane.lane_id}: {what}" for lane in state.lanes for what in _lane(state, lane)]
    for trial in state.trials.values():
        wrong = list(_trial(state, trial))
        if wrong:
            broken += [f"trial {trial.trial_id!r} ({trial.state.value}): {what}" for what in wrong]
            broken += [f"    {at:.3f} s  {text}" for at, text in trial.story]
    if broken:
        raise EngineError("broken invariants:\n" + "\n".join(broken))


def _devices(state: EngineState) -> Iterator[str]:
    """No device is over c, or was over its memory when trials were placed there; what is held adds up.

    A need that has grown since may exceed the memory. A trial that is stopped while it is narrowed stays where it was,
    and others may have joined it there.
    """
    occupancy, records = state.occupancy, state.trials.by_row
    moves = [trial.placement.move for trial in state.trials.values() if trial.placement.move is not None]
    known = records.keys() | {move.old_devices_row for move in moves}
    on_devices: Counter[int] = Counter()
    for device, rows in occupancy.residents.items():
        on_devices.update(rows)
        if len(set(rows)) < len(rows):
            yield f"device {device}: a trial is on it twice"
        if not known.issuperset(rows):
            yield f"device {device}: held by rows {set(rows) - known}, which are no trial's"
        stays = any(row in records and records[row].state is TrialState.STOPPING for row in rows)
        if len(rows) > occupancy.limit(device) and not stays:
            yield f"device {device}: {len(rows)} trials, and {occupancy.limit(device)} tolerated"
        usable, filled = state.memory.usable_bytes(device), state.memory.placed_bytes(device)
        if usable is not None and filled > usable and len(rows) > 1 and not stays:
            yield f"device {device}: {filled:.0f} bytes held, and {usable:.0f} usable"
        kept = sum(sum(lane.reserved.values()) for lane in state.lanes.on(device))
        reserved = state.memory.reserved.get(device, 0.0)
        if kept != reserved:
            yield f"device {device}: {reserved} bytes reserved, and residents hold {kept}"
        yield from _lane_bytes(state, device)
        yield from _kept_bytes(state, device)
    for row, devices in occupancy.held.items():
        if on_devices[row] != len(devices):
            yield f"row {row} holds {devices} and is on {on_devices[row]} devices"
    free = sum(not rows and not occupancy.is_closed(device) for device, rows in occupancy.residents.items())
    if free != occupancy.free_count:
        yield f"{free} devices are idle, and {occupancy.free_count} are counted"
    idle = {device for device, rows in occupancy.residents.items() if not rows and not occupancy.is_closed(device)}
    if state.demand.idle_since.keys() != idle:
        yield f"devices {idle} are idle, and {state.demand.idle_since} are known as such"
    if list(state.demand.idle_since.values()) != sorted(state.demand.idle_since.values()):
        yield f"idle devices are out of order: {state.demand.idle_since}"
    if set(occupancy.residents) != {device.index for device in state.occupancy.devices}:
        yield "occupancy lists residents of other devices than it has"


def _drains(state: EngineState) -> Iterator[str]:
    """What is on a device that drains is about to leave it: nothing starts there, and all that can be saved is."""
    for device in state.occupancy.residents:
        if not state.occupancy.is_closed(device) or device in state.retirements.devices:
            continue
        for row in state.occupancy.residents[device]:
            trial = state.trials.by_row.get(row)
            if trial is None or not trial.spec.can_save:
                continue
            place = trial.placement
            waits = trial.state is TrialState.STARTING and not place.launched
            if waits or (trial.state is TrialState.RUNNING and place.preemption is None):
                yield f"device {device} drains, and {trial.trial_id!r} stays there"
        for lane in state.lanes.on(device):
            for trial in map(state.trials.__getitem__, lane.residents):
                residence, called = trial.residence, any(call.lane_id is not None for call in trial.calls)
                if residence.saving or called or not trial.spec.can_save:
                    continue
                checkpoint = residence.checkpoint
                if not residence.checkpoint_is_current or checkpoint is None or checkpoint.in_memory:
                    yield f"device {device} drains, and keeps the state of {trial.trial_id!r} unsaved"


def _lane_bytes(state: EngineState, device: int) -> Iterator[str]:
    """All lanes but one count, whether or not trials run in them."""
    own = sum(lane.own_bytes for lane in state.lanes.on(device))
    counted = state.memory.lane_bytes(device, 0)
    if max(0.0, own - state.lanes.usual_bytes) != counted:
        yield f"device {device}: its lanes take {own:.0f} bytes, and {counted:.0f} are counted"


def _kept_bytes(state: EngineState, device: int) -> Iterator[str]:
    """A device keeps states that can be fetched back only while everything on it fits."""
    lanes = state.lanes.on(device)
    usable = state.memory.usable_bytes(device)
    if usable is None:
        return
    residents = [state.trials[name] for lane in lanes for name in lane.residents]
    kept = {trial.trial_id: trial for trial in residents if not trial.residence.saving}
    held = {name: memory for lane in lanes for name, memory in lane.reserved.items()}
    taken = state.memory.taken_bytes(device) - sum(memory for name, memory in held.items() if name not in kept)
    own = sum(lane.own_bytes for lane in lanes)
    ends = [
        lane.used and not lane.shared and not lane.holders and kept.keys().isdisjoint(lane.residents) for lane in lanes
    ]
    left = sum(lane.own_bytes for lane, is_ending in zip(lanes, ends, strict=True) if not is_ending)
    taken -= max(0.0, own - state.lanes.usual_bytes) - max(0.0, left - state.lanes.usual_bytes)
    idle = (TrialState.DONE, TrialState.QUEUED, TrialState.PAUSED)
    for name, trial in kept.items():
        could_go = trial.spec.can_save and trial.state in idle and not trial.calls
        if taken > usable and could_go and held.get(name, 0.0) > 0.0:
            yield f"device {device}: {taken:.0f} bytes taken, {usable:.0f} usable, and the state of {name!r} is kept"


def _groups(state: EngineState) -> Iterator[str]:
    for group in state.groups.values():
        unended = sum(not state.trials[trial_id].state.ended for trial_id in group.trial_ids)
        if group.open != unended:
            yield f"group {group.group_id!r}: {group.open} trials open, and {unended} have not ended"
        trials = [state.trials[trial_id] for trial_id in group.trial_ids]
        live = {trial.trial_id: trial for trial in trials if not trial.state.ended}
        ended = Counter(EndedTrial.of(trial) for trial in trials if trial.state.ended)
        if group.live != live or group.ended != ended:
            yield f"group {group.group_id!r}: {set(live)} live, {ended} ended; {set(group.live)}, {group.ended} known"


def _queue(state: EngineState) -> Iterator[str]:
    """A QUEUED trial has either a width and a place in the queue, or, while there is no device, neither."""
    queued = set(state.queue)
    counted, pinned = state.queue.unbound, sum(state.trials.by_row[row].pinned for row in queued)
    if sum(counted.values()) > len(queued) - pinned or not counted.keys() <= set(state.queue.widths()):
        yield f"{len(queued)} trials are queued, and {dict(counted)} count as demand"
    arrivals = {trial.row for trial in state.arrivals}
    waiting = {trial.row for trial in state.trials.values() if trial.state is TrialState.QUEUED}
    if len(queued) != len(state.queue):
        yield "the queue does not know its length"
    if queued & arrivals:
        yield f"rows {queued & arrivals} arrive though they are in the queue"
    if queued | arrivals != waiting:
        yield f"rows {queued | arrivals} are queued, and trials {waiting} are QUEUED"
    if arrivals and state.occupancy:
        yield "trials arrived and were not planned"
    holding = [trial for trial in state.trials.values() if trial.state.holds_devices]
    running = {trial.row for trial in holding if trial.placement.move is None}
    planned = set(state.allocations.running)
    if running != planned:
        yield f"rows {planned} are planned as running, and {running} are"


def _work(state: EngineState) -> Iterator[str]:
    known, total = state.allocations.work.by_row, state.allocations.work.total
    expected = {trial.row for trial in state.trials.values() if trial.state.holds_devices or trial.row in state.queue}
    if known.keys() != expected:
        yield f"work left is known of rows {set(known)}, and {expected} run or wait"
    if abs(total - sum(known.values())) > _ROUNDING * max(1.0, total):
        yield f"work left adds up to {sum(known.values())}, and {total} is counted"


def _copies(state: EngineState) -> Iterator[str]:
    """Every copy of a width, and of the work left, says the same as the trial's record."""
    records, work, running = state.trials.by_row, state.allocations.work.by_row, state.allocations.snapshot()
    columns = (column.tolist() for column in (running.rows, running.widths, running.remaining, running.speed))
    for row, *seen in zip(*columns, strict=True):
        speed = state.estimates.speed(records[row], state.occupancy.held[row])
        if seen != (known := [records[row].width, work[row], speed]):
            yield f"row {row}: width, work and speed are {known}; planners see {seen}"
    for row in state.queue:
        if state.queue.width(row) != records[row].width:
            yield f"row {row}: width {records[row].width:g}, and it is queued for {state.queue.width(row):g}"
    for device, rows in state.occupancy.residents.items():
        tolerated = [residents_at(records[row].width) for row in rows if row in records]
        most = min([*tolerated, state.occupancy.caps.get(device, float("inf"))])
        if rows and len(tolerated) == len(rows) and state.occupancy.limit(device) != most:
            yield f"device {device} tolerates {state.occupancy.limit(device)}, and its trials {most}"


def _lane(state: EngineState, lane: LaneRecord) -> Iterator[str]:
    if not state.occupancy.residents.keys() >= set(lane.device_ids):
        yield f"is on devices {lane.device_ids}, of which some are gone"
    for trial_id in lane.holders:
        place = state.trials[trial_id].placement
        if lane.lane_id not in place.lanes and (place.move is None or lane.lane_id not in place.move.old_lanes):
            yield f"is held by {trial_id!r}, which runs elsewhere"
    if not lane.ready and (lane.residents or lane.draining or lane.reserved):
        yield "keeps something though it is not warm"
    for trial_id in lane.residents:
        if state.trials[trial_id].residence.lane != lane.lane_id:
            yield f"keeps {trial_id!r}, whose state is elsewhere"
    if lane.own_bytes < 0.0 or any(memory < 0.0 for memory in lane.reserved.values()):
        yield f"reserves {lane.reserved}, and {lane.own_bytes} for itself"


def _trial(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    yield from _flags(trial)
    yield from _progress(state, trial)
    yield from _place(state, trial)
    yield from _residence(state, trial)
    if trial.calls or trial.restored_for_call:
        yield from _calls(trial)
    if trial.placement.move is not None:
        yield from _move(state, trial)


def _flags(trial: TrialRecord) -> Iterator[str]:
    """What the record holds agrees with the trial's state."""
    place, state = trial.placement, trial.state
    if state is TrialState.RESIZING and place.move is None:
        yield "has no resize under way"
    if place.move is not None and state is not TrialState.RESIZING and state is not TrialState.STOPPING:
        yield "has a resize under way"
    if bool(place.stopping_lanes) != (state is TrialState.STOPPING):
        yield f"was stopped in lanes {place.stopping_lanes}"
    if place.preemption is not None and state is not TrialState.RUNNING and state is not TrialState.STOPPING:
        yield "is preempted, and does not run"
    if place.launched != (state.holds_devices and (place.launched or state is not TrialState.STARTING)):
        yield f"launched is {place.launched}"
    if place.asking and not place.launched:
        yield f"asks its submitter in {place.asking}, and does not run"
    rests = bool(trial.held) or (bool(trial.awaits) and not state.ended)
    if rests != (state is TrialState.PAUSED or (bool(trial.held) and is_leaving(trial))):
        yield f"is held: {trial.held or trial.awaits}"


def _residence(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    residence, done = trial.residence, trial.progress.done
    if residence.checkpoint_is_current and (residence.checkpoint is None or residence.checkpoint.iteration != done):
        yield f"its state after {done} iterations is taken to be that of {residence.checkpoint}"
    if residence.lane is not None:
        if residence.lane not in state.lanes:
            yield f"its state is in lane {residence.lane}, which is gone"
        else:
            lane = state.lanes[residence.lane]
            if trial.trial_id not in lane.residents or lane.device_id != residence.device:
                yield f"its state is in lane {residence.lane}, which does not know it"
        if trial.placement.launched or trial.state.is_over:
            yield "its state is kept though it runs, or has ended for good"
    elif residence.device is not None or residence.saving:
        yield "its state has a device, or is being saved, and is in no lane"


def _progress(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    progress = trial.progress
    # A fork may be given a state that is beyond its budget, which its search may still extend.
    budget = max(progress.budget, progress.starts_at)
    if not 0 <= progress.done <= budget:
        yield f"{progress.done} iterations done, of {progress.budget}"
    if progress.reported > budget and not progress.finished_early:
        yield f"iteration {progress.reported} reported, of {progress.budget}"
    most = max(budget, progress.granted * progress.finished_early)
    if trial.placement.launched and not progress.done <= progress.granted <= most:
        yield f"{progress.done} done, granted up to {progress.granted} of {progress.budget}"
    at_work = trial.state is TrialState.RUNNING and trial.placement.preemption is None
    if at_work and progress.granted < (limit := state.limit_of(trial)):
        yield f"granted up to {progress.granted} only, of {limit}"
    if trial.state is TrialState.DONE and progress.done < progress.budget:
        yield f"{progress.done} of {progress.budget} done"


def _calls(trial: TrialRecord) -> Iterator[str]:
    """Calls are made in order, where the trial's state is, and none waits without need."""
    progress, residence, place = trial.progress, trial.residence, trial.placement
    if trial.restored_for_call and trial.state.ended:
        yield "has ended, and is restored for a call"
    made = [call for call in trial.calls if call.lane_id is not None]
    waiting = trial.calls[len(made) :]
    if any(call.lane_id is not None for call in waiting):
        yield "a call was made before an older one"
    in_order = tuple(sorted(trial.calls, key=lambda call: (call.after, call.before))) == trial.calls
    if not progress.finished_early and not in_order:
        yield "later calls wait for less than older ones"
    if trial.calls and trial.state.is_over:
        yield "will not run again, and calls wait"
    lane_id = residence.lane if residence.lane is not None else next(iter(place.hosts), None)
    if any(call.lane_id != lane_id for call in made):
        yield f"calls were made in lanes other than {lane_id}"
    moves = place.move is not None and place.move.stage is Stage.MOVING and not place.move.after_loss
    if made and moves:
        yield "moves before calls were answered"
    if trial.state is TrialState.DONE and (waiting or residence.saving):
        yield "its state is leaving, or has left, though it is to be called"
    able = trial.state is TrialState.RUNNING or (residence.lane is not None and not residence.saving)
    if able and waiting and progress.done >= min(waiting[0].after, progress.budget):
        yield "a call waits that could be made"


def _place(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    occupancy, place = state.occupancy, trial.placement
    held = occupancy.held.get(trial.row, ())
    if not trial.state.holds_devices:
        if held or place.lanes:
            yield f"holds devices {held} and lanes {place.lanes}"
        return
    if len(held) != max(1, round(trial.width)):
        yield f"width {trial.width:g} and devices {held}"
    if any(lane not in state.lanes for lane in place.lanes):
        yield f"runs in lanes {place.lanes}, of which some are gone"
        return
    lanes = [state.lanes[lane_id] for lane_id in place.lanes]
    if sorted(device for lane in lanes for device in lane.device_ids) != sorted(held):
        yield f"runs in lanes {place.lanes} and holds devices {held}"
    if any(trial.trial_id not in lane.holders for lane in lanes):
        yield f"runs in lanes {place.lanes}, which others hold"
    booked = occupancy.groups.lane_of.get(trial.row)
    if trial.takes_turns and booked != (place.lanes[0] if len(place.lanes) == 1 else None):
        yield f"takes turns in lanes {place.lanes}, and the memory ledger has it in lane {booked}"
    usable = all(lane.ready and (not lane.draining or trial.sharing_group) for lane in lanes)
    if place.launched and place.move is None and not usable:
        yield f"runs in lanes {place.lanes}, of which some are not usable"
    yield from _watched(state, trial)
    if trial.row in state.clearing and (place.launched or trial.state is not TrialState.STARTING):
        yield "waits for others to leave, and has started"
    if not place.stopping_lanes <= set(place.lanes):
        yield f"is to leave lanes {place.stopping_lanes}, and runs in {place.lanes}"
    yield from _constraint(state, trial, held)
    cap, limit = trial.packing_cap, occupancy.limit(held[0])
    if cap is not None and trial.state is not TrialState.STOPPING and limit > max(cap, residents_at(trial.width)):
        yield f"may be one of {cap}, and device {held[0]} takes {limit}"


def _constraint(state: EngineState, trial: TrialRecord, held: tuple[int, ...]) -> Iterator[str]:
    """A trial has the devices that it asked for, and no more company than it allows."""
    constraint, occupancy = trial.constraint, state.occupancy
    if constraint is None:
        return
    devices, asked = [occupancy.device(index) for index in held], trial.spec
    if asked.requires is not None and not all(map(asked.requires.met_by, devices)):
        yield f"runs on devices {held}, and requires {asked.requires}"
    if trial.state is TrialState.STOPPING:
        return
    if constraint.width is not None:
        residents = [row for index in held for row in occupancy.residents[index] if row != trial.row]
        # An elastic trial goes on alone in the lane that keeps its state if it could not be saved there.
        alone = not asked.gang and (len(held) == 1 or not trial.spec.can_save)
        if (len(held) != constraint.width and not alone) or residents:
            yield f"runs on devices {held} beside rows {residents}, and asked for {asked.devices}"
    if asked.gang and (len({device.host for device in devices}) > 1 or len(trial.placement.lanes) != 1):
        yield f"is a gang, and runs in lanes {trial.placement.lanes} on {devices}"
    shares = [record.spec.devices for row in occupancy.residents[held[0]] if (record := state.trials.by_row.get(row))]
    if len(held) == 1 and sum(min(share, 1.0) for share in shares if share is not None) > 1.0 + _ROUNDING:
        yield f"shares device {held[0]} with {shares}"


def _watched(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    """A trial that may hang has a deadline while its lanes owe an answer."""
    has_deadline = IterationDeadline(trial.row) in state.deadlines
    if has_deadline != (trial.placement.launched and trial.spec.iteration_timeout_s is not None):
        yield f"its limit is {trial.spec.iteration_timeout_s}, and it has a deadline: {has_deadline}"
    if trial.limits.timeouts > tuning.MOST_TIMEOUTS and trial.state is not TrialState.FAILED:
        yield f"goes on after {trial.limits.timeouts} timeouts"


def _move(state: EngineState, trial: TrialRecord) -> Iterator[str]:
    move, occupancy = trial.placement.move, state.occupancy
    assert move is not None
    left = tuple(device for device in move.old_devices if device not in occupancy.held[trial.row])
    kept = occupancy.held.get(move.old_devices_row, ())
    if kept != (() if move.called_off else left):
        yield f"leaves devices {left}, and {kept} are kept for it"
    if move.called_off and (move.stage is not Stage.PAUSING or trial.placement.lanes != move.old_lanes):
        yield "was to stay where it was"
    if any(lane not in state.lanes for lane in move.old_lanes) and trial.state is not TrialState.STOPPING:
        yield f"comes from lanes {move.old_lanes}, of which some are gone"


# -- validate owners -----------------------------------------------------------------------------
#
# The engine's invariants of owners, their jobs and their shares of devices. Tests check them after every event.


def validate_owners(state: EngineState) -> None:
    """Checks what is known of owners against their trials.

    Raises:
        EngineError: something is broken; it names that.
    """
    broken = [*_jobs(state), *_shares(state)]
    if broken:
        raise EngineError("\n".join(broken))


def _jobs(state: EngineState) -> Iterator[str]:
    """What is counted of jobs and owners is what their trials add up to."""
    records, work, jobs = state.trials.by_row, state.allocations.work.by_row, state.jobs
    of_job = Counter(records[row].job for row in work)
    of_owner = Counter(records[row].owner for row in work)
    if of_job != jobs.rows or of_owner != jobs.owners:
        yield f"jobs have {jobs.rows} trials and owners {jobs.owners}; there are {of_job} and {of_owner}"
    if jobs.work.keys() != jobs.rows.keys() or not jobs.owners.keys() <= jobs.since.keys():
        yield f"the work of jobs {set(jobs.work)} is known, and since when owners {set(jobs.since)} are here"
    for job, seconds in jobs.work.items():
        expected = sum(seconds for row, seconds in work.items() if records[row].job == job)
        if abs(seconds - expected) > _ROUNDING * max(1.0, expected):
            yield f"job {job} has {expected} seconds of work left, and {seconds} are counted"


def _shares(state: EngineState) -> Iterator[str]:
    """With one owner nothing is shared out; shares are of devices that there are and that their trials may get."""
    shares, queue = state.shares, state.queue
    known = set(state.jobs.owners)
    if state.shares.restricts and shares.policy != "irs":
        yield f"policy {shares.policy!r} shares devices out"
    for row in queue:
        trial = state.trials.by_row[row]
        share, eligible = shares.share_of(trial), state.occupancy.eligible.of(trial.constraint)
        if share is not None and not share <= state.occupancy.residents.keys():
            yield f"trial {trial.trial_id!r} has a share of devices {sorted(share)} that are not there"
        if share is not None and eligible is not None and not share <= eligible:
            yield f"trial {trial.trial_id!r} has a share of devices {sorted(share)} that it may not use"
    for group in state.groups.values():
        alone = is_by_itself(group.terms)
        if alone and any(other.owner == group.owner for other in state.groups.values() if other is not group):
            yield f"group {group.group_id!r} has a deadline or a weight, and shares its owner with another"
        if alone != shares.is_by_itself(group.owner):
            yield f"group {group.group_id!r} is ordered by itself: {not alone}; its terms are {group.terms}"
        stands = state.lateness(group.group_id, state.occupancy.now)
        if (stands is not None) != (group.terms.deadline is not None and group.owner in known):
            yield f"group {group.group_id!r} stands at {stands}"
        if stands is not None and stands.odds is not None and not 0.0 <= stands.odds <= 1.0:
            yield f"group {group.group_id!r} ends in time with odds {stands.odds}"
    ranks = list(queue.ranks.values())
    if len(set(ranks)) < len(ranks):
        yield f"owners {known} share ranks: {dict(queue.ranks)}"
