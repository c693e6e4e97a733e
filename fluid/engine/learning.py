"""What the engine learns from an iteration: its trial's pace, its key's overheads, and what its like will take."""

from __future__ import annotations

from fluid.engine.core import SessionState
from fluid.engine.events import IterationDone
from fluid.engine.records import TrialRecord


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
    core.cohorts.iterated(trial, event.typical_seconds, event.memory, observed=pace.observed - before)


def _observe(core: SessionState, trial: TrialRecord, event: IterationDone) -> None:
    place = trial.placement
    if core.fusing.observe(trial, event):
        place.settled, place.disturbed = True, False
        return
    co_residents = None if place.disturbed or place.move is not None else core.timing.co_residents(trial)
    if co_residents is not None:
        core.measuring.observe(trial, co_residents, event)
    elif event.memory is not None:
        core.measuring.observe_memory(trial, event.memory)
    if not place.settled:
        core.timing.settle(trial, core.now, is_usual=core.estimates.of_key(trial).is_usual(event.typical_seconds))
    place.disturbed = False
