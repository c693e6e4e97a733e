"""Translates failures of lanes into the exceptions of Ray that Tune's controller handles."""

from __future__ import annotations

import pickle
import traceback

from ray.exceptions import RayActorError, RayTaskError

from fluid.engine.events import Failure
from fluid.session.results import TrialFailedError


def cause_of(failure: Failure) -> BaseException:
    """Returns the trial's own exception; where there is none, or it cannot be pickled, one with the message."""
    if failure.exception is not None:
        try:
            cause = pickle.loads(failure.exception)
        except Exception:  # An exception class that this process does not have may raise anything.
            cause = None
        if isinstance(cause, BaseException):
            return cause
    return (TimeoutError if failure.kind == "timeout" else RuntimeError)(failure.message)


def task_error(failure: Failure, task: str, cause: BaseException | None = None) -> RayTaskError:
    """Returns the error that Tune sees when a method of the trainable, ``task``, has raised."""
    raised = RayTaskError(task, failure.traceback or failure.message, cause_of(failure) if cause is None else cause)
    return raised.as_instanceof_cause()


def actor_error(failure: Failure) -> RayActorError:
    """Returns the error that Tune sees when the process of an actor has died."""
    return RayActorError(error_msg=failure.message)


def as_task_error(error: BaseException, task: str) -> RayTaskError:
    """Returns an exception in the form in which Tune sees it when a method of the trainable, ``task``, has raised."""
    cause = error.__cause__ if isinstance(error, TrialFailedError) and error.__cause__ is not None else error
    return RayTaskError(task, "".join(traceback.format_exception(error)), cause).as_instanceof_cause()
