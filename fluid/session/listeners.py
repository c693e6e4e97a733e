"""How submitters hear of their trials: listeners, requests, and the errors that say why one failed."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fluid._logs import logger_of
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.results.records import Result
from fluid.trainables.driver_link import RequestRefusedError, dump_message
from fluid.trainables.exception_pickle import dump_exception, load_exception

# -- limit reached -------------------------------------------------------------------------------
#
# How a session ends at its deadline, or when its budget is spent.


class LimitReachedError(FluidError):
    """A session has ended before its trials, as its deadline came or its budget was spent. They are saved.

    Example:
        >>> from fluid import LimitReachedError
        >>> error = LimitReachedError("the deadline of 2 h has come", "runs/1", unfinished=5, unsaved=["a"])
        >>> print(error)
        the deadline of 2 h has come: 4 of 5 unfinished trials are saved; FluidExecutor.resume('runs/1') goes on

    Attributes:
        reason: which limit was reached.
        run_dir: the run folder.
        unfinished: number of trials that had not ended.
        unsaved: ids of those among them whose newest iterations are not saved.
        rehearsed: whether the session was rehearsed, and so cannot be resumed.
    """

    def __init__(
        self,
        reason: str,
        run_dir: str | Path,
        *,
        unfinished: int,
        unsaved: Sequence[str] = (),
        rehearsed: bool = False,
    ) -> None:
        self.reason = reason
        self.run_dir = str(run_dir)
        self.rehearsed = rehearsed
        self.unfinished = unfinished
        self.unsaved = tuple(unsaved)
        saved = words_on_saved(unfinished, len(self.unsaved))
        resume = "" if rehearsed else f"; FluidExecutor.resume({self.run_dir!r}) goes on"
        super().__init__(f"{reason}: {saved}{resume}")

    def __reduce__(self) -> tuple[Callable[..., LimitReachedError], tuple[str, str]]:
        left: Any = {"unfinished": self.unfinished, "unsaved": self.unsaved, "rehearsed": self.rehearsed}
        return partial(type(self), **left), (self.reason, self.run_dir)

    @property
    def saved(self) -> int:
        """Number of trials that had not ended and are saved."""
        return max(0, self.unfinished - len(self.unsaved))


def words_on_saved(unfinished: int, unsaved: int) -> str:
    """How many of the trials that had not ended are saved, in words."""
    if not unfinished:
        return "all trials had ended"
    return f"{max(0, unfinished - unsaved)} of {unfinished} unfinished trials are saved"


def ended_early(error: BaseException, otherwise: str) -> FluidError:
    """The error for those who use a session that has ended, or wait for it.

    Args:
        error: what ended the session.
        otherwise: what is to be said before that, where it was no limit.

    Returns:
        Where a limit was reached, an error that says so, too: each caller gets one of its own.
    """
    if isinstance(error, LimitReachedError):
        left: Any = {"unfinished": error.unfinished, "unsaved": error.unsaved, "rehearsed": error.rehearsed}
        return LimitReachedError(error.reason, error.run_dir, **left)
    return FluidError(f"{otherwise}: {error}")


# -- results -------------------------------------------------------------------------------------


_log = logger_of("fluid.session")


class TrialFailedError(FluidError):
    """A trial failed for good. Its cause is the trial's own exception, where the driver has the class of that.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialFailedError, TrialGroup
        >>> def train(config):
        ...     yield {"loss": 1 / config["batch_size"]}
        >>> with FluidExecutor(backend="local", devices=1, max_failures=0, verbose=0) as executor:
        ...     group = TrialGroup([Trial(train, {"batch_size": 0}, trial_id="a")])
        ...     handle = executor.submit_trialgroup(group)
        ...     ended = handle.wait()
        >>> try:
        ...     handle.raise_failures()
        ... except TrialFailedError as error:
        ...     print(error.trial_id, error.failure.message, repr(error.__cause__), sep="; ")
        a; ZeroDivisionError: division by zero; ZeroDivisionError('division by zero')

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
    """A method of a trial could not be called, or raised an exception whose class the driver lacks.

    Where the driver has the class, the exception itself is raised, and this error is the first of its causes: this
    one's text has the traceback in the lane.

    Example:
        >>> from fluid import CallFailedError, FluidExecutor, Trial, TrialGroup
        >>> class Model:
        ...     def setup(self, config):
        ...         self.rate = config["lr"]
        ...     def step(self):
        ...         return {"loss": self.rate}
        ...     def set_rate(self, rate):
        ...         self.rate = float(rate)
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     handle = executor.submit_trialgroup(TrialGroup([Trial(Model, {"lr": 0.5}, trial_id="a")]))
        ...     try:
        ...         handle.call("a", "set_rate", "fast").result()
        ...     except ValueError as error:
        ...         print(error)
        ...         cause = error.__cause__
        could not convert string to float: 'fast'
        >>> isinstance(cause, CallFailedError), cause.trial_id, cause.method
        (True, 'a', 'set_rate')

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


class TrialRequest:
    """What a trial's code asks with :meth:`fluid.trainables.trial_code.DriverLink.ask`; it waits for the answer.

    Any thread may answer. Only the first answer counts.

    Args:
        trial_id: the trial.
        pickled: the request.
        reply: takes the pickled answer, and whether it is an exception to raise in the trial.

    Attributes:
        trial_id: the trial.
    """

    def __init__(self, trial_id: str, pickled: bytes, reply: Callable[[bytes, bool], None]) -> None:
        self.trial_id = trial_id
        self._pickled = pickled
        self._reply = reply
        self._answered = False

    def read(self) -> Any:
        """Returns the request.

        Raises:
            Exception: this process cannot unpickle it.
        """
        return pickle.loads(self._pickled)

    def answer(self, value: Any) -> None:
        """Answers; a value that cannot be pickled raises a ``TypeError`` in the trial."""
        try:
            payload = dump_message(value)
        except TypeError as error:
            self.refuse(error)
        else:
            self._send(payload, False)

    def refuse(self, error: BaseException) -> None:
        """Raises an exception in the trial in place of an answer."""
        self._send(dump_exception(error), True)

    def _send(self, payload: bytes, failed: bool) -> None:
        if not self._answered:
            self._answered = True
            self._reply(payload, failed)


class TrialListener(Protocol):
    """Is called at each start, result and end of a group's trials. Derive from it, and override what you need.

    The session's thread calls its methods, in order, and does nothing else meanwhile: they must not wait, and calls
    that would wait for that thread itself raise a :class:`FluidError`. They may use the group's handle. What they raise
    is logged. The first call may come before ``submit_trialgroup`` has returned.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, TrialListener
        >>> def train(config):
        ...     yield {"loss": 0.5}
        ...     yield {"loss": 0.25}
        >>> class Best(TrialListener):
        ...     loss = float("inf")
        ...     def on_result(self, result):
        ...         self.loss = min(self.loss, result.metrics["loss"])
        >>> best = Best()
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     executor.submit_trialgroup(TrialGroup([Trial(train, budget=2)]), best).wait()
        True
        >>> best.loss
        0.25
    """

    #: Whether this listener tells the user of failures, so that the executor need not log a warning.
    tells_failures: bool = False
    #: Whether it tells the user of trials that the executor leaves unfinished as it closes.
    tells_unfinished: bool = False

    def on_start(self, trial_id: str) -> None:
        """A trial starts to run; also when it goes on after it was extended, or failed and is tried again."""

    def on_result(self, result: Result) -> None:
        """A trial finished an iteration."""

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        """A trial ended.

        Args:
            trial_id: the trial.
            state: ``"DONE"``, ``"STOPPED"``, ``"INFEASIBLE"`` or ``"FAILED"``. A trial that is done may be extended.
            failure: why a trial that is ``"FAILED"`` failed, or one that is ``"INFEASIBLE"`` is so.
        """

    def on_request(self, request: TrialRequest) -> None:
        """A trial's code asks the driver, and waits: answer now, or later in any thread."""
        request.refuse(RequestRefusedError(f"the submitter of trial {request.trial_id!r} answers no requests"))

    def on_broken(self, error: BaseException) -> None:
        """The executor was closed, or its session broke: no call follows."""


