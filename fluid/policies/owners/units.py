"""The units that are ordered by what it costs if they end late: the owners' open trials, as the estimates know them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median_low
from typing import NamedTuple

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.events import PLAIN_TERMS, GroupTerms
from fluid.engine.records import TrialRecord, Trials
from fluid.engine.view import devices_taken
from fluid.policies.owners.lateness import RunningPart, Unit
from fluid.trialgroup import TrialState

#: Standard deviation of the logarithm of true over guessed seconds, of trials of which nothing like them was measured.
_UNKNOWN = 1.0
#: Times its expected time that a group's deadline allows for, as long as none of its trials has shown a pace, and the
#: standard deviation of its time over that expected.
_ALLOWED, _UNSURE = 2.0, 0.5


class OwnedWork(NamedTuple):
    """What an owner has to do.

    Attributes:
        owner: its number.
        work: seconds of work left on one device, that of trials yet to come included.
        devices: those that its trials may use, weighted by their speeds.
        since: when its group was submitted, or since when it has had open trials, seconds.
        priority: the highest of its groups.
        terms: those of its group, if it has a deadline or a weight.
    """

    owner: int
    work: float
    devices: float
    since: float
    priority: float
    terms: GroupTerms = PLAIN_TERMS


class Paces(NamedTuple):
    """Seconds per iteration of trials of a key that have shown none of their own.

    Attributes:
        mean: expected.
        spread: standard deviation between trials.
        shared: standard deviation of what is true of all of them.
    """

    mean: float
    spread: float
    shared: float


@dataclass(slots=True)
class _Left:
    """What an owner's open trials have left, as it is added up."""

    running: list[RunningPart] = field(default_factory=list)
    running_work: float = 0.0
    trials: int = 0
    devices: float = 0.0
    wide: float = 0.0
    planned: float = 0.0
    work: float = 0.0
    variance: float = 0.0
    shared: float = 0.0
    longest: float = 0.0
    longest_spread: float = 0.0
    measured: bool = False


