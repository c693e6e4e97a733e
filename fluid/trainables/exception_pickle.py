"""Pickles exceptions so that they arrive as what they are: of their class, with arguments, notes, causes and contexts.

Pickle alone calls the class with the exception's arguments, which fails for many classes of users, or makes another
message. Such an exception is taken apart, and put together again without its ``__init__``. Its text stands for an
attribute that cannot be pickled, or is too large. Where the receiver lacks its class, the nearest base class is made.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, NamedTuple, TypeVar

import cloudpickle

from fluid.errors import FluidError, TextOfValue, set_cause
from fluid.trainables.json_form import message_of
from fluid.trainables.script_names import BoundedFile

#: Most bytes of what an exception and its causes hold.
_LARGEST = 1 << 20
#: Most exceptions of a chain of causes and contexts.
_LONGEST_CHAIN = 20
#: Most characters of a text in place of a longer one.
_LONGEST_TEXT = 500
#: Of :attr:`type.__flags__`: the class was made by a class statement, not in C.
_HEAP_TYPE = 1 << 9
_Error = TypeVar("_Error", bound=BaseException)


class _Sent(NamedTuple):
    """One exception of a chain.

    Attributes:
        whole: its pickle; empty if that does not give the same exception.
        classes: its class and the classes of exceptions that it derives from, a pickle each.
        args: pickles of its arguments, if ``whole`` is empty.
        attributes: pickles of its attributes and slots by name, if ``whole`` is empty.
        text: its class and its message.
        notes: those that were added to it.
        cause: the place of its cause in the chain; ``None`` for none.
        context: the place of its context.
        suppressed: whether tracebacks leave its context out.
    """

    whole: bytes
    classes: list[bytes]
    args: list[bytes]
    attributes: dict[str, bytes]
    text: str
    notes: list[str]
    cause: int | None
    context: int | None
    suppressed: bool


class LackingClassError(FluidError):
    """In place of an exception whose class this process lacks; the message is the class and the message of it."""


def dump_exception(error: BaseException) -> bytes:
    """Pickles an exception; ``pickle`` reads it. Never raises, whatever the methods of its class do."""
    try:
        return _dump(error, ())
    except BaseException:
        return pickle.dumps(LackingClassError(_text(error)))


def load_any_exception(data: bytes) -> BaseException:
    """Makes an exception that :func:`dump_exception` has pickled. Never raises.

    Returns:
        The exception, without a traceback. If this process lacks its class, one of the nearest class that it derives
        from, whose message names the class; a :class:`LackingClassError` where that is ``Exception`` or
        ``BaseException``.
    """
    try:
        error = pickle.loads(data)
    except BaseException as failed:  # It was not pickled by dump_exception, and its class may raise anything.
        return LackingClassError(message_of(failed))
    return error if isinstance(error, BaseException) else LackingClassError(repr(error))


def load_exception(data: bytes) -> BaseException | None:
    """Makes an exception as :func:`load_any_exception` does; ``None`` in place of a :class:`LackingClassError`."""
    error = load_any_exception(data)
    return None if type(error) is LackingClassError else error


def with_lane_cause(error: _Error, cause: BaseException) -> _Error:
    """Returns an exception that came from a lane, with what tells its traceback there as the first of its causes."""
    known: list[BaseException] = []
    last: BaseException = error
    while last.__cause__ is not None and not any(last.__cause__ is one for one in known):
        known.append(last)
        last = last.__cause__
    set_cause(last, cause)
    return error


class _ExceptionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an exception, or a part of one; exceptions in it, such as those of a group, are pickled as this one.

    Args:
        file: takes the pickle.
        within: the exceptions that it is a part of, the innermost one last.
    """

    def __init__(self, file: BoundedFile, within: tuple[BaseException, ...]) -> None:
        super().__init__(file)
        self._within = within

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, BaseException) or obj is self._within[-1]:
            return super().reducer_override(obj)
        if any(obj is one for one in self._within):
            return TextOfValue, (_text(obj),)
        return pickle.loads, (_dump(obj, self._within),)


def _dump(error: BaseException, within: tuple[BaseException, ...]) -> bytes:
    chain = [error]
    for one in chain:
        for linked in (one.__cause__, one.__context__):
            if linked is not None and len(chain) < _LONGEST_CHAIN and not any(linked is known for known in chain):
                chain.append(linked)
    place = {id(one): number for number, one in enumerate(chain)}
    allowance = _ByteAllowance()
    return pickle.dumps(_Chain([_sent(one, place, (*within, one), allowance) for one in chain]))


class _Chain:
    """Is pickled in place of an exception and its causes.

    Args:
        sent: the exception, then the others.
    """

    def __init__(self, sent: list[_Sent]) -> None:
        self._sent = sent

    def __reduce__(self) -> Any:
        return _linked, (self._sent,)


