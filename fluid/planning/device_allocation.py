"""Allocates kinds of devices to jobs whose eligible sets overlap, scarce sets first (docs/theory.md, section 15).

This is Venn's intersection-aware order. A set that few devices meet gets them before one that more devices meet, and
gives its part of an intersection to a larger one if more jobs wait per device there, those that it gives included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np


class EligibleSet(NamedTuple):
    """The kinds of devices that some jobs may use, and how many of these jobs wait.

    Attributes:
        kinds: bit k is set for kind k.
        queue: m', the jobs that wait for one of these devices, adjusted for fairness.
    """

    kinds: int
    queue: float


def allocate(sets: Iterable[EligibleSet], devices: Sequence[float]) -> dict[int, int]:
    """Gives each set its share of the devices.

    Every kind in any set is in exactly one share, that of a set which has it. Takes about
    (number of sets) x (number of kinds) steps at most, as no more sets than there are kinds have a share.

    Args:
        sets: in any order; no two with the same kinds.
        devices: number of devices of each kind, weighted; sets have these kinds only.

    Returns:
        Kinds of a set -> those in its share, 0 where it has none.
    """
    known = sorted(sets)
    sizes = _sizes([each.kinds for each in known], devices)
    larger_first = sorted(range(len(known)), key=lambda number: (-sizes[number], number))
    free = (1 << len(devices)) - 1
    shares = [0] * len(known)
    # Sets for which nothing waits come last: they keep only what no other set may use.
    for number in sorted(larger_first, key=lambda number: (known[number].queue <= 0.0, sizes[number], number)):
        shares[number] = known[number].kinds & free
        free &= ~shares[number]
    pressure_on = _Pressures(devices)
    holders = [number for number in larger_first if shares[number]]
    pressures = {number: pressure_on(known[number], shares[number]) for number in holders}
    for taker in larger_first:
        kinds, queue = known[taker]
        while holders and sizes[holders[0]] >= sizes[taker]:  # Only smaller sets give.
            del holders[0]
        if queue <= 0.0:
            continue
        for giver in holders:
            common = shares[giver] & kinds
            if not common:
                continue
            if pressure_on(known[taker], shares[taker] | common) <= pressures[giver]:
                break
            shares[taker] |= common
            shares[giver] &= ~common
            pressures[giver] = pressure_on(known[giver], shares[giver])
    return {each.kinds: share for each, share in zip(known, shares, strict=True)}


def _sizes(masks: Sequence[int], devices: Sequence[float]) -> list[float]:
    """Number of devices in each of these sets of kinds."""
    if not masks or not devices:
        return [0.0] * len(masks)
    length = (len(devices) + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(length, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), length), axis=1, count=len(devices), bitorder="little")
    # Not a matrix product: its last digits may depend on which rows there are.
    sizes: list[float] = (bits * np.asarray(devices, dtype=float)).sum(axis=1).tolist()
    return sizes


class _Pressures:
    """Jobs that wait per device of their set's share: m'/|S'|."""

    def __init__(self, devices: Sequence[float]) -> None:
        self._devices = devices
        self._sizes: dict[int, float] = {}

    def __call__(self, each: EligibleSet, share: int) -> float:
        if each.queue <= 0.0:
            return 0.0
        size = self._size(share)
        return each.queue / size if size > 0.0 else inf

    def _size(self, kinds: int) -> float:
        size = self._sizes.get(kinds)
        if size is None:
            size = self._sizes[kinds] = sum(count for kind, count in enumerate(self._devices) if kinds >> kind & 1)
        return size
