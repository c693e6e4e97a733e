"""What a lane does for one trial: it fits a candidate on the training part of each fold, and scores it on the rest."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn import config_context
from sklearn.base import clone

from fluid._clock import MonotonicClock
from fluid.integrations.sklearn import private_api
from fluid.integrations.sklearn.fit_callbacks import LaneCallbacks
from fluid.integrations.sklearn.fit_warnings import FitWarning, recorded
from fluid.integrations.sklearn.resources import Ladder, SteppedFit
from fluid.trainables.driver_link import driver_link
from fluid.trainables.exception_pickle import dump_exception

#: The metric of a trial: the mean test score of its candidate's folds.
#: Of a candidate whose folds are trials of their own, the last one to end reports it, and the others NaN.
SCORE = "score"
#: Further entries of its metrics: the fits, as scikit-learn's ``_fit_and_score`` returns them; the resource used.
FITS, AMOUNT = "fits", "n_resources"
#: The warnings of an iteration, if there are any: :class:`~fluid.integrations.sklearn.fit_warnings.FitWarning` each.
WARNINGS = "warnings"
#: An exception that ends the search: pickled, or ``None`` where that is not possible, and its traceback.
ERROR, TRACEBACK = "error", "traceback"
#: Entries of a config besides the parameters; no parameter has a name with a space.
ROW, FOLD = "cv_results_ row", "cv fold"
#: An entry of the config of a search that can be resumed: which data and folds it is on.
DATA = "data and folds"
_CLOCK = MonotonicClock()


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """What all trials of a search share; lanes get it once.

    Attributes:
        estimator: is cloned for each fit.
        X: data.
        y: targets; ``None`` if there are none.
        splits: indices of the training and test rows of each fold.
        scorer: of scikit-learn.
        metric: the score that candidates are compared by, where there are several; ``None`` for the first one.
        fit_params: of the estimator's ``fit``.
        score_params: of the scorer.
        return_train_score: whether to score on the training rows, too.
        error_score: score of a fit that failed, or ``"raise"``.
        verbose: how much is printed.
        settings: scikit-learn's, as in the driver.
        ladder: how candidates train step by step; ``None`` to fit them at once.
        callbacks: scikit-learn's, called as candidates are fitted at once; ``None`` for none.
    """

    estimator: Any
    X: Any = field(repr=False)
    y: Any = field(repr=False)
    splits: Sequence[tuple[Any, Any]] = field(repr=False)
    scorer: Any
    metric: str | None
    fit_params: Mapping[str, Any]
    score_params: Mapping[str, Any]
    return_train_score: bool
    error_score: Any
    verbose: int
    settings: Mapping[str, Any] = field(repr=False)
    ladder: Ladder | None
    callbacks: LaneCallbacks | None = field(repr=False, default=None)


def evaluate(task: SearchTask, _uses: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Fits a candidate on its folds, each at once; returns the metrics.

    Args:
        task: the search.
        _uses: classes whose modules lanes load ahead.
        config: of the trial: all folds, or that one which it names.
    """
    params, folds = _parts(task, config)
    found: list[FitWarning] = []
    try:
        with _as_in_driver(task, found):
            fits = [_fit(task, params, fold, config[ROW]) for fold in folds]
    except Exception as error:
        return _report(error, found)
    score = mean_score(task, fits)
    if FOLD in config:
        score = driver_link().ask((config[ROW], config[FOLD], score))
    return {SCORE: score, FITS: fits, **_told(found)}


