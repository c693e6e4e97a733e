"""Runs an optimizer of HpBandSter on Fluid: each stage of its iterations is handed over in one step."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError, require_integer, require_number, require_one_of
from fluid.executor import FluidExecutor, executor_scope
from fluid.integrations.hpbandster.optimizers import BracketState, Job, SeededRandom, Worker, make, quiet
from fluid.integrations.hpbandster.worker_trial import WorkerTrial
from fluid.session.handle import TrialGroupHandle
from fluid.session.results import Result, TrialListener
from fluid.trainables.trainable import kind_of
from fluid.trialgroup import Trial, TrialGroup

_runs = itertools.count()


def run(
    optimizer: Any,
    configspace: Any,
    trainable: Any,
    *,
    max_budget: float,
    min_budget: float = 1,
    eta: float = 3,
    n_iterations: int = 1,
    metric: str = "loss",
    mode: str = "min",
    synchronous: bool = False,
    resume: bool = True,
    executor: FluidExecutor | None = None,
    seed: int | None = None,
    worker_options: Mapping[str, Any] | None = None,
    working_directory: str = ".",
    **options: Any,
) -> Any:
    """Runs an optimizer of HpBandSter to its end.

    Args:
        optimizer: ``RandomSearch``, ``HyperBand``, ``BOHB`` or another subclass of HpBandSter's ``Master``; or the
            name of one of the three.
        configspace: a ``ConfigSpace.ConfigurationSpace``.
        trainable: anything that Fluid can run, a budget being iterations; or a subclass of HpBandSter's ``Worker``,
            whose ``compute`` is called once for each budget of a configuration.
        max_budget: the largest budget. With a trainable, budgets are rounded to whole iterations.
        min_budget: no budget is below it.
        eta: one configuration in so many goes on to a budget so many times as large; at least 2.
        n_iterations: how often Successive Halving is run.
        metric: what a trainable reports that says how good it is; of a worker it is ``"loss"``.
        mode: ``"min"`` or ``"max"``. The losses in the result are always to be minimized.
        synchronous: whether an iteration begins only when the one before it is complete. If not, it begins when fewer
            trials are under way than there are devices.
        resume: whether a configuration goes on to a larger budget from where it is, instead of from the beginning.
        executor: runs the trials; ``None`` for the one in force, or else one made for this run. It is closed at the end
            unless it is in a ``with`` block.
        seed: of the configurations. The same seed gives the same ones if the run is synchronous; without a model, as
            for ``RandomSearch`` and ``HyperBand``, always.
        worker_options: what a worker is made with.
        working_directory: what a worker's ``compute`` is given as such.
        options: of the optimizer, such as ``random_fraction``; and ``result_logger`` and ``previous_result``.

    Returns:
        HpBandSter's ``Result``. A run that failed has a loss of ``None``, and its traceback.

    Raises:
        InvalidFieldError: an argument cannot be used, or trials report no such metric.
        FluidError: the executor was closed meanwhile.
    """
    works = isinstance(trainable, type) and issubclass(trainable, Worker)
    if not works:
        kind_of(trainable)
    elif metric != "loss" or mode != "min":
        raise InvalidFieldError("metric", metric, "of a worker is loss, which is to be minimized")
    require_number("min_budget", min_budget, at_least=0.0 if works else 1.0)
    if min_budget == 0:
        raise InvalidFieldError("min_budget", min_budget, "must be positive")
    require_number("max_budget", max_budget, at_least=min_budget)
    require_number("eta", eta, at_least=2.0)
    iterations = require_integer("n_iterations", n_iterations, at_least=1)
    require_one_of("mode", mode, ("min", "max"))
    if executor is not None and not isinstance(executor, FluidExecutor):
        raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
    chance = SeededRandom(seed)
    with quiet(), chance.executor_scope():
        books = make(optimizer, configspace, eta=eta, min_budget=min_budget, max_budget=max_budget, **options)
        if seed is not None:
            configspace.seed(seed)
    if works:
        trials: Trials = WorkerTrials(books, trainable, dict(worker_options or {}), working_directory)
    else:
        trials = Trials(trainable, metric, 1.0 if mode == "min" else -1.0, resume)
    with executor_scope(executor) as chosen:
        return _Run(books, trials, chosen, chance, synchronous).to_the_end(iterations)


class Trials:
    """Makes trials of configurations, a budget being iterations.

    Args:
        trainable: what to run.
        metric: says how good it is.
        sign: what makes it a loss.
        resume: whether trials go on to larger budgets.
    """

    def __init__(self, trainable: Any, metric: str, sign: float, resume: bool) -> None:
        self._trainable = trainable
        self._metric = metric
        self._sign = sign
        self.resume = resume

    def trial(self, job: Any, stages: Any) -> Trial:
        """A trial that has run nothing yet; ``stages`` is the iteration of Successive Halving that it belongs to."""
        config, follow_up_iterations = dict(job.kwargs["config"]), self.follow_up_iterations(job, stages)
        return Trial(self._trainable, config, budget=self.iterations(job), follow_up_iterations=follow_up_iterations)

    def iterations(self, job: Any) -> int:
        """How many iterations a trial has done when it has had its budget."""
        iterations: int = round(job.kwargs["budget"])
        return iterations

    def follow_up_iterations(self, job: Any, stages: Any) -> int:
        """How many iterations the stages after this one have for those that get there."""
        last: int = round(stages.budgets[-1])
        return max(0, last - self.iterations(job))

    def result(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """HpBandSter's result from what a trial reported.

        Raises:
            InvalidFieldError: the metric is not among it, or no number.
        """
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}
        if self._metric not in plain:
            raise InvalidFieldError("metric", self._metric, f"is not among what trials report: {', '.join(plain)}")
        try:
            loss = self._sign * float(plain[self._metric])
        except (TypeError, ValueError) as error:
            raise InvalidFieldError("metric", self._metric, f"is no number: {plain[self._metric]!r}") from error
        return {"loss": loss, "info": plain}


class WorkerTrials(Trials):
    """Makes trials that call a worker's ``compute``, once for each budget.

    Args:
        books: know which budgets there are.
        worker: a subclass of HpBandSter's ``Worker``.
        options: what it is made with.
        working_directory: what ``compute`` is given as such.
    """

    def __init__(self, books: BracketState, worker: Any, options: dict[str, Any], working_directory: str) -> None:
        super().__init__(WorkerTrial, "loss", 1.0, resume=True)
        self._books = books
        self._shared = {
            "worker": worker,
            "options": options,
            "run_id": f"fluid-{next(_runs)}",
            "working_directory": working_directory,
        }
        self._name = worker.__qualname__

    def trial(self, job: Any, stages: Any) -> Trial:
        budgets = [float(budget) for budget in stages.budgets[job.id[1] :]]
        own = {"config_id": job.id, "config": job.kwargs["config"], "budgets": budgets}
        config, follow_up_iterations = {**self._shared, **own}, self.follow_up_iterations(job, stages)
        return Trial(
            self._trainable, config, budget=1, profile_key=self._name, follow_up_iterations=follow_up_iterations
        )

    def follow_up_iterations(self, job: Any, stages: Any) -> int:
        return len(stages.budgets) - 1 - int(stages.stage)

    def iterations(self, job: Any) -> int:
        iteration, first_stage, _ = job.id
        return int(self._books.iterations[iteration].stage) - int(first_stage) + 1

    def result(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {"loss": super().result(metrics)["loss"], "info": metrics["info"]}


@dataclass(eq=False)
class _Trial:
    """A configuration on Fluid.

    Attributes:
        job: what it was asked for last.
        handle: of its TrialGroup.
        iterations: how many it has been given.
        metrics: what it reported last.
    """

    job: Any
    iterations: int
    handle: TrialGroupHandle | None = None
    metrics: Mapping[str, Any] | None = None


@dataclass
class _Run(TrialListener):
    """An optimizer that runs. What Fluid's own thread tells is read in the one that called :func:`run`."""

    books: BracketState
    trials: Trials
    executor: FluidExecutor
    chance: SeededRandom
    synchronous: bool
    #: By its id in Fluid, and that by the configuration's.
    known: dict[str, _Trial] = field(default_factory=dict)
    ids: dict[Any, str] = field(default_factory=dict)
    under_way: set[str] = field(default_factory=set)
    #: Jobs that have ended and are not registered yet.
    ended: list[Any] = field(default_factory=list)
    news: queue.SimpleQueue[tuple[str, Failure | None] | BaseException] = field(default_factory=queue.SimpleQueue)

    def to_the_end(self, iterations: int) -> Any:
        """Runs so many iterations and returns HpBandSter's result."""
        try:
            while True:
                runs = self._next_runs()
                self._let_go()
                if runs:
                    self._submit(runs)
                elif iterations and len(self.under_way) < self._enough:
                    iterations -= 1
                    with quiet(), self.chance.executor_scope():
                        self.books.begin_iteration()
                elif self.under_way:
                    self._await_news()
                else:
                    return self.books.result()
        finally:
            with contextlib.suppress(FluidError):
                for trial_id in self.under_way:
                    handle = self.known[trial_id].handle
                    if handle is not None:
                        handle.stop(trial_id)

    @property
    def _enough(self) -> int:
        """Trials under way with which no other iteration is begun."""
        return 1 if self.synchronous else len(self.executor.devices)

    def _next_runs(self) -> list[Any]:
        with quiet(), self.chance.executor_scope():
            runs = []
            for config_id, config, budget in self.books.next_runs():
                job = Job(config_id, config=config, budget=budget)
                job.time_it("submitted")
                runs.append(job)
            return runs

    # -- trials on Fluid -----------------------------------------------------------------------------------

    def _submit(self, jobs: list[Any]) -> None:
        """Has a stage run: configurations that are new as a TrialGroup, and the others where they are."""
        fresh: dict[int, list[Trial]] = {}
        for job in jobs:
            trial_id = self.ids.get(job.id)
            if trial_id is not None:
                self._extend(trial_id, job)
                continue
            trial = self.trials.trial(job, self.books.iterations[job.id[0]])
            self.ids[job.id] = trial.id
            self.known[trial.id] = _Trial(job, trial.budget)
            self.under_way.add(trial.id)
            fresh.setdefault(job.id[0], []).append(trial)
        for iteration, trials in fresh.items():
            name = f"iteration {iteration}, stage {self.books.iterations[iteration].stage}"
            handle = self.executor.submit_trialgroup(TrialGroup(trials, name=name), listener=self)
            for trial in trials:
                self.known[trial.id].handle = handle

    def _extend(self, trial_id: str, job: Any) -> None:
        trial = self.known[trial_id]
        assert trial.handle is not None
        further = self.trials.iterations(job) - trial.iterations
        trial.job, trial.iterations = job, trial.iterations + further
        self.under_way.add(trial_id)
        follow_up_iterations = self.trials.follow_up_iterations(job, self.books.iterations[job.id[0]])
        trial.handle.extend(trial_id, further, follow_up_iterations=follow_up_iterations)

    def _let_go(self) -> None:
        """Drops trials that will not go on."""
        for config_id, trial_id in list(self.ids.items()):
            status = self.books.iterations[config_id[0]].data[config_id].status
            goes_on = status in ("QUEUED", "RUNNING", "REVIEW") and (self.trials.resume or trial_id in self.under_way)
            if goes_on:
                continue
            handle = self.known.pop(trial_id).handle
            del self.ids[config_id]
            assert handle is not None
            handle.stop(trial_id)
            handle.forget(trial_id)

    # -- what comes of them --------------------------------------------------------------------------------

    def _await_news(self) -> None:
        self._take(self.news.get())
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self.news.get_nowait())
        if self.synchronous:
            if self.under_way:
                return
            # In the order in which they were sampled, so that the model does not depend on who was faster.
            self.ended.sort(key=lambda job: job.id)
        with quiet(), self.chance.executor_scope():
            for job in self.ended:
                self.books.register(job)
        self.ended.clear()

    def _take(self, news: tuple[str, Failure | None] | BaseException) -> None:
        if isinstance(news, BaseException):
            raise FluidError("the executor was closed while trials ran on it") from news
        trial_id, failure = news
        trial = self.known[trial_id]
        self.under_way.discard(trial_id)
        if failure is not None:
            trial.job.exception = f"{failure.message}\n{failure.traceback}".rstrip()
        elif trial.metrics is None:
            trial.job.exception = "the trial ended before it reported anything"
        else:
            trial.job.result = self.trials.result(trial.metrics)
        self.ended.append(trial.job)

    # -- told by Fluid's own thread ------------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        trial = self.known.get(trial_id)
        if trial is not None:
            trial.job.time_it("started")

    def on_result(self, result: Result) -> None:
        trial = self.known.get(result.trial_id)
        if trial is not None:
            trial.metrics = result.metrics

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        trial = self.known.get(trial_id)
        if trial is None or trial_id not in self.under_way:
            return  # it was let go of
        trial.job.time_it("finished")
        trial.job.timestamps.setdefault("started", trial.job.timestamps["submitted"])
        stopped = Failure("error", "the trial was stopped") if state == "STOPPED" else None
        self.news.put((trial_id, failure or stopped))

    def on_broken(self, error: BaseException) -> None:
        self.news.put(error)
