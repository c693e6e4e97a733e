"""The driver's side: submits a batch of Hydra's jobs as a TrialGroup, and collects how they ended."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.executor_source import ExecutorSource
from fluid.integrations.hydra.job import SharedByJobs, as_trainable
from fluid.integrations.inbox import EventInbox
from fluid.integrations.lane_traceback import LaneTraceback
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialFailedError, TrialListener, TrialRequest, ended_early
from fluid.trainables.exception_pickle import load_any_exception, with_lane_cause
from fluid.trialgroup import Search, Shown, Trial, TrialGroup

with try_import("Hydra", extra="hydra"):
    from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides
    from omegaconf import OmegaConf

_log = logging.getLogger(__name__)
_batches = itertools.count(1)


class JobLauncher:
    """Runs batches of jobs; processes stay warm from one batch to the next.

    Args:
        shared: what all jobs have in common.
        keep_going: whether the other jobs of a batch are run after one has failed.
        trial_fields: further fields of each trial.
        options: of a new executor; those that are ``None`` are left out. Without any, the executor in force is used.
    """

    def __init__(
        self, shared: SharedByJobs, *, keep_going: bool, trial_fields: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._shared = shared
        self._keep_going = keep_going
        self._trial_fields = _plain(trial_fields)
        for name, value in self._trial_fields.items():
            if name not in inspect.signature(Trial).parameters:
                raise InvalidFieldError(f"hydra.launcher.trial.{name}", value, "is no field of a Trial")
        given = {name: value for name, value in _plain(options).items() if value is not None}
        self._executors = ExecutorSource(None, given)
        self._trainable = as_trainable(shared)

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
        """Runs a batch.

        Args:
            job_overrides: of each job.
            first: number of the first job.

        Returns:
            Hydra's ``JobReturn`` of each job, in their order.

        Raises:
            Exception: with ``keep_going=False``, what a job raised.
            InvalidFieldError: an option, or a field of the trials, cannot be used.
        """
        hydra = self._shared.config.hydra
        configure_log(hydra.hydra_logging, hydra.verbose)
        Path(str(hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        executor = self._executors.get()
        name = f"{hydra.job.name}-{next(_batches)}"
        trials = {}
        _log.info(f"Launching {len(job_overrides)} jobs on Fluid, {executor.run_dir}")
        for number, overrides in enumerate(job_overrides, start=first):
            _log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")
            trial = self._trial(f"{name}-{number}", number, list(overrides))
            trials[trial.id] = trial
        if not trials:
            return []
        batch = _JobBatch(trials, keep_going=self._keep_going)
        return batch.run(
            executor, TrialGroup(trials.values(), name=name, search=Search(trials=len(trials), extends=False))
        )

    def _trial(self, trial_id: str, number: int, overrides: list[str]) -> Trial:
        fields = {
            "trial_id": trial_id,
            "shown": Shown(trial_id, _shown(overrides)),
            # A job is one iteration, and one job tells nothing of how long another may take.
            "iteration_timeout_s": None,
            **self._trial_fields,
        }
        return Trial(self._trainable, {"number": number, "overrides": overrides}, **fields)


class _JobBatch(TrialListener):
    """The jobs of one batch; the thread of the launcher hears of them through an inbox.

    Args:
        trials: by id, in the order of the jobs.
        keep_going: whether the others are run after one has failed.
    """

    #: They are returned, or raised.
    tells_failures = True

    def __init__(self, trials: Mapping[str, Trial], *, keep_going: bool) -> None:
        self._trials = trials
        self._keep_going = keep_going
        self._returned: dict[str, Any] = {}
        self._open = set(trials)
        self._error: BaseException | None = None

    def run(self, executor: FluidExecutor, group: TrialGroup) -> list[Any]:
        inbox = EventInbox(self, executor.session.waits)
        handle = executor.submit_trialgroup(group, inbox)
        try:
            while self._open and self._error is None:
                inbox.deliver(timeout=None)
        finally:  # Ctrl-C, or a job that failed.
            self._stop(handle)
        if self._error is not None:
            raise self._error
        return [self._returned[trial_id] for trial_id in self._trials]

    def _stop(self, handle: TrialGroupHandle) -> None:
        with suppress(FluidError):
            for trial_id in self._open:
                handle.stop(trial_id, now=True)

    # -- events, in the thread of the launcher ---------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        """Hydra does not tell of it."""

    def on_result(self, result: Result) -> None:
        """It says what :meth:`on_request` has said already."""

    def on_request(self, request: TrialRequest) -> None:
        try:
            done, failure = request.read()
        except Exception as error:
            request.refuse(error)
            return
        if failure is not None:
            raised = load_any_exception(failure.exception)
            done.return_value = with_lane_cause(raised, LaneTraceback(failure.traceback))
        self._take(request.trial_id, done)
        request.answer(None)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._open.discard(trial_id)
        if trial_id not in self._returned:
            stopped = FluidError(f"job {trial_id!r} was stopped")
            overrides = self._trials[trial_id].config["overrides"]
            lost = JobReturn(overrides=overrides, working_dir=os.getcwd(), status=JobStatus.FAILED)
            lost.return_value = stopped if failure is None else TrialFailedError(trial_id, failure)
            self._take(trial_id, lost)

    def on_broken(self, error: BaseException) -> None:
        self._error = ended_early(error, "the executor ended while jobs ran")
        self._error.__cause__ = error

    def _take(self, trial_id: str, done: Any) -> None:
        self._returned[trial_id] = done
        if done.status == JobStatus.FAILED and not self._keep_going and self._error is None:
            self._error = done._return_value


def _plain(values: Any) -> dict[str, Any]:
    """Returns options as plain Python: Hydra gives lists and dicts of its own."""
    return {name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()}


def _shown(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a job's overrides as reports show them: numbers as numbers."""
    shown = {}
    for override in filter_overrides(overrides):
        name, _, value = override.lstrip("+~").partition("=")
        try:
            parsed = OmegaConf.from_dotlist([f"value={value}"]).value
        except Exception:  # Hydra's grammar knows more than YAML's.
            parsed = value
        shown[name] = parsed if isinstance(parsed, (int, float, str, bool)) else value
    return shown
