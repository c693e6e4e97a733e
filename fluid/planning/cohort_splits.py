"""The rule by which a cohort is parted in two: spreads before and after, and a guard against noise.

The spread of a cohort is J, the mean of D_i = |x_i - m|, where x_i is the logarithm of a trial's seconds or bytes and m
the cohort's median. A D_i above the mean plus the standard deviation is an outlier and is lowered to that (Auxo:
Liu et al., "Auxo: Efficient federated learning via scalable client clustering", SoCC 2023, has the rule over clients;
docs/theory.md, section 11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fluid.planning.cohort_features import BoolArray, Feature
from fluid.planning.cohort_words import NameSets, Split, Threshold, between, words
from fluid.planning.runtime_model import FloatArray

#: Trials that each side of a split must have.
MIN_TRIALS = 5
#: A split must lower the spread to this share of it: 1/sqrt(K) for K = 2 sides.
LOWERED = 1.0 / math.sqrt(2.0)
#: No cohort with a smaller spread, in logarithms, is parted: its trials differ by 10 % from their median on average.
SPREAD_FLOOR = 0.1
#: Siblings merge whose medians are nearer than this share of the sum of their spreads. When they part, the median
#: distance is larger than the sum, so that none flaps.
OVERLAP = 0.5
#: Odds that one search parts a cohort without a cause, over all splits that it tries.
FALSE_SPLIT = 0.001
#: Most thresholds that a search tries per feature.
_MOST_THRESHOLDS = 16
#: A feature with more names is not used: the sets that they could make are too many to tell a cause from chance.
_MOST_NAMES = 10
#: Most splits of a search that are checked for chance.
_MOST_CHECKED = 8
#: Trials up to which the odds of a rank sum are counted, not approximated.
_MOST_COUNTED = 60


def spread(values: FloatArray) -> float:
    """J of a cohort with these logarithms, at least one: the mean distance from the median, outliers lowered."""
    if len(values) == 0:
        return 0.0
    distances = np.abs(values - np.median(values))
    return float(np.minimum(distances, distances.mean() + distances.std()).mean())


def overlap(one: FloatArray, other: FloatArray) -> bool:
    """Whether the spreads of two siblings overlap so far that they should merge, for these logarithms of each.

    Where one has none, nothing speaks for two cohorts.
    """
    if min(len(one), len(other)) == 0:
        return True
    distance = abs(float(np.median(one)) - float(np.median(other)))
    return distance <= max(OVERLAP * (spread(one) + spread(other)), SPREAD_FLOOR / 2.0)


@dataclass(frozen=True, slots=True)
class _SplitCandidate:
    feature: Feature
    #: (n,) trials of the first and of the second side; those without such a value are of neither.
    first: BoolArray
    second: BoolArray
    #: Splits of this feature that a search may choose from.
    alternatives: int

    def split(self) -> Split:
        numbers, names = self.feature.numbers, self.feature.names
        if not names:
            at = between(float(numbers[self.first].max()), float(numbers[self.second].min()))
            return Threshold(self.feature.name, at)
        places = [np.unique(numbers[side]).astype(int) for side in (self.first, self.second)]
        first, second = (frozenset(names[place] for place in side) for side in places)
        return NameSets(self.feature.name, (first, second))


def best_split(features: Sequence[Feature], targets: Sequence[FloatArray]) -> Split | None:
    """The split that lowers the spread most, if one lowers it enough and is not chance.

    A split must, for at least one target, lower a spread above ``SPREAD_FLOOR`` to ``LOWERED`` of it, with
    ``MIN_TRIALS`` on each side. The best lowers the sum of the targets' spreads most: a factor in seconds counts as
    much as one in bytes.

    Args:
        features: of n trials.
        targets: (n,) each, the logarithms of their seconds and of their bytes; NaN where unknown.
    """
    known = [~np.isnan(target) for target in targets]
    before = [spread(target[mask]) for target, mask in zip(targets, known, strict=True)]
    if max(before) <= SPREAD_FLOOR:
        return None
    candidates = [candidate for feature in features for candidate in _candidates(feature, targets)]
    if not candidates:
        return None
    tried = len({each.feature.name for each in candidates})
    firsts = np.array([each.first for each in candidates])
    seconds = np.array([each.second for each in candidates])
    lowered = np.zeros(len(candidates))
    passes = np.zeros((len(targets), len(candidates)), dtype=np.bool_)
    for number, (target, mask) in enumerate(zip(targets, known, strict=True)):
        if before[number] > 0.0:
            after, enough = _spreads_after(target[mask], firsts[:, mask], seconds[:, mask])
            lowered += before[number] - after
            passes[number] = enough & (after <= LOWERED * before[number]) & (before[number] > SPREAD_FLOOR)
    passing = np.flatnonzero(np.any(passes, axis=0))
    for index in passing[np.argsort(-lowered[passing], kind="stable")][:_MOST_CHECKED].tolist():
        each: _SplitCandidate = candidates[index]
        least = FALSE_SPLIT / (tried * each.alternatives)
        for number in np.flatnonzero(passes[:, index]).tolist():
            values: FloatArray = targets[number]
            if chance(values[known[number] & each.first], values[known[number] & each.second]) <= least:
                split = each.split()
                if _tells_apart(split):
                    return split
    return None


def _tells_apart(split: Split) -> bool:
    """Whether the two sides have different words; names may be too long for that."""
    return words([(split, 0)]) != words([(split, 1)])


def _spreads_after(target: FloatArray, firsts: BoolArray, seconds: BoolArray) -> tuple[FloatArray, BoolArray]:
    """The spread after each split, around the medians of its sides, and whether both sides have enough trials."""
    order = np.argsort(target, kind="stable")
    values, firsts, seconds = target[order], firsts[:, order], seconds[:, order]
    sums = _deviations(values, firsts) + _deviations(values, seconds)
    rest = ~(firsts | seconds)
    if rest.any():
        sums += _deviations(values, rest)
    enough = np.minimum(firsts.sum(axis=1), seconds.sum(axis=1)) >= MIN_TRIALS
    return sums / max(1, len(values)), enough


def _deviations(values: FloatArray, members: BoolArray) -> FloatArray:
    """Sums of the distances from the median, outliers lowered, of C groups.

    Args:
        values: (n,) ascending.
        members: (C, n) which values are in the group.
    """
    counts = members.sum(axis=1)
    ranks = np.cumsum(members, axis=1)
    lower = values[np.argmax(ranks >= ((counts + 1) // 2)[:, None], axis=1)]
    upper = values[np.argmax(ranks >= (counts // 2 + 1)[:, None], axis=1)]
    distances = np.abs(values - ((lower + upper) / 2.0)[:, None]) * members
    size = np.maximum(counts, 1)
    means = distances.sum(axis=1) / size
    deviations = np.sqrt(np.maximum(0.0, np.square(distances).sum(axis=1) / size - np.square(means)))
    sums: FloatArray = np.minimum(distances, (means + deviations)[:, None]).sum(axis=1)
    return sums


def _candidates(feature: Feature, targets: Sequence[FloatArray]) -> list[_SplitCandidate]:
    return _name_sets(feature, targets) if feature.names else _thresholds(feature)


def _thresholds(feature: Feature) -> list[_SplitCandidate]:
    numbers = feature.numbers
    ordered = np.sort(numbers[~np.isnan(numbers)])
    # The last place of each value, with enough trials on both sides.
    places = np.flatnonzero(ordered[1:] > ordered[:-1])
    places = places[(places >= MIN_TRIALS - 1) & (places < len(ordered) - MIN_TRIALS)]
    if len(places) > _MOST_THRESHOLDS:
        places = places[np.linspace(0, len(places) - 1, _MOST_THRESHOLDS).astype(int)]
    if not len(places):
        return []
    at = ordered[places][:, None]
    firsts, seconds = numbers <= at, numbers > at
    return [_SplitCandidate(feature, *sides, len(places)) for sides in zip(firsts, seconds, strict=True)]


def _name_sets(feature: Feature, targets: Sequence[FloatArray]) -> list[_SplitCandidate]:
    """Sets of names by their medians: for each target, the names up to each place in that order."""
    present = np.unique(feature.numbers[~np.isnan(feature.numbers)])
    if not 2 <= len(present) <= _MOST_NAMES:
        return []
    members = [feature.numbers == place for place in present]
    found: dict[bytes, _SplitCandidate] = {}
    for target in targets:
        medians = [_median(target[mask]) for mask in members]
        order = np.argsort(medians, kind="stable")
        for place in range(1, len(order)):
            sides = [np.any([members[each] for each in side], axis=0) for side in (order[:place], order[place:])]
            # The same sets, whichever target has them in which order, make the same cohorts.
            first, second = sides if 0 in order[:place] else sides[::-1]
            found[first.tobytes()] = _SplitCandidate(feature, first, second, 2 ** (len(present) - 1) - 1)
    return list(found.values())


def _median(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.inf


def chance(one: FloatArray, other: FloatArray) -> float:
    """Odds that two groups of one distribution differ as much as these do (Mann-Whitney, two-sided)."""
    n, m = len(one), len(other)
    ordered = np.sort(other)
    # Ties count half.
    wins = float((np.searchsorted(ordered, one, "left") + np.searchsorted(ordered, one, "right")).sum()) / 2.0
    least = min(wins, n * m - wins)
    if n + m <= _MOST_COUNTED:
        odds = _arrangements(min(n, m), max(n, m))
        return min(1.0, 2.0 * odds[min(len(odds) - 1, math.ceil(least))])
    deviation = math.sqrt(n * m * (n + m + 1) / 12.0)
    return math.erfc(max(0.0, n * m / 2.0 - least - 0.5) / deviation / math.sqrt(2.0))


@lru_cache(maxsize=512)
def _arrangements(n: int, m: int) -> tuple[float, ...]:
    """The odds that at most u of the pairs of two groups of n and m are won by the first, for u = 0, 1, ..., n m.

    The counts are the coefficients of the Gaussian binomial, a product of (1 - q^(m+i)) / (1 - q^i).
    """
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    total = math.comb(n + m, n)
    return tuple(float(count) / total for count in np.cumsum(np.array(counts, dtype=object)))
