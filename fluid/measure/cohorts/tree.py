"""Cohorts: trials of one profile key, parted by their configs where their seconds or bytes per iteration differ.

A search space with a batch size or a width has small and large trials under one profile key. A cohort is a leaf of a
small binary tree over config values; what was measured of its trials predicts further ones before their first
iteration (docs/theory.md, section 11).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from msgspec import Meta

from fluid.errors import InvalidFieldError, require_number
from fluid.measure.cohorts.nodes import (
    DEEPEST,
    CohortNode,
    CohortSample,
    ConfigTexts,
    Feature,
    NameSets,
    Split,
    Threshold,
    features_of,
    robust_deviation,
    wide_for_few,
    words,
)
from fluid.measure.cohorts.trend import Trend, fit_trend, table_of
from fluid.measure.json_input import NonNegative, NonNegativeInteger, read_record
from fluid.measure.runtime_model import FloatArray
from fluid.resources import MemoryNeed

# -- cohort json ---------------------------------------------------------------------------------
#
# The tree of cohorts as JSON: its trials, oldest first, and its splits.


def trial_to_json(trial_id: str, sample: CohortSample) -> dict[str, object]:
    """A trial, as JSON."""
    need = sample.need
    parts = None if need is None else [need.persistent_bytes, need.ephemeral_bytes]
    return {"id": trial_id, "config": dict(sample.config), "seconds": sample.seconds, "bytes": parts}


@dataclass(frozen=True)
class _SavedTrial:
    id: str
    config: dict[str, str]
    seconds: Annotated[float, Meta(ge=0.0)] | None
    bytes: tuple[NonNegative, NonNegative] | None

    def __post_init__(self) -> None:
        if self.seconds == 0.0:
            raise InvalidFieldError("seconds", self.seconds, "must be above 0")
        if self.seconds is None and self.bytes is None:
            raise InvalidFieldError("seconds", None, "is missing, and bytes are, too")

    @property
    def sample(self) -> CohortSample:
        """What was saved."""
        need = None if self.bytes is None else MemoryNeed(*self.bytes)
        return CohortSample(tuple(self.config.items()), self.config, self.seconds, need)


def node_to_json(node: CohortNode) -> dict[str, object]:
    """A node and those below it, without their trials, as JSON."""
    if node.split is None:
        return {"searched": node.searched}
    below: dict[str, object] = {"feature": node.split.feature, "sides": [node_to_json(each) for each in node.children]}
    if isinstance(node.split, Threshold):
        return {**below, "at": node.split.at}
    return {**below, "names": [sorted(side) for side in node.split.sides]}


@dataclass(frozen=True)
class _SavedNode:
    """A node: a leaf has ``searched``, any other one a feature, and ``at`` or ``names``."""

    searched: NonNegativeInteger | None = None
    feature: str | None = None
    at: float | None = None
    names: tuple[_Names, _Names] | None = None
    sides: tuple[_SavedNode, _SavedNode] | None = None

    def __post_init__(self) -> None:
        if self.sides is None and self.searched is None:
            raise InvalidFieldError("searched", None, "is missing")
        if self.sides is not None and self.feature is None:
            raise InvalidFieldError("feature", None, "is missing")
        if self.sides is not None and self.at is None and self.names is None:
            raise InvalidFieldError("names", None, "is missing")
        if self.names is not None and len({*self.names[0], *self.names[1]}) < sum(map(len, self.names)):
            raise InvalidFieldError("names", self.names, "hold a name twice")

    def part(self, where: str, node: CohortNode, depth: int) -> None:
        """Parts a node without trials as this one was.

        Args:
            where: the place in the file.
            node: the node.
            depth: most splits below it.
        """
        if self.sides is None:
            node.searched = self.searched or 0
            return
        if depth == 0:
            raise InvalidFieldError(where, self.feature, "has too many splits above it")
        split = self._split
        if words([*node.path, (split, 0)]) == words([*node.path, (split, 1)]):
            raise InvalidFieldError(where, self.feature, "both sides have the same conditions")
        node.part(split)
        for place, (child, side) in enumerate(zip(node.children, self.sides, strict=True)):
            side.part(f"{where}.sides[{place}]", child, depth - 1)

    @property
    def _split(self) -> Split:
        feature, (left, right) = self.feature or "", self.names or ((), ())
        if self.at is not None:
            return Threshold(feature, self.at)
        return NameSets(feature, (frozenset(left), frozenset(right)))


#: The names on one side of a split.
_Names = Annotated[list[str], Meta(min_length=1)]


# -- cohort trends -------------------------------------------------------------------------------
#
# What the trends of seconds and bytes predict for a config, beside the medians and the largest needs of its cohort.


#: A reservation of memory is the largest need to be expected, times this.
MARGIN = 1.1
#: A trend is used if its error on trials left out is at most this share of that of the cohorts' medians.
_BETTER = 0.9
#: Nor need it be better than this, a standard deviation of logarithms: it follows configs beyond those measured, too.
_GOOD = 0.02
#: The deviation of all trials counts as much as so many of the cohort's own.
_SHARED = 8
#: What is reserved lies above a trend by at least so many standard deviations.
_DEVIATIONS_ABOVE = 3.0
#: How far above it trials were is asked of those that should need at least this share of what the trial in question
#: should need, or of so many of the largest: the memory of a small process differs by a larger share of it.
_SHARE_ASKED, _LEAST_ASKED = 0.5, 20


#: Places of the targets among the logarithms of a trial.
_SECONDS, _PEAK, _PARTS = 0, 1, (2, 3)


class Trends:
    """The trends of a tree's trials, as far as they predict better than medians.

    Args:
        root: of the tree.
        features: of its trials.
    """

    def __init__(self, root: CohortNode, features: Sequence[Feature]) -> None:
        trials = len(root.samples)
        place = {trial_id: number for number, trial_id in enumerate(root.samples)}
        table = table_of(features, [node.split for node in root.walk() if node.split is not None], trials)
        #: Of seconds, and of persistent and ephemeral bytes.
        self._trends: list[Trend | None] = []
        self._errors: list[_ErrorsAbove | None] = []
        for target in (_SECONDS, *_PARTS):
            values = root.logarithms_or_nan(target)
            trend = fit_trend(table, values)
            if trend is not None and not _pays(trend, target, values, root, place):
                trend = None
            self._trends.append(trend)
            self._errors.append(None if trend is None else _ErrorsAbove(trend))
        #: Standard deviation of the logarithm of a trial's seconds over the trend, by node.
        self._sigma: dict[str, float] = {}
        seconds = self._trends[0]
        if seconds is not None:
            shared = robust_deviation(_known(seconds.left_out))
            for node in root.walk():
                own = _known(seconds.left_out[[place[each] for each in node.samples]])
                square = (np.square(robust_deviation(own)) * len(own) if len(own) else 0.0) + _SHARED * shared**2
                self._sigma[node.conditions] = wide_for_few(math.sqrt(square / (len(own) + _SHARED)), trials)

    def seconds(self, values: Mapping[str, str], nodes: Sequence[CohortNode]) -> tuple[float, float]:
        """The logarithm of a config's seconds, and its standard deviation; NaN if unknown.

        Args:
            values: the config's texts.
            nodes: those whose conditions it meets, from the root down.
        """
        trend = self._trends[0]
        place = None if trend is None else trend.predict(values)
        if place is not None and nodes[-1].conditions in self._sigma:
            return place, self._sigma[nodes[-1].conditions]
        known = (node.figures for node in reversed(nodes) if not math.isnan(node.figures.medians[_SECONDS]))
        return next(((each.medians[_SECONDS], each.sigma) for each in known), (math.nan, 0.0))

    def memory(self, values: Mapping[str, str], nodes: Sequence[CohortNode]) -> tuple[float | None, MemoryNeed | None]:
        """A config's typical peak bytes, and the reservation; ``None`` if unknown.

        The reservation is what the trends say, and on top of that as much as trials of that size or larger ones were
        above them; the largest parts of the cohort where there is no trend; with a margin.
        """
        node = next((node for node in reversed(nodes) if node.largest is not None), None)
        if node is None or node.largest is None:
            return None, None
        medians = [0.0 if math.isnan(median) else math.exp(median) for median in node.figures.medians]
        largest = [node.largest.persistent_bytes, node.largest.ephemeral_bytes]
        typical = [medians[target] for target in _PARTS]
        is_trend = False
        for part, (trend, errors) in enumerate(zip(self._trends[1:], self._errors[1:], strict=True)):
            place = None if trend is None else trend.predict(values)
            if place is not None and errors is not None:
                is_trend, typical[part] = True, math.exp(place)
                largest[part] = math.exp(place + errors.most(place))
        need = MemoryNeed(MARGIN * largest[0], MARGIN * largest[1])
        return sum(typical) if is_trend else medians[_PEAK], need


def _known(values: FloatArray) -> FloatArray:
    known: FloatArray = values[~np.isnan(values)]
    return known


class _ErrorsAbove:
    """How far above a trend trials of a size were, as logarithms.

    Args:
        trend: of bytes.
    """

    def __init__(self, trend: Trend) -> None:
        fitted, errors = _known(trend.fitted), _known(trend.left_out)
        order = np.argsort(-fitted, kind="stable")
        #: Of each trial, the largest first: the logarithm of its bytes by the trend, negated, and its error.
        self._negated = -fitted[order]
        self._errors = errors[order]
        self._most: dict[int, float] = {}

    def most(self, place: float) -> float:
        """How far above the trend a further trial may be.

        Args:
            place: the logarithm of its bytes by the trend.
        """
        asked = int(np.searchsorted(self._negated, -(place + math.log(_SHARE_ASKED)), side="right"))
        asked = min(len(self._errors), max(asked, _LEAST_ASKED))
        if asked not in self._most:
            errors = self._errors[:asked]
            self._most[asked] = max(_DEVIATIONS_ABOVE * robust_deviation(errors), float(errors.max()))
        return self._most[asked]


def _pays(trend: Trend, target: int, values: FloatArray, root: CohortNode, place: Mapping[str, int]) -> bool:
    """Whether a trend's error on trials left out is small, or clearly below that of the medians of their cohorts."""
    distances = np.full(len(values), math.nan)
    for leaf in root.walk():
        if not leaf.children:
            members = [place[each] for each in leaf.samples]
            own = values[members]
            known = _known(own)
            if len(known) > 1:
                distances[members] = (own - leaf.figures.medians[target]) * len(known) / (len(known) - 1)
    both = ~np.isnan(distances) & ~np.isnan(trend.left_out)
    if not both.any():
        return True
    return robust_deviation(trend.left_out[both]) <= max(_BETTER * robust_deviation(distances[both]), _GOOD)


