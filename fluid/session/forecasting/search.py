"""Reads off the engine how a search stands, as its play needs it. Called in the session's thread."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from fluid.engine.records import GroupRecord, TrialRecord
from fluid.forecasting.search_now import LiveTrial, SearchNow
from fluid.policies.engine import EngineState
from fluid.search_shape import SearchShape
from fluid.simulation.observed_search import mean_and_spread
from fluid.trialgroup import Search, Shown, TrialState

#: Trials that must have shown their paces before those of others are predicted by them, config by config.
_ENOUGH = 12


def search_now(
    state: EngineState,
    group_id: str,
    search: Search,
    now: float,
    *,
    ends_in: float | None = None,
    shown: Mapping[str, Shown] | None = None,
    start_s: float = 0.0,
) -> SearchNow | None:
    """Returns how a search stands; ``None`` where too little was measured, or the number of its trials is unknown.

    Args:
        state: the engine.
        group_id: the group of its trials.
        search: what the search algorithm said.
        now: the time, seconds.
        ends_in: seconds after which it ends whatever is left; ``None`` for no limit.
        start_s: seconds that a trial holds a device beside its iterations, each time that it starts.
        shown: how reports show trials, by id: some had iterations done before they were submitted.
    """
    if search.trials is None or not len(state.occupancy):
        return None
    group = state.groups[group_id]
    records = [
        trial
        for trial in map(state.trials.__getitem__, group.trial_ids)
        if not (trial.state.ended and trial.outcome is TrialState.PAUSED)  # It comes back as another trial.
    ]
    paces = _Paces(state, records, now)
    if not paces.is_known:
        return None
    before = {} if shown is None else {key: each.iterations for key, each in shown.items() if each.iterations}
    shape, ended = search.shape, Counter(group.past_lengths)
    forgotten = group.past.total() - group.past.get(TrialState.PAUSED.value, 0)
    live: list[tuple[TrialRecord, LiveTrial]] = []
    for place, trial in enumerate(records):
        first = before.get(trial.trial_id, 0)
        if trial.state is TrialState.PAUSED:
            continue  # The user decides when it goes on.
        if trial.state.ended and not (trial.state is TrialState.DONE and trial.outcome is None and search.extends):
            ended[first + trial.progress.done] += 1
            continue
        bracket = _bracket_of(shape, forgotten + place)
        live.append((trial, paces.live(trial, first, bracket)))
    order = {row: place for place, row in enumerate(state.queue)}
    live.sort(key=lambda pair: order.get(pair[0].row, -1))
    shape = _as_long_as_trials_are(shape, ended, [trial for _, trial in live])
    known = len(records) + forgotten
    found = SearchNow(
        shape=shape,
        live=tuple(trial for _, trial in live),
        ended=ended,
        coming=max(0, search.trials - known),
        seconds=math.exp(paces.mean),
        sigma=paces.sigma,
        observed=max(1, paces.observed),
        most=_most(group, records, before),
        stops=_stops(shape, ended),
        start_s=start_s,
        ends_in=ends_in,
    )
    return _shared(found, state, [trial for trial, _ in live] or records[:1])


class _Paces:
    """The paces of a group's trials: logarithms of the seconds per iteration on a device, alone.

    Attributes:
        observed: number of trials that have shown theirs.
        is_known: whether any did, or any was predicted.
        mean, sigma: of all, those included that are known to take longer than they have run.
    """

    def __init__(self, state: EngineState, records: list[TrialRecord], now: float) -> None:
        self._state = state
        self._now = now
        self._speed = _mean_speed(state, records)
        keys = Counter(trial.spec.profile_key for trial in records)
        #: Keys of one trial each say of that trial what no other can.
        self._is_own = {key for key, number in keys.items() if number == 1} if len(records) > 1 else set()
        logs = [pace for key in keys for pace in state.estimates.log_paces(key)]
        self.observed = len(logs)
        waiting = [
            math.log(elapsed)
            for trial in records
            if trial.pace.seconds is None and (elapsed := self._elapsed(trial)) > 0.0
        ]
        predicted = [pair for trial in records if (pair := self._predicted(trial)) is not None]
        self.is_known = bool(logs or predicted)
        uncertain = math.fsum(sigma * sigma for _, sigma in predicted)
        means = [mean for mean, _ in predicted]
        # Predictions say of those that run what their bounds would.
        self.mean, self.sigma = mean_and_spread([*logs, *means], () if means else waiting, uncertain=uncertain)
        self.mean -= math.log(self._speed)

    def live(self, trial: TrialRecord, first: int, bracket: int) -> LiveTrial:
        """A trial that has not ended, which had so many iterations done before it was submitted."""
        seconds, sigma = trial.pace.seconds, 0.0
        if seconds is not None:
            sigma = self._state.estimates.sigma(trial)
        elif (predicted := self._predicted(trial)) is not None:
            seconds, sigma = math.exp(predicted[0]), predicted[1]
        done, budget = trial.progress.done, trial.progress.budget
        return LiveTrial(
            done=first + done,
            granted=first + (done if trial.state.ended else max(done, budget)),
            runs=trial.state.holds_devices,
            seconds=None if seconds is None else seconds / self._speed,
            sigma=sigma,
            elapsed=self._elapsed(trial) / self._speed,
            bracket=bracket,
        )

    def _predicted(self, trial: TrialRecord) -> tuple[float, float] | None:
        """Logarithm of the pace predicted of one that has shown none, and its spread; ``None`` if all are alike."""
        if trial.pace.seconds is not None:
            return None
        estimates = self._state.estimates
        # The first to end are the fast ones: what follows from few of them is too fast.
        if trial.pace.predicted is not None and self.observed >= _ENOUGH:
            return math.log(trial.pace.predicted), estimates.sigma(trial)
        if trial.spec.profile_key in self._is_own and estimates.is_measured(trial):
            return math.log(estimates.pace(trial)), estimates.sigma(trial)
        return None

    def _elapsed(self, trial: TrialRecord) -> float:
        """Seconds of a trial's iteration in flight so far, as alone on a device."""
        place = trial.placement
        if not (trial.state.holds_devices and place.iterates and trial.row in self._state.occupancy.held):
            return 0.0
        stretch = self._state.estimates.stretch(trial)
        return max(0.0, self._now - place.since) / stretch if stretch > 0.0 else 0.0


