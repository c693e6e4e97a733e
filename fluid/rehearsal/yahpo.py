"""Surrogates of YAHPO Gym: a network in ONNX tells what a trial of any config does.

A scenario is a folder with ``config_space.json``, ``encoding.json`` and ``model.onnx``. The files do not say in which
order the network takes hyperparameters and gives targets: :mod:`fluid.rehearsal.yahpo` knows that of the
published scenarios, and a file ``scenario.json`` in the folder tells it of others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fluid._imports import try_import
from fluid.directions import mode_word
from fluid.errors import InvalidFieldError, require_one_of
from fluid.rehearsal.benchmark import Benchmark, Curve
from fluid.rehearsal.replayable import ReplayedIteration
from fluid.rehearsal.spaces import read_configspace
from fluid.search.domains import Choice, Domain, FloatRange, IntRange

with try_import("onnxruntime", extra="rehearsal") as _imports:
    import onnxruntime


# -- yahpo scenarios -----------------------------------------------------------------------------
#
# Scenarios of YAHPO Gym: what their networks take and give, in which order.


#: Iterations of a trial whose fidelity is the share of the data.
_SHARES = 20
#: The file that describes a scenario which is not known here.
_FILE = "scenario.json"


@dataclass(frozen=True, kw_only=True)
class YahpoScenario:
    """What the network of a scenario takes and gives.

    Attributes:
        numbers: hyperparameters that it takes as numbers, the fidelity among them, in order.
        categories: those that it takes as categories, the task among them, in order.
        targets: what it gives, in order.
        metric, mode: what is optimized unless said otherwise.
        fidelity: the hyperparameter of which iterations are values.
        time: the target that is the time of all iterations so far.
        seconds: of a unit of it.
        instance: the hyperparameter that names the task; ``None`` if there is one task only.
        memory: the target that is the memory used; ``None`` if there is none.
        memory_unit: bytes of a unit of it: a MiB, which the files do not say.
        at_most: further fidelities, which are held at their greatest value.
    """

    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    targets: tuple[str, ...]
    metric: str
    mode: str
    fidelity: str = "epoch"
    time: str = "time"
    seconds: float = 1.0
    instance: str | None = None
    memory: str | None = None
    memory_unit: float = 2.0**20
    at_most: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", mode_word("mode", self.mode))
        for name, value, known in (
            ("metric", self.metric, self.targets),
            ("time", self.time, self.targets),
            ("fidelity", self.fidelity, self.numbers),
        ):
            require_one_of(name, value, known)
        if self.memory is not None:
            require_one_of("memory", self.memory, self.targets)

    @property
    def inputs(self) -> tuple[str, ...]:
        """All that it takes."""
        return (*self.numbers, *self.categories)

    @property
    def memory_column(self) -> int | None:
        """The column of the memory; ``None`` if there is none."""
        return None if self.memory is None else self.targets.index(self.memory)

    def steps(self, domain: Domain) -> tuple[float, ...]:
        """The values of the fidelity, by iteration.

        Args:
            domain: its domain.

        Raises:
            InvalidFieldError: it is not a range.
        """
        if isinstance(domain, IntRange):
            return tuple(float(value) for value in range(domain.low, domain.high + 1))
        if isinstance(domain, FloatRange):
            least, most = float(domain.low), float(domain.high)
            return tuple(max(least, most * (number + 1) / _SHARES) for number in range(_SHARES))
        raise InvalidFieldError(self.fidelity, domain, "must be a range, as it is the fidelity")


def scenario_of(folder: Path, name: str) -> YahpoScenario:
    """Returns what the network of a scenario takes and gives.

    Args:
        folder: where its files are. A file ``scenario.json`` there has the fields of :class:`YahpoScenario`.
        name: the scenario's.

    Raises:
        InvalidFieldError: it is not known, and there is no such file, or it has other fields.
    """
    path = folder / _FILE
    if path.is_file():
        try:
            content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
            return YahpoScenario(**{**content, **lists})
        except (OSError, ValueError, TypeError) as error:
            raise InvalidFieldError("data", str(path), f"does not describe a scenario: {error}") from error
    known = SCENARIOS.get(name)
    if known is None:
        reason = f"must be one of {', '.join(SCENARIOS)}, or be described by a file {path}"
        raise InvalidFieldError("scenario", name, reason)
    return known


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _of(learner: str, names: str) -> str:
    """Names of a learner's hyperparameters, as the scenarios named super have them."""
    return " ".join(f"{learner}.{name}" for name in names.split())


