"""What a lane tells the driver of trials whose state cannot always be saved."""

from __future__ import annotations

from typing import NamedTuple

from fluid.lane.errors import is_for_want_of_space, is_out_of_memory
from fluid.lane.work_queue import ResidentTrial
from fluid.trainables.json_form import message_of
from fluid.trainables.resident import NotSavableError


class ResidentSavability(NamedTuple):
    """A trial can be saved from now on, or cannot.

    With ``refuses``, it answers a SaveResident: the trial stays as it was. ``reason`` is empty where it is no news.
    """

    at: float
    trial_id: str
    can_save: bool
    reason: str = ""
    refuses: bool = False


def is_not_savable(error: BaseException) -> bool:
    """Whether an exception that a save raised says that the state cannot be saved, whatever the space."""
    return isinstance(error, NotSavableError) and not is_for_want_of_space(error) and not is_out_of_memory(error)


def refusal_of(error: BaseException, resident: ResidentTrial, now: float, *, refuses: bool) -> ResidentSavability:
    """What to tell of a trial whose save raised that: from now on it is not saved automatically."""
    resident.autosaves = False
    return ResidentSavability(now, resident.trial_id, can_save=False, reason=message_of(error), refuses=refuses)


def has_changed(resident: ResidentTrial) -> bool:
    """Notes whether a trial that reports its states can be saved by now; returns whether that is news."""
    assert resident.body is not None
    can_save = resident.body.unsaved_iterations() is not None
    if can_save is resident.savable:
        return False
    resident.savable = resident.autosaves = can_save
    return True
