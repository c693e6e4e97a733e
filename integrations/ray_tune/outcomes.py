"""How a trial of Tune has ended, in Fluid's states."""

from __future__ import annotations

from typing import Any

from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.decisions import had_run_its_course
from fluid.integrations.ray_tune.interruption import interruption_of
from fluid.integrations.ray_tune.private_api import Trial
from fluid.integrations.ray_tune.tune_trial import TuneTrial
from fluid.trialgroup import TrialState


def outcome_of(tune_trial: TuneTrial, executor: FluidExecutor, controller: Any, scheduler: Any) -> str | None:
    """Returns Fluid's state for Tune's status of a trial; ``None`` if an error has ended the sweep.

    Args:
        tune_trial: the trial.
        executor: runs it.
        controller: Tune's.
        scheduler: the user's.
    """
    trial = tune_trial.trial
    interruption = interruption_of(executor)
    if interruption is not None and trial.trial_id in interruption.cut_off:
        return TrialState.PAUSED.value  # It goes on in a restored sweep, though Tune has set TERMINATED.
    if trial.status == Trial.TERMINATED:
        at_end = (
            tune_trial.finished_early
            or tune_trial.reported_done
            or had_run_its_course(controller, scheduler, trial, tune_trial.iteration)
        )
        return TrialState.DONE.value if at_end else TrialState.STOPPED.value
    if trial.status == Trial.ERROR:
        return TrialState.FAILED.value
    return TrialState.PAUSED.value if trial.status in (Trial.PAUSED, Trial.PENDING) else None