def _linked(chain: list[_Sent]) -> BaseException:
    """Makes the exceptions of a chain; returns the first one."""
    made = [_made(sent) for sent in chain]
    for error, sent in zip(made, chain, strict=True):
        if sent.notes:
            BaseException.__setattr__(error, "__notes__", sent.notes)
        if sent.context is not None:
            BaseException.__setattr__(error, "__context__", made[sent.context])
        if sent.cause is not None:
            set_cause(error, made[sent.cause])
        BaseException.__setattr__(error, "__suppress_context__", sent.suppressed)
    return made[0]


class _ByteAllowance:
    """The bytes that are left for an exception and its causes."""

    def __init__(self) -> None:
        self._left = _LARGEST

    def dump(self, value: Any, within: tuple[BaseException, ...]) -> bytes:
        """Pickles a value if it can be, and is not larger than what is left; returns nothing if not."""
        file = BoundedFile(self._left)
        try:
            _ExceptionPickler(file, within).dump(value)
            pickle.loads(file.data)
        except BaseException:  # A __reduce__ or an __init__ may raise anything.
            return b""
        self._left -= len(file.data)
        return bytes(file.data)


def _sent(
    error: BaseException, place: dict[int, int], within: tuple[BaseException, ...], allowance: _ByteAllowance
) -> _Sent:
    classes = [cls for cls in type(error).__mro__ if issubclass(cls, BaseException)]
    whole = allowance.dump(error, within)
    args: list[bytes] = []
    attributes: dict[str, bytes] = {}
    if not whole or not _is_same(pickle.loads(whole), error):
        whole = b""
        args = [_dump_part(value, within, allowance) for value in error.args]
        attributes = {name: _dump_part(value, within, allowance) for name, value in _attributes(error).items()}
    notes = getattr(error, "__notes__", None)
    return _Sent(
        whole=whole,
        classes=[_ByteAllowance().dump(cls, within) for cls in classes],
        args=args,
        attributes=attributes,
        text=_text(error),
        notes=[str(note) for note in notes] if isinstance(notes, (list, tuple)) else [],
        cause=place.get(id(error.__cause__)),
        context=place.get(id(error.__context__)),
        suppressed=error.__suppress_context__,
    )


def _is_same(read: Any, error: BaseException) -> bool:
    """Whether an exception was read as it was; what a class of the user's has a ``__reduce__`` for is believed."""
    of_user = [cls for cls in type(error).__mro__ if cls.__flags__ & _HEAP_TYPE]
    if any(name in vars(cls) for cls in of_user for name in ("__reduce__", "__reduce_ex__")):
        return isinstance(read, BaseException)
    return type(read) is type(error) and message_of(read) == message_of(error)


def _attributes(error: BaseException) -> dict[str, Any]:
    """Returns the attributes of an exception, and those that its classes have in slots or in C."""
    found: dict[str, Any] = {}
    for cls in type(error).__mro__:
        for name, slot in list(vars(cls).items()):
            if isinstance(slot, MemberDescriptorType) and not name.startswith("__"):
                with suppress(AttributeError):  # It was not set.
                    found[name] = slot.__get__(error)
    return {**found, **{name: value for name, value in vars(error).items() if name != "__notes__"}}


def _dump_part(value: Any, within: tuple[BaseException, ...], allowance: _ByteAllowance) -> bytes:
    if pickled := allowance.dump(value, within):
        return pickled
    if isinstance(value, str):
        return pickle.dumps(f"{value[:_LONGEST_TEXT]}...")
    return pickle.dumps(TextOfValue.of(value))


def _load_part(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except BaseException as error:  # Its class may be known to the sender only, and may raise anything.
        return TextOfValue(f"<a value that cannot be read here: {message_of(error)}>")


def _text(error: BaseException) -> str:
    return f"{type(error).__qualname__}: {message_of(error)}"[:_LONGEST_TEXT]


def _made(sent: _Sent) -> BaseException:
    if sent.whole and isinstance(read := _load_part(sent.whole), BaseException):
        return read
    for number, pickled in enumerate(sent.classes):
        cls = _load_part(pickled)
        if cls in (Exception, BaseException):
            break
        with suppress(BaseException):  # This process may lack the class, or it can only be made otherwise.
            if number == 0 and not sent.whole:
                return _put_together(cls, [_load_part(arg) for arg in sent.args], sent.attributes)
            return _put_together(cls, [sent.text], {})
    return LackingClassError(sent.text)


def _put_together(cls: type[BaseException], args: list[Any], attributes: dict[str, bytes]) -> BaseException:
    """Makes an exception without calling its ``__init__``."""
    built_in = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    error: BaseException = built_in.__new__(cls, *args)
    BaseException.__setattr__(error, "args", tuple(args))
    for name, value in attributes.items():
        with suppress(AttributeError, TypeError):  # Some are read-only: those that __new__ has set.
            BaseException.__setattr__(error, name, _load_part(value))
    return error
