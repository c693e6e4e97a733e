"""Guesses of the curves and the seconds of configs that were not run, from those of recorded trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from fluid._imports import try_import
from fluid.measure.cohorts.nodes import Feature, features_of, number_of
from fluid.measure.cohorts.tree import MOST_TRIALS, CohortTree
from fluid.measure.runtime_model import FloatArray, IntArray
from fluid.rehearsal.curves import CurveTable
from fluid.rehearsal.run_records import RecordedTrial
from fluid.resources import MemoryNeed

# -- config forest -------------------------------------------------------------------------------
#
# A small random forest over configs that gives whole learning curves, one of each tree.


#: Of the forest.
TREES = 100
#: Share of the columns among which each split of a tree is chosen.
_SHARE = 0.6
#: A category with more names is one column, of their places, in place of one for each.
_MOST_NAMES = 10


class ConfigColumns:
    """Configs as rows of numbers: logarithms of what is above 0, and a column for each name of a category.

    Args:
        configs: texts by name, of the trials that were recorded.
    """

    def __init__(self, configs: Sequence[Mapping[str, str]]) -> None:
        self._features: list[Feature] = features_of(configs)
        #: What all configs have in common.
        self.constants = {
            name: text for name, text in configs[0].items() if all(other.get(name) == text for other in configs)
        }
        self._names = {feature.name: {name: at for at, name in enumerate(feature.names)} for feature in self._features}
        self._logs = {feature.name: _is_log(feature) for feature in self._features}
        self._ranges = {feature.name: _range(feature) for feature in self._features if not feature.names}
        #: (n, columns) of the recorded trials.
        self.rows: FloatArray = np.array([self.row(config) for config in configs]).reshape(len(configs), -1)
        low, high = (np.min(self.rows, axis=0), np.max(self.rows, axis=0)) if self.rows.size else (0.0, 0.0)
        self._scale = np.where(high > low, high - low, 1.0)

    @property
    def names(self) -> tuple[str, ...]:
        """What differs between the configs."""
        return tuple(feature.name for feature in self._features)

    def key(self, config: Mapping[str, str]) -> tuple[str | None, ...] | None:
        """What tells a config from others; ``None`` if it differs from all in what these have in common."""
        if any(config.get(name, text) != text for name, text in self.constants.items()):
            return None
        return tuple(config.get(name) for name in self._names)

    def row(self, config: Mapping[str, str]) -> FloatArray:
        """A config's numbers. What it lacks lies beyond the range of what others have."""
        row: list[float] = []
        for feature in self._features:
            text = config.get(feature.name)
            names = self._names[feature.name]
            if names:
                place = names.get(text) if text is not None else None
                if len(names) > _MOST_NAMES:
                    row.append(-1.0 if place is None else float(place))
                else:
                    row += [float(place == each) for each in range(len(names))]
                continue
            low, high = self._ranges[feature.name]
            number = None if text is None else number_of(text)
            if self._logs[feature.name]:
                low, high = math.log(low), math.log(high)
                number = math.log(number) if number is not None and number > 0.0 else None
            row.append(low - (high - low or 1.0) if number is None else number)
        return np.array(row, dtype=np.float32).astype(np.float64)  # As exact as trees compare them.

    def is_inside(self, config: Mapping[str, str]) -> bool:
        """Whether all of a config lies within what was recorded."""
        if any(config.get(name, text) != text for name, text in self.constants.items()):
            return False
        for feature in self._features:
            text = config.get(feature.name)
            number = None if text is None else number_of(text)
            if feature.names:
                if text is not None and text not in self._names[feature.name]:
                    return False
            elif number is not None:
                low, high = self._ranges[feature.name]
                if not low <= number <= high:
                    return False
        return True

    def nearest(self, config: Mapping[str, str]) -> int:
        """The place of the trial with the nearest config; the first one of equals."""
        if not self._features:
            return 0
        return int(np.argmin((np.abs(self.rows - self.row(config)) / self._scale).sum(axis=1)))


