"""Cohorts: trials that Successive Halving compares with each other, rung by rung."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from ray.tune.experiment import Trial

#: Powers of a factor that is no whole number come out slightly off.
ROUNDING = 1e-9


class Bracket(NamedTuple):
    """How one cohort is halved.

    Attributes:
        rungs: where trials are compared, ascending, in units of the time attribute; they end at the last.
        size: how many trials begin; ``None`` for as many as there are.
    """

    rungs: tuple[float, ...]
    size: int | None


class Standing(NamedTuple):
    """The last result of a trial: when it was, and how good, higher being better."""

    time: float
    score: float


@dataclass(eq=False)
class Cohort:
    """Trials that are compared with each other.

    Attributes:
        bracket: their rungs.
        members: in the order in which they were made.
        standings: of those that have reported.
        stage: index of the rung that they are on their way to.
        closed: whether none may join any more.
    """

    bracket: Bracket
    members: list[Trial] = field(default_factory=list)
    standings: dict[Trial, Standing] = field(default_factory=dict)
    stage: int = 0
    closed: bool = False

    @property
    def takes_more(self) -> bool:
        """Whether another trial may join."""
        return not self.closed and (self.bracket.size is None or len(self.members) < self.bracket.size)

    @property
    def live(self) -> list[Trial]:
        """Members that have not ended."""
        return [trial for trial in self.members if not trial.is_finished()]

    @property
    def rung(self) -> float:
        """Where they are compared next."""
        return self.bracket.rungs[self.stage]

    @property
    def at_last_rung(self) -> bool:
        """Whether that is where they end."""
        return self.stage == len(self.bracket.rungs) - 1

    def has_reached(self, trial: Trial) -> bool:
        """Whether a trial is there."""
        standing = self.standings.get(trial)
        return standing is not None and standing.time >= self.rung

    def best(self, factor: float) -> list[Trial]:
        """Those that go on: one in ``factor`` of all that began for each rung, however many of them failed."""
        if self.at_last_rung:
            return []
        number = max(1, math.floor(len(self.members) / factor ** (self.stage + 1) + ROUNDING))
        return sorted(self.live, key=lambda trial: -self.standings[trial].score)[:number]

    def catch_up(self) -> None:
        """Goes to the stage that its trials are in already, which were restored."""
        for standing in self.standings.values():
            reached = min(bisect_left(self.bracket.rungs, standing.time), len(self.bracket.rungs) - 1)
            self.stage = max(self.stage, reached)
        self.closed |= self.stage > 0
