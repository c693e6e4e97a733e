"""The key of shared data: a digest of the loader and its arguments.

Two lanes whose keys differ load twice, which costs memory; two calls whose keys are equal get the same data. So the key
covers whatever may change the result: for a loader that is pickled by value, the values it refers to; for one that is
pickled by reference, its code.
"""

from __future__ import annotations

import hashlib
import inspect
import pickletools
from io import BytesIO
from types import CodeType, MemberDescriptorType
from typing import Any

import cloudpickle

from fluid.errors import InvalidFieldError
from fluid.trainables.json_form import message_of

#: Hexadecimal digits of a key.
_DIGITS = 32
_GETS = frozenset({"BINGET", "LONG_BINGET"})
#: What Python adds to classes while they are used, or for each of their instances.
_ADDED = frozenset({"_abc_impl", "__dict__", "__slotnames__", "__weakref__", "__annotations_cache__"})


def shared_key(loader: Any, args: tuple[Any, ...]) -> str:
    """Returns the key of what a loader returns for these arguments, hexadecimal digits.

    Raises:
        InvalidFieldError: the loader or an argument cannot be pickled.
    """
    digest = hashlib.sha256()
    for field, value in (("loader", loader), *((f"args[{place}]", value) for place, value in enumerate(args))):
        digest.update(b"\0" + _pickled_digest(field, value))
    code = getattr(inspect.unwrap(loader), "__code__", None)
    if isinstance(code, CodeType):
        digest.update(_code_text(code).encode(errors="surrogatepass"))
    return digest.hexdigest()[:_DIGITS]


class _KeyPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, not to be unpickled, classes that are pickled by value: without what their use adds to them."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, type) or not isinstance(reduced, tuple) or len(reduced) <= 2:
            return reduced
        state = {
            name: value
            for name, value in vars(obj).items()
            if name not in _ADDED and not isinstance(value, MemberDescriptorType)
        }
        return _stand_in, (obj.__module__, obj.__qualname__, obj.__bases__), state


def _stand_in(*names: Any) -> None:
    """Is never called."""


def _pickled_digest(field: str, value: Any) -> bytes:
    """Returns a digest of a value's pickle in which strings stand for themselves.

    A pickle refers back to a string that it has met before if that is the same object. Equal strings may be one object
    in one lane, and two in another one, or later in the same lane: Python merges names when it runs code.
    """
    try:
        _KeyPickler(file := BytesIO(), protocol=5).dump(value)
    except Exception as error:  # The __reduce__ is the user's, and may raise anything.
        raise InvalidFieldError(field, value, f"cannot be pickled: {message_of(error)}") from error
    digest = hashlib.sha256()
    #: For each place of the pickle's memo, the string or bytes there, or the number of the other object.
    memo: dict[Any, Any] = {}
    others = 0
    last: Any = None
    for opcode, argument, _ in pickletools.genops(file.getvalue()):
        if opcode.name == "FRAME":
            continue
        if opcode.name == "MEMOIZE":
            is_value = isinstance(last, (str, bytes))
            memo[len(memo)] = last if is_value else others
            others += not is_value
            continue
        if opcode.name in _GETS:
            last = memo[argument]
            named = "VALUE" if isinstance(last, (str, bytes)) else "GET"
        else:
            last = argument
            named = "VALUE" if isinstance(last, (str, bytes)) else opcode.name
        part = last if isinstance(last, (bytes, bytearray)) else repr(last).encode()
        digest.update(f"{named} {type(last).__name__} {len(part)} ".encode() + part)
    return digest.digest()


def _code_text(code: CodeType) -> str:
    """Returns a text that differs for functions whose code differs; file names and line numbers are not part of it."""
    constants = [_code_text(part) if isinstance(part, CodeType) else _constant(part) for part in code.co_consts]
    return repr((code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars))


def _constant(value: Any) -> str:
    # The order of a set of strings is not the same in every process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
