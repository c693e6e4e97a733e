"""Learning curves of recorded trials on one grid of iterations; those of trials that were stopped early go on.

A trial that was stopped is completed step by step along the grid, from its last value: what it gains by each step is
regressed on its value and its latest gain, over the trials that were recorded so far. Without this, the late iterations
of an early-stopping sweep would know good trials only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluid.measure.runtime_model import FloatArray
from fluid.rehearsal.run_records import RecordedTrial
from fluid.results.metrics import is_bookkeeping, is_number

#: The keys of a metric: of a nested one, several.
MetricPath = tuple[str, ...]
#: Most iterations of the grid.
_MOST_POINTS = 14
#: A metric above 0 whose values span this factor is taken on a logarithmic scale.
_LOG_SPAN = 100.0
#: Trials from which on gains are regressed; of fewer, the median counts.
_FOR_REGRESSION = 6
#: Of the regression: gains of standardised values.
_RIDGE = 1.0
#: Half of the range that holds 80 % of normal noise, in standard deviations.
_HALF_80 = 1.2816


@dataclass(frozen=True)
class Counter:
    """A metric that counts iterations.

    Attributes:
        first: its value at the first iteration.
        step: what each iteration adds.
    """

    first: int
    step: int

    def at(self, iteration: int) -> int:
        """Its value."""
        return self.first + self.step * (iteration - 1)


@dataclass(frozen=True)
class MetricCurves:
    """The curves of one metric.

    Attributes:
        path: its keys.
        is_log: whether values are logarithms.
        is_whole: whether all values are whole numbers.
        values: (n, points) of n trials.
        spread: (n, points) half of the range of 80 %; 0 where it was recorded.
        known: (n,) the last iteration at which it was recorded; 0 if it never was.
    """

    path: MetricPath
    is_log: bool
    is_whole: bool
    values: FloatArray
    spread: FloatArray
    known: FloatArray

    def shown(self, values: FloatArray) -> FloatArray:
        """Values as the trial reports them."""
        if self.is_log:
            values = np.exp(values)
        return np.round(values) if self.is_whole else values


@dataclass(frozen=True)
class CurveTable:
    """The curves of n trials.

    Attributes:
        grid: (points,) iterations.
        metrics: those that are numbers, the sweep's own first.
        counters: metrics that only count iterations.
        others: metrics that are neither.
    """

    grid: FloatArray
    metrics: tuple[MetricCurves, ...]
    counters: Mapping[MetricPath, Counter]
    others: tuple[MetricPath, ...]

    def anchored(self, metric: MetricCurves, row: int, trial: RecordedTrial) -> tuple[FloatArray, FloatArray]:
        """The iterations and the values of a recorded trial, and behind its last one those of the grid."""
        numbers, values = known_points(trial, metric.path, is_log=metric.is_log)
        if not len(numbers):
            return self.grid, metric.values[row]
        later = self.grid > numbers[-1]
        return np.concatenate([numbers, self.grid[later]]), np.concatenate([values, metric.values[row, later]])


def leaves(metrics: Mapping[str, Any], above: MetricPath = ()) -> dict[MetricPath, Any]:
    """The values of nested metrics by their keys."""
    found: dict[MetricPath, Any] = {}
    for name, value in metrics.items():
        path = (*above, str(name))
        found.update(leaves(value, path) if isinstance(value, Mapping) and value else {path: value})
    return found


def known_points(trial: RecordedTrial, path: MetricPath, *, is_log: bool) -> tuple[FloatArray, FloatArray]:
    """The iterations at which a trial has reported a finite number as a metric, and these."""
    points = []
    for number, one in trial.iterations.items():
        value: Any = one.metrics
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if is_number(value) and (value > 0 or not is_log):
            points.append((float(number), math.log(value) if is_log else float(value)))
    found = np.array(points, dtype=np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def curve_table(trials: Sequence[RecordedTrial], metric: str | None) -> CurveTable:
    """The curves of trials.

    Args:
        trials: at least one.
        metric: what the sweep optimizes, nested names joined by ``/``; ``None`` if unknown.
    """
    grid = _grid(max(trial.last for trial in trials))
    seen: dict[MetricPath, list[tuple[int, Any]]] = {}
    for trial in trials:
        for number, one in trial.iterations.items():
            for path, value in leaves(one.metrics).items():
                seen.setdefault(path, []).append((number, value))
    counters: dict[MetricPath, Counter] = {}
    numeric: list[MetricPath] = []
    others: list[MetricPath] = []
    for path, values in seen.items():
        counter = _counter(values)
        if counter is not None:
            counters[path] = counter
        elif not is_bookkeeping("/".join(path)):
            share = sum(_is_numeric(value) for _, value in values) / len(values)
            (numeric if share > 0.5 else others).append(path)
    numeric.sort(key=lambda path: "/".join(path) != metric)
    curves = tuple(_curves(trials, path, [value for _, value in seen[path]], grid) for path in numeric)
    return CurveTable(grid, tuple(one for one in curves if one is not None), counters, tuple(others))


def _is_numeric(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _grid(last: int) -> FloatArray:
    points = np.unique(np.round(np.geomspace(1, last, min(_MOST_POINTS, last))))
    return points.astype(np.float64)


def _counter(values: Sequence[tuple[int, Any]]) -> Counter | None:
    """How a metric counts iterations; ``None`` if it does not."""
    if not all(isinstance(value, int) and not isinstance(value, bool) for _, value in values):
        return None
    (number, value), (other, further) = values[0], max(values, key=lambda one: abs(one[0] - values[0][0]))
    if other == number or (further - value) % (other - number) or further == value:
        return None
    step = (further - value) // (other - number)
    counter = Counter(value - step * (number - 1), step)
    return counter if all(counter.at(each) == known for each, known in values) else None


def _curves(
    trials: Sequence[RecordedTrial], path: MetricPath, seen: Sequence[Any], grid: FloatArray
) -> MetricCurves | None:
    numbers = [value for value in seen if is_number(value)]
    if not numbers:
        return None
    is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_SPAN
    is_whole = all(isinstance(value, int) for value in numbers)
    values = np.full((len(trials), len(grid)), np.nan)
    last = np.zeros(len(trials))
    tails = np.full(len(trials), np.nan)
    steps = np.log(grid)
    for row, trial in enumerate(trials):
        at, known = known_points(trial, path, is_log=is_log)
        if len(at):
            last[row], tails[row] = at[-1], known[-1]
            covered = grid <= at[-1]
            values[row, covered] = np.interp(steps[covered], np.log(at), known)
    if np.isnan(values[:, 0]).all():  # Not reported at the first iteration by any.
        values[:, 0] = tails
    values[np.isnan(values[:, 0]), 0] = np.nanmedian(values[:, 0])
    spread = _complete(values, steps, np.log(np.maximum(last, 1.0)), tails)
    return MetricCurves(path, is_log, is_whole, values, spread, last)


def _complete(values: FloatArray, steps: FloatArray, last: FloatArray, tails: FloatArray) -> FloatArray:
    """Fills the missing values in, and returns half of the range of 80 % of each.

    Args:
        values: (n, points) NaN behind a trial's last value.
        steps: (points,) logarithms of iterations.
        last: (n,) that of a trial's last iteration.
        tails: (n,) its last value.
    """
    square = np.zeros_like(values)
    for point in range(1, values.shape[1]):
        missing = np.isnan(values[:, point])
        if not missing.any():
            continue
        before, gain = values[:, point - 1], values[:, point] - values[:, point - 1]
        latest = before - values[:, point - 2] if point > 1 else np.zeros(len(values))
        expected, error = _expected_gain(before, latest, gain, missing)
        # Of a trial that ended between two points, part of the step is behind it.
        inside = missing & (last > steps[point - 1]) & ~np.isnan(tails)
        left = np.where(inside, (steps[point] - last) / (steps[point] - steps[point - 1]), 1.0)
        start = np.where(inside, tails, before)
        values[missing, point] = (start + left * expected)[missing]
        square[missing, point] = (np.where(inside, 0.0, square[:, point - 1]) + left * error * error)[missing]
    spread: FloatArray = _HALF_80 * np.sqrt(square)
    return spread


def _expected_gain(
    before: FloatArray, latest: FloatArray, gain: FloatArray, missing: np.ndarray[Any, np.dtype[np.bool_]]
) -> tuple[FloatArray, float]:
    """(n,) what the next step is expected to add, and its standard error."""
    known = ~missing
    gains = gain[known]
    if not len(gains):
        return np.zeros_like(before), 0.0
    if len(gains) < _FOR_REGRESSION:
        middle = float(np.median(gains))
        return np.full_like(before, middle), float(np.std(gains))
    design = np.stack([before, latest], axis=1)
    center, scale = design[known].mean(axis=0), design[known].std(axis=0)
    places = (design - center) / np.where(scale > 0.0, scale, 1.0)
    inner = places[known]
    weights = np.linalg.solve(inner.T @ inner + _RIDGE * np.eye(2), inner.T @ (gains - gains.mean()))
    # Never beyond what was recorded: a curve that always fell goes on to fall.
    expected: FloatArray = np.clip(gains.mean() + places @ weights, gains.min(), gains.max())
    return expected, float(np.std(gains - expected[known]))