_XGBOOST = (
    "nrounds eta gamma lambda alpha subsample max_depth min_child_weight "
    "colsample_bytree colsample_bylevel rate_drop skip_drop"
)
#: Hyperparameters of the learners that the scenarios named super choose among: numbers and categories.
_SVM, _GLMNET, _RPART = "cost gamma tolerance degree", "alpha s", "cp maxdepth minbucket minsplit"
_AKNN = "k M ef ef_construction"
_RANGER_RBV2 = "num.trees sample.fraction mtry.power min.node.size num.random.splits"
_RANGER_IAML = "num.trees sample.fraction mtry.ratio min.node.size num.random.splits"
_DARTS = "NetworkSelectorDatasetInfo_COLON_darts_COLON_"
_RBV2_TARGETS = _names("acc bac auc brier f1 logloss timetrain timepredict memory")
_IAML_TARGETS = _names("mmce f1 auc logloss ramtrain rammodel rampredict timetrain timepredict mec ias nf")


def _iaml(numbers: str, categories: str = "") -> YahpoScenario:
    return YahpoScenario(
        numbers=_names(f"{numbers} trainsize"),
        categories=_names(f"task_id {categories}"),
        targets=_IAML_TARGETS,
        metric="auc",
        mode="max",
        fidelity="trainsize",
        time="timetrain",
        instance="task_id",
        memory="ramtrain",
    )


def _rbv2(numbers: str, categories: str = "") -> YahpoScenario:
    return YahpoScenario(
        numbers=_names(f"{numbers} trainsize repl"),
        categories=_names(f"task_id {categories} num.impute.selected.cpo"),
        targets=_RBV2_TARGETS,
        metric="acc",
        mode="max",
        fidelity="trainsize",
        time="timetrain",
        instance="task_id",
        memory="memory",
        at_most=("repl",),
    )


#: The published scenarios whose order of inputs and targets is known.
SCENARIOS: Mapping[str, YahpoScenario] = {
    "lcbench": YahpoScenario(
        numbers=_names("epoch batch_size learning_rate momentum weight_decay num_layers max_units max_dropout"),
        categories=("OpenML_task_id",),
        targets=_names(
            "time val_accuracy val_cross_entropy val_balanced_accuracy test_cross_entropy test_balanced_accuracy"
        ),
        metric="val_accuracy",
        mode="max",
        instance="OpenML_task_id",
    ),
    "nb301": YahpoScenario(
        numbers=("epoch",),
        categories=(
            *(f"{_DARTS}edge_{cell}_{number}" for cell in ("normal", "reduce") for number in range(14)),
            *(f"{_DARTS}inputs_node_{cell}_{number}" for cell in ("normal", "reduce") for number in (3, 4, 5)),
        ),
        targets=("val_accuracy", "runtime"),
        metric="val_accuracy",
        mode="max",
        time="runtime",
    ),
    "iaml_glmnet": _iaml(_GLMNET),
    "iaml_rpart": _iaml(_RPART),
    "iaml_ranger": _iaml(_RANGER_IAML, "replace respect.unordered.factors splitrule"),
    "iaml_xgboost": _iaml(_XGBOOST, "booster"),
    "iaml_super": _iaml(
        " ".join(
            (
                *(_of("ranger", _RANGER_IAML), _of("rpart", _RPART)),
                *(_of("glmnet", _GLMNET), _of("xgboost", _XGBOOST)),
            )
        ),
        "learner ranger.replace ranger.respect.unordered.factors ranger.splitrule xgboost.booster",
    ),
    "rbv2_glmnet": _rbv2(_GLMNET),
    "rbv2_rpart": _rbv2(_RPART),
    "rbv2_ranger": _rbv2(_RANGER_RBV2, "respect.unordered.factors splitrule"),
    "rbv2_svm": _rbv2(_SVM, "kernel"),
    "rbv2_aknn": _rbv2(_AKNN, "distance"),
    "rbv2_xgboost": _rbv2(_XGBOOST, "booster"),
    "rbv2_super": _rbv2(
        " ".join(
            (
                *(_of("svm", _SVM), _of("glmnet", _GLMNET), _of("rpart", _RPART)),
                *(_of("ranger", _RANGER_RBV2), _of("aknn", _AKNN), _of("xgboost", _XGBOOST)),
            )
        ),
        "learner_id svm.kernel ranger.respect.unordered.factors ranger.splitrule aknn.distance xgboost.booster",
    ),
}


