"""A planner's output: an arrangement (widths and a start order), and width changes of running trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fluid.devices.occupancy import Occupancy
from fluid.measure.runtime_model import FloatArray, FusedColumn, IntArray


class WidthChange(NamedTuple):
    """Give the running trial ``row`` the width ``width``, at the end of its current iteration."""

    row: int
    width: float


@dataclass(frozen=True)
class Running:
    """A snapshot of the trials that run, one entry per running trial, in any order.

    Attributes:
        rows: (m,) the caller's numbers of these trials; width changes name them.
        remaining: (m,) seconds of work left at width 1 on a device of speed 1.
        widths: (m,) the width given, ``1/p`` as planned.
        residents: (m,) p(t), trials on the device now; 1 for widths of at least 1.
        device: (m,) the device of a trial of width at most 1 (the first one of a wide trial).
        speed: (m,) speed of the slowest device held.
        alpha, beta, c, d: (m,) the runtime model's columns.
        free: number of idle devices.
        n: number of devices.
        epsilon: seconds one resize costs.
        fused: (m,) rates of the trials whose co-residents are rows of one fused pack, in place of alpha; ``None`` if
            there are none. A table that has rates by profile key passes ``FusedColumn(rates_of_keys, key_of_trials)``.
        sigma: (m,) standard deviation of the logarithm of the true over the predicted ``remaining``, which is its
            median; ``None`` if all are certain.
        idle_speeds: the speeds of the idle devices; ``None`` if all devices have one speed, or they are not known.
    """

    rows: IntArray
    remaining: FloatArray
    widths: FloatArray
    residents: IntArray
    device: IntArray
    speed: FloatArray
    alpha: FloatArray
    beta: FloatArray
    c: IntArray
    d: IntArray
    free: int
    n: int
    epsilon: float
    fused: FusedColumn | None = None
    sigma: FloatArray | None = None
    idle_speeds: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows)


def idle_speeds(occupancy: Occupancy) -> tuple[float, ...] | None:
    """The speeds of the idle devices, for a snapshot; ``None`` if all devices have one speed."""
    if not occupancy.is_unlike:
        return None
    return tuple([occupancy.device(index).speed for index in occupancy.idle_since])


class Replanner(Protocol):
    """Chooses widths of running trials at each departure or change of devices, once nothing is queued.

    Attributes:
        moves_only_devices: whether it changes nothing while no device is idle and no trial has several.
    """

    moves_only_devices: bool

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns the width changes worth making, in the order in which to make them."""
        ...

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns the width changes that release devices, or slots on devices, for queued trials.

        Args:
            running: the trials that run.
            waiting: heights of the queued trials, seconds, or their sum.
        """
        ...


class KeepWidths:
    """The re-planner that never changes a width."""

    moves_only_devices = True

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns nothing."""
        return []

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns nothing."""
        return []


@dataclass(frozen=True)
class Arrangement:
    """A planner's answer for one instance.

    Attributes:
        widths: (k,) width of each trial.
        order: (k,) rows in starting order.
        replanner: chooses widths once the trials run.
        replan_at_start: whether the re-planner is also asked at once, if every trial started and devices are idle.
        name: how the arrangement was made, for display.
    """

    widths: FloatArray
    order: IntArray
    replanner: Replanner
    replan_at_start: bool
    name: str


def start_order(widths: FloatArray, heights: FloatArray, priority: FloatArray) -> IntArray:
    """Rows by descending priority, then descending width, then descending height; ties as submitted."""
    return np.lexsort((-heights, -widths, -priority)).astype(np.int64)
