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
from fluid.few_items import FewItems

#: Of most groups no trial is ever forgotten, and none goes on; these are never changed.
_NO_PAST: Counter[Any] = Counter()
_NOTHING: dict[Any, Any] = {}


@functools.lru_cache(1024)
def _one_of(alike: EndedTrial) -> EndedTrial:
    """One object for all that are alike."""
    return alike


@functools.lru_cache(1024)
def _once(alike: EndedTrial) -> dict[EndedTrial, int]:
    """The numbers of the ended trials of a group that has one such trial; one dict for all, which is never changed."""
    return {alike: 1}


@dataclass(slots=True)
class GroupRecord:
    """One TrialGroup.

    Attributes:
        terms: what is known of it beyond its trials.
        owner: number of its owner.
        trial_ids, open: its trials in order of arrival, as keys, and how many have not ended.
        live: those whose state is none that ends a trial, by id: one that has ended may be restored to be called.
        ended: the number of the others by what is known of them; shared with other groups where that is one at most.
        changes: counts how often a trial has come to be live, to have ended, or to be forgotten.
        past: number of trials that were forgotten, by outcome.
        past_iterations: iterations done by those; ``past_lengths`` counts them by these, but for paused ones.
    """

    group_id: str
    terms: GroupTerms = PLAIN_TERMS
    owner: int = 0
    trial_ids: FewItems[str, None] = field(default_factory=FewItems)
    open: int = 0
    live: dict[str, TrialRecord] = field(default_factory=lambda: _NOTHING, repr=False)
    ended: dict[EndedTrial, int] = field(default_factory=lambda: _NOTHING)
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
            self._count_ended(trial.counted, 1)
        else:
            self.live = self.live or {}
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
            self.live = _NOTHING  # An empty dict keeps the room that its members took.
        before, trial.counted = trial.counted, None
        if before is not None:
            self._count_ended(before, -1)

    def _count_ended(self, alike: EndedTrial, number: int) -> None:
        ended = self.ended.copy() if self._has_one_end else self.ended
        ended[alike] = ended.get(alike, 0) + number
        if not ended[alike]:
            del ended[alike]
        self.ended = ended
        if self._has_one_end:
            self.ended = _once(*ended) if ended else _NOTHING

    @property
    def _has_one_end(self) -> bool:
        return not self.ended or (len(self.ended) == 1 and 1 in self.ended.values())