# -- yahpo ---------------------------------------------------------------------------------------


#: The task, where a scenario has no hyperparameter that names it.
ONLY_TASK = "only"
#: Least seconds of an iteration: the surrogate's cumulated time may fall a little from one iteration to the next.
LEAST_SECONDS = 1e-3
#: What stands for a category that does not count.
_ABSENT = "#na#"
#: Most configs whose curves are kept.
_KEPT = 50_000
#: Most rows that the network is given at once: about a curve; more take longer per row.
_ROWS = 64


class Network(Protocol):
    """The network of a scenario."""

    def run(self, categories: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Its targets, one row for each row of its inputs.

        Args:
            categories: int32, of shape (rows, categorical hyperparameters).
            numbers: float32, of shape (rows, others).
        """
        ...


class OnnxNetwork:
    """A network that onnxruntime runs, with one thread.

    Args:
        path: of the file.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        InvalidFieldError: the file is no network of YAHPO Gym.
    """

    def __init__(self, path: Path) -> None:
        _imports.check()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # Rows are few: threads only get in the way.
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has errors of its own for each way in which a file can be bad.
            raise InvalidFieldError("model", str(path), f"cannot be read by onnxruntime: {error}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 2:
            raise InvalidFieldError("model", str(path), f"must have two inputs, and has {len(inputs)}")
        self._names = [one.name for one in inputs]

    def run(self, categories: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """See :class:`Network`."""
        output: np.ndarray = self._session.run(None, {self._names[0]: categories, self._names[1]: numbers})[0]
        return output


@dataclass(eq=False)
class _KnownCurve:
    """What is known of one config.

    Attributes:
        categories, numbers: the network's inputs; that of the fidelity is set as it is asked.
        targets: rows of its outputs so far, from the first iteration on.
        seconds: of each of these iterations.
        elapsed: greatest cumulated time so far.
    """

    categories: tuple[int, ...]
    numbers: tuple[float, ...]
    targets: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    elapsed: float = 0.0


class YahpoBenchmark(Benchmark):
    """One task of a scenario of YAHPO Gym.

    The seconds of an iteration are the difference of the surrogate's cumulated time, and at least 0.001. Metrics have
    the names of its targets. Where the fidelity is the share of the data (``trainsize``), a trial has 20 iterations,
    the last of which has all of it; each costs what it adds to the time to train. A number outside of the space, which
    algorithms that perturb configs may ask for, counts as the nearest one inside.

    Args:
        scenario: its name.
        task: the task's, such as ``"189866"``.
        folder: with the scenario's files.
        network: what predicts; ``None`` for the folder's.

    Raises:
        InvalidFieldError: the scenario or the task is unknown, or a file is missing, or is something else.
        MissingDependencyError: onnxruntime is not installed.
    """

    def __init__(self, scenario: str, task: str, folder: Path, *, network: Network | None = None) -> None:
        self._scenario = known = scenario_of(folder, scenario)
        domains, constants, conditions = read_configspace(_json(folder / "config_space.json"))
        self._fixed: dict[str, Any] = dict(constants)
        tasks = tasks_of(scenario, folder)
        if task not in tasks:
            raise InvalidFieldError("task", task, f"must be one of {', '.join(tasks)}")
        if known.instance is not None:
            self._fixed[known.instance] = task
        for held in known.at_most:
            if held in domains:
                self._fixed[held] = _last(domains[held])
        lacking = [each for each in known.inputs if each not in domains and each not in self._fixed]
        if lacking:
            raise InvalidFieldError("config_space.json", str(folder), f"lacks {', '.join(lacking)}")
        left = {*self._fixed, known.fidelity}
        space = {each: domain for each, domain in domains.items() if each not in left}
        #: The values of the fidelity, by iteration.
        self._fidelity = known.steps(domains[known.fidelity])
        counting = [each for each in conditions if each.child in space and each.parent in space]
        name = scenario if known.instance is None else f"{scenario}:{task}"
        if scenario != "lcbench":
            name = f"yahpo:{name}"
        super().__init__(name, space, known.metric, known.mode, len(self._fidelity), counting)
        self._encoding: Mapping[str, Mapping[str, int]] = _json(folder / "encoding.json")
        self._network = network or _network(folder / "model.onnx")
        self._curves: dict[Any, _KnownCurve] = {}

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """What trials do; the model is asked once for all of them."""
        known = [self._curve(each.config) for each in curves]
        missing: dict[int, tuple[_KnownCurve, int]] = {}
        for curve, asked in zip(known, curves, strict=True):
            stop = min(asked.iterations.stop - 1, self.max_iterations)
            if stop > max(len(curve.seconds), missing.get(id(curve), (curve, 0))[1]):
                missing[id(curve)] = (curve, stop)
        if missing:
            self._ask(list(missing.values()))
        return [self._played(curve, each.iterations) for curve, each in zip(known, curves, strict=True)]

    def describe(self) -> list[str]:
        """What the benchmark is."""
        return [
            f"The trials are those of YAHPO Gym's surrogate of {self.name}: metrics and seconds per iteration are "
            "predicted, on the hardware on which the benchmark was recorded."
        ]

    def _curve(self, config: Mapping[str, Any]) -> _KnownCurve:
        counting = self.active(config) if self.conditions else config
        try:
            categories, numbers = self._encode(counting)
        except KeyError as error:
            raise InvalidFieldError("config", dict(config), f"lacks {error}") from error
        curve = self._curves.get((categories, numbers))
        if curve is None:
            if len(self._curves) >= _KEPT:
                self._curves.pop(next(iter(self._curves)))
            curve = self._curves[categories, numbers] = _KnownCurve(categories, numbers)
        return curve

    def _encode(self, config: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The inputs of the network for a config, the fidelity being 0."""
        spec, fixed = self._scenario, self._fixed
        numbers = []
        for name in spec.numbers:
            if name == spec.fidelity:
                numbers.append(0.0)
            elif name in fixed or name in config or not self.conditions:
                numbers.append(float(fixed[name]) if name in fixed else self._number(name, config[name]))
            else:
                numbers.append(0.0)  # It does not count.
        categories = []
        for name in spec.categories:
            present = name in fixed or name in config or not self.conditions
            value = (fixed[name] if name in fixed else config[name]) if present else _ABSENT
            code = self._encoding[name].get(str(value))
            if code is None:
                raise InvalidFieldError(name, value, f"must be one of {sorted(self._encoding[name])}")
            categories.append(code)
        return tuple(categories), tuple(numbers)

    def _number(self, name: str, value: Any) -> float:
        """A value as the network takes it: inside its domain, as the network has learnt nothing outside of it."""
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidFieldError(name, value, "must be a number") from error
        if math.isnan(number):
            raise InvalidFieldError(name, value, "must be a number")
        domain = self.space[name]
        if isinstance(domain, FloatRange | IntRange):
            number = min(max(number, float(domain.low)), float(domain.high))
        return float(round(number)) if isinstance(domain, IntRange) else number

    def _ask(self, batch: Sequence[tuple[_KnownCurve, int]]) -> None:
        """Adds iterations to curves, up to and including a given one."""
        spec = self._scenario
        wanted = [(curve, range(len(curve.seconds), stop)) for curve, stop in batch]
        targets, time = self._predict(wanted).tolist(), spec.targets.index(spec.time)
        at = 0
        for curve, indices in wanted:
            rows = targets[at : at + len(indices)]
            at += len(indices)
            for row in rows:
                elapsed = max(curve.elapsed, row[time] * spec.seconds)
                curve.seconds.append(max(elapsed - curve.elapsed, LEAST_SECONDS))
                curve.elapsed = elapsed
            curve.targets += rows

    def _predict(self, wanted: Sequence[tuple[_KnownCurve, range]]) -> np.ndarray:
        """What the network gives for some iterations, counted from 0, of some configs: a row for each."""
        spec = self._scenario
        rows = sum(len(indices) for _, indices in wanted)
        categories = np.empty((rows, len(spec.categories)), np.int32)
        numbers = np.empty((rows, len(spec.numbers)), np.float32)
        column = spec.numbers.index(spec.fidelity)
        at = 0
        for curve, indices in wanted:
            end = at + len(indices)
            categories[at:end], numbers[at:end] = curve.categories, curve.numbers
            numbers[at:end, column] = self._fidelity[indices.start : indices.stop]
            at = end
        parts = [slice(start, start + _ROWS) for start in range(0, rows, _ROWS)]
        targets = np.concatenate([self._network.run(categories[part], numbers[part]) for part in parts])
        if targets.shape != (rows, len(spec.targets)):
            shape = f"outputs of shape {targets.shape}, and not {len(spec.targets)} targets for each of {rows} rows"
            raise InvalidFieldError("model", self.name, f"gives {shape}")
        return targets

    def final_values(self, configs: Sequence[Mapping[str, Any]]) -> list[float]:
        """The metric at the last iteration of each of some configs: a row of the network for each."""
        last = range(self.max_iterations - 1, self.max_iterations)
        encoded = [_KnownCurve(*self._encode(self.active(config))) for config in configs]
        found = self._predict([(curve, last) for curve in encoded])
        values: list[float] = found[:, self._scenario.targets.index(self.metric)].tolist()
        return values

    def _played(self, curve: _KnownCurve, iterations: range) -> list[ReplayedIteration]:
        spec = self._scenario
        played = []
        for index in range(iterations.start - 1, min(iterations.stop - 1, self.max_iterations)):
            row = curve.targets[index]
            memory = None if spec.memory_column is None else max(row[spec.memory_column] * spec.memory_unit, 0.0)
            played.append(ReplayedIteration(dict(zip(spec.targets, row, strict=True)), curve.seconds[index], memory))
        return played


def tasks_of(scenario: str, data: Path) -> list[str]:
    """The tasks of a scenario.

    Args:
        scenario: its name.
        data: the folder with its files, or one with a folder for it.

    Raises:
        InvalidFieldError: the scenario is unknown, or the folder has no such files.
    """
    folder = folder_of_scenario(scenario, data)
    spec = scenario_of(folder, scenario)
    if spec.instance is None:
        return [ONLY_TASK]
    domains, constants, _ = read_configspace(_json(folder / "config_space.json"))
    domain = domains.get(spec.instance)
    if isinstance(domain, Choice):
        return [str(choice) for choice in domain.choices]
    if spec.instance in constants:
        return [str(constants[spec.instance])]
    raise InvalidFieldError("config_space.json", str(folder), f"has no choice of {spec.instance!r}, the task")


def folder_of_scenario(scenario: str, data: Path) -> Path:
    """Where in a folder the files of a scenario are; the folder itself where they are not found."""
    # The folder itself comes last, as it may be another scenario.
    places = (data / scenario, data / "yahpo" / scenario)
    return next((place for place in places if (place / "model.onnx").is_file()), data)


def _last(domain: Domain) -> Any:
    """The greatest value of a fidelity that is held at it."""
    if isinstance(domain, Choice):
        return domain.choices[-1]
    assert isinstance(domain, FloatRange | IntRange)
    return domain.high


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFieldError(
            "data", str(path.parent), f"has no readable {path.name} of YAHPO Gym: {error}"
        ) from error


@lru_cache(maxsize=4)
def _network(path: Path) -> OnnxNetwork:
    """The network of a file, read once for all tasks."""
    if not path.is_file():
        raise InvalidFieldError("data", str(path), "is missing: it is the network of the scenario")
    return OnnxNetwork(path)
