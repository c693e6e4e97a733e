"""Runs the trials of a search, in the driver."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sklearn.base import BaseEstimator

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor, executor_in_force
from fluid.integrations.sklearn import private_api
from fluid.integrations.sklearn.evaluation import (
    AMOUNT,
    ERROR,
    FITS,
    FOLD,
    ROW,
    SCORE,
    TRACEBACK,
    SearchTask,
    evaluate,
    train,
)
from fluid.integrations.sklearn.warm import WARM
from fluid.resources import available_cores
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult
from fluid.search import Sampler
from fluid.search.algorithms import make_scheduler, shape_for
from fluid.search.searchers import SamplerSearcher
from fluid.search.stop_rules import StopRules
from fluid.session.results import TrialFailedError, TrialListener
from fluid.sweeping.loop import SweepLoop
from fluid.sweeping.plan import SweepPlan
from fluid.trainables.exception_pickle import load_any_exception, with_lane_cause


@dataclass(kw_only=True)
class Evaluated:
    """A candidate that was evaluated.

    Attributes:
        params: its parameters.
        fits: on each fold, as ``_fit_and_score`` returns them.
        iterations: that it trained.
        amount: of the resource that it used; ``None`` if candidates do not train step by step.
    """

    params: Mapping[str, Any]
    fits: list[dict[str, Any]]
    iterations: int
    amount: int | None


class SearchFitError(FluidError):
    """The cause of an exception that a fit or a scorer raised in a lane: the text is its traceback there.

    Example:
        >>> from fluid.integrations.sklearn.running import SearchFitError
        >>> str(SearchFitError("Traceback ..."))
        'Traceback ...'
    """


class _Errors(TrialListener):
    """Notes the first exception that is to end the search."""

    def __init__(self) -> None:
        self.found: BaseException | None = None

    def on_result(self, result: Result) -> None:
        if self.found is None and TRACEBACK in result.metrics:
            self.found = _exception_of(result.metrics)

    def on_start(self, trial_id: str) -> None:
        pass

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        pass

    def on_broken(self, error: BaseException) -> None:
        pass


def run_search(
    task: SearchTask,
    sampler: Sampler,
    *,
    algorithm: str,
    eta: int,
    executor: FluidExecutor,
    name: str,
    trial_options: Mapping[str, Any],
) -> list[Evaluated]:
    """Evaluates the candidates that a sampler suggests.

    Args:
        task: the search.
        sampler: suggests candidates, or their folds.
        algorithm: its name, as for :func:`fluid.run`.
        eta: one in so many candidates continues at each rung.
        executor: runs the trials.
        name: of the search in reports.
        trial_options: further fields of each trial.

    Returns:
        The candidates, in the order in which they were suggested.

    Raises:
        Exception: what a fit or a scorer raised where ``error_score="raise"``.
    """
    errors = _Errors()
    rungs = (1,) if task.ladder is None else task.ladder.rungs
    loop = SweepLoop(
        SweepPlan(
            trainable=partial(evaluate if task.ladder is None else train, task, partial(_uses, *_classes(task))),
            name=_new_name(f"{name}-{algorithm}", executor),
            algorithm=algorithm,
            searcher=SamplerSearcher(sampler),
            learns=algorithm == "tpe",
            constants={},
            scheduler=make_scheduler(algorithm, rungs=rungs, eta=eta, samples=sampler.size),
            rules=StopRules(None, {SCORE: False}),
            goals=(Goal(SCORE, False),),
            samples=sampler.size,
            budget=rungs[-1],
            under_way=None,
            time_budget_s=None,
            oom_is_worst=False,
            # As joblib's processes.
            trial_options={"isolation": executor.isolating.of_sharing_sweep, **trial_options},
            callbacks=(errors,),
            shape=shape_for(algorithm, rungs=rungs, eta=eta, samples=sampler.size),
            keeps_best=False,  # The best candidate is fitted again, on all data.
        )
    )
    try:
        loop.run(executor)
    except InvalidFieldError:
        if errors.found is None:
            raise
    finally:
        loop.trials.abandon()  # Trials are left if the search is broken off; others may use the executor further.
    if errors.found is not None:
        raise errors.found
    return _candidates(task, loop.trials.results)


@contextlib.contextmanager
def executor_for(given: FluidExecutor | None, n_jobs: int | None, *, is_shown: bool) -> Iterator[FluidExecutor]:
    """The executor given, that in force, or one on CPU cores that is kept warm from fit to fit."""
    found = given or executor_in_force()
    if found is not None:
        yield found
        return
    with WARM.lend(_number_of_jobs(n_jobs), is_shown=is_shown) as warm:
        yield warm


def _number_of_jobs(n_jobs: int | None) -> int:
    cores = len(available_cores())
    if n_jobs is None:
        return cores
    return n_jobs if n_jobs > 0 else max(1, cores + 1 + n_jobs)


def _candidates(task: SearchTask, trials: Sequence[TrialResult]) -> list[Evaluated]:
    """Puts the trials of each candidate together."""
    of_row: dict[int, list[TrialResult]] = {}
    for trial in trials:
        of_row.setdefault(trial.config[ROW], []).append(trial)
    return [_candidate(task, of_row[row]) for row in sorted(of_row)]


def _candidate(task: SearchTask, trials: Sequence[TrialResult]) -> Evaluated:
    ordered = sorted(trials, key=lambda trial: trial.config.get(FOLD, 0))
    fits = [fit for trial in ordered for fit in _fits(task, trial)]
    params = {name: value for name, value in ordered[0].config.items() if name not in (ROW, FOLD)}
    amount = ordered[0].metrics.get(AMOUNT, 0) if task.ladder is not None else None
    return Evaluated(params=params, fits=fits, iterations=ordered[0].iteration, amount=amount)


def _fits(task: SearchTask, trial: TrialResult) -> list[dict[str, Any]]:
    if trial.failure is None:
        fits: list[dict[str, Any]] = trial.metrics[FITS]
        return fits
    # Its process died, again and again.
    if task.error_score == "raise":
        raise TrialFailedError(trial.trial_id, trial.failure)
    scores = private_api.scores_of_failure(task.scorer, task.error_score)
    folds = [trial.config[FOLD]] if FOLD in trial.config else range(len(task.splits))
    made = {"fit_error": trial.failure.message, "test_scores": scores, "fit_time": 0.0, "score_time": 0.0}
    if task.return_train_score:
        made["train_scores"] = scores
    return [{**made, "n_test_samples": len(task.splits[fold][1])} for fold in folds]


def _exception_of(metrics: Mapping[str, Any]) -> BaseException:
    return with_lane_cause(load_any_exception(metrics[ERROR]), SearchFitError(metrics[TRACEBACK]))


def _uses(*classes: type) -> None:
    """Stands for classes that a trainable uses: its code does not name them, and lanes load their modules ahead."""


def _classes(task: SearchTask) -> list[type]:
    """The classes of the estimator and those in it, sorted."""
    parameters = task.estimator.get_params(deep=True) if hasattr(task.estimator, "get_params") else {}
    inner = {type(value) for value in parameters.values() if isinstance(value, BaseEstimator)}
    return [type(task.estimator), *sorted(inner, key=lambda cls: cls.__qualname__)]


def _new_name(name: str, executor: FluidExecutor) -> str:
    """Returns a name that no group of the executor has, as it is part of the trials' ids."""
    taken = {handle.name for handle in executor.handles}
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)
