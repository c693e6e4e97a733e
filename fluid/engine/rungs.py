"""Rungs as the engine knows them: who has come there, in which order of scores (docs/theory.md, section 18)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import islice

from fluid.engine.events import Event
from fluid.policies.checkpoints import odds_at
from fluid.search_shape import Rung

#: All trials of a rung are valued again when so many times as many have come: odds differ by little before.
VALUED_AGAIN = 1.05
#: Share of a rung's trials that must have come before the best of them are sure enough to go on.
NEARLY_ALL = 0.8


@dataclass(frozen=True, slots=True)
class RungReached(Event):
    """The submitter says that a trial has come to a rung, or to it again with another score.

    Attributes:
        rung: the rung, as it is known now.
        score: what trials are compared by: less is better, and not a number is the worst.
    """

    trial_id: str
    rung: Rung
    score: float


#: Names a rung of a session: its group, its bracket, and its iterations.
RungKey = tuple[str, int, int]


@dataclass(slots=True)
class RungRanking:
    """Who has come to a rung.

    Attributes:
        rung: what was said of it last.
        ranked: score and order of arrival of those that came, and their ids; the best first.
        places: score and order of each of them.
        waiting: how many of them have come to no later rung.
        valued: how many had come when all of them were valued last.
    """

    rung: Rung
    ranked: list[tuple[float, int, str]] = field(default_factory=list)
    places: dict[str, tuple[float, int]] = field(default_factory=dict)
    waiting: int = 0
    valued: int = 0

    def add(self, trial_id: str, rung: Rung, score: float) -> None:
        """Adds a trial, or gives it another score."""
        self.rung = rung
        before = self.places.get(trial_id)
        if before is not None:
            del self.ranked[bisect_left(self.ranked, before)]
        else:
            self.waiting += 1
        score = math.inf if math.isnan(score) else score
        # Of equal scores the first to come is the better one.
        place = self.places[trial_id] = (score, len(self.places) if before is None else before[1])
        insort(self.ranked, (*place, trial_id))

    def rank(self, trial_id: str) -> int:
        """Rank of a trial among those that came, from 0."""
        return bisect_left(self.ranked, self.places[trial_id])

    def is_to_be_valued(self) -> bool:
        """Whether so many have come since the last time that the odds of all are to be looked at; then that is noted.

        So a trial of a large rung is valued some tens of times, not once for each trial that comes after it.
        """
        came = len(self.ranked)
        if came < self.valued * VALUED_AGAIN and came != self.rung.size:
            return False
        self.valued = came
        return True

    @property
    def is_over(self) -> bool:
        """Whether no trial that came waits there, and no further one comes."""
        return not self.waiting and self.rung.size is not None and len(self.ranked) >= self.rung.size

    @property
    def odds(self) -> tuple[float, ...]:
        """Probability to go on by rank, the best first."""
        return odds_at(self.rung, len(self.ranked))

    @property
    def promotable(self) -> int:
        """How many of the best would go on if no further trial came."""
        return self._share(self.rung.places, is_rate=self.rung.promotes_at_once or self.rung.size is None)

    @property
    def parents(self) -> int:
        """How many of the best others would go on from if no further trial came."""
        return self._share(self.rung.parents, is_rate=False)

    def _share(self, places: int, *, is_rate: bool) -> int:
        came, size = len(self.ranked), self.rung.size
        if places < 1:
            return 0
        return came // places if is_rate else math.ceil(places * came / max(came, size or came))

    def best_when_nearly_all_came(self) -> list[str]:
        """The trials that would go on if no further one came; none before so many have come that it is likely."""
        if not self._nearly_all_came:
            return []
        return [trial_id for *_, trial_id in islice(self.ranked, self.promotable)]

    def goes_on_surely(self, trial_id: str) -> bool:
        """Whether a trial is one of those."""
        return self._nearly_all_came and self.rank(trial_id) < self.promotable

    @property
    def _nearly_all_came(self) -> bool:
        return self.rung.size is not None and len(self.ranked) >= NEARLY_ALL * self.rung.size
