"""Reads JSON into typed records: instances, scenarios, profiles and journals.

A record is a dataclass or a frame. Its fields are read by their types (msgspec), strictly: a string is no number, and
an unknown field is an error, but in profiles. What else a value must be, the record's ``__post_init__`` checks. Errors
name the place in the data and the value there: ``trials[3].alpha=0.5: must be at least 1``. msgspec itself tells only
what is wrong; where, and what would be right, is found once there is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from fluid._private_files import replacing
from fluid.checksums import checked_object, split_object
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.measure.runtime_model import FusedRates
from fluid.resources import MOST_DEVICES, Cluster, Device
from fluid.trial_fields import IterationTimeout, require_timeout

# -- json file -----------------------------------------------------------------------------------
#
# Reads JSON files, and writes them such that a reader finds the old content or the new, never a part.


def write_json(path: str | os.PathLike[str], content: Mapping[str, object]) -> None:
    """Writes ``content``, which is not empty, to a file atomically, with its checksum.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
        ValueError: a number is infinite or NaN.
    """
    with replacing(path, private=False) as draft, draft.open("wb") as file:
        file.write(checked_object(json.dumps(content, indent=1, allow_nan=False)))
        file.flush()
        os.fsync(file.fileno())


def parse_json(data: bytes) -> Any:
    """The value of a JSON file, which may end with a checksum.

    Raises:
        ValueError: the file is not JSON, or its checksum is of another content.
    """
    content = split_object(data)
    if content is None:
        raise ValueError("its checksum is of another content; if you have changed the file, delete its entry crc")
    return json.loads(content.decode("utf-8"))


def without_surrogates(value: Any) -> Any:
    """What JSON holds, with an escape such as ``\\udce9`` for each lone surrogate in a text.

    No output can hold one. A file name that is not UTF-8 has some, and older versions of Fluid let them into ids.
    """
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [without_surrogates(inner) for inner in value]
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(inner) for name, inner in value.items()}
    return value


# -- json input ----------------------------------------------------------------------------------


T = TypeVar("T")
NonNegative = Annotated[float, Meta(ge=0.0)]
AtLeastOne = Annotated[float, Meta(ge=1.0)]
NonNegativeInteger = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
#: Where msgspec found an error: ``$.trials[3].alpha``; it does not name the keys of mappings.
_WHERE = re.compile(r" - at `(?:key` in `)?\$([^`]*)`\Z")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object from a file; an error names the file and, for bad JSON, the place in it."""
    try:
        data = parse_json(Path(path).read_bytes())
    except OSError as error:
        raise InvalidFieldError("path", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("path", str(path), f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidFieldError("path", str(path), "must hold one JSON object")
    return data


def cluster_from_json(devices: object) -> Cluster:
    """Makes a cluster from a count, or from a list of objects with the fields of :class:`Device`."""
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        return Cluster.of(require_integer("devices", devices, at_least=1, at_most=MOST_DEVICES))
    placed = [
        {"index": position, "kind": "gpu", **device} if isinstance(device, Mapping) else device
        for position, device in enumerate(devices)
    ]
    return Cluster(tuple(read_record(placed, list[Device], "devices", place="devices")))


def rates_from_json(fused: Mapping[str, float]) -> FusedRates | None:
    """Makes the rates of fused packs from seconds of an iteration by rows, relative to a trial alone; ``None`` of none.

    Example:
        >>> rates_from_json({"2": 1.1, "4": 1.4})
        FusedRates(rows=(1, 2, 4), stretches=(1.0, 1.1, 1.4))
    """
    for rows in fused:
        if not rows.isdecimal() or int(rows) < 1:
            raise InvalidFieldError(f"fused.{rows}", fused[rows], "its name must be a number of rows, at least 1")
    if not fused:
        return None
    try:
        return FusedRates.of({int(rows): stretch for rows, stretch in fused.items()})
    except InvalidFieldError as error:
        raise InvalidFieldError("fused", fused, f"the seconds, relative to those of 1 row, {error.reason}") from error


def read_record(data: object, kind: type[T], what: str, *, place: str = "", others: bool = False) -> T:
    """Makes a record of type ``kind``, a dataclass or a list of them, from decoded JSON.

    Example:
        >>> from fluid.resources import Device
        >>> read_record({"index": 3, "speed": 2}, Device, "device")
        Device(index=3, host='localhost', kind='cpu', speed=2.0, memory_bytes=None)
        >>> read_record([{"index": 3, "speed": 0}], list[Device], "devices", place="devices")
        Traceback (most recent call last):
        fluid.errors.InvalidFieldError: devices[0].speed=0.0: must be above 0

    Args:
        data: what ``json.loads`` returned, or a part of that.
        kind: the type to make.
        what: what the data are, for an error about them as a whole (``"profile"``).
        place: where in the file ``data`` stand, for errors; empty if they are all of it.
        others: whether other fields are passed over, as a newer Fluid may have written them; else they are refused.

    Raises:
        InvalidFieldError: a field is missing, unknown or of the wrong type, or its value cannot be used.
    """
    shape = _shape(kind)
    try:
        try:
            made = msgspec.convert(data, kind)
        except UnicodeEncodeError:  # Where msgspec wants something else than a text, it names none with a surrogate.
            data = _with_whole_numbers(without_surrogates(data), shape)
            made = msgspec.convert(data, kind)
        except msgspec.ValidationError:
            data = _with_whole_numbers(data, shape)
            made = msgspec.convert(data, kind)
        _check_rest(data, shape, others)
        return made
    except msgspec.ValidationError as error:
        refusal = _refusal(error, data, shape)
        raise InvalidFieldError(
            _placed(refusal, place).field.lstrip(".") or what, refusal.value, refusal.reason
        ) from error
    except InvalidFieldError as error:
        raise InvalidFieldError(_placed(error, place).field.lstrip(".") or what, error.value, error.reason) from error


class _Shape:
    """What JSON data of a type are.

    Args:
        kind: the type.

    Attributes:
        base: ``float``, ``int`` and so on, ``dict`` of a record; ``None`` of several.
        bounds: of a number; ``None`` for none.
        choices: the strings that it may be; empty if it is none of some.
        record: the class of a record; ``None`` if it is none.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.bounds: Meta | None = None
        self.choices: tuple[str, ...] = ()
        self.record: Any = None
        args = [each for each in get_args(kind) if each is not NoneType]
        if kind != IterationTimeout and get_origin(kind) in (Union, UnionType) and len(args) == 1:
            (kind,) = args  # It may be null, too.
        if get_origin(kind) is Annotated:
            kind, self.bounds = kind.__origin__, kind.__metadata__[0]
        self._args, self.base = get_args(kind), get_origin(kind) or kind
        if self.base is Literal:
            self.base, self.choices = str, self._args
        elif self.base in (Union, UnionType):
            self.base = IterationTimeout if kind == IterationTimeout else None
        elif self.base is Mapping:
            self.base = dict
        elif isinstance(self.base, type) and issubclass(self.base, Enum):
            self.base, self.choices = str, tuple(each.value for each in self.base)
        elif dataclasses.is_dataclass(self.base) or (isinstance(self.base, type) and issubclass(self.base, Struct)):
            self.base, self.record = dict, self.base

    @functools.cached_property
    def item(self) -> _Shape:
        """What a list's items are, or an object's values."""
        return _shape(self._args[-1 if self.base is dict else 0] if self._args else Any)

    @functools.cached_property
    def fields(self) -> Mapping[str, _Shape]:
        """What a record's fields are, by name."""
        hints = get_type_hints(self.record, localns={"KW_ONLY": object}, include_extras=True)
        if issubclass(self.record, Struct):
            return {name: _shape(hints[name]) for name in self.record.__struct_fields__}
        return {each.name: _shape(hints[each.name]) for each in dataclasses.fields(self.record) if each.init}

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether nothing is left to check once msgspec has read it."""
        if self.base in (list, tuple, dict):
            return self.record is None and self.item.is_plain
        return self.base not in (float, int, IterationTimeout)

    def refuse(self, value: object, otherwise: str) -> NoReturn:
        """Raises InvalidFieldError, as a value that msgspec refuses is none of this: says what it must be.

        Args:
            value: the value.
            otherwise: what msgspec says.
        """
        least, most, longest = (None, None, None)
        if self.bounds is not None:
            least, most, longest = self.bounds.ge, self.bounds.le, self.bounds.max_length
        if self.choices:
            require_one_of("", value, self.choices)
        elif self.base in (float, int):
            number = require_number("", value, at_least=-math.inf if least is None else least)
            if most is not None and number > most:
                raise InvalidFieldError("", value, f"must be at most {most:g}")
        elif isinstance(value, list) and longest is not None and len(value) > longest:
            raise InvalidFieldError("", value, f"must be a list of at most {longest}")
        elif isinstance(value, list) and self.base is tuple:
            raise InvalidFieldError("", value, f"must be a list of {len(self._args)}")
        self.check_number(value)
        kind, reason = _WANTED.get(self.base, (object, ""))
        raise InvalidFieldError("", value, otherwise if isinstance(value, kind) else reason)

    def check_number(self, value: object) -> None:
        """Raises InvalidFieldError if a number is not finite, too large, or what no iteration may take."""
        if self.base == IterationTimeout:
            require_timeout("", value)
        elif self.base is float:
            require_number("", value, at_least=-math.inf)
        elif self.base is int:
            require_integer("", value, at_least=-(2**63))

    def refuse_unknown(self, value: Mapping[str, Any]) -> None:
        """Raises InvalidFieldError if an object has a name that is no field of the record."""
        for name in value:
            if name not in self.fields:
                known = ", ".join(sorted(self.fields))
                raise InvalidFieldError(name, value[name], f"is no field here; known: {known}")


_WANTED: dict[Any, tuple[type, str]] = {
    **dict.fromkeys((list, tuple), (list, "must be a list")),
    dict: (dict, "must be a JSON object"),
    str: (str, "must be a string"),
    bool: (bool, "must be true or false"),
}


_shape: Callable[[Any], _Shape] = functools.cache(_Shape)


def _check_rest(value: Any, shape: _Shape, others: bool) -> None:
    """Checks what msgspec does not: that all names are known, unless it may have others; that numbers can be used.

    Raises:
        InvalidFieldError: one is not; it has the place.
    """
    if shape.is_plain or value is None:
        return
    if type(value) is not dict and not isinstance(value, (list, Mapping)):
        shape.check_number(value)
        return
    parts: Mapping[Any, Any] = dict(enumerate(value)) if isinstance(value, list) else value
    fields: Mapping[Any, _Shape] | None = None if shape.record is None else shape.fields
    for step, part in parts.items():
        if fields is not None and step not in fields:
            if others:
                continue
            shape.refuse_unknown(parts)
        kind = type(part)
        if kind in _CHECKED or (kind is float and _LEAST < part < _MOST) or (kind is int and -_EXACT < part < _EXACT):
            continue  # As nearly all are: a submission may have a hundred thousand trials.
        try:
            _check_rest(part, shape.item if fields is None else fields[step], others)
        except InvalidFieldError as error:
            raise _placed(error, f"[{step!r}]" if fields is None else f".{step}") from None


#: Of these types msgspec leaves nothing to check, nor of numbers between these.
_CHECKED = frozenset((str, bool, NoneType))
_LEAST, _MOST, _EXACT = -math.inf, math.inf, 2**53


def _placed(error: InvalidFieldError, place: str) -> InvalidFieldError:
    """An error with the place that its field is in before it."""
    field = error.field if not error.field or error.field[0] in ".[" else f".{error.field}"
    return InvalidFieldError(f"{place}{field}", error.value, error.reason)


def _with_whole_numbers(value: Any, shape: _Shape) -> Any:
    """The data with ``2`` in place of ``2.0`` wherever a whole number is wanted."""
    if shape.base is int:
        return int(value) if type(value) is float and value.is_integer() else value
    if isinstance(value, Mapping) and shape.record is not None:
        fields = shape.fields
        return {
            name: _with_whole_numbers(each, fields[name]) if name in fields else each for name, each in value.items()
        }
    if isinstance(value, Mapping) and shape.base is dict:
        return {name: _with_whole_numbers(each, shape.item) for name, each in value.items()}
    if isinstance(value, list) and shape.base in (list, tuple):
        return [_with_whole_numbers(each, shape.item) for each in value]
    return value


def _refusal(error: msgspec.ValidationError, data: Any, shape: _Shape) -> InvalidFieldError:
    """What msgspec refuses, as an error that names the place, the value there, and what it must be."""
    found, place, value = _WHERE.search(str(error)), "", data
    for name, index in _STEP.findall("" if found is None else found[1]):
        step: Any = name
        if name:
            shape, place = shape.fields[name], f"{place}.{name}"
        else:
            shape = shape.item
            step = int(index) if index.isdigit() else next(key for key in value if _is_refused(value[key], shape.kind))
            place += f"[{step!r}]"
        value = value[step]
    reason = str(error)[: None if found is None else found.start()]
    try:
        if error.__cause__ is not None:
            raise error.__cause__
        if (missing := _MISSING.match(reason)) is not None:
            shape.refuse_unknown(value)  # It may be misspelt.
            raise InvalidFieldError(missing[1], None, "is missing")
        shape.refuse(value, reason)
    except InvalidFieldError as known:
        return _placed(known, place)


def _is_refused(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return True
    return False