def require_listener(listener: object, field: str = "listener") -> None:
    """Refuses a listener that lacks a method of :class:`TrialListener`; the error names the field."""
    methods = [name for name in vars(TrialListener) if name.startswith("on_")]
    missing = [name for name in methods if not callable(getattr(listener, name, None))]
    if missing or isinstance(listener, type):
        reason = f"it has no {', '.join(missing)}" if missing else "this is the class itself"
        raise InvalidFieldError(field, listener, f"must be an object derived from TrialListener: {reason}")
    for name in methods:
        if inspect.iscoroutinefunction(getattr(listener, name)):
            text = "%s of %s %s is async, and will do nothing: the session runs no event loop; make it a plain function"
            _log.warning(text, name, field, type(listener).__name__)


def exception_of(failure: Failure) -> BaseException | None:
    """The exception of a failure; ``None`` where there is none, or this process lacks its class."""
    if failure.kind == "timeout":
        return TimeoutError(failure.message)
    return None if failure.exception is None else load_exception(failure.exception)


def broken_off(group: str, error: BaseException) -> FluidError:
    """The error for those who wait for a group whose session has ended.

    Args:
        group: its name.
        error: what ended the session.
    """
    return ended_early(error, f"group {group!r} did not end")


# -- interrupted ---------------------------------------------------------------------------------
#
# How a call that runs a sweep ends when a signal has ended the sweep.


class SweepInterrupted(SystemExit):
    """A signal has ended a sweep before its trials were done; the process exits with ``128 +`` its number.

    Example:
        >>> from fluid import SweepInterrupted
        >>> try:
        ...     raise SweepInterrupted(130, result="the results so far")
        ... except SweepInterrupted as cut:
        ...     print(cut.code, cut.result)
        130 the results so far

    Attributes:
        result: what the call would have returned: a :class:`fluid.SweepResult`; under Ray Tune an
            ``ExperimentAnalysis`` or a ``ResultGrid``, which shows the trials that were cut off as terminated.
        cut_off: ids of the trials that had not ended.
    """

    def __init__(self, status: int, result: Any, cut_off: Iterable[str] = ()) -> None:
        super().__init__(status)
        self.result = result
        self.cut_off = frozenset(cut_off)

    def __reduce__(self) -> tuple[type[SweepInterrupted], tuple[Any, Any, frozenset[str]]]:
        return type(self), (self.code, self.result, self.cut_off)
