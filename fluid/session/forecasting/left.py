"""What a forecast needs of an engine: the trials that have not ended, as arrays, and how they share the devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_low

from fluid.engine.records import EndedTrial, TrialRecord
from fluid.forecasting.group import EarlyEnds, GroupForecast, PlanError, TrialLeft, TrialsLeft, forecast_group
from fluid.policies.engine import EngineState
from fluid.session.status import GroupFacts
from fluid.trialgroup import TrialState

#: By how much the ends of groups differ from what their runtimes would give: iterations, resizes, and a share of it if
#: trials are widened (benchmarks/calibration.py).
_STEPS_OFF, _RESIZES_OFF, _SHARE_OFF = 0.8, 1.5, 0.04
#: Trials that hold devices.
_ON_DEVICES = frozenset([TrialState.STARTING, TrialState.RUNNING, TrialState.RESIZING, TrialState.STOPPING])


@dataclass(frozen=True, slots=True)
class SessionLeft:
    """The trials of a session that have not ended.

    Attributes:
        trial_ids: theirs; empty for those that a search is still to submit.
        left: of them, in the same order.
        servers: trials that can run at once.
        early: how trials of the group in question end early.
        pace: how their seconds change as they become fewer.
        preempts: whether those that run are interrupted for others.
        planned: how far the end may be off though all runtimes are known.
    """

    trial_ids: tuple[str, ...]
    left: TrialsLeft
    servers: int
    early: EarlyEnds
    pace: PaceByNumber
    preempts: bool
    planned: PlanError

    def forecast(self) -> GroupForecast:
        """When the last trial of the group in question ends, and which one that is."""
        pace = self.pace if self.pace.changes else None
        return forecast_group(self.left, self.servers, self.early, pace, preempts=self.preempts, planned=self.planned)


@dataclass(frozen=True, slots=True)
class PaceByNumber:
    """Real seconds per predicted second of a trial, by the number of trials that share the devices.

    Attributes:
        state: the engine.
        trial: one of the trials, of the usual key.
        widest: most devices for one.
        before: devices per trial for which the seconds were predicted.
        devices: that there will be.
    """

    state: EngineState
    trial: TrialRecord
    widest: float
    before: float
    devices: int

    def __call__(self, trials: float) -> float:
        """The ratio with so many trials."""
        return self._stretch(self.devices / trials) / self._stretch(self.before)

    @property
    def changes(self) -> bool:
        """Whether it is ever other than 1."""
        return self._stretch(float(self.devices)) != self._stretch(self.before) or self(1e9) != 1.0

    def _stretch(self, width: float) -> float:
        estimate = self.state.estimates.of_key(self.trial)
        least = 1.0 / max(1, self.state.estimates.packing(self.trial))
        return estimate.stretch(min(max(width, least), self.widest))


def trials_left(
    state: EngineState, group_id: str, now: float, *, devices: int | None = None, coming: int = 0
) -> SessionLeft | None:
    """Reads off the engine what is left of a session, of which the end of one group is to be forecast.

    Trials of other groups take devices. Trials that the user paused are left out.

    Args:
        state: the engine.
        group_id: the group.
        now: the time, seconds.
        devices: how many there will be; ``None`` for those that the session has.
        coming: trials that the group's search will still submit.

    Returns:
        What is left; ``None`` where the group has nothing left, or too little was measured.
    """
    held = len(state.occupancy)
    n = held if devices is None else devices
    trials = list(_in_order(state))
    own = [trial for trial in trials if trial.group_id == group_id]
    if not own or not n or not any(state.estimates.is_measured(trial) for trial in own):
        return None
    packing = max(1, max(round(1.0 / min(1.0, trial.width)) for trial in trials))
    columns = [_row_of(state, trial, now, packing, group_id) for trial in trials]
    ids = [trial.trial_id for trial in trials]
    if coming:
        columns += [_typical(state, own)] * coming
        ids += [""] * coming
    servers = n * packing
    columns, order = _cut(columns, servers)
    usual = own[0]
    present = min(len(trials), held * packing)
    pace = PaceByNumber(
        state, usual, float(state.estimates.widest(usual)), (held or n) / max(1, present) if held else 1.0, n
    )
    early = early_ends(state, group_id)
    alone = packing == 1 and pace.widest == 1.0 and n > 1
    preempts = state.planner.preempts and alone and all(trial.spec.can_save for trial in trials)
    left = TrialsLeft.of(columns)
    planned = _plan_error(state, own, elastic=pace.widest > 1.0)
    return SessionLeft(tuple(ids[each] for each in order), left, servers, early, pace, preempts, planned)


def _plan_error(state: EngineState, own: list[TrialRecord], *, elastic: bool) -> PlanError:
    """How far a plan is off: trials change places and widths between two iterations only, and widening has a cost."""
    step = median_low(state.estimates.pace(trial) for trial in own)
    if not elastic:
        return PlanError(_STEPS_OFF * step)
    return PlanError(_STEPS_OFF * step + _RESIZES_OFF * state.estimates.epsilon, _SHARE_OFF)


def early_ends(state: EngineState, group_id: str) -> EarlyEnds:
    """How the trials of a group end early, as far as it was seen."""
    group = state.groups[group_id]
    ended, others, budgets = Counter[float](), Counter[float](), Counter[int]()
    live = Counter(map(EndedTrial.of, group.live.values()))
    for trial, number in (*group.ended.items(), *live.items()):
        budget = max(trial.budget, trial.submitted, 1)
        share = min(1.0, trial.done / budget)
        budgets[budget] += number
        (ended if trial.state.ended and share < 1.0 else others)[share] += number
    usual = median_low(budgets.elements()) if budgets else max(group.past_lengths, default=1)
    for length, number in group.past_lengths.items():
        (ended if length < usual else others)[min(1.0, length / usual)] += number
    return EarlyEnds(ended, others)


def _row_of(state: EngineState, trial: TrialRecord, now: float, packing: int, group_id: str) -> TrialLeft:
    estimates, progress = state.estimates, trial.progress
    runs = trial.state in _ON_DEVICES and trial.row in state.occupancy.held
    place = trial.placement if runs else None
    seconds = estimates.seconds_left(trial)
    elapsed = at_least = 0.0
    if place is not None and place.iterates:
        # What the present iteration has taken so far; of a trial whose pace is known, at most what it takes.
        elapsed = max(0.0, now - place.since)
        if trial.pace.seconds is None:
            at_least = elapsed * progress.left
        elapsed = min(elapsed, seconds / max(1, progress.left)) if trial.pace.seconds is not None else elapsed
    elif not (place is not None and place.launched) and (starts := estimates.of_key(trial).starts):
        seconds += median_low(starts)
    width = trial.width if trial.fixed_width is None else float(trial.fixed_width)
    return TrialLeft(
        seconds=seconds,
        sigma=estimates.sigma(trial),
        elapsed=elapsed,
        at_least=at_least,
        done=min(1.0, progress.done / max(1, progress.budget)),
        runs=runs,
        counts=trial.group_id == group_id,
        servers=max(1, round(width * packing)),
    )


def _in_order(state: EngineState) -> Iterator[TrialRecord]:
    """The trials that have not ended and are not paused: those that hold devices, then the others as they start.

    Those that wait for devices that there are not are left out: they take none of the others'.
    """
    queued = [state.trials.by_row[row] for row in state.queue if row in state.trials.by_row]
    seen = {trial.row for trial in queued}
    waiting = [trial for trial in queued if trial.constraint is None or not state.awaits_devices(trial.trial_id)]
    live = [
        trial
        for group in state.groups.values()
        if group.open
        for trial in sorted(group.live.values(), key=lambda trial: trial.row)
        if not trial.is_held and trial.row not in seen
    ]
    yield from (trial for trial in live if trial.state in _ON_DEVICES)
    yield from waiting
    yield from (trial for trial in live if trial.state not in _ON_DEVICES)


def _typical(state: EngineState, own: list[TrialRecord]) -> TrialLeft:
    """A trial of the group that is still to come: its usual pace and budget, and how far the paces are apart."""
    budget = median_low(trial.spec.budget for trial in own)
    paces = sorted(state.estimates.pace(trial) for trial in own)
    middle = median_low(paces)
    logs = [math.log(pace / middle) for pace in paces if pace > 0.0 and middle > 0.0]
    sigma = math.sqrt(sum(each * each for each in logs) / max(1, len(logs)))
    seconds = budget * middle * state.estimates.of_key(own[0]).stretch(min(1.0, own[-1].width))
    return TrialLeft(seconds=seconds, sigma=sigma)


def _cut(columns: list[TrialLeft], servers: int) -> tuple[list[TrialLeft], list[int]]:
    """Lets those that run beyond the servers wait, first of all; returns the positions in their new order, too."""
    taken = 0
    stay: list[int] = []
    wait: list[int] = []
    longest = sorted(range(len(columns)), key=lambda each: -columns[each].seconds)
    for each in longest:
        if not columns[each].runs:
            continue
        fits = taken + columns[each].servers <= servers or not taken
        (stay if fits else wait).append(each)
        taken += columns[each].servers if fits else 0
    order = [*stay, *wait, *(each for each, column in enumerate(columns) if not column.runs)]
    kept = set(stay)
    return [columns[each] if each in kept else columns[each].waiting() for each in order], order


# -- run overheads -------------------------------------------------------------------------------
#
# What trials hold devices for beside their iterations: to be set up, to be told to go on, to be stopped.


@dataclass(slots=True)
class _TimeHeld:
    """Of one group.

    Attributes:
        at: when it was looked at last, seconds.
        holders: trials that held devices then.
        held: trial-seconds of holding devices so far.
    """

    at: float
    holders: int
    held: float


class RunOverheads:
    """Measures overheads, from how many trials hold devices each time that a group is looked at.

    Args:
        state: the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._groups: dict[str, _TimeHeld] = {}

    def per_run(self, group_id: str, facts: GroupFacts, now: float) -> float:
        """Looks at a group; returns the seconds of overhead each time that one of its trials started or went on.

        Args:
            group_id: the group.
            facts: what its session knows of it.
            now: the time, seconds.
        """
        record = self._state.groups[group_id]
        holders, in_flight = 0, 0.0
        runs = 1 + sum(number for trial, number in record.ended.items() if trial.done > 0)
        for trial in record.live.values():
            runs += trial.progress.done > 0
            # In a lane that no trial had used it loads everything; those that come there start faster. One with a lane
            # of its own waits for the start of that, each time; but the first ones also wait for the fork server, once.
            if not trial.state.holds_devices or trial.starts_cold:
                continue
            if trial.spec.isolated or trial.placement.launched:
                holders += 1
                if trial.placement.iterates:
                    in_flight += max(0.0, now - trial.placement.since)
        group = self._groups.get(group_id)
        if group is None:
            began = now if facts.first_start is None else facts.first_start
            group = self._groups[group_id] = _TimeHeld(began, holders, 0.0)
        group.held += max(0.0, now - group.at) * 0.5 * (holders + group.holders)
        group.at, group.holders = now, holders
        runs += record.past.total()
        return max(0.0, group.held - facts.result_seconds - in_flight) / runs