def _is_log(feature: Feature) -> bool:
    known = feature.numbers[~np.isnan(feature.numbers)]
    return not feature.names and len(known) > 0 and bool(known.min() > 0.0)


def _range(feature: Feature) -> tuple[float, float]:
    known = feature.numbers[~np.isnan(feature.numbers)]
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)


class ConfigForest:
    """A random forest from rows of numbers to vectors; predictions of single trees are taken from arrays, fast.

    Args:
        rows: (n, columns) of configs.
        targets: (n, outputs) without NaN.
        scales: (outputs,) what an error of 1 counts as.
        seed: of the forest.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """

    def __init__(self, rows: FloatArray, targets: FloatArray, scales: FloatArray, seed: int) -> None:
        with try_import("scikit-learn", extra="rehearsal") as imports:
            from sklearn.ensemble import RandomForestRegressor
        imports.check()
        forest = RandomForestRegressor(n_estimators=TREES, max_features=_SHARE, n_jobs=1, random_state=seed)
        forest.fit(rows, targets / scales)
        trees = [estimator.tree_ for estimator in forest.estimators_]
        starts = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]
        self._roots = starts.astype(np.int64)
        self._feature = np.concatenate([tree.feature for tree in trees])
        self._threshold = np.concatenate([tree.threshold for tree in trees])
        below = [
            (tree.children_left + start, tree.children_right + start) for tree, start in zip(trees, starts, strict=True)
        ]
        self._left = np.concatenate([left for left, _ in below])
        self._right = np.concatenate([right for _, right in below])
        self._values = np.concatenate([tree.value.reshape(tree.node_count, -1) for tree in trees]) * scales
        #: (n, trees) whether a tree has not seen a trial.
        self.left_out = np.ones((len(rows), TREES), dtype=bool)
        for tree, seen in enumerate(forest.estimators_samples_):
            self.left_out[seen, tree] = False

    def leaves(self, rows: FloatArray) -> IntArray:
        """(k, trees) the leaves of k rows."""
        known = rows.astype(np.float32)
        at: IntArray = np.broadcast_to(self._roots, (len(rows), len(self._roots))).copy()
        each = np.arange(len(rows))[:, None]
        while True:
            feature = self._feature[at]
            inner = feature >= 0
            if not inner.any():
                return at
            goes_left = known[each, np.maximum(feature, 0)] <= self._threshold[at]
            at = np.where(inner, np.where(goes_left, self._left[at], self._right[at]), at)

    def predict(self, row: FloatArray) -> FloatArray:
        """(trees, outputs) of one row."""
        found: FloatArray = self._values[self.leaves(row[None])[0]]
        return found

    def predict_left_out(self, rows: FloatArray) -> list[FloatArray]:
        """Of each of the n rows that the forest was fitted to, (trees that have not seen it, outputs)."""
        leaves = self.leaves(rows)
        return [self._values[each[unseen]] for each, unseen in zip(leaves, self.left_out, strict=True)]


# -- config guess --------------------------------------------------------------------------------


#: Trials from which on a forest guesses; of fewer, the nearest one counts.
FOR_FOREST = 8
#: What the spread over trees is multiplied by at least and at most, so that it holds 80 % of the trials left out.
_LEAST_FACTOR, _MOST_FACTOR = 0.25, 4.0
#: Parts of the trials, each left out once, by which the guess of seconds is judged.
_PARTS = 5


@dataclass(frozen=True)
class GuessQuality:
    """How well configs are guessed, judged on trials left out.

    Attributes:
        trials: how many it is from.
        iteration: at which values are compared: the last one to which enough trials were recorded.
        error: 80 % of the guesses of the first metric are as near to the truth.
        correlation: rank correlation of guesses and truth; NaN if it cannot be told.
        seconds: 80 % of the guesses of seconds are as near, as a share of the truth.
    """

    trials: int
    iteration: int
    error: float
    correlation: float
    seconds: float


