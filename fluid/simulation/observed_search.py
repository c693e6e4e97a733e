"""What a session knows of a simulated search at one moment: its trials' progress, and paces as far as observed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fluid.engine.commands import Command, ReportStart
from fluid.engine.events import Event, IterationDone, TrialStarted
from fluid.engine.records import TrialRecord
from fluid.forecasting.scenario import Scenario
from fluid.forecasting.search_now import LiveTrial, SearchNow, shape_of
from fluid.policies.engine import EngineState

# -- censored paces ------------------------------------------------------------------------------
#
# The spread of trials' paces, of which some are known, and of others only that they are slower than they have run.


#: Spread of the logarithms of paces before any is known, and the number of trials for which it then counts.
SPREAD, _WEIGHT = 0.5, 1.0
#: Rounds in which those that are known by a bound are estimated.
_ROUNDS = 6
_NORMAL = NormalDist()


def mean_and_spread(
    observed: Sequence[float],
    at_least: Sequence[float] = (),
    *,
    spread: float = SPREAD,
    weight: int = 0,
    uncertain: float = 0.0,
) -> tuple[float, float]:
    """Mean and standard deviation of logarithms, of which some are known, and others by a lower bound.

    The first to end are the fast ones. Those with a bound count with their expectation above it, until that changes
    little (Schmee and Hahn, 1979).

    Example:
        >>> from fluid.simulation.observed_search import mean_and_spread
        >>> [round(each, 3) for each in mean_and_spread([0.0, 0.0])]
        [0.0, 0.354]
        >>> mean_and_spread([0.0, 0.0], [1.0])[0] > 0.3
        True

    Args:
        observed: logarithms of the seconds that are known.
        at_least: logarithms of the seconds that others have run so far.
        spread: the standard deviation as it was known before.
        weight: observations from which it was known, whose mean is 0; 0 for a guess.
        uncertain: sum of the variances of those observed, where they are known roughly.
    """
    spread, known = max(spread, 1e-3), max(weight, _WEIGHT)

    def estimate(guesses: list[float], variances: float) -> tuple[float, float]:
        values = [*observed, *guesses]
        mean = sum(values) / max(1, len(values) + weight)
        squares = sum((value - mean) ** 2 for value in values) + variances
        return mean, math.sqrt((known * spread**2 + squares) / (known + max(0, len(values) - (not weight))))

    mean, sigma = estimate([], uncertain)
    for _ in range(_ROUNDS if at_least else 0):
        guesses, variances = [], uncertain
        for bound in at_least:
            z = (bound - mean) / sigma
            hazard = _hazard(z)
            guesses.append(mean + sigma * hazard)
            variances += sigma**2 * max(0.0, 1.0 + z * hazard - hazard**2)
        mean, sigma = estimate(guesses, variances)
    return mean, sigma


def _hazard(z: float) -> float:
    """Density of the standard normal distribution, over the probability of a greater value."""
    beyond = 0.5 * math.erfc(z / math.sqrt(2.0))
    return _NORMAL.pdf(z) / beyond if beyond > 1e-12 else z


# -- observed search -----------------------------------------------------------------------------


#: Observations that the errors of predictions are known from, where trials were profiled before.
_PROFILED = 31


@dataclass(slots=True)
class _Seen:
    """One trial, as its search and the engine have told.

    Attributes:
        trial_id: the engine's id.
        granted: iterations up to which it runs before its search decides.
        bracket: number of its bracket.
        is_open: whether it runs or waits for a device.
        ended: whether it will not go on.
        began: when its iteration in flight began, seconds; ``None`` if none is in flight.
    """

    trial_id: str
    granted: int
    bracket: int
    is_open: bool = True
    ended: bool = False
    began: float | None = None


class ObservedSearch:
    """Follows a simulated search as a session would; what it tells never depends on what is still to happen.

    Args:
        scenario: its workload, and the limits of width and packing.
        profiled: whether predicted seconds per iteration are known before a trial runs; else nothing is.
    """

    def __init__(self, scenario: Scenario, *, profiled: bool) -> None:
        self._scenario = scenario
        self._profiled = profiled
        #: What the profile has learned of the errors of its predictions.
        self._error = scenario.runtime_error
        self._shape = shape_of(scenario.workload)
        self._all = self._shape.trials or scenario.workload.trials
        self._has_rungs = self._shape.algorithm != "full"
        self._trials: dict[int, _Seen] = {}
        self._of_id: dict[str, _Seen] = {}
        self._predicted: dict[str, float] = {}
        self._stops = 0

    # -- what happens ----------------------------------------------------------------------------------------

    def requested(self, trial: int, trial_id: str, granted: int, bracket: int, predicted: float) -> None:
        """The search has requested a trial's run up to so many iterations, predicted to take these seconds each."""
        if self._shape.algorithm == "halving":
            # A rung begins once all of the one before have ended: those not in it have lost.
            for other in self._trials.values():
                if other.bracket == bracket and not other.is_open:
                    other.ended = True
        seen = self._trials[trial] = _Seen(trial_id, granted, bracket)
        self._of_id[trial_id] = seen
        self._predicted[trial_id] = predicted if self._profiled else 1.0

    def ended(self, trial: int, stopped: bool) -> None:
        """A trial's run has ended; requests that follow from it come later."""
        seen = self._trials[trial]
        seen.is_open, seen.began = False, None
        at_end = seen.granted >= self._scenario.workload.max_iterations
        seen.ended = stopped or at_end or not self._has_rungs
        self._stops += stopped

    def heard(self, events: Iterable[Event], commands: Iterable[Command]) -> None:
        """Takes note of when iterations begin."""
        for event in events:
            if isinstance(event, (TrialStarted, IterationDone)) and event.trial_id in self._of_id:
                self._of_id[event.trial_id].began = event.at
        for command in commands:
            if isinstance(command, ReportStart) and command.trial_id in self._of_id:
                self._of_id[command.trial_id].began = command.at

    # -- what is known ---------------------------------------------------------------------------------------

    def at_start(self) -> SearchNow | None:
        """The search before its first trial; ``None`` if nothing is known of how long its iterations take."""
        if not self._profiled:
            return None
        runtimes = self._scenario.runtimes
        spread = runtimes.sigma if runtimes.distribution != "constant" else 0.0
        return self._now((), runtimes.seconds_per_iteration, math.hypot(spread, self._error), _PROFILED)

    def now(self, state: EngineState, at: float) -> SearchNow | None:
        """The search as it stands; ``None`` if nothing is known of how long its iterations take."""
        records = {trial_id: state.trials[trial_id] for trial_id in self._of_id if trial_id in state.trials}
        observed = [self._log_ratio(record) for record in records.values() if record.pace.seconds is not None]
        if not (observed or self._profiled):
            return None
        under_way = [
            math.log((at - seen.began) / self._predicted[seen.trial_id])
            for seen in self._trials.values()
            if seen.is_open and seen.began is not None and at > seen.began
            if seen.trial_id in records and records[seen.trial_id].pace.seconds is None
        ]
        weight = _PROFILED if self._profiled else 0
        before = self._error if self._profiled else SPREAD
        mean, sigma = mean_and_spread(observed, under_way, spread=before, weight=weight)
        logs = [math.log(predicted) for predicted in self._predicted.values()]
        centre = sum(logs) / len(logs)
        spread = math.sqrt(sum((each - centre) ** 2 for each in logs) / len(logs))
        live = [
            self._live(seen, records[seen.trial_id], at, mean, sigma)
            for seen in self._trials.values()
            if not seen.ended and seen.trial_id in records
        ]
        live.sort(key=lambda trial: not trial.runs)
        return self._now(tuple(live), math.exp(centre + mean), math.hypot(spread, sigma), weight + len(observed))

    def useful(self, state: EngineState) -> int:
        """Devices that trials which run or wait could use."""
        return sum(seen.is_open for seen in self._trials.values()) * self._scenario.d

    def _now(self, live: tuple[LiveTrial, ...], seconds: float, sigma: float, observed: int) -> SearchNow:
        ended = [seen for seen in self._trials.values() if seen.ended]
        scenario = self._scenario
        return SearchNow(
            shape=self._shape,
            live=live,
            ended=Counter(seen.granted for seen in ended),
            coming=self._all - len(self._trials),
            seconds=seconds,
            sigma=sigma,
            observed=observed,
            packing=scenario.c,
            rate=scenario.c / scenario.alpha ** (scenario.c - 1),
            max_width=scenario.d,
            beta=scenario.beta,
            stops=self._stops,
        )

    def _live(self, seen: _Seen, record: TrialRecord, at: float, mean: float, sigma: float) -> LiveTrial:
        measured = record.pace.seconds
        seconds = self._predicted[seen.trial_id] * math.exp(mean) if measured is None else measured
        began = seen.began if record.state.holds_devices else None
        return LiveTrial(
            done=record.progress.done,
            granted=seen.granted if seen.is_open else record.progress.done,
            runs=record.state.holds_devices,
            seconds=seconds if measured is not None or self._profiled else None,
            sigma=sigma if measured is None else 0.0,
            elapsed=0.0 if began is None else max(0.0, at - began),
            bracket=seen.bracket,
        )

    def _log_ratio(self, record: TrialRecord) -> float:
        assert record.pace.seconds is not None
        return math.log(record.pace.seconds / self._predicted[record.trial_id])
