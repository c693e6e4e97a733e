"""The errors that Fluid raises on purpose, all derived from :class:`FluidError`; what a trial's code may raise to say
something, :class:`Infeasible`; and checks of arguments."""

from __future__ import annotations

import difflib
import math
import numbers
import pickle
import re
from collections.abc import Collection
from datetime import timedelta

#: Most characters of a value in an error.
_LONGEST_VALUE = 500
#: A float holds all whole numbers up to this one exactly.
_EXACT = 2**53
#: Seconds of each unit of time, by its names.
_UNITS = {
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_PART = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(sorted(_UNITS, key=len, reverse=True))})(?![a-z])\s*")


class FluidError(Exception):
    """Base class of every error that Fluid raises on purpose.

    Example:
        >>> from fluid import Device, FluidError
        >>> try:
        ...     Device(-1)
        ... except FluidError as error:
        ...     print(error)
        index=-1: must be at least 0
    """


def set_cause(error: BaseException, cause: BaseException) -> None:
    """Gives an exception of the user's its cause, also where its class lets no attribute be set, as a frozen one."""
    BaseException.__setattr__(error, "__cause__", cause)


class InvalidFieldError(FluidError, ValueError):
    """A value given by the caller cannot be used.

    Example:
        >>> from fluid import InvalidFieldError, Trial
        >>> try:
        ...     Trial(print, budget=0)
        ... except InvalidFieldError as error:
        ...     print(error.field, error.value, error.reason, sep="; ")
        budget; 0; must be at least 1

    Attributes:
        field: name of the field, as the caller wrote it (``"budget"``).
        value: the value that was given.
        reason: what is wrong with it.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={_shown(value)}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidFieldError], tuple[str, object, str]]:
        # The default would call __init__ with the message alone, so the error could not cross a process.
        value = self.value
        try:
            pickle.dumps(value)
        except Exception:  # It may be what was refused as it cannot be pickled. The error must cross all the same.
            value = TextOfValue.of(value)
        return type(self), (self.field, value, self.reason)


class TextOfValue:
    """Stands for a value of another process, of which only the text came here.

    Args:
        text: the value's ``repr``.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of(cls, value: object) -> TextOfValue:
        """Takes the text of a value; cuts a long one."""
        return cls(_shown(value))

    def __repr__(self) -> str:
        return self._text


def _shown(value: object) -> str:
    """The value as text, on one line; a repr may raise, as that of an integer of thousands of digits does."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to print"
    except KeyboardInterrupt:
        raise  # Of the user at the keyboard.
    except BaseException:
        return f"a {type(value).__name__} that cannot be printed"
    text = " ".join(map(str.strip, text.splitlines()))  # Arrays and models take many lines.
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


class WrongCallError(FluidError, TypeError):
    """The arguments of a call do not fit the function; the message says what may be meant.

    Example:
        >>> import fluid
        >>> try:
        ...     fluid.run(print, {"lr": [0.1, 0.2]}, metric="loss", num_samples=2)
        ... except TypeError as error:
        ...     print(error)
        run() got an unexpected keyword argument 'num_samples': did you mean samples=?
    """


class Infeasible(Exception):
    """Raised by a trial's code: its config cannot be evaluated, as it needs too much memory or breaks a constraint.

    That is an answer, not a failure: the trial ends as ``"INFEASIBLE"``, is not tried again, and is never the best,
    whatever it reported before. Its search counts it as the worst, and learns to avoid its like (``docs/sweeps.md``).

    Example:
        >>> import fluid
        >>> def train(config):
        ...     if config["width"] > 512:
        ...         raise fluid.Infeasible("width too large for memory")
        ...     yield {"loss": 1 / config["width"]}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, {"width": [256, 512, 1024]}, metric="loss", algorithm="grid", budget=1)
        >>> [trial.state for trial in result.trials], result.best.config
        (['DONE', 'DONE', 'INFEASIBLE'], {'width': 512})
        >>> result.infeasible
        {'train-grid-00002': 'width too large for memory'}

    Its argument, the reason, is for people, and may be left out.
    """


class PrefixEndedError(FluidError):
    """A run that several trials share asked a schedule for a value that they do not have in common.

    The trial is then run by itself. It is an ``Exception``, and none that code expects of a missing key or an end:
    workers of data loaders and pools hand it on to the process that waits for them, which they do of no other
    ``BaseException``. Code that catches it, and goes on with a value of its own, is found all the same.

    Example:
        >>> from fluid.search import PrefixEndedError, schedule
        >>> common = schedule({0: 0.1, 20: 0.01}).until(20)
        >>> try:
        ...     common.at(20)
        ... except PrefixEndedError as error:
        ...     print(str(error)[:78])
        a run that several trials share asked for the value of iteration 20 of a sched
    """


class MissingDependencyError(FluidError, ImportError):
    """An optional dependency is needed and not installed; the message holds the install command.

    Example:
        >>> from fluid import MissingDependencyError
        >>> try:
        ...     raise MissingDependencyError("this needs Ray Tune: pip install 'ray[tune]'")
        ... except ImportError as error:
        ...     print(error)
        this needs Ray Tune: pip install 'ray[tune]'
    """


def _is_number(value: object) -> bool:
    """Whether a value is the text of a number."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def require_number(field: str, value: object, *, at_least: float, finite: bool = True) -> float:
    """Returns ``value`` as a float, or raises :class:`InvalidFieldError` naming ``field``."""
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)  # numpy's scalars are Real too
    ):
        raise InvalidFieldError(field, value, "must be a number" + (", without quotes" if _is_number(value) else ""))
    try:
        number = float(value)
    except OverflowError as error:
        raise InvalidFieldError(field, value, "is too large") from error
    if math.isnan(number):
        raise InvalidFieldError(field, value, "must be a number, not NaN")
    if finite and math.isinf(number):
        raise InvalidFieldError(field, value, "must be finite")
    if number < at_least:
        raise InvalidFieldError(field, value, f"must be at least {at_least:g}")
    return number


