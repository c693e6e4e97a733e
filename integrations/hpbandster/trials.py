"""Trials of Fluid for the configurations of HpBandSter: of a trainable, or of a HpBandSter worker."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from fluid.errors import InvalidFieldError
from fluid.integrations.hpbandster.optimizers import BracketState
from fluid.integrations.hpbandster.worker_trial import WorkerTrial
from fluid.search_shape import SearchShape
from fluid.trialgroup import Search, Trial

_runs = itertools.count()


class TrialFactory(Protocol):
    """Makes trials of HpBandSter's jobs.

    A job is a configuration and a budget; ``bracket`` is the iteration of Successive Halving that it belongs to.

    Attributes:
        resume: whether a trial continues to larger budgets.
    """

    resume: bool

    def trial(self, job: Any, bracket: Any) -> Trial:
        """Returns a new trial for a job."""

    def iterations(self, job: Any) -> int:
        """Returns how many iterations a trial has done at the end of a job."""

    def follow_up_iterations(self, job: Any, bracket: Any) -> int:
        """Returns how many iterations the later stages of the bracket have for the trials that get there."""

    def search(self, bracket: Any, trials: int) -> Search | None:
        """Returns what reports and forecasts are told of so many new trials of a bracket; ``None`` for nothing."""

    def result(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns HpBandSter's result for the last metrics of a trial.

        Raises:
            InvalidFieldError: the metric is missing, or not a number.
        """


class TrainableTrials:
    """Trials of a trainable of Fluid; a budget is a number of iterations.

    Args:
        trainable: what to train.
        metric: the metric to optimize.
        mode: ``"min"`` or ``"max"``.
        resume: whether trials continue to larger budgets.
    """

    def __init__(self, trainable: Any, metric: str, mode: str, resume: bool) -> None:
        self._trainable = trainable
        self._metric = metric
        self._mode = mode
        self._sign = 1.0 if mode == "min" else -1.0
        self.resume = resume

    def trial(self, job: Any, bracket: Any) -> Trial:
        return Trial(
            self._trainable,
            dict(job.kwargs["config"]),
            budget=self.iterations(job),
            follow_up_iterations=self.follow_up_iterations(job, bracket),
        )

    def iterations(self, job: Any) -> int:
        iterations: int = round(job.kwargs["budget"])
        return iterations

    def follow_up_iterations(self, job: Any, bracket: Any) -> int:
        last: int = round(bracket.budgets[-1])
        return max(0, last - self.iterations(job))

    def search(self, bracket: Any, trials: int) -> Search | None:
        if not self.resume:
            return Search(self._metric, self._mode, extends=False)  # What continues is a new trial.
        rungs = [round(budget) for budget in bracket.budgets]
        sizes = [int(size) for size in bracket.num_configs]
        shape = None
        if trials == sizes[0] and all(later > earlier for earlier, later in pairwise([0, *rungs])):
            shape = SearchShape(algorithm="halving", rungs=tuple(rungs), brackets=(tuple(sizes),))
        return Search(self._metric, self._mode, trials, extends=True, shape=shape)

    def result(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}
        return {"loss": self._sign * _number(plain, self._metric), "info": plain}


class WorkerTrials:
    """Trials of a HpBandSter worker, whose ``compute`` is called once for each budget.

    Args:
        state: the optimizer's, which holds the budgets.
        worker: a subclass of HpBandSter's ``Worker``.
        options: the worker's arguments.
        working_directory: passed to ``compute``.
    """

    resume = True

    def __init__(
        self,
        state: BracketState,
        worker: Any,
        options: dict[str, Any],
        working_directory: str,
        isolation: Literal["lane"] | None = "lane",
    ) -> None:
        self._state = state
        self._isolation = isolation
        self._shared = {
            "worker": worker,
            "options": options,
            "run_id": f"fluid-{next(_runs)}",
            "working_directory": working_directory,
        }
        self._name = worker.__qualname__

    def trial(self, job: Any, bracket: Any) -> Trial:
        budgets = [float(budget) for budget in bracket.budgets[job.id[1] :]]
        own = {"config_id": job.id, "config": job.kwargs["config"], "budgets": budgets}
        return Trial(
            WorkerTrial,
            {**self._shared, **own},
            budget=1,
            profile_key=self._name,
            follow_up_iterations=self.follow_up_iterations(job, bracket),
            iteration_timeout_s=None,  # An iteration is a job, and those of larger budgets take many times as long.
            isolation=self._isolation,
        )

    def iterations(self, job: Any) -> int:
        bracket, first_stage, _ = job.id
        return int(self._state.iterations[bracket].stage) - int(first_stage) + 1

    def follow_up_iterations(self, job: Any, bracket: Any) -> int:
        return len(bracket.budgets) - 1 - int(bracket.stage)

    def search(self, bracket: Any, trials: int) -> Search | None:
        return None  # Its iterations are stages, each longer than the one before.

    def result(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {"loss": _number(metrics, "loss"), "info": metrics["info"]}


def _number(metrics: Mapping[str, Any], metric: str) -> float:
    if metric not in metrics:
        raise InvalidFieldError("metric", metric, f"is not among the metrics that trials report: {', '.join(metrics)}")
    try:
        return float(metrics[metric])
    except (TypeError, ValueError) as error:
        raise InvalidFieldError("metric", metric, f"is not a number: {metrics[metric]!r}") from error
