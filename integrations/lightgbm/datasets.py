"""The sets of a sweep: what a ``Dataset`` of LightGBM is made of, from which lanes make their own."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from fluid.errors import InvalidFieldError

#: What a ``Dataset`` is made of besides its reference.
_PARTS = ("data", "label", "weight", "group", "init_score", "position", "feature_name", "categorical_feature", "params")
#: Names of the number of classes.
_CLASSES = ("num_class", "num_classes")
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

    def modes_said(self, feval: Any, params: Any) -> dict[str, str]:
        """What functions for further metrics say of their direction, by the names of the metrics.

        Each is called once, with constant predictions for the first set to evaluate. One that fails with these says
        nothing.
        """
        parts = next((each for each in self._valid if each is not None), self._train)
        if parts["label"] is None:
            return {}
        rows = len(parts["label"])
        known = {name: parts[name] for name in ("label", "weight", "group", "position")}
        shown = lightgbm.Dataset(np.zeros((rows, 1)), **known, params={"verbosity": -1}, free_raw_data=False)
        given = params if isinstance(params, Mapping) else {}
        classes = next((given[name] for name in _CLASSES if isinstance(given.get(name), int)), 1)
        values = np.full(rows if classes == 1 else (rows, classes), 1.0 / max(2, classes))
        found: dict[str, str] = {}
        for each in feval if isinstance(feval, (list, tuple)) else [feval]:
            with warnings.catch_warnings(), np.errstate(all="ignore"), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                told = each(values.copy(), shown.construct())
                for name, _, more in told if isinstance(told, list) else [told]:
                    found[name] = "max" if more else "min"
        return found


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
