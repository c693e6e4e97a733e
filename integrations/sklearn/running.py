"""Runs the trials of a search, in the driver."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from sklearn.base import BaseEstimator

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor, executor_in_force
from fluid.integrations.sklearn import private_api
from fluid.integrations.sklearn.evaluation import (
    AMOUNT,
    DATA,
    ERROR,
    FITS,
    FOLD,
    ROW,
    SCORE,
    TRACEBACK,
    WARNINGS,
    SearchTask,
    evaluate,
    mean_score,
    parameters_of,
    train,
)
from fluid.integrations.sklearn.fit_warnings import FitWarning, issue
from fluid.integrations.sklearn.warm import WARM
from fluid.resources import Device, available_cores
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult
from fluid.results.run_files import is_used
from fluid.search import Sampler
from fluid.search.algorithms import make_scheduler, shape_for
from fluid.search.searchers import SamplerSearcher
from fluid.search.stop_rules import StopRules
from fluid.session.listeners import TrialFailedError, TrialListener, TrialRequest
from fluid.sweeping.loop import SweepLoop
from fluid.sweeping.plan import SweepPlan
from fluid.sweeping.resuming import EarlierSweep, read_sweep
from fluid.trainables.exception_pickle import load_any_exception, with_lane_cause
from fluid.trialgroup import Trial


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


class _Fits(TrialListener):
    """Follows the fits: ends the search at the first exception that is to, notes warnings, and knows the folds' scores.

    Args:
        task: the search.
        end: ends the search with an exception.
    """

    #: The search warns of them itself, or raises.
    tells_failures = True

    def __init__(self, task: SearchTask, end: Callable[[BaseException], None]) -> None:
        self._task = task
        self._end = end
        #: Of candidates whose folds are trials of their own.
        self._scores: dict[int, dict[int, float]] = {}
        self._warnings: list[tuple[str, FitWarning]] = []

    @property
    def warnings(self) -> list[FitWarning]:
        """Those of all fits, in the order of the candidates."""
        return [warning for _, warning in sorted(self._warnings, key=lambda each: each[0])]

    def recall(self, earlier: EarlierSweep) -> None:
        """Takes the scores of folds that an earlier session has reported."""
        configs = {trial.trial_id: trial.config for trial in earlier.trials}
        for event in earlier.events:
            if isinstance(event, Result) and FOLD in (config := configs[event.trial_id]):
                self._scores.setdefault(config[ROW], {})[config[FOLD]] = mean_score(self._task, event.metrics[FITS])

    def on_start(self, trial_id: str) -> None:
        pass

    def on_result(self, result: Result) -> None:
        self._warnings += [(result.trial_id, warning) for warning in result.metrics.get(WARNINGS, ())]
        if TRACEBACK in result.metrics:
            self._end(_exception_of(result.metrics))

    def on_request(self, request: TrialRequest) -> None:
        """A fold of a candidate has its score: the answer is the candidate's, once all folds have theirs."""
        row, fold, score = request.read()
        scores = self._scores.setdefault(row, {})
        scores[fold] = score
        request.answer(float(np.mean(list(scores.values()))) if len(scores) == len(self._task.splits) else math.nan)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        pass

    def on_broken(self, error: BaseException) -> None:
        pass


