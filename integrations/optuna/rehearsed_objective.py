"""A plain objective in a rehearsal: it says apart from its training what it suggests, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluid.backends.base import Backend
from fluid.errors import InvalidFieldError, require_integer
from fluid.integrations.optuna.objective import VALUE, VALUES
from fluid.integrations.optuna.work import ObjectiveWork, ReportedMetrics, TrainableWork, Work
from fluid.results.records import Result

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial


def rehearsed(work: Work, trainable: Any, study: Study, backend: Backend) -> Work:
    """Returns what the trials of a study do in a rehearsal.

    Args:
        work: what they run for real.
        trainable: what the user passed.
        study: the study.
        backend: replays the trials.

    Raises:
        InvalidFieldError: they cannot be replayed.
    """
    if not isinstance(work, ObjectiveWork):
        backend.require_replayable(work.trainable)
        return work
    suggest = getattr(trainable, "suggest", None)
    if not callable(suggest):
        reason = (
            "suggests while it trains, and so cannot be rehearsed: give it suggest(trial), which returns the config,"
            " and replay(config, iterations), as attributes or methods, or pass a trainable with space="
        )
        raise InvalidFieldError("trainable", trainable, reason)
    backend.require_replayable(trainable)
    several = len(study.directions)
    return RehearsedObjective(
        trainable=trainable,
        space=suggest,
        metrics=(VALUE,) if several == 1 else tuple(f"{VALUES}_{index}" for index in range(several)),
        budget=require_integer("trainable.budget", getattr(trainable, "budget", 1), at_least=1),
    )


@dataclass(kw_only=True)
class RehearsedObjective(TrainableWork):
    """A plain objective that is replayed: an iteration is what comes before one report."""

    def outcome(self) -> ReportedMetrics:
        """Makes what takes the results of one trial."""
        return ReplayedReports(self.metrics, self.budget)


class ReplayedReports(ReportedMetrics):
    """What a replayed objective reports. The pruner is asked after each report, as objectives ask it.

    Args:
        metrics: names of its values.
        budget: how many iterations it has; one of a single iteration reports nothing before it returns.
    """

    def __init__(self, metrics: tuple[str, ...], budget: int) -> None:
        super().__init__(metrics, budget + 1)
        self._reports = budget > 1

    def record(self, trial: Trial, result: Result) -> bool:
        """Takes what it reports, or returns."""
        told: Any = trial if self._reports else _Silent()
        return super().record(told, result)


class _Silent:
    """In place of a trial that is not told of values before its end."""

    def report(self, value: float, step: int) -> None:
        """Does nothing."""

    def should_prune(self) -> bool:
        """Never."""
        return False
