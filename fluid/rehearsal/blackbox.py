"""Tables of Syne Tune's blackbox repository: recorded trials of many configs, with all their iterations.

A table is a folder with ``configspace.json``, ``hyperparameters.parquet`` (a row for each config),
``objectives_evaluations.npy`` (float32, of shape tasks x configs x seeds x iterations x objectives),
``fidelities_values.npy`` (the values of the fidelity, by iteration) and ``metadata.json`` (names of tasks and
objectives). Where each task has configs of its own, the names of all but the first and the last begin with the task's
and a hyphen, and the last but one is named ``TASK-fidelity_values.npy``.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fluid._imports import try_import
from fluid.directions import require_mode
from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.rehearsal.benchmark import Benchmark, Curve, ValueRange
from fluid.rehearsal.replayable import ReplayedIteration
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.user_values import is_equal_value

with try_import("pyarrow", extra="rehearsal") as _pyarrow:
    import pyarrow.parquet

#: Least seconds of an iteration.
_LEAST_S = 1e-3
#: Files of a table.
_SPACE, _METADATA = "configspace.json", "metadata.json"
#: Names of the objective that is the time of all iterations so far, without their prefix; and of one iteration alone.
_ELAPSED, _ONE = ("elapsed_time",), ("runtime", "time_this_resource", "train_time")
#: Parts of names of objectives by which the one to optimize is chosen, the first that one has.
_PREFERRED = ("valid_error", "validation_error", "val_error", "valid_loss", "val_loss", "val_accuracy", "valid", "val")


class BlackboxBenchmark(Benchmark):
    """One task of a table of Syne Tune's blackbox repository.

    A config that the table does not have is replayed as the nearest one: each hyperparameter counts as much as its
    share of its range, on a logarithmic scale where its domain is, and another category counts 1. A warning says so
    once, and the spread of its iterations is half the range of the metric between its two nearest configs.

    Args:
        folder: the table's.
        task: the task's name.
        metric: the objective to optimize; ``None`` for what ``metadata.json`` says, else for one that is named as a
            validation error, loss or accuracy, else the first.
        mode: ``"min"`` or ``"max"``; ``None`` for what ``metadata.json`` says, else for what the
            metric's name does.
        elapsed: the objective with the seconds of all iterations so far; ``None`` for what ``metadata.json`` says, else
            the one that is named so, or the seconds of an iteration.
        seed: which of the recorded repetitions is replayed.

    Attributes:
        configs: the table's, by row.
        seeds: how many repetitions of each are recorded.

    Raises:
        InvalidFieldError: a file is missing, or is something else, or there is no such task, metric or seed.
        MissingDependencyError: pyarrow is not installed.
    """

    def __init__(
        self,
        folder: Path,
        task: str,
        *,
        metric: str | None = None,
        mode: str | None = None,
        elapsed: str | None = None,
        seed: int = 0,
    ) -> None:
        _pyarrow.check()
        facts = _metadata(folder)
        tasks, names = tasks_of_table(folder), [str(name) for name in facts["objectives_names"]]
        if task not in tasks:
            raise InvalidFieldError("task", task, f"must be one of {', '.join(tasks)}")
        own = (folder / f"{task}-hyperparameters.parquet").is_file()
        prefix = f"{task}-" if own else ""
        values = _array(folder, f"{prefix}objectives_evaluations.npy")
        if not own:
            values = values[tasks.index(task)] if values.ndim == 5 and len(values) == len(tasks) else values
        if values.ndim != 4 or values.shape[3] != len(names):
            reason = (
                f"{prefix}objectives_evaluations.npy has shape {values.shape}: is no table of {len(names)} objectives"
            )
            raise InvalidFieldError("data", str(folder), reason)
        self.seeds = values.shape[1]
        if require_integer("seed", seed, at_least=0) >= self.seeds:
            raise InvalidFieldError("seed", seed, f"must be below {self.seeds}: so many repetitions are recorded")
        self._values = values[:, seed]
        self._names = names
        metric = require_one_of("metric", metric or _metric(facts, names), names)
        mode = require_mode(metric, mode or facts.get("metric_mode") or facts.get("mode"))
        space = {name: _domain(name, one) for name, one in _json(folder, _SPACE).items()}
        self.configs = _configs(folder / f"{prefix}hyperparameters.parquet", space)
        if len(self.configs) != len(values):
            raise InvalidFieldError(
                "data", str(folder), f"has {len(self.configs)} configs, and values of {len(values)}"
            )
        fidelity = f"{task}-fidelity_values.npy" if own else "fidelities_values.npy"
        steps = _array(folder, fidelity) if (folder / fidelity).is_file() else np.arange(1, values.shape[2] + 1)
        if len(steps) != values.shape[2] or np.any(np.diff(steps) <= 0):
            raise InvalidFieldError("data", str(folder), f"{fidelity} must hold the value of each iteration, rising")
        #: The values of the fidelity, by iteration.
        self.fidelity = tuple(float(step) for step in steps)
        super().__init__(f"blackbox:{folder.name}:{task}", space, metric, mode, len(steps))
        self._seconds = _seconds(self._values, names, elapsed or facts.get("elapsed_time_attr"), str(folder))
        self._rows = {self._key(config): row for row, config in enumerate(self.configs)}
        self._points = np.array([self._point(config) for config in self.configs])
        self._categories = np.array([isinstance(domain, Choice) and not _numeric(domain) for domain in space.values()])
        #: The nearest row of each config that the table lacks, and half the range between its two nearest ones.
        self._nearest: dict[Any, tuple[int, float]] = {}

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """What was recorded of each trial."""
        return [self._recorded(each.config, each.iterations) for each in curves]

    def describe(self) -> list[str]:
        """What the benchmark is."""
        return [
            f"The trials are those of the table {self.name}: metrics and seconds per iteration were recorded of "
            f"{len(self.configs)} configs. A config that it lacks is replayed as the nearest one that it has."
        ]

    @cached_property
    def known(self) -> ValueRange:
        """The best value of the table, and the worst of its configs' last iterations."""
        values = np.asarray(self._values[:, :, self._names.index(self.metric)], float)
        ends = [end for end in map(_last_sound, values) if not math.isnan(end)]
        if not ends:
            raise InvalidFieldError("benchmark", self.name, f"has no value of {self.metric!r}")
        sound = values[np.isfinite(values)]
        if self.mode == "min":
            return ValueRange(float(sound.min()), max(ends))
        return ValueRange(float(sound.max()), min(ends))

    def _recorded(self, config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        key = self._key(config)
        row, spread = self._rows.get(key), 0.0
        if row is None:
            row, spread = self._near(key, config)
        played = []
        for index in range(iterations.start - 1, min(iterations.stop - 1, self.max_iterations)):
            found = self._values[row, index].tolist()
            if any(math.isnan(value) for value in found):
                if all(math.isnan(value) for value in found):
                    break  # The trial ended here.
                metrics = {name: value for name, value in zip(self._names, found, strict=True) if not math.isnan(value)}
            else:
                metrics = dict(zip(self._names, found, strict=True))
            played.append(ReplayedIteration(metrics, float(self._seconds[row, index]), spread=spread))
        return played

    def _near(self, key: Any, config: Mapping[str, Any]) -> tuple[int, float]:
        found = self._nearest.get(key)
        if found is not None:
            return found
        if not self._nearest:
            reason = f"{self.name} lacks a config that is asked for: it is replayed as the nearest one that it has"
            warnings.warn(reason, stacklevel=4)
        apart = np.abs(self._points - self._point(config))
        apart[:, self._categories] = apart[:, self._categories] > 0
        order = np.argsort((apart**2).sum(axis=1), kind="stable")[:2]
        column = self._names.index(self.metric)
        ends = [_last_sound(self._values[row, :, column]) for row in order]
        spread = (max(ends) - min(ends)) / 2 if all(math.isfinite(end) for end in ends) else 0.0
        return self._nearest.setdefault(key, (int(order[0]), spread))

    def _key(self, config: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            return tuple(_plain(config[name]) for name in self.space)
        except KeyError as error:
            raise InvalidFieldError("config", dict(config), f"lacks {error}") from error

    def _point(self, config: Mapping[str, Any]) -> list[float]:
        """A config as numbers: shares of ranges, and numbers of categories."""
        return [_share(name, domain, config[name]) for name, domain in self.space.items()]


def tasks_of_table(folder: Path) -> list[str]:
    """The tasks of a table.

    Args:
        folder: the table's.

    Raises:
        InvalidFieldError: it is no table.
    """
    return [str(name) for name in _metadata(folder)["task_names"]]


def _metadata(folder: Path) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = _json(folder, _METADATA)
    for name in ("task_names", "objectives_names"):
        if not isinstance(facts, Mapping) or not isinstance(facts.get(name), list) or not facts[name]:
            raise InvalidFieldError("data", str(folder), f"is no table of Syne Tune: {_METADATA} has no list {name}")
    return facts


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFieldError("data", str(folder), f"has no readable {name} of Syne Tune: {error}") from error


def _array(folder: Path, name: str) -> Any:
    try:
        return np.load(folder / name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidFieldError("data", str(folder), f"has no readable {name} of Syne Tune: {error}") from error


def _configs(path: Path, space: Mapping[str, Domain]) -> list[dict[str, Any]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidFieldError("data", str(path.parent), f"has no readable {path.name}: {error}") from error
    lacking = [name for name in space if name not in table.column_names]
    if lacking:
        raise InvalidFieldError("data", str(path.parent), f"{path.name} lacks {', '.join(lacking)}")
    columns = [table.column(name).to_pylist() for name in space]
    return [dict(zip(space, row, strict=True)) for row in zip(*columns, strict=True)]


def _seconds(values: Any, names: Sequence[str], elapsed: str | None, folder: str) -> Any:
    """Seconds of each iteration of each config."""
    if elapsed is not None:
        require_one_of("elapsed", elapsed, names)
    short = [name.removeprefix("metric_") for name in names]
    column = names.index(elapsed) if elapsed is not None else _first(short, _ELAPSED)
    if column is not None:
        so_far = np.maximum.accumulate(np.nan_to_num(np.asarray(values[:, :, column], float)), axis=1)
        return np.maximum(np.diff(so_far, axis=1, prepend=0.0), _LEAST_S)
    column = _first(short, _ONE)
    if column is None:
        reason = (
            f"has no objective with the seconds of all iterations so far among {', '.join(names)}: name it, elapsed="
        )
        raise InvalidFieldError("data", folder, reason)
    return np.maximum(np.nan_to_num(np.asarray(values[:, :, column], float)), _LEAST_S)


def _first(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _metric(facts: Mapping[str, Any], names: Sequence[str]) -> str:
    said = facts.get("default_metric")
    if isinstance(said, str):
        return said
    times = [name for name in names if name.removeprefix("metric_") in (*_ELAPSED, *_ONE)]
    rest = [name for name in names if name not in times] or list(names)
    return next((name for part in _PREFERRED for name in rest if part in name), rest[0])


def _domain(name: str, one: Any) -> Domain:
    """The domain of a hyperparameter; a value that is no domain is a constant."""
    if not isinstance(one, Mapping) or "domain_cls" not in one:
        return Choice((one,))
    kind, given = one["domain_cls"], one.get("domain_kwargs", {})
    log = "log" in str(one.get("sampler_cls", "")).lower()
    try:
        if kind == "Float":
            return FloatRange(float(given["lower"]), float(given["upper"]), log=log)
        if kind == "Integer":
            return IntRange(int(given["lower"]), int(given["upper"]), log=log)
        if kind == "FiniteRange":
            return Choice(tuple(_finite(given)))
        if "categories" in given:  # Categorical, Ordinal and what derives from it.
            return Choice(tuple(given["categories"]))
    except (KeyError, TypeError) as error:
        raise InvalidFieldError(name, dict(one), f"is no domain of Syne Tune: {error!r}") from error
    raise InvalidFieldError(name, kind, "is of a kind of domain that Fluid does not know")


def _finite(given: Mapping[str, Any]) -> list[float | int]:
    size, low, high = int(given["size"]), float(given["lower"]), float(given["upper"])
    if given.get("log_scale"):
        found = np.exp(np.linspace(math.log(low), math.log(high), size))
    else:
        found = np.linspace(low, high, size)
    inside = np.clip(found, low, high).tolist()
    return [round(value) for value in inside] if given.get("cast_int") else inside


def _plain(value: Any) -> Any:
    """A value as a key: numbers that were stored with other precisions are one."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value if not isinstance(value, list) else tuple(value)


def _numeric(domain: Choice) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in domain.choices)


def _share(name: str, domain: Domain, value: Any) -> float:
    """Where a value lies in its domain, 0 to 1; the number of a category."""
    if isinstance(domain, Choice) and not _numeric(domain):
        found = (index for index, one in enumerate(domain.choices) if is_equal_value(_plain(one), _plain(value)))
        return float(next(found, -1))
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(name, value, "must be a number") from error
    if isinstance(domain, Choice):  # By rank: the steps of a list of numbers are as wide as one another.
        ranked = sorted(float(one) for one in domain.choices)
        return float(np.interp(number, ranked, np.linspace(0.0, 1.0, len(ranked))))
    assert isinstance(domain, FloatRange | IntRange)
    low, high = float(domain.low), float(domain.high)
    if low >= high:
        return 0.0
    if domain.log:
        return (math.log(max(number, 1e-300)) - math.log(low)) / (math.log(high) - math.log(low))
    return (number - low) / (high - low)


def _last_sound(values: Any) -> float:
    sound = [float(value) for value in values if math.isfinite(value)]
    return sound[-1] if sound else math.nan
