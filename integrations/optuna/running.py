"""One trial of a study while Fluid runs it: what it reported and how it ended."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError
from fluid.integrations.optuna import private_api
from fluid.results.records import Result
from fluid.session.listeners import TrialFailedError
from fluid.trainables.exception_pickle import with_lane_cause
from fluid.trialgroup import TrialState as FluidTrialState

with try_import("Optuna", extra="optuna"):
    from optuna import TrialPruned
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

_log = logging.getLogger("optuna.fluid")


class Outcome(Protocol):
    """What a trial came to: from the metrics of a trainable, or as an objective returned it."""

    def record(self, trial: Trial, result: Result) -> bool:
        """Takes a result; returns whether the study's pruner ends the trial now.

        Raises:
            Exception: what fails the trial; ``TrialPruned`` prunes it.
        """
        ...

    def require_complete(self, trial: Trial) -> None:
        """Checks a trial that has ended by itself.

        Raises:
            InvalidFieldError: it has not reported all that is to be optimized.
        """
        ...

    @property
    def values(self) -> Any:
        """What to tell the study."""
        ...


class RunningTrial:
    """A trial that was asked for and not told yet. It sends heartbeats if the storage has them.

    Args:
        study: the trial's study.
        trial: Optuna's trial.
        outcome: takes its results.
        is_taken_up: whether a driver that is gone had asked for it, so that another one may tell of it, too.

    Attributes:
        trial: Optuna's trial.
        pruned: whether the study's pruner, or the trial itself, ends it.
        error: an error that ends it; ``TrialPruned`` counts as ``pruned``.
    """

    def __init__(self, study: Study, trial: Trial, outcome: Outcome, *, is_taken_up: bool = False) -> None:
        self.trial = trial
        self._is_taken_up = is_taken_up
        self.pruned = False
        self.error: BaseException | None = None
        self._study = study
        self._outcome = outcome
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
        """Records a result; returns whether the trial is to end now."""
        try:
            with warnings.catch_warnings():
                if self._is_taken_up:  # The study has what the other driver told.
                    warnings.filterwarnings("ignore", "The reported value is ignored")
                self.pruned = self._outcome.record(self.trial, result)
        except Exception as error:
            self.error = error
        return self.is_decided

    def record_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        """Records how Fluid's trial ended."""
        if self.is_decided:
            return
        if state == FluidTrialState.INFEASIBLE and failure is not None:
            self.error = TrialPruned(f"It is infeasible: {failure.message}")
            return
        if state == FluidTrialState.FAILED and failure is not None:
            self.error = _raised(TrialFailedError(trial_id, failure))
            return
        try:
            self._outcome.require_complete(self.trial)
        except InvalidFieldError as error:
            self.error = error

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
            frozen = study.tell(self.trial, state=TrialState.PRUNED, skip_if_finished=self._is_taken_up)
            _log.info(f"Trial {number} pruned. {self.error or ''}".rstrip())
            return frozen
        problem = repr(self.error)
        if self.error is None:
            values = self._outcome.values
            problem = private_api.problem_with_values(study, values)
            if not problem:
                return study.tell(self.trial, values, skip_if_finished=self._is_taken_up)
        frozen = study.tell(self.trial, state=TrialState.FAIL, skip_if_finished=self._is_taken_up)
        _log.warning(
            f"Trial {number} failed with parameters: {self.trial.params} because of the following error: {problem}.",
            exc_info=self.error,
        )
        return frozen


def _raised(failed: TrialFailedError) -> BaseException:
    """Returns the trial's own exception if this process has its class: ``study.optimize`` raises it unwrapped."""
    own = failed.__cause__
    if not isinstance(own, Exception):
        return failed
    failed.__cause__ = None
    return with_lane_cause(own, failed)
