"""Brackets of Successive Halving: sets of trials that are compared with each other rung by rung."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from ray.tune.experiment import Trial

#: Powers of a factor that is no whole number come out slightly off.
ROUNDING = 1e-9


class HalvingSchedule(NamedTuple):
    """How a bracket is halved.

    Attributes:
        rungs: where trials are compared, ascending, in units of the time attribute; they end at the last.
        size: number of trials that begin; ``None`` for as many as there are.
    """

    rungs: tuple[float, ...]
    size: int | None


class LatestScore(NamedTuple):
    """The last result of a trial: its time attribute, and its score, higher being better."""

    time: float
    score: float


@dataclass(eq=False)
class HalvingBracket:
    """Trials that are compared with each other.

    Attributes:
        schedule: their rungs.
        members: the trials in the order in which they were made.
        scores: of the trials that have reported.
        stage: index of the next rung.
        is_closed: whether no further trial may join.
    """

    schedule: HalvingSchedule
    members: list[Trial] = field(default_factory=list)
    scores: dict[Trial, LatestScore] = field(default_factory=dict)
    stage: int = 0
    is_closed: bool = False

    @property
    def takes_more(self) -> bool:
        """Whether another trial may join."""
        return not self.is_closed and (self.schedule.size is None or len(self.members) < self.schedule.size)

    @property
    def live(self) -> list[Trial]:
        """Members that have not ended."""
        return [trial for trial in self.members if not trial.is_finished()]

    @property
    def rung(self) -> float:
        """Where they are compared next."""
        return self.schedule.rungs[self.stage]

    @property
    def at_last_rung(self) -> bool:
        """Whether they end there."""
        return self.stage == len(self.schedule.rungs) - 1

    def has_reached(self, trial: Trial) -> bool:
        """Whether a trial has reached the next rung."""
        latest = self.scores.get(trial)
        return latest is not None and latest.time >= self.rung

    def places(self, factor: float) -> int:
        """How many trials go on: 1 in ``factor`` of the starters per rung, however many of them failed."""
        if self.at_last_rung:
            return 0
        return max(1, math.floor(len(self.members) / factor ** (self.stage + 1) + ROUNDING))

    def best(self, factor: float) -> list[Trial]:
        """Returns the trials to promote."""
        return sorted(self.live, key=lambda trial: -self.scores[trial].score)[: self.places(factor)]

    def catch_up(self) -> None:
        """Moves to the stage that its trials, which were restored, have reached."""
        for latest in self.scores.values():
            reached = min(bisect_left(self.schedule.rungs, latest.time), len(self.schedule.rungs) - 1)
            self.stage = max(self.stage, reached)
        self.is_closed |= self.stage > 0
