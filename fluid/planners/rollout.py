"""The rollout: a plan carried out by the runtime model, to predict its makespan.

Planners compare candidates by it, and ``fluid plan`` shows it. Trials are continuous work: a packed trial advances at
the rate that its co-residents at the time allow, ``alpha^-(p(t)-1)`` or that of a fused pack of so many rows, a wide
one at ``w / beta^(w-1)`` (docs/theory.md, sections 3 and 10). ``fluid simulate`` runs the engine on
:mod:`fluid.backends.simulated` instead, iteration by iteration; tests/simulation/test_models_agree.py compares the two.
Pure: time is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.measure.runtime_model import FusedColumn, FusedRates, IntArray, stretch_of
from fluid.planners.arrangement import Arrangement, Running, WidthChange, idle_speeds
from fluid.planners.instance import Instance
from fluid.resources import TOLERANCE, Cluster, MemoryNeed

#: Events closer together than this share of the time are one instant: sums of the same durations in another order
#: differ by rounding, which is a few times 1e-16 of the time.
_SAME_INSTANT = 1e-12


@dataclass(frozen=True, slots=True)
class Segment:
    """An interval in which a trial held the same devices at the same width.

    Attributes:
        row: the trial.
        start, end: seconds.
        devices: indices of the devices held.
        width: the width given, ``1/p`` as planned.
        pause: seconds at its start that the trial lost to resizes.
    """

    row: int
    start: float
    end: float
    devices: tuple[int, ...]
    width: float
    pause: float = 0.0


class Rollout:
    """Trials on devices, simulated by the runtime model. Rows are numbered in the order they are added.

    Args:
        cluster: the devices.
        epsilon: seconds a resized trial makes no progress.
        record: whether to keep :attr:`segments`.
    """

    def __init__(self, cluster: Cluster, epsilon: float = 0.0, *, record: bool = False) -> None:
        self.occupancy = Occupancy(cluster)
        self.epsilon = epsilon
        self.now = 0.0
        #: Rows that run now.
        self.running: set[int] = set()
        #: Finished segments, if recorded.
        self.segments: list[Segment] = []
        self.resizes = 0
        self.started: dict[int, float] = {}
        self.finished: dict[int, float] = {}
        self._record = record
        # Columns, one entry per row. `_remaining` is work left, in seconds at width 1 and speed 1, as of `_since`.
        self._remaining: list[float] = []
        self._alpha: list[float] = []
        self._beta: list[float] = []
        self._kind: list[int] = []
        #: Distinct rates of fused packs, by kind; ``None`` for rows that are not fused.
        self._rates: list[FusedRates | None] = [None]
        self._c: list[int] = []
        self._d: list[int] = []
        self._needs: list[MemoryNeed | None] = []
        #: Of the rows that ask for something.
        self._constraints: dict[int, Constraint] = {}
        self._width: list[float] = []
        self._rate: list[float] = []
        self._since: list[float] = []
        self._version: list[int] = []
        self._opened: list[tuple[float, float]] = []
        self._ends: list[tuple[float, int, int]] = []
        self._queue = StartQueue()

    # -- state --------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """The number of trials that wait for a device."""
        return len(self._queue)

    @property
    def next_end(self) -> float:
        """The time at which the next running trial ends, if nothing changes; infinite if none runs."""
        ends = self._ends
        while ends and ends[0][2] != self._version[ends[0][1]]:
            heapq.heappop(ends)
        return ends[0][0] if ends else math.inf

    def remaining(self, row: int) -> float:
        """Predicted seconds of work left at width 1 and speed 1."""
        return max(0.0, self._remaining[row] - self._rate[row] * max(0.0, self.now - self._since[row]))

    def width(self, row: int) -> float:
        """The width given to the trial."""
        return self._width[row]

    def is_fresh(self, row: int) -> bool:
        """Whether the trial started at this instant: a resize costs nothing then."""
        return self.started[row] == self.now

    def snapshot(self, epsilon: float | None = None) -> Running:
        """The re-planner's input, with ``epsilon`` in place of the rollout's own."""
        rows = sorted(self.running)
        n = len(self.occupancy)
        if self._constraints:  # A fixed width is not changed: planners see the other trials on the other devices.
            fixed = {row for row in rows if (asked := self._constraints.get(row)) is not None and asked.width}
            n -= sum(len(self.occupancy.held[row]) for row in fixed)
            rows = [row for row in rows if row not in fixed]
        now, left, rate, since = self.now, self._remaining, self._rate, self._since
        held = [self.occupancy.held[row] for row in rows]
        residents = self.occupancy.residents
        return Running(
            rows=np.array(rows, dtype=np.int64),
            remaining=np.maximum([left[row] - rate[row] * max(0.0, now - since[row]) for row in rows], 0.0),
            widths=np.array([self._width[row] for row in rows], dtype=np.float64),
            residents=np.array([len(residents[devices[0]]) for devices in held], dtype=np.int64),
            device=np.array([devices[0] for devices in held], dtype=np.int64),
            speed=np.array(self.occupancy.speeds(held), dtype=np.float64),
            alpha=np.array([self._alpha[row] for row in rows], dtype=np.float64),
            beta=np.array([self._beta[row] for row in rows], dtype=np.float64),
            c=np.array([self._c[row] for row in rows], dtype=np.int64),
            d=np.array([self._d[row] for row in rows], dtype=np.int64),
            free=self.occupancy.free_count,
            n=n,
            epsilon=self.epsilon if epsilon is None else epsilon,
            fused=None if len(self._rates) == 1 else FusedColumn(tuple(self._rates), self._kinds_of(rows)),
            idle_speeds=idle_speeds(self.occupancy),
        )

    # -- changes ------------------------------------------------------------------------------------------

    def submit(self, instance: Instance, arrangement: Arrangement) -> range:
        """Queues the trials of an instance as arranged, behind those that are queued; returns their rows.

        Args:
            instance: the trials; its cluster is ignored.
            arrangement: widths and starting order.
        """
        first, k, model = len(self._remaining), len(instance), instance.model
        self._remaining += instance.heights.tolist()
        self._alpha += model.alpha.tolist()
        self._beta += model.beta.tolist()
        if model.fused is None:
            self._kind += [0] * k
        else:
            self._rates += [rates for rates in model.fused.rates if rates not in self._rates]
            kinds = [self._rates.index(rates) for rates in model.fused.rates]
            self._kind += [kinds[kind] for kind in model.fused.kind.tolist()]
        self._c += model.c.tolist()
        self._d += model.d.tolist()
        self._needs += instance.needs
        for row, constraint in enumerate(instance.constraints or ()):
            if constraint is not None:
                self._constraints[first + row] = constraint
        self._width += arrangement.widths.tolist()
        self._rate += [0.0] * k
        self._since += [self.now] * k
        self._version += [0] * k
        self._opened += [(0.0, 0.0)] * k
        priority, widths = instance.priority.tolist(), arrangement.widths.tolist()
        for row in arrangement.order.tolist():
            kind = instance.needs[row], self._constraints.get(first + row)
            self._queue.push(first + row, widths[row], priority[row], kind)
        return range(first, first + k)

    def dispatch(self) -> list[int]:
        """Starts every queued trial that fits, in order of priority, then descending width; returns them.

        Narrower trials overtake one that does not fit: the devices would idle otherwise.
        """
        started = self._queue.start(self._place)
        # Rates are set once, after all have started.
        for row in {near for begun in started for near in (begun, *self._neighbours(begun))}:
            self._pace(row)
        return started

    def advance(self, until: float) -> list[int]:
        """Advances the time to ``until``, or to the next instant at which trials end; returns the trials ended."""
        end = self.next_end
        if end > until:
            self.now = until
            return []
        self.now = max(self.now, end)
        instant = end + _SAME_INSTANT * max(1.0, abs(end))
        ended: list[int] = []
        while self.next_end <= instant:
            row = heapq.heappop(self._ends)[1]
            self._version[row] += 1
            ended.append(row)
        left = {other for row in ended for other in self._neighbours(row)}
        for row in ended:
            self._leave(row)
            self._remaining[row] = 0.0
        for row in left & self.running:
            self._pace(row)
        return ended

    def resize(self, row: int, width: float) -> bool:
        """Changes the width of a running trial, which pays epsilon unless it started at this instant.

        Returns:
            Whether it was possible; nothing changes otherwise. A trial is not widened onto devices so slow that it
            would slow down.
        """
        before = self.occupancy.held[row]
        neighbours = self._neighbours(row)
        self._settle(row)
        chosen = self.occupancy.devices_for(row, width, self._needs[row], self._allowed(row))
        if chosen is None or (width > self._width[row] and self._is_slower(row, chosen, width)):
            return False
        self.occupancy.move(row, chosen, width, self._needs[row])
        # A trial that allows packing on its own device does not move.
        free = self.is_fresh(row) or self.occupancy.held[row] == before
        self._close(row, before)
        self._width[row] = width
        pause = 0.0 if free else self.epsilon
        pause += max(0.0, self._since[row] - self.now)  # the rest of the previous pause
        self._since[row] = self.now + pause
        self._opened[row] = (self.now, pause)
        self.resizes += not free
        for other in {row, *neighbours, *self._neighbours(row)}:
            self._pace(other)
        return True

    def apply(self, resizes: list[WidthChange]) -> None:
        """Carries out the re-planner's width changes, in its order."""
        for row, width in resizes:
            self.resize(row, width)

    # -- inside -------------------------------------------------------------------------------------------

    def _place(self, row: int) -> bool:
        if self.occupancy.place(row, self._width[row], self._needs[row], allowed=self._allowed(row)) is None:
            return False
        self._begin(row)
        return True

    def _allowed(self, row: int) -> Set[int] | None:
        return self.occupancy.eligible.of(self._constraints[row]) if row in self._constraints else None

    def _begin(self, row: int) -> None:
        self.running.add(row)
        self.started.setdefault(row, self.now)
        self._since[row] = self.now
        self._opened[row] = (self.now, 0.0)
        self._rate[row] = 0.0

    def _leave(self, row: int) -> None:
        self._settle(row)
        self._version[row] += 1
        self._close(row, self.occupancy.held[row])
        self.occupancy.release(row)
        self.running.discard(row)
        self._rate[row] = 0.0
        self.finished[row] = self.now

    def _neighbours(self, row: int) -> list[int]:
        if self._width[row] >= 1.0:
            return []
        return [other for other in self.occupancy.residents[self.occupancy.held[row][0]] if other != row]

    def _settle(self, row: int) -> None:
        """Updates the work left to this instant."""
        elapsed = self.now - self._since[row]
        if elapsed > 0.0:
            self._remaining[row] = max(0.0, self._remaining[row] - self._rate[row] * elapsed)
            self._since[row] = self.now

    def _pace(self, row: int) -> None:
        """Sets the rate and the end of a running trial after it or its neighbours moved."""
        self._settle(row)
        devices = self.occupancy.held[row]
        width = self._width[row]
        if width < 1.0:
            width = 1.0 / len(self.occupancy.residents[devices[0]])
        rate = self.occupancy.speed(devices) / self._stretch(row, width)
        self._rate[row] = rate
        self._version[row] += 1
        heapq.heappush(self._ends, (self._since[row] + self._remaining[row] / rate, row, self._version[row]))

    def _stretch(self, row: int, width: float) -> float:
        return stretch_of(self._alpha[row], self._beta[row], width, self._rates[self._kind[row]])

    def _kinds_of(self, rows: list[int]) -> IntArray:
        return np.array([self._kind[row] for row in rows], dtype=np.int64)

    def _is_slower(self, row: int, devices: tuple[int, ...], width: float) -> bool:
        rate = self.occupancy.speed(devices) / self._stretch(row, width)
        return rate < self._rate[row] * (1.0 - TOLERANCE)

    def _close(self, row: int, devices: tuple[int, ...]) -> None:
        start, pause = self._opened[row]
        if self._record and self.now > start:
            self.segments.append(Segment(row, start, self.now, devices, self._width[row], min(pause, self.now - start)))


