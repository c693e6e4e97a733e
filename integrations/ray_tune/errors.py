"""Failures of lanes, in the words of Ray that Tune's controller understands."""

from __future__ import annotations

import pickle
import traceback

from ray.exceptions import RayActorError, RayTaskError

from fluid.engine.events import Failure
from fluid.session.results import TrialFailedError


def cause_of(failure: Failure) -> BaseException:
    """Returns the trial's own exception, or one that says the same where that did not travel."""
    if failure.exception is not None:
        try:
            cause = pickle.loads(failure.exception)
        except Exception:  # Whatever a class that is not known here does.
            cause = None
        if isinstance(cause, BaseException):
            return cause
    return RuntimeError(failure.message)


def task_error(failure: Failure, task: str, cause: BaseException | None = None) -> RayTaskError:
    """Returns what Tune sees of a trainable that raised in one of its methods."""
    raised = RayTaskError(task, failure.traceback or failure.message, cause_of(failure) if cause is None else cause)
    return raised.as_instanceof_cause()


def actor_error(failure: Failure) -> RayActorError:
    """Returns what Tune sees of a process that died."""
    return RayActorError(error_msg=failure.message)


def as_task_error(error: BaseException, task: str) -> RayTaskError:
    """Returns an exception as one that a trainable raised in one of its methods."""
    cause = error.__cause__ if isinstance(error, TrialFailedError) and error.__cause__ is not None else error
    return RayTaskError(task, "".join(traceback.format_exception(error)), cause).as_instanceof_cause()