def _stops(shape: SearchShape | None, ended: Mapping[int, int]) -> int:
    """How many trials have ended between two rungs, and others like them may, too."""
    if shape is None or shape.replaces:
        return 0
    return sum(ended[length] for length in ended if length not in shape.rungs)


def _bracket_of(shape: SearchShape | None, place: int) -> int:
    """The bracket of the trial that was submitted at a place, from 0."""
    if shape is None or len(shape.brackets) < 2:
        return 0
    ends = [0]
    for sizes in shape.brackets:
        ends.append(ends[-1] + sizes[0])
    return min(bisect_left(ends, place + 1) - 1, len(shape.brackets) - 1)


def _as_long_as_trials_are(
    shape: SearchShape | None, ended: Mapping[int, int], live: list[LiveTrial]
) -> SearchShape | None:
    """Ends the rungs where trials have nothing more to do: all that came so far, at least two, ended at one length."""
    if shape is None or shape.replaces or not ended:
        return shape
    longest = max(ended)
    if not 1 <= longest < shape.rungs[-1] or longest in shape.rungs or ended[longest] < 2:
        return shape
    if any(trial.done > longest for trial in live):
        return shape
    rungs = (*(rung for rung in shape.rungs if rung < longest), longest)
    dropped = len(shape.rungs) - len(rungs)
    brackets = tuple(sizes[: max(1, len(sizes) - dropped)] for sizes in shape.brackets)
    return replace(shape, rungs=rungs, brackets=brackets)


def _most(group: GroupRecord, records: list[TrialRecord], before: Mapping[str, int]) -> int:
    """Iterations that no trial exceeds, as far as the search has said."""
    lengths = [
        before.get(trial.trial_id, 0) + trial.progress.budget + trial.progress.follow_up_iterations for trial in records
    ]
    return max([*lengths, *group.past_lengths], default=0)


def _mean_speed(state: EngineState, records: list[TrialRecord]) -> float:
    """Speed of the devices for these trials, on average."""
    if not records:
        return 1.0
    devices = [device.index for device in state.devices]
    speeds = [state.estimates.speed(records[0], (device,)) for device in devices]
    return max(1e-9, sum(speeds) / len(speeds))


def _shared(now: SearchNow, state: EngineState, live: list[TrialRecord]) -> SearchNow:
    """Adds how its live trials share devices or span them, as the engine places them."""
    if not live:
        return now
    usual = live[0]
    estimate = state.estimates.of_key(usual)
    packing = max(1, max(round(1.0 / min(1.0, trial.width)) for trial in live))
    widest = 1 if usual.fixed_width is not None else max(1, int(state.estimates.widest(usual)))
    return replace(
        now,
        packing=packing,
        rate=packing / estimate.stretch(1.0 / packing),
        max_width=widest,
        beta=2.0 * estimate.stretch(2.0) if widest > 1 else 1.0,
    )
