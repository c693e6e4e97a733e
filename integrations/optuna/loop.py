"""The loop behind :func:`fluid.integrations.optuna.optimize`: asks the study, has Fluid run, tells the study.

All of it happens in the caller's thread, as samplers and storages expect. What the executor's thread has to say is put
into a queue, and taken from there.
"""

from __future__ import annotations

import copy
import itertools
import logging
import queue
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.optuna import private_api as seam
from fluid.integrations.optuna.running import RunningTrial
from fluid.integrations.optuna.stale_trials import claim, retry_left_trials, this_run
from fluid.session.handle import TrialGroupHandle
from fluid.session.results import Result, TrialListener
from fluid.trialgroup import Trial, TrialGroup

with try_import("Optuna", extra="optuna"):
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

Space = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]

#: Below Optuna's own, so that ``optuna.logging.set_verbosity`` holds for it.
_log = logging.getLogger("optuna.fluid")
_loops = itertools.count()


@dataclass(frozen=True)
class Job:
    """What is to be done; the fields are the arguments of :func:`fluid.integrations.optuna.optimize`, checked."""

    trainable: Any
    space: Space
    metrics: tuple[str, ...]
    budget: int
    n_trials: int | None
    batch_size: int | None
    n_jobs: int | None
    timeout: float | None
    catch: tuple[type[Exception], ...]
    callbacks: tuple[Callable[[Any, Any], None], ...]