class OpenUnits:
    """Makes units of what runs and waits.

    Args:
        trials: the trials of the session.
        queue: those that wait.
        occupancy: the devices, and which trial holds which.
        estimates: how long trials take.
    """

    def __init__(self, trials: Trials, queue: StartQueue, occupancy: Occupancy, estimates: Estimates) -> None:
        self._trials = trials
        self._queue = queue
        self._occupancy = occupancy
        self._estimates = estimates
        #: Seconds per iteration of a key's trials, and what is assumed of an unmeasured one, while units are made.
        self._paces_of: dict[str, list[float]] = {}
        self._usual = 0.0

    def make(self, owned: Iterable[OwnedWork], arriving: Sequence[TrialRecord] = ()) -> list[Unit]:
        """The units of owners with open trials.

        Args:
            owned: what each of them has to do.
            arriving: trials that are about to be queued.
        """
        self._paces_of.clear()
        works = list(owned)
        left = {each.owner: _Left() for each in works}
        waiting = self._waiting(left, arriving)
        running = [trial for row in sorted(self._occupancy.held) if (trial := self._trials.by_row.get(row)) is not None]
        shown = (trial.pace.expected for trial in (*running, *(trial for trial, _ in waiting)))
        self._usual = median_low(found) if (found := [pace for pace in shown if pace is not None]) else 0.0
        for trial in running:
            if trial.owner in left:
                self._run(left[trial.owner], trial)
        for trial, count in waiting:
            self._wait(left[trial.owner], trial, count)
        return [self._unit(each, left[each.owner]) for each in works]

    def _waiting(self, left: dict[int, _Left], arriving: Sequence[TrialRecord]) -> list[tuple[TrialRecord, int]]:
        """The trials of these owners that wait: one of those that are alike, and how many."""
        by_row = self._trials.by_row
        waiting = [(by_row[row], count) for row, count in sorted(self._queue.lines())]
        alike: dict[tuple[int, int, str], list[TrialRecord]] = {}
        for trial in arriving:
            alike.setdefault((trial.job, trial.progress.left, trial.spec.profile_key), []).append(trial)
        waiting += [(some[0], len(some)) for some in alike.values()]
        return [(trial, count) for trial, count in waiting if trial.owner in left]

    def _run(self, left: _Left, trial: TrialRecord) -> None:
        estimates, held = self._estimates, self._occupancy.held[trial.row]
        stretch, under_way = estimates.stretch(trial), self._under_way(trial)
        paces = self._paces(trial, under_way / stretch)
        seconds = trial.progress.left * paces.mean * stretch
        if trial.takes_turns:  # Others of its lane end, too, and then it has their turns.
            there = map(self._trials.by_row.get, self._occupancy.residents[held[0]])
            beside = [estimates.height(each) for each in there if each is not None]
            seconds = min(seconds, sum(beside) * stretch / len(beside))
        sigma = math.hypot(paces.spread, paces.shared) / max(paces.mean, 1e-12)
        spread, under_way = sigma * seconds, min(under_way, paces.mean * stretch)
        share = sum(1.0 / max(1, len(self._occupancy.residents[device])) for device in held)
        left.measured |= estimates.is_measured(trial)
        rest = max(0.0, seconds / max(1, trial.progress.left) - under_way) if may_pause(trial) else math.inf
        left.running.append(RunningPart(max(0.0, seconds - under_way), spread, share, trial.row, rest))
        left.running_work += estimates.height(trial) * (len(held) if trial.spec.gang else 1)

    def _wait(self, left: _Left, trial: TrialRecord, count: int) -> None:
        estimates, paces = self._estimates, self._paces(trial)
        iterations, wide = trial.progress.left, trial.fixed_width or 1
        beside = -(-count // max(1, len(self._occupancy)))
        taken = devices_taken(trial, estimates.of_key(trial), beside)
        widest = wide if trial.spec.gang else max(1, estimates.widest(trial))
        spread = iterations * paces.spread
        longest = iterations * paces.mean + spread * _largest_of(count)
        left.measured |= estimates.is_measured(trial)
        left.trials += count
        left.devices += count * (widest if widest > 1 else min(1.0, max(taken, 1e-3)))
        left.wide += count * wide
        left.planned += count * estimates.height(trial) * (wide if trial.spec.gang else 1)
        left.work += count * iterations * paces.mean * taken
        left.variance += count * (spread * taken) ** 2
        left.shared += count * iterations * paces.shared * taken
        faster = 1.0 if trial.spec.gang else estimates.of_key(trial).stretch(float(widest))
        if longest * faster > left.longest:
            left.longest = longest * faster
            left.longest_spread = math.hypot(spread, iterations * paces.shared) * faster

    def _unit(self, owned: OwnedWork, left: _Left) -> Unit:
        # Lines hold trials that are alike to placement, and some are yet to come: their work is known in all.
        waiting = max(0.0, owned.work - left.running_work)
        scale = waiting / left.planned if left.planned > 0.0 else 0.0
        if not left.measured:
            # The owner's work was a guess when its trials came: what is known of other groups by now is a better one.
            scale = max(1.0, scale)
        deadline = owned.terms.deadline
        unit = Unit(
            owner=owned.owner,
            work=left.work * scale,
            spread=math.sqrt(left.variance * scale + (left.shared * scale) ** 2),
            trials=left.trials,
            devices=min(left.devices, owned.devices),
            wide=left.wide / left.trials if left.trials else 1.0,
            longest=left.longest,
            longest_spread=left.longest_spread,
            running=tuple(left.running),
            age=self._occupancy.now - owned.since,
            steps=() if deadline is None else deadline.steps,
            weight=owned.terms.weight,
            priority=owned.priority,
            measured=left.measured,
        )
        return unit if left.measured else _as_due(unit)

    def _known(self, key: str) -> list[float]:
        """Seconds per iteration of the newest trials of a key."""
        known = self._paces_of.get(key)
        if known is None:
            known = self._paces_of[key] = [math.exp(log) for log in self._estimates.log_paces(key)]
        return known

    def _under_way(self, trial: TrialRecord) -> float:
        """Seconds for which a running trial's iteration has been under way; 0 if none is, or it may await its turn."""
        place = trial.placement
        if trial.state is not TrialState.RUNNING or not place.iterates or trial.takes_turns:
            return 0.0
        return max(0.0, self._occupancy.now - place.since)

    def _paces(self, trial: TrialRecord, at_least: float = 0.0) -> Paces:
        """Seconds per iteration that are expected of a trial, at width 1 and speed 1.

        Args:
            trial: the trial.
            at_least: what its first iteration takes at least.
        """
        estimates = self._estimates
        pace = estimates.pace(trial)
        if trial.pace.expected is not None:
            return Paces(pace, estimates.sigma(trial) * pace, 0.0)
        known = self._known(trial.spec.profile_key)
        if len(known) >= 2:
            # One that has run on is one of the longer ones, or longer than all.
            known = [each for each in known if each > at_least] or [2.0 * at_least]
            count = len(known)
            mean = sum(known) / count
            variance = sum((each - mean) ** 2 for each in known) / max(1, count - 1)
            return Paces(mean, math.sqrt(variance), math.sqrt(variance / count))
        pace = pace if pace > at_least else 2.0 * at_least
        if estimates.is_measured(trial):
            return Paces(pace, estimates.sigma(trial) * pace, 0.0)
        pace = max(pace, self._usual)  # It is unknown, not short.
        return Paces(pace, 0.0, _UNKNOWN * pace)


def may_pause(trial: TrialRecord) -> bool:
    """Whether a trial that runs, or starts, can pause after its iteration, and go on anywhere later."""
    if trial.state not in (TrialState.STARTING, TrialState.RUNNING) or trial.calls or trial.progress.left <= 1:
        return False
    return trial.spec.can_save and not trial.spec.gang and trial.sharing_group is None


def _as_due(unit: Unit) -> Unit:
    """An unmeasured unit by what its deadline says of it: users allow for a few times what they expect a group to take.

    A guess from other groups' paces may be off by any factor.
    """
    alone = sum(part.seconds * part.devices for part in unit.running) + unit.work
    if unit.scale <= 0.0 or alone <= 0.0:
        return unit
    factor = unit.scale / _ALLOWED * max(1.0, unit.devices, sum(part.devices for part in unit.running)) / alone
    return unit._replace(
        work=unit.work * factor,
        spread=_UNSURE * unit.work * factor,
        longest=unit.longest * factor,
        longest_spread=_UNSURE * unit.longest * factor,
        running=tuple(
            part._replace(
                seconds=part.seconds * factor, spread=_UNSURE * part.seconds * factor, rest=part.rest * factor
            )
            for part in unit.running
        ),
    )


def _largest_of(count: int) -> float:
    """Expected largest of so many values of a standard normal distribution (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
