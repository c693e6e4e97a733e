"""Benchmarks of YAHPO Gym: surrogates, as ONNX files, of recorded hyperparameter searches.

A scenario is a folder with ``model.onnx``, ``config_space.json`` (a ConfigSpace as JSON) and ``encoding.json`` (numbers
of categories). For each point, the model takes a row ``x_cat`` (int32) and a row ``x_cont`` (float32, on natural
scales), and gives a row of targets (Pfisterer et al.: YAHPO Gym, 2022).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.rehearsal.benchmark import Benchmark, Curve
from fluid.rehearsal.replayable import ReplayedIteration
from fluid.search.domains import Choice, Domain, FloatRange, IntRange

with try_import("onnxruntime", extra="rehearsal") as _onnx:
    import onnxruntime

#: Least seconds of an iteration: the surrogate's cumulated time now and then falls.
_LEAST_S = 1e-3
#: Rows of one call of the model: about a curve; more take longer per row.
_ROWS = 64


@dataclass(frozen=True)
class YahpoScenario:
    """What the files of a scenario do not say.

    Attributes:
        task: the hyperparameter that stands for the task.
        fidelity: the one that counts iterations.
        targets: the model's, in order.
        time: the target with the seconds of all iterations so far.
        metric: the target to optimize by default.
        mode: ``"min"`` or ``"max"``.
        columns: the hyperparameters that are numbers, in the order in which the model takes them.
        memory: the target with the memory, MiB; ``None`` if there is none.
    """

    task: str
    fidelity: str
    targets: tuple[str, ...]
    time: str
    metric: str
    mode: str
    columns: tuple[str, ...]
    memory: str | None = None


SCENARIOS = {
    "lcbench": YahpoScenario(
        task="OpenML_task_id",
        fidelity="epoch",
        targets=(
            "time",
            "val_accuracy",
            "val_cross_entropy",
            "val_balanced_accuracy",
            "test_cross_entropy",
            "test_balanced_accuracy",
        ),
        time="time",
        metric="val_accuracy",
        mode="max",
        columns=(
            "epoch",
            "batch_size",
            "learning_rate",
            "momentum",
            "weight_decay",
            "num_layers",
            "max_units",
            "max_dropout",
        ),
    )
}


class YahpoBenchmark(Benchmark):
    """One task of a scenario.

    Args:
        scenario: its name.
        task: the task, such as ``"189866"``.
        folder: with the scenario's files.

    Raises:
        InvalidFieldError: the scenario or the task is unknown, or the folder has no such files.
        MissingDependencyError: onnxruntime is not installed.
    """

    def __init__(self, scenario: str, task: str, folder: Path) -> None:
        _onnx.check()
        if scenario not in SCENARIOS:
            raise InvalidFieldError("scenario", scenario, f"must be one of {', '.join(SCENARIOS)}")
        self._scenario = known = SCENARIOS[scenario]
        parts = _read(folder, "config_space.json")["hyperparameters"]
        encoding = _read(folder, "encoding.json")
        tasks: list[str] = next((part["choices"] for part in parts if part["name"] == known.task), [])
        if task not in tasks:
            raise InvalidFieldError("task", task, f"must be one of {', '.join(sorted(tasks, key=int))}")
        fidelity = next(part for part in parts if part["name"] == known.fidelity)
        space = {part["name"]: _domain(part) for part in parts if part["name"] not in (known.task, known.fidelity)}
        super().__init__(f"{scenario}:{task}", space, known.metric, known.mode, int(fidelity["upper"]))
        self._task = encoding[known.task][task]
        #: Of the hyperparameters, and of the fidelity, in a row of what the model takes.
        self._columns = {name: column for column, name in enumerate(known.columns)}
        self._session = _open(folder / "model.onnx")

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """What trials do; the model is asked once for all of them."""
        wanted = [
            range(curve.iterations.start, min(curve.iterations.stop, self.max_iterations + 1)) for curve in curves
        ]
        # The iteration before the first one tells the seconds of that.
        asked = [range(max(1, one.start - 1), one.stop) for one in wanted]
        names, columns = list(self.space), [self._columns[name] for name in self.space]
        rows = np.empty((sum(map(len, asked)), len(self._columns)), np.float32)
        start = 0
        for curve, iterations in zip(curves, asked, strict=True):
            stop = start + len(iterations)
            rows[start:stop, self._columns[self._scenario.fidelity]] = iterations
            rows[start:stop, columns] = [float(curve.config[name]) for name in names]
            start = stop
        found = self._predict(rows)
        result: list[Sequence[ReplayedIteration]] = []
        start = 0
        for one, iterations in zip(wanted, asked, strict=True):
            part = found[start : start + len(iterations)]
            start += len(iterations)
            result.append(self._iterations(part, len(iterations) - len(one)))
        return result

    def _iterations(self, found: Any, before: int) -> list[ReplayedIteration]:
        targets, clock = self._scenario.targets, self._scenario.targets.index(self._scenario.time)
        seconds = np.maximum(np.diff(found[:, clock], prepend=0.0), _LEAST_S).tolist()
        return [
            ReplayedIteration(dict(zip(targets, row, strict=True)), taken)
            for row, taken in zip(found.tolist()[before:], seconds[before:], strict=True)
        ]

    def _predict(self, rows: Any) -> Any:
        parts = []
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            given = {"x_cat": np.full((len(part), 1), self._task, np.int32), "x_cont": part}
            parts.append(self._session.run(["output"], given)[0])
        return np.concatenate(parts) if parts else np.empty((0, len(self._scenario.targets)), np.float32)

    def describe(self) -> list[str]:
        """What the benchmark is."""
        return [
            f"The trials are those of YAHPO Gym's surrogate of {self.name}: metrics and seconds per iteration are "
            "predicted, on the hardware on which the benchmark was recorded."
        ]


def tasks_of(scenario: str, data: Path) -> list[str]:
    """The tasks of a scenario.

    Args:
        scenario: its name.
        data: the folder with its files, or one with a folder for it.

    Raises:
        InvalidFieldError: the scenario is unknown, or the folder has no such files.
    """
    if scenario not in SCENARIOS:
        raise InvalidFieldError("scenario", scenario, f"must be one of {', '.join(SCENARIOS)}")
    parts = _read(folder_of_scenario(scenario, data), "config_space.json")["hyperparameters"]
    return [task for part in parts if part["name"] == SCENARIOS[scenario].task for task in part["choices"]]


def folder_of_scenario(scenario: str, data: Path) -> Path:
    """Where in a folder the files of a scenario are; the folder itself where they are not found."""
    places = (data, data / scenario, data / "yahpo" / scenario)
    return next((place for place in places if (place / "model.onnx").is_file()), data)


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFieldError("data", str(folder), f"has no readable {name} of YAHPO Gym: {error}") from error


def _open(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # A rehearsal has a core to itself at best.
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _domain(part: Mapping[str, Any]) -> Domain:
    if part["type"] == "uniform_float":
        return FloatRange(part["lower"], part["upper"], log=part["log"])
    if part["type"] == "uniform_int":
        return IntRange(part["lower"], part["upper"], log=part["log"])
    if part["type"] == "categorical":
        return Choice(tuple(part["choices"]))
    raise InvalidFieldError(part["name"], part["type"], "is a type of hyperparameter that is not known here")
