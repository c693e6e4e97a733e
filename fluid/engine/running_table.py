"""The trials that run, in columns: what a re-planner looks at, kept up to date event by event.

Gathering a thousand records anew at every departure would cost more than all the planning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fluid.engine.key_estimates import KeyEstimate
from fluid.engine.records import TrialRecord
from fluid.planning.arrangement import Running
from fluid.planning.occupancy import Occupancy
from fluid.planning.runtime_model import TOLERANCE, IntArray

_NO_LIMIT = 1 << 30


class _Column:
    """An array that grows."""

    def __init__(self, dtype: type) -> None:
        self.values: NDArray[Any] = np.zeros(64, dtype=dtype)

    def reserve(self, size: int) -> None:
        if size > len(self.values):
            self.values = np.resize(self.values, max(size, 2 * len(self.values)))


class RunningTable:
    """Columns of the running trials, without gaps; a trial that leaves is replaced by the last one."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._place: dict[int, int] = {}
        self._row, self._key, self._device, self._most_packed, self._widest = (_Column(np.int64) for _ in range(5))
        self._work, self._width, self._speed = (_Column(np.float64) for _ in range(3))
        self._columns = (
            *(self._row, self._key, self._device, self._most_packed, self._widest),
            *(self._work, self._width, self._speed),
        )
        # By profile key.
        self._keys: dict[str, int] = {}
        self._alpha, self._beta = _Column(np.float64), _Column(np.float64)
        self._c, self._d = _Column(np.int64), _Column(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def set_key(self, facts: KeyEstimate) -> None:
        """Notes what is known about a profile key."""
        index = self._keys.setdefault(facts.key, len(self._keys))
        for column, value in (
            (self._alpha, facts.alpha),
            (self._beta, facts.beta),
            (self._c, facts.packing),
            (self._d, facts.width),
        ):
            column.reserve(index + 1)
            column.values[index] = value

    def add(self, trial: TrialRecord, devices: tuple[int, ...], speed: float, work: float) -> None:
        """Notes that a trial runs on these devices, the slowest of that speed, with so many seconds of work left."""
        place = self._place[trial.row] = len(self._rows)
        self._rows.append(trial.row)
        for column in self._columns:
            column.reserve(place + 1)
        self._row.values[place] = trial.row
        self._key.values[place] = self._keys[trial.spec.profile_key]
        self._device.values[place] = devices[0]
        self._most_packed.values[place] = _NO_LIMIT if trial.limits.packing_cap is None else trial.limits.packing_cap
        self._widest.values[place] = trial.max_width
        self._work.values[place] = work
        self._width.values[place] = trial.placement.width
        self._speed.values[place] = speed

    def remove(self, row: int) -> None:
        """Notes that a trial does not run any more; one that did not is passed over."""
        place = self._place.pop(row, None)
        if place is None:
            return
        last = self._rows.pop()
        if last != row:
            self._rows[place], self._place[last] = last, place
            for column in self._columns:
                column.values[place] = column.values[len(self._rows)]

    def set_work(self, row: int, work: float) -> None:
        """Notes how many seconds of work a trial has left, if it runs."""
        place = self._place.get(row)
        if place is not None:
            self._work.values[place] = work

    def set_width(self, row: int, width: float) -> None:
        """Notes that a trial has another width on the device it has."""
        self._width.values[self._place[row]] = width

    # -- questions -----------------------------------------------------------------------------------------

    def packed_wider_than(self, width: float) -> list[int]:
        """Rows of the packed trials that tolerate fewer neighbours than those of that width."""
        widths = self._width.values[: len(self._rows)]
        found = (widths < 1.0 - TOLERANCE) & (widths > width + TOLERANCE)
        return [self._rows[place] for place in np.flatnonzero(found).tolist()]

    def can_give_way(self) -> bool:
        """Whether a trial runs that could do with less: one of several devices, or alone on one though it packs."""
        count = len(self._rows)
        widths = self._width.values[:count]
        return bool(((widths >= 2.0) | ((widths == 1.0) & (self._packing(slice(count)) > 1))).any())

    def too_wide(self) -> list[tuple[int, int]]:
        """(row, width that helps) of the trials that run wider than was measured to help."""
        count = len(self._rows)
        widths = self._width.values[:count]
        if not (widths > 1.0).any():
            return []
        limit = self._limit(slice(count))
        return [(self._rows[place], int(limit[place])) for place in np.flatnonzero(widths > limit).tolist()]

    def snapshot(self, occupancy: Occupancy, epsilon: float) -> Running:
        """What a re-planner looks at, by ascending row."""
        count, n = len(self._rows), len(occupancy)
        order = np.argsort(self._row.values[:count])
        key, width = self._key.values[order], self._width.values[order]
        device = self._device.values[order]
        residents = np.ones(count, dtype=np.int64)
        for place in np.flatnonzero(width < 1.0).tolist():  # the others are alone
            residents[place] = len(occupancy.residents[int(device[place])])
        return Running(
            rows=self._row.values[order],
            remaining=self._work.values[order],
            widths=width,
            residents=residents,
            device=device,
            speed=self._speed.values[order],
            alpha=self._alpha.values[key],
            beta=self._beta.values[key],
            c=self._packing(order),
            d=np.minimum(self._limit(order), n),
            free=occupancy.free_count,
            n=n,
            epsilon=epsilon,
        )

    def _packing(self, places: slice | IntArray) -> IntArray:
        c: IntArray = np.minimum(self._c.values[self._key.values[places]], self._most_packed.values[places])
        return c

    def _limit(self, places: slice | IntArray) -> IntArray:
        d: IntArray = np.minimum(self._d.values[self._key.values[places]], self._widest.values[places])
        return d
