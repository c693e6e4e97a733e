"""The loop of a HpBandSter optimizer on Fluid: each stage of its brackets is submitted in one step.

The loop runs in the thread that called :func:`fluid.integrations.hpbandster.run`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluid.engine.events import Failure
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.hpbandster.optimizers import BracketState, Job, SeededRandom, quiet
from fluid.integrations.hpbandster.trials import TrialFactory
from fluid.integrations.inbox import EventInbox
from fluid.integrations.search_owner import new_owner
from fluid.integrations.session_time import SessionTime
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialListener, ended_early
from fluid.trialgroup import Submission, Trial, TrialGroup, TrialState

_log = logging.getLogger("fluid.hpbandster")


@dataclass(eq=False)
class _ConfigurationRun:
    """A configuration that runs, or waits for the next stage.

    Attributes:
        job: the last job that it was given.
        iterations: how many it has been given in all.
        handle: of its TrialGroup.
        metrics: the last ones that it reported.
    """

    job: Any
    iterations: int
    handle: TrialGroupHandle | None = None
    metrics: Mapping[str, Any] | None = None


class OptimizerLoop(TrialListener):
    """Runs one optimizer.

    Args:
        state: the optimizer.
        trials: makes the trials.
        executor: runs them.
        random: the optimizer's random numbers.
        synchronous: whether a bracket begins only when the one before it is complete.
    """

    def __init__(
        self,
        *,
        state: BracketState,
        trials: TrialFactory,
        executor: FluidExecutor,
        random: SeededRandom,
        synchronous: bool,
    ) -> None:
        self._state = state
        self._trials = trials
        self._executor = executor
        self._random = random
        self._synchronous = synchronous
        #: By the trial's id in Fluid.
        self._runs: dict[str, _ConfigurationRun] = {}
        #: Trial id by the configuration's id in HpBandSter.
        self._trial_ids: dict[Any, str] = {}
        self._under_way: set[str] = set()
        #: Jobs that have ended and are not registered yet.
        self._ended: list[Any] = []
        self._inbox = EventInbox(self, executor.session.waits)
        #: By which jobs are timed.
        self._time = SessionTime(executor)
        state.begin_at(self._time.now())
        #: Its groups, one per stage, are scheduled as one.
        self._owner = new_owner("hpbandster")
        self._submission = Submission()
        self._recorder = _Recorder(self._runs, self._inbox, self._time)

    def run(self, brackets: int) -> Any:
        """Runs a number of brackets and returns HpBandSter's result."""
        try:
            while True:
                jobs = self._next_jobs()
                self._drop_losers()
                if jobs:
                    self._submit(jobs)
                elif brackets and len(self._under_way) < self._enough:
                    brackets -= 1
                    with quiet(), self._random.activate():
                        self._state.begin_bracket()
                elif self._under_way:
                    self._wait()
                else:
                    return self._state.result()
        except (KeyboardInterrupt, SystemExit) as error:
            trials = "1 trial was" if len(self._under_way) == 1 else f"{len(self._under_way)} trials were"
            call = "run(..., previous_result=...) goes on with the results that a result_logger has kept"
            _log.warning("interrupted by %s: %s cut off; %s", type(error).__name__, trials, call)
            raise
        finally:
            with contextlib.suppress(FluidError):
                for trial_id in self._under_way:
                    handle = self._runs[trial_id].handle
                    if handle is not None:
                        handle.stop(trial_id)

    @property
    def _enough(self) -> int:
        """Number of trials under way from which on no other bracket begins."""
        return 1 if self._synchronous else max(1, self._executor.max_devices)

    def _next_jobs(self) -> list[Any]:
        with quiet(), self._random.activate():
            jobs = []
            for config_id, config, budget in self._state.next_runs():
                job = Job(config_id, config=config, budget=budget)
                job.timestamps["submitted"] = self._time.now()
                jobs.append(job)
            return jobs

    # -- trials on Fluid -----------------------------------------------------------------------------------

    def _submit(self, jobs: list[Any]) -> None:
        """Runs a stage: new configurations as a TrialGroup, the others by extending their trials."""
        fresh: dict[int, list[Trial]] = {}
        for job in jobs:
            trial_id = self._trial_ids.get(job.id)
            if trial_id is not None:
                self._extend(trial_id, job)
                continue
            trial = self._trials.trial(job, self._state.iterations[job.id[0]])
            self._trial_ids[job.id] = trial.id
            self._runs[trial.id] = _ConfigurationRun(job, trial.budget)
            self._under_way.add(trial.id)
            fresh.setdefault(job.id[0], []).append(trial)
        for bracket, trials in fresh.items():
            name = f"iteration {bracket}, stage {self._state.iterations[bracket].stage}"
            search = self._trials.search(self._state.iterations[bracket], len(trials))
            group = TrialGroup(trials, name=name, search=search, owner=self._owner, submission=self._submission)
            handle = self._executor.submit_trialgroup(group, listener=self._recorder)
            for trial in trials:
                self._runs[trial.id].handle = handle

    def _extend(self, trial_id: str, job: Any) -> None:
        run = self._runs[trial_id]
        assert run.handle is not None
        further = self._trials.iterations(job) - run.iterations
        run.job, run.iterations = job, run.iterations + further
        self._under_way.add(trial_id)
        follow_up_iterations = self._trials.follow_up_iterations(job, self._state.iterations[job.id[0]])
        run.handle.extend(trial_id, further, follow_up_iterations=follow_up_iterations)

    def _drop_losers(self) -> None:
        """Stops and forgets trials that will not continue."""
        for config_id, trial_id in list(self._trial_ids.items()):
            status = self._state.iterations[config_id[0]].data[config_id].status
            may_continue = self._trials.resume or trial_id in self._under_way
            if status in ("QUEUED", "RUNNING", "REVIEW") and may_continue:
                continue
            handle = self._runs.pop(trial_id).handle
            del self._trial_ids[config_id]
            assert handle is not None
            handle.stop(trial_id)
            handle.forget(trial_id)

    # -- results -------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits until a trial has ended, and registers what has."""
        self._inbox.deliver(timeout=None)
        if self._synchronous:
            if self._under_way:
                return
            # In the order in which they were sampled, so that the model does not depend on which trial was faster.
            self._ended.sort(key=lambda job: job.id)
        with quiet(), self._random.activate():
            for job in self._ended:
                self._state.register(job)
        self._ended.clear()

    def on_start(self, trial_id: str) -> None:
        """Does nothing: the recorder has recorded the time."""

    def on_result(self, result: Result) -> None:
        """Does nothing: the recorder has recorded the metrics."""

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        run = self._runs.get(trial_id)
        if run is None or trial_id not in self._under_way:
            return  # It was dropped.
        self._under_way.discard(trial_id)
        if state == TrialState.STOPPED and failure is None:
            failure = Failure("error", "the trial was stopped")
        if failure is not None:
            run.job.exception = f"{failure.message}\n{failure.traceback}".rstrip()
        elif run.metrics is None:
            run.job.exception = "the trial ended before it reported metrics"
        else:
            run.job.result = self._trials.result(run.metrics)
        self._ended.append(run.job)

    def on_broken(self, error: BaseException) -> None:
        raise ended_early(error, "the executor ended before the optimizer") from error


class _Recorder(TrialListener):
    """Records times and metrics in the executor's thread, as they happen; forwards ends of trials to the loop.

    Args:
        runs: what the loop runs, by trial id.
        inbox: the loop's.
        time: by which jobs are timed.
    """

    #: HpBandSter logs them.
    tells_failures = True

    def __init__(self, runs: Mapping[str, _ConfigurationRun], inbox: EventInbox, time: SessionTime) -> None:
        self._runs = runs
        self._inbox = inbox
        self._time = time

    def on_start(self, trial_id: str) -> None:
        run = self._runs.get(trial_id)
        if run is not None:
            run.job.timestamps["started"] = self._time.now()

    def on_result(self, result: Result) -> None:
        run = self._runs.get(result.trial_id)
        if run is not None:
            run.metrics = result.metrics

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        run = self._runs.get(trial_id)
        if run is not None:
            run.job.timestamps["finished"] = self._time.now()
            run.job.timestamps.setdefault("started", run.job.timestamps["submitted"])
        self._inbox.on_end(trial_id, state, failure)

    def on_broken(self, error: BaseException) -> None:
        self._inbox.on_broken(error)
