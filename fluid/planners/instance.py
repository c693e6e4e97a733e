"""The planning instance I = {A, M} (paper appendix B.1.1): k trials and n devices, as arrays."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fluid.devices.constraints import Constraint
from fluid.errors import InvalidFieldError, require_number
from fluid.measure.json_input import cluster_from_json, read_json_object, read_record
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import (
    DEFAULT_BENEFIT_THRESHOLD,
    DEFAULT_MAX_FUSED,
    DEFAULT_MAX_PACKING,
    DEFAULT_MAX_WIDTH,
    FloatArray,
    FusedRates,
    IntArray,
    RuntimeModel,
)
from fluid.planners.read_instance import InstanceInput, MeasuredKeys, TrialInput, add_measured
from fluid.resources import Cluster, MemoryNeed
from fluid.trialgroup import TrialGroup

# -- end distribution ----------------------------------------------------------------------------
#
# The distribution of the time at which something ends: a deadline is met with some odds, not for certain.


@dataclass(frozen=True, eq=False)
class EndDistribution:
    """When something ends, from now: a cumulative distribution function on a grid, linear between its points.

    Example:
        >>> from fluid.planners.instance import EndDistribution
        >>> ends = EndDistribution.of_draws([8.0, 10.0, 12.0])
        >>> ends.quantile(0.5), ends.odds_by(12.0), ends.odds_by(7.0)
        (10.0, 1.0, 0.0)

    Attributes:
        seconds: (m,) ascending, from now.
        odds: (m,) probability that it has ended by then, ascending, 1 at the end.
    """

    seconds: FloatArray
    odds: FloatArray

    @classmethod
    def certain(cls, seconds: float) -> EndDistribution:
        """It ends in so many seconds."""
        return cls(np.array([seconds]), np.array([1.0]))

    @classmethod
    def of_draws(cls, draws: ArrayLike) -> EndDistribution:
        """The distribution of which these are draws, at least one: the smallest and the largest are its ends."""
        seconds = np.sort(np.asarray(draws, dtype=np.float64))
        if not len(seconds):
            raise InvalidFieldError("draws", draws, "must be at least one")
        return cls(seconds, np.linspace(0.0, 1.0, len(seconds)) if len(seconds) > 1 else np.array([1.0]))

    @property
    def mean(self) -> float:
        """Expected seconds from now."""
        middles = (self.seconds[1:] + self.seconds[:-1]) / 2.0
        return float(self.odds[0] * self.seconds[0] + np.diff(self.odds) @ middles)

    def quantile(self, q: float) -> float:
        """Seconds by which it has ended with probability ``q``, in (0, 1)."""
        return float(np.interp(require_odds("q", q), self.odds, self.seconds))

    def quantiles(self, q: Sequence[float]) -> dict[float, float]:
        """Seconds by which it has ended with each of these probabilities."""
        return {each: self.quantile(each) for each in q}

    def odds_by(self, seconds: float) -> float:
        """The probability that it has ended by then."""
        return float(np.interp(seconds, self.seconds, self.odds, left=0.0, right=1.0))

    def later(self, seconds: float) -> EndDistribution:
        """The distribution of an end that many seconds later; earlier, but not before now, if that is negative."""
        return EndDistribution(np.maximum(0.0, self.seconds + seconds), self.odds)

    def stretched(self, factor: float) -> EndDistribution:
        """The distribution of an end for which everything takes so many times as long."""
        return EndDistribution(self.seconds * factor, self.odds)

    def towards(self, other: EndDistribution, part: float) -> EndDistribution:
        """The distribution whose quantiles lie a part of the way, 0 to 1, from these to those of another one."""
        odds = np.union1d(self.odds, other.odds)
        mine, theirs = (np.interp(odds, each.odds, each.seconds) for each in (self, other))
        return EndDistribution(mine + (theirs - mine) * part, odds)


def require_odds(name: str, value: object) -> float:
    """Returns a probability in (0, 1).

    Raises:
        InvalidFieldError: it is none.
    """
    odds = require_number(name, value, at_least=0.0)
    if not 0.0 < odds < 1.0:
        raise InvalidFieldError(name, value, "must be in (0, 1)")
    return odds


# -- completion ----------------------------------------------------------------------------------
#
# Which of several trials ends last, and when, if how long each still takes is known only with some uncertainty.
#
# The seconds that trial i has left are lognormal, with a median and a standard deviation sigma of their logarithm, and
# independent of the others'. With F_i their distribution function and f_i their density, the last one ends within l
# seconds with probability ``G(l) = prod_i F_i(l)`` (Orloj, eq. 4.6, has it for k alike ones, ``F^k``), and
#
#     P(i ends last) = integral of f_i(l) prod_{j != i} F_j(l) dl
#     E[last end]    = integral of 1 - G(l) dl.
#
# All of it is computed at once, on one grid of quantiles of G. Numpy only, as scipy is no dependency.


#: The distribution function of the normal distribution is 1 above, to 1e-10.
_CERTAIN_BY = 6.5
#: The last one of the trials does not end before a trial's quantile at this many sigmas below its median, to 1e-9.
_NOT_BEFORE = 6.0
#: Odds below which what ends by then is taken as never ending last.
_NEVER = 1e-9
#: How far above the median of their logarithm trials are compared, in standard deviations: :func:`at_equal_odds`.
_ABOVE_MEDIAN = 1.0
#: Odds at which the grid has its points: dense in both tails, whose share of the mean is large if sigma is.
_GRID_ODDS = np.array([0.5 * math.erfc(-z / math.sqrt(2.0)) for z in np.linspace(-4.0, 4.0, 81)])
#: Points of the first grid, and of the later ones beyond those odds: lognormal tails are long.
_FIRST_POINTS, _TAIL_POINTS = 24, 12
#: The odds at which coarse grids have theirs.
_COARSE_ODDS = _GRID_ODDS[::4]
#: Coarse grids are refined until no step has more than this share of the odds, this often at most.
_LARGEST_STEP = 0.25
_REFINEMENTS = 4
#: The table of the normal distribution, in sigmas: linear between entries 1/256 apart, to 2e-6 of the logarithm.
_TABLE_FROM, _TABLE_TO, _TABLE_PER_SIGMA = -37.0, 8.0, 256
#: Entries that are looked up at once.
_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class Completion:
    """When the last of k trials ends, and which one that is.

    Attributes:
        odds_last: (k,) probability that the trial ends last; they add up to 1, and trials that are certain to end last
            together share it.
        mean: expected seconds until the last one ends, to 0.5 % for sigmas up to 1.5.
        ends: the distribution of these seconds.
    """

    odds_last: FloatArray
    mean: float
    ends: EndDistribution


def at_equal_odds(medians: FloatArray, sigmas: FloatArray | None) -> FloatArray:
    """Seconds that each trial exceeds with the same odds: one standard deviation above the median.

    By these, planners sort trials where they have no better rule: of trials with one median, the least certain one is
    likely to end last (docs/theory.md, section 14).

    Args:
        medians: (k,) seconds.
        sigmas: (k,) standard deviation of the logarithm of the true seconds over these; ``None`` if they are certain.
    """
    return medians if sigmas is None else medians * np.exp(_ABOVE_MEDIAN * sigmas)


def completion_of(medians: ArrayLike, sigmas: ArrayLike) -> Completion:
    """Computes when the last of several trials ends, and which one that is.

    Example:
        >>> from fluid.planners.instance import completion_of
        >>> both = completion_of([100.0, 90.0], [0.0, 0.5])
        >>> [round(float(odds), 2) for odds in both.odds_last], round(both.mean, 1)
        ([0.58, 0.42], 121.0)

    Args:
        medians: (k,) seconds that each trial has left, at least 0, as likely more as less.
        sigmas: (k,) or one number: standard deviation of the logarithm of the true seconds over these; 0 if they are
            certain.

    Raises:
        InvalidFieldError: there is no trial, or a value is not a finite number of at least 0.
    """
    seconds = np.atleast_1d(np.asarray(medians, dtype=np.float64))
    if seconds.ndim != 1 or not len(seconds):
        raise InvalidFieldError("medians", medians, "must be those of at least one trial")
    spread = np.broadcast_to(np.asarray(sigmas, dtype=np.float64), seconds.shape)
    for name, values in (("medians", seconds), ("sigmas", spread)):
        if not (np.isfinite(values) & (values >= 0.0)).all():
            raise InvalidFieldError(name, values.tolist(), "must be finite numbers of at least 0")
    uncertain = np.flatnonzero((spread > 0.0) & (seconds > 0.0))
    known = np.ones(len(seconds), dtype=bool)
    known[uncertain] = False
    floor = float(seconds[known].max(initial=0.0))
    if len(uncertain):
        mu, sigma = np.log(seconds[uncertain]), spread[uncertain]
        least = math.log(floor) if floor > 0.0 else -math.inf
        least = max(least, float((mu - _NOT_BEFORE * sigma).max()))
        late = mu + _CERTAIN_BY * sigma > least  # the others cannot end last
        uncertain, mu, sigma = uncertain[late], mu[late], sigma[late]
    if not len(uncertain):
        last = known & (seconds == floor)
        return Completion(last / last.sum(), floor, EndDistribution.certain(floor))
    grid, kept, logs = _grid(mu, sigma, least)
    uncertain = uncertain[kept]
    total = logs.sum(axis=1)
    odds = np.exp(total)
    odds_last = np.zeros(len(seconds))
    # The last end lies in a step of the grid with the odds that G gains there. It is trial i's with the share that
    # log F_i has in the gain of log G: f_i/F_i over sum_j f_j/F_j, which is exact where these are in proportion.
    gained = np.diff(odds)
    share = gained / np.maximum(np.diff(total), 1e-300)
    # share @ np.diff(logs, axis=0), without another large array.
    odds_last[uncertain] = -np.diff(share, prepend=0.0, append=0.0) @ logs
    odds_last[uncertain] += (1.0 - odds[-1]) / len(uncertain)
    times = np.exp(grid)
    if floor > 0.0 and math.log(floor) >= least:
        last = known & (seconds == floor)
        odds_last[last] = odds[0] / last.sum()
        times[0] = floor
    odds_last /= odds_last.sum()
    odds[-1] = 1.0
    mean = float(times[0] + ((1.0 - 0.5 * (odds[1:] + odds[:-1])) * np.diff(times)).sum())
    return Completion(odds_last, mean, EndDistribution(times, odds))


def _grid(mu: FloatArray, sigma: FloatArray, least: float) -> tuple[FloatArray, IntArray, FloatArray]:
    """Logarithms of seconds between which G has about equal odds, but for its tails.

    Args:
        mu: (k,) mean of the logarithm of each trial's seconds.
        sigma: (k,) its standard deviation.
        least: none ends last before; if G is above 0 there, certain trials end at that time.

    Returns:
        (m,) the grid, the positions of the trials that can end last, and (m, positions) logarithm of their F_i.
    """
    most = float((mu + _CERTAIN_BY * sigma).max())
    coarse = np.linspace(least, most, _FIRST_POINTS)
    for left in reversed(range(_REFINEMENTS + 1)):
        odds = np.exp(_log_cdf(coarse, mu, sigma).sum(axis=1))
        if not left or float(np.diff(odds).max()) <= _LARGEST_STEP * (1.0 - odds[0]):
            break
        coarse = np.concatenate([[least], _quantiles(coarse, odds, _COARSE_ODDS), [most]])
    inner = _quantiles(coarse, odds, _GRID_ODDS)
    if odds[0] <= _NEVER:
        least = float(coarse[np.searchsorted(odds, _NEVER, side="right") - 1])
    grid = np.concatenate([[least], inner, np.linspace(inner[-1], most, _TAIL_POINTS + 1)[1:]])
    kept = np.flatnonzero(mu + _CERTAIN_BY * sigma > least)
    return grid, kept, _log_cdf(grid, mu[kept], sigma[kept])


def _quantiles(grid: FloatArray, odds: FloatArray, wanted: FloatArray) -> FloatArray:
    """Where G, given on a grid, has gained these shares of what it gains there."""
    found: FloatArray = np.interp(odds[0] + (1.0 - odds[0]) * wanted, odds, grid)
    return found


def _log_cdf(grid: FloatArray, mu: FloatArray, sigma: FloatArray) -> FloatArray:
    """(m, k) logarithm of each trial's F_i on a grid of logarithms of seconds, from a table."""
    values, gains = _log_cdf_table()
    scale = _TABLE_PER_SIGMA / sigma
    found = np.empty((len(grid), len(mu)))
    rows = max(1, _BLOCK // len(mu))
    for first in range(0, len(grid), rows):
        # In place, and in blocks: large temporary arrays cost more, in page faults, than the arithmetic.
        at = found[first : first + rows]
        np.subtract(grid[first : first + rows, None], mu, out=at)
        at *= scale
        at -= _TABLE_FROM * _TABLE_PER_SIGMA
        np.clip(at, 0.0, (_TABLE_TO - _TABLE_FROM) * _TABLE_PER_SIGMA, out=at)
        entry = at.astype(np.int32)
        at -= entry
        at *= gains[entry]
        at += values[entry]
    return found


@cache
def _log_cdf_table() -> tuple[FloatArray, FloatArray]:
    """The table's values, and by how much the next one is larger."""
    z = np.arange(_TABLE_FROM * _TABLE_PER_SIGMA, _TABLE_TO * _TABLE_PER_SIGMA + 1.0) / _TABLE_PER_SIGMA
    values = np.array([math.log(0.5 * math.erfc(-each / math.sqrt(2.0))) for each in z.tolist()])
    return values, np.diff(values, append=values[-1])


# -- instance ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instance:
    """A planner's input: k trials and n devices. Made by :meth:`build`, :meth:`from_group` or :meth:`from_json`.

    Example:
        >>> from fluid import Instance, StaticFluid
        >>> instance = Instance.build([40.0, 10.0, 10.0], 2, alpha=1.1, c=2)
        >>> len(instance), instance.n, instance.heights.tolist()
        (3, 2, [40.0, 10.0, 10.0])
        >>> StaticFluid().arrange(instance).widths.tolist()
        [1.0, 0.5, 0.5]

    Attributes:
        trial_ids: (k,) unique names.
        heights: (k,) h_i(1), predicted seconds at width 1 on a device of speed 1.
        model: overheads and limits of the k trials.
        cluster: the n devices.
        epsilon: seconds one resize costs.
        priority: (k,) a higher priority starts first.
        needs: (k,) device memory, ``None`` for a trial whose need is unknown.
        constraints: (k,) what trials ask of their devices, ``None`` for a trial that asks for nothing; ``None`` if none
            asks for anything.
        sigma: (k,) standard deviation of the logarithm of the true over the predicted runtime, which is its median;
            ``None`` if all are certain.
    """

    trial_ids: tuple[str, ...]
    heights: FloatArray
    model: RuntimeModel
    cluster: Cluster
    epsilon: float
    priority: FloatArray
    needs: tuple[MemoryNeed | None, ...]
    constraints: tuple[Constraint | None, ...] | None = None
    sigma: FloatArray | None = None

    def __len__(self) -> int:
        """k, the number of trials."""
        return len(self.trial_ids)

    @property
    def n(self) -> int:
        """The number of devices."""
        return len(self.cluster)

    @property
    def late_heights(self) -> FloatArray:
        """(k,) by which trials queue: the heights, or, if uncertain, what each trial exceeds with the same odds."""
        return at_equal_odds(self.heights, self.sigma)

    @classmethod
    def build(
        cls,
        heights: ArrayLike,
        cluster: Cluster | int,
        *,
        alpha: ArrayLike = 1.0,
        beta: ArrayLike = 1.0,
        c: ArrayLike = DEFAULT_MAX_PACKING,
        d: ArrayLike = DEFAULT_MAX_WIDTH,
        fused: Sequence[FusedRates | None] | None = None,
        epsilon: float = 0.0,
        threshold: float = DEFAULT_BENEFIT_THRESHOLD,
        trial_ids: Sequence[str] | None = None,
        priority: ArrayLike = 1.0,
        needs: Sequence[MemoryNeed | None] | None = None,
        sigma: ArrayLike = 0.0,
    ) -> Instance:
        """Makes an instance from runtimes at width 1, in seconds.

        ``alpha``, ``beta``, ``c``, ``d``, ``priority`` and ``sigma`` are one number for all trials or one per trial;
        ``c`` and ``d`` are upper bounds (:meth:`RuntimeModel.build`). ``fused`` has an entry per trial: the rates of
        those whose co-residents are rows of one fused pack.

        Raises:
            InvalidFieldError: a value cannot be used; the message names the field and the value.
        """
        runtimes = np.atleast_1d(_numbers("runtime_s", heights)).copy()
        if runtimes.ndim != 1 or not len(runtimes):
            raise InvalidFieldError("trials", heights, "a plan needs at least one trial")
        wrong = ~(np.isfinite(runtimes) & (runtimes > 0.0))
        if wrong.any():
            raise InvalidFieldError("runtime_s", float(runtimes[wrong][0]), "must be a finite number above 0")
        machines = cluster if isinstance(cluster, Cluster) else Cluster.of(cluster)
        k = len(runtimes)
        ids = tuple(trial_ids) if trial_ids is not None else tuple(f"trial-{row:05d}" for row in range(k))
        if len(set(ids)) < len(ids):
            raise InvalidFieldError("id", next(i for i in ids if ids.count(i) > 1), "two trials have this id")
        priorities = np.atleast_1d(_numbers("priority", priority))
        if not np.isfinite(priorities).all():
            raise InvalidFieldError("priority", float(priorities[~np.isfinite(priorities)][0]), "must be finite")
        spread = np.atleast_1d(_numbers("sigma", sigma))
        if not (np.isfinite(spread) & (spread >= 0.0)).all():
            raise InvalidFieldError("sigma", spread.tolist(), "must be finite numbers of at least 0")
        per_trial = {
            "trial_ids": ids,
            "needs": needs,
            "priority": priorities if len(priorities) != 1 else None,
            "sigma": spread if len(spread) != 1 else None,
        }
        for field, values in per_trial.items():
            if values is not None and len(values) != k:
                raise InvalidFieldError(field, values, f"must be one for each of the {k} trials")
        instance = cls(
            trial_ids=ids,
            heights=runtimes,
            model=RuntimeModel.build(
                k, n=len(machines), alpha=alpha, beta=beta, c=c, d=d, fused=fused, threshold=threshold
            ),
            cluster=machines,
            epsilon=require_number("epsilon", epsilon, at_least=0.0),
            priority=np.broadcast_to(priorities, (k,)),
            needs=tuple(needs) if needs is not None else (None,) * k,
            sigma=np.broadcast_to(spread, (k,)) if spread.any() else None,
        )
        instance._fit_memory()
        return instance

    def take(self, rows: Sequence[int], trial_ids: Sequence[str]) -> Instance:
        """Returns the instance of trials that are as these rows, under ids of their own; a row may occur often."""
        index = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            trial_ids=tuple(trial_ids),
            heights=self.heights[index],
            model=self.model.take(index),
            priority=self.priority[index],
            needs=tuple([self.needs[row] for row in rows]),
            constraints=None if self.constraints is None else tuple([self.constraints[row] for row in rows]),
            sigma=None if self.sigma is None else self.sigma[index],
        )

    @classmethod
    def from_group(
        cls,
        group: TrialGroup,
        cluster: Cluster,
        profile: Profile | None = None,
        *,
        c: int = DEFAULT_MAX_PACKING,
        d: int = DEFAULT_MAX_WIDTH,
        max_fused: int = DEFAULT_MAX_FUSED,
    ) -> Instance:
        """Makes the instance of a group's active trials: ``h_i(1) = budget x seconds per iteration``.

        Trials of a key of which fused packs were measured, and do more than processes, are planned as rows of packs, of
        up to ``max_fused``; ``c`` bounds the others.

        A profile key without measurements gets the median pace of the measured keys, or 1 s if there is none: widths
        depend only on ratios of runtimes, and the engine plans again once it has measured. Devices of several models,
        of which none was given a speed, get those that were measured for the group's keys
        (:func:`fluid.devices.models.speeds_of_all`).
        """
        trials = group.active
        if not trials:
            raise InvalidFieldError("group", group.name, "has no active trial to plan")
        known = profile or Profile()
        # One query per key, not per trial: groups are large and keys are few.
        keys = {trial.key: None for trial in trials}
        measured = MeasuredKeys(known, cluster, keys, c, max_fused)
        alpha = {key: measured.alpha(key) for key in keys}
        beta = {key: measured.beta(key) for key in keys}
        packing = {key: measured.packing(key) for key in keys}
        fused = {key: measured.fused(key) for key in keys}
        memory = {key: measured.memory(key) for key in keys}
        heights = [trial.budget * measured.seconds[trial.key] for trial in trials]
        work = dict.fromkeys(keys, 0.0)
        for trial, height in zip(trials, heights, strict=True):
            work[trial.key] += height
        made = cls.build(
            heights,
            measured.cluster(work),
            alpha=[alpha[trial.key] for trial in trials],
            beta=[beta[trial.key] for trial in trials],
            c=[packing[trial.key] for trial in trials],
            d=[min(d, trial.max_width or d) for trial in trials],
            fused=[fused[trial.key] for trial in trials],
            epsilon=known.epsilon,
            threshold=-math.inf,  # c is measured; alpha must not lower it again
            trial_ids=[trial.id for trial in trials],
            priority=[trial.priority for trial in trials],
            needs=[trial.memory or memory[trial.key] for trial in trials],
        )
        constraints = tuple(Constraint.of(trial.requires, trial.devices, False) for trial in trials)
        return made if not any(constraints) else made._constrained(constraints)

    def _constrained(self, constraints: tuple[Constraint | None, ...]) -> Instance:
        """This instance with what trials ask of their devices, and c and d lowered to that."""
        for row, constraint in enumerate(constraints):
            if constraint is None:
                continue
            problem = constraint.problem(self.cluster.devices)
            if problem is not None:
                field, value, reason = problem
                raise InvalidFieldError(field, value, f"trial {self.trial_ids[row]!r} fits on no device: {reason}")
            requires = constraint.requires
            eligible = sum(requires is None or requires.met_by(device) for device in self.cluster.devices)
            self.model.d[row] = min(self.model.d[row], eligible)
            self.model.c[row] = min(self.model.c[row], constraint.most_residents or self.model.c[row])
        return replace(self, constraints=constraints)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], profile: Profile | None = None) -> Instance:
        """Makes an instance from what ``fluid plan`` reads (:class:`fluid.planners.read_instance.InstanceInput`).

        ``alpha``, ``beta``, ``c``, ``d`` and ``fused`` at the top are for all trials; a trial may have its own, or name
        a profile key whose figures were measured.

        Args:
            data: the decoded JSON.
            profile: measurements; ``None`` for none.

        Raises:
            InvalidFieldError: a field is missing, unknown or invalid; the message names its place and value.
        """
        if "workload" in data and "trials" not in data:
            reason = "is no field of an instance; a scenario is for fluid simulate"
            raise InvalidFieldError("workload", data["workload"], reason)
        top = read_record(data, InstanceInput, "instance")
        for_all = {field: data[field] for field in ("alpha", "beta", "c", "d", "fused") if field in data}
        measured = add_measured(top.trials, for_all, cluster_from_json(top.devices), profile)
        trials = read_record(measured.trials, list[TrialInput], "trials", place="trials")
        threshold = DEFAULT_BENEFIT_THRESHOLD if profile is None else profile.threshold
        limits = zip(trials, measured.packing, strict=True)
        return cls.build(
            [trial.runtime_s for trial in trials],
            measured.cluster,
            alpha=[trial.alpha for trial in trials],
            beta=[trial.beta for trial in trials],
            c=[trial.packing(c, threshold) for trial, c in limits],
            d=[min(trial.d, trial.max_width) for trial in trials],
            fused=[trial.rates for trial in trials],
            epsilon=top.epsilon if "epsilon" in data or profile is None else profile.epsilon,
            threshold=-math.inf,  # Where c was measured, alpha must not lower it again; elsewhere it has.
            trial_ids=[f"trial-{row:05d}" if trial.id is None else str(trial.id) for row, trial in enumerate(trials)],
            priority=[trial.priority for trial in trials],
            needs=[trial.need for trial in trials],
        )

    @classmethod
    def load(cls, path: str | Path) -> Instance:
        """Reads an instance from a JSON file."""
        return cls.from_json(read_json_object(path))

    def _fit_memory(self) -> None:
        """Raises if a trial fits on no device, and lowers d to the number of devices that a trial fits on."""
        if not any(self.needs):
            return
        rooms = self.cluster.rooms
        for row, need in enumerate(self.needs):
            if need is None:
                continue
            fitting = len(rooms) - bisect_left(rooms, need.peak_bytes)
            if not fitting:
                raise InvalidFieldError(
                    "memory",
                    need,
                    f"trial {self.trial_ids[row]!r} needs {need.peak_bytes:.0f} bytes at its peak and the device "
                    f"with the most has {rooms[-1]:.0f} usable",
                )
            self.model.d[row] = min(self.model.d[row], fitting)


def _numbers(field: str, values: ArrayLike) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(field, values, "must be numbers") from error
