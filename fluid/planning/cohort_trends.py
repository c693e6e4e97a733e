"""What the trends of seconds and bytes predict for a config, beside the medians and the largest needs of its cohort."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fluid.planning.cohort_features import Feature
from fluid.planning.cohort_nodes import CohortNode, wide_for_few
from fluid.planning.cohort_trend import Trend, fit_trend, robust_deviation, table_of
from fluid.planning.runtime_model import FloatArray
from fluid.resources import MemoryNeed

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
        self._negated, self._errors = -fitted[order], errors[order]
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
