"""The driver's side of one call of ``Parallel``: workers are trials of a group, each of which asks for batches."""

from __future__ import annotations

import itertools
import logging
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from fluid._clock import MonotonicClock
from fluid.engine.engine import DEFAULT_MAX_FAILURES
from fluid.engine.events import Failure
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.joblib.task_pickler import TaskPickler, modules_of
from fluid.integrations.joblib.worker import TaskError, work
from fluid.integrations.lane_traceback import LaneTraceback
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialFailedError, TrialListener, TrialRequest, ended_early
from fluid.trainables.exception_pickle import load_any_exception, with_lane_cause
from fluid.trialgroup import Trial, TrialGroup
from fluid.waiting.waits import BackgroundThread

_log = logging.getLogger(__name__)
_calls = itertools.count(1)
_clock = MonotonicClock()
#: Modules that each executor was asked to load for lanes; looking through what a trainable imports takes a millisecond.
_preloaded: WeakKeyDictionary[FluidExecutor, set[str]] = WeakKeyDictionary()
#: Seconds to wait for workers to leave their lanes, at the end of a call.
_LEAVE_S = 2.0
#: Seconds for which a worker waits for a batch before it leaves its lane to others, such as those of another call.
#: A new worker in a warm lane costs milliseconds.
_IDLE_S = 0.5


class WorkerDiedError(FluidError):
    """The processes that ran a batch of tasks died, as often as a batch is tried again.

    Example:
        >>> import os
        >>> import joblib
        >>> from fluid.integrations.joblib import WorkerDiedError
        >>> with joblib.parallel_config("fluid", n_jobs=2, devices=2, verbose=0):
        ...     try:
        ...         joblib.Parallel()(joblib.delayed(os._exit)(9) for _ in range(2))
        ...     except WorkerDiedError as error:
        ...         print(str(error)[:40])
        3 processes died that ran the same tasks
    """


class Batch:
    """A batch of tasks that was submitted.

    Args:
        callback: called with the batch once it has an outcome.
    """

    def __init__(self, callback: Callable[[Batch], None] | None) -> None:
        self.callback = callback
        #: Pickled, until it has an outcome.
        self.tasks = b""
        #: Times that a worker died of it, or beside it.
        self.deaths = 0
        #: What a worker sent back, pickled; or why none did.
        self.outcome: bytes | BaseException | None = None

    def results(self) -> list[Any]:
        """Returns what the tasks returned.

        Raises:
            BaseException: what a task raised, or why they were not run.
        """
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        value = pickle.loads(outcome)
        if isinstance(value, TaskError):
            raise with_lane_cause(load_any_exception(value.exception), LaneTraceback(value.traceback))
        return list(value)


