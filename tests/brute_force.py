"""Makespans worked out the slow and plain way, to check the planners against.

Nothing here comes from ``fluid``: the runtime model, the placement rule and the events are written out again, with
lists and loops only, so that an error would have to be made twice to go unseen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Completions closer together than this share of the time are one instant.
SAME_INSTANT = 1e-12


@dataclass(frozen=True)
class Job:
    """A trial of a fixed width."""

    height: float
    width: float = 1.0
    alpha: float = 1.0
    beta: float = 1.0
    priority: float = 1.0

    @property
    def tolerates(self) -> int:
        """Most trials on its device, itself included."""
        return max(1, round(1.0 / self.width))


def rate(alpha: float, beta: float, width: int, residents: int) -> float:
    """Work done per second on devices of speed 1: ``w / beta^(w-1)``, or ``alpha^-(p-1)`` in company."""
    if width > 1:
        return width / beta ** (width - 1)
    return 1.0 / alpha ** (residents - 1)


def simulate(jobs: Sequence[Job], speeds: Sequence[float]) -> list[float]:
    """When each job ends, if all are submitted at time 0, in this order, to devices of these speeds.

    Jobs start by descending priority, then descending width, then as listed; one that does not fit lets the next
    one pass. A packed job goes to the device with the fewest residents, then the fastest, then the first. A wide
    one takes the fastest devices of one speed if there are enough idle, else the fastest ones.
    """
    devices: list[list[int]] = [[] for _ in speeds]
    left = [job.height for job in jobs]
    held: dict[int, list[int]] = {}
    ends = [math.inf] * len(jobs)
    waiting = sorted(range(len(jobs)), key=lambda j: (-jobs[j].priority, -jobs[j].width, j))
    now = 0.0
    while waiting or held:
        for j in list(waiting):
            chosen = _choose(jobs, j, devices, speeds)
            if chosen:
                waiting.remove(j)
                held[j] = chosen
                for device in chosen:
                    devices[device].append(j)
        pace = {
            j: min(speeds[device] for device in on)
            * rate(jobs[j].alpha, jobs[j].beta, len(on), len(devices[on[0]]) if jobs[j].width < 1.0 else 1)
            for j, on in held.items()
        }
        step = min(left[j] / pace[j] for j in held)
        slack = SAME_INSTANT * max(1.0, now + step)
        over = [j for j in held if left[j] / pace[j] <= step + slack]
        now += step
        for j in held:
            left[j] -= step * pace[j]
        for j in over:
            ends[j] = now
            for device in held.pop(j):
                devices[device].remove(j)
    return ends


def _choose(jobs: Sequence[Job], j: int, devices: Sequence[list[int]], speeds: Sequence[float]) -> list[int]:
    """The devices job ``j`` would get now; none if it does not fit."""
    idle = [device for device, there in enumerate(devices) if not there]
    if jobs[j].width < 1.0:
        room = [
            device
            for device, there in enumerate(devices)
            if len(there) < min(jobs[other].tolerates for other in [*there, j])
        ]
        return sorted(room, key=lambda device: (len(devices[device]), -speeds[device], device))[:1]
    count = round(jobs[j].width)
    for speed in sorted({speeds[device] for device in idle}, reverse=True):
        alike = [device for device in idle if speeds[device] == speed]
        if len(alike) >= count:
            return alike[:count]
    return sorted(idle, key=lambda device: (-speeds[device], device))[:count] if len(idle) >= count else []


@dataclass(frozen=True)
class Tiny:
    """A tiny instance on ``n`` alike devices; one alpha, beta, c and d for all its trials."""

    heights: tuple[float, ...]
    n: int
    alpha: float = 1.0
    beta: float = 1.0
    c: int = 4
    d: int = 8


def optimum(tiny: Tiny) -> float:
    """The shortest makespan of all schedules in which each trial keeps one width and is never moved.

    Every way to start trials at time 0 and whenever one ends is tried, waiting on purpose included: beside others
    on any device with at most ``c`` trials, or alone on up to ``d`` idle devices. A trial of width 1 is a packed
    one without co-residents, so widths need no enumeration of their own.
    """
    search = _Search(tiny)
    search.visit(0.0, list(tiny.heights), [[] for _ in range(tiny.n)], {}, tuple(range(len(tiny.heights))))
    return search.best


class _Search:
    """Branch and bound over :func:`optimum`'s schedules."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.best = math.inf
        widest = min(tiny.d, tiny.n)
        rates = [rate(tiny.alpha, tiny.beta, w, 1) for w in range(1, widest + 1)]
        packed = [p * rate(tiny.alpha, tiny.beta, 1, p) for p in range(1, tiny.c + 1)]
        #: Work per second of the fastest width, and of a device used as well as can be.
        self.fastest, self.densest = max(rates), max(packed)

    def visit(
        self,
        now: float,
        left: list[float],
        devices: list[list[int]],
        wide: dict[int, list[int]],
        waiting: tuple[int, ...],
    ) -> None:
        """Tries every way on from here: ``wide`` holds the devices of trials alone on two or more."""
        bound = now + max(max(left) / self.fastest, sum(left) / self.tiny.n / self.densest)
        if bound >= self.best * (1.0 - SAME_INSTANT):
            return
        for started, placed, spread in self._starts(devices, wide, waiting):
            if any(placed):
                still = tuple(j for j in waiting if j not in started)
                self._advance(now, list(left), placed, spread, still)

    def _starts(
        self, devices: list[list[int]], wide: dict[int, list[int]], waiting: tuple[int, ...]
    ) -> Iterator[tuple[set[int], list[list[int]], dict[int, list[int]]]]:
        """Every way to start some of the waiting trials; of devices in the same state only the first counts."""
        if not waiting:
            yield set(), [list(there) for there in devices], dict(wide)
            return
        j, rest = waiting[0], waiting[1:]
        idle = [device for device, there in enumerate(devices) if not there]
        spread = {device for on in wide.values() for device in on}
        slots = [[device] for device, there in enumerate(devices) if there and device not in spread]
        slots = [slot for slot in slots if len(devices[slot[0]]) < self.tiny.c]
        slots += [idle[:count] for count in range(1, min(self.tiny.d, len(idle)) + 1)]
        for slot in slots:
            placed = [[*there, j] if device in slot else there for device, there in enumerate(devices)]
            now_wide = {**wide, j: slot} if len(slot) > 1 else wide
            for started, after, widths in self._starts(placed, now_wide, rest):
                yield started | {j}, after, widths
        yield from self._starts(devices, wide, rest)

    def _advance(
        self,
        now: float,
        left: list[float],
        devices: list[list[int]],
        wide: dict[int, list[int]],
        waiting: tuple[int, ...],
    ) -> None:
        tiny = self.tiny
        pace = {
            j: rate(tiny.alpha, tiny.beta, len(wide.get(j, [0])), 1 if j in wide else len(there))
            for there in devices
            for j in there
        }
        step = min(left[j] / pace[j] for j in pace)
        over = {j for j in pace if left[j] / pace[j] <= step + SAME_INSTANT * max(1.0, now + step)}
        for j in pace:
            left[j] = 0.0 if j in over else left[j] - step * pace[j]
        devices = [[j for j in there if j not in over] for there in devices]
        wide = {j: on for j, on in wide.items() if j not in over}
        if not waiting and not any(devices):
            self.best = min(self.best, now + step)
            return
        self.visit(now + step, left, devices, wide, waiting)


