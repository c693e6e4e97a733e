"""The rule by which a cohort is parted in two: spreads before and after, and a guard against noise.

The spread of a cohort is J, the mean of D_i = |x_i - m|, where x_i is the logarithm of a trial's seconds or bytes and m
the cohort's median. A D_i above the mean plus the standard deviation is an outlier and is lowered to that (Auxo:
Liu et al., "Auxo: Efficient federated learning via scalable client clustering", SoCC 2023, has the rule over clients;
docs/theory.md, section 11). To leave outliers out would hide a second mode of a sixth of the trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fluid.measure.runtime_model import FloatArray
from fluid.resources import MemoryNeed

# -- cohort features -----------------------------------------------------------------------------
#
# What the texts of configs say: numbers, or names.
#
# A config reaches the planner as texts (``TrialSpec.config``). A feature of which at least half of the texts are
# numbers is ordered; any other is a category. Booleans, ``None`` and lists are names.


#: Texts of a config's values by dotted name, as in ``TrialSpec.config``.
ConfigTexts = tuple[tuple[str, str], ...]
BoolArray = NDArray[np.bool_]


@lru_cache(maxsize=512)
def number_of(text: str) -> float | None:
    """The finite number that a text is; ``None`` if it is none.

    Example:
        >>> number_of("1e-3"), number_of("64"), number_of("True"), number_of("nan")
        (0.001, 64.0, None, None)
    """
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Feature:
    """A value of the configs of n trials.

    Attributes:
        name: its dotted name.
        numbers: (n,) the numbers, NaN where a config has none; of a category, the places of its names in ``names``.
        names: of a category, sorted; empty if the feature is ordered.
    """

    name: str
    numbers: FloatArray
    names: tuple[str, ...] = ()

    def of(self, rows: NDArray[np.int_]) -> Feature:
        """The same of some of the trials."""
        return Feature(self.name, self.numbers[rows], self.names)


def features_of(configs: Sequence[Mapping[str, str]]) -> list[Feature]:
    """The features that have more than one text among these configs, sorted by name."""
    features = []
    for name in sorted(set().union(*configs)):
        texts = [config.get(name) for config in configs]
        names = sorted({text for text in texts if text is not None})
        if len(names) < 2:
            continue
        place: dict[str | None, float] = {None: math.nan}
        for text in names:
            number = number_of(text)
            place[text] = math.nan if number is None else number
        is_ordered = 2 * sum(math.isnan(number) for number in place.values()) <= len(place) + 1
        if not is_ordered:
            place.update((text, float(index)) for index, text in enumerate(names))
        features.append(Feature(name, np.array([place[text] for text in texts]), () if is_ordered else tuple(names)))
    return features


# -- cohort words --------------------------------------------------------------------------------
#
# The conditions of cohorts: of one split, and in words.


#: Most characters of a name in words.
_LONGEST_NAME = 40

#: The first side of a split: the smaller numbers, or the first of two sets of names; or the second one.
Side = Literal[0, 1]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Parts trials by a number: up to ``at``, and above it.

    Attributes:
        feature: the dotted name of the config's value.
        at: the largest number of the first side.
    """

    feature: str
    at: float

    def side(self, values: Mapping[str, str]) -> Side | None:
        """The side of a config; ``None`` if it has no such number."""
        text = values.get(self.feature)
        number = None if text is None else number_of(text)
        return None if number is None else 0 if number <= self.at else 1


@dataclass(frozen=True, slots=True)
class NameSets:
    """Parts trials by a name, into two sets of names.

    Attributes:
        feature: the dotted name of the config's value.
        sides: the names of both sides.
    """

    feature: str
    sides: tuple[frozenset[str], frozenset[str]]

    def side(self, values: Mapping[str, str]) -> Side | None:
        """The side of a config; ``None`` if it has no such name, or one that was not seen before."""
        text = values.get(self.feature)
        return 0 if text in self.sides[0] else 1 if text in self.sides[1] else None


Split = Threshold | NameSets


def between(low: float, high: float) -> float:
    """The threshold between two neighbouring values: near their middle, with few digits.

    Where ``high`` is more than twice ``low``, and both are above 0, the middle is that on a log scale. Between
    integers it is an integer.

    Example:
        >>> between(64.0, 128.0), between(1.0, 2.0), between(16.0, 512.0), between(0.001, 0.1)
        (96.0, 1.0, 91.0, 0.01)
    """
    middle = math.sqrt(low) * math.sqrt(high) if 0.0 < 2.0 * low < high else low + (high - low) / 2.0
    if low == int(low) and high == int(high) and high - low < 1e6:
        return float(math.floor(middle + 0.5) if middle + 0.5 < high else math.floor(middle))
    for digits in range(1, 17):
        rounded = float(f"{middle:.{digits}g}")
        # Rounding moves the middle by little of the way to either value.
        if abs(rounded - middle) <= 0.25 * min(middle - low, high - middle):
            return rounded
    return low


