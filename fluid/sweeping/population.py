"""Population based training in a sweep: who may be asked to do it, and the trials that start from others' states.

A member is a chain of trials: the first one, and behind each exploit a trial of its own, whose id counts them:
``NAME-00003``, then ``NAME-00003.1``. All have the member's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.search.population import Standing
from fluid.session.folder.keeper import how_to_save, may_be_saved
from fluid.sweeping.plan import SweepTrial
from fluid.sweeping.resuming import EarlierTrial


def require_savable(trainable: Any) -> None:
    """Checks that a member can go on from another one's state.

    Raises:
        InvalidFieldError: trials of this trainable cannot be saved.
    """
    if not may_be_saved(trainable):
        reason = f"cannot be saved, so no member can go on from another's state: {how_to_save(trainable)}"
        raise InvalidFieldError("trainable", trainable, reason)


def next_id(trial_id: str, name: str) -> str:
    """The id of the trial that follows one in its chain, in a sweep of that name.

    Example:
        >>> from fluid.sweeping.population import next_id
        >>> next_id("a.1-00003", "a.1"), next_id("a.1-00003.1", "a.1")
        ('a.1-00003.1', 'a.1-00003.2')
    """
    number, _, count = trial_id.removeprefix(name).partition(".")
    return f"{name}{number}.{int(count or 0) + 1}"


def standing_of(
    parent: SweepTrial, loser: SweepTrial, past: Mapping[str, EarlierTrial], name: str, interval: int
) -> Standing:
    """How a trial stands, if another one may give up for its state.

    Args:
        parent: the trial.
        loser: the other one; the trial itself if only its own standing matters.
        past: the trials as an earlier session has left them, while its events are taken. What it knew of a trial that
            ran follows from what it did then: results are not written one by one.
        name: of the sweep.
        interval: iterations between two times that a member is ready.
    """
    if not parent.is_open:
        return Standing(parent.config, parent.iteration, parent.iteration)
    state = parent.iteration + 1 if parent.results else None  # It is saved after the iteration that it is in.
    if (follower := past.get(next_id(loser.trial_id, name))) is not None:
        state = follower.first_budget - interval
    elif (as_left := past.get(loser.trial_id)) is not None and as_left.budget > loser.budget:
        state = None  # It went on from its own.
    return Standing(parent.config, parent.iteration, state)
