"""The running table: the trials that run, in columns, as re-planners see them, kept up to date event by event.

Collecting a thousand records anew at every departure would cost more than all the planning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.engine.estimates.key_estimates import KeyEstimate
from fluid.engine.records import TrialRecord
from fluid.measure.runtime_model import FusedColumn, FusedRates, IntArray
from fluid.planners.arrangement import Running, idle_speeds
from fluid.resources import TOLERANCE, Requires

_NO_LIMIT = 1 << 30


class _Column:
    """An array that grows."""

    def __init__(self, dtype: type) -> None:
        self.values: NDArray[Any] = np.zeros(64, dtype=dtype)

    def reserve(self, size: int) -> None:
        if size > len(self.values):
            self.values = np.resize(self.values, max(size, 2 * len(self.values)))


class RunningTable:
    """Columns of the trials that run, or are about to, and are not being resized.

    The columns have no gaps: a trial that leaves is replaced by the last one. Iteration gives rows in that order.
    """

    def __init__(self) -> None:
        #: What running trials ask of their devices, by row; trials that ask for nothing are left out.
        self.constraints: dict[int, Constraint] = {}
        self._rows: list[int] = []
        self._position: dict[int, int] = {}
        self._row, self._key, self._device, self._packing_cap, self._width_cap = (_Column(np.int64) for _ in range(5))
        self._work, self._width, self._speed, self._sigma = (_Column(np.float64) for _ in range(4))
        self._columns = (
            *(self._row, self._key, self._device, self._packing_cap, self._width_cap),
            *(self._work, self._width, self._speed, self._sigma),
        )
        # By profile key and device model.
        self._keys: dict[tuple[str, str | None], int] = {}
        self._alpha = _Column(np.float64)
        self._beta = _Column(np.float64)
        self._c = _Column(np.int64)
        self._d = _Column(np.int64)
        self._fused: list[FusedRates | None] = []
        self._fuses = False

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: object) -> bool:
        return row in self._position

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def set_key(self, estimate: KeyEstimate) -> None:
        """Sets what is known about a profile key on a device model."""
        index = self._keys.setdefault((estimate.key, estimate.model), len(self._keys))
        for column, value in (
            (self._alpha, estimate.alpha),
            (self._beta, estimate.beta),
            (self._c, estimate.packing),
            (self._d, estimate.width),
        ):
            column.reserve(index + 1)
            column.values[index] = value
        if index == len(self._fused):
            self._fused.append(None)
        self._fused[index] = estimate.fused
        self._fuses = any(self._fused)

    def add(
        self,
        trial: TrialRecord,
        devices: tuple[int, ...],
        *,
        speed: float = 1.0,
        work: float,
        model: str | None = None,
    ) -> None:
        """Adds a trial.

        Args:
            trial: a trial of a key that was set for that model.
            devices: that it holds.
            speed: of the slowest of them.
            work: seconds that it has left.
            model: of the slowest of them.
        """
        position = self._position[trial.row] = len(self._rows)
        self._rows.append(trial.row)
        for column in self._columns:
            column.reserve(position + 1)
        packing_cap = trial.packing_cap
        if trial.constraint is not None:
            self.constraints[trial.row] = trial.constraint
        self._row.values[position] = trial.row
        self._key.values[position] = self._keys[trial.spec.profile_key, model]
        self._device.values[position] = devices[0]
        self._packing_cap.values[position] = _NO_LIMIT if packing_cap is None else packing_cap
        self._width_cap.values[position] = trial.max_width
        self._work.values[position] = work
        self._width.values[position] = trial.width
        self._speed.values[position] = speed
        self._sigma.values[position] = 0.0

    def remove(self, row: int) -> None:
        """Removes a trial; one that is not in the table is passed over."""
        position = self._position.pop(row, None)
        if position is None:
            return
        self.constraints.pop(row, None)
        last = self._rows.pop()
        if last != row:
            self._rows[position], self._position[last] = last, position
            for column in self._columns:
                column.values[position] = column.values[len(self._rows)]

    def set_work(self, row: int, work: float) -> None:
        """Sets the seconds of work that a trial has left; a trial that is not in the table is passed over."""
        position = self._position.get(row)
        if position is not None:
            self._work.values[position] = work

    def set_sigma(self, row: int, sigma: float) -> None:
        """Sets the standard deviation of the logarithm of a trial's true seconds of work over those predicted.

        It is 0 at first. A trial that is not in the table is passed over.
        """
        position = self._position.get(row)
        if position is not None:
            self._sigma.values[position] = sigma

    def set_speed(self, row: int, speed: float) -> None:
        """Sets the speed of a trial's slowest device; a trial that is not in the table is passed over."""
        position = self._position.get(row)
        if position is not None:
            self._speed.values[position] = speed

    def set_width(self, row: int, width: float) -> None:
        """Sets the width of a trial that keeps its devices; one that is not in the table is passed over."""
        position = self._position.get(row)
        if position is not None:
            self._width.values[position] = width

    # -- questions -----------------------------------------------------------------------------------------

    def packed_wider_than(self, width: float) -> list[int]:
        """Rows of the packed trials that tolerate fewer neighbours than those of that width."""
        widths = self._width.values[: len(self._rows)]
        found = (widths < 1.0 - TOLERANCE) & (widths > width + TOLERANCE)
        return [self._rows[position] for position in np.flatnonzero(found).tolist()]

    def can_narrow(self) -> bool:
        """Whether a trial could do with less: it has several devices, or one for itself though it packs."""
        count = len(self._rows)
        widths = self._width.values[:count]
        can = (widths >= 2.0) | ((widths == 1.0) & (self._packing(slice(count)) > 1))
        return bool(can.any() if not self.constraints else self._changeable(can).any())

    def alone(self, occupancy: Occupancy) -> list[int]:
        """Rows of the trials that have one device, and that for themselves, ascending."""
        count, held = len(self._rows), occupancy.residents
        found = np.flatnonzero(self._width.values[:count] <= 1.0)
        rows, devices = self._row.values[found].tolist(), self._device.values[found].tolist()
        return sorted(row for row, device in zip(rows, devices, strict=True) if len(held[device]) == 1)

    @property
    def has_several_devices(self) -> bool:
        """Whether a trial has several devices."""
        several = self._width.values[: len(self._rows)] >= 2.0
        return bool(several.any() if not self.constraints else self._changeable(several).any())

    @property
    def total_work(self) -> float:
        """Seconds of work left of all trials."""
        return float(self._work.values[: len(self._rows)].sum())

    def too_wide(self) -> list[tuple[int, int]]:
        """(row, width that helps) of the trials that run wider than was measured to help."""
        count = len(self._rows)
        widths = self._width.values[:count]
        if not (widths > 1.0).any():
            return []
        limit = self._limit(slice(count))
        found = widths > limit
        if self.constraints:
            found = self._changeable(found)
        return [(self._rows[position], int(limit[position])) for position in np.flatnonzero(found).tolist()]

    def snapshot(self, occupancy: Occupancy, epsilon: float) -> Running:
        """The columns, by ascending row."""
        count, n = len(self._rows), len(occupancy)
        order = np.argsort(self._row.values[:count])
        key, width = self._key.values[order], self._width.values[order]
        device, sigma = self._device.values[order], self._sigma.values[order]
        residents = np.ones(count, dtype=np.int64)
        packed = np.flatnonzero(width < 1.0)  # the others are alone
        if len(packed):
            residents[packed] = list(map(len, map(occupancy.residents.__getitem__, device[packed].tolist())))
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
            fused=FusedColumn(tuple(self._fused), key) if self._fuses else None,
            sigma=sigma if (sigma >= tuning.LEAST_SIGMA).any() else None,
            idle_speeds=idle_speeds(occupancy),
        )

    def _changeable(self, found: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Leaves out the trials whose submitter has fixed their width."""
        fixed = [self._position[row] for row, constraint in self.constraints.items() if constraint.width is not None]
        found[fixed] = False
        return found

    def _packing(self, positions: slice | IntArray) -> IntArray:
        c: IntArray = np.minimum(self._c.values[self._key.values[positions]], self._packing_cap.values[positions])
        return c

    def _limit(self, positions: slice | IntArray) -> IntArray:
        d: IntArray = np.minimum(self._d.values[self._key.values[positions]], self._width_cap.values[positions])
        return d


def snapshots_by_devices(
    running: Running, constraints: Mapping[int, Constraint], occupancy: Occupancy
) -> list[Running]:
    """Parts a snapshot by the devices that trials may get; trials of a fixed width are left out, with their devices.

    Args:
        running: the snapshot.
        constraints: what trials ask of their devices, by row.
        occupancy: which trial holds which device.
    """
    fixed = {row for row, constraint in constraints.items() if constraint.width is not None}
    taken = {index for row in fixed for index in occupancy.held[row]}
    parts: dict[Requires | None, list[int]] = {}
    for position, row in enumerate(running.rows.tolist()):
        if row not in fixed:
            constraint = constraints.get(row)
            parts.setdefault(None if constraint is None else constraint.requires, []).append(position)
    found = []
    for requires, positions in parts.items():
        allowed = occupancy.eligible.of(None if requires is None else Constraint(requires))
        devices = {device.index for device in occupancy.open_devices} - taken
        if allowed is not None:
            devices &= allowed
        idle = sum(index in devices for index in occupancy.idle_since)
        found.append(_part(running, np.array(positions, dtype=np.int64), free=idle, n=max(1, len(devices))))
    return found


def _part(running: Running, positions: IntArray, *, free: int, n: int) -> Running:
    """Some trials of a snapshot, on ``n`` devices of which ``free`` are idle."""
    columns = ("rows", "remaining", "widths", "residents", "device", "speed", "alpha", "beta", "c")
    limit = np.minimum(running.d[positions], n)
    some = {name: getattr(running, name)[positions] for name in columns}
    fused = None if running.fused is None else running.fused.take(positions)
    sigma = None if running.sigma is None else running.sigma[positions]
    return replace(running, **some, d=limit, free=free, n=n, fused=fused, sigma=sigma, idle_speeds=None)
