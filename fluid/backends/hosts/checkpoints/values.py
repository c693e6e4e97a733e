"""Which checkpoints a host keeps in its memory, by what they are worth there; pure.

What a checkpoint is worth is the probability that its trial is restored from it, times the seconds that this then takes
less from memory than from disk. Memory is scarce, so the worth per byte decides. Only the newest checkpoint of a trial
is worth anything: the one before stands in for it if it is damaged, and is as good on disk.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fluid.engine.commands import CheckpointValue

#: What is taken of a trial of which the engine has said nothing.
UNKNOWN = CheckpointValue(0.5)
#: Restores before the first of a size: seconds each, and seconds per byte, from memory and from disk.
_DEFAULT_S = {True: (2e-4, 5e-10), False: (5e-3, 5e-9)}
#: Least share of the seconds from disk that memory is taken to save: a disk may be as fast while its data are cached.
_LEAST_SAVED = 0.01
#: Newest restores of a size and a place whose median counts.
_NEWEST = 31
#: The room that is kept free is at most one part in so many.
_ROOM_PARTS = 8
#: When a checkpoint was written that is to come, and which iteration's it is if that is unknown: the last of its trial.
LATEST = 1 << 62


class StoredCheckpoint(NamedTuple):
    """A checkpoint in host memory, or one that may come there.

    Attributes:
        path: its folder; empty for one that is still to be written, or fetched.
        trial: name of its trial's folder.
        iteration: of its state.
        bytes: of its files.
        written: when it was written there, in any unit; one that is to come is the last.
    """

    path: str
    trial: str
    iteration: int
    bytes: int
    written: int = LATEST


class RestoreCosts:
    """How long restores take on this host, from memory and from disk, by size: moving medians.

    Sizes within a factor of four are one size. A size that was not measured takes the seconds per byte of the nearest
    one that was.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[bool, int], deque[float]] = {}

    def record(self, in_memory: bool, size: int, seconds: float) -> None:
        """Takes a restore into account: of so many bytes, in so many seconds."""
        if size > 0 and math.isfinite(seconds) and seconds >= 0.0:
            self._rates.setdefault((in_memory, _class(size)), deque(maxlen=_NEWEST)).append(seconds / size)

    def seconds(self, in_memory: bool, size: int) -> float:
        """Returns how long a restore of so many bytes takes."""
        measured = [number for place, number in self._rates if place is in_memory]
        if not measured:
            each, per_byte = _DEFAULT_S[in_memory]
            return each + per_byte * size
        nearest = min(measured, key=lambda number: (abs(number - _class(size)), number))
        return size * statistics.median(self._rates[in_memory, nearest])

    def saved(self, size: int) -> float:
        """Returns the seconds that a restore of so many bytes takes less from memory than from disk, more than 0."""
        from_disk = self.seconds(False, size)
        return max(from_disk - self.seconds(True, size), _LEAST_SAVED * from_disk, 1e-9)

    def saved_per_byte(self, size: int) -> float:
        """Returns those seconds per byte, the same for all sizes that are one size: a few bytes decide nothing."""
        usual = 1 << 2 * _class(size)
        return self.saved(usual) / usual


class Worth(NamedTuple):
    """What a checkpoint is worth in memory; the greater, the longer it stays.

    Attributes:
        pinned: whether it stays as long as others that are not pinned can go.
        per_byte: seconds saved, in the mean, per byte.
        written: when it was written: of those of equal worth the one that was written least recently goes first.
    """

    pinned: bool
    per_byte: float
    written: int


def worth_of(size: int, written: int, value: CheckpointValue, costs: RestoreCosts) -> Worth:
    """Returns what the newest checkpoint of a trial is worth in memory."""
    return Worth(value.pinned, value.returns * costs.saved_per_byte(size), written)


def worths(
    checkpoints: Iterable[StoredCheckpoint], values: Mapping[str, CheckpointValue], costs: RestoreCosts
) -> dict[str, Worth]:
    """Returns what each checkpoint is worth in memory, by its path.

    Args:
        checkpoints: all in memory.
        values: what the engine has said, by name of the trial's folder.
        costs: of restores.
    """
    checkpoints = list(checkpoints)
    newest: dict[str, StoredCheckpoint] = {}
    for one in sorted(checkpoints, key=lambda one: (one.iteration, one.written)):
        newest[one.trial] = one
    return {
        one.path: worth_of(one.bytes, one.written, values.get(one.trial, UNKNOWN), costs)
        if newest[one.trial] is one
        else Worth(False, 0.0, one.written)
        for one in checkpoints
    }


def choose_evictions(
    checkpoints: Sequence[StoredCheckpoint], need: int, worth: Mapping[str, Worth], below: Worth | None = None
) -> list[StoredCheckpoint]:
    """Returns which checkpoints are to leave memory, those of the least worth first.

    Args:
        checkpoints: all in memory.
        need: bytes to free.
        worth: of each, by path.
        below: what those that leave must be worth less than, however recently they were written; ``None`` for all.

    Returns:
        Enough to free the bytes, and none that could stay; if there are not enough, none where ``below`` is given, and
        else all.
    """
    leaving: list[StoredCheckpoint] = []
    freed = 0
    for one in sorted(checkpoints, key=lambda one: worth[one.path]):
        if freed >= need or (below is not None and worth[one.path][:2] >= below[:2]):
            break
        if one.bytes > 0:
            leaving.append(one)
            freed += one.bytes
    if freed < need:
        return [] if below is not None else leaving
    for one in reversed(leaving[:-1]):  # A large one that came last may do for small ones of greater worth.
        if freed - one.bytes >= need:
            leaving.remove(one)
            freed -= one.bytes
    return leaving


def room_kept(limit: int, lanes: int, largest: int) -> int:
    """Returns the bytes that a host keeps free for the next checkpoints of its lanes.

    Args:
        limit: most bytes in memory.
        lanes: how many run.
        largest: bytes of the largest checkpoint there.
    """
    return min(limit // _ROOM_PARTS, max(1, lanes) * largest)


def _class(size: int) -> int:
    return math.frexp(size)[1] // 2
