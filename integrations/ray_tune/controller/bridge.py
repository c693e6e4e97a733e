"""The bridge between Tune's controller and the engine: requests go out, starts, results and failures come back.

All of it runs in the controller's thread. Events of the executor's thread arrive through an inbox, which the bridge
empties in the controller's turn; its answers wait in an outbox until the controller can take them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.tune.schedulers import HyperBandScheduler

from fluid._clock import Clock, MonotonicClock, nap
from fluid.engine.events import Failure
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.inbox import EventInbox
from fluid.integrations.ray_tune.controller.decisions import Concurrency
from fluid.integrations.ray_tune.controller.interruption import FinalSaves, Interruption, interruption_of
from fluid.integrations.ray_tune.controller.memory_checkpoints import MemoryCheckpoints
from fluid.integrations.ray_tune.controller.submission import TrialSubmission
from fluid.integrations.ray_tune.controller.tune_trial import ActorStage, Task, TuneTrial, checkpoint_path, notify
from fluid.integrations.ray_tune.errors import actor_error, as_task_error, cause_of, save_error, start_error, task_error
from fluid.integrations.ray_tune.lane.lane_trial import FailedSave, IterationWanted, RestoreError
from fluid.integrations.ray_tune.lane.memory_saves import CheckpointWanted
from fluid.integrations.ray_tune.private_api import (
    RESULT_DUPLICATE,
    TrackedActor,
    Trial,
    seconds_left_of,
    waits_for_saves,
    watches_every_result,
)
from fluid.integrations.ray_tune.serialization import pickle_arguments
from fluid.integrations.ray_tune.side_by_side import has_begun
from fluid.integrations.ray_tune.virtual_time import clock_of, is_rehearsed
from fluid.results.records import Result
from fluid.session.listeners import TrialListener, TrialRequest, ended_early

# -- controller outbox ---------------------------------------------------------------------------
#
# What Tune's controller is called back with, in order, as long as its turn may wait.


#: Longest that callbacks are made before the controller has its turn, in seconds.
_TURN_S = 0.05

Callback = Callable[[], None]


class ControllerOutbox:
    """Callbacks and results for one controller.

    Args:
        controller: Tune's.
        clock: by which the controller's turn comes.

    Attributes:
        holds_results: whether results wait; callbacks do not.
    """

    def __init__(self, controller: Any, clock: Clock | None = None) -> None:
        self._controller = controller
        self._clock = clock or MonotonicClock()
        self._callbacks: deque[Callback] = deque()
        #: Trials with a result that the controller has requested, in the order in which the results came.
        self._with_result: deque[TuneTrial] = deque()
        self.holds_results = False

    def call_back(self, callback: Callback) -> None:
        """Calls the controller back at its next turn."""
        self._callbacks.append(callback)

    def answer(self, tune_trial: TuneTrial, callback: Callback) -> None:
        """Calls the controller back at its next turn, unless it has forgotten its requests to the trial by then."""
        generation = tune_trial.task_generation
        self.call_back(lambda: callback() if tune_trial.task_generation == generation else None)

    def offer_result(self, tune_trial: TuneTrial) -> None:
        """Gives the controller a trial's oldest result at one of its next turns."""
        self._with_result.append(tune_trial)

    def hand_over(self) -> bool:
        """Calls the controller back, in order, until it should have its turn; returns whether there was anything."""
        begun = self._clock.now()
        handed = False
        one_by_one = watches_every_result(self._controller)
        while True:
            if self._callbacks:
                self._callbacks.popleft()()
            elif self._with_result and not self.holds_results:
                tune_trial = self._with_result.popleft()
                if tune_trial.train_task is None or not tune_trial.results:
                    continue
                tune_trial.answer_train(tune_trial.next_result())
                if one_by_one or (self._controller._fail_fast and self._controller._has_errored):
                    return True
            else:
                return handed
            handed = True
            if self._clock.now() - begun > _TURN_S:
                return True


# -- turn waits ----------------------------------------------------------------------------------
#
# The waits of Tune's controller for the engine, on a real clock and on a rehearsal's.


