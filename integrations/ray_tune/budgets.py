"""How many iterations a lane is given at a time, and where it is to save."""

from __future__ import annotations

from typing import Any, NamedTuple

from fluid.integrations.ray_tune.decisions import next_decision
from fluid.integrations.ray_tune.lane_trial import Saves
from fluid.integrations.ray_tune.private_api import Trial

#: Iterations given to a trial of which nobody knows when it ends, before any like it has.
_FIRST_GUESS = 100
#: Most iterations given at a time: results of a lane that runs ahead wait in the driver's memory.
_MOST = 10_000


class Grant(NamedTuple):
    """What a trial may do next.

    Attributes:
        iterations: how many to run.
        saves: where its lane saves of its own accord.
        open_ended: whether nobody has to decide before it goes on beyond them.
        follow_up_iterations: iterations that may be asked for after those, of it or of one that waits for it.
    """

    iterations: int
    saves: Saves
    open_ended: bool
    follow_up_iterations: int = 0


class Budgets:
    """Tells the distance to the next decision.

    Args:
        controller: Tune's.
        scheduler: the user's.
    """

    def __init__(self, controller: Any, scheduler: Any) -> None:
        self._controller = controller
        self._scheduler = scheduler
        #: Iterations that the longest trial so far of each trainable had when it ended by itself.
        self._lengths: dict[str, int] = {}

    def grant(self, trial: Trial, iteration: int) -> Grant:
        """Says how far a trial may go on from an iteration."""
        decision = next_decision(self._controller, self._scheduler, trial, iteration)
        every, at = decision.saves.every, decision.at
        at_end = bool(trial.checkpoint_at_end)
        if at is None or at - iteration > _MOST:
            ahead = _MOST if at is not None else self._guess(trial, iteration)
            return Grant(ahead, Saves(every, at_end=at_end), open_ended=True)
        likely = frozenset((at,) if decision.likely_save else ())
        saves = Saves(every, decision.saves.also, likely, at_end)
        return Grant(at - iteration, saves, open_ended=False, follow_up_iterations=decision.follow_up_iterations)

    def ended_by_itself(self, trial: Trial, iteration: int) -> None:
        """Notes how long a trial was that nobody stopped."""
        name = trial.trainable_name
        self._lengths[name] = max(iteration, self._lengths.get(name, 0))

    def _guess(self, trial: Trial, iteration: int) -> int:
        # One more than they ran: it takes a further step to find out that there is nothing left.
        left = self._lengths.get(trial.trainable_name, 0) + 1 - iteration
        return min(left, _MOST) if left > 1 else _FIRST_GUESS