class SearchRun:
    """Evaluates the candidates that a sampler suggests.

    Args:
        task: the search.
        sampler: suggests candidates, or their folds.
        algorithm: its name, as for :func:`fluid.run`.
        eta: one in so many candidates continues at each rung.
        name: of the search in reports.
        constants: further entries of the trials' configs.
        trial_options: further fields of each trial.
    """

    def __init__(
        self,
        task: SearchTask,
        sampler: Sampler,
        *,
        algorithm: str,
        eta: int,
        name: str,
        constants: Mapping[str, Any],
        trial_options: Mapping[str, Any],
    ) -> None:
        self._task = task
        self._fits = _Fits(task, self._end)
        rungs = (1,) if task.ladder is None else task.ladder.rungs
        #: Hears of the trials.
        self.loop = SweepLoop(
            SweepPlan(
                trainable=partial(evaluate if task.ladder is None else train, task, partial(_uses, *_classes(task))),
                name=name,
                algorithm=algorithm,
                searcher=SamplerSearcher(sampler),
                learns=algorithm == "tpe",
                constants=constants,
                scheduler=make_scheduler(algorithm, rungs=rungs, eta=eta, samples=sampler.size),
                rules=StopRules(None, {SCORE: False}),
                goals=(Goal(SCORE, False),),
                samples=sampler.size,
                budget=rungs[-1],
                under_way=None,
                time_budget_s=None,
                oom_is_worst=False,
                trial_options=trial_options,
                callbacks=(self._fits,),
                shape=shape_for(algorithm, rungs=rungs, eta=eta, samples=sampler.size),
                keeps_best=False,  # The best candidate is fitted again, on all data.
            )
        )

    def _end(self, error: BaseException) -> None:
        """Ends the search with an exception of a fit; fits that run are ended, too."""
        trials = self.loop.trials
        self.loop.fail(error)
        for trial_id in trials.unfinished:
            if trials.handle is not None:
                with contextlib.suppress(FluidError):  # Another fit has ended the search, and so the session.
                    trials.handle.stop(trial_id, now=True)

    def run(self, executor: FluidExecutor, earlier: EarlierSweep | None = None) -> list[Evaluated]:
        """Evaluates the candidates; returns them in the order in which they were suggested.

        Args:
            executor: runs the trials.
            earlier: what an earlier session has left of the search; ``None`` to begin.

        Raises:
            Exception: what a fit or a scorer raised where ``error_score="raise"``.
        """
        if earlier is not None:
            self._fits.recall(earlier)
        try:
            self.loop.run(executor, earlier)
        finally:
            # Trials are left if the search is broken off; others may use the executor further.
            self.loop.trials.abandon()
            issue(self._fits.warnings)
        return _candidates(self._task, self.loop.trials.results)


@contextlib.contextmanager
def executor_for(
    given: FluidExecutor | None, n_jobs: int | None, run_dir: str | Path | None, *, is_shown: bool
) -> Iterator[FluidExecutor]:
    """The executor given, that in force, or one on CPU cores: with its own folder, or kept warm from fit to fit."""
    found = given or executor_in_force()
    if found is not None:
        yield found
    elif run_dir is not None or is_shown:
        with contextlib.closing(FluidExecutor(**_options(n_jobs, is_shown), run_dir=run_dir)) as made:
            yield made
    else:
        with WARM.lend(_number_of_jobs(n_jobs)) as warm:
            yield warm


def resumed_executor(
    run_dir: str | Path, n_jobs: int | None, search: SearchRun, *, is_shown: bool
) -> contextlib.closing[FluidExecutor]:
    """The executor of an earlier session, which a search goes on with."""
    plan = search.loop.plan
    given = Trial(plan.trainable, **plan.trial_options)
    executor = FluidExecutor.resume(
        run_dir,
        listeners={plan.name: search.loop},
        trainables={plan.name: given},
        **_options(n_jobs, is_shown),
    )
    return contextlib.closing(executor)


def earlier_search(run_dir: str | Path, name: str, constants: Mapping[str, Any]) -> EarlierSweep | None:
    """Returns what an earlier session has left of a search; ``None`` if its folder is still empty.

    Args:
        run_dir: the folder.
        name: of the search.
        constants: of its trials' configs.

    Raises:
        InvalidFieldError: the folder is that of another search.
    """
    if not is_used(Path(run_dir).expanduser()):
        return None
    found = read_sweep(run_dir, name)
    if any(trial.config.get(DATA) != constants[DATA] for trial in found.trials):
        raise InvalidFieldError("resume", True, f"the search in {run_dir} has other data, folds or another estimator")
    return found


def identity_of(task: SearchTask) -> str:
    """Tells apart searches whose scores cannot be compared, as they have other data, folds or estimators."""
    estimator = re.sub(" at 0x[0-9a-f]+", "", repr(task.estimator))  # Such as of a function, by its address.
    return str(joblib.hash((task.X, task.y, [tuple(map(np.asarray, split)) for split in task.splits], estimator)))


def _options(n_jobs: int | None, is_shown: bool) -> dict[str, Any]:
    """Of an executor that is made for one fit."""
    cores = [Device(index) for index in range(_number_of_jobs(n_jobs))]
    return {"backend": "local", "devices": cores, "packing": "off", "verbose": int(is_shown)}


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
    amount = ordered[0].metrics.get(AMOUNT, 0) if task.ladder is not None else None
    return Evaluated(params=parameters_of(ordered[0].config), fits=fits, iterations=ordered[0].iteration, amount=amount)


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


def new_name(name: str, executor: FluidExecutor) -> str:
    """Returns a name that no group of the executor has, as it is part of the trials' ids."""
    taken = {handle.name for handle in executor.handles}
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)
