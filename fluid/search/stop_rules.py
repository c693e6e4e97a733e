"""Stop rules: what ends a trial of a sweep, or the sweep itself, before the budget. Pure records and state.

A rule is told every iteration's value of the metric, as a score: less is better, whatever the mode. An iteration
without the metric, as of an epoch without validation, leaves the value that there was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluid.directions import direction_of
from fluid.errors import InvalidFieldError, require_integer, require_number, require_text
from fluid.user_calls import user_class


@user_class
@dataclass(frozen=True)
class Target:
    """Ends the sweep as soon as a trial reaches a value of the metric.

    Example:
        >>> import fluid
        >>> from fluid.search import Target, uniform
        >>> def train(config):
        ...     for step in range(1, 100):
        ...         yield {"loss": 1 / step}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, {"lr": uniform(0, 1)}, metric="loss", samples=1, budget=50, stop=Target(0.25))
        >>> result.best.iteration >= 4
        True

    Args:
        value: at most this value with mode ``"min"``, at least with ``"max"``.
    """

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", require_number("value", self.value, at_least=-math.inf))


@user_class
@dataclass(frozen=True)
class Plateau:
    """Ends the sweep once further trials no longer improve on the best.

    Example:
        >>> from fluid.search import Plateau
        >>> Plateau(trials=10, min_delta=0.001)
        Plateau(trials=10, min_delta=0.001)

    Args:
        trials: so many trials must have ended, or paused at a rung, since the best value improved.
        min_delta: what counts as an improvement: better by more than this.
    """

    trials: int = 20
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "trials", require_integer("trials", self.trials, at_least=1))
        object.__setattr__(self, "min_delta", require_number("min_delta", self.min_delta, at_least=0.0))


@user_class
@dataclass(frozen=True)
class TrialPlateau:
    """Stops a trial that no longer improves on its own best value.

    Example:
        >>> from fluid.search import TrialPlateau
        >>> TrialPlateau(iterations=3)
        TrialPlateau(iterations=3, min_delta=0.0)

    Args:
        iterations: so many iterations must have passed since its best value improved, and one of them with a value.
        min_delta: what counts as an improvement: better by more than this.
    """

    iterations: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "iterations", require_integer("iterations", self.iterations, at_least=1))
        object.__setattr__(self, "min_delta", require_number("min_delta", self.min_delta, at_least=0.0))


StopRule = Target | Plateau | TrialPlateau
#: What a user may pass: values of metrics at which a trial stops, a rule, or several rules.
StopArgument = Mapping[str, float] | StopRule | Sequence[StopRule] | None


@dataclass(frozen=True, slots=True)
class TrialStop:
    """Why a trial stops before its budget.

    Attributes:
        is_success: whether it has reached a value that was asked for.
    """

    is_success: bool


@dataclass(slots=True)
class _Best:
    score: float = math.inf
    #: Iterations, or trials, since the best score improved; whether one of the iterations had a value.
    since: int = 0
    is_beaten: bool = False

    def improves(self, score: float, min_delta: float) -> bool:
        """Takes a score; returns whether it is the first finite one, or better by more than ``min_delta``."""
        better = score < math.inf and (self.score == math.inf or score < self.score - min_delta)
        if better:
            self.score, self.since = score, 0
        self.is_beaten = not better
        return better


class StopRules:
    """Applies the rules of one sweep.

    Example:
        >>> from fluid.search.stop_rules import StopRules, Target
        >>> rules = StopRules({"accuracy": 0.9}, {"accuracy": False})
        >>> rules.result(0, -0.8, {"accuracy": 0.8}.get), rules.result(0, -0.95, {"accuracy": 0.95}.get)
        (None, TrialStop(is_success=True))
        >>> rules = StopRules([Target(0.9)], {"accuracy": False})
        >>> rules.result(0, -0.95, {"accuracy": 0.95}.get), rules.reason
        (None, 'the metric reached the target 0.9')

    Args:
        stop: the rules.
        less_is_better: by metric that is optimized; trials are compared by the first one.

    Attributes:
        reason: why the sweep is to end; ``None`` while it goes on.

    Raises:
        InvalidFieldError: ``stop`` is none of the kinds of rules.
    """

    def __init__(self, stop: StopArgument, less_is_better: Mapping[str, bool]) -> None:
        self._sign = 1.0 if next(iter(less_is_better.values())) else -1.0
        #: What was given, for people.
        self.text = repr(stop)
        self._values: dict[str, float] = {}
        #: Metrics of :attr:`_values` that reach theirs from above.
        self._fall: set[str] = set()
        #: Metrics of :attr:`_values` that no iteration has had so far.
        self._unreported: set[str] = set()
        rules: Sequence[Any] = ()
        if isinstance(stop, Mapping):
            for name, value in stop.items():
                field = f"stop[{require_text('stop', name)!r}]"
                self._values[name] = require_number(field, value, at_least=-math.inf)
                if less_is_better.get(name, direction_of(name) == "min"):
                    self._fall.add(name)
        elif isinstance(stop, list | tuple):
            rules = stop
        elif stop is not None:
            rules = (stop,)
        self._unreported.update(self._values)
        for rule in rules:
            if not isinstance(rule, StopRule):
                reason = "must be a dict of metrics and values, a Target, a Plateau, a TrialPlateau, or a list of these"
                raise InvalidFieldError("stop", rule, reason)
        self._rules: tuple[StopRule, ...] = tuple(rules)
        self._best = [_Best() for _ in self._rules]
        #: Of each trial that has not ended, one for each rule.
        self._best_of: dict[int, list[_Best]] = {}
        self.reason: str | None = None

    @property
    def end_sweep(self) -> bool:
        """Whether one of the rules can end the sweep."""
        return any(isinstance(rule, Target | Plateau) for rule in self._rules)

    @property
    def unreported(self) -> tuple[str, ...]:
        """Metrics with a value at which trials stop that no iteration has had so far."""
        return tuple(name for name in self._values if name in self._unreported)

    def result(self, trial: int, score: float | None, number_of: Callable[[str], float | None]) -> TrialStop | None:
        """Takes an iteration; returns why its trial is to stop, or ``None``.

        Args:
            trial: the trial's number.
            score: the metric's value, negated where more is better; ``None`` where the iteration has not got it: the
                trial's last one still counts.
            number_of: gives any metric of the iteration by its name; ``None`` where it has not got it.
        """
        stop = None
        for name, bound in self._values.items():
            value = number_of(name)
            if value is None:
                continue
            self._unreported.discard(name)
            sign = 1.0 if name in self._fall else -1.0
            if sign * value <= sign * bound:
                stop = TrialStop(is_success=True)
        for number, rule in enumerate(self._rules):
            if isinstance(rule, Target):
                if score is not None and score <= self._sign * rule.value and self.reason is None:
                    self.reason = f"the metric reached the target {rule.value:g}"
            elif isinstance(rule, Plateau):
                if score is not None:
                    self._best[number].improves(score, rule.min_delta)
            elif self._rests(trial, number, rule, score):
                stop = stop or TrialStop(is_success=False)
        return stop

    def _rests(self, trial: int, number: int, rule: TrialPlateau, score: float | None) -> bool:
        """Whether a trial no longer improves: not before it has reported a value since its best one."""
        if score is None and trial not in self._best_of:
            return False  # It has reported none so far.
        best = self._best_of.setdefault(trial, [_Best() for _ in self._rules])[number]
        best.since += 1
        if score is not None:
            best.improves(score, rule.min_delta)
        return best.is_beaten and best.since >= rule.iterations

    def decided(self, trial: int, *, is_over: bool) -> None:
        """Counts a trial that has ended, or waits at a rung.

        Args:
            trial: its number.
            is_over: whether it will not continue.
        """
        if is_over:
            self._best_of.pop(trial, None)
        for best, rule in zip(self._best, self._rules, strict=True):
            if isinstance(rule, Plateau):
                best.since += 1
                if best.since > rule.trials and self.reason is None:
                    self.reason = f"the best value did not improve in {rule.trials} trials"
