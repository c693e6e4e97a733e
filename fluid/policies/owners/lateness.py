"""The order of groups with a deadline or a weight: least expected cost of ending late (docs/theory.md, section 15).

A *unit* is an owner with open trials. Units are run as fluids, one after the other: each gets the devices that it can
use of those that the units before it leave. That gives each the mean and the spread of its end, and these its expected
cost. A unit with a deadline costs what each of its steps says, if it ends later; one without costs its age.

Where deadlines can be met, the earliest due first meets them. Where they cannot, a unit is given up, of those that are
in the way that whose odds are worth least for its work (Moore, An n job, one machine sequencing algorithm for
minimizing the number of late jobs, 1968). What costs its age goes before deadlines as far as that costs less than it
gains: the exchange argument of the least weighted completion time (Smith, 1956), over the slack of all that it delays.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

#: Odds from which a deadline counts as one that can be met, and below which as one that cannot.
CAN_MEET, _HARDLY = 0.9, 0.01
#: A miss of cost 1 counts as waiting for so many times the seconds of the first step: with 1, a deadline whose odds are
#: middling gives way to a long unit that hardly gains (``benchmarks/group_deadlines.py``, the mix).
_MISS = 4.0
#: A unit that was late for so many times its last step's seconds costs its age from then on.
FORGIVEN = 1.0
#: Units that are looked at closely: those behind them do not start before the order is made anew.
_CLOSELY = 48

_ROOT_2 = math.sqrt(2.0)


class RunningPart(NamedTuple):
    """A trial that runs, which keeps its devices until it ends.

    Attributes:
        seconds: expected until it ends.
        spread: standard deviation of these, seconds.
        devices: that it holds; a part of one, where it shares it.
        row: the caller's number of the trial.
        rest: seconds until it could pause, after its iteration; infinite if it cannot.
    """

    seconds: float
    spread: float
    devices: float
    row: int = -1
    rest: float = math.inf


class Unit(NamedTuple):
    """What an owner's open trials have left to do, and what it costs if they end late.

    Attributes:
        owner: the caller's number of it.
        work: seconds of work of the trials that wait, on one device.
        spread: standard deviation of these, seconds.
        trials: how many of them wait.
        devices: how many devices they can use at once.
        wide: how many devices one of them has to have at once, in the mean; 1 at least.
        longest: expected seconds of the longest of them.
        longest_spread: standard deviation of these, seconds.
        running: its trials that run.
        age: seconds since it was submitted.
        steps: pairs of seconds since then, and what an end after that costs; both ascend. None without a deadline.
        weight: of its cost.
        priority: those with a higher one come first, whatever that costs.
        measured: whether its times are more than a guess.
    """

    owner: int
    work: float
    spread: float = 0.0
    trials: int = 1
    devices: float = 1.0
    wide: float = 1.0
    longest: float = 0.0
    longest_spread: float = 0.0
    running: tuple[RunningPart, ...] = ()
    age: float = 0.0
    steps: tuple[tuple[float, float], ...] = ()
    weight: float = 1.0
    priority: float = 1.0
    measured: bool = True

    @property
    def ahead(self) -> tuple[tuple[float, float], ...]:
        """Its steps that are still ahead: seconds from now, and by how much more an end after that counts."""
        found, before = [], 0.0
        for seconds, cost in self.steps:
            if seconds > self.age:
                found.append((seconds - self.age, (cost - before) * self.weight))
            before = cost
        return tuple(found)

    @property
    def scale(self) -> float:
        """Seconds of the first step; 0 without a deadline."""
        return self.steps[0][0] if self.steps else 0.0

    @property
    def miss_s(self) -> float:
        """Seconds of waiting that a miss of cost 1 counts as."""
        return _MISS * self.scale

    @property
    def costs_its_age(self) -> bool:
        """Whether it has no deadline, or has been late for so long that others are not preferred any more."""
        return not self.steps or self.age >= (1.0 + FORGIVEN) * self.steps[-1][0]

    @property
    def all_work(self) -> float:
        """Seconds of work left on one device, of the trials that run, too."""
        return self.work + sum(part.seconds * part.devices for part in self.running)


class UnitEnd(NamedTuple):
    """When a unit is expected to end.

    Attributes:
        mean: seconds from now.
        spread: standard deviation, seconds.
    """

    mean: float
    spread: float

    def late(self, due: float, delay: float = 0.0) -> float:
        """Probability that it ends after so many seconds, if it comes that much later than expected."""
        over = self.mean + delay - due
        if self.spread <= 0.0 or math.isinf(over):
            return 1.0 if over > 1e-9 * max(1.0, abs(due)) else 0.0
        return 0.5 * math.erfc(-over / (self.spread * _ROOT_2))

    def misses(self, unit: Unit, delay: float = 0.0) -> float:
        """What a unit is expected to miss of its deadline."""
        return sum(cost * self.late(due, delay) for due, cost in unit.ahead)

    def cost(self, unit: Unit, delay: float = 0.0) -> float:
        """Expected cost of a unit's end, seconds."""
        if unit.costs_its_age:
            return unit.weight * (self.mean + delay)
        return unit.miss_s * self.misses(unit, delay)