def require_integer(field: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    """Returns ``value`` as an int (``3.0`` counts as 3), or raises :class:`InvalidFieldError`."""
    if type(value) is int and at_least <= value <= (_EXACT if at_most is None else at_most):
        return value  # What nearly all callers give; the engine asks several times for each iteration.
    number = require_number(field, value, at_least=at_least)
    if number != int(number):
        raise InvalidFieldError(field, value, "must be a whole number")
    if at_most is not None and number > at_most:
        raise InvalidFieldError(field, value, f"must be at most {at_most}")
    return int(value) if isinstance(value, numbers.Integral) else int(number)


def require_text(field: str, value: object, *, empty: bool = False) -> str:
    """Returns ``value`` if it is a string that can be written to a file, else raises :class:`InvalidFieldError`.

    A lone surrogate, such as ``"\\ud800"``, is half a character: no encoding has it.
    """
    if not isinstance(value, str) or not (value or empty):
        raise InvalidFieldError(field, value, "must be a string" if empty else "must be a non-empty string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidFieldError(field, value, "holds a lone surrogate, which no file can hold") from None
    return value


def require_one_of(field: str, value: object, allowed: Collection[str]) -> str:
    """Returns ``value`` if it is one of the strings ``allowed``, else raises :class:`InvalidFieldError`."""
    if not isinstance(value, str) or value not in allowed:
        reason = f"must be one of {', '.join(sorted(allowed))}"
        if isinstance(value, str) and (meant := difflib.get_close_matches(value.lower(), allowed, 1)):
            reason += f"; did you mean {meant[0]!r}?"
        raise InvalidFieldError(field, value, reason)
    return value


def parse_duration(field: str, value: object, *, zero: bool = False, finite: bool = True) -> float:
    """Returns seconds above 0, given as a number of them, a ``timedelta`` or text: ``"2h"``, ``"1h 30m"``, ``"45 s"``.

    Args:
        field: the name in an error.
        value: what the user gave.
        zero: whether it may be 0.
        finite: whether it must be finite.

    Raises:
        InvalidFieldError: it is none of these.
    """
    reason = f'must be seconds {"of at least" if zero else "above"} 0, or text such as "2h", "90m" or "1h 30m"'
    if isinstance(value, str):
        text = value.strip().lower()
        parts = _PART.findall(text)
        if _is_number(text):  # As on a command line.
            seconds = float(text)
        elif parts and not _PART.sub("", text):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        else:
            raise InvalidFieldError(field, value, reason)
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
    else:
        try:
            seconds = require_number(field, value, at_least=0.0, finite=finite)
        except InvalidFieldError as error:
            raise InvalidFieldError(
                field, value, reason if error.reason.startswith("must be a number") else error.reason
            ) from None
    if seconds < 0.0 or (seconds == 0.0 and not zero) or (finite and math.isinf(seconds)):
        raise InvalidFieldError(field, value, reason)
    return seconds
