"""Iterations that a lane is granted at a time, and the checkpoints that it makes on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

from fluid.integrations.ray_tune.checkpoint_schedule import CheckpointSchedule
from fluid.integrations.ray_tune.decisions import next_decision
from fluid.integrations.ray_tune.private_api import Trial

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

    def grant(self, trial: Trial, iteration: int) -> Grant:
        """Returns how far a trial may run from an iteration."""
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

    def record_length(self, trial: Trial, iterations: int) -> None:
        """Records how many iterations a trial had run when it said that it was done."""
        name = trial.trainable_name
        self._lengths[name] = max(iterations, self._lengths.get(name, 0))

    def _guess(self, trial: Trial, iteration: int) -> int:
        # One more than the longest trial ran: one further step is needed to find out that the trial is done.
        left = self._lengths.get(trial.trainable_name, 0) + 1 - iteration
        return min(left, _MOST) if left > 1 else _FIRST_GUESS
