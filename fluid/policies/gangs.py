"""Reservations: devices kept for waiting trials of a fixed width, which others would otherwise pass for ever.

A trial that needs n devices at once waits until n are idle together. Trials behind it in the queue may use devices that
are reserved for it only if they are predicted to end before these are expected to be idle, as in EASY backfilling
(Lifka, The ANL/IBM SP scheduling system, 1995). That time is set once, so the trial does not wait for ever. A trial
that can go on only in the lane that keeps its state starts there all the same. Where the trial's group has a deadline
or a weight, the time moves up as more is known: one that was set by a guess would let others pass until it is too late.

A trial that could start on devices of unlike speeds waits for faster ones if it then ends sooner. For that, too,
devices are reserved, once: if they are not idle by the time set, it starts on what there is.

It is there for fairness, and has no figure: without it, trials of several devices wait as long as any of one device
come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fluid.devices.constraints import Constraint
from fluid.devices.idle import waits_for_tier
from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine import tuning
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.policy import Policy
from fluid.engine.records import TrialRecord, Trials
from fluid.policies.owners.shares import GroupShares


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices that wait for a trial.

    Attributes:
        devices: which.
        at: when they are expected to be idle, seconds.
    """

    devices: frozenset[int]
    at: float


class Reservations(Policy):
    """Reserves devices, at most once for trials that ask for the same.

    Args:
        trials: the trials of the session.
        occupancy: which trial holds which device.
        estimates: when trials will end.
        queue: the trials that wait.
        shares: which groups have a deadline or a weight.
    """

    def __init__(
        self, trials: Trials, occupancy: Occupancy, estimates: Estimates, queue: StartQueue, shares: GroupShares
    ) -> None:
        self._queue = queue
        self._shares = shares
        self._trials = trials
        self._occupancy = occupancy
        self._estimates = estimates
        #: By row of the trial that waits.
        self._made: dict[int, Reservation] = {}
        #: By row of a trial that could start, and waits for faster devices; kept while it is queued: it waits once.
        self._faster: dict[int, Reservation] = {}
        #: Those of trials that were passed over in the present round of the queue.
        self._passed: dict[int, Reservation] = {}

    @property
    def keeps_devices(self) -> bool:
        """Whether any devices are reserved for trials that were passed over in this round."""
        return self._trials.constrained and bool(self._passed)

    @property
    def kept_devices(self) -> frozenset[int]:
        """All devices that are reserved for trials that were passed over in this round."""
        return frozenset().union(*(made.devices for made in self._passed.values()))

    @property
    def awaiting_faster(self) -> set[int]:
        """Rows of the trials that were passed over in this round though they could start: they wait for others."""
        return {row for row, made in self._faster.items() if self._passed.get(row) is made}

    def begin_round(self) -> None:
        """Begins a round of the queue; drops the reservations of trials that are not among those waiting."""
        if not self._trials.constrained:
            return
        self._passed = {}
        if self._made or self._faster:
            rows = set(self._queue)
            self._faster = {row: made for row, made in self._faster.items() if row in rows}
            self._made = {row: made for row, made in self._made.items() if row in rows and self._is_whole(made)}

    def passed_over(self, trial: TrialRecord, allowed: Iterable[int]) -> None:
        """Reserves devices for a trial of a fixed width that does not fit now.

        Args:
            trial: the trial.
            allowed: the devices that it may get.
        """
        made = self._made.get(trial.row)
        if made is None or made.devices & self.kept_devices:
            if any(self._trials.by_row[row].constraint == trial.constraint for row in self._passed):
                return
            made = self._find(trial, [index for index in allowed if index not in self.kept_devices])
            if made is None:
                return
        elif self._shares.is_by_itself(trial.owner):
            idle_at = self._occupancy.now + max(self._idle_in(index, trial.row) for index in made.devices)
            made = replace(made, at=min(made.at, idle_at))
        self._passed[trial.row] = self._made[trial.row] = made

    def rather(self, trial: TrialRecord, chosen: Sequence[int], allowed: Iterable[int]) -> frozenset[int] | None:
        """Faster devices that a trial of a fixed width should get instead; ``None`` for none.

        They are reserved, and it :meth:`awaits` them, unless they are idle by now.

        Args:
            trial: the trial.
            chosen: devices on which it could start now, and that it holds.
            allowed: the devices that it may get.
        """
        if not self._occupancy.is_unlike:
            return None
        made = self._faster.get(trial.row)
        if made is None:
            made = self._find_faster(trial, chosen, allowed)
            if made is None:
                return None
            self._faster[trial.row] = made
        others = frozenset().union(*(each.devices for row, each in self._passed.items() if row != trial.row))
        if made.at <= self._occupancy.now or made.devices & others or not self._is_whole(made):
            return None
        if self._estimates.speed(trial, chosen) >= self._estimates.speed(trial, tuple(made.devices)):
            return None
        residents = self._occupancy.residents
        if any(row != trial.row for device in made.devices for row in residents[device]):
            self._passed[trial.row] = made
        return made.devices

    def awaits(self, trial: TrialRecord) -> bool:
        """Whether a trial was passed over in this round though it could start: it waits for faster devices."""
        made = self._faster.get(trial.row)
        return made is not None and self._passed.get(trial.row) is made

    @property
    def awaiting_faster_constraints(self) -> set[Constraint | None]:
        """Constraints of trials that could start, and wait for faster devices, or behind such a trial."""
        by_row = self._trials.by_row
        return {by_row[row].constraint for row in self.awaiting_faster if row in by_row}

    @property
    def wait_until(self) -> float | None:
        """By when one of those trials starts on what there is, seconds; ``None`` if there are none."""
        return min((self._faster[row].at for row in self.awaiting_faster), default=None)

    def _find_faster(self, trial: TrialRecord, chosen: Sequence[int], allowed: Iterable[int]) -> Reservation | None:
        """Devices for which a wait is predicted to pay: those on which the trial ends first."""
        estimates, key, now = self._estimates, trial.spec.profile_key, self._occupancy.now
        speeds = {index: estimates.speed(trial, (index,)) for index in allowed if index not in self.kept_devices}
        slowest = estimates.speed(trial, chosen)
        if not estimates.is_measured(trial) or not any(speed > slowest for speed in speeds.values()):
            return None
        work = estimates.seconds_at_speed_1(trial)
        best: tuple[float, Reservation] | None = None
        for tier in sorted({speed for speed in speeds.values() if speed > slowest}):
            made = self._find(trial, [index for index, speed in speeds.items() if speed >= tier])
            if made is None or not estimates.compares(key, (*chosen, *made.devices)):
                continue
            delay, seconds = made.at - now, work / tier * (1.0 + tuning.SPEED_CHANGE)
            if waits_for_tier(work / slowest, delay, seconds) and (best is None or delay + seconds < best[0]):
                best = delay + seconds, made
        return None if best is None else best[1]

    def forbidden_to(self, trial: TrialRecord) -> set[int]:
        """The reserved devices on which a trial that comes later in this round would end too late.

        A pinned trial can start nowhere else, and the state that it keeps may be what the reservation waits for.
        """
        if trial.pinned:
            return set()
        ends_at = self._occupancy.now + self._estimates.seconds_left(trial)
        is_known = self._estimates.is_measured(trial)
        others = (made for row, made in self._passed.items() if row != trial.row)
        late = (made.devices for made in others if not is_known or ends_at > made.at)
        return set().union(*late)

    def kept_before(self, trial: TrialRecord) -> frozenset[int]:
        """The devices that are reserved for trials that do not start after this one."""
        by_row = self._trials.by_row
        first = (made for row, made in self._passed.items() if row in by_row and by_row[row].priority >= trial.priority)
        return frozenset().union(*(made.devices for made in first)) - self._own(trial)

    def _own(self, trial: TrialRecord) -> frozenset[int]:
        made = self._made.get(trial.row)
        return frozenset() if made is None else made.devices

    def _is_whole(self, made: Reservation) -> bool:
        occupancy = self._occupancy
        return all(index in occupancy.residents and not occupancy.is_closed(index) for index in made.devices)

    def _find(self, trial: TrialRecord, allowed: Iterable[int]) -> Reservation | None:
        """The devices, of one host for a gang, that are expected to be idle together first."""
        width, occupancy = trial.fixed_width or 1, self._occupancy
        on_host: dict[str, list[tuple[float, int]]] = {}
        for index in allowed:
            usable, need = occupancy.memory.usable_bytes(index), self._estimates.need_on(trial, index)
            if occupancy.is_closed(index) or (need is not None and usable is not None and need.peak_bytes > usable):
                continue
            host = occupancy.device(index).host if trial.spec.gang else ""
            on_host.setdefault(host, []).append((self._idle_in(index, trial.row), index))
        choices = [sorted(found)[:width] for _, found in sorted(on_host.items()) if len(found) >= width]
        if not choices:
            return None
        best = min(choices, key=lambda found: found[-1][0])
        return Reservation(frozenset(index for _, index in best), occupancy.now + best[-1][0])

    def _idle_in(self, index: int, row: int) -> float:
        """Predicted seconds until a device is idle, that row apart."""
        rows = [other for other in self._occupancy.residents[index] if other != row]
        holders = [self._trials.by_row.get(other) for other in rows]
        return max((self._estimates.seconds_left(trial) for trial in holders if trial is not None), default=0.0)