# -- cohorts -------------------------------------------------------------------------------------


__all__ = ["Cohort", "CohortTree", "ConfigTexts", "Prediction"]

#: Trials kept per profile key.
MOST_TRIALS = 200
#: Cohorts are searched anew, and predictions compared with earlier ones, when trials have grown by this share.
GROWTH = 0.3
#: Trends are fitted anew to predict a config when trials have grown by this share.
FIT_GROWTH = 0.15
#: Share by which a prediction must move for trials to be predicted anew.
MOVED = 0.1
#: Most predictions that are kept.
_MOST_PREDICTED = 4096
#: Configs whose predictions tell whether predictions have moved, and the share of them that must have.
_MOST_TYPICAL = 12
#: A prime far above the number of trials: its multiples scatter over them.
_SCATTER = 1_000_003
_MOVED_CONFIGS = 0.2


@dataclass(frozen=True, slots=True)
class Prediction:
    """What to expect of a trial.

    Attributes:
        cohort: its cohort's conditions in words, ``"batch_size > 96"``; empty if its profile key is not parted.
        seconds: per iteration, alone on a device of speed 1; ``None`` if none was measured.
        sigma: standard deviation of the logarithm of the true seconds over these.
        need: memory to reserve, in bytes; ``None`` if none was measured.
        typical_bytes: median peak memory; ``None`` if none was measured.
    """

    cohort: str = ""
    seconds: float | None = None
    sigma: float = 0.0
    need: MemoryNeed | None = None
    typical_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """A leaf of the tree, for reports.

    Attributes:
        conditions: in words; empty if the profile key is not parted.
        trials: how many were measured.
        seconds: median per iteration, alone on a device of speed 1; ``None`` if none was measured.
        peak_bytes: most memory of one of them; ``None`` if none was measured.
    """

    conditions: str
    trials: int
    seconds: float | None
    peak_bytes: float | None


