"""The engine's invariants of trials that wait: none waits in vain, and none for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fluid.engine.records import TrialRecord
from fluid.engine.state import EngineState


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
        if any(device in reserved for device in fitting) or trial.constraint in state.placing.awaiting_faster:
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