def words(path: Sequence[tuple[Split, Side]]) -> str:
    """Conditions in words.

    Example:
        >>> optimizer = NameSets("opt", (frozenset({"sgd"}), frozenset({"adam", "lamb"})))
        >>> words([(Threshold("size", 96.0), 0), (optimizer, 1), (Threshold("size", 16.0), 1)])
        '16 < size <= 96, opt in {adam, lamb}'

    Args:
        path: splits from the root down, each with the side taken.
    """
    parts: dict[str, str] = {}
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    for split, side in path:
        name = split.feature
        if isinstance(split, NameSets):
            parts[name] = _names(name, sorted(map(_short, split.sides[side])))
            continue
        (most if side == 0 else least)[name] = split.at
        low, high = least.get(name), most.get(name)
        if low is None:
            parts[name] = f"{name} <= {_number(split.at)}"
        elif high is None:
            parts[name] = f"{name} > {_number(low)}"
        else:
            parts[name] = f"{_number(low)} < {name} <= {_number(high)}"
    return ", ".join(parts.values())


def _names(name: str, texts: Sequence[str]) -> str:
    return f"{name} = {texts[0]}" if len(texts) == 1 else f"{name} in {{{', '.join(texts)}}}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 3]}..."


# -- cohort splits -------------------------------------------------------------------------------


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


# -- cohort nodes --------------------------------------------------------------------------------
#
# Nodes of the tree of cohorts: the trials whose configs meet a node's conditions, and what was measured of them.


#: A cohort is searched for a split when it has grown by this share of its trials.
SEARCH_GROWTH = 0.2
#: Standard deviation of the logarithm of seconds over a prediction from a single trial: other configs may take twice
#: as long, or half. With each further trial its square is halved, beside the one that was measured.
UNKNOWN_SIGMA = 0.7
#: Bytes of a trial whose memory is unknown.
_NO_BYTES = (-1.0, -1.0)
#: Most splits from the root to a leaf.
DEEPEST = 5


@dataclass(slots=True)
class CohortSample:
    """What was measured of a trial.

    Attributes:
        config: of the trial.
        values: the same, by name.
        seconds: per iteration, alone on a device of speed 1; ``None`` until measured.
        need: its peak memory, in bytes; ``None`` until measured.
    """

    config: ConfigTexts
    values: Mapping[str, str]
    seconds: float | None = None
    need: MemoryNeed | None = None
    #: Of the seconds, and of the peak, persistent and ephemeral bytes; NaN if unknown or 0.
    logarithms: tuple[float, float, float, float] = field(init=False)
    #: Persistent and ephemeral bytes; -1 if unknown.
    parts: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        need = self.need
        self.parts = _NO_BYTES if need is None else (need.persistent_bytes, need.ephemeral_bytes)
        figures = (self.seconds or 0.0, sum(self.parts), *self.parts)
        seconds, peak, persistent, ephemeral = (math.log(each) if each > 0.0 else math.nan for each in figures)
        self.logarithms = seconds, peak, persistent, ephemeral


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortFigures:
    """Of the trials of a node; what was measured of none of them is NaN.

    Attributes:
        medians: of the logarithms of seconds, and of peak, persistent and ephemeral bytes.
        sigma: standard deviation of the logarithm of a further trial's seconds over their median.
    """

    medians: tuple[float, ...]
    sigma: float


