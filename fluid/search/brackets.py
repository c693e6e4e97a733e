"""Synchronous successive halving: see :mod:`fluid.search.schedulers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fluid.search.rungs import BracketShape, RungBudget, RungDecision
from fluid.search_shape import Rung

_NOTHING = RungDecision()


class Brackets:
    """Synchronous successive halving: one bracket, or several side by side, as Hyperband runs them.

    The best trials of a rung continue once all of its trials are there or have ended. As many continue as the bracket
    has places at the next rung: where trials have ended early, those behind them move up.

    Example:
        >>> from fluid.search.brackets import Brackets
        >>> from fluid.search.rungs import halving_shape
        >>> scheduler = Brackets([halving_shape(3, (1, 3), 3)])
        >>> [scheduler.start().budget for _ in range(3)]
        [1, 1, 1]
        >>> scheduler.reached(0, 0.5), scheduler.reached(1, 0.2)
        (RungDecision(promoted=(), ended=(), forked=()), RungDecision(promoted=(), ended=(), forked=()))
        >>> scheduler.reached(2, 0.9)
        RungDecision(promoted=(RungBudget(trial=1, budget=3, follow_up_iterations=0),), ended=(0, 2), forked=())

    Args:
        shapes: the brackets, in the order in which their trials start.
        one_by_one: whether a bracket begins when the one before has ended; see :meth:`may_start`.
    """

    def __init__(self, shapes: Sequence[BracketShape], *, one_by_one: bool = False) -> None:
        self._brackets = [_Bracket(shape) for shape in shapes]
        self.one_by_one = one_by_one
        #: The bracket of each trial that was started.
        self._of_trial: list[_Bracket] = []
        self._filling = 0

    def take_up(
        self, of_trial: Sequence[int], rungs: Sequence[int], running: Iterable[int], scores: Mapping[int, float]
    ) -> RungDecision:
        """Takes over a search under way, in place of one that begins; returns what follows from how it stands.

        Args:
            of_trial: the number of each trial's bracket.
            rungs: the number of the rung to which each bracket is on its way.
            running: the trials on their way to it.
            scores: of those that are there.
        """
        for number in of_trial:
            self._of_trial.append(self._brackets[number])
            self._brackets[number].enter()
        for trial in running:
            self._of_trial[trial].run(trial)
        for trial, score in scores.items():
            self._of_trial[trial].come(trial, score)
        decisions = [bracket.at(rung) for bracket, rung in zip(self._brackets, rungs, strict=True)]
        return RungDecision(
            tuple(budget for each in decisions for budget in each.promoted),
            tuple(trial for each in decisions for trial in each.ended),
        )

    def start(self) -> RungBudget | None:
        while self._filling < len(self._brackets) and self._brackets[self._filling].is_full:
            self._filling += 1
        if self._filling == len(self._brackets):
            return None
        bracket = self._brackets[self._filling]
        self._of_trial.append(bracket)
        return bracket.add(len(self._of_trial) - 1)

    def may_start(self, ahead: int) -> bool:
        """Whether a further trial may start now, behind so many that are about to."""
        if not self.one_by_one:
            return True
        places = 0
        for bracket in self._brackets:
            places += bracket.places
            if not bracket.is_over:
                break
        return len(self._of_trial) + ahead < places

    def rung_of(self, trial: int) -> Rung:
        bracket = self._of_trial[trial]
        return bracket.rung._replace(bracket=self._brackets.index(bracket))

    def reached(self, trial: int, score: float) -> RungDecision:
        return self._of_trial[trial].reached(trial, score)

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        return self._of_trial[trial].ended(trial)

    def retried(self, trial: int) -> None:
        self._of_trial[trial].retry(trial)


class _Bracket:
    """One bracket of synchronous successive halving."""

    def __init__(self, shape: BracketShape) -> None:
        self._shape = shape
        self._rung = 0
        self._started = 0
        #: Trials on their way to the rung, and the scores of those that are there.
        self._running: set[int] = set()
        self._scores: dict[int, float] = {}
        #: The rung on the way to which each trial has ended early.
        self._left: dict[int, int] = {}
        #: Trials that run to a rung that was decided without them.
        self._late: set[int] = set()

    @property
    def places(self) -> int:
        return self._shape.sizes[0]

    @property
    def is_full(self) -> bool:
        return self._started == self.places

    @property
    def is_over(self) -> bool:
        return self.is_full and not (self._running or self._scores or self._late)

    @property
    def rung(self) -> Rung:
        sizes = self._shape.sizes
        places = sizes[self._rung + 1] if self._rung + 1 < len(sizes) else 0
        to_start = sizes[0] - self._started
        size = len(self._running) + len(self._scores) + to_start
        return Rung(self._shape.rungs[self._rung], size, places)

    def enter(self) -> None:
        self._started += 1

    def run(self, trial: int) -> None:
        self._running.add(trial)

    def come(self, trial: int, score: float) -> None:
        self._running.discard(trial)
        self._scores[trial] = score

    def at(self, rung: int) -> RungDecision:
        self._rung = rung
        return self._decide()

    def add(self, trial: int) -> RungBudget:
        self.enter()
        self.run(trial)
        return self._budget(trial)

    def reached(self, trial: int, score: float) -> RungDecision:
        if trial in self._late:
            self._late.discard(trial)
            return RungDecision(ended=(trial,))
        self.come(trial, score)
        return self._decide()

    def ended(self, trial: int) -> RungDecision:
        if trial in self._late:
            self._late.discard(trial)
            return _NOTHING
        self._running.discard(trial)
        self._left[trial] = self._rung
        return self._decide()

    def retry(self, trial: int) -> None:
        (self._running if self._left.get(trial) == self._rung else self._late).add(trial)

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
