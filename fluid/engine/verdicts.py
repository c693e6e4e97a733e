"""Trials that have failed as their submitter finds, though their code raised nothing."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.engine.events import Event, Failure


@dataclass(frozen=True, slots=True)
class FailRequested(Event):
    """The submitter finds that a trial has failed: it is stopped after its iteration, and ends FAILED.

    Attributes:
        failure: why.
    """

    trial_id: str
    failure: Failure
