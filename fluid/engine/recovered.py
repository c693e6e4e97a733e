"""A session as its journal tells it: what :func:`fluid.engine.journal.replay` returns. Pure: no IO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import Checkpoint, DeviceAdded, Failure, GroupRecovered, TrialHistory
from fluid.engine.group_terms import PLAIN_TERMS, GroupTerms
from fluid.measure.profile import Profile
from fluid.trialgroup import TrialState

T = TypeVar("T")


def changed(record: T, **fields: Any) -> T:
    """A dataclass's instance with other fields; itself where they are as they were, as of most trials of a session."""
    for name, value in fields.items():
        if getattr(record, name) != value:
            return replace(record, **fields)  # type: ignore[type-var]
    return record


@dataclass(frozen=True)
class PastTrial:
    """A trial that was forgotten.

    Attributes:
        group_id: its group.
        history: its state when it was forgotten.
        failure: why it failed for good; ``None`` if it did not.
    """

    group_id: str
    history: TrialHistory
    failure: Failure | None = None


@dataclass
class Recovered:
    """A session as its journal tells it.

    Attributes:
        groups: the trials by group id and trial id, in order of submission.
        durable: newest checkpoint on disk, by trial id.
        failures: why trials failed for good, by trial id.
        forgotten: ids of forgotten trials, by group id.
        past: the forgotten trials, by trial id.
        outcomes: what the submitter said of trials that it stopped, by trial id.
        terms: on which groups were submitted, by group id.
        places: devices added and lost, and trials resized, in order.
        profile: the newest snapshot; ``None`` if the journal holds none.
        at: time of the last entry, in seconds on the time axis of the files; 0 if there is none.
        torn: whether the last line is cut off, as by a crash.
        mixed: whether two sessions wrote the journal: a group or a trial was submitted twice.
    """

    groups: dict[str, dict[str, TrialHistory]] = field(default_factory=dict)
    durable: dict[str, Checkpoint] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    forgotten: dict[str, list[str]] = field(default_factory=dict)
    past: dict[str, PastTrial] = field(default_factory=dict)
    outcomes: dict[str, TrialState] = field(default_factory=dict)
    terms: dict[str, GroupTerms] = field(default_factory=dict)
    places: list[DeviceAdded | NoteDeviceLost | NoteResize] = field(default_factory=list)
    profile: Profile | None = None
    at: float = 0.0
    torn: bool = False
    mixed: bool = False

    def events(self, at: float, readable: Callable[[Checkpoint], bool] = lambda _: True) -> list[GroupRecovered]:
        """The events that make a new engine resume this session.

        Args:
            at: seconds, on the new session's clock.
            readable: whether a checkpoint still exists. A trial resumes from its newest checkpoint, else from its
                newest durable one, else from the start.
        """

        def resumable(history: TrialHistory) -> TrialHistory:
            trial_id = history.trial.trial_id
            choices = (history.checkpoint, self.durable.get(trial_id))
            found = next((choice for choice in choices if choice is not None and readable(choice)), None)
            return changed(history, checkpoint=found, outcome=self.outcomes.get(trial_id))

        return [
            GroupRecovered(
                at,
                group_id,
                tuple(resumable(history) for history in trials.values()),
                tuple(self.forgotten.get(group_id, ())),
                self.terms.get(group_id, PLAIN_TERMS),
            )
            for group_id, trials in self.groups.items()
        ]

    @property
    def reported(self) -> dict[str, int]:
        """Iterations that each trial has reported, also of forgotten ones, by trial id."""
        known = {trial_id: history for trials in self.groups.values() for trial_id, history in trials.items()}
        past = {trial_id: one.history for trial_id, one in self.past.items()}
        return {trial_id: history.reported for trial_id, history in {**past, **known}.items()}

    @property
    def unfinished(self) -> bool:
        """Whether a trial has not ended."""
        return any(history.ended is None for trials in self.groups.values() for history in trials.values())