@dataclass(frozen=True)
class Member:
    """A running trial; ``remaining`` in seconds at width 1 and speed 1."""

    remaining: float
    alpha: float = 1.0
    beta: float = 1.0
    c: int = 4
    d: int = 8


@dataclass(frozen=True)
class Group:
    """Running trials that share one device at a planned width of 1/p, or one trial of a whole width."""

    members: tuple[Member, ...]
    width: float = 1.0
    speed: float = 1.0

    @property
    def devices(self) -> int:
        """Devices the group holds."""
        return max(1, round(self.width))


def single(remaining: float, width: float = 1.0, *, speed: float = 1.0, **member: float) -> Group:
    """A trial alone on its devices."""
    return Group((Member(remaining, **member),), width, speed)  # type: ignore[arg-type]


def packed(*remaining: float, c: int = 4, speed: float = 1.0, **member: float) -> Group:
    """Trials that share a device at width 1/c."""
    return Group(tuple(Member(left, c=c, **member) for left in remaining), 1.0 / c, speed)  # type: ignore[arg-type]


#: What a re-planner can tell each member of a group: a new width, or ``None`` to leave it alone.
Orders = Sequence["int | None"]


def outcome(group: Group, orders: Orders, epsilon: float) -> tuple[float, int]:
    """When the last of the group ends, and how many further devices the orders take; negative if they free some.

    No trial is moved again later. The last one on a shared device keeps it; the others leave it for new devices.
    """
    moved = [(member, width) for member, width in zip(group.members, orders, strict=True) if width is not None]
    stay = [member for member, width in zip(group.members, orders, strict=True) if width is None]
    ends = [
        epsilon + member.remaining / group.speed / rate(member.alpha, member.beta, width, 1) for member, width in moved
    ]
    taken = sum(width for _, width in moved)
    if stay and group.width >= 1.0:
        return stay[0].remaining / group.speed / rate(stay[0].alpha, stay[0].beta, round(group.width), 1), 0
    if stay:
        beside = [Job(member.remaining, 1.0 / len(stay), member.alpha) for member in stay]
        return max([*ends, *simulate(beside, [group.speed])]), taken
    return max(ends), taken - group.devices


def best_orders(group: Group, budget: int, epsilon: float, *, longest_first: bool = False) -> list[float]:
    """``[x]``: the earliest the group's last trial can end with ``x`` further devices, for x up to the budget.

    No trial is narrowed. With ``longest_first``, of those who share a device only the longest may leave it.
    """
    has = round(group.width) if group.width >= 1.0 else 0
    best = [math.inf] * (budget + 1)
    for orders in itertools.product(*([None, *range(has + 1, member.d + 1)] for member in group.members)):
        by_length = sorted(range(len(orders)), key=lambda j: group.members[j].remaining)
        leaves = [orders[j] is not None for j in by_length]
        if longest_first and leaves != sorted(leaves):
            continue
        end, taken = outcome(group, orders, epsilon)
        for x in range(max(taken, 0), budget + 1):
            best[x] = min(best[x], end)
    return best


def least_latest_finish(finish: Sequence[Sequence[float]], budget: int) -> float:
    """The least ``max_i finish[i][x_i]`` over all whole ``x_i >= 0`` that sum to at most ``budget``.

    ``finish[i][x]`` is when trial i ends with x further devices; there need not be an entry for every x.
    """
    best = math.inf
    for further in itertools.product(*(range(min(len(row), budget + 1)) for row in finish)):
        if sum(further) <= budget:
            best = min(best, max(row[x] for row, x in zip(finish, further, strict=True)))
    return best