@dataclass(frozen=True, slots=True)
class GroupLateness:
    """How a group stands with regard to its deadline.

    Attributes:
        odds: probability that it ends by the first step that is still ahead, in the present order; ``None`` while its
            trials are unmeasured.
        earliest_s: expected seconds until it ends if it gets devices before all others; ``None`` while that is unknown.
        can_be_met: whether it then ends by that step with odds of :data:`CAN_MEET`; ``None`` while it is unmeasured.
        missed: whether its last step has passed.
    """

    odds: float | None
    earliest_s: float | None
    can_be_met: bool | None
    missed: bool


# -- ends ----------------------------------------------------------------------------------------
#
# When units end that are run one after the other, as fluids, on devices that running trials leave as they end.


class FreeDevices:
    """Devices that are free over time, ever more of them.

    Args:
        devices: how many there are, weighted by their speeds.
        running: trials that hold some of them until they end.
    """

    def __init__(self, devices: float, running: Iterable[RunningPart] = ()) -> None:
        held = sorted(running)
        free = max(0.0, devices - sum(part.devices for part in held))
        self._at, self._free = [0.0], [free]
        for part in held:
            free = min(devices, free + part.devices)
            if part.seconds > self._at[-1]:
                self._at.append(part.seconds)
                self._free.append(free)
            else:
                self._free[-1] = free

    def copy(self) -> FreeDevices:
        """The same, to be taken from by itself."""
        other = FreeDevices(0.0)
        other._at, other._free = self._at[:], self._free[:]
        return other

    def take(self, devices: float, work: float) -> float:
        """Takes so many devices, or those that there are, until so much work is done; returns by when, seconds."""
        at, free, left = self._at, self._free, work
        last = len(at) - 1
        for place in range(last + 1):
            rate = min(devices, free[place])
            if place == last or rate * (at[place + 1] - at[place]) >= left:
                break
            left -= rate * (at[place + 1] - at[place])
        if rate <= 0.0:
            return math.inf if left > 0.0 else at[place]
        end = at[place] + left / rate
        new_at, new_free = [0.0], [max(0.0, free[0] - devices)]
        for begin, count in zip(at[1 : place + 1], free[1 : place + 1], strict=True):
            if (rest := max(0.0, count - devices)) > new_free[-1]:
                new_at.append(begin)
                new_free.append(rest)
        if free[place] > new_free[-1]:
            if end > new_at[-1]:
                new_at.append(end)
                new_free.append(free[place])
            else:
                new_free[-1] = free[place]
        self._at, self._free = new_at + at[place + 1 :], new_free + free[place + 1 :]
        return end


class Timeline:
    """The units that were run so far, and what they leave.

    Args:
        devices: how many there are, weighted by their speeds.
        running: the trials that run, of all units.
    """

    def __init__(self, devices: float, running: Iterable[RunningPart]) -> None:
        self._devices = max(devices, 1e-9)
        self._free = FreeDevices(devices, running)
        self._variance = 0.0

    def copy(self) -> Timeline:
        """The same, to go on by itself."""
        other = Timeline(self._devices, ())
        other._free, other._variance = self._free.copy(), self._variance
        return other

    def add(self, unit: Unit) -> UnitEnd:
        """Runs a unit after those before it; returns when it ends."""
        latest = max(unit.running, default=RunningPart(0.0, 0.0, 0.0))
        if not unit.trials:
            return UnitEnd(latest.seconds, latest.spread)
        most = max(1e-9, min(unit.devices, self._devices))
        end = self._free.take(most, unit.work)
        at_once = unit.work / most
        # Trials are not fluid: the longest ends no earlier, and alike ones end in rounds.
        at_a_time = most if unit.wide <= 1.0 else max(1.0, math.floor(most / unit.wide + 1e-9))
        rounds = math.ceil(unit.trials / at_a_time - 1e-9) * unit.work / (unit.trials * unit.wide)
        tail = max(0.0, unit.longest - at_once, rounds - at_once)
        own = max(unit.spread / most, unit.longest_spread if unit.longest > at_once else 0.0)
        spread = math.sqrt(self._variance + own * own)
        self._variance += (unit.spread / self._devices) ** 2
        if latest.seconds > end + tail:
            return UnitEnd(latest.seconds, max(latest.spread, spread))
        return UnitEnd(end + tail, spread)


def ends_of(order: Sequence[Unit], devices: float) -> list[UnitEnd]:
    """When units end that come in this order."""
    timeline = Timeline(devices, (part for unit in order for part in unit.running))
    return [timeline.add(unit) for unit in order]


