"""Reading the exceptions that trials raise."""

from __future__ import annotations

import traceback

from fluid.lane.messages import Raised
from fluid.trainables.pickling import dump_exception

#: Parts of the messages that libraries raise as plain RuntimeError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
#: Characters of a failure's message; the traceback has all of it.
_LONGEST_MESSAGE = 500


def describe(error: BaseException) -> Raised:
    """Reads what the driver is to know of an exception, and lets go of all that its frames hold."""
    kind = "out_of_memory" if is_out_of_memory(error) else "error"
    # The first frame is the lane's own.
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    raised = Raised(kind, one_line(error), text, dump_exception(error))
    # The frames hold whatever filled the memory.
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
    return raised


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, says that memory ran out."""
    for cause in causes(error):
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return True
        if isinstance(cause, RuntimeError) and any(part in str(cause) for part in _OUT_OF_MEMORY):
            return True
    return False


def causes(error: BaseException) -> list[BaseException]:
    """Returns an exception and those it was raised from, or while handling which it was raised."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is known for known in found):
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def one_line(error: BaseException) -> str:
    """Returns an exception's type and message, for people."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be shown)"
    name = type(error).__qualname__
    return f"{name}: {text}"[:_LONGEST_MESSAGE] if text else name
