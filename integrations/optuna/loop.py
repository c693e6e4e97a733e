"""The loop behind :func:`fluid.integrations.optuna.optimize`: asks the study, submits trials, tells the study.

It runs in the caller's thread, as samplers and storages expect. Events of the executor's thread arrive through an
inbox.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.inbox import EventInbox
from fluid.integrations.optuna import private_api
from fluid.integrations.optuna.moving import moving
from fluid.integrations.optuna.running import RunningTrial
from fluid.integrations.optuna.shapes import shape_of
from fluid.integrations.optuna.stale_trials import StudyRun, retry_stale_trials
from fluid.integrations.optuna.study_time import study_time
from fluid.integrations.optuna.work import Work
from fluid.integrations.search_owner import new_owner
from fluid.integrations.session_time import SessionTime
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialListener, TrialRequest, ended_early
from fluid.trainables.driver_link import RequestRefusedError
from fluid.trial_fields import IterationTimeout
from fluid.trialgroup import Search, Shown, Submission, Trial, TrialGroup

with try_import("Optuna", extra="optuna"):
    from optuna.study import StudyDirection
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: Below Optuna's own, so that ``optuna.logging.set_verbosity`` applies to it.
_log = logging.getLogger("optuna.fluid")
_loops = itertools.count()
#: Seconds that a shared folder's log may take to be read.
_JOIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OptimizeArguments:
    """The arguments of :func:`fluid.integrations.optuna.optimize`, checked."""

    work: Work
    n_trials: int | None
    batch_size: int | None
    n_jobs: int | None
    timeout: float | None
    catch: tuple[type[Exception], ...]
    callbacks: tuple[Callable[[Any, Any], None], ...]
    iteration_timeout_s: IterationTimeout
    gc_after_trial: bool
    show_progress_bar: bool


class OptimizeLoop(TrialListener):
    """One call of :func:`fluid.integrations.optuna.optimize`.

    Args:
        study: the study to optimize.
        arguments: those of the call.
        executor: runs the trials.
    """

    #: Optuna's log has them.
    tells_failures = True

    def __init__(self, study: Study, arguments: OptimizeArguments, executor: FluidExecutor) -> None:
        self._study = study
        self._arguments = arguments
        self._executor = executor
        self._name = f"optuna-{next(_loops)}"
        self._clock = executor.session.clock
        #: When the first trial began to run; until then, as the executor starts, when this was made.
        self._started_at = self._clock.now()
        self._has_started = False
        self._run: Any = None
        self._progress_bar: Any = None
        self._asked = 0
        self._batches = 0
        #: Trials that were asked for and not told yet, by the id of Fluid's trial.
        self._live: dict[str, RunningTrial] = {}
        self._handle: TrialGroupHandle | None = None
        #: Its batches, a group each, are scheduled as one.
        self._owner = new_owner(study.study_name)
        self._submission: Submission | None = None
        self._inbox = EventInbox(self, executor.session.waits)
        #: The first error that ends the run; it is raised once the trials under way have ended.
        self._error: Exception | None = None

    def run(self) -> None:
        """Runs until enough trials were told.

        Raises:
            Exception: see :func:`fluid.integrations.optuna.optimize`.
        """
        arguments = self._arguments
        bar = private_api.progress_bar(arguments.show_progress_bar, arguments.n_trials, arguments.timeout)
        with (
            study_time(SessionTime(self._executor)),
            private_api.optimizing(self._study),
            StudyRun(self._study) as self._run,
            bar as self._progress_bar,
        ):
            for number in retry_stale_trials(self._study, self._shared_trials()):
                _log.info(f"Trial {number} was left RUNNING by a run that was killed; it is failed and queued again.")
            try:
                self._fill()
                while self._live:
                    self._inbox.deliver(timeout=None)
            except BaseException as error:  # Ctrl-C, above all.
                self._abort(error)
                raise
        if self._error is not None:
            raise self._error

    def _shared_trials(self) -> set[int]:
        """Numbers of the trials that drivers of a shared folder have under way: if one is gone, others go on there."""
        session = self._executor.session
        if session.joint is None:
            return set()
        session.joint.await_log(_JOIN_S)
        ids = session.do(partial(session.joint.under_way, self._study.study_name))
        return {number for trial_id in ids if (number := _number_in(trial_id)) is not None}

    # -- asking --------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Asks for trials while there is room for them, and submits them."""
        arguments = self._arguments
        if not self._may_ask() or (arguments.batch_size is not None and self._live):
            return
        devices = self._executor.max_devices  # A closed executor raises here, before a trial is asked for.
        room = arguments.batch_size or arguments.n_jobs or max(1, devices)
        while len(self._live) < room and self._may_ask():
            fresh: list[Trial] = []
            while len(self._live) < room and self._may_ask():
                fresh += self._ask()
            self._submit(fresh)

    def _may_ask(self) -> bool:
        arguments = self._arguments
        if self._error is not None or private_api.was_stopped(self._study):
            return False
        if arguments.n_trials is not None and self._asked >= arguments.n_trials:
            return False
        if arguments.timeout is None or not self._has_started:
            return arguments.timeout is None or arguments.timeout > 0.0
        return self._clock.now() - self._started_at < arguments.timeout

    def _ask(self) -> list[Trial]:
        """Asks for one trial; the list is empty if the sampler or ``space`` raised."""
        study, work = self._study, self._arguments.work
        try:
            if private_api.has_heartbeat(study):
                private_api.fail_stale_trials(study)
            asked = work.ask(study)
        except Exception as error:
            self._error = error
            return []
        self._asked += 1
        return self._made(f"{self._name}-{asked.number:04d}", RunningTrial(study, asked, work.outcome()))

    def _made(self, trial_id: str, running: RunningTrial) -> list[Trial]:
        """Makes the trial to submit; the list is empty if that fails it."""
        work, asked = self._arguments.work, running.trial
        self._live[trial_id] = running
        try:
            self._run.under_way(running.trial.number for running in self._live.values())
            trial = Trial(
                work.trainable,
                work.config(asked),
                work.budget,
                trial_id=trial_id,
                retry_errors=False,
                iteration_timeout_s=self._arguments.iteration_timeout_s,
                # What an objective's lane is told is no hyperparameter; it chooses those while it runs.
                shown=None if work.configures else Shown(trial_id),
            )
            return [trial]
        except Exception as error:
            running.error = error
            self._finish(trial_id)
            return []

    def _submit(self, trials: list[Trial]) -> None:
        """Submits trials: a batch as a group of its own, others to the group that is open."""
        if not trials:
            return
        arguments = self._arguments
        is_batch = arguments.batch_size is not None
        if self._handle is None or is_batch:
            self._batches += 1
            name = self._study.study_name
            search = self._search(len(trials) if is_batch else arguments.n_trials)
            batch_name = f"{name}, batch {self._batches}" if is_batch else name
            owner = self._owner if is_batch else None
            if self._submission is None:  # A study that goes on draws other numbers than at its beginning.
                self._submission = Submission(self._live[trials[0].id].trial.number)
            group = TrialGroup(trials, batch_name, search=search, owner=owner, submission=self._submission)
            try:
                with moving(self._study, is_objective=not self._arguments.work.configures):
                    self._handle = self._executor.submit_trialgroup(group, self._inbox)
            except FluidError as error:
                self._fail(trials, error)
            return
        for trial in trials:
            try:
                with moving(self._study, is_objective=not self._arguments.work.configures):
                    self._handle.add(trial)
            except FluidError as error:
                self._fail([trial], error)

    def _search(self, trials: int | None) -> Search:
        """What reports and the live view say of a group: its number of trials, and the metrics of the objectives."""
        directions, work = self._study.directions, self._arguments.work
        room = self._arguments.batch_size or self._arguments.n_jobs or max(1, self._executor.max_devices)
        single = len(directions) == 1
        pruner = self._study.pruner if single else None  # Optuna prunes for one objective only.
        shape = shape_of(pruner, work.budget, room, is_asked=work.configures)
        if len(work.metrics) != len(directions):  # An objective returns several values, which have no names.
            return Search(trials=trials, extends=False, shape=shape)
        modes = ["max" if direction == StudyDirection.MAXIMIZE else "min" for direction in directions]
        besides = tuple(zip(work.metrics[1:], modes[1:], strict=True))
        return Search(work.metrics[0], modes[0], trials, extends=False, besides=besides, shape=shape)

    def _fail(self, trials: list[Trial], error: FluidError) -> None:
        """Finishes trials that the executor refused."""
        for trial in trials:
            self._live[trial.id].error = error
            self._finish(trial.id)

    # -- telling -------------------------------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        """The study's time counts from the first trial. To the study, a trial runs since it was asked for."""
        if not self._has_started:
            self._has_started, self._started_at = True, self._clock.now()

    def on_result(self, result: Result) -> None:
        running = self._live.get(result.trial_id)
        if running is None or running.is_decided:
            return  # It ran on until the decision reached it.
        if running.record(result):
            assert self._handle is not None
            with suppress(FluidError):  # The executor was closed; ``on_broken`` reports it.
                self._handle.stop(result.trial_id)

    def on_request(self, request: TrialRequest) -> None:
        running = self._live.get(request.trial_id)
        if running is None or running.is_decided:
            request.refuse(RequestRefusedError(f"trial {request.trial_id!r} has ended"))
        else:
            self._arguments.work.answer(request, self._study, running.trial)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        running = self._live.get(trial_id)
        if running is None:
            return
        running.record_end(trial_id, state, failure)
        self._finish(trial_id)
        assert self._handle is not None
        with suppress(FluidError):
            self._handle.forget(trial_id)
        self._fill()

    def on_left(self, trial_id: str) -> None:
        """Takes up a trial of another driver on this study that is gone, where its last checkpoint is."""
        number, study = _number_in(trial_id), self._study
        left = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        found = next((trial for trial in left if trial.number == number), None)
        if found is None or trial_id in self._live:
            return  # The storage has failed it, or another driver has told of it.
        _log.info(f"Trial {number} was left RUNNING by a driver that is gone; it goes on here.")
        outcome = self._arguments.work.outcome()
        asked = private_api.trial_of(study, found)
        self._submit(self._made(trial_id, RunningTrial(study, asked, outcome, is_taken_up=True)))

    def on_broken(self, error: BaseException) -> None:
        if self._live:
            raise ended_early(error, "the executor ended before the study") from error

    def _finish(self, trial_id: str) -> None:
        """Tells the study how a trial ended and calls the callbacks; keeps an error that ends the run."""
        running = self._live.pop(trial_id)
        try:
            frozen = running.tell()
            self._show(trial_id, frozen)
            if frozen.state == TrialState.COMPLETE:
                self._log_completed(frozen)
            if running.fault is not None and not isinstance(running.fault, self._arguments.catch):
                raise running.fault
            if self._arguments.gc_after_trial:
                gc.collect()
            for callback in self._arguments.callbacks:
                callback(self._study, copy.deepcopy(frozen))
            self._progress_bar.update(self._clock.now() - self._started_at, self._study)
        except Exception as error:
            if self._error is None:
                self._error = error
            elif error is not running.fault:  # ``tell`` has logged the fault.
                _log.warning("A further error: %r", error, exc_info=error)

    def _show(self, trial_id: str, frozen: FrozenTrial) -> None:
        """Tells Fluid the parameters that an objective was given while it ran, for reports."""
        if self._handle is not None and frozen.params and not self._arguments.work.configures:
            with suppress(FluidError):  # The executor was closed, or has refused the trial.
                self._handle.show_config(trial_id, frozen.params)

    def _abort(self, error: BaseException) -> None:
        """Stops the trials under way, tells the study that they failed, and logs how many they were."""
        cut_off = len(self._live)
        for trial_id, running in self._live.items():
            if self._handle is not None:
                with suppress(FluidError):
                    self._handle.stop(trial_id, now=self._arguments.work.stops_at_once)
            running.error = error
            try:
                running.tell()
            except Exception as problem:
                _log.warning("Trial %d cannot be told: %r", running.trial.number, problem)
        self._live.clear()
        trials = "1 trial was" if cut_off == 1 else f"{cut_off} trials were"
        _log.warning(f"Interrupted by {type(error).__name__}: {trials} cut off; optimize on this study goes on.")

    def _log_completed(self, frozen: FrozenTrial) -> None:
        """Logs a completed trial as ``study.optimize`` does."""
        if not _log.isEnabledFor(logging.INFO):
            return
        if len(frozen.values) > 1:
            _log.info(f"Trial {frozen.number} finished with values: {frozen.values} and parameters: {frozen.params}.")
            return
        text = f"Trial {frozen.number} finished with value: {frozen.value} and parameters: {frozen.params}."
        with suppress(ValueError):  # There is no best trial if none meets the sampler's constraints.
            best = self._study.best_trial
            text += f" Best is trial {best.number} with value: {best.value}."
        _log.info(text)


def _number_in(trial_id: str) -> int | None:
    """The number of the study's trial that a trial of Fluid's is; ``None`` if it is none of a study."""
    number = trial_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else None