def end_alone(unit: Unit, devices: float) -> UnitEnd:
    """When a unit ends if it gets devices before all others, and they leave those that they hold."""
    return ends_of([unit], devices)[0]


def expected_cost(order: Sequence[Unit], ends: Sequence[UnitEnd]) -> float:
    """What it costs that units end when they do; the ages that they have by now are left out.

    Of units with deadlines only, it is what they miss: one second of one deadline is not worth more than of another.
    """
    if any(unit.costs_its_age for unit in order):
        return sum(end.cost(unit) for unit, end in zip(order, ends, strict=True))
    return sum(end.misses(unit) for unit, end in zip(order, ends, strict=True))


# -- pauses --------------------------------------------------------------------------------------


class Pause(NamedTuple):
    """A running trial that may pause for trials of another unit.

    Attributes:
        owner: of the trial.
        part: the trial.
        stall: seconds that pausing it and resuming it elsewhere takes.
    """

    owner: int
    part: RunningPart
    stall: float


def gain_of_pauses(order: Sequence[Unit], devices: float, pauses: Sequence[Pause]) -> float:
    """By how many seconds the expected cost of all falls if running trials pause after their iterations.

    Args:
        order: the units, in order.
        devices: how many there are, weighted by their speeds.
        pauses: the trials, which wait from then on.
    """
    after, running = _with_pauses(order, pauses)
    timeline = Timeline(devices, running)
    then = sum(timeline.add(unit).cost(unit) for unit in after)
    return sum(end.cost(unit) for unit, end in zip(order, ends_of(order, devices), strict=True)) - then


def _with_pauses(units: Sequence[Unit], pauses: Sequence[Pause]) -> tuple[list[Unit], list[RunningPart]]:
    """The units if these trials wait after their iterations, and all that holds devices until then or until its end."""
    of_owner: dict[int, list[Pause]] = {}
    for each in pauses:
        of_owner.setdefault(each.owner, []).append(each)
    after = [_with_own(unit, of_owner[unit.owner]) if unit.owner in of_owner else unit for unit in units]
    running = [part for unit in after for part in unit.running]
    return after, running + [RunningPart(each.part.rest, 0.0, each.part.devices) for each in pauses]


def _with_own(unit: Unit, pauses: Sequence[Pause]) -> Unit:
    left = [max(0.0, each.part.seconds - each.part.rest) + each.stall for each in pauses]
    spreads = [each.part.spread for each in pauses]
    paused = {each.part.row for each in pauses}
    return unit._replace(
        work=unit.work + sum(seconds * each.part.devices for seconds, each in zip(left, pauses, strict=True)),
        spread=math.hypot(unit.spread, *spreads),
        trials=unit.trials + len(pauses),
        devices=unit.devices + sum(each.part.devices for each in pauses),
        longest=max(unit.longest, *left),
        longest_spread=max(unit.longest_spread, *spreads),
        running=tuple(part for part in unit.running if part.row not in paused),
    )


# -- the order -----------------------------------------------------------------------------------


def order_units(units: Iterable[Unit], devices: float) -> list[Unit]:
    """Orders units by the least expected cost that is found.

    Deterministic; takes a few milliseconds for 30 units, and hardly more for those beyond :data:`_CLOSELY`.

    Args:
        units: those with open trials, in any order.
        devices: how many there are, weighted by their speeds; 0 while there are none.
    """
    devices = devices or 1.0  # Where all are gone, the order is that of the first that comes.
    known = {unit.owner: unit for unit in sorted(units)}
    # Ranks say for whom trials would pause: those that can are no reason to give a unit up.
    pauses = [
        Pause(unit.owner, part, 0.0) for unit in known.values() for part in unit.running if part.rest < part.seconds
    ]
    paused, running = _with_pauses(list(known.values()), pauses)
    timeline = Timeline(devices, running)
    order: list[Unit] = []
    for _, alike in groupby(sorted(paused, key=_priority), key=_priority):
        level = _order_level(list(alike), timeline, devices)
        for unit in level:
            timeline.add(unit)
        order += level
    return [known[unit.owner] for unit in order]


def _priority(unit: Unit) -> float:
    return -unit.priority


def _order_level(units: list[Unit], timeline: Timeline, devices: float) -> list[Unit]:
    """Orders units of one priority, which come after those of a timeline."""
    met, given_up = _give_up([unit for unit in units if unit.ahead], timeline.copy())
    met, hopeless = _take_back(met, given_up, timeline)
    aging = sorted((unit for unit in units if unit.costs_its_age and not unit.ahead), key=_per_weight)
    late = [*hopeless, *(unit for unit in units if not unit.ahead and not unit.costs_its_age)]
    return _exchange(_merge(met, aging, timeline, devices), timeline) + sorted(late, key=_least_work)


