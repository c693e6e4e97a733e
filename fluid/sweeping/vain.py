"""When a sweep is given up because no trial of it can succeed."""

from __future__ import annotations

from fluid.engine.events import Failure
from fluid.executor import FluidExecutor
from fluid.session.listeners import TrialFailedError
from fluid.sweeping.plan import SweepFailedError, SweepTrial

#: So many trials at least must have failed alike.
_FIRST_TRIALS = 3


class VainSweep:
    """Gives a sweep up whose trainable cannot be run, or whose first trials have all failed alike without a result.

    It does not where the user has said by ``max_failures`` how often a trial is tried. The engine has the same rule
    about the tries of one trial.
    """

    def __init__(self) -> None:
        self._gives_up_early = False
        self._number = _FIRST_TRIALS
        self._site: str | None = None
        self._failed: dict[str, Failure] = {}
        #: Whether a trial has reported something, or failed otherwise than the first one.
        self._is_over = False

    def begin(self, executor: FluidExecutor) -> None:
        """Called once, with the executor that runs the sweep."""
        self._gives_up_early = executor.session.gives_up_early
        self._number = max(_FIRST_TRIALS, executor.max_devices)

    def note_result(self) -> None:
        """A trial has reported something: the next ones may, too."""
        self._is_over = True

    def note_failed(self, trial: SweepTrial, failure: Failure) -> None:
        """Takes note of a trial that has failed for good.

        Raises:
            SweepFailedError: no trial can succeed.
        """
        if not self._gives_up_early:
            return
        if failure.is_form:
            cause = TrialFailedError(trial.trial_id, failure) if failure.traceback.count("\n") > 1 else None
            raise SweepFailedError(f"the trainable cannot be run: {failure.message}") from cause
        if self._is_over or trial.results or not failure.site or self._site not in (None, failure.site):
            self._is_over = True
            return
        self._site = failure.site
        self._failed[trial.trial_id] = failure
        if len(self._failed) >= self._number:
            trial_id, first = next(iter(self._failed.items()))
            text = (
                f"the first {len(self._failed)} trials failed alike, without a result, so no further one is tried: "
                f"{first.message}; executor=FluidExecutor(max_failures=0) tries all"
            )
            raise SweepFailedError(text) from TrialFailedError(trial_id, first)
