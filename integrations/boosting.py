"""What sweeps over XGBoost and LightGBM share: boosting rounds as iterations, early stopping, the threads of a lane.

A trial trains a booster, its state is the booster itself, and an iteration is one boosting round or several.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fluid.directions import direction_of
from fluid.errors import InvalidFieldError, require_integer
from fluid.executor import executor_in_force
from fluid.integrations.options import require_options
from fluid.results.metrics import Goal, goals_of, modes_of
from fluid.results.sweep import SweepResult
from fluid.session.specs import ISOLATING
from fluid.sweep import run

#: Most iterations of a trial where the user does not say how many rounds one has: each is reported and recorded.
_MOST_ITERATIONS = 100


class Score(NamedTuple):
    """One value of an evaluation.

    Attributes:
        name: as the trial reports it: ``valid-logloss``.
        value: of the metric.
        more: whether more is better.
        counts: whether early stopping looks at it.
    """

    name: str
    value: float
    more: bool = False
    counts: bool = True


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How a trial is cut into iterations, and when it ends.

    Attributes:
        most: boosting rounds of a trial that is not stopped.
        per_iteration: rounds of an iteration.
        patience: rounds without an improvement after which a trial ends by itself; ``None`` for no early stopping.
        min_delta: by how much a value must improve to count.
    """

    most: int
    per_iteration: int
    patience: int | None = None
    min_delta: float = 0.0


class BoosterProgress(NamedTuple):
    """How far a booster is.

    Attributes:
        done: rounds.
        best: by its place among them, of each score that early stopping looks at: the best value, and the round (from
            0) that had it.
    """

    done: int
    best: dict[int, tuple[float, int]]


class BoosterTraining(Protocol):
    """A booster that is trained in a lane."""

    #: The library's booster: the state of the trial.
    booster: Any

    def advance(self, round_number: int) -> None:
        """Trains one round; rounds count from 0."""
        ...

    def evaluate(self, round_number: int) -> list[Score]:
        """Evaluates the booster on all sets."""
        ...

    def note(self, progress: BoosterProgress, best_round: int | None) -> None:
        """Writes into the booster how far it is, and, once early stopping has ended it, its best round."""
        ...


def iterations(
    training: BoosterTraining, rounds: Rounds, progress: BoosterProgress
) -> Iterator[tuple[dict[str, float], Any]]:
    """Trains a booster; yields the metrics of each iteration, and the booster.

    Args:
        training: the booster, as ``progress`` says.
        rounds: how many there are.
        progress: how far the booster is.
    """
    done, best = progress.done, dict(progress.best)
    ended = _ended_by(done, best, rounds)
    while done < rounds.most and ended is None:
        scores = []
        for _ in range(min(rounds.per_iteration, rounds.most - done)):
            training.advance(done)
            done += 1
            if rounds.patience is not None:
                scores = training.evaluate(done - 1)
                _update(best, scores, done - 1, rounds.min_delta)
                ended = _ended_by(done, best, rounds)
                if ended is not None:
                    break
        scores = scores or training.evaluate(done - 1)
        training.note(BoosterProgress(done, best), ended)
        yield {score.name: score.value for score in scores}, training.booster


def _update(best: dict[int, tuple[float, int]], scores: Sequence[Score], round_number: int, min_delta: float) -> None:
    for place, score in enumerate(score for score in scores if score.counts):
        known = best.get(place)
        sign = 1.0 if score.more else -1.0
        if known is None or sign * score.value - min_delta > sign * known[0]:
            best[place] = score.value, round_number


def _ended_by(done: int, best: Mapping[int, tuple[float, int]], rounds: Rounds) -> int | None:
    """The best round of a score that has not improved for too long; ``None`` if there is none."""
    if rounds.patience is None:
        return None
    return next((number for _, number in best.values() if done - 1 - number >= rounds.patience), None)


def lane_threads() -> int:
    """How many threads the lane of this process gives its trial: one on a device that is a CPU core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(given)) if given.isdecimal() else 1


def with_threads(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns params with the threads of the lane, unless they say a number of their own.

    Args:
        params: the trial's.
        names: of the parameter for threads; the first is set.
    """
    own = {name: value for name, value in params.items() if name not in names or (value or 0) > 0}
    if any(name in own for name in names):
        return own
    return {**own, next(iter(names)): lane_threads()}