class Loop:
    """One call of :func:`fluid.integrations.optuna.optimize`.

    Args:
        study: whom to ask and tell.
        job: what is to be done.
        executor: runs the trials.
    """

    def __init__(self, study: Study, job: Job, executor: FluidExecutor) -> None:
        self._study = study
        self._job = job
        self._executor = executor
        self._name = f"optuna-{next(_loops)}"
        self._clock = MonotonicClock()
        self._began = self._clock.now()
        self._note: dict[str, Any] = {}
        self._asked = 0
        self._batches = 0
        #: What was asked for and not told yet, by the id of Fluid's trial.
        self._live: dict[str, RunningTrial] = {}
        self._handle: TrialGroupHandle | None = None
        #: What the executor's thread wants to be done in this one.
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listener = _Forwarding(self)
        #: The first error that ends the run; it is raised once the trials under way have ended.
        self._error: Exception | None = None

    def run(self) -> None:
        """Runs until enough trials were told.

        Raises:
            Exception: see :func:`fluid.integrations.optuna.optimize`.
        """
        with seam.optimizing(self._study), this_run() as self._note:
            for number in retry_left_trials(self._study):
                _log.info(f"Trial {number} was left by a run that was killed; it is failed, and queued again.")
            try:
                self._fill()
                while self._live:
                    self._news.get()()
            except BaseException as error:  # Ctrl-C, above all.
                self._give_up(error)
                raise
        if self._error is not None:
            raise self._error

    # -- asking --------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Asks for trials while there is room for them, and hands them to the executor."""
        if not self._may_ask() or (self._job.batch_size is not None and self._live):
            return
        devices = len(self._executor.devices)  # Refused here where it is closed, before there is a trial.
        room = self._job.batch_size or self._job.n_jobs or max(1, devices)
        while len(self._live) < room and self._may_ask():
            fresh: list[Trial] = []
            while len(self._live) < room and self._may_ask():
                fresh += self._ask()
            self._submit(fresh)

    def _may_ask(self) -> bool:
        job = self._job
        if self._error is not None or seam.was_stopped(self._study):
            return False
        if job.n_trials is not None and self._asked >= job.n_trials:
            return False
        return job.timeout is None or self._clock.now() - self._began < job.timeout

    def _ask(self) -> list[Trial]:
        """Asks for one trial; there is none to run if the sampler or ``space`` raised."""
        study, space = self._study, self._job.space
        try:
            if seam.has_heartbeat(study):
                seam.fail_stale_trials(study)
            asked = study.ask() if callable(space) else study.ask(space)
        except Exception as error:
            self._error = error
            return []
        self._asked += 1
        trial_id = f"{self._name}-{asked.number:04d}"
        running = self._live[trial_id] = RunningTrial(study, asked, self._job.metrics)
        try:
            claim(study, asked, self._note)
            config = _config(space(asked)) if callable(space) else asked.params
            return [Trial(self._job.trainable, config, self._job.budget, trial_id=trial_id, retry_errors=False)]
        except Exception as error:
            running.error = error
            self._finish(trial_id)
            return []

    def _submit(self, trials: list[Trial]) -> None:
        """Has the executor run trials: those of a batch together, others as further ones of the group that is open."""
        if not trials:
            return
        if self._handle is None or self._job.batch_size is not None:
            self._batches += 1
            name = self._study.study_name
            group = TrialGroup(trials, name if self._job.batch_size is None else f"{name}, batch {self._batches}")
            try:
                self._handle = self._executor.submit_trialgroup(group, self._listener)
            except FluidError as error:
                self._refused(trials, error)
            return
        for trial in trials:
            try:
                self._handle.add(trial)
            except FluidError as error:
                self._refused([trial], error)

    def _refused(self, trials: list[Trial], error: FluidError) -> None:
        for trial in trials:
            self._live[trial.id].error = error
            self._finish(trial.id)

    # -- telling -------------------------------------------------------------------------------------------

    def _on_result(self, result: Result) -> None:
        running = self._live.get(result.trial_id)
        if running is None or running.is_decided:
            return  # It has run on until it heard of the decision.
        if running.take(result):
            assert self._handle is not None
            with suppress(FluidError):  # The executor was closed meanwhile, of which there is other news.
                self._handle.stop(result.trial_id)

    def _on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        running = self._live.get(trial_id)
        if running is None:
            return
        running.end(trial_id, state, failure)
        self._finish(trial_id)
        assert self._handle is not None
        with suppress(FluidError):
            self._handle.forget(trial_id)
        self._fill()

    def _on_broken(self, error: BaseException) -> None:
        raise FluidError(f"the executor ended before the study: {error}") from error

    def _finish(self, trial_id: str) -> None:
        """Tells the study how a trial ended, and its callbacks; notes an error that is to end the run."""
        running = self._live.pop(trial_id)
        try:
            frozen = running.tell()
            if frozen.state == TrialState.COMPLETE:
                self._log_completed(frozen)
            if running.fault is not None and not isinstance(running.fault, self._job.catch):
                raise running.fault
            for callback in self._job.callbacks:
                callback(self._study, copy.deepcopy(frozen))
        except Exception as error:
            if self._error is None:
                self._error = error
            elif error is not running.fault:  # Of a fault there is a line already.
                _log.warning("A further error: %r", error, exc_info=error)

    def _give_up(self, error: BaseException) -> None:
        """Stops what is under way, and tells that it failed."""
        for trial_id, running in self._live.items():
            if self._handle is not None:
                with suppress(FluidError):
                    self._handle.stop(trial_id)
            running.error = error
            try:
                running.tell()
            except Exception as problem:
                _log.warning("Trial %d cannot be told: %r", running.trial.number, problem)
        self._live.clear()

    def _log_completed(self, frozen: FrozenTrial) -> None:
        """As ``study.optimize`` does."""
        if not _log.isEnabledFor(logging.INFO):
            return
        if len(frozen.values) > 1:
            _log.info(f"Trial {frozen.number} finished with values: {frozen.values} and parameters: {frozen.params}.")
            return
        text = f"Trial {frozen.number} finished with value: {frozen.value} and parameters: {frozen.params}."
        with suppress(ValueError):  # None is best where none fulfils the sampler's constraints.
            best = self._study.best_trial
            text += f" Best is trial {best.number} with value: {best.value}."
        _log.info(text)


class _Forwarding(TrialListener):
    """Passes on to a loop, in its own thread, what happens in the executor's."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def on_start(self, trial_id: str) -> None:
        """Of no interest: to the study a trial runs since it was asked for."""

    def on_result(self, result: Result) -> None:
        self._loop._news.put(partial(self._loop._on_result, result))

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._loop._news.put(partial(self._loop._on_end, trial_id, state, failure))

    def on_broken(self, error: BaseException) -> None:
        self._loop._news.put(partial(self._loop._on_broken, error))


def _config(returned: Any) -> Mapping[str, Any]:
    if not isinstance(returned, Mapping):
        raise InvalidFieldError("space", returned, "must return the config, a dict")
    return returned