def start(instance: Instance, arrangement: Arrangement, *, record: bool = False) -> Rollout:
    """Starts every trial of an arrangement that fits on the idle cluster, and queues the others.

    If all of them start and devices stay idle, the re-planner is asked at once, with epsilon 0: nothing has run yet.
    """
    rollout = Rollout(instance.cluster, instance.epsilon, record=record)
    rollout.submit(instance, arrangement)
    rollout.dispatch()
    if arrangement.replan_at_start and not rollout.queued and rollout.occupancy.free_count:
        rollout.apply(arrangement.replanner.replan(rollout.snapshot(epsilon=0.0)))
    return rollout


def roll_out(
    instance: Instance, arrangement: Arrangement, *, give_up_after: float = math.inf, record: bool = False
) -> Rollout:
    """Runs an arrangement to its end by the runtime model, with its re-planner.

    Args:
        instance: the trials and devices; all start at time 0.
        arrangement: widths, order and re-planner.
        give_up_after: makespan, in seconds, beyond which the rollout stops unfinished.
        record: whether to keep segments.

    Returns:
        The rollout at its end; ``now`` is the makespan in seconds, infinite if it gave up.
    """
    rollout = start(instance, arrangement, record=record)
    while rollout.running:
        if rollout.next_end > give_up_after:
            rollout.now = math.inf
            break
        rollout.advance(math.inf)
        if rollout.queued:
            rollout.dispatch()
        if not rollout.queued and rollout.running:
            rollout.apply(arrangement.replanner.replan(rollout.snapshot()))
    return rollout