@dataclass(frozen=True)
class GuessedCurves:
    """The curves of a config that was not run.

    Attributes:
        values: (metrics, points) on the table's grid.
        spread: (points,) half of the range of the first metric that holds 80 %.
        nearest: the row of the trial that stands for what is no number.
        seconds: per iteration, alone on a device of speed 1.
        memory_bytes: typical peak of device memory; ``None`` if unknown.
    """

    values: FloatArray
    spread: FloatArray
    nearest: int
    seconds: float
    memory_bytes: float | None


class ConfigGuess:
    """Guesses configs by a forest, or of few trials by the nearest one.

    Args:
        trials: those recorded.
        table: their curves.
        seed: of the forest.
    """

    def __init__(self, trials: Sequence[RecordedTrial], table: CurveTable, seed: int) -> None:
        self._trials = trials
        self._table = table
        self._seed = seed
        self.columns = ConfigColumns([trial.texts for trial in trials])

    @property
    def by_forest(self) -> bool:
        """Whether there are trials enough for a forest, and something that differs between their configs."""
        return len(self._trials) >= FOR_FOREST and bool(self.columns.names) and bool(self._table.metrics)

    def curves(self, texts: Mapping[str, str], draw: float | None = None) -> GuessedCurves:
        """Of a config.

        Args:
            texts: of its values, by name.
            draw: from 0 to 1, by which of the trees the guess is drawn; ``None`` for the median of all.
        """
        nearest = self.columns.nearest(texts)
        found = self._cohorts.predict(tuple(texts.items()))
        seconds = self._trials[nearest].mean_seconds if found.seconds is None else found.seconds
        if draw is not None and found.seconds is not None:
            # Another digit of the same draw, so that seconds do not go with the tree.
            seconds *= math.exp(found.sigma * _normal(math.fmod(draw * 7919.0, 1.0)))
        shape = (len(self._table.metrics), len(self._table.grid))
        if self.by_forest:
            of_trees = self._forest.predict(self.columns.row(texts)).reshape(-1, *shape)
            spread = self._factor * _half_range(of_trees[:, 0, :])
            values = np.median(of_trees, axis=0)
            if draw is not None:
                # Trees differ by less or more than guesses are off. So that draws are as uncertain as the spread says,
                # they are as much nearer to the median, or further from it, but within what was recorded.
                further = values + self._factor * (of_trees[int(draw * len(of_trees))] - values)
                values = np.clip(further, *self._recorded_range)
        else:
            every = np.array([metric.values for metric in self._table.metrics])
            every = every.reshape(shape[0], len(self._trials), shape[1])
            chosen = nearest if draw is None else int(draw * len(self._trials))
            values = every[:, chosen, :]
            spread = _half_range(every[0]) if len(every) else np.zeros(shape[1])
        return GuessedCurves(values, spread, nearest, seconds, found.typical_bytes)

    @cached_property
    def quality(self) -> GuessQuality | None:
        """How well it guesses; ``None`` of few trials."""
        if not self.by_forest:
            return None
        first = self._table.metrics[0]
        enough = max(FOR_FOREST, len(self._trials) // 4)
        reached = [point for point, at in enumerate(self._table.grid) if (first.known >= at).sum() >= enough]
        point = reached[-1] if reached else 0
        judged = first.known >= self._table.grid[point]
        guessed, _ = self._left_out
        truth, guess = first.shown(first.values[judged, point]), first.shown(guessed[judged, point])
        usable = ~np.isnan(guess)
        truth, guess = truth[usable], guess[usable]
        error = float(np.quantile(np.abs(truth - guess), 0.8)) if len(truth) else math.nan
        return GuessQuality(
            int(usable.sum()), int(self._table.grid[point]), error, _rank_correlation(truth, guess), self._seconds_error
        )

    @cached_property
    def _forest(self) -> ConfigForest:
        metrics = self._table.metrics
        targets = np.concatenate([metric.values for metric in metrics], axis=1)
        deviations = [max(float(metric.values.std()), 1e-12) for metric in metrics]
        scales = np.repeat(deviations, len(self._table.grid))
        return ConfigForest(self.columns.rows, targets, scales, self._seed)

    @cached_property
    def _cohorts(self) -> CohortTree:
        return _cohorts_of(self._trials[-MOST_TRIALS:])

    @cached_property
    def _left_out(self) -> tuple[FloatArray, FloatArray]:
        """(n, points) what is guessed of the first metric of each trial without it, and the spread over trees."""
        points = len(self._table.grid)
        guessed = np.full((len(self._trials), points), np.nan)
        spread = np.full_like(guessed, np.nan)
        for row, of_trees in enumerate(self._forest.predict_left_out(self.columns.rows)):
            if len(of_trees) > 1:
                guessed[row] = np.median(of_trees[:, :points], axis=0)
                spread[row] = _half_range(of_trees[:, :points])
        return guessed, spread

    @cached_property
    def _recorded_range(self) -> tuple[FloatArray, FloatArray]:
        """(metrics, points) the least and the greatest values."""
        values = np.array([metric.values for metric in self._table.metrics])
        return values.min(axis=1), values.max(axis=1)

    @cached_property
    def _factor(self) -> float:
        """What the spread over trees is multiplied by, so that it holds 80 % of the trials left out."""
        first = self._table.metrics[0]
        guessed, spread = self._left_out
        recorded = (first.known[:, None] >= self._table.grid[None]) & (spread > 0.0)
        if recorded.sum() < FOR_FOREST:
            return 1.0
        ratios = np.abs(first.values - guessed)[recorded] / spread[recorded]
        return float(np.clip(np.quantile(ratios, 0.8), _LEAST_FACTOR, _MOST_FACTOR))

    @cached_property
    def _seconds_error(self) -> float:
        trials = self._trials[-MOST_TRIALS:]
        shares = []
        for part in range(_PARTS):
            tree = _cohorts_of([trial for place, trial in enumerate(trials) if place % _PARTS != part])
            for trial in trials[part::_PARTS]:
                found = tree.predict(trial.config_texts).seconds
                if found is not None and trial.mean_seconds > 0.0:
                    shares.append(abs(found / trial.mean_seconds - 1.0))
        return float(np.quantile(shares, 0.8)) if shares else math.nan


def _cohorts_of(trials: Sequence[RecordedTrial]) -> CohortTree:
    tree = CohortTree()
    for place, trial in enumerate(trials):
        memory = trial.memory_bytes
        tree.learn(
            f"{place}",
            trial.config_texts,
            seconds=trial.mean_seconds if trial.mean_seconds > 0.0 else None,
            need=None if memory is None else MemoryNeed(memory, 0.0),
        )
    return tree


def _half_range(values: FloatArray) -> FloatArray:
    """Half of the range that holds 80 % along the first axis."""
    low, high = np.quantile(values, (0.1, 0.9), axis=0)
    half: FloatArray = 0.5 * (high - low)
    return half


def _normal(share: float) -> float:
    """A quantile of the normal distribution, but for its outermost tails."""
    return NormalDist().inv_cdf(min(max(share, 0.001), 0.999))


def _rank_correlation(one: FloatArray, other: FloatArray) -> float:
    """Spearman's; NaN if all of one are equal."""
    if len(one) < 3:
        return math.nan
    first, second = _ranks(one), _ranks(other)
    if first.std() == 0.0 or second.std() == 0.0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    """Ranks, those of equals averaged."""
    order = np.sort(values)
    left, right = np.searchsorted(order, values, "left"), np.searchsorted(order, values, "right")
    ranks: FloatArray = np.asarray(0.5 * (left + right), dtype=np.float64)
    return ranks
