"""A small random forest over configs that gives whole learning curves, one of each tree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fluid._imports import try_import
from fluid.measure.cohorts.nodes import Feature, features_of, number_of
from fluid.measure.runtime_model import FloatArray, IntArray

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