def space_of(params: Any, lists: Collection[str]) -> Any:
    """Returns the search space that parameters stand for.

    Args:
        params: by name; values, lists of choices and distributions; or a function of an Optuna trial.
        lists: names of parameters whose value is a list or a tuple, which is then no list of choices.

    Raises:
        InvalidFieldError: they are neither.
    """
    if not isinstance(params, Mapping):
        if not callable(params):
            raise InvalidFieldError("params", params, "must be a dict of parameters, or a function of an Optuna trial")
        return params
    return {
        name: [value] if name in lists and isinstance(value, (list, tuple)) else value for name, value in params.items()
    }


def sweep(
    trainable: Callable[..., Any],
    space: Any,
    *,
    rounds: Rounds,
    goals: Sequence[Goal],
    options: Mapping[str, Any],
) -> SweepResult:
    """Runs the sweep: see :func:`fluid.run`.

    Args:
        trainable: yields metrics and a booster.
        space: of the parameters.
        rounds: of each trial.
        goals: what it optimizes.
        options: further arguments of :func:`fluid.run`.
    """
    require_options(run, options, {"budget": "follows from num_boost_round, the rounds of a trial"})
    own, executor = options.get("trial_options"), options.get("executor") or executor_in_force()
    if own is None or isinstance(own, Mapping):
        # A lane makes the data once for all its trials, and what runs there leaves nothing behind.
        isolation = (ISOLATING if executor is None else executor.isolating).of_sharing_sweep
        options = {**options, "trial_options": {"isolation": isolation, **(own or {})}}
    return run(
        trainable,
        space,
        metric=[goal.metric for goal in goals],
        mode=[goal.mode for goal in goals],
        budget=-(-rounds.most // rounds.per_iteration),
        **options,
    )


def goals_among(metric: Any, mode: Any, sets: Collection[str], said: Callable[[str], str | None]) -> tuple[Goal, ...]:
    """Returns the goals of a sweep, whose metrics have the name of a set in front: ``valid-auc``.

    Args:
        metric: the name, or names.
        mode: ``None`` for what the library says of a metric, else for what its name does.
        sets: names of the sets.
        said: the mode that the user or the library gives a metric, by its name without a set; ``None`` for none.

    Raises:
        InvalidFieldError: one cannot be used, or nothing says the mode of a metric.
    """
    if mode is None:
        names = [(name, without_set(name, sets)) for name, _ in modes_of(metric, None)]
        mode = [said(inner) or direction_of(inner) or direction_of(name) for name, inner in names]
    return goals_of(metric, mode or None)


def without_set(name: str, sets: Collection[str]) -> str:
    """The name of a metric without that of the set it is of."""
    return next((name.removeprefix(f"{each}-") for each in sets if name.startswith(f"{each}-")), name)


def rounds_of(num_boost_round: Any, rounds_per_iteration: Any, patience: Any, min_delta: Any = 0.0) -> Rounds:
    """Checks arguments; without ``rounds_per_iteration`` a trial has 100 iterations at most.

    Raises:
        InvalidFieldError: one cannot be used.
    """
    most = require_integer("num_boost_round", num_boost_round, at_least=1)
    if rounds_per_iteration is None:
        rounds_per_iteration = -(-most // _MOST_ITERATIONS)
    return Rounds(
        most=most,
        per_iteration=require_integer("rounds_per_iteration", rounds_per_iteration, at_least=1, at_most=most),
        patience=None if not patience else require_integer("early_stopping_rounds", patience, at_least=1),
        min_delta=float(min_delta),
    )


def eval_sets_of(eval_set: Any, weights: Any, weights_name: str) -> list[tuple[Any, Any, Any]]:
    """Returns data, labels and weights of each set that an estimator's ``fit`` is to evaluate.

    Args:
        eval_set: pairs of data and labels, or one pair, a tuple.
        weights: of each set; ``None`` for none.
        weights_name: the argument's.

    Raises:
        InvalidFieldError: they are no such pairs, or there are not as many weights.
    """
    is_pair = isinstance(eval_set, tuple) and not all(isinstance(each, tuple) for each in eval_set)
    pairs = [eval_set] if is_pair else eval_set
    if not isinstance(pairs, (list, tuple)) or not pairs or any(not _is_pair(each) for each in pairs):
        raise InvalidFieldError(
            "eval_set", eval_set, "must be a list of pairs, each of data and labels, or one such pair"
        )
    weights = [None] * len(pairs) if weights is None else list(weights)
    if len(weights) != len(pairs):
        raise InvalidFieldError(weights_name, weights, f"must have the weights of each of the {len(pairs)} sets")
    return [(as_rows(data), labels, weight) for (data, labels), weight in zip(pairs, weights, strict=True)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2


def as_rows(data: Any) -> Any:
    """Returns data as a library and a selection of rows take it: an array in place of lists."""
    return np.asarray(data) if isinstance(data, (list, tuple)) else data
