"""What a controller of Tune's is told of its trials, and in which order: starts, results, checkpoints, failures.

Fluid's pump tells what happens in its own thread; everything here happens in the controller's, when it has its turn.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import ray

from fluid._clock import MonotonicClock
from fluid.engine.events import Failure
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.brackets import Brackets
from fluid.integrations.ray_tune.errors import actor_error, as_task_error, cause_of, task_error
from fluid.integrations.ray_tune.lane_trial import RESULT, SAVED, RestoreError
from fluid.integrations.ray_tune.private_api import (
    DONE,
    RESULT_DUPLICATE,
    TRAINING_ITERATION,
    TrackedActor,
    Trial,
    waits_for_saves,
    watches_every_result,
)
from fluid.integrations.ray_tune.serialization import pack
from fluid.integrations.ray_tune.submission import TrialSubmission
from fluid.integrations.ray_tune.tune_trial import Stage, Task, TuneTrial, path_of, tell
from fluid.session.results import Result

#: Longest that results are handed over before the controller has its turn, in seconds.
_TURN_S = 0.05

Callback = Callable[[], None]


class ControllerBridge:
    """What passes between one controller and its trials.

    Args:
        executor, controller, scheduler, concurrency, mode: as for :class:`TrialSubmission`.
        began: called before the controller is told that a trial has started.
        buried: called before the controller is told that an actor died.
    """

    def __init__(
        self,
        executor: FluidExecutor,
        controller: Any,
        scheduler: Any,
        concurrency: int | None,
        mode: str | None,
        on_started: Callable[[TuneTrial], None],
        on_died: Callable[[TuneTrial], None],
    ) -> None:
        self._hosting = TrialSubmission(executor, controller, scheduler, concurrency, mode, listener=self)
        self._began, self._buried = on_started, on_died
        self._controller = controller
        self._brackets = Brackets(controller, scheduler)
        self._blocks_on_saves = waits_for_saves(scheduler)
        self._clock = MonotonicClock()
        self._hosted: dict[TrackedActor, TuneTrial] = {}
        #: What Fluid's pump has to tell, in order.
        self._news: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        #: Whom to call back, in order.
        self._ready: deque[Callback] = deque()
        #: Trials with a result that the controller waits for, in the order in which the results came.
        self._deliverable: deque[TuneTrial] = deque()
        self._saving = 0
        self._placeholder: Any = None
        self._broken: BaseException | None = None
        self._live = 0

    # -- the controller's actors ---------------------------------------------------------------------------

    def __contains__(self, actor: object) -> bool:
        return actor in self._hosted

    @property
    def waiting(self) -> list[TrackedActor]:
        """Actors that have not started."""
        return [actor for actor, hosted in self._hosted.items() if hosted.stage in (Stage.NEW, Stage.WAITING)]

    @property
    def number_waiting(self) -> int:
        """How many have not started."""
        return len(self._hosted) - self._live

    @property
    def number_live(self) -> int:
        """How many have started."""
        return self._live

    def trial(self, actor: TrackedActor) -> Trial:
        """The trial of an actor."""
        return self._hosted[actor].trial

    @property
    def live(self) -> list[TuneTrial]:
        """Trials that have started."""
        return [hosted for hosted in self._hosted.values() if hosted.stage is Stage.LIVE]

    def add(self, actor: TrackedActor, trial: Trial, arguments: Mapping[str, Any]) -> None:
        """Takes in a trial that the controller wants to run."""
        self._hosted[actor] = self._hosting.add(actor, trial, arguments)

    def remove(self, actor: TrackedActor) -> bool:
        """Lets go of a trial; returns whether it had started, so that the controller is to hear of its end."""
        hosted = self._hosted.pop(actor)
        was_live = hosted.stage is Stage.LIVE
        self._live -= was_live
        hosted.forget_tasks()
        self._hosting.remove(hosted)
        return was_live

    def clear(self, actor: TrackedActor) -> None:
        """Forgets what was asked of a trial; what a lane does already is done and ignored."""
        hosted = self._hosted.get(actor)
        if hosted is not None:
            hosted.forget_tasks()

    def call_back(self, callback: Callback) -> None:
        """Has something told to the controller when it has its next turn."""
        self._ready.append(callback)

    # -- what is asked of a trial --------------------------------------------------------------------------

    def train(self, actor: TrackedActor, task: Task) -> None:
        """Asks for the next result."""
        hosted = self._hosted[actor]
        hosted.discard_offered()
        hosted.train = task
        if hosted.results:
            self._deliverable.append(hosted)
        elif hosted.failure is not None:
            self._answer(hosted, lambda: self._fail(hosted))
        elif hosted.exhausted:
            self._answer(hosted, lambda: self._say_done(hosted))
        elif hosted.ended:
            self._hosting.extend(hosted)

    def restore(self, actor: TrackedActor, task: Task, checkpoint: Any) -> None:
        """Asks for a trial to go on from a checkpoint; it was told so when it was added."""
        hosted = self._hosted[actor]
        hosted.train = task  # if anything fails before, that is who hears of it
        if hosted.failure is not None and isinstance(cause_of(hosted.failure), RestoreError):
            self._answer(hosted, lambda: self._fail(hosted))
        elif path_of(checkpoint) == hosted.going_on_from:
            self._answer(hosted, lambda: self._tell(hosted, None))
        else:
            self._hosting.host_again(hosted, checkpoint)
            self._answer(hosted, lambda: self._tell(hosted, None))

    def save(self, actor: TrackedActor, task: Task) -> Any:
        """Asks for a checkpoint of the state that made the last result; returns a reference to it."""
        hosted = self._hosted[actor]
        if hosted.offered is not None:
            saved, hosted.offered = hosted.offered, None
            hosted.note_saved(saved)
            self._answer(hosted, lambda: tell(task.on_result, actor, saved))
            return self._reference(saved)
        future = hosted.handle.call(hosted.trial_id, "save")
        self._saving += 1
        generation = hosted.generation
        future.add_done_callback(
            lambda done: self._news.put(lambda: self._saved(hosted, actor, task, done, generation))
        )
        if not self._blocks_on_saves:
            return self._reference(None)
        with contextlib.suppress(Exception):  # The controller hears of a failure as of any other.
            return self._reference(self._completed(hosted, future.result()))
        return self._reference(None)

    def call(self, actor: TrackedActor, method: str, arguments: Any) -> Any:
        """Calls any other method of the trainable, and waits for what it returns."""
        hosted = self._hosted[actor]
        return hosted.handle.call(hosted.trial_id, "run_method", method, pack(arguments)).result()

    # -- the controller's turn -----------------------------------------------------------------------------

    def turn(self, timeout: float | None) -> bool:
        """Hands over what there is; if there is nothing, waits up to ``timeout`` seconds for something."""
        if self._broken is not None:
            raise FluidError("the executor was closed while trials ran on it") from self._broken
        self._hosting.settle_removed()
        gathering = self._hosting.gather()
        self._read_news()
        handed = self._hand_over()
        if not handed and not gathering and self._await_news(timeout):
            handed = self._hand_over()
        self._hosting.settle_removed()
        if not handed and not gathering and not self._hosted:
            handed = self._brackets.unblock()
        return handed or gathering

    def close(self) -> None:
        """Lets go of every trial."""
        self._hosting.close(self._hosted.values())
        self._hosted.clear()
        self._live = 0

    def _read_news(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()

    def _await_news(self, timeout: float | None) -> bool:
        if not self._ready and not self._holds_deliverable:
            try:
                self._news.get(timeout=timeout)()
            except queue.Empty:
                return False
            self._read_news()
        return True

    @property
    def _holds_deliverable(self) -> bool:
        return bool(self._deliverable) and not self._held

    @property
    def _held(self) -> bool:
        """Whether results must wait: brackets are confused by one that comes while a trial of theirs is saved."""
        return self._saving > 0 and self._brackets.there_are

    def _hand_over(self) -> bool:
        """Calls the controller back, in order, until it should have its turn; returns whether there was anything."""
        begun = self._clock.now()
        handed = False
        one_by_one = watches_every_result(self._controller)
        while True:
            if self._ready:
                self._ready.popleft()()
            elif self._holds_deliverable:
                hosted = self._deliverable.popleft()
                if hosted.train is None or not hosted.results:
                    continue
                self._deliver(hosted)
                if one_by_one or (self._controller._fail_fast and self._controller._has_errored):
                    return True
            else:
                return handed
            handed = True
            if self._clock.now() - begun > _TURN_S:
                return True

    # -- news, in the controller's thread ------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        """Told by Fluid's pump."""
        self._news.put(lambda: self._started(trial_id))

    def on_result(self, result: Result) -> None:
        """Told by Fluid's pump."""
        self._news.put(lambda: self._resulted(result))

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        """Told by Fluid's pump."""
        self._news.put(lambda: self._ended(trial_id, failure))

    def on_broken(self, error: BaseException) -> None:
        """Told by Fluid's pump."""

        def note() -> None:
            self._broken, self._hosting.broken = error, True

        self._news.put(note)

    def _started(self, trial_id: str) -> None:
        hosted = self._hosting.find(trial_id)
        if hosted is not None and hosted.stage is Stage.WAITING:
            self.call_back(lambda: self._say_started(hosted))

    def _say_started(self, hosted: TuneTrial) -> None:
        if hosted.stage is Stage.WAITING:
            hosted.stage = Stage.LIVE
            self._live += 1
            self._began(hosted)
            tell(hosted.actor._on_start, hosted.actor)

    def _resulted(self, result: Result) -> None:
        hosted = self._hosting.find(result.trial_id)
        if hosted is None:
            return
        hosted.received += 1
        hosted.results.append(result.metrics)
        if hosted.stage is Stage.REMOVED:
            hosted.discard_results()
        elif hosted.train is not None and len(hosted.results) == 1:
            self._deliverable.append(hosted)

    def _ended(self, trial_id: str, failure: Failure | None) -> None:
        hosted = self._hosting.note_end(trial_id, failure)
        if hosted is None:
            return
        if hosted.stage is Stage.WAITING and failure is not None:
            self.call_back(lambda: self._fail_to_start(hosted))
        elif hosted.train is not None and not hosted.results:
            if failure is not None:
                self._answer(hosted, lambda: self._fail(hosted))
            elif hosted.exhausted:
                self._answer(hosted, lambda: self._say_done(hosted))
            elif hosted.ended:  # the controller has decided about its last result already
                self._hosting.extend(hosted)

    def _saved(self, hosted: TuneTrial, actor: TrackedActor, task: Task, done: Future[Any], generation: int) -> None:
        self._saving -= 1
        error = done.exception()
        if hosted.generation != generation:
            return
        if error is None:
            saved = self._completed(hosted, done.result())
            hosted.note_saved(saved)
            self._answer(hosted, lambda: tell(task.on_result, actor, saved))
        else:
            raised = as_task_error(error, "save")
            self._answer(hosted, lambda: tell(task.on_error, actor, raised))

    # -- answers -------------------------------------------------------------------------------------------

    def _answer(self, hosted: TuneTrial, answer: Callback) -> None:
        generation = hosted.generation
        self.call_back(lambda: answer() if hosted.generation == generation else None)

    def _tell(self, hosted: TuneTrial, value: Any) -> None:
        task, hosted.train = hosted.train, None
        if task is not None:
            tell(task.on_result, hosted.actor, value)

    def _deliver(self, hosted: TuneTrial) -> None:
        metrics = hosted.results.popleft()
        result = self._with_config(hosted, metrics[RESULT])
        hosted.iteration = result.get(TRAINING_ITERATION, hosted.iteration + 1)
        hosted.finished = bool(result.get(DONE))
        if metrics[SAVED] is not None:
            hosted.offered = self._completed(hosted, metrics[SAVED])
        self._tell(hosted, result)

    def _say_done(self, hosted: TuneTrial) -> None:
        self._tell(hosted, {RESULT_DUPLICATE: True})

    def _fail(self, hosted: TuneTrial) -> None:
        assert hosted.failure is not None
        task, hosted.train = hosted.train, None
        if hosted.failure.kind == "lane_lost":
            error: Exception = actor_error(hosted.failure)
            self._bury(hosted)
            tell(hosted.actor._on_error, hosted.actor, error)
        else:
            error = task_error(hosted.failure, "train", cause_of(hosted.failure))
        if task is not None:
            tell(task.on_error, hosted.actor, error)

    def _fail_to_start(self, hosted: TuneTrial) -> None:
        if hosted.stage is not Stage.WAITING:
            return
        assert hosted.failure is not None
        if isinstance(cause_of(hosted.failure), RestoreError):
            self._say_started(hosted)  # the controller asks for it to be restored, and hears of the failure then
            return
        self._bury(hosted)
        tell(hosted.actor._on_error, hosted.actor, task_error(hosted.failure, "__init__", cause_of(hosted.failure)))

    def _bury(self, hosted: TuneTrial) -> None:
        """Takes note that a trial's actor, as the controller sees it, is dead."""
        self._live -= hosted.stage is Stage.LIVE
        self._hosted.pop(hosted.actor, None)
        self._hosting.remove(hosted)
        self._buried(hosted)

    def _with_config(self, hosted: TuneTrial, result: dict[str, Any]) -> dict[str, Any]:
        if "config" in result and result["config"] is None:
            result["config"] = hosted.trial.config
        return result

    def _completed(self, hosted: TuneTrial, saved: Any) -> Any:
        self._with_config(hosted, saved.metrics)
        return saved

    def _reference(self, saved: Any) -> Any:
        """A reference to a checkpoint, for schedulers that wait for it; any other for those that never look."""
        if self._blocks_on_saves:
            return ray.put(saved)
        if self._placeholder is None:
            self._placeholder = ray.put(None)
        return self._placeholder
