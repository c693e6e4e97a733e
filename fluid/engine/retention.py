"""Retention: the last checkpoint of a trial outlives the run, if its submitter wants that (``TrialSpec.keep_last``).

A trial that is done is saved in its lane; one that is stopped, before it leaves its lane. If a trial failed or lost its
lane, its host copies its newest checkpoint.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from fluid.engine.commands import Persist, Save
from fluid.engine.events import Event
from fluid.engine.records import TrialRecord


@dataclass(frozen=True, slots=True)
class TrialNotKept(Event):
    """A checkpoint that was to outlive the run was not written, or was deleted; the trial goes on.

    Attributes:
        iteration: iterations done by the state.
        reason: why, in one line.
    """

    trial_id: str
    _: KW_ONLY
    iteration: int
    reason: str


def is_to_be_kept(trial: TrialRecord) -> bool:
    """Whether a trial's present state is to be saved for good, and no lane was told to."""
    spec, residence, done = trial.spec, trial.residence, trial.progress.done
    return spec.keep_last and spec.can_save and max(residence.kept_at, residence.keeping) < done


def last_to_keep(trial: TrialRecord, lane_id: int) -> list[Save]:
    """Returns the command by which the lane of a trial that is done saves it for good, if that is wanted."""
    if not is_to_be_kept(trial):
        return []
    trial.residence = replace(trial.residence, keeping=trial.progress.done)
    return [Save(trial.trial_id, (lane_id,), durable=True, keep=True)]


def newest_to_keep(trial: TrialRecord) -> list[Persist]:
    """Returns the command by which the newest checkpoint of a trial is copied for good, if that is wanted.

    Args:
        trial: a trial that was stopped or failed, or is done and has lost its lane.
    """
    residence = trial.residence
    checkpoint, kept = residence.checkpoint, max(residence.kept_at, residence.keeping)
    if not trial.spec.keep_last or checkpoint is None or checkpoint.iteration <= kept:
        return []
    return [Persist(trial.trial_id, checkpoint, keep=True)]
