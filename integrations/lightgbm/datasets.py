"""The sets of a sweep: what a ``Dataset`` of LightGBM is made of, from which lanes make their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from fluid.errors import InvalidFieldError

#: What a ``Dataset`` is made of besides its reference.
_PARTS = ("data", "label", "weight", "group", "init_score", "position", "feature_name", "categorical_feature", "params")
#: Most sets of different binning that a lane keeps.
_KEPT = 4


class DatasetSources:
    """The sets of a sweep, sent to each host once; a lane bins them once for all trials that bin them alike.

    Args:
        train_set, valid_sets: as ``lightgbm.train`` takes them.

    Raises:
        InvalidFieldError: a set cannot be sent.
    """

    def __init__(self, train_set: Any, valid_sets: Sequence[Any]) -> None:
        self._train = _parts_of("train_set", train_set)
        #: ``None`` for the set to train on.
        self._valid = [
            None if each is train_set else _parts_of(f"valid_sets[{number}]", each)
            for number, each in enumerate(valid_sets)
        ]
        self._made: OrderedDict[str, tuple[Any, list[Any]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": OrderedDict()}

    def make(self, params: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Makes the set to train on and those to evaluate, new ones."""
        train = _made(self._train, params, None)
        return train, [train if parts is None else _made(parts, params, train) for parts in self._valid]

    def get(self, params: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Returns the sets for parameters, the same ones for all parameters that bin alike."""
        own = lightgbm.Dataset(np.empty((0, 0)), params=dict(params)).get_params()
        key = repr(sorted(own.items()))
        if key not in self._made:
            self._made[key] = self.make(params)
        self._made.move_to_end(key)
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return self._made[key]


def _parts_of(field: str, dataset: Any) -> dict[str, Any]:
    if not isinstance(dataset, lightgbm.Dataset):
        raise InvalidFieldError(field, dataset, "must be a Dataset of LightGBM")
    if dataset.data is None or dataset.used_indices is not None:
        reason = "has no raw data any more; make it with free_raw_data=False, or give one that is not constructed"
        raise InvalidFieldError(field, dataset, reason)
    return {name: getattr(dataset, name) for name in _PARTS}


def _made(parts: Mapping[str, Any], params: Mapping[str, Any], reference: Any) -> Any:
    given = {**(parts["params"] or {}), **params}
    return lightgbm.Dataset(**{**parts, "params": given}, reference=reference, free_raw_data=False)
