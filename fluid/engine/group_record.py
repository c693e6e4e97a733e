"""The record of a TrialGroup: its trials, those that go on one by one, and those that have ended in numbers.

Looks at a session, of which there are several a second, cost what goes on, and not what has ended.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from fluid.engine.group_terms import PLAIN_TERMS, GroupTerms
from fluid.engine.records import TrialRecord
from fluid.trialgroup import TrialState


class EndedTrial(NamedTuple):
    """What displays and forecasts know of a trial that has ended: those of which it is equal are alike to them.

    Attributes:
        state: how it ended.
        outcome: what the submitter says came of it; ``None`` if it did not say.
        done, budget: iterations done, and allowed in all.
        submitted: the budget with which it was submitted.
        follow_up_iterations: iterations that later rungs may add after the budget.
    """

    state: TrialState
    outcome: TrialState | None
    done: int
    budget: int
    submitted: int
    follow_up_iterations: int

    @classmethod
    def of(cls, trial: TrialRecord) -> EndedTrial:
        """What is known of a trial."""
        progress = trial.progress
        left = progress.follow_up_iterations
        return cls(trial.state, trial.outcome, progress.done, progress.budget, trial.spec.budget, left)

    @property
    def comes_back(self) -> bool:
        """Whether it goes on as another trial."""
        return self.outcome is TrialState.PAUSED


@functools.lru_cache(1024)
def _one_of(alike: EndedTrial) -> EndedTrial:
    """One object for all that are alike."""
    return alike


@dataclass(slots=True)
class GroupRecord:
    """One TrialGroup.

    Attributes:
        terms: what is known of it beyond its trials.
        owner: number of its owner.
        trial_ids, open: its trials in order of arrival, as keys, and how many have not ended.
        live: those whose state is none that ends a trial, by id: one that has ended may be restored to be called.
        ended: the number of the others by what is known of them.
        changes: counts how often a trial has come to be live, to have ended, or to be forgotten.
        past: number of trials that were forgotten, by outcome.
        past_iterations: iterations done by those; ``past_lengths`` counts them by these, but for paused ones.
    """

    group_id: str
    terms: GroupTerms = PLAIN_TERMS
    owner: int = 0
    trial_ids: dict[str, None] = field(default_factory=dict)
    open: int = 0
    live: dict[str, TrialRecord] = field(default_factory=dict, repr=False)
    ended: Counter[EndedTrial] = field(default_factory=Counter)
    changes: int = 0
    past: Counter[str] = field(default_factory=Counter)
    past_iterations: int = 0
    past_lengths: Counter[int] = field(default_factory=Counter)
    #: As what each trial is counted that has ended.
    _counted: dict[str, EndedTrial] = field(default_factory=dict, repr=False)

    @property
    def known(self) -> int:
        """The number of its trials so far; one that goes on as another counts once."""
        return len(self.live) + sum(n for each, n in self.ended.items() if not each.comes_back) + self.past.total()

    def count(self, trial: TrialRecord) -> None:
        """Counts one of its trials as it stands now: live, or as what it has ended."""
        self._discount(trial)
        if trial.state.ended:
            found = self._counted[trial.trial_id] = _one_of(EndedTrial.of(trial))
            self.ended[found] += 1
        else:
            self.live[trial.trial_id] = trial

    def forget(self, trial: TrialRecord) -> None:
        """Drops one of its trials; what it did still counts."""
        self._discount(trial)
        del self.trial_ids[trial.trial_id]
        found = EndedTrial.of(trial)
        self.past_iterations += found.done
        if not found.comes_back:  # Else it is counted when it has.
            self.past[(found.outcome or found.state).value] += 1
            self.past_lengths[found.done] += 1

    def _discount(self, trial: TrialRecord) -> None:
        self.changes += 1
        if self.live.pop(trial.trial_id, None) is not None and not self.live:
            self.live = {}  # An empty dict keeps the room that its members took.
        before = self._counted.pop(trial.trial_id, None)
        if before is not None:
            self.ended[before] -= 1
            if not self.ended[before]:
                del self.ended[before]