#: Real seconds between two looks of a controller that waits where nothing is left to happen on a virtual clock.
_IDLE_S = 0.01


class TurnWaits:
    """Waits of one controller.

    In a rehearsal, the controller is given events once all that happens at an instant has happened. What it is given at
    which of its turns, and so what it decides, is then the same in each rehearsal. The clock stops where a time budget
    ends.

    Args:
        executor: runs the sweep.
        controller: Tune's.
        inbox: the events.

    Attributes:
        are_virtual: whether they are on a rehearsal's clock.
        clock: by which the controller's turn comes.
    """

    def __init__(self, executor: FluidExecutor, controller: Any, inbox: EventInbox) -> None:
        self._controller = controller
        self._inbox = inbox
        self.are_virtual = is_rehearsed(executor)
        self.clock = clock_of(executor)
        #: How many waits have ended in a row as nothing was left to happen.
        self._idle = 0

    def look(self) -> None:
        """Handles the events that are there."""
        if not self.are_virtual:
            self._inbox.deliver()

    def wait(self, timeout: float | None) -> bool:
        """Waits for events and handles them; returns whether there were any.

        Args:
            timeout: longest wait on a real clock, seconds; ``None`` for no limit.
        """
        if not self.are_virtual:
            return self._inbox.deliver(timeout, polls=True)
        left = seconds_left_of(self._controller)
        # The controller has looked again at a standstill, and nothing came of it: its time budget is all that is left.
        polls = self._idle == 0 or left is None
        if self._idle > 1:
            nap(_IDLE_S)
        found = self._inbox.deliver_settled(left, polls=polls)
        self._idle = 0 if found else self._idle + 1
        return found


# -- hyperband stalls ----------------------------------------------------------------------------
#
# HyperBand brackets that Tune leaves PAUSED for ever, and how they continue.
#
# Tune's HyperBand processes a bracket when one of its trials reports. If the bracket's last running trial fails, or is
# being saved while the bracket finishes, the other trials stay PAUSED. A faster engine meets this more often.


logger = logging.getLogger(__name__)


class HyperBandStalls:
    """Finds stalled brackets of a scheduler and resolves them.

    Args:
        controller: Tune's.
        scheduler: the user's; any but a HyperBand has no brackets.

    Attributes:
        possible: whether the scheduler is a HyperBand.
    """

    def __init__(self, controller: Any, scheduler: Any) -> None:
        self._controller = controller
        self._scheduler = scheduler
        self.possible = isinstance(scheduler, HyperBandScheduler)

    def resolve(self) -> bool:
        """Resumes or ends the trials of a stalled bracket; to be called when no trial runs or is about to.

        Returns:
            Whether a bracket was stalled.
        """
        if not self.possible:
            return False
        for bracket in self._brackets():
            paused = [trial for trial in bracket.current_trials() if trial.status == Trial.PAUSED]
            if not paused or any(trial in bracket.trials_to_unpause for trial in paused):
                continue
            if any(trial.status in (Trial.PENDING, Trial.RUNNING) for trial in bracket.current_trials()):
                continue
            if bracket.finished():
                logger.info("Ending %d trials of a finished HyperBand bracket that were left paused", len(paused))
                for trial in paused:
                    self._controller.stop_trial(trial)
                return True
            if bracket.cur_iter_done():
                logger.info("Processing a HyperBand bracket whose last running trial failed or was being saved")
                self._scheduler._process_bracket(self._controller._wrapped(), bracket)
                return True
        return False

    def _brackets(self) -> Iterator[Any]:
        for band in self._scheduler._hyperbands:
            yield from (bracket for bracket in band if bracket is not None)


# -- save references -----------------------------------------------------------------------------
#
# The references to checkpoints that the controller is given at once, as it is given those of Ray's actors.


class SaveReferences:
    """Makes them.

    Args:
        are_read: whether the scheduler may look at checkpoints by their references.
    """

    def __init__(self, are_read: bool) -> None:
        self._are_read = are_read
        #: The reference to ``None`` that stands for checkpoints which the scheduler does not look at.
        self._placeholder: Any = None

    def of(self, saved: Any) -> Any:
        """Returns a reference to a checkpoint; one to ``None`` if the scheduler never looks at it."""
        if self._are_read:
            return ray.put(saved)
        if self._placeholder is None:
            self._placeholder = ray.put(None)
        return self._placeholder


