"""How the trials of a session stand, read off its engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fluid.engine.engine import EngineState
from fluid.engine.events import SET_ASIDE
from fluid.trialgroup import TrialState


@dataclass(frozen=True, slots=True)
class Standing:
    """How trials stand.

    Attributes:
        states, outcomes: the engine's state, and what the submitter said of it, by trial id.
        set_aside: trials that are paused as they would end no further iteration in time, not by the user.
        unsaved: those of them that have left their devices, and are still to be saved.
        forgotten: the number of trials that were forgotten, by group id.
    """

    states: dict[str, TrialState] = field(default_factory=dict)
    outcomes: dict[str, TrialState] = field(default_factory=dict)
    set_aside: set[str] = field(default_factory=set)
    unsaved: set[str] = field(default_factory=set)
    forgotten: dict[str, int] = field(default_factory=dict)


def standing_of(state: EngineState, group_ids: Iterable[str], only: str | None = None) -> Standing:
    """Reads how the trials of some groups stand, or only one; a group that the engine does not know yet has none."""
    found = Standing()
    for group in (state.groups[group_id] for group_id in group_ids if group_id in state.groups):
        found.forgotten[group.group_id] = sum(group.past.values())
        for trial_id in group.trial_ids if only is None else group.trial_ids.keys() & {only}:
            trial = state.trials[trial_id]
            found.states[trial_id] = trial.state
            if trial.held == SET_ASIDE:
                found.set_aside.add(trial_id)
                is_kept = trial.residence.lane is not None and trial.spec.can_save
                if trial.state is TrialState.PAUSED and (is_kept or trial.residence.saving):
                    found.unsaved.add(trial_id)
            if trial.outcome is not None:
                found.outcomes[trial_id] = trial.outcome
    return found
