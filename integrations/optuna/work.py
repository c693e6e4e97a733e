"""What a study's trials run: a trainable whose parameters a space suggests, or a plain objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.integrations.optuna.answering import answer
from fluid.integrations.optuna.objective import PRUNED, VALUE, VALUES
from fluid.integrations.optuna.running import Outcome
from fluid.results.records import Result
from fluid.session.listeners import TrialRequest

with try_import("Optuna", extra="optuna"):
    from optuna import TrialPruned

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

Space = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]


class Work(Protocol):
    """What the trials of one call of :func:`fluid.integrations.optuna.optimize` run.

    Attributes:
        trainable: what Fluid runs.
        budget: iterations of a trial.
        metrics: names of the metrics in its results that are optimized; of an objective's value, if there is one.
        stops_at_once: whether a trial that the study is done with is ended in the middle of an iteration.
        configures: whether a trial's parameters are its config; if not, they are suggested while it runs.
    """

    trainable: Any
    budget: int
    metrics: tuple[str, ...]
    stops_at_once: bool
    configures: bool

    def ask(self, study: Study) -> Trial:
        """Asks the study for a trial."""
        ...

    def config(self, trial: Trial) -> Mapping[str, Any]:
        """Returns the config of Fluid's trial; what it raises is the trial's error."""
        ...

    def outcome(self) -> Outcome:
        """Makes what takes the results of one trial."""
        ...

    def answer(self, request: TrialRequest, study: Study, trial: Trial) -> None:
        """Answers a request of a trial that runs."""
        ...


@dataclass(kw_only=True)
class TrainableWork:
    """A trainable, whose config a space suggests before it starts.

    Attributes:
        space: distributions by name, or a function of a trial.
        metrics: names of the metrics to optimize, one per objective.
    """

    trainable: Any
    space: Space
    metrics: tuple[str, ...]
    budget: int
    stops_at_once: bool = False
    configures: bool = True

    def ask(self, study: Study) -> Trial:
        """Asks the study for a trial, with its parameters if the space is fixed."""
        return study.ask() if callable(self.space) else study.ask(self.space)

    def config(self, trial: Trial) -> Mapping[str, Any]:
        """Returns what the space suggests."""
        if not callable(self.space):
            return dict(trial.params)
        returned = self.space(trial)
        if not isinstance(returned, Mapping):
            raise InvalidFieldError("space", returned, "must return the config, a dict")
        return returned

    def outcome(self) -> Outcome:
        """Makes what takes the results of one trial."""
        return ReportedMetrics(self.metrics, self.budget)

    def answer(self, request: TrialRequest, study: Study, trial: Trial) -> None:
        """Answers a trainable that refers to the study."""
        answer(request, study, trial)


@dataclass(kw_only=True)
class ObjectiveWork:
    """A plain objective, as a trainable of one iteration."""

    trainable: Any
    budget: int = 1
    metrics: tuple[str, ...] = (VALUE,)
    stops_at_once: bool = True
    configures: bool = False

    def ask(self, study: Study) -> Trial:
        """Asks the study for a trial; its parameters are suggested while it runs."""
        return study.ask()

    def config(self, trial: Trial) -> Mapping[str, Any]:
        """Returns what the lane is to know of the trial."""
        return {"number": trial.number, "storage_id": trial._trial_id}

    def outcome(self) -> Outcome:
        """Makes what takes the result of one trial."""
        return ReturnedValues()

    def answer(self, request: TrialRequest, study: Study, trial: Trial) -> None:
        """Does what the objective asks for."""
        answer(request, study, trial)


class ReportedMetrics:
    """The latest value of each metric, reported to the study as they come.

    Args:
        metrics: names of the metrics to optimize.
        budget: iterations of the trial; the pruner is not asked after the last, when there is nothing left to save.
    """

    def __init__(self, metrics: tuple[str, ...], budget: int) -> None:
        self._metrics = metrics
        self._budget = budget
        self._values: dict[str, float] = {}
        #: Names of all metrics that it reported, for the error that names a missing one.
        self._names: set[str] = set()

    def record(self, trial: Trial, result: Result) -> bool:
        """Reports a result to the study, and asks the pruner; an iteration may leave metrics out, or report None."""
        metrics = result.metrics
        self._names.update(metrics)
        fresh = {name: float(metrics[name]) for name in self._metrics if metrics.get(name) is not None}
        self._values.update(fresh)
        if not fresh or len(self._metrics) > 1:  # Optuna prunes for one objective only.
            return False
        trial.report(self._values[self._metrics[0]], result.iteration - 1)  # Pruners count from 0.
        return result.iteration < self._budget and bool(trial.should_prune())

    def require_complete(self, trial: Trial) -> None:
        """Checks that each metric was reported."""
        if len(self._values) < len(self._metrics):
            missing = next(name for name in self._metrics if name not in self._values)
            reported = ", ".join(sorted(map(str, self._names))) or "nothing"
            raise InvalidFieldError(
                "metric", missing, f"is not among the metrics that trial {trial.number} reported: {reported}"
            )

    @property
    def values(self) -> list[float]:
        """The latest value of each metric."""
        return [self._values[name] for name in self._metrics]


class ReturnedValues:
    """What an objective returned."""

    def __init__(self) -> None:
        self.values: Any = None

    def record(self, trial: Trial, result: Result) -> bool:
        """Takes what the objective returned, or that it was pruned."""
        if PRUNED in result.metrics:
            raise TrialPruned(result.metrics[PRUNED])
        self.values = result.metrics[VALUES] if VALUES in result.metrics else result.metrics[VALUE]
        return False

    def require_complete(self, trial: Trial) -> None:
        """Checks nothing: what cannot be a value is told as in ``study.optimize``."""