@dataclass(slots=True)
class CohortNode:
    """A node of the tree.

    Attributes:
        path: splits from the root, each with the side taken.
        samples: by trial; those below it, and those that its split cannot decide.
        split: parts it in two; ``None`` for a leaf.
        children: of both sides; empty for a leaf.
        searched: number of trials when a split was last searched in vain.
    """

    path: tuple[tuple[Split, Side], ...] = ()
    samples: dict[str, CohortSample] = field(default_factory=dict)
    split: Split | None = None
    children: tuple[CohortNode, ...] = ()
    searched: int = 0
    _words: str | None = None
    _figures: CohortFigures | None = None
    #: The largest persistent and ephemeral bytes; ``None`` after a trial with one of them has gone.
    _largest: tuple[float, float] | None = _NO_BYTES

    @property
    def conditions(self) -> str:
        """In words; empty for the root."""
        if self._words is None:
            self._words = words(self.path)
        return self._words

    @property
    def figures(self) -> CohortFigures:
        """Of its trials."""
        if self._figures is None:
            of_targets = [self.logarithms(target) for target in range(4)]
            medians = [float(np.median(each)) if len(each) else math.nan for each in of_targets]
            sigma = wide_for_few(robust_deviation(of_targets[0] - medians[0]), len(of_targets[0]))
            self._figures = CohortFigures(medians=tuple(medians), sigma=sigma)
        return self._figures

    @property
    def largest(self) -> MemoryNeed | None:
        """The largest parts of its trials' memory, in bytes; ``None`` if none was measured."""
        if self._largest is None:
            parts = [sample.parts for sample in self.samples.values()]
            self._largest = (
                max((each[0] for each in parts), default=-1.0),
                max((each[1] for each in parts), default=-1.0),
            )
        return None if self._largest == _NO_BYTES else MemoryNeed(*self._largest)

    def logarithms(self, target: int) -> FloatArray:
        """Of the seconds (0), or the peak (1), persistent (2) or ephemeral (3) bytes of its trials, as far as known."""
        values = self.logarithms_or_nan(target)
        known: FloatArray = values[~np.isnan(values)]
        return known

    def logarithms_or_nan(self, target: int) -> FloatArray:
        """The same of all its trials, NaN where unknown or 0."""
        return np.array([each.logarithms[target] for each in self.samples.values()], dtype=np.float64)

    def of(self, values: Mapping[str, str]) -> list[CohortNode]:
        """The nodes whose conditions a config meets, from this one down."""
        found = [self]
        while found[-1].split is not None:
            side = found[-1].split.side(values)
            if side is None:
                break
            found.append(found[-1].children[side])
        return found

    def walk(self) -> Iterator[CohortNode]:
        """This node and all below it, first sides first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def number_ending_here(self) -> int:
        """How many of its trials are in no node below: all those of a leaf."""
        return len(self.samples) - sum(len(child.samples) for child in self.children)

    def ending_here(self) -> list[str]:
        """Its trials that are in no node below."""
        return [trial for trial in self.samples if not any(trial in child.samples for child in self.children)]

    def put(self, trial_id: str, sample: CohortSample) -> None:
        """Adds a trial to this node and to those below."""
        for node in self.of(sample.values):
            node.samples[trial_id] = sample
            node._figures = None
            if node._largest is not None:
                most = node._largest
                node._largest = max(most[0], sample.parts[0]), max(most[1], sample.parts[1])

    def drop(self, trial_id: str) -> None:
        """Removes a trial from this node and those below."""
        for node in self.of(self.samples[trial_id].values):
            parts = node.samples.pop(trial_id).parts
            node._figures = None
            if node._largest is not None and (parts[0] >= node._largest[0] or parts[1] >= node._largest[1]):
                node._largest = None

    def part(self, split: Split) -> None:
        """Makes this leaf an inner node."""
        self.split, self.searched = split, 0
        self.children = tuple(CohortNode((*self.path, (split, side))) for side in (0, 1))
        for trial_id, sample in self.samples.items():
            side = split.side(sample.values)
            if side is not None:
                self.children[side].put(trial_id, sample)

    def merge(self) -> bool:
        """Merges siblings whose spreads overlap, from the leaves up; returns whether there were any."""
        merged = sum(child.merge() for child in self.children) > 0
        if not self.children or any(child.children for child in self.children):
            return merged
        one, other = self.children
        if not all(overlap(one.logarithms(target), other.logarithms(target)) for target in (0, 1)):
            return merged
        self.split, self.children = None, ()
        # Noise that parts them again at once would part them without end.
        self.searched = len(self.samples)
        return True

    def grow(self, features: Sequence[Feature], rows: Mapping[str, int]) -> bool:
        """Parts leaves where a split pays and trials have come in since the last search; returns whether it did.

        Args:
            features: of all trials of the tree.
            rows: of each trial there.
        """
        if self.children:
            return sum(child.grow(features, rows) for child in self.children) > 0
        count = len(self.samples)
        if len(self.path) == DEEPEST or count < max(2 * MIN_TRIALS, math.ceil(self.searched * (1.0 + SEARCH_GROWTH))):
            return False
        self.searched = count
        own = np.array([rows[trial_id] for trial_id in self.samples])
        features_here = [feature.of(own) for feature in features]
        split = best_split(features_here, [self.logarithms_or_nan(target) for target in (0, 1)])
        if split is None:
            return False
        self.part(split)
        for child in self.children:
            child.grow(features, rows)
        return True


def wide_for_few(deviation: float, trials: int) -> float:
    """A standard deviation of logarithms that was estimated from a few trials, or from one, at which it is 0."""
    return math.hypot(deviation, UNKNOWN_SIGMA * 2.0 ** ((1 - trials) / 2))


#: What lowering outliers takes from the standard deviation of normal noise.
_OF_NORMAL = 1.166


def robust_deviation(distances: FloatArray) -> float:
    """The standard deviation around 0, outliers above the mean plus the standard deviation lowered to that.

    Of normal noise, it is that of the noise.
    """
    if len(distances) == 0:
        return math.nan
    sizes = np.abs(distances)
    lowered = np.minimum(sizes, sizes.mean() + sizes.std())
    return _OF_NORMAL * math.sqrt(float(np.square(lowered).mean()))
