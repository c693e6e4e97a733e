"""Schedulers: which trials of a sweep run how far. Pure state machines, without clock, randomness or IO.

A scheduler numbers the trials in the order in which it starts them. It is told each trial that has reached its rung,
with a score (less is better, ``inf`` for the worst), and each that has ended early: failed, or done by itself. It
answers with the trials that continue and those that never will.

* :class:`FullBudget`: every trial runs to the budget (random search, grids, TPE).
* :class:`Brackets`: synchronous successive halving, whose rungs are decided when all of their trials are there
  (Jamieson and Talwalkar, AISTATS 2016), in one bracket, or in those of Hyperband (Li et al., JMLR 2018).
* :class:`AsynchronousHalving`: ASHA (Li et al., MLSys 2020), which promotes a trial as soon as it is among the best
  1/eta of those that have reached its rung so far.
* :class:`StoppingHalving`: ASHA that decides at once, so that no trial waits at a rung (as Ray Tune's ASHA).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Protocol

from fluid.search.rungs import BracketShape, RungBudget, RungDecision
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
        RungDecision(promoted=(), ended=(1,))

    Args:
        rungs: iterations at which trials are compared, ascending; the last one is the budget.
        eta: one in so many continues.
    """

    def __init__(self, *, rungs: tuple[int, ...], eta: int) -> None:
        self._budgets = rungs
        self._eta = eta
        #: Scores of the trials that have come to each rung but the last, ascending.
        self._scores: list[list[float]] = [[] for _ in rungs[:-1]]
        #: The rung that each trial under way runs to.
        self._heading: dict[int, int] = {}
        self._started = 0

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
        if len(scores) < self._eta or place < len(scores) // self._eta:
            return RungDecision(promoted=(self._send(trial, rung + 1),))
        return RungDecision(ended=(trial,))

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        rung = self._heading.pop(trial)
        if is_worst and rung < len(self._scores):
            bisect.insort(self._scores[rung], math.inf)
        return _NOTHING

    def _send(self, trial: int, rung: int) -> RungBudget:
        self._heading[trial] = rung
        return RungBudget(trial, self._budgets[rung], self._budgets[-1] - self._budgets[rung])


class Brackets:
    """Synchronous successive halving: one bracket, or several side by side, as Hyperband runs them.

    The best trials of a rung continue once all of its trials are there or have ended. As many continue as the bracket
    has places at the next rung: where trials have ended early, those behind them move up.

    Example:
        >>> from fluid.search.rungs import halving_shape
        >>> from fluid.search.schedulers import Brackets
        >>> scheduler = Brackets([halving_shape(3, (1, 3), 3)])
        >>> [scheduler.start().budget for _ in range(3)]
        [1, 1, 1]
        >>> scheduler.reached(0, 0.5), scheduler.reached(1, 0.2)
        (RungDecision(promoted=(), ended=()), RungDecision(promoted=(), ended=()))
        >>> scheduler.reached(2, 0.9)
        RungDecision(promoted=(RungBudget(trial=1, budget=3, follow_up_iterations=0),), ended=(0, 2))

    Args:
        shapes: the brackets, in the order in which their trials start.
    """

    def __init__(self, shapes: list[BracketShape] | tuple[BracketShape, ...]) -> None:
        self._brackets = [_Bracket(shape) for shape in shapes]
        #: The bracket of each trial that was started.
        self._of_trial: list[_Bracket] = []
        self._filling = 0

    def start(self) -> RungBudget | None:
        while self._filling < len(self._brackets) and self._brackets[self._filling].is_full:
            self._filling += 1
        if self._filling == len(self._brackets):
            return None
        bracket = self._brackets[self._filling]
        self._of_trial.append(bracket)
        return bracket.add(len(self._of_trial) - 1)

    def rung_of(self, trial: int) -> Rung:
        bracket = self._of_trial[trial]
        return bracket.rung._replace(bracket=self._brackets.index(bracket))

    def reached(self, trial: int, score: float) -> RungDecision:
        return self._of_trial[trial].reached(trial, score)

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        return self._of_trial[trial].ended(trial)


class _Bracket:
    """One bracket of synchronous successive halving."""

    def __init__(self, shape: BracketShape) -> None:
        self._shape = shape
        self._rung = 0
        self._started = 0
        #: Trials on their way to the rung, and the scores of those that are there.
        self._running: set[int] = set()
        self._scores: dict[int, float] = {}

    @property
    def is_full(self) -> bool:
        return self._started == self._shape.sizes[0]

    @property
    def rung(self) -> Rung:
        sizes = self._shape.sizes
        places = sizes[self._rung + 1] if self._rung + 1 < len(sizes) else 0
        to_start = sizes[0] - self._started
        size = len(self._running) + len(self._scores) + to_start
        return Rung(self._shape.rungs[self._rung], size, places)

    def add(self, trial: int) -> RungBudget:
        self._started += 1
        self._running.add(trial)
        return self._budget(trial)

    def reached(self, trial: int, score: float) -> RungDecision:
        self._running.discard(trial)
        self._scores[trial] = score
        return self._decide()

    def ended(self, trial: int) -> RungDecision:
        self._running.discard(trial)
        return self._decide()

    def _decide(self) -> RungDecision:
        if self._running or not self.is_full or not self._scores:
            return _NOTHING
        ranked = sorted(self._scores, key=lambda trial: (self._scores[trial], trial))
        self._scores = {}
        if self._rung + 1 == len(self._shape.rungs):
            return RungDecision(ended=tuple(ranked))
        self._rung += 1
        places = self._shape.sizes[self._rung]
        self._running.update(ranked[:places])
        return RungDecision(tuple(map(self._budget, ranked[:places])), tuple(ranked[places:]))

    def _budget(self, trial: int) -> RungBudget:
        rungs = self._shape.rungs
        return RungBudget(trial, rungs[self._rung], rungs[-1] - rungs[self._rung])


@dataclass(slots=True)
class _AshaRung:
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
        RungDecision(promoted=(), ended=())
        >>> scheduler.reached(1, 0.2).promoted
        (RungBudget(trial=1, budget=3, follow_up_iterations=0),)
        >>> scheduler.reached(2, 0.9)
        RungDecision(promoted=(), ended=(2,))

    Args:
        rungs: iterations at which trials are compared, ascending; the last one is the budget.
        eta: one in so many is promoted.
        samples: number of trials; ``None`` for no limit.
    """

    def __init__(self, *, rungs: tuple[int, ...], eta: int, samples: int | None) -> None:
        self._budgets = rungs
        self._eta = eta
        self._samples = samples
        self._rungs = [_AshaRung() for _ in rungs]
        #: The rung that each trial under way runs to.
        self._heading: dict[int, int] = {}
        self._started = 0

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
        rung = self._rungs[number]
        if is_worst and number + 1 < len(self._rungs):
            return self._decision(self._arrive(number, len(rung.best)), [])
        rung.lost += 1
        return self._decision([], [])

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
            dropped += [trial for _, trial in rung.best[kept:] if trial not in rung.promoted]
            del rung.best[kept:]
            # Each arrival that is still to come may promote one trial.
            most = len(rung.promoted) + most - rung.arrived
        return dropped

    def _drop_rest(self) -> list[int]:
        dropped = []
        for rung in self._rungs[:-1]:
            dropped += [trial for _, trial in rung.best if trial not in rung.promoted]
            rung.best = []
        return dropped
