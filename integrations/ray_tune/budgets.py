"""Iterations that a lane is granted at a time, and the checkpoints that it makes on the way."""

from __future__ import annotations

import logging
import math
from functools import cached_property
from typing import Any, NamedTuple

from fluid.integrations.ray_tune.checkpoint_schedule import CheckpointSchedule
from fluid.integrations.ray_tune.decisions import next_decision
from fluid.integrations.ray_tune.private_api import Trial, saves_when_asked
from fluid.integrations.ray_tune.result_watchers import may_ask_for_checkpoints

_log = logging.getLogger(__name__)
#: Iterations granted to a trial of unknown length, before any trial of its trainable has ended.
_FIRST_GUESS = 100
#: Most iterations granted at a time: the driver holds the results of a lane that runs ahead in memory.
_MOST = 10_000


class Grant(NamedTuple):
    """What a trial may do next.

    Attributes:
        iterations: how many to run.
        checkpoints: the iterations after which its lane makes a checkpoint without being asked.
        open_ended: whether the trial may continue beyond ``iterations`` without a decision of Tune.
        follow_up_iterations: iterations that later rungs may add after those, to this trial or to one that waits for
            it.
    """

    iterations: int
    checkpoints: CheckpointSchedule
    open_ended: bool
    follow_up_iterations: int = 0

    def first(self) -> Grant:
        """Returns the first of its iterations alone, with the others to follow."""
        following = self.iterations - 1 + self.follow_up_iterations
        return self._replace(iterations=1, open_ended=False, follow_up_iterations=following)


class Budgets:
    """Grants iterations up to Tune's next decision.

    Args:
        controller: Tune's.
        scheduler: the user's.
    """

    def __init__(self, controller: Any, scheduler: Any) -> None:
        self._controller = controller
        self._scheduler = scheduler
        #: Iterations of the longest trial so far of each trainable, of those that said they were done.
        self._lengths: dict[str, int] = {}
        #: Whether Tune saves a trial when it is asked to, by the name of its trainable.
        self._savable: dict[str, bool] = {}
        self._runs_ahead = True

    def grant(self, trial: Trial, iteration: float) -> Grant:
        """Returns how far a trial may run from an iteration, of which a trainable may count fractions."""
        grant = self._up_to_decision(trial, math.floor(iteration))
        return grant.first() if self._may_be_saved_any_time(trial) else grant

    def awaits_each_result(self, trial: Trial) -> bool:
        """Whether a trial that has not begun must wait for Tune after each iteration."""
        decision = next_decision(self._controller, self._scheduler, trial, 0)
        return (decision.at == 1 and not decision.stops) or self._may_be_saved_any_time(trial)

    def note_late_save(self, trial: Trial) -> None:
        """Grants one iteration at a time from now on, as Tune saved a trial that had run ahead."""
        if self._runs_ahead:
            self._runs_ahead = False
            _log.warning(
                "Trial %s had run ahead of Tune when it was told to save itself: this checkpoint is of a later"
                " iteration than the result. From now on trials run one iteration at a time. They do so from the"
                " beginning if what asks for checkpoints is a tune.Callback with on_trial_result.",
                trial,
            )

    def _up_to_decision(self, trial: Trial, iteration: int) -> Grant:
        decision = next_decision(self._controller, self._scheduler, trial, iteration)
        at = decision.at
        if at is None or at - iteration > _MOST:
            ahead = _MOST if at is not None else self._guess(trial, iteration)
            return Grant(ahead, decision.checkpoints, open_ended=True)
        return Grant(
            iterations=at - iteration,
            checkpoints=decision.checkpoints,
            open_ended=False,
            follow_up_iterations=decision.follow_up_iterations,
        )

    def _may_be_saved_any_time(self, trial: Trial) -> bool:
        if not self._runs_ahead:
            return True
        if not self._callbacks_may_ask:
            return False
        name = trial.trainable_name
        if name not in self._savable:
            self._savable[name] = saves_when_asked(trial.get_trainable_cls())
        return self._savable[name]

    @cached_property
    def _callbacks_may_ask(self) -> bool:
        return may_ask_for_checkpoints(self._controller)

    def record_length(self, trial: Trial, iterations: int) -> None:
        """Records how many iterations a trial had run when it said that it was done."""
        name = trial.trainable_name
        self._lengths[name] = max(iterations, self._lengths.get(name, 0))

    def _guess(self, trial: Trial, iteration: int) -> int:
        # One more than the longest trial ran: one further step is needed to find out that the trial is done.
        left = self._lengths.get(trial.trainable_name, 0) + 1 - iteration
        return min(left, _MOST) if left > 1 else _FIRST_GUESS
