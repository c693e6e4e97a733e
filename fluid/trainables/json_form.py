"""The JSON form of values that users' code makes: metrics and configs, for the files of a run.

It can be made of anything: scalars of NumPy and PyTorch become numbers, keys become text, and so does whatever JSON
cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid.keeping import number_of

#: Types whose values JSON holds as they are, and which nest nothing; ``int`` is apart, because of its size.
_ATOMS = frozenset({float, str, bool, type(None)})
#: Python writes no integer of many more digits.
_LARGEST = 1 << 4096
#: Most levels of nesting; what lies deeper becomes text.
_DEPTH = 20


def is_json(value: Any, depth: int = _DEPTH, within: tuple[int, ...] = ()) -> bool:
    """Whether JSON gives a value back as it is, type included; runs no code of the value's class.

    Args:
        value: any value, cyclic ones too.
        depth: most levels of nesting.
        within: ids of what the value is in, from the outside in; one of these is not looked at again.
    """
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is int:
        return bool(-_LARGEST < value < _LARGEST)
    if depth <= 0 or (kind is not dict and kind is not list) or id(value) in within:
        return False
    within = (*within, id(value))
    if kind is dict:
        return all(type(key) is str and is_json(inner, depth - 1, within) for key, inner in value.items())
    return all(is_json(inner, depth - 1, within) for inner in value)


def json_form(value: Any, depth: int = _DEPTH, within: tuple[int, ...] = ()) -> Any:
    """Returns a value of the types that JSON has. Never raises, whatever the methods of the value's class do.

    Args:
        value: any value.
        depth: most levels of nesting; what lies deeper becomes text, as does what holds itself.
        within: ids of what the value is in, from the outside in.
    """
    try:
        return value if is_json(value, depth, within) else _converted(value, depth, within)
    except BaseException:  # The class is the user's, and may raise anything, SystemExit too.
        return _text(value)


def is_form_of(value: Any, form: Any) -> bool:
    """Whether JSON may give ``form`` back of a value, by what JSON holds as it is; of other parts that is not known."""
    if type(value) is dict and type(form) is dict and all(type(name) is str for name in value):
        return value.keys() == form.keys() and all(is_form_of(inner, form[name]) for name, inner in value.items())
    if type(value) is list and type(form) is list:
        return len(value) == len(form) and all(map(is_form_of, value, form))
    is_plain = type(value) in _ATOMS or (type(value) is int and -_LARGEST < value < _LARGEST)
    return not is_plain or (type(value) is type(form) and (value == form or value != value))


def message_of(error: BaseException) -> str:
    """Returns the message of an exception, whose class may be the user's. Never raises."""
    try:
        return str.__str__(str(error))
    except BaseException:  # As above.
        return "(its message cannot be shown)"


def _converted(value: Any, depth: int, within: tuple[int, ...]) -> Any:
    if depth > 0 and id(value) not in within:
        inside = (*within, id(value))
        if isinstance(value, Mapping):
            return {key_text(key): json_form(inner, depth - 1, inside) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [json_form(inner, depth - 1, inside) for inner in value]
    if isinstance(value, float):
        return float.__float__(value)
    number = int.__int__(value) if isinstance(value, int) else value.item() if hasattr(value, "item") else None
    if number is None and not isinstance(value, str):
        number = number_of(value)  # A Decimal, a Fraction: what is compared is what the files hold.
    return number if number is not None and is_json(number, 0) else _text(value)


def key_text(key: Any) -> str:
    """Returns the key that a key of a mapping has in its JSON form. Never raises."""
    return key if type(key) is str else _text(key)


def _text(value: Any) -> str:
    try:
        return str.__str__(value if isinstance(value, str) else repr(value))
    except BaseException:  # As above.
        return f"<{type(value).__name__}>"
