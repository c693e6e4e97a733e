"""One trial of Tune's as the manager sees it: between Tune's tracked actor and Fluid's trial."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from fluid.engine.events import Failure
from fluid.integrations.ray_tune.budgets import Grant
from fluid.integrations.ray_tune.lane_trial import SAVED, Saves
from fluid.integrations.ray_tune.private_api import TRAINING_ITERATION, TrackedActor, Trial


class Task(NamedTuple):
    """Something the controller asked of a trial, and whom to tell."""

    on_result: Callable[[TrackedActor, Any], None] | None
    on_error: Callable[[TrackedActor, Exception], None] | None


class Stage(Enum):
    """How far a hosted trial has come, in the controller's eyes."""

    #: Not submitted to Fluid yet.
    NEW = "NEW"
    #: Submitted; the controller waits for it to start.
    WAITING = "WAITING"
    #: The controller knows that it runs.
    LIVE = "LIVE"
    #: The controller has removed it; it is parked or about to be stopped.
    REMOVED = "REMOVED"
    #: Nothing is left of it.
    GONE = "GONE"


@dataclass(eq=False)
class TuneTrial:
    """A trial from ``add_actor`` to ``remove_actor``, and parked beyond.

    Attributes:
        trial_id: the trial's id in Fluid; Tune's own, and a number where it was hosted before.
        config: with which it was set up.
        arguments: of the trainable, until it is submitted.
        handle: of its TrialGroup; ``None`` unless Fluid knows it.
        placed: whether it counts among the trials under way.
        restore_from: result of ``save`` from which it goes on; ``None`` for a fresh start.
        going_on_from: path of the checkpoint whose state it is in when it starts.
        first: training iteration of that state.
        iteration: training iteration of the last result given to the controller.
        budget: iterations asked of Fluid so far.
        open_ended: whether it goes on beyond them without anybody's decision.
        saves: at which iterations its lane saves.
        received: results received from Fluid.
        results: those not given to the controller yet.
        finished: whether its last result given to the controller said that it was done.
        overshot: whether some never will be, so that its state is ahead of what the controller knows.
        train: the controller's wish for the next result.
        generation: rises when the controller forgets what it wished.
        offered: a checkpoint that came along with the result last given out, not asked for yet.
        saved: path of the newest checkpoint given to the controller that this instance made.
        saved_at: number of results received when it made that.
        ended: whether Fluid says that it runs no further for now.
        failure: why it cannot go on.
    """

    actor: TrackedActor
    trial: Trial
    trial_id: str
    config: Any
    arguments: Any = None
    handle: Any = None
    stage: Stage = Stage.NEW
    placed: bool = False
    restore_from: Any = None
    going_on_from: str | None = None
    first: int = 0
    iteration: int = 0
    budget: int = 0
    open_ended: bool = False
    saves: Saves = field(default_factory=Saves)
    received: int = 0
    results: deque[Any] = field(default_factory=deque)
    finished: bool = False
    overshot: bool = False
    train: Task | None = None
    generation: int = 0
    offered: Any = None
    saved: str | None = None
    saved_at: int = 0
    ended: bool = False
    failure: Failure | None = None

    @property
    def submitted(self) -> bool:
        """Whether Fluid knows it."""
        return self.handle is not None

    @property
    def exhausted(self) -> bool:
        """Whether it said that it has no more to do, before its budget was used up."""
        return self.ended and self.failure is None and self.received < self.budget

    def go_on_from(self, checkpoint: Any) -> None:
        """Sets where it starts: at a result of ``save``, or afresh if that is ``None`` or empty."""
        self.restore_from = checkpoint if checkpoint is not None and checkpoint.checkpoint is not None else None
        self.going_on_from = path_of(checkpoint)
        metrics = checkpoint.metrics if self.restore_from is not None else {}
        self.first = self.iteration = int(metrics.get(TRAINING_ITERATION, 0))

    def begin_again(self, trial_id: str, checkpoint: Any) -> None:
        """Makes it a trial that Fluid does not know, to start from a checkpoint."""
        self.trial_id, self.handle, self.config = trial_id, None, self.trial.config
        self.received = self.budget = self.saved_at = 0
        self.saved = None
        self.ended = self.overshot = self.finished = False
        self.failure = None
        self.go_on_from(checkpoint)

    def take(self, grant: Grant) -> None:
        """Notes what it may do next."""
        self.budget += grant.iterations
        self.saves, self.open_ended = grant.saves, grant.open_ended
        self.ended = False

    def forget_tasks(self) -> None:
        """Forgets what the controller wished."""
        self.train = None
        self.generation += 1

    def note_saved(self, saved: Any) -> None:
        """Notes a checkpoint that the controller was given."""
        self.saved, self.saved_at = path_of(saved), self.received

    def can_be_kept(self) -> bool:
        """Whether its state is just what the controller knows of it."""
        return self.submitted and self.ended and not (self.failure or self.exhausted or self.results or self.overshot)

    def can_go_on_as(self, trial: Trial) -> bool:
        """Whether it is in just the state in which the controller wants a trial to go on."""
        if not self.can_be_kept() or self.config != trial.config:
            return False
        wanted = path_of(trial.latest_checkpoint_result)
        if wanted is None:
            return self.saved is None  # without any checkpoint there is only this instance to go on from
        if self.saved is None:
            return wanted == self.going_on_from and self.received == 0
        return wanted == self.saved and self.saved_at == self.received

    def discard_results(self) -> None:
        """Lets go of results that the controller will not see, and of the checkpoints that came with them."""
        self.overshot |= bool(self.results)
        for metrics in self.results:
            delete(metrics[SAVED])
        self.results.clear()

    def discard_offered(self) -> None:
        """Lets go of a checkpoint that the controller did not want."""
        delete(self.offered)
        self.offered = None


def path_of(saved: Any) -> str | None:
    """Returns where the checkpoint of a result of ``save`` is; ``None`` if it has none."""
    return None if saved is None or saved.checkpoint is None else str(saved.checkpoint.path)


def delete(saved: Any) -> None:
    """Deletes a checkpoint that nobody wants."""
    if path_of(saved) is not None:
        with suppress(OSError):  # it is in nobody's way
            saved.checkpoint.filesystem.delete_dir(saved.checkpoint.path)


def tell(callback: Callable[..., Any] | None, *arguments: Any) -> None:
    """Calls back, if there is whom to call."""
    if callback is not None:
        callback(*arguments)
