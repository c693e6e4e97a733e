"""When the last trial of a group ends, with odds, and which one that is: in closed form, by docs/theory.md, section 12.

The seconds that a trial has left are lognormal, or a share of these if it ends early. Trials that run are on servers:
devices, as often as trials share them. Those that wait start, in order, as servers become free: when, follows from a
list schedule of the means, and how uncertain that is from the variances of what comes before. The last end is then
the product of the trials' distributions, and its average over how late the servers become free. Fewer trials than
servers run faster: packed ones share a device with fewer, elastic ones get further devices.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fluid.measure.runtime_model import FloatArray, IntArray
from fluid.planners.instance import EndDistribution

# -- early ends ----------------------------------------------------------------------------------
#
# How likely trials end before their budget is used up, and when: from those of a group that have ended, or run.
#
# A submitter stops trials that do badly, a trial says that it has no more to do, or it fails. The estimator is that of
# Kaplan and Meier (1958) over shares of the budget, in a few bins: of the trials that come to a bin, the share that
# ends in it. With few trials the bins borrow from each other, and all from a weak prior that hardly any trial ends
# early.


_BINS = 10
#: What is assumed before any trial has run: so many ends early, over so many whole budgets run.
_PRIOR_ENDS, _PRIOR_BUDGETS = 0.05, 1.0
#: Trials that a bin borrows at the mean rate of all bins.
_BORROWED = 4.0
_Shares: TypeAlias = Iterable[float] | Mapping[float, int]


class EarlyEnds:
    """The probability that a trial is still there at each share of its budget.

    Example:
        >>> from fluid.forecasting.group import EarlyEnds
        >>> seen = EarlyEnds(ended=[0.5] * 50, others=[1.0] * 50)
        >>> round(seen.odds, 1), EarlyEnds([], []).odds < 0.05
        (0.5, True)

    Args:
        ended: shares of their budgets, in [0, 1), after which trials ended early; or the number of trials by share.
        others: shares that the others have run: 1 for those that have run all; or the number of trials by share.
    """

    def __init__(self, ended: _Shares, others: _Shares) -> None:
        (at, number), (rest, number_of_rest) = map(_columns, (ended, others))
        edges = np.arange(_BINS + 1) / _BINS
        ends = np.histogram(np.minimum(at, 1.0 - 1e-9), edges, weights=number)[0]
        exposed, times = np.concatenate([at, rest]), np.concatenate([number, number_of_rest])
        #: Trials that were there in each bin, counted by how much of it they have run, in bins.
        run = times @ np.clip(exposed[:, None] * _BINS - np.arange(_BINS), 0.0, 1.0) + 0.5 * ends
        rate = (ends.sum() + _PRIOR_ENDS) / (run.sum() + _PRIOR_BUDGETS * _BINS)
        hazards = (ends + _BORROWED * rate) / (run + _BORROWED)
        self._edges = edges
        self._survival = np.concatenate([[1.0], np.cumprod(1.0 - np.clip(hazards, 0.0, 1.0 - 1e-9))])

    @property
    def odds(self) -> float:
        """The probability that a trial ends early."""
        return 1.0 - float(self._survival[-1])

    def still_there(self, shares: FloatArray) -> FloatArray:
        """The probability that a trial has not ended early by each of these shares of its budget."""
        there: FloatArray = np.interp(shares, self._edges, self._survival)
        return there

    def parts(self, done: FloatArray, parts: int) -> FloatArray:
        """The odds of ending early in each of so many equal parts of what is left, and, last, of not doing so.

        Args:
            done: (k,) share of its budget that each trial has run.
            parts: how many.

        Returns:
            (parts + 1, k); each column adds up to 1.
        """
        steps = np.linspace(0.0, 1.0, parts + 1)[:, None]
        there = self.still_there(done + (1.0 - done) * steps)
        there /= there[:1]
        return np.concatenate([there[:-1] - there[1:], there[-1:]])


def _columns(shares: _Shares) -> tuple[FloatArray, FloatArray]:
    """The shares, each once, and how many trials have each."""
    counts = Counter(shares)
    at = np.fromiter(counts.keys(), np.float64, len(counts))
    return np.clip(at, 0.0, 1.0), np.fromiter(counts.values(), np.float64, len(counts))


# -- group forecast ------------------------------------------------------------------------------


BoolArray = NDArray[np.bool_]
_TYPES: dict[str, type] = {"runs": bool, "counts": bool, "servers": np.int64}
#: Nothing is known better than to this standard deviation of a logarithm: a plan is not kept to the second.
_LEAST_SIGMA = 0.01
#: Parts of what is left in which a trial may end early, and the odds of that from which it is looked at.
_PARTS, _LEAST_EARLY = 4, 0.002
#: Points of the first grid, as shares of its length, and number of those of the last.
_FIRST_GRID = np.unique(np.concatenate([np.linspace(0.0, 1.0, 13)[1:], np.geomspace(0.01, 1.0, 9)]))
_POINTS = 24
#: Trials that are looked at at once on the first grid: arrays for very many would leave holes in the heap.
_AT_ONCE = 1000
#: Trials that have ended by the first end that is likely are left out, if with these odds.
_ENDED = 1e-5
#: Nodes and weights for the mean over a normal distribution.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
#: The table of the normal distribution: its ends, in sigmas, and entries per sigma.
_TABLE_END, _TABLE_PER_SIGMA = 6.0, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLeft:
    """A trial that has not ended.

    Attributes:
        seconds: median of the seconds that it takes to the end of its budget, as placed, or as it is to be placed; from
            the beginning of the iteration in flight on, if it runs.
        sigma: standard deviation of the logarithm of the true seconds over these.
        elapsed: seconds of these that have passed.
        at_least: seconds that it is known to take, of these.
        done: share of its budget that it has run.
        runs: whether it runs.
        counts: whether its end is waited for; the others only take servers.
        servers: that it takes at once.
    """

    seconds: float
    sigma: float = 0.0
    elapsed: float = 0.0
    at_least: float = 0.0
    done: float = 0.0
    runs: bool = False
    counts: bool = True
    servers: int = 1

    def waiting(self) -> TrialLeft:
        """The trial, waiting for a server."""
        return replace(self, elapsed=0.0, at_least=0.0, runs=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrialsLeft:
    """The trials that have not ended, those that wait in the order in which they start.

    Attributes:
        seconds, sigma, elapsed, at_least, done, runs, counts, servers: (k,) those of each (:class:`TrialLeft`).
    """

    seconds: FloatArray
    sigma: FloatArray
    elapsed: FloatArray
    at_least: FloatArray
    done: FloatArray
    runs: BoolArray
    counts: BoolArray
    servers: IntArray

    @classmethod
    def of(cls, trials: Sequence[TrialLeft]) -> TrialsLeft:
        """The columns of these trials."""
        return cls(
            **{
                column.name: np.array(
                    [getattr(trial, column.name) for trial in trials], dtype=_TYPES.get(column.name, float)
                )
                for column in fields(TrialLeft)
            }
        )


@dataclass(frozen=True, slots=True)
class PlanError:
    """How far the end may be off though all runtimes are known: plans change between two iterations only.

    Attributes:
        seconds: standard deviation of the end.
        share: that of its logarithm.
    """

    seconds: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """When the last trial ends.

    Attributes:
        ends: its distribution, in seconds from now.
        odds_last: (k,) of each trial to end last; they add up to 1 over those that count.
    """

    ends: EndDistribution
    odds_last: FloatArray


def forecast_group(
    trials: TrialsLeft,
    servers: int,
    early: EarlyEnds,
    seconds_with: Callable[[float], float] | None = None,
    *,
    preempts: bool = False,
    planned: PlanError = PlanError(),
) -> GroupForecast:
    """Forecasts the end of a group.

    Args:
        trials: at least one that counts.
        servers: trials that can run at once.
        early: how trials end early.
        seconds_with: real seconds per second of ``TrialsLeft.seconds`` while so many trials are there, which are fewer
            than ``servers``, or as many; ``None`` if that is always 1.
        preempts: whether trials that run are interrupted for others, so that all end at about the same time.
        planned: how far the end may be off though all runtimes are known.
    """
    model = _Model(trials, max(1, servers), early, preempts=preempts)
    horizon = model.horizon()
    grid = np.concatenate([[0.0], max(horizon, 1e-9) * _FIRST_GRID])
    there, log_ended = np.zeros(len(grid)), np.zeros(len(grid))
    for position in range(0, len(trials.seconds), _AT_ONCE):
        some = np.arange(position, min(position + _AT_ONCE, len(trials.seconds)))
        coarse = model.odds(grid, some, 0.0)
        there += (1.0 - coarse).sum(axis=1)
        log_ended += np.log(np.maximum(coarse[:, trials.counts[some]], 1e-300)).sum(axis=1)
    there = np.where(grid < model.busy_until(0.0), servers, there)
    clock = _real_seconds(grid, there, servers, seconds_with)
    by_then = np.exp(log_ended)
    first = max(0, int(np.searchsorted(by_then, 1e-4)) - 1)
    begin = max(0.0, float(grid[first]) - 3.0 * model.start_sigma)
    # Those that have surely ended by the earliest likely end cannot be the last.
    waited_for = np.flatnonzero(trials.counts)
    late = waited_for[model.odds(grid[[first]], waited_for, 0.0)[0] < 1.0 - _ENDED]
    late = waited_for if not len(late) else late
    nodes, weights = (_NODES, _WEIGHTS) if model.start_sigma > 0.0 else (np.zeros(1), np.ones(1))
    inner = np.interp(np.linspace(0.002, 0.998, _POINTS // 2), by_then, grid + 1e-9 * np.arange(len(grid)))
    outer = np.linspace(begin, min(horizon, float(inner[-1]) + 3.0 * model.start_sigma), _POINTS // 2)
    fine = np.unique(np.concatenate([outer, inner, np.linspace(inner[-1], horizon, 6)]))
    odds, last = np.zeros(len(fine)), np.zeros(len(late))
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        logs = np.log(np.maximum(model.odds(fine, late, node), 1e-300))
        total = logs.sum(axis=1)
        ended = np.exp(total)
        ended[fine < model.busy_until(node)] = 0.0
        ended[-1] = 1.0
        # A step's odds are shared in proportion to what each trial's logarithm gains in it: f_i / F_i.
        shares = np.diff(ended) / np.maximum(np.diff(total), 1e-300)
        last += weight * (shares @ np.diff(logs, axis=0))
        odds += weight * ended
    odds_last = np.zeros(len(trials.seconds))
    odds_last[late] = last / last.sum() if last.sum() > 0.0 else 1.0 / len(late)
    return GroupForecast(_blurred(np.interp(fine, grid, clock), odds, planned), odds_last)


def _blurred(seconds: FloatArray, odds: FloatArray, planned: PlanError) -> EndDistribution:
    """The distribution of an end that is planned to have (m,) odds at (m,) seconds."""
    middle = max(1e-9, float(np.interp(0.5, odds, seconds)))
    sigma = math.hypot(min(1.0, planned.seconds / middle), planned.share)
    if sigma <= 0.0:
        return EndDistribution(seconds, odds)
    factors = np.exp(sigma * _NODES)
    points = np.unique(np.concatenate([seconds, *np.outer(factors[[0, 1, 3, 4]], seconds[[0, len(seconds) // 2, -1]])]))
    blurred = sum(
        weight * np.interp(points / factor, seconds, odds, left=0.0)
        for factor, weight in zip(factors.tolist(), _WEIGHTS.tolist(), strict=True)
    )
    return EndDistribution(points, np.asarray(blurred))


class _Model:
    """The distributions of the trials' ends.

    Args:
        trials, servers, early, preempts: as for :func:`forecast_group`.
    """

    def __init__(self, trials: TrialsLeft, servers: int, early: EarlyEnds, *, preempts: bool) -> None:
        self._trials = trials
        parts = early.parts(trials.done, _PARTS if early.odds > _LEAST_EARLY else 0)
        #: (parts, k) odds, median and sigma of the seconds that a trial takes in all.
        self._share = parts
        steps = np.concatenate([(np.arange(len(parts) - 1) + 0.5) / max(1, len(parts) - 1), [1.0]])[:, None]
        self._logs = np.log(np.maximum(trials.seconds, 1e-9)) + np.log(steps)
        within = np.where(steps < 1.0, 1.0 / (max(1, len(parts) - 1) * math.sqrt(12.0) * steps), _LEAST_SIGMA)
        self._sigma = np.sqrt(trials.sigma**2 + within**2)
        known = np.log(np.maximum(trials.at_least, 1e-300))
        #: (parts, k) odds that were passed already.
        self._passed = _cdf((known - self._logs) / self._sigma)
        self._has_passed = bool(trials.at_least.any())
        means = np.exp(self._logs + 0.5 * self._sigma**2)
        mean = (parts * means).sum(axis=0)
        variance = (parts * means**2 * np.exp(self._sigma**2)).sum(axis=0) - mean**2
        rest = np.maximum(mean - trials.elapsed, 1e-9)
        self._start, self._start_sigma = _starts(trials, servers, rest, variance)
        self._busy = self._busy_sigma = 0.0
        if preempts and self._start_sigma.any():
            # All end together, unless one takes longer than all others together, or turns out to take longer.
            self._busy = float((rest * trials.servers).sum()) / servers
            self._busy_sigma = math.sqrt(float((variance * trials.servers).sum())) / servers
            together = max(self._busy, float(rest.max()))
            self._start = np.minimum(self._start, np.maximum(0.0, together - rest))
        #: Largest standard deviation of a start; 0 if no trial waits.
        self.start_sigma = float(self._start_sigma.max())

    def busy_until(self, late: float) -> float:
        """Seconds from now until which all servers have work, if trials are interrupted for others; else 0.

        Args:
            late: as for :meth:`odds`.
        """
        return max(0.0, self._busy + late * self._busy_sigma)

    def horizon(self) -> float:
        """Seconds by which all have ended, but for a chance in a thousand or so."""
        trials = self._trials
        longest = np.exp(self._logs[-1] + 3.7 * self._sigma[-1])
        return float((self._start + 3.0 * self._start_sigma + np.maximum(longest - trials.elapsed, 0.0)).max())

    def odds(self, grid: FloatArray, trials: IntArray, late: float) -> FloatArray:
        """The odds that some trials have ended.

        Args:
            grid: (m,) seconds from now.
            trials: (k,) which ones.
            late: how late those that wait start, in standard deviations.

        Returns:
            (m, k).
        """
        starts = np.maximum(0.0, self._start[trials] + late * self._start_sigma[trials])
        since = np.subtract.outer(grid, starts - self._trials.elapsed[trials])
        logs = np.log(np.maximum(since, 1e-12))
        odds = np.zeros_like(logs)
        for share, log, sigma, passed in zip(self._share, self._logs, self._sigma, self._passed, strict=True):
            by_then = _cdf((logs - log[trials]) * (1.0 / sigma[trials]))
            if self._has_passed:
                left = np.maximum(1.0 - passed[trials], 1e-9)
                by_then = np.clip((by_then - passed[trials]) / left, 0.0, 1.0)
            by_then *= share[trials]
            odds += by_then
        return odds


def _starts(
    trials: TrialsLeft, servers: int, means: FloatArray, variances: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(k,) seconds from now at which each trial starts, and their standard deviation; 0 for those that run."""
    starts, spread = np.zeros(len(means)), np.zeros(len(means))
    waiting = np.flatnonzero(~trials.runs)
    if not len(waiting):
        return starts, spread
    running = np.flatnonzero(trials.runs)
    loads = variances * trials.servers
    free = sorted(np.repeat(means[running], trials.servers[running]).tolist())[-servers:]
    free += [0.0] * (servers - len(free))
    heapq.heapify(free)
    found = []
    for seconds, asked in zip(means[waiting].tolist(), trials.servers[waiting].tolist(), strict=True):
        if asked == 1:
            found.append(free[0])
            heapq.heapreplace(free, free[0] + seconds)
            continue
        taken = min(asked, servers)
        found.append(heapq.nsmallest(taken, free)[-1])
        for _ in range(taken):
            heapq.heapreplace(free, found[-1] + seconds)
    starts[waiting] = found
    before = loads[running].sum() + np.concatenate([[0.0], np.cumsum(loads[waiting])[:-1]])
    spread[waiting] = np.where(starts[waiting] > 0.0, np.sqrt(before) / servers, 0.0)
    return starts, spread


def _real_seconds(
    grid: FloatArray, there: FloatArray, servers: int, seconds_with: Callable[[float], float] | None
) -> FloatArray:
    """(m,) real seconds to each point of the grid, with (m,) trials there on average."""
    if seconds_with is None or len(grid) < 2:
        return grid
    rates = np.array([seconds_with(min(float(servers), max(1.0, count))) for count in there.tolist()])
    return np.concatenate([[0.0], np.cumsum(np.diff(grid) * 0.5 * (rates[1:] + rates[:-1]))])


def _cdf(z: FloatArray) -> FloatArray:
    """The distribution function of the normal distribution, to 8e-4, from a table; changes ``z``."""
    z *= _TABLE_PER_SIGMA
    z += _TABLE_END * _TABLE_PER_SIGMA + 0.5
    found: FloatArray = _table().take(z.astype(np.int64), mode="clip")
    return found


@cache
def _table() -> FloatArray:
    points = np.arange(2 * _TABLE_END * _TABLE_PER_SIGMA + 1) / _TABLE_PER_SIGMA - _TABLE_END
    values = np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in points.tolist()])
    values[0], values[-1] = 0.0, 1.0
    return values
