"""Translates failures of lanes into the exceptions of Ray that Tune's controller handles."""

from __future__ import annotations

import traceback

from ray.exceptions import RayActorError, RayTaskError

from fluid.engine.events import Failure
from fluid.integrations.ray_tune.lane.lane_trial import FailedSave, RestoreError
from fluid.integrations.ray_tune.private_api import Trial
from fluid.lane.errors import causes
from fluid.session.listeners import CallFailedError, TrialFailedError, exception_of


def cause_of(failure: Failure) -> BaseException:
    """Returns the trial's own exception; where there is none, or this process lacks its class, one with the message."""
    return exception_of(failure) or RuntimeError(failure.message)


def task_error(failure: Failure, trial: Trial, task: str) -> RayTaskError:
    """Returns the error that Tune sees when a method of a trial's trainable, ``task``, has raised."""
    cause = cause_of(failure)
    if isinstance(cause, RestoreError):
        return _task_error(trial, "restore", cause.traceback, cause.error)
    return _task_error(trial, task, failure.traceback or failure.message, cause)


def as_task_error(error: BaseException, trial: Trial, task: str) -> RayTaskError:
    """Returns an exception in the form in which Tune sees it when a method of a trial's trainable has raised."""
    failed = next((one for one in causes(error) if isinstance(one, CallFailedError)), None)
    if failed is not None:
        return _task_error(trial, task, failed.failure.traceback, error)
    cause = error.__cause__ if isinstance(error, TrialFailedError) and error.__cause__ is not None else error
    return _task_error(trial, task, "".join(traceback.format_exception(error)), cause)


def save_error(failed: FailedSave, trial: Trial) -> RayTaskError:
    """Returns the error that Tune sees when it asks for a checkpoint that could not be made."""
    return _task_error(trial, "save", failed.traceback, failed.error)


def start_error(failure: Failure, trial: Trial) -> RayActorError:
    """Returns the error that Tune sees when a trial's trainable could not be set up."""
    error = task_error(failure, trial, "__init__")
    return RayActorError(error_msg=f"The actor died because of an error raised in its creation task, {error}")


def actor_error(failure: Failure) -> RayActorError:
    """Returns the error that Tune sees when the process of an actor has died."""
    return RayActorError(error_msg=failure.message)


def _task_error(trial: Trial, task: str, text: str, cause: BaseException) -> RayTaskError:
    # Without a title, Ray writes the driver's command line in its place.
    title = f"ray::{trial.get_trainable_cls().__name__}.{task}"
    return RayTaskError(task, text, cause, proctitle=title, actor_repr=trial.trainable_name).as_instanceof_cause()