@dataclass(frozen=True)
class _SavedTree:
    """What :meth:`CohortTree.to_json` writes."""

    trials: Annotated[list[_SavedTrial], Meta(max_length=MOST_TRIALS)]
    until_search: Annotated[int, Meta(ge=1, le=MOST_TRIALS)]
    tree: _SavedNode


@dataclass(slots=True)
class CohortTree:
    """The cohorts of one profile key. Pure.

    Example:
        >>> from fluid.measure.cohorts.tree import CohortTree
        >>> tree = CohortTree()
        >>> for number in range(16):
        ...     size, seconds = (32, 1.0) if number % 2 else (256, 8.0)
        ...     changed = tree.learn(f"trial-{number}", (("batch_size", str(size)),), seconds=seconds)
        >>> [(each.conditions, each.trials, each.seconds) for each in tree.cohorts]
        [('batch_size <= 91', 8, 1.0), ('batch_size > 91', 8, 8.0)]
        >>> tree.predict((("batch_size", "512"),)).cohort
        'batch_size > 91'
    """

    _root: CohortNode = field(default_factory=CohortNode)
    #: Trials that were added, or whose figures moved, and how many must be for the next search.
    _learnt: int = 0
    _next: int = 1
    #: Predictions of typical configs when :meth:`learn` last said that they had moved, or when they came in since.
    _told: dict[ConfigTexts, Prediction] = field(default_factory=dict)
    #: Fitted when a prediction is asked for; ``None`` where a fit is due.
    _trends: Trends | None = None
    _fit_next: int = 0
    #: Predictions since the trial that was learnt last.
    _predicted: dict[ConfigTexts, Prediction] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of trials that were measured."""
        return len(self._root.samples)

    def learn(
        self, trial_id: str, config: ConfigTexts, *, seconds: float | None = None, need: MemoryNeed | None = None
    ) -> bool:
        """Adds what was measured of a trial, in place of what was added of it before.

        Args:
            trial_id: the trial.
            config: of the trial.
            seconds: per iteration, alone on a device of speed 1; ``None`` to leave what is known.
            need: its peak memory, in bytes; ``None`` to leave what is known.

        Returns:
            Whether cohorts are others than before, or predictions have moved, so that trials may have to be predicted
            anew.

        Raises:
            InvalidFieldError: ``seconds`` is not a number above 0.
        """
        if seconds is not None:
            seconds = require_number("seconds", seconds, at_least=0.0)
            if seconds == 0.0:
                raise InvalidFieldError("seconds", seconds, "must be above 0")
        if seconds is None and need is None:
            return False
        before = self._root.samples.get(trial_id)
        if before is not None:
            seconds = before.seconds if seconds is None else seconds
            need = before.need if need is None else need
        sample = CohortSample(config, dict(config), seconds, need)
        is_news = before is None or before.config != config or _moved(before, sample)
        outgrown = self._is_outgrown_by(sample)
        self._put(trial_id, sample, before)
        self._learnt += is_news
        if self._learnt < self._next:
            return outgrown
        self._next = _following(self._learnt, len(self._root.samples), GROWTH)
        features = self._features()
        rows = {trial: row for row, trial in enumerate(self._root.samples)}
        merged, parted = self._root.merge(), self._root.grow(features, rows)
        self._fit(features)
        return self._have_moved() or merged or parted or outgrown

    def predict(self, config: ConfigTexts) -> Prediction:
        """What to expect of a trial with this config."""
        found = self._predicted.get(config)
        if found is None:
            if len(self._predicted) >= _MOST_PREDICTED:
                self._predicted.clear()
            found = self._predicted[config] = self._predict(dict(config))
        return found

    def _predict(self, values: Mapping[str, str]) -> Prediction:
        nodes = self._root.of(values)
        trends = self._trends
        if trends is None or self._learnt >= self._fit_next:
            trends = self._fit(self._features())
        log_seconds, sigma = trends.seconds(values, nodes)
        typical, need = trends.memory(values, nodes)
        return Prediction(
            cohort=nodes[-1].conditions,
            seconds=None if math.isnan(log_seconds) else math.exp(log_seconds),
            sigma=0.0 if math.isnan(log_seconds) else sigma,
            need=need,
            typical_bytes=typical,
        )

    def seconds_of(self, cohort: str) -> list[float]:
        """Measured seconds per iteration of the trials of a cohort, oldest first; none if there is no such cohort."""
        return [each.seconds for each in self._node(cohort).samples.values() if each.seconds is not None]

    def need_of(self, cohort: str) -> MemoryNeed | None:
        """The largest measured parts of the memory of a cohort's trials, in bytes, without a margin."""
        return self._node(cohort).largest

    @property
    def cohorts(self) -> list[Cohort]:
        """The leaves, in order of the tree; none before the first trial was measured."""
        leaves = [node for node in self._root.walk() if not node.children]
        return [_cohort(leaf) for leaf in leaves] if self._root.samples else []

    def to_json(self) -> dict[str, object]:
        """The trials and their cohorts, as JSON."""
        # A loaded tree fits its trends to all trials: so does this one from now on, and predicts the same.
        self._trends = None
        self._predicted.clear()
        return {
            "trials": [trial_to_json(*each) for each in self._root.samples.items()],
            "until_search": self._next - self._learnt,
            "tree": node_to_json(self._root),
        }

    @classmethod
    def from_json(cls, where: str, data: object) -> CohortTree:
        """Makes the tree that :meth:`to_json` wrote, with the same cohorts and predictions.

        Args:
            where: the place of ``data`` in the profile, for errors: ``"cohorts['resnet']"``.
            data: decoded JSON.

        Raises:
            InvalidFieldError: something is missing or cannot be used; names the field.
        """
        saved, tree = read_record(data, _SavedTree, where, place=where, others=True), cls()
        saved.tree.part(f"{where}.tree", tree._root, DEEPEST)
        for place, each in enumerate(saved.trials):
            if each.id in tree._root.samples:
                raise InvalidFieldError(f"{where}.trials[{place}].id", each.id, "occurs twice")
            tree._root.put(each.id, each.sample)
        tree._next = saved.until_search
        return tree

    def _fit(self, features: Sequence[Feature]) -> Trends:
        self._trends = Trends(self._root, features)
        self._fit_next = _following(self._learnt, len(self._root.samples), FIT_GROWTH)
        return self._trends

    def _features(self) -> list[Feature]:
        return features_of([sample.values for sample in self._root.samples.values()])

    def _node(self, cohort: str) -> CohortNode:
        """The node with these conditions; one without trials if there is none."""
        return next((node for node in self._root.walk() if node.conditions == cohort), CohortNode())

    def _put(self, trial_id: str, sample: CohortSample, before: CohortSample | None) -> None:
        if before is not None:
            self._root.drop(trial_id)
        elif len(self._root.samples) == MOST_TRIALS:
            self._root.drop(self._dispensable())
        self._root.put(trial_id, sample)
        self._predicted.clear()

    def _dispensable(self) -> str:
        """A trial of the largest cohort, as if at random.

        The longest trials start first: the oldest one would be the only one of its size. Those that a split cannot
        decide are together like a cohort: if they were never dropped, they would come to take all places.
        """
        crowded = max(self._root.walk(), key=CohortNode.number_ending_here).ending_here()
        return crowded[self._learnt * _SCATTER % len(crowded)]

    def _is_outgrown_by(self, sample: CohortSample) -> bool:
        """Whether a trial needs more memory than is reserved for its cohort, so that reservations must grow."""
        if sample.need is None or not self._root.samples:
            return False
        largest = self._root.of(sample.values)[-1].largest
        return largest is None or sample.need.peak_bytes > MARGIN * largest.peak_bytes

    def _have_moved(self) -> bool:
        """Whether predictions of some typical configs are others than when they were told last."""
        now = {config: self.predict(config) for config in self._told}
        moved = sum(_differs(each, now[config]) for config, each in self._told.items())
        is_news = not self._told or moved > _MOVED_CONFIGS * len(now)
        configs = list(dict.fromkeys(sample.config for sample in self._root.samples.values()))
        typical = configs[:: 1 + len(configs) // _MOST_TYPICAL]
        if is_news:
            self._told = {}
        for config in typical:
            if len(self._told) < _MOST_TYPICAL:
                self._told.setdefault(config, self.predict(config))
        return is_news


def _following(learnt: int, trials: int, growth: float) -> int:
    """How many trials must have been learnt until their number has grown by that share."""
    return learnt + 1 + int(growth * trials)


def _cohort(leaf: CohortNode) -> Cohort:
    samples = leaf.samples.values()
    seconds = [each.seconds for each in samples if each.seconds is not None]
    return Cohort(
        conditions=leaf.conditions,
        trials=len(samples),
        seconds=statistics.median(seconds) if seconds else None,
        peak_bytes=max((each.need.peak_bytes for each in samples if each.need is not None), default=None),
    )


def _moved(before: CohortSample, now: CohortSample) -> bool:
    """Whether what is known of a trial is others than before, or differs by more than ``MOVED``."""
    pairs = zip(before.logarithms, now.logarithms, strict=True)
    return any(math.isnan(one) != math.isnan(other) or abs(one - other) > MOVED for one, other in pairs)


def _differs(one: Prediction, other: Prediction) -> bool:
    pairs = [(one.seconds, other.seconds), (one.typical_bytes, other.typical_bytes)]
    return any(_apart(first, second) for first, second in pairs)


def _apart(one: float | None, other: float | None) -> bool:
    if not one or not other:  # Unknown, or 0 bytes.
        return one != other
    return abs(math.log(one / other)) > MOVED
