"""Describes the exceptions that trials raise."""

from __future__ import annotations

import errno
import os
import traceback
from types import TracebackType

from fluid.engine.events import Failure
from fluid.errors import Infeasible
from fluid.trainables.exception_pickle import dump_exception
from fluid.trainables.json_form import message_of

#: Parts of the messages that libraries raise as plain RuntimeError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
#: Errors of writing files that say nothing about the trial that is saved.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
#: Most characters of a failure's message; the traceback has the whole text.
_LONGEST_MESSAGE = 500
_OWN_FOLDER = os.path.dirname(__file__)


def describe(error: BaseException) -> Failure:
    """Describes an exception for the driver, and releases what its frames hold."""
    # Before what it was raised from: code that runs out of memory may find its config infeasible.
    is_infeasible = isinstance(error, Infeasible)
    kind = "infeasible" if is_infeasible else "out_of_memory" if is_out_of_memory(error) else "error"
    BaseException.with_traceback(error, _without_own_frames(error.__traceback__))  # Its class may be frozen.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = one_line(error)
    if type(error) is Infeasible:
        message = message.partition(": ")[2] or "no reason was given"
    raised = Failure(kind, message, text, dump_exception(error))
    # The frames hold what filled the memory.
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
    return raised


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drops the lane's own frames at the start of a traceback, unless all are its own."""
    rest = trace
    while rest is not None and os.path.dirname(rest.tb_frame.f_code.co_filename) == _OWN_FOLDER:
        rest = rest.tb_next
    return rest or trace


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


def one_line(error: BaseException) -> str:
    """Returns an exception's type and message as one line."""
    text = " ".join(message_of(error).split())
    name = type(error).__qualname__
    return f"{name}: {text}"[:_LONGEST_MESSAGE] if text else name
