"""The record of a TrialGroup: its trials, those that go on one by one, and those that have ended in numbers.

Looks at a session, of which there are several a second, cost what goes on, and not what has ended.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fluid.engine.group_terms import PLAIN_TERMS, GroupTerms
from fluid.engine.records import EndedTrial, TrialRecord

#: Of most groups no trial is ever forgotten; this is never changed.
_NO_PAST: Counter[Any] = Counter()


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
    past: Counter[str] = field(default_factory=lambda: _NO_PAST)
    past_iterations: int = 0
    past_lengths: Counter[int] = field(default_factory=lambda: _NO_PAST)

    @property
    def known(self) -> int:
        """The number of its trials so far; one that goes on as another counts once."""
        return len(self.live) + sum(n for each, n in self.ended.items() if not each.comes_back) + self.past.total()

    def count(self, trial: TrialRecord) -> None:
        """Counts one of its trials as it stands now: live, or as what it has ended."""
        self._discount(trial)
        if trial.state.ended:
            trial.counted = _one_of(EndedTrial.of(trial))
            self.ended[trial.counted] += 1
        else:
            self.live[trial.trial_id] = trial

    def forget(self, trial: TrialRecord) -> None:
        """Drops one of its trials; what it did still counts."""
        self._discount(trial)
        del self.trial_ids[trial.trial_id]
        found = EndedTrial.of(trial)
        self.past_iterations += found.done
        if not found.comes_back:  # Else it is counted when it has.
            if self.past is _NO_PAST:
                self.past, self.past_lengths = Counter(), Counter()
            self.past[(found.outcome or found.state).value] += 1
            self.past_lengths[found.done] += 1

    def _discount(self, trial: TrialRecord) -> None:
        self.changes += 1
        if self.live.pop(trial.trial_id, None) is not None and not self.live:
            self.live = {}  # An empty dict keeps the room that its members took.
        before, trial.counted = trial.counted, None
        if before is not None:
            self.ended[before] -= 1
            if not self.ended[before]:
                del self.ended[before]
