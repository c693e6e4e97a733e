"""Limits that a lane keeps to: what the driver sets, and what the lane finds."""

from __future__ import annotations

from typing import NamedTuple


class LimitResident(NamedTuple):
    """Limits the device memory that a trial may take until another limit; ``None`` for no limit."""

    trial_id: str
    limit_bytes: float | None


class SetThreads(NamedTuple):
    """Use that many CPU threads, as other lanes have begun or ended to run trials on the device."""

    threads: int


class SetRows(NamedTuple):
    """Train at most so many trials in one step from now on; 1 for one after another."""

    rows: int


class RowsLimited(NamedTuple):
    """Trials like this one train at most so many in one step in this lane from now on.

    Attributes:
        rows: 1 if they cannot be fused; more if so many fit into the device's memory.
        reason: why, in one line.
    """

    at: float
    trial_id: str
    rows: int
    reason: str
