"""One trial of a study while Fluid runs it: what it reported and how it ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError
from fluid.integrations.optuna import private_api
from fluid.session.results import Result, TrialFailedError
from fluid.trialgroup import TrialState as FluidTrialState

with try_import("Optuna", extra="optuna"):
    from optuna import TrialPruned
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

_log = logging.getLogger("optuna.fluid")


class RunningTrial:
    """A trial that was asked for and not told yet. It sends heartbeats if the storage has them.

    Args:
        study: the trial's study.
        trial: Optuna's trial.
        metrics: names of the metrics to optimize, one per objective.

    Attributes:
        trial: Optuna's trial.
        pruned: whether the study's pruner, or the trial itself, ends it.
        error: an error that ends it; ``TrialPruned`` counts as ``pruned``.
    """

    def __init__(self, study: Study, trial: Trial, metrics: tuple[str, ...]) -> None:
        self.trial = trial
        self.pruned = False
        self.error: BaseException | None = None
        self._study = study
        self._metrics = metrics
        self._values: dict[str, float] = {}
        #: Names of all metrics that it reported, for the error that names a missing one.
        self._names: set[str] = set()
        self._heartbeat = private_api.heartbeat(study, trial)
        self._heartbeat.start()

    @property
    def is_decided(self) -> bool:
        """Whether it is to end, whatever else it reports."""
        return self.pruned or self.error is not None

    @property
    def fault(self) -> BaseException | None:
        """The error of a trial that failed; ``None`` for one that was pruned."""
        return None if self.pruned else self.error

    def record(self, result: Result) -> bool:
        """Records a result, reports it to the study and asks the pruner.

        Returns:
            Whether the trial is to end now.
        """
        try:
            self._names.update(result.metrics)
            fresh = {name: float(value) for name, value in self._reported(result.metrics).items()}
            self._values.update(fresh)
            if fresh and len(self._metrics) == 1:  # Optuna prunes for one objective only.
                # Pruners count from 0.
                self.trial.report(self._values[self._metrics[0]], result.iteration - 1)
                self.pruned = bool(self.trial.should_prune())
        except Exception as error:
            self.error = error
        return self.is_decided

    def record_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        """Records how Fluid's trial ended."""
        if self.is_decided:
            return
        if state == FluidTrialState.FAILED and failure is not None:
            self.error = _raised(TrialFailedError(trial_id, failure))
        elif len(self._values) < len(self._metrics):
            missing = next(name for name in self._metrics if name not in self._values)
            reported = ", ".join(sorted(map(str, self._names))) or "nothing"
            self.error = InvalidFieldError(
                "metric", missing, f"is not among the metrics that trial {self.trial.number} reported: {reported}"
            )

    def tell(self) -> FrozenTrial:
        """Tells the study how the trial ended, and stops the heartbeat.

        Returns:
            The trial as the study stores it.
        """
        self._heartbeat.join()
        study, number = self._study, self.trial.number
        if isinstance(self.error, TrialPruned):
            self.pruned = True
        if self.pruned:
            frozen = study.tell(self.trial, state=TrialState.PRUNED)
            _log.info(f"Trial {number} pruned. {self.error or ''}".rstrip())
            return frozen
        values = [self._values.get(name, math.nan) for name in self._metrics]
        if self.error is None and not any(map(math.isnan, values)):
            return study.tell(self.trial, values)
        frozen = study.tell(self.trial, state=TrialState.FAIL)
        problem = repr(self.error) if self.error is not None else f"The value {math.nan} is not acceptable"
        _log.warning(
            f"Trial {number} failed with parameters: {self.trial.params} because of the following error: {problem}.",
            exc_info=self.error,
        )
        return frozen

    def _reported(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the optimized metrics of an iteration; it may leave some out, or report ``None``."""
        return {name: metrics[name] for name in self._metrics if metrics.get(name) is not None}


def _raised(failed: TrialFailedError) -> BaseException:
    """Returns the trial's own exception if it could be pickled: ``study.optimize`` raises it unwrapped."""
    own = failed.__cause__
    if not isinstance(own, Exception):
        return failed
    failed.__cause__ = None
    own.__cause__ = failed  # Its text has the traceback, which pickling has removed.
    return own