def train(task: SearchTask, _uses: Any, config: dict[str, Any], state: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Trains a candidate step by step on all folds; an iteration is a step on each of them.

    Args:
        task: the search.
        _uses: classes whose modules lanes load ahead.
        config: of the trial.
        state: ``None``, or the iterations done and the folds as they are then.
    """
    assert task.ladder is not None
    params, numbers = _parts(task, config)
    done, folds = (0, [Fold(task, params, number) for number in numbers]) if state is None else state
    for iteration in range(done, len(task.ladder.shares)):
        found: list[FitWarning] = []
        try:
            with _as_in_driver(task, found):
                fits = [fold.advance(task, iteration) for fold in folds]
        except Exception as error:
            yield _report(error, found), (iteration, folds)
            return
        amount = max(fold.amount for fold in folds)
        metrics = {SCORE: mean_score(task, fits), FITS: fits, AMOUNT: amount, **_told(found)}
        failed = any(fit["fit_error"] is not None for fit in fits)
        yield {**metrics, "done": True} if failed else metrics, (iteration + 1, folds)


class Fold:
    """A candidate on one fold, trained step by step. Pickled without the data.

    Args:
        task: the search.
        params: the candidate's.
        number: of the fold.
    """

    def __init__(self, task: SearchTask, params: Mapping[str, Any], number: int) -> None:
        self._params = params
        self._number = number
        self._fit: SteppedFit | None = None
        self._fit_s = 0.0

    @property
    def amount(self) -> int:
        """Of the resource that was used so far."""
        return 0 if self._fit is None else self._fit.amount

    def advance(self, task: SearchTask, iteration: int) -> dict[str, Any]:
        """Trains one iteration, and scores; returns what ``_fit_and_score`` would.

        Raises:
            Exception: the fit failed and ``error_score`` is ``"raise"``, or there is no score.
        """
        began = _CLOCK.now()
        fit: dict[str, Any] = {"fit_error": None, "score_time": 0.0}
        try:
            if self._fit is None:
                self._fit = self._begin(task)
            self._fit.advance(iteration, lambda: self._read(task))
        except Exception:
            if task.error_score == "raise":
                raise
            fit["fit_error"] = traceback.format_exc()
            fit["test_scores"] = private_api.scores_of_failure(task.scorer, task.error_score)
            if task.return_train_score:
                fit["train_scores"] = private_api.scores_of_failure(task.scorer, task.error_score)
        ended = _CLOCK.now()
        self._fit_s += ended - began
        train, test = task.splits[self._number]
        if fit["fit_error"] is None:
            fit["test_scores"] = self._score(task, test, train)
            fit["score_time"] = _CLOCK.now() - ended
            if task.return_train_score:
                fit["train_scores"] = self._score(task, train, None)
        return {**fit, "fit_time": self._fit_s, "n_test_samples": len(test)}

    def _begin(self, task: SearchTask) -> SteppedFit:
        assert task.ladder is not None
        estimator = clone(task.estimator).set_params(**clone(self._params, safe=False))
        classes = None if task.y is None else private_api.classes_in(task.y)
        return SteppedFit(estimator, task.ladder, classes)

    def _read(self, task: SearchTask) -> tuple[Any, Any, dict[str, Any]]:
        assert self._fit is not None
        train = task.splits[self._number][0]
        X, y = private_api.split(self._fit.estimator, task.X, task.y, train)
        return X, y, private_api.method_params(task.X, task.fit_params, train)

    def _score(self, task: SearchTask, rows: Any, train: Any) -> Any:
        assert self._fit is not None
        estimator = self._fit.estimator
        X, y = private_api.split(estimator, task.X, task.y, rows, train)
        params = private_api.method_params(task.X, task.score_params, rows)
        return private_api.score(estimator, X, y, task.scorer, params, task.error_score)


@contextlib.contextmanager
def _as_in_driver(task: SearchTask, found: list[FitWarning]) -> Iterator[None]:
    """Code of a block has the driver's settings of scikit-learn; its warnings are added to a list."""
    with config_context(**task.settings), recorded(found):
        yield


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of the estimator in a trial's config."""
    return {name: value for name, value in config.items() if name not in (ROW, FOLD, DATA)}


def _parts(task: SearchTask, config: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[int]]:
    """Returns the parameters of a trial, and its folds."""
    return parameters_of(config), [config[FOLD]] if FOLD in config else range(len(task.splits))


def _fit(task: SearchTask, params: dict[str, Any], fold: int, row: int) -> dict[str, Any]:
    train, test = task.splits[fold]
    callbacks = task.callbacks
    return private_api.fit_and_score(
        clone(task.estimator),
        task.X,
        task.y,
        scorer=task.scorer,
        train=train,
        test=test,
        parameters=params,
        fit_params=task.fit_params,
        score_params=task.score_params,
        return_train_score=task.return_train_score,
        error_score=task.error_score,
        verbose=task.verbose,
        split_progress=(fold, len(task.splits)),
        **({} if callbacks is None else callbacks.of_fit(row * len(task.splits) + fold)),
    )


def mean_score(task: SearchTask, fits: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean test score of fits, of the metric that candidates are compared by."""
    return float(np.mean([_value(task, fit["test_scores"]) for fit in fits]))


def _value(task: SearchTask, scores: Any) -> float:
    if not isinstance(scores, Mapping):
        return float(scores)
    return float(scores[task.metric] if task.metric in scores else next(iter(scores.values())))


def _told(found: list[FitWarning]) -> dict[str, Any]:
    return {WARNINGS: found} if found else {}


def _report(error: Exception, found: list[FitWarning]) -> dict[str, Any]:
    return {ERROR: dump_exception(error), TRACEBACK: traceback.format_exc(), **_told(found), "done": True}