# -- controller bridge ---------------------------------------------------------------------------


#: Most live trials that the controller is told of, or more where more can run at once. Its loggers keep files open for
#: each live trial, and lanes that run ahead of the controller could start thousands.
_MOST_LIVE = 128
_MOST_LIVE_PER_DEVICE = 8
#: Longest wait at the end of a sweep for the ``cleanup`` of its trials, in seconds; as long as Tune's own.
_CLEANUP_S = 10.0
#: Most trials that a warning names.
_NAMED = 5
_log = logging.getLogger(__name__)


class ControllerBridge(TrialListener):
    """Connects one controller with its trials on the engine.

    Args:
        executor, controller, scheduler, concurrency, mode, isolation: as for :class:`TrialSubmission`.
        on_started: called before the controller is told that a trial has started.
        on_died: called before the controller is told that an actor has died.
    """

    #: Tune prints them.
    tells_failures = True

    def __init__(
        self,
        *,
        executor: FluidExecutor,
        controller: Any,
        scheduler: Any,
        concurrency: Concurrency,
        mode: str | None,
        isolation: str | None,
        on_started: Callable[[TuneTrial], None],
        on_died: Callable[[TuneTrial], None],
    ) -> None:
        self._controller = controller
        has_begun()
        self._interruption = interruption_of(executor)
        if self._interruption is not None:
            self._interruption.attach(controller)
        self._final_saves: FinalSaves | None = None
        self._inbox = EventInbox(self, executor.session.waits)
        self._waits = TurnWaits(executor, controller, self._inbox)
        self._outbox = ControllerOutbox(controller, self._waits.clock)
        self._memory = MemoryCheckpoints(controller, scheduler, rehearsed=is_rehearsed(executor))
        self._submission = TrialSubmission(
            executor=executor,
            controller=controller,
            scheduler=scheduler,
            concurrency=concurrency,
            mode=mode,
            isolation=isolation,
            listener=self._inbox,
            memory=self._memory,
        )
        self._on_started = on_started
        self._on_died = on_died
        self._concurrency = concurrency
        self._stalls = HyperBandStalls(controller, scheduler)
        self._waits_for_saves = waits_for_saves(scheduler)
        self._references = SaveReferences(self._waits_for_saves)
        self._trials: dict[TrackedActor, TuneTrial] = {}
        #: Number of ``save`` calls that lanes have not answered.
        self._saving = 0
        self._number_live = 0
        self._most_live = max(_MOST_LIVE, _MOST_LIVE_PER_DEVICE * executor.max_devices)
        #: Trials that have started, in order; the controller has not been told.
        self._started: deque[TuneTrial] = deque()
        #: Number of trials of whose start the controller is about to be told.
        self._announced = 0
        self._broken: BaseException | None = None

    # -- the controller's actors ---------------------------------------------------------------------------

    def __contains__(self, actor: object) -> bool:
        return actor in self._trials

    @property
    def waiting(self) -> list[TrackedActor]:
        """Actors that have not started."""
        not_started = (ActorStage.NEW, ActorStage.STARTING, ActorStage.STARTED)
        return [actor for actor, tune_trial in self._trials.items() if tune_trial.stage in not_started]

    @property
    def number_waiting(self) -> int:
        """How many actors have not started."""
        return len(self._trials) - self._number_live

    @property
    def number_live(self) -> int:
        """How many actors have started."""
        return self._number_live

    def trial(self, actor: TrackedActor) -> Trial:
        """Tune's trial of an actor."""
        return self._trials[actor].trial

    @property
    def live(self) -> list[TuneTrial]:
        """Trials that have started."""
        return [tune_trial for tune_trial in self._trials.values() if tune_trial.stage is ActorStage.LIVE]

    def add(self, actor: TrackedActor, trial: Trial, arguments: Mapping[str, Any]) -> None:
        """Adds a trial that the controller wants to run."""
        self._trials[actor] = self._submission.add(actor, trial, arguments)

    def remove(self, actor: TrackedActor) -> bool:
        """Removes a trial.

        Returns:
            Whether it had started, in which case the controller has to be told of its end.
        """
        tune_trial = self._trials.pop(actor)
        was_live = tune_trial.stage is ActorStage.LIVE
        self._number_live -= was_live
        tune_trial.forget_tasks()
        tune_trial.grant_wanted(False)
        self._submission.remove(tune_trial)
        return was_live

    def clear(self, actor: TrackedActor) -> None:
        """Forgets what was requested of a trial; what its lane already does is done, and the answer is dropped."""
        tune_trial = self._trials.get(actor)
        if tune_trial is not None:
            tune_trial.forget_tasks()

    def call_back(self, callback: Callback) -> None:
        """Calls the controller back at its next turn."""
        self._outbox.call_back(callback)

    # -- the controller's requests -------------------------------------------------------------------------

    def train(self, actor: TrackedActor, task: Task) -> None:
        """Requests the next result."""
        tune_trial = self._trials[actor]
        tune_trial.discard_unclaimed_save()
        tune_trial.train_task = task
        if tune_trial.results:
            self._outbox.offer_result(tune_trial)
        elif tune_trial.is_idle:
            self._answer_idle(tune_trial)
        else:
            tune_trial.grant_wanted(True)

    def restore(self, actor: TrackedActor, task: Task, checkpoint: Any) -> None:
        """Requests that a trial continues from a checkpoint, usually the one it was submitted with."""
        tune_trial = self._trials[actor]
        tune_trial.train_task = task  # A failure that comes first is reported to it.
        if checkpoint_path(checkpoint) != tune_trial.start_path:
            # The one that it was to start from may be gone: an exploit has replaced it while the trial waited.
            self._submission.resubmit(tune_trial, checkpoint)
        elif tune_trial.failure is not None and isinstance(cause_of(tune_trial.failure), RestoreError):
            self._outbox.answer(tune_trial, lambda: self._fail(tune_trial))
            return
        self._outbox.answer(tune_trial, lambda: tune_trial.answer_train(None))

    def save(self, actor: TrackedActor, task: Task) -> Any:
        """Requests a checkpoint of the state that made the last result; returns a reference to it."""
        tune_trial = self._trials[actor]
        saved = self._memory.hand_over(tune_trial.claim_save(), tune_trial.trial.trial_id)
        if isinstance(saved, FailedSave):
            raised = save_error(saved, tune_trial.trial)
            self._outbox.answer(tune_trial, lambda: notify(task.on_error, actor, raised))
            return self._references.of(None)
        if saved is not None:
            tune_trial.record_save(saved)
            self._outbox.answer(tune_trial, lambda: notify(task.on_result, actor, saved))
            return self._references.of(saved)
        if tune_trial.wanted is None and tune_trial.runs_ahead:
            self._submission.note_late_save(tune_trial)
        tune_trial.grant_wanted(True)  # A lane saves between two iterations, and this one waits in the next.
        future = tune_trial.handle.call(tune_trial.trial_id, "save")
        self._count_save(1)
        generation = tune_trial.task_generation
        future.add_done_callback(
            lambda done: self._inbox.post(partial(self._saved, tune_trial, task, done, generation))
        )
        if not self._waits_for_saves:
            return self._references.of(None)
        with contextlib.suppress(Exception):  # The controller is told of a failure by ``_saved``.
            return self._references.of(self._completed(tune_trial, future.result()))
        return self._references.of(None)

    def call(self, actor: TrackedActor, method: str, arguments: Any) -> Any:
        """Calls any other method of the trainable and waits for its return value."""
        tune_trial = self._trials[actor]
        tune_trial.grant_wanted(True)
        return tune_trial.handle.call(tune_trial.trial_id, "run_method", method, pickle_arguments(arguments)).result()

    # -- the controller's turn -----------------------------------------------------------------------------

    def turn(self, timeout: float | None) -> bool:
        """Calls the controller back with what there is; if there is nothing, waits for an event.

        Args:
            timeout: longest wait in seconds; ``None`` for no limit.

        Returns:
            Whether the controller was called back, or trials are about to be submitted.

        Raises:
            FluidError: the executor was closed.
        """
        if self._interruption is not None and self._interruption.deadline_s is not None:
            self._save_and_end(self._interruption, self._interruption.deadline_s)
        if self._broken is not None:
            raise ended_early(self._broken, "the executor ended before the sweep") from self._broken
        self._submission.process_removed()
        gathering = self._submission.submit_gathered()
        self._waits.look()
        handed = self._hand_over() or (not gathering and self._waits.wait(timeout) and self._hand_over())
        self._submission.process_removed()
        if not handed and not gathering and not self._trials:
            handed = self._stalls.resolve()
        return handed or gathering

    def close(self) -> None:
        """Stops every trial, and waits a while for the clean-up of the trials."""
        self._submission.close(self._trials.values())
        self._memory.close()
        self._trials.clear()
        self._started.clear()
        self._number_live = 0
        if not (self._waits.are_virtual or (self._interruption and self._interruption.has_come)):
            self._await_cleanup()

    def _await_cleanup(self) -> None:
        left: tuple[str, ...] = ()
        with contextlib.suppress(FluidError):  # The executor is closed, and its lanes are gone.
            left = self._submission.await_cleanup(_CLEANUP_S)
        if left:
            _log.warning(
                "The sweep ends although %d trials have not been cleaned up within %g s: %s. An iteration in progress"
                " is cut off.",
                len(left),
                _CLEANUP_S,
                ", ".join(left[:_NAMED]),
            )
            with contextlib.suppress(FluidError):
                self._submission.cut_off(left)

    def _save_and_end(self, interruption: Interruption, deadline_s: float) -> None:
        """Saves the live trials after a notice of preemption, and then ends the controller's loop."""
        if self._final_saves is None:
            live = [tune_trial for tune_trial in self.live if tune_trial.is_submitted]
            self._final_saves = FinalSaves(self._controller, live, deadline_s, self._inbox.post)
        if self._final_saves.advance():
            interruption.end_loop()

    def _hand_over(self) -> bool:
        """Calls the controller back, also about starts as far as it may have more live trials."""
        while self._started and self._number_live + self._announced < self._most_live:
            self._announced += 1
            self.call_back(partial(self._announce, self._started.popleft()))
        return self._outbox.hand_over()

    # -- events, delivered by the inbox --------------------------------------------------------------------

    def on_start(self, trial_id: str) -> None:
        tune_trial = self._submission.find(trial_id)
        if tune_trial is not None and tune_trial.stage is ActorStage.STARTING:
            tune_trial.stage = ActorStage.STARTED
            self._started.append(tune_trial)

    def on_result(self, result: Result) -> None:
        self._concurrency.note(result.rows)
        tune_trial = self._submission.find(result.trial_id)
        if tune_trial is None or tune_trial.cut_at is not None:
            return  # What comes after the cut, a restored sweep makes again.
        if not tune_trial.receive(result.metrics):
            return
        if tune_trial.stage is ActorStage.REMOVED:
            tune_trial.discard_results()
        elif tune_trial.train_task is not None and len(tune_trial.results) == 1:
            self._outbox.offer_result(tune_trial)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        tune_trial = self._submission.record_end(trial_id, failure)
        if tune_trial is None:
            return
        if tune_trial.stage is ActorStage.STARTING and failure is not None:
            self.call_back(lambda: self._fail_to_start(tune_trial))
        elif tune_trial.train_task is not None and not tune_trial.results and tune_trial.is_idle:
            self._answer_idle(tune_trial)

    def on_request(self, request: TrialRequest) -> None:
        try:
            wanted = request.read()
            if isinstance(wanted, IterationWanted):
                self._want_iteration(request, wanted.iteration)
                return
            answer = self._memory.answer if isinstance(wanted, CheckpointWanted) else self._submission.answer
            request.answer(answer(request.trial_id, wanted))
        except Exception as error:
            request.refuse(error)

    def _want_iteration(self, request: TrialRequest, iteration: int) -> None:
        tune_trial = self._submission.find(request.trial_id)
        if tune_trial is None or tune_trial.stage is ActorStage.REMOVED:
            request.answer(False)
        elif iteration <= tune_trial.received or (tune_trial.train_task is not None and not tune_trial.results):
            request.answer(True)  # It repeats one, or Tune waits for it.
        else:
            tune_trial.wanted = request

    def on_broken(self, error: BaseException) -> None:
        self._broken, self._submission.is_broken = error, True

    def _saved(self, tune_trial: TuneTrial, task: Task, done: Future[Any], generation: int) -> None:
        self._count_save(-1)
        error, actor = done.exception(), tune_trial.actor
        saved: Any = self._completed(tune_trial, done.result()) if error is None else None
        if tune_trial.task_generation != generation:
            return
        if error is None and not isinstance(saved, FailedSave):
            tune_trial.record_save(saved)
            self._outbox.answer(tune_trial, lambda: notify(task.on_result, actor, saved))
        else:
            trial = tune_trial.trial
            raised = save_error(saved, trial) if error is None else as_task_error(error, trial, "save")
            self._outbox.answer(tune_trial, lambda: notify(task.on_error, actor, raised))

    def _completed(self, tune_trial: TuneTrial, saved: Any) -> Any:
        """Returns what Tune is to be given of what a lane has saved."""
        return self._memory.hand_over(tune_trial.completed(saved), tune_trial.trial.trial_id)

    def _count_save(self, change: int) -> None:
        self._saving += change
        # A HyperBand bracket mishandles a result that comes while one of its trials is being saved.
        self._outbox.holds_results = self._saving > 0 and self._stalls.possible

    # -- answers -------------------------------------------------------------------------------------------

    def _answer_idle(self, tune_trial: TuneTrial) -> None:
        """Answers the request for the next result of a trial that the engine runs no further for now."""
        if tune_trial.failure is not None:
            self._outbox.answer(tune_trial, lambda: self._fail(tune_trial))
        elif tune_trial.finished_early:
            self._outbox.answer(tune_trial, lambda: tune_trial.answer_train({RESULT_DUPLICATE: True}))
        else:  # The controller has already decided about its last result.
            self._submission.extend(tune_trial)

    def _announce(self, tune_trial: TuneTrial) -> None:
        self._announced -= 1
        if tune_trial.stage is ActorStage.STARTED:
            self._report_start(tune_trial)

    def _report_start(self, tune_trial: TuneTrial) -> None:
        if tune_trial.stage in (ActorStage.STARTING, ActorStage.STARTED):
            tune_trial.stage = ActorStage.LIVE
            self._number_live += 1
            self._on_started(tune_trial)
            notify(tune_trial.actor._on_start, tune_trial.actor)

    def _fail(self, tune_trial: TuneTrial) -> None:
        failure = tune_trial.failure
        assert failure is not None
        task, tune_trial.train_task = tune_trial.train_task, None
        if failure.kind == "lane_lost":
            error: Exception = actor_error(failure)
            self._remove_dead(tune_trial)
            notify(tune_trial.actor._on_error, tune_trial.actor, error)
        else:
            error = task_error(failure, tune_trial.trial, "train")
        if task is not None:
            notify(task.on_error, tune_trial.actor, error)

    def _fail_to_start(self, tune_trial: TuneTrial) -> None:
        failure = tune_trial.failure
        if tune_trial.stage is not ActorStage.STARTING:
            return
        assert failure is not None
        if isinstance(cause_of(failure), RestoreError):
            self._report_start(tune_trial)  # The controller then requests a restore, which reports the failure.
            return
        self._remove_dead(tune_trial)
        notify(tune_trial.actor._on_error, tune_trial.actor, start_error(failure, tune_trial.trial))

    def _remove_dead(self, tune_trial: TuneTrial) -> None:
        """Removes a trial whose actor, as the controller sees it, has died."""
        self._number_live -= tune_trial.stage is ActorStage.LIVE
        self._trials.pop(tune_trial.actor, None)
        self._submission.remove(tune_trial)
        self._on_died(tune_trial)
