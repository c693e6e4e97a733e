"""What the engine knows of a group beyond its trials: whose it is, and how urgent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The terms on which a group is submitted.

    Attributes:
        owner: the groups of one owner are scheduled as one; ``None`` for an owner of its own.
        priority: its trials start before those of groups of a lower priority.
        preempt: whether running trials of groups of a lower priority are paused for it.
        expected_trials: trials that its search algorithm will submit in all; ``None`` if unknown.
    """

    owner: str | None = None
    priority: float = 1.0
    preempt: bool = False
    expected_trials: int | None = None

    @property
    def text(self) -> str:
        """Whose it is and how urgent, in a few words: ``"of ann, priority 10"``; empty if nothing was said."""
        parts = [] if self.owner is None else [f"of {self.owner}"]
        parts += [] if self.priority == PLAIN_TERMS.priority else [f"priority {self.priority:g}"]
        return ", ".join([*parts, *(["preempts"] if self.preempt else [])])


#: Those of a group of which nothing was said.
PLAIN_TERMS = GroupTerms()
