"""The sets of a sweep: a ``DMatrix`` that lanes get, once per lane."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import xgboost

from fluid.errors import InvalidFieldError
from fluid.integrations.boosting import lane_threads

#: XGBoost writes them to no file.
_NOT_SENT = (xgboost.QuantileDMatrix, xgboost.ExtMemQuantileDMatrix)


class Sets:
    """The sets of a sweep: sent to each host once, and made once in each lane, for all its trials.

    Args:
        dtrain, evals: as :func:`train` takes them.

    Raises:
        InvalidFieldError: a set cannot be sent.
    """

    def __init__(self, dtrain: Any, evals: Any) -> None:
        known: dict[int, _Matrix] = {}
        if not all(isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[1], str) for each in evals):
            raise InvalidFieldError("evals", evals, "must be a list of pairs: a DMatrix, and its name")
        for field, source in (("dtrain", dtrain), *((f"evals[{i}]", each[0]) for i, each in enumerate(evals))):
            known.setdefault(id(source), _Matrix(field, source))
        self._train = known[id(dtrain)]
        self._evals = [(known[id(source)], name) for source, name in evals]

    def matrices(self) -> tuple[Any, list[tuple[Any, str]]]:
        """Returns the set to train on, and the sets to evaluate with their names."""
        return self._train.get(), [(matrix.get(), name) for matrix, name in self._evals]


class _Matrix:
    """A ``DMatrix`` that can be pickled, or a function that returns one.

    Args:
        field: names it in errors.
        source: the one or the other.
    """

    def __init__(self, field: str, source: Any) -> None:
        is_matrix = isinstance(source, xgboost.DMatrix)
        if not is_matrix and not callable(source):
            raise InvalidFieldError(field, source, "must be a DMatrix, or a function that returns one")
        self._make = None if is_matrix else source
        self._matrix = source if is_matrix else None
        self._saved = b""
        if isinstance(source, _NOT_SENT):
            reason = "cannot be sent to other processes; give a DMatrix, or a function that returns this one"
            raise InvalidFieldError(field, source, reason)

    def __getstate__(self) -> dict[str, Any]:
        saved = _saved(self._matrix) if self._make is None else b""
        return {"_make": self._make, "_saved": saved, "_matrix": None}

    def get(self) -> Any:
        """Returns the matrix, which is made on the first call."""
        if self._matrix is None:
            self._matrix = _loaded(self._saved) if self._make is None else self._make()
            self._saved = b""
        return self._matrix


def _saved(matrix: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "matrix")
        matrix.save_binary(path)
        return path.read_bytes()


def _loaded(data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "matrix")
        path.write_bytes(data)
        return xgboost.DMatrix(str(path), nthread=lane_threads())
