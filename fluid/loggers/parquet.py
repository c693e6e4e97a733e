"""Parquet: the tables of :mod:`fluid.loggers.tables`, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fluid._imports import try_import
from fluid.loggers.tables import ITERATION, LAST, TRIAL, Row, Tables, ordered
from fluid.loggers.values import is_float

with try_import("pyarrow", extra="parquet") as _imports:
    import pyarrow
    import pyarrow.parquet


class Parquet(Tables):
    """Writes ``trials.parquet``, with a row per trial, and ``iterations.parquet``, with a row per iteration.

    The columns are those of :meth:`fluid.SweepResult.dataframe`. A column of values of several kinds is text. The files
    are replaced every few seconds while trials run, as a whole, so that they can be read at any time.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.loggers import Parquet
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0, loggers=[Parquet("tables")]) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")], name="sweep")
        ...     ended = executor.submit_trialgroup(group).wait()
        >>> import pandas
        >>> table = pandas.read_parquet("tables/trials.parquet")
        >>> table[["trial", "state", "config/lr", "metrics/loss"]].values.tolist()
        [['a', 'DONE', 0.5, 0.25]]

    Args:
        folder: where the tables go; of one session only. ``None``, the default, for ``parquet`` in the run folder.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """

    _suffix = "parquet"

    def __init__(self, folder: str | Path | None = None) -> None:
        _imports.check()
        super().__init__(folder)
        #: All iterations that were written.
        self._table: Any = None

    def _write(self) -> None:
        rows, self._iterations = self._iterations, []
        if rows:
            fresh = _table(rows, ordered(rows, ITERATION))
            self._table = fresh if self._table is None else _concatenated(self._table, fresh)
            self._store("iterations.parquet", self._table.select(ordered([*_names(self._table)], ITERATION)))
        trials = list(self._trials.values())
        if trials:
            self._store("trials.parquet", _table(trials, ordered(trials, TRIAL, LAST)))

    def _store(self, name: str, table: Any) -> None:
        with self._files.replacing(self._folder / name) as draft:
            pyarrow.parquet.write_table(table, draft)


def _names(table: Any) -> Iterable[Mapping[str, Any]]:
    return [dict.fromkeys(table.column_names)]


def _table(rows: list[Row], columns: list[str]) -> Any:
    return pyarrow.table({name: _column([row.get(name) for row in rows]) for name in columns})


def _column(values: list[Any]) -> Any:
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {int, float} and all(value is None or is_float(value) for value in values):
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1 or any(isinstance(value, int) and abs(value) >= 1 << 63 for value in values):
        values = _as_text(values)
    return pyarrow.array(values)


def _as_text(values: Iterable[Any]) -> list[str | None]:
    return [None if value is None else value if isinstance(value, str) else str(value) for value in values]


def _concatenated(table: Any, fresh: Any) -> Any:
    """Appends rows; a column whose kind has changed becomes text, unless both are numbers."""
    try:
        return pyarrow.concat_tables([table, fresh], promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        shared = [name for name in table.column_names if name in fresh.column_names]
        for name in shared:
            if table.schema.field(name).type != fresh.schema.field(name).type:
                table, fresh = (_with_text(one, name) for one in (table, fresh))
        return pyarrow.concat_tables([table, fresh], promote_options="permissive")


def _with_text(table: Any, name: str) -> Any:
    position = table.column_names.index(name)
    return table.set_column(position, name, pyarrow.array(_as_text(table.column(name).to_pylist()), pyarrow.string()))
