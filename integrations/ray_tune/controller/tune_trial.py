"""The record of one trial between Tune's controller and Fluid's engine: a tracked actor here, a trial there."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from fluid.engine.events import Failure
from fluid.integrations.ray_tune.controller.decisions import Grant
from fluid.integrations.ray_tune.lane.lane_trial import RESULT, SAVED, CheckpointSchedule
from fluid.integrations.ray_tune.lane.memory_saves import SavedInMemory
from fluid.integrations.ray_tune.private_api import DONE, TRAINING_ITERATION, TrackedActor, TrainingResult, Trial
from fluid.lane.checkpoints.store import delete_places
from fluid.session.listeners import TrialRequest
from fluid.user_values import is_same_value


class Task(NamedTuple):
    """The callbacks of something that the controller asked of a trial."""

    on_result: Callable[[TrackedActor, Any], None] | None
    on_error: Callable[[TrackedActor, Exception], None] | None


class ActorStage(Enum):
    """How far a trial has come, as the controller sees its actor."""

    #: Added by the controller; not submitted to the engine.
    NEW = "NEW"
    #: Submitted; the controller waits for it to start.
    STARTING = "STARTING"
    #: Runs, or has run; the controller is told when it has fewer live trials.
    STARTED = "STARTED"
    #: The controller knows that it runs.
    LIVE = "LIVE"
    #: Removed by the controller; about to be kept resident or stopped.
    REMOVED = "REMOVED"
    #: Stopped and forgotten.
    DROPPED = "DROPPED"


@dataclass(eq=False, kw_only=True)
class TuneTrial:
    """A trial from ``add_actor`` to ``remove_actor``, and beyond while it is paused and resident.

    Attributes:
        actor: Tune's.
        trial: Tune's.
        trial_id: the trial's id in Fluid: Tune's own, with a number from the second submission on.
        config: the one it was set up with.
        resources: those that it was submitted with, as Tune requests them.
        arguments: those of the trainable, until the trial is submitted.
        handle: of its TrialGroup; ``None`` unless the engine knows the trial.
        stage: how far it has come.
        is_counted: whether it counts towards the limit on trials under way.
        restore_from: result of ``save`` from which it is restored; ``None`` for a fresh start.
        start_path: path of the checkpoint in whose state it starts.
        start_iteration: training iteration of that state.
        iteration: training iteration of the last result given to the controller.
        budget: iterations asked of the engine so far.
        open_ended: whether it may continue beyond them without a decision of Tune.
        checkpoints: the iterations after which its lane makes a checkpoint.
        reports_checkpoints: whether it makes checkpoints only with its results, as a function does.
        devices: how many it holds when it runs.
        trains_within: whether it runs Ray Train, as far as is known, whose workers stay while it is resident.
        needs_devices: how many it needs for Ray Train, if they are more than it had when it came to that.
        starts_anew: whether it ends now to be started anew with as many.
        received: number of results received from the engine.
        repeats: results that it gives once more, as it was started anew.
        results: those that the controller has not been given yet.
        said_done: whether the last of them said that the trial was done.
        reported_done: whether the last result given to the controller said that the trial was done.
        is_ahead: whether results were discarded, so that its state is ahead of what the controller knows.
        train_task: the controller's request for the next result.
        task_generation: rises when the controller forgets its requests; answers to older ones are dropped.
        unclaimed_save: a checkpoint that came with the last result and that the controller has not asked for yet.
        saved_path: path of the newest checkpoint of this instance that the controller was given.
        saved_after: number of results received when that one was made.
        cut_at: iteration after which results are dropped, as the sweep is about to end; ``None`` for none.
        ranked: the rung that the engine was last told it has come to, and its score there.
        is_idle: whether the engine runs it no further for now.
        failure: why it cannot continue.
        wanted: what it waits for to run its next iteration, if it counts its iterations in a way of its own.
    """

    actor: TrackedActor
    trial: Trial
    trial_id: str
    config: Any
    resources: Any
    arguments: Any = None
    handle: Any = None
    stage: ActorStage = ActorStage.NEW
    is_counted: bool = False
    restore_from: Any = None
    start_path: str | None = None
    start_iteration: int = 0
    iteration: int = 0
    budget: int = 0
    open_ended: bool = False
    checkpoints: CheckpointSchedule = field(default_factory=CheckpointSchedule)
    reports_checkpoints: bool = False
    devices: int = 1
    trains_within: bool = False
    needs_devices: int | None = None
    starts_anew: bool = False
    received: int = 0
    repeats: int = 0
    said_done: bool = False
    results: deque[Any] = field(default_factory=deque)
    reported_done: bool = False
    is_ahead: bool = False
    train_task: Task | None = None
    task_generation: int = 0
    unclaimed_save: Any = None
    saved_path: str | None = None
    saved_after: int = 0
    cut_at: int | None = None
    ranked: Any = None
    is_idle: bool = False
    failure: Failure | None = None
    wanted: TrialRequest | None = None

    @property
    def is_submitted(self) -> bool:
        """Whether the engine knows it."""
        return self.handle is not None

    @property
    def finished_early(self) -> bool:
        """Whether the trainable said that it was done, or has no iteration left of its budget."""
        return self.is_idle and self.failure is None and (self.said_done or self.received < self.budget)

    @property
    def runs_ahead(self) -> bool:
        """Whether it has run, or is running, beyond the last result given to the controller."""
        return bool(self.results) or (self.received < self.budget and not self.is_idle)

    # -- starting ------------------------------------------------------------------------------------------

    def start_from(self, checkpoint: Any) -> None:
        """Sets the result of ``save`` that it starts from; ``None`` or an empty one for a fresh start."""
        self.restore_from = checkpoint if checkpoint is not None and checkpoint.checkpoint is not None else None
        self.start_path = checkpoint_path(checkpoint)
        metrics = checkpoint.metrics if self.restore_from is not None else {}
        self.start_iteration = self.iteration = int(metrics.get(TRAINING_ITERATION, 0))

    def reset(self, trial_id: str, checkpoint: Any) -> None:
        """Makes it a trial that the engine does not know, to start from a checkpoint under a new id."""
        self.trial_id = trial_id
        self.handle = None
        self.config, self.resources = self.trial.config, self.trial.placement_group_factory
        self.received = self.budget = self.saved_after = 0
        self.saved_path = None
        self.is_idle = self.is_ahead = self.said_done = self.reported_done = False
        self.failure = None
        self.starts_anew = False
        self.repeats = 0
        self.start_from(checkpoint)

    def start_anew(self, trial_id: str) -> None:
        """Makes it a trial that the engine does not know, which starts as before and repeats the results so far."""
        known = self.iteration, self.saved_path, self.saved_after, self.received
        self.reset(trial_id, self.restore_from)
        self.iteration, self.saved_path, self.saved_after, self.repeats = known

    def apply(self, grant: Grant) -> None:
        """Adds a grant to its budget."""
        self.budget += grant.iterations
        self.checkpoints, self.open_ended = grant.checkpoints, grant.open_ended
        self.is_idle = False

    # -- staying resident while paused ---------------------------------------------------------------------

    def can_stay_resident(self) -> bool:
        """Whether its state is exactly the one that the controller knows."""
        settled = self.is_submitted and self.is_idle and not self.trains_within
        return settled and not (self.failure or self.finished_early or self.results or self.is_ahead)

    def can_resume(self, trial: Trial) -> bool:
        """Whether it is in exactly the state from which the controller resumes a trial."""
        if not self.can_stay_resident():
            return False
        if self.resources != trial.placement_group_factory or not is_same_value(self.config, trial.config):
            return False
        wanted = checkpoint_path(trial.latest_checkpoint_result)
        if wanted is None:
            return self.saved_path is None  # Without a checkpoint, this instance is all there is to resume.
        if self.saved_path is None:
            return wanted == self.start_path and self.received == 0
        return wanted == self.saved_path and self.saved_after == self.received

    # -- results and checkpoints ---------------------------------------------------------------------------

    def receive(self, metrics: Any) -> bool:
        """Takes a result of the engine; returns whether it is news."""
        self.received += 1
        self.said_done = bool(metrics[DONE])
        if self.repeats:
            self.repeats -= 1
            return False
        self.results.append(metrics)
        return True

    def next_result(self) -> dict[str, Any]:
        """Takes the oldest result and returns it as the controller expects it."""
        metrics = self.results.popleft()
        result = self.with_config(_interned(metrics[RESULT]))
        self.iteration = result.get(TRAINING_ITERATION, self.iteration + 1)
        self.reported_done = bool(result.get(DONE))
        if metrics[SAVED] is not None:
            self.unclaimed_save = self.completed(metrics[SAVED])
        return result

    def with_config(self, result: dict[str, Any]) -> dict[str, Any]:
        """Puts the config, which lanes do not send back, into a result."""
        if "config" in result and result["config"] is None:
            result["config"] = self.trial.config
        return result

    def completed(self, saved: Any) -> Any:
        """Puts the config into the metrics of a result of ``save``."""
        self.with_config(saved.metrics)
        return saved

    def record_save(self, saved: Any) -> None:
        """Records a checkpoint that the controller is given."""
        self.saved_path, self.saved_after = checkpoint_path(saved), self.received

    def discard_results(self) -> None:
        """Drops results that the controller will not be given, and deletes the checkpoints that came with them."""
        self.is_ahead |= bool(self.results)
        for metrics in self.results:
            _delete_checkpoint(metrics[SAVED])
        self.results.clear()

    def claim_save(self) -> Any:
        """Takes the checkpoint that came with the last result; ``None`` if the lane has to be asked for one."""
        saved, self.unclaimed_save = self.unclaimed_save, None
        if saved is None and self.reports_checkpoints:
            return TrainingResult(checkpoint=None, metrics=dict(self.trial.last_result or {}))
        return saved

    def discard_unclaimed_save(self) -> None:
        """Deletes a checkpoint that the controller did not ask for."""
        _delete_checkpoint(self.unclaimed_save)
        self.unclaimed_save = None

    def grant_wanted(self, may_run: bool) -> None:
        """Answers its request to run an iteration, if there is one."""
        wanted, self.wanted = self.wanted, None
        if wanted is not None:
            wanted.answer(may_run)

    # -- the controller's requests -------------------------------------------------------------------------

    def answer_train(self, value: Any) -> None:
        """Answers the controller's request for the next result, if there is one."""
        task, self.train_task = self.train_task, None
        if task is not None:
            notify(task.on_result, self.actor, value)

    def forget_tasks(self) -> None:
        """Forgets what the controller requested."""
        self.train_task = None
        self.task_generation += 1


def _interned(result: dict[str, Any]) -> dict[str, Any]:
    """A result with one copy of each name and text for all trials: Tune keeps the last result of every trial."""
    return {_shared(name): _shared(value) for name, value in result.items()}


def _shared(value: Any) -> Any:
    return sys.intern(value) if type(value) is str else value


def checkpoint_path(saved: Any) -> str | None:
    """Returns the path of the checkpoint in a result of ``save``; ``None`` if it has none."""
    return None if saved is None or saved.checkpoint is None else str(saved.checkpoint.path)


def notify(callback: Callable[..., Any] | None, *arguments: Any) -> None:
    """Calls a callback of the controller, if it gave one."""
    if callback is not None:
        callback(*arguments)


def _delete_checkpoint(saved: Any) -> None:
    if isinstance(saved, SavedInMemory):
        delete_places(saved.places)
    elif checkpoint_path(saved) is not None:
        with suppress(OSError):  # A checkpoint that cannot be deleted only takes space.
            saved.checkpoint.filesystem.delete_dir(saved.checkpoint.path)