def _least_work(unit: Unit) -> tuple[float, int]:
    return unit.all_work, unit.owner


def _per_weight(unit: Unit) -> tuple[float, float, int]:
    return (unit.all_work / unit.weight if unit.weight > 0.0 else math.inf), -unit.age, unit.owner


def _give_up(units: Sequence[Unit], timeline: Timeline) -> tuple[list[Unit], list[Unit]]:
    """Parts units with deadlines into those that are to be met, the earliest due first, and those that are not."""
    worth = {unit.owner: _worth(unit, timeline.copy().add(unit)) for unit in units}
    pending = [(unit.ahead[0][0], unit.all_work, unit.owner, 0, unit) for unit in units]
    heapq.heapify(pending)
    kept: list[tuple[Unit, int]] = []
    before: list[Timeline] = []
    ends: list[UnitEnd] = []
    given_up: list[Unit] = []
    while pending and len(kept) < _CLOSELY:
        *_, step, unit = heapq.heappop(pending)
        kept.append((unit, step))
        before.append(timeline.copy())
        ends.append(timeline.add(unit))
        while kept and ends[-1].late(kept[-1][0].ahead[kept[-1][1]][0]) > 0.5:
            worst = min(range(len(kept)), key=lambda at: (worth[kept[at][0].owner], kept[at][0].owner))
            out, step = kept.pop(worst)
            if step + 1 < len(out.ahead):
                heapq.heappush(pending, (out.ahead[step + 1][0], out.all_work, out.owner, step + 1, out))
            else:
                given_up.append(out)
            timeline = before[worst]
            del before[worst:], ends[worst:]
            for later, _ in kept[worst:]:
                before.append(timeline.copy())
                ends.append(timeline.add(later))
            if worst == len(kept):
                break
    return [unit for unit, _ in kept] + [item[-1] for item in sorted(pending)], given_up


def _worth(unit: Unit, end: UnitEnd) -> float:
    """Expected cost that is spared if a unit ends when it does, per second of its work."""
    spared = sum(cost * (1.0 - end.late(due)) for due, cost in unit.ahead)
    return spared / max(unit.all_work, 1e-9)


def _take_back(met: list[Unit], given_up: list[Unit], timeline: Timeline) -> tuple[list[Unit], list[Unit]]:
    """Takes back what may be met after all, where it is due if that costs the others less; else behind them."""
    hopeless: list[Unit] = []
    behind = timeline.copy()
    for unit in met[:_CLOSELY]:
        behind.add(unit)
    worths = [(_worth(unit, behind.copy().add(unit)), unit) for unit in given_up]
    for worth, unit in sorted(worths, key=lambda each: (-each[0], each[1].owner)):
        last = [*met, unit]
        at = next((at for at, other in enumerate(met) if other.ahead[0][0] > unit.ahead[0][0]), len(met))
        if len(met) < _CLOSELY and at < len(met):
            there = [*met[:at], unit, *met[at:]]
            if _cost_of(there, timeline) < _cost_of(last, timeline):
                met = there
                continue
        if worth > _HARDLY / max(unit.all_work, 1e-9) * unit.ahead[-1][1]:
            met = last
        else:
            hopeless.append(unit)
    return met, hopeless


def _cost_of(order: Sequence[Unit], timeline: Timeline) -> float:
    timeline = timeline.copy()
    return expected_cost(order, [timeline.add(unit) for unit in order])


def _merge(met: list[Unit], aging: list[Unit], timeline: Timeline, devices: float) -> list[Unit]:
    """Puts units that cost their age between those with deadlines, as early as that costs less than it gains."""
    if not aging or not met:
        return [*met, *aging]
    timeline = timeline.copy()
    ends = [timeline.add(unit) for unit in met]
    order: list[Unit] = []
    first, delay = 0, 0.0
    for unit in aging:
        more, net, best, place = unit.work / devices, 0.0, 0.0, first
        for at in range(first, min(len(met), first + _CLOSELY)):
            other = met[at]
            costs = ends[at].cost(other, delay + more) - ends[at].cost(other, delay)
            net += costs - unit.weight * other.work / devices
            if net > best:
                best, place = net, at + 1
        order += met[first:place]
        order.append(unit)
        first, delay = place, delay + more
    return order + met[first:]


def _exchange(order: list[Unit], timeline: Timeline) -> list[Unit]:
    """Exchanges neighbours in order where that lowers what both are expected to cost."""
    order, timeline = order[:], timeline.copy()
    for at in range(min(_CLOSELY, len(order)) - 1):
        pair = order[at : at + 2]
        if _cost_of(pair[::-1], timeline) < (1.0 - 1e-9) * _cost_of(pair, timeline):
            order[at : at + 2] = pair[::-1]
        timeline.add(order[at])
    return order
