"""What a submitter hears of its trials: results, how they ended, and the errors that carry why."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fluid.engine.events import Failure
from fluid.errors import FluidError


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished iteration of a trial.

    Attributes:
        trial_id: the trial.
        iteration: its number, from 1.
        metrics: what the trial reported.
        seconds: wall time of the iteration.
        width: width at which it ran: ``1/p``, 1 or a number of devices.
        device_ids: devices on which it ran.
        config: the trial's hyperparameters.
    """

    trial_id: str
    iteration: int
    metrics: Any
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    config: Mapping[str, Any]


class TrialFailedError(FluidError):
    """A trial failed for good. What it raised is the cause, where that could be brought here.

    Attributes:
        trial_id: the trial.
        failure: why; its ``traceback`` is the trial's own.
    """

    def __init__(self, trial_id: str, failure: Failure) -> None:
        super().__init__(f"trial {trial_id!r} failed: {failure.message}\n{failure.traceback}".rstrip())
        self.trial_id = trial_id
        self.failure = failure
        self.__cause__ = exception_of(failure)

    def __reduce__(self) -> tuple[type[TrialFailedError], tuple[str, Failure]]:
        return type(self), (self.trial_id, self.failure)


class CallFailedError(FluidError):
    """A method of a trial could not be called, or raised what cannot be brought here.

    It is the cause of an exception that could be: its text has the traceback that was lost on the way.

    Attributes:
        trial_id: the trial.
        method: name of the method.
        failure: why; its ``traceback`` is the method's own.
    """

    def __init__(self, trial_id: str, method: str, failure: Failure) -> None:
        text = f"{method!r} of trial {trial_id!r}: {failure.message}\n{failure.traceback}"
        super().__init__(text.rstrip())
        self.trial_id = trial_id
        self.method = method
        self.failure = failure

    def __reduce__(self) -> tuple[type[CallFailedError], tuple[str, str, Failure]]:
        return type(self), (self.trial_id, self.method, self.failure)


class TrialListener(Protocol):
    """Is told of a group as things happen. What derives from it need only override what it wants to hear.

    Its methods run in the executor's own thread, in order, while nothing else of the session moves: they must not
    wait. They may use the group's handle. What they raise is logged. The first one may be called before
    ``submit_trialgroup`` has returned.
    """

    def on_start(self, trial_id: str) -> None:
        """A trial begins to run; again, after it was extended, or failed and is tried once more."""

    def on_result(self, result: Result) -> None:
        """A trial finished an iteration."""

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        """A trial ended: ``"DONE"``, ``"STOPPED"`` or ``"FAILED"``, which says why. One that is done may go on."""

    def on_broken(self, error: BaseException) -> None:
        """The executor was closed, or broke: nothing more will come."""


def exception_of(failure: Failure) -> BaseException | None:
    """What was raised, where it was brought along and this process can read it."""
    if failure.exception is None:
        return None
    try:
        exception = pickle.loads(failure.exception)
    except BaseException:  # Its class may be known to the lane only, or its __reduce__ may raise SystemExit.
        return None
    return exception if isinstance(exception, BaseException) else None
