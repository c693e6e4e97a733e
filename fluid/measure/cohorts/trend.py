"""How the seconds or the bytes of trials grow with the numbers in their configs: a trend within a profile key.

Medians of cohorts cannot follow a space of many sizes: a cohort holds a range of them. The trend is a regression of the
logarithms on the configs' numbers, on a log scale where they are above 0, and on their names. Its terms are chosen one
after the other by the error on trials left out (docs/theory.md, section 11).

What it gains (``benchmarks/predict.py --part offline``, trials of one measured grid): median errors of seconds of 7 to
13 % in place of 29 to 50 %, and of bytes of 10 to 14 % in place of 44 to 70 %; 0.1 to 0.6 % of the reservations of
memory are too small, in place of 1.7 to 2.7 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fluid.measure.cohorts.nodes import Feature, Split, Threshold, number_of
from fluid.measure.runtime_model import FloatArray

#: Trials from which on a trend is looked for.
MIN_TREND = 8
#: Most terms of a trend; and at most one for each so many trials.
_MOST_TERMS = 12
_TRIALS_PER_TERM = 4
#: A feature with more names has no part in a trend.
_MOST_NAMES = 10
#: Residuals beyond this many standard deviations, estimated from their median size, are lowered to that.
_CLIPPED = 2.5
#: Share of residuals that are lowered in normal noise, and hardly more: terms are chosen once.
_FEW = 0.03
#: In the choice of terms, residuals beyond this many are lowered to that: stragglers would hide what terms explain.
_LOWERED = 4.0
#: Mean squared errors and leverages nearer to their bound than this are no better.
_EXACT = 1e-9
#: A term of which less than this share is new is one of the others.
_DEPENDENT = 1e-3
#: Numbers beyond those measured are followed this share of their range further.
_BEYOND = 0.25


@dataclass(frozen=True, slots=True)
class ConfigColumn:
    """A value of a config as a number: of an ordered feature, its place; of a name or a split, whether a config has it.

    Attributes:
        feature: the dotted name of the config's value.
        name: the category; ``None`` if the feature is ordered.
        above: the threshold of a split of the tree; ``None`` if it is not one.
        is_log: whether the number is on a log scale.
        center: what is subtracted from it.
        scale: what that is divided by.
        low: the least value that is followed, after that.
        high: the largest one.
    """

    feature: str
    name: str | None
    above: float | None = None
    is_log: bool = False
    center: float = 0.0
    scale: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def of(self, values: Mapping[str, str]) -> float | None:
        """Of a config; ``None`` if it has no such value."""
        text = values.get(self.feature)
        if text is None:
            return None
        if self.name is not None:
            return float(text == self.name)
        number = number_of(text)
        if self.above is not None:
            return None if number is None else float(number > self.above)
        if number is None or (self.is_log and number <= 0.0):
            return None
        place = ((math.log(number) if self.is_log else number) - self.center) / self.scale
        return min(self.high, max(self.low, place))


#: A term of a trend is a product of columns, by their numbers.
Term = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trend:
    """A regression of logarithms on configs.

    Attributes:
        columns: the values of configs that it uses.
        terms: products of columns.
        weights: of the terms; the first one is that of 1.
        names: the categories that were seen, by feature.
        fitted: of each trial, the logarithm that the trend gives; NaN for those without one.
        left_out: of each trial, its logarithm less what a trend without it gives; NaN for those without one.
    """

    columns: tuple[ConfigColumn, ...]
    terms: tuple[Term, ...]
    weights: tuple[float, ...]
    names: Mapping[str, frozenset[str]]
    fitted: FloatArray
    left_out: FloatArray

    def predict(self, values: Mapping[str, str]) -> float | None:
        """The logarithm for a config; ``None`` if it lacks a value that the trend uses, or has an unknown name."""
        for feature, names in self.names.items():
            if values.get(feature) not in names:
                return None
        places = []
        for column in self.columns:
            place = column.of(values)
            if place is None:
                return None
            places.append(place)
        total = self.weights[0]
        for term, weight in zip(self.terms, self.weights[1:], strict=True):
            product = weight
            for number in term:
                product *= places[number]
            total += product
        return total


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """The columns that a trend may use.

    Attributes:
        columns: of features, and of thresholds of the tree.
        values: (n, columns) of n trials; 0 where a config has none.
        names: the categories that were seen, by feature.
    """

    columns: tuple[ConfigColumn, ...]
    values: FloatArray
    names: Mapping[str, frozenset[str]]


def table_of(features: Sequence[Feature], splits: Iterable[Split], trials: int) -> ColumnTable:
    """The columns of n trials.

    Args:
        features: of the trials.
        splits: of the tree: what jumps at a threshold is no trend without it.
        trials: n.
    """
    columns: list[ConfigColumn] = []
    values: list[FloatArray] = []
    thresholds = {(split.feature, split.at) for split in splits if isinstance(split, Threshold)}
    for feature in features:
        if feature.names:
            if len(feature.names) <= _MOST_NAMES:
                places = range(len(feature.names) == 2, len(feature.names))
                columns += [ConfigColumn(feature.name, feature.names[place]) for place in places]
                values += [np.equal(feature.numbers, place).astype(np.float64) for place in places]
            continue
        ordered = _ordered(feature)
        if ordered is not None:
            columns.append(ordered[0])
            values.append(ordered[1])
        for name, at in sorted(thresholds):
            if name == feature.name:
                columns.append(ConfigColumn(name, None, at))
                values.append((feature.numbers > at).astype(np.float64))
    names = {feature.name: frozenset(feature.names) for feature in features if feature.names}
    return ColumnTable(tuple(columns), np.array(values).T if values else np.empty((trials, 0)), names)


def fit_trend(table: ColumnTable, target: FloatArray) -> Trend | None:
    """The trend of n trials; ``None`` of too few trials, or if none of their values matters.

    Args:
        table: what a trend may use.
        target: (n,) logarithms; NaN where unknown.
    """
    known = ~np.isnan(target)
    if known.sum() < MIN_TREND or not table.columns:
        return None
    values, y = table.values[known], target[known]
    clipped = y
    for _ in range(2):
        terms = _choose(table.columns, values, clipped)
        if not terms:
            return None
        design = _design(values, terms)
        before, clipped = clipped, _clip(y, design, clipped)
        if np.count_nonzero(before != clipped) <= _FEW * len(y):
            break  # They have misled the choice by little, if at all.
    weights, fitted, leverage = _least_squares(design, clipped)
    used = sorted({number for term in terms for number in term})
    place_of = {number: place for place, number in enumerate(used)}
    columns = tuple(table.columns[number] for number in used)
    everywhere = np.full((2, len(target)), math.nan)
    everywhere[:, known] = fitted, y - clipped + (clipped - fitted) / (1.0 - leverage)
    return Trend(
        columns=columns,
        terms=tuple(tuple(place_of[number] for number in term) for term in terms),
        weights=tuple(weights.tolist()),
        names={column.feature: table.names[column.feature] for column in columns if column.name is not None},
        fitted=everywhere[0],
        left_out=everywhere[1],
    )


def _ordered(feature: Feature) -> tuple[ConfigColumn, FloatArray] | None:
    """The column of an ordered feature, and (n,) its values; ``None`` if its numbers do not vary."""
    values = feature.numbers
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    is_log = bool(known.min() > 0.0)
    if is_log:
        values, known = np.log(values), np.log(known)
    low, high = float(known.min()), float(known.max())
    if not high > low or not math.isfinite(high - low):
        return None
    center, scale = float(known.mean()), float(known.std())
    beyond = _BEYOND * (high - low)
    low, high = (low - beyond - center) / scale, (high + beyond - center) / scale
    places = (values - center) / scale
    return ConfigColumn(feature.name, None, None, is_log, center, scale, low, high), np.nan_to_num(places, nan=0.0)


def _design(values: FloatArray, terms: Sequence[Term]) -> FloatArray:
    """(n, 1 + terms) ones, and the terms."""
    design: FloatArray = np.array([np.ones(len(values)), *(values[:, list(term)].prod(axis=1) for term in terms)]).T
    return design


def _choose(columns: Sequence[ConfigColumn], values: FloatArray, y: FloatArray) -> list[Term]:
    """The terms, in the order of their choice: single columns, and products of those chosen.

    Each step takes the term that lowers the squared error on trials left out most.
    """
    n = len(y)
    basis = np.full((n, 1), 1.0 / math.sqrt(n))
    residual, leverage = y - y.mean(), np.full(n, 1.0 / n)
    offered: list[Term] = [(number,) for number in range(values.shape[1])]
    free, sizes = _orthogonal(values, basis)
    chosen: list[Term] = []
    while offered and len(chosen) < min(_MOST_TERMS, n // _TRIALS_PER_TERM):
        # Orthogonal to what was chosen, so that the fit of each candidate is a dot product.
        norms = np.sqrt(np.square(free).sum(axis=0))
        usable = norms > _DEPENDENT * sizes
        units = free / np.where(usable, norms, 1.0)
        after = residual[:, None] - units * (residual @ units)
        keep = np.maximum(1.0 - leverage[:, None] - np.square(units), _EXACT)
        if not usable.any():
            break
        cut = _LOWERED * _normal_deviation(residual)
        error = _error(residual / np.maximum(1.0 - leverage, _EXACT), cut)
        errors = np.where(usable, _error(after / keep, cut), np.inf)
        best = int(np.argmin(errors))
        # The largest gain of so many terms that do not matter.
        if not n * math.log(error / errors[best]) > 2.0 * math.log(len(offered)):
            break
        term, unit = offered.pop(best), units[:, best]
        basis = np.column_stack([basis, unit])
        residual, leverage = after[:, best], leverage + np.square(unit)
        free, sizes = np.delete(free, best, axis=1), np.delete(sizes, best)
        free -= unit[:, None] * (unit @ free)
        chosen.append(term)
        products = _products(columns, term, chosen)
        if products:
            more, more_sizes = _orthogonal(_design(values, products)[:, 1:], basis)
            free, sizes = np.column_stack([free, more]), np.concatenate([sizes, more_sizes])
            offered += products
    return chosen


def _products(columns: Sequence[ConfigColumn], term: Term, chosen: Sequence[Term]) -> list[Term]:
    """Products of a single column with those chosen up to it, itself included if its square is another column."""
    if len(term) > 1:
        return []
    own = columns[term[0]]
    products: list[Term] = []
    for other in chosen:
        if len(other) == 1:
            second = columns[other[0]]
            has_names = own.name is not None or second.name is not None
            if second.feature != own.feature or not (has_names or (second == own and own.above is not None)):
                products.append((*other, *term))
    return products


def _orthogonal(values: FloatArray, basis: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The columns without their parts along the basis, and the lengths that they had."""
    return values - basis @ (basis.T @ values), np.sqrt(np.square(values).sum(axis=0)) + _EXACT


def _error(left_out: FloatArray, cut: float) -> FloatArray:
    """Mean squares along the first axis, those beyond ``cut`` lowered; that of an exact fit is above 0, too."""
    squares: FloatArray = np.minimum(np.square(left_out), cut * cut).mean(axis=0)
    return np.maximum(squares, _EXACT)


def _normal_deviation(values: FloatArray) -> float:
    """The standard deviation around 0 of normal noise with that median size, above 0."""
    return max(1.4826 * float(np.median(np.abs(values))), math.sqrt(_EXACT))


def _least_squares(design: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Weights, fitted values and leverages."""
    q, r = np.linalg.qr(design)
    weights = np.linalg.solve(r, q.T @ y)
    return weights, design @ weights, np.minimum(np.square(q).sum(axis=1), 1.0 - 1e-9)


def _clip(y: FloatArray, design: FloatArray, clipped: FloatArray) -> FloatArray:
    """The targets, with residuals of outliers lowered."""
    for _ in range(3):
        fitted = _least_squares(design, clipped)[1]
        residual = y - fitted
        limit = _CLIPPED * _normal_deviation(residual)
        clipped = fitted + np.clip(residual, -limit, limit)
    return clipped
