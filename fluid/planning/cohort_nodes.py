"""Nodes of the tree of cohorts: the trials whose configs meet a node's conditions, and what was measured of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fluid.planning.cohort_features import ConfigTexts, Feature
from fluid.planning.cohort_splits import MIN_TRIALS, best_split, overlap
from fluid.planning.cohort_trend import robust_deviation
from fluid.planning.cohort_words import Side, Split, words
from fluid.planning.runtime_model import FloatArray
from fluid.resources import MemoryNeed

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
