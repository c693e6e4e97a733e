"""The description of something to tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from models.data import DataSet
from tuning.scales import SCALES, Scale


class Workload(NamedTuple):
    """Something to tune. A new sweep is one of these, as in ``cifar10.py``, and a row in the table of scales.

    Attributes:
        name: the row of the table of scales.
        title: for people.
        trainable: an elastic trainable of :mod:`models`.
        data: the data set it learns from.
        metric: the metric to optimize.
        mode: ``"max"`` or ``"min"``.
        space: the hyperparameters, domains of Ray Tune; the more important ones first.
        changing: those that population based training may change while a trial trains.
        prepare: makes what the trials need besides the data, from its folder; the result is added to their ``fixed``.
    """

    name: str
    title: str
    trainable: type
    data: DataSet
    metric: str
    mode: str
    space: Mapping[str, Any]
    changing: tuple[str, ...]
    prepare: Callable[[str], dict[str, Any]] = lambda folder: {}

    def scale(self, name: str) -> Scale:
        """Returns the size of a scale."""
        return SCALES[self.name][name]

    def is_better(self, value: float, other: float) -> bool:
        """Whether one value of the metric is better than another one."""
        return value > other if self.mode == "max" else value < other
