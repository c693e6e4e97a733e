"""Whose trials get devices first: what the core asks of those who share devices out among owners of groups.

:mod:`fluid.policies.owners.shares` answers. The queue has the ranks of the owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fluid.engine.events import GroupTerms, TrialSpec
from fluid.engine.records import TrialRecord
from fluid.resources import Device


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Trials that may get the same devices.

    Attributes:
        positions: of the trials, among those that arrive.
        devices: those that they may get, open ones.
        idle: how many of them are idle.
        others: seconds of work that other trials have left there.
    """

    positions: list[int]
    devices: list[Device]
    idle: int
    others: float


class Sharing(Protocol):
    """Shares devices out among the owners of groups."""

    @property
    def restricts(self) -> bool:
        """Whether some trials get some of the devices that they may use only once others have had their choice."""

    def owner(self, terms: GroupTerms) -> int:
        """The number of a new group's owner."""

    def job(self, owner: int, terms: GroupTerms, spec: TrialSpec) -> int:
        """The number of the trials of an owner that are like a new one of it."""

    def outranks(self, owner: int, other: int) -> bool:
        """Whether an owner's trials may take devices of another's: it comes first, or is the same."""

    def share_of(self, trial: TrialRecord) -> frozenset[int] | None:
        """The devices that a trial gets first; ``None`` for all that it may get."""

    def parts(self, arriving: Sequence[TrialRecord], positions: Sequence[int]) -> list[DeviceShare]:
        """The arriving trials at these positions, by the devices that they may get, in order of the first of each."""

    def update(self, arriving: Sequence[TrialRecord] = ()) -> None:
        """Ranks owners anew, if something has changed; these trials are about to be queued."""

    def forget_devices(self, changed: int) -> None:
        """Has to be called once a device has come, gone, or is closed or open again; its index."""