class Workers(TrialListener):
    """Runs batches on lanes.

    :meth:`submit` may be called in any thread. Callbacks run in a thread of their own, in which joblib asks for further
    batches. A batch goes to the first worker that asks; one whose worker has died is run again. A worker that waits for
    a batch for long ends, as the caller may take hours to read a generator of results, and others may need its lane;
    further batches bring new workers.

    Args:
        executor: runs the workers.
        number: most workers at a time.
        config: of each worker; see :func:`fluid.integrations.joblib.worker.work`.
        pickler: pickles the batches; closed with the workers.
    """

    #: The caller gets them as exceptions.
    tells_failures = True

    def __init__(self, executor: FluidExecutor, number: int, config: Mapping[str, Any], pickler: TaskPickler) -> None:
        self._executor = executor
        self._number = number
        self._config = config
        self._pickler = pickler
        self._name = f"joblib-{next(_calls)}"
        self._numbers = itertools.count(1)
        self._handle: TrialGroupHandle | None = None
        self._lock = threading.Lock()
        #: Held while the group is submitted, and while a batch is pickled: reducers are not for several threads.
        self._submitting = threading.Lock()
        #: Batches that no worker has.
        self._ready: deque[Batch] = deque()
        #: Batches that workers run, by trial.
        self._running: dict[str, Batch] = {}
        #: Requests of workers for which there is no batch, by trial, and since when.
        self._waiting: dict[str, tuple[TrialRequest, float]] = {}
        #: Trials that have not ended and were not dismissed, and those of them that have started.
        self._open: set[str] = set()
        self._started: set[str] = set()
        #: No batch is run any more.
        self._closed = False
        self._over = threading.Event()
        self._ended: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        BackgroundThread(f"fluid-{self._name}", self._call_back).start()

    # -- joblib's side ---------------------------------------------------------------------------------------

    def submit(self, tasks: Callable[[], list[Any]], callback: Callable[[Batch], None] | None) -> Batch:
        """Runs a batch on the next worker that is free.

        Args:
            tasks: the batch; returns the results of its tasks.
            callback: called with the returned batch once it has an outcome.
        """
        batch = Batch(callback)
        with self._submitting:
            try:
                batch.tasks = self._pickler.dumps(tasks)
            except Exception as error:
                refused = pickle.PicklingError("Could not pickle the task to send it to the workers.")
                refused.__cause__ = error
                self._end(batch, refused)
                return batch
            with self._lock:
                self._ready.append(batch)
                self._hand_out()
                is_short = bool(self._ready) and len(self._open) < self._number
                new = [self._open_worker() for _ in range(1 if self._handle else self._number)] if is_short else []
            try:
                if self._handle is None:
                    self._begin(batch, new)
                elif new:
                    self._handle.add(*map(self._worker, new))
            except FluidError as error:  # The executor was closed.
                self._fail(error)
        return batch

    def close(self) -> None:
        """Ends the workers; those that run a batch are killed."""
        with self._lock:
            self._closed = True
            self._over.set()
            self._ready.clear()
            for request, _ in self._waiting.values():
                request.answer(None)
            self._waiting.clear()
            unstarted, busy = self._open - self._started, list(self._running)
        self._ended.put(None)
        self._pickler.close()
        if self._handle is None:
            return
        with suppress(FluidError):  # The executor was closed.
            for trial_id in unstarted:
                self._handle.stop(trial_id)
            for trial_id in busy:
                self._handle.stop(trial_id, now=True)
            if not self._executor.session.is_in_thread:
                self._handle.wait(_LEAVE_S)

    def _begin(self, first: Batch, workers: list[str]) -> None:
        """Submits workers; lanes are forked from a process that has loaded what the first batch needs."""
        modules = set(modules_of(first.tasks))
        known = _preloaded.setdefault(self._executor, set())
        if not modules <= known:
            self._executor.session.preload(work, sorted(modules - known))
            known |= modules
        group = TrialGroup([self._worker(trial_id) for trial_id in workers], name=self._name)
        self._handle = self._executor.submit_trialgroup(group, self)
        BackgroundThread(f"fluid-{self._name}-idle", self._dismiss_idle).start()

    def _open_worker(self) -> str:
        """Returns the id of a new worker, which counts as open; for a thread that holds the lock."""
        trial_id = f"{self._name}-worker-{next(self._numbers)}"
        self._open.add(trial_id)
        return trial_id

    def _worker(self, trial_id: str) -> Trial:
        return Trial(
            work,
            self._config,
            trial_id=trial_id,
            profile_key=self._name,
            iteration_timeout_s=None,
            threads=self._config.get("threads"),
            isolation=self._executor.isolating.of_sharing_sweep,  # As joblib's processes, which run several tasks.
        )

    # -- the executor's side: its thread calls these ---------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        with self._lock:
            self._started.add(trial_id)
            self._waiting.pop(trial_id, None)
        self._take_back(trial_id, None)  # It had one if its lane has died.

    def on_result(self, result: Result) -> None:
        """It tells how many batches a worker has run, for reports."""

    def on_request(self, request: TrialRequest) -> None:
        outcome = request.read()
        with self._lock:
            batch = self._running.pop(request.trial_id, None)
            if self._closed or request.trial_id not in self._open:
                request.answer(None)
            else:
                self._waiting[request.trial_id] = request, _clock.now()
                self._hand_out()
        if batch is not None:
            self._end(batch, outcome)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        with self._lock:
            was_open = trial_id in self._open
            self._open.discard(trial_id)
            self._waiting.pop(trial_id, None)
        lost = self._take_back(trial_id, failure)
        handle = self._handle
        if handle is not None:
            with suppress(FluidError):
                handle.forget(trial_id)
        if self._closed or not was_open:
            return
        if lost and handle is not None:
            with self._lock:
                new = self._open_worker()
            with suppress(FluidError):
                handle.add(self._worker(new))
        elif not self._open and failure is not None:
            self._fail(TrialFailedError(trial_id, failure))
        elif not self._open:
            self._fail(FluidError(f"the workers of {self._name} were stopped"))

    def on_broken(self, error: BaseException) -> None:
        broken = ended_early(error, "the executor ended while tasks ran")
        broken.__cause__ = error
        self._fail(broken)

    def _take_back(self, trial_id: str, failure: Failure | None) -> bool:
        """Runs the batch again that a worker had when it died; returns whether it had one."""
        with self._lock:
            batch = self._running.pop(trial_id, None)
            if batch is None or self._closed:
                return False
            batch.deaths += 1
            if batch.deaths <= DEFAULT_MAX_FAILURES:
                self._ready.appendleft(batch)
                self._hand_out()
                return True
        reason = "" if failure is None else f": {failure.message}"
        self._end(batch, WorkerDiedError(f"{batch.deaths} processes died that ran the same tasks{reason}"))
        return True

    def _hand_out(self) -> None:
        """Gives batches to workers that wait; for a thread that holds the lock."""
        while self._ready and self._waiting:
            trial_id, (request, _) = self._waiting.popitem()
            batch = self._running[trial_id] = self._ready.popleft()
            request.answer(batch.tasks)

    def _dismiss_idle(self) -> None:
        """Ends workers that have waited for a batch for long, until the call is over.

        In a thread of its own: callbacks may take long, as joblib reads the caller's tasks in them.
        """
        while not self._over.wait(_IDLE_S):
            now = _clock.now()
            with self._lock:
                idle = [trial_id for trial_id, (_, since) in self._waiting.items() if now - since >= _IDLE_S]
                for trial_id in idle:
                    request, _ = self._waiting.pop(trial_id)
                    self._open.discard(trial_id)
                    request.answer(None)

    # -- outcomes --------------------------------------------------------------------------------------------

    def _end(self, batch: Batch, outcome: bytes | BaseException) -> None:
        batch.outcome, batch.tasks = outcome, b""
        self._ended.put(batch)

    def _fail(self, error: BaseException) -> None:
        """Fails all batches that have no outcome."""
        with self._lock:
            batches = [*self._ready, *self._running.values()]
            self._ready.clear()
            self._running.clear()
        for batch in batches:
            self._end(batch, error)

    def _call_back(self) -> None:
        while (batch := self._ended.get()) is not None:
            try:
                if batch.callback is not None:
                    batch.callback(batch)
            except Exception:
                _log.exception("joblib failed as it took results")
