"""Schedulers: which trials of a sweep run how far. Pure state machines, without clock, randomness or IO.

A scheduler numbers the trials in the order in which it starts them. It is told each trial that has reached its rung,
with a score (less is better, ``inf`` for the worst), and each that has ended early: failed, or done by itself. It
answers with the trials that continue and those that never will.

* :class:`FullBudget`: every trial runs to the budget (random search, grids, TPE).
* :class:`fluid.search.brackets.Brackets`: synchronous successive halving, whose rungs are decided when all of their
  trials are there (Jamieson and Talwalkar, AISTATS 2016), in one bracket, or in those of Hyperband (Li et al., JMLR
  2018).
* :class:`AsynchronousHalving`: ASHA (Li et al., MLSys 2020), which promotes a trial as soon as it is among the best
  1/eta of those that have reached its rung so far.
* :class:`StoppingHalving`: ASHA that decides at once, so that no trial waits at a rung (as Ray Tune's ASHA).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fluid.search.rungs import RungBudget, RungDecision
from fluid.search_shape import Rung

_NOTHING = RungDecision()


class RungScheduler(Protocol):
    """Decides which trials run how far."""

    def start(self) -> RungBudget | None:
        """Starts the next trial; ``None`` if there are no more to start."""
        ...

    def rung_of(self, trial: int) -> Rung:
        """The rung to which a trial is on its way, as it is known now."""
        ...

    def reached(self, trial: int, score: float) -> RungDecision:
        """A trial has run to its rung.

        Args:
            trial: its number.
            score: what trials are compared by; less is better.
        """
        ...

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        """A trial on its way to a rung has ended, and will not continue; it takes no place among the promoted ones.

        Args:
            trial: its number.
            is_worst: whether it counts as the worst of its rung, so that others are promoted for it.
        """
        ...

    def retried(self, trial: int) -> None:
        """A trial that has ended is on its way to its rung again; what was decided meanwhile stands.

        Args:
            trial: its number.
        """
        ...


class FullBudget:
    """Every trial runs to the budget.

    Example:
        >>> from fluid.search.schedulers import FullBudget
        >>> scheduler = FullBudget(budget=9, samples=1)
        >>> scheduler.start(), scheduler.start()
        (RungBudget(trial=0, budget=9, follow_up_iterations=0), None)

    Args:
        budget: iterations of each trial.
        samples: number of trials; ``None`` for no limit.
    """

    def __init__(self, *, budget: int, samples: int | None) -> None:
        self._budget = budget
        self._samples = samples
        self._started = 0

    def start(self) -> RungBudget | None:
        if self._samples is not None and self._started >= self._samples:
            return None
        self._started += 1
        return RungBudget(self._started - 1, self._budget, 0)

    def rung_of(self, trial: int) -> Rung:
        return Rung(self._budget, self._samples)

    def reached(self, trial: int, score: float) -> RungDecision:
        return RungDecision(ended=(trial,))

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        return _NOTHING

    def retried(self, trial: int) -> None:
        pass


class StoppingHalving:
    """ASHA whose trials never wait: one that is not among the best 1/eta of its rung when it comes there is stopped.

    The first ``eta - 1`` trials at a rung continue, as there is nothing to compare them with. A searcher is told of
    each trial once, so a trial must not wait at a rung for a decision that may never come.

    Example:
        >>> from fluid.search.schedulers import StoppingHalving
        >>> scheduler = StoppingHalving(rungs=(1, 3), eta=2)
        >>> [scheduler.start().trial for _ in range(2)]
        [0, 1]
        >>> scheduler.reached(0, 0.5).promoted
        (RungBudget(trial=0, budget=3, follow_up_iterations=0),)
        >>> scheduler.reached(1, 0.9)
        RungDecision(promoted=(), ended=(1,), forked=())

    Args:
        rungs: iterations at which trials are compared, ascending; the last one is the budget.
        eta: one in so many continues.
        first: how many arrivals at a rung continue in any case; ``None``, the default, for ``eta - 1``.
        slack: by how much more than one in ``eta`` continues in the mean, as the number is rounded; ``None``, the
            default, if it is rounded down.
    """

    def __init__(
        self, *, rungs: tuple[int, ...], eta: int, first: int | None = None, slack: float | None = None
    ) -> None:
        self._budgets = rungs
        self._eta = eta
        self._first = eta - 1 if first is None else first
        # Rounded to the nearest number, n / eta less this is n / eta rounded down.
        self._slack = 0.5 - 0.5 * (eta - 1) / eta if slack is None else 0.5 + slack
        #: Scores of the trials that have come to each rung but the last, ascending.
        self._scores: list[list[float]] = [[] for _ in rungs[:-1]]
        #: The rung that each trial under way runs to.
        self._heading: dict[int, int] = {}
        #: The same of each trial that has ended early.
        self._left: dict[int, int] = {}
        self._started = 0

    def take_up(self, started: int, heading: Mapping[int, int], scores: Sequence[list[float]]) -> None:
        """Takes over a search under way, in place of one that begins.

        Args:
            started: number of its trials.
            heading: numbers of the rungs to which trials are on their way.
            scores: of those that have come to each rung but the last, ascending.
        """
        self._started, self._heading, self._scores = started, dict(heading), list(scores)

    def start(self) -> RungBudget | None:
        self._started += 1
        return self._send(self._started - 1, 0)

    def rung_of(self, trial: int) -> Rung:
        number = self._heading[trial]
        places = self._eta if number + 1 < len(self._budgets) else 0
        return Rung(self._budgets[number], places=places, promotes_at_once=True)

    def reached(self, trial: int, score: float) -> RungDecision:
        rung = self._heading.pop(trial)
        if rung + 1 == len(self._budgets):
            return RungDecision(ended=(trial,))
        scores = self._scores[rung]
        place = bisect.bisect(scores, score)  # Of equal ones the first to come is the better one.
        scores.insert(place, score)
        if len(scores) <= self._first or place < int(len(scores) / self._eta + self._slack):
            return RungDecision(promoted=(self._send(trial, rung + 1),))
        return RungDecision(ended=(trial,))

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        rung = self._left[trial] = self._heading.pop(trial)
        if is_worst and rung < len(self._scores):
            bisect.insort(self._scores[rung], math.inf)
        return _NOTHING

    def retried(self, trial: int) -> None:
        self._heading[trial] = self._left.pop(trial)

    def _send(self, trial: int, rung: int) -> RungBudget:
        self._heading[trial] = rung
        return RungBudget(trial, self._budgets[rung], self._budgets[-1] - self._budgets[rung])


@dataclass(slots=True)
class AshaRung:
    """A rung of ASHA.

    Attributes:
        arrived: number of trials that have reached it.
        best: score and number of those that were promoted or still may be, the best first.
        promoted: trials that continue to the next rung.
        lost: trials that were on their way to it and have ended.
    """

    arrived: int = 0
    best: list[tuple[float, int]] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)
    lost: int = 0


class AsynchronousHalving:
    """ASHA: a trial is promoted as soon as it is among the best 1/eta of those that have reached its rung.

    Each arrival promotes one trial at most: as in the paper, where a free worker takes a promotion if there is one,
    else a new trial, the caller keeps a number of trials under way and starts new ones for those that wait. If all
    samples have been started and the last rung is empty, the best trial of the highest rung is promoted, so that one
    trial always gets the whole budget.

    Example:
        >>> from fluid.search.schedulers import AsynchronousHalving
        >>> scheduler = AsynchronousHalving(rungs=(1, 3), eta=2, samples=4)
        >>> [scheduler.start().trial for _ in range(4)]
        [0, 1, 2, 3]
        >>> scheduler.reached(0, 0.5)
        RungDecision(promoted=(), ended=(), forked=())
        >>> scheduler.reached(1, 0.2).promoted
        (RungBudget(trial=1, budget=3, follow_up_iterations=0),)
        >>> scheduler.reached(2, 0.9)
        RungDecision(promoted=(), ended=(2,), forked=())

    Args:
        rungs: iterations at which trials are compared, ascending; the last one is the budget.
        eta: one in so many is promoted.
        samples: number of trials; ``None`` for no limit.
    """

    def __init__(self, *, rungs: tuple[int, ...], eta: int, samples: int | None) -> None:
        self._budgets = rungs
        self._eta = eta
        self._samples = samples
        self._rungs = [AshaRung() for _ in rungs]
        #: The rung that each trial under way runs to.
        self._heading: dict[int, int] = {}
        #: The same of each trial that has ended early, and whether it counts among those that came there.
        self._left: dict[int, tuple[int, bool]] = {}
        self._started = 0

    def take_up(self, started: int, heading: Mapping[int, int], rungs: Sequence[AshaRung]) -> RungDecision:
        """Takes over a search under way, in place of one that begins; returns what follows from how it stands.

        Args:
            started: number of its trials.
            heading: numbers of the rungs to which trials are on their way.
            rungs: who has come there.
        """
        self._started, self._heading, self._rungs = started, dict(heading), list(rungs)
        return self._decision([], [])

    def start(self) -> RungBudget | None:
        if self._samples is not None and self._started >= self._samples:
            return None
        trial, self._started = self._started, self._started + 1
        return self._send(trial, 0)

    def rung_of(self, trial: int) -> Rung:
        number = self._heading[trial]
        size = None if self._samples is None else max(1, self._samples // self._eta**number)
        places = self._eta if number + 1 < len(self._rungs) else 0
        return Rung(self._budgets[number], size, places, promotes_at_once=True)

    def reached(self, trial: int, score: float) -> RungDecision:
        number = self._heading.pop(trial)
        rung = self._rungs[number]
        if number + 1 == len(self._rungs):
            rung.arrived += 1
            return self._decision([], [trial])
        place = bisect.bisect(rung.best, (score, trial))
        rung.best.insert(place, (score, trial))
        return self._decision(self._arrive(number, place), [])

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        number = self._heading.pop(trial)
        rung, arrives = self._rungs[number], is_worst and number + 1 < len(self._rungs)
        self._left[trial] = number, arrives
        if arrives:
            return self._decision(self._arrive(number, len(rung.best)), [])
        rung.lost += 1
        return self._decision([], [])

    def retried(self, trial: int) -> None:
        number, arrived = self._left.pop(trial)
        self._heading[trial] = number
        if arrived:
            self._rungs[number].arrived -= 1
        else:
            self._rungs[number].lost -= 1

    def promote(self, trial: int) -> RungDecision:
        """Promotes a trial that waits, as a search of fewer samples had promoted it: the last one that was left."""
        for number, rung in enumerate(self._rungs[:-1]):
            if trial not in rung.promoted and any(trial == one for _, one in rung.best):
                return RungDecision((self._promote(trial, number),))
        return _NOTHING

    def _arrive(self, number: int, place: int) -> list[RungBudget]:
        """Counts an arrival at a rung, of a trial that ranks at a place, and promotes the trial that this lets in."""
        rung = self._rungs[number]
        rung.arrived += 1
        # All others of the best arrived // eta were promoted before.
        candidate = min(place, rung.arrived // self._eta - 1)
        if 0 <= candidate < len(rung.best) and rung.best[candidate][1] not in rung.promoted:
            return [self._promote(rung.best[candidate][1], number)]
        return []

    def _send(self, trial: int, rung: int) -> RungBudget:
        self._heading[trial] = rung
        return RungBudget(trial, self._budgets[rung], self._budgets[-1] - self._budgets[rung])

    def _promote(self, trial: int, rung: int) -> RungBudget:
        self._rungs[rung].promoted.add(trial)
        return self._send(trial, rung + 1)

    def _decision(self, promoted: list[RungBudget], ended: list[int]) -> RungDecision:
        """Adds the promotion of the last one left, and the trials that can no longer be promoted."""
        is_last = not promoted and not self._heading and self._started == self._samples
        if is_last and not self._rungs[-1].arrived:
            promoted = self._promote_best()
        ended += self._drop_hopeless()
        if is_last and not promoted:
            ended += self._drop_rest()
        if not promoted and not ended:
            return _NOTHING
        return RungDecision(tuple(promoted), tuple(ended))

    def _promote_best(self) -> list[RungBudget]:
        for number in range(len(self._rungs) - 2, -1, -1):
            rung = self._rungs[number]
            waiting = (trial for _, trial in rung.best if trial not in rung.promoted)
            if (best := next(waiting, None)) is not None:
                return [self._promote(best, number)]
        return []

    def _drop_hopeless(self) -> list[int]:
        """Drops trials that are not promoted whatever is still to come."""
        if self._samples is None:
            return []
        dropped = []
        most = self._samples
        for rung in self._rungs[:-1]:
            most -= rung.lost
            kept = max(1, most // self._eta)
            if len(rung.best) > kept:
                dropped += [trial for _, trial in rung.best[kept:] if trial not in rung.promoted]
                del rung.best[kept:]
            # Each arrival that is still to come may promote one trial.
            most += len(rung.promoted) - rung.arrived
        return dropped

    def _drop_rest(self) -> list[int]:
        dropped = []
        for rung in self._rungs[:-1]:
            dropped += [trial for _, trial in rung.best if trial not in rung.promoted]
            rung.best = []
        return dropped
