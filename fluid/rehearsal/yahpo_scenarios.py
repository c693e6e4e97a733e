"""Scenarios of YAHPO Gym: what their networks take and give, in which order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError, require_one_of
from fluid.search.domains import Domain, FloatRange, IntRange

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
        require_one_of("mode", self.mode, ("min", "max"))
        for field, value, known in (
            ("metric", self.metric, self.targets),
            ("time", self.time, self.targets),
            ("fidelity", self.fidelity, self.numbers),
        ):
            require_one_of(field, value, known)
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
