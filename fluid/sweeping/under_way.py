"""How many trials of a sweep are under way at once."""

from __future__ import annotations

from fluid.executor import FluidExecutor
from fluid.sweeping.plan import SweepPlan
from fluid.trainables.trainable import is_fusible

#: Trials under way for each device, if they start one after another: four, as many as may be packed on it by default,
#: and one that waits for a place.
_PER_DEVICE = 5
#: The same for trials that can be fused, until it is measured how many are: what is under way must repay trying it.
_PER_DEVICE_FUSIBLE = 16
#: The same for each row of the largest fused pack so far: twice as many rows may be tried next, and some trials wait.
_PER_ROW = 3


def most_fusible(devices: int, rows: int) -> int:
    """How many trials that can be fused may be under way at once.

    Args:
        devices: that there are.
        rows: of the largest pack so far.
    """
    return devices * max(_PER_DEVICE_FUSIBLE, _PER_ROW * rows)


def most_under_way(plan: SweepPlan, devices: int, *, in_rounds: bool) -> int | None:
    """How many trials of a sweep are under way at once on so many devices, before any are fused.

    Args:
        plan: the sweep.
        devices: that there are.
        in_rounds: whether all of its trials are to advance together.
    """
    if plan.under_way is not None:
        return plan.under_way
    if plan.learns:
        return devices + 1
    if begin_together(plan) or (in_rounds and plan.samples is not None):
        return None
    return devices * (_PER_DEVICE_FUSIBLE if is_fusible(plan.trainable) else _PER_DEVICE)


def begin_together(plan: SweepPlan) -> bool:
    """Whether all trials of a sweep are under way from its beginning, also where they do not advance in rounds."""
    is_limited = plan.under_way is not None or plan.samples is None
    return not (is_limited or plan.learns or plan.algorithm == "asha")


class UnderWay:
    """How many trials may be under way at once.

    Trials of ASHA start as others end, so that promotions get their turn: a few for each device, or for each row where
    trials are fused. A searcher learns most if few are under way: one for each device, and one more, so that no device
    waits while the next config is suggested. In other sweeps, and where trials advance in rounds, all start together.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._most = plan.under_way
        self._devices = 1
        self._rows = 1
        self._follows_rows = False

    def begin(self, executor: FluidExecutor) -> None:
        """Called once, with the executor that runs the sweep."""
        plan, self._devices = self._plan, max(1, executor.max_devices)
        self._most = most_under_way(plan, self._devices, in_rounds=executor.in_rounds)
        self._follows_rows = plan.under_way is None and not plan.learns and self._most is not None

    def has_room(self, under_way: int) -> bool:
        """Whether a further trial may start beside so many."""
        return self._most is None or under_way < self._most

    def note(self, rows: int) -> bool:
        """Takes note of a step of so many fused trials; returns whether more trials may be under way than before."""
        if rows <= self._rows or not self._follows_rows or self._most is None:
            return False
        self._rows = rows
        before, self._most = self._most, max(self._most, self._devices * _PER_ROW * rows)
        return self._most > before
