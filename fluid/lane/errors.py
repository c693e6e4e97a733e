"""Describes the exceptions that trials raise."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from fluid.engine.events import Failure
from fluid.errors import Infeasible, WrongCallError
from fluid.trainables.exception_pickle import dump_exception
from fluid.trainables.json_form import message_of
from fluid.trainables.resident import TrainableFormError

#: Parts of the messages that libraries raise as plain RuntimeError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
#: Errors of writing files that say nothing about the trial that is saved.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
#: Most characters of a failure's message; the traceback has the whole text.
_LONGEST_MESSAGE = 500
#: Where the frames are that a trial's code is called from.
_OWN_FOLDERS = tuple(os.path.join(os.path.dirname(os.path.dirname(__file__)), name) for name in ("lane", "trainables"))
#: Words in the names of exceptions, and in messages, of what may pass: of services, of locks, of workers that were
#: killed, and of files that were read as they were written.
_PASSING_NAMES = (
    *("timeout", "connection", "unavailable", "cuda", "accelerator", "outofmemory", "throttl", "ratelimit"),
    *("toomany", "serviceerror", "servererror", "transporterror", "httpstatus", "brokenprocess", "brokenexecutor"),
    *("terminatedworker", "calledprocess", "eoferror", "jsondecode", "unpickling", "badzip", "badgzip", "readerror"),
)
_PASSING_TEXTS = (
    *("cuda error", "nccl", "hip error", "device-side", "timed out", "temporarily", "temporary failure", "try again"),
    *("retry", "is locked", "rate limit", "too many requests", "service unavailable", "connection reset"),
    *("connection refused", "resource_exhausted", "exited unexpectedly", "is killed by signal", "unexpected eof"),
)
#: And in the messages that libraries raise as plain RuntimeError.
_PASSING_RUNTIME = ("cuda", "cudnn", "cublas", "timeout", "connection")
#: Parts of messages that differ from try to try, and say nothing of what is wrong.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def asked_beyond(run: str) -> str | None:
    """What a shared run has asked a schedule for that it is not to know; ``None`` if nothing, or it has none.

    Schedules come with the configs that have them: no other lane loads what makes them.

    Args:
        run: its trial's id.
    """
    module = sys.modules.get("fluid.search.prefix_end")
    asked: str | None = None if module is None else module.asked_beyond(run)
    return asked


def enter_trial(trial_id: str, schedules: Mapping[tuple[Any, ...], Any]) -> None:
    """Has what shared runs ask for count from here on, and states of them have the schedules of the trial.

    Args:
        trial_id: the trial whose code is about to run.
        schedules: those of its config.
    """
    if (module := sys.modules.get("fluid.search.prefix_end")) is not None:
        module.enter_trial(trial_id, schedules)


def describe(error: BaseException, iteration: int | None = None) -> Failure:
    """Describes an exception for the driver, and releases what its frames hold.

    Args:
        error: the exception.
        iteration: iterations that the trial had done; ``None`` if unknown.
    """
    # Infeasible before what it was raised from: code that runs out of memory may find its config infeasible.
    is_infeasible = isinstance(error, Infeasible)
    kind = "infeasible" if is_infeasible else "out_of_memory" if is_out_of_memory(error) else "error"
    is_form = isinstance(error, (TrainableFormError, WrongCallError))
    own = error.__traceback__
    BaseException.with_traceback(error, _without_own_frames(own, all_may_go=is_form))  # Its class may be frozen.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    site = _site_of(error, own, iteration) if kind == "error" else ""
    message = one_line(error)
    if type(error) is Infeasible:
        message = message.partition(": ")[2] or "no reason was given"
    raised = Failure(kind, message, text, dump_exception(error), site=site, is_form=is_form)
    # The frames hold what filled the memory.
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
    return raised


def _without_own_frames(trace: TracebackType | None, *, all_may_go: bool) -> TracebackType | None:
    """Drops Fluid's own frames at the start of a traceback; all of them, if all are its own, only where they may go."""
    rest = trace
    while rest is not None and os.path.dirname(rest.tb_frame.f_code.co_filename) in _OWN_FOLDERS:
        rest = rest.tb_next
    return rest if all_may_go else rest or trace


def _site_of(error: BaseException, trace: TracebackType | None, iteration: int | None) -> str:
    """What an exception is and where it was raised; empty for one that another try may not meet."""
    if iteration is None or any(map(_may_pass, causes(error))):
        return ""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{_VARYING.sub('#', one_line(error))} at {where} after {iteration} iterations"


def _may_pass(error: BaseException) -> bool:
    name, text = type(error).__name__.lower(), message_of(error).lower()
    return (
        isinstance(error, (OSError, TimeoutError, MemoryError))
        or any(part in name for part in _PASSING_NAMES)
        or any(part in text for part in _PASSING_TEXTS)
        or (isinstance(error, RuntimeError) and any(part in text for part in _PASSING_RUNTIME))
    )


def print_exception() -> None:
    """Prints the exception that is being handled where the trial prints; to the lane's own log if that is closed."""
    try:
        traceback.print_exc()
    except Exception:
        os.write(2, traceback.format_exc().encode(errors="replace"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, says that memory ran out."""
    for cause in causes(error):
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return True
        if isinstance(cause, RuntimeError):
            text = message_of(cause)
            if any(part in text for part in _OUT_OF_MEMORY):
                return True
    return False


def is_for_want_of_space(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, says that a disk is full or descriptors are used up."""
    return any(isinstance(cause, OSError) and cause.errno in _NO_SPACE for cause in causes(error))


def causes(error: BaseException) -> list[BaseException]:
    """Returns an exception, its cause or context, and theirs."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is known for known in found):
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def one_line(error: BaseException) -> str:
    """Returns an exception's type, message and notes as one line."""
    text = " ".join(": ".join(filter(None, [message_of(error), *_notes(error)])).split())
    name = type(error).__qualname__
    return f"{name}: {text}"[:_LONGEST_MESSAGE] if text else name
