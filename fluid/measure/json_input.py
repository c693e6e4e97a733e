"""Reads JSON into typed records: instances, scenarios, profiles and journals.

A record is a dataclass. Its fields are read by their types (cattrs), strictly: a string is no number, and an unknown
field is an error. What else a value must be, the record's ``__post_init__`` checks. Errors name the place in the data
and the value there: ``trials[3].alpha=0.5: must be at least 1``.

cattrs is imported when the first record is read, not before: files are written and trials are run without it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct, structs

from fluid._imports import try_import
from fluid._private_files import replacing
from fluid.checksums import checked_object, split_object
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.measure.runtime_model import FusedRates
from fluid.resources import MOST_DEVICES, Cluster, Device
from fluid.trial_fields import IterationTimeout, require_timeout
from fluid.trialgroup import TrialState

if TYPE_CHECKING:
    from cattrs import Converter


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


# -- json input ----------------------------------------------------------------------------------


T = TypeVar("T")
_Accepted = type | tuple[type, ...]


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number in a file must be: ``Annotated[float, Range(0.0)]`` is one of at least 0."""

    least: float = -math.inf
    most: float = math.inf


NonNegative = Annotated[float, Range(0.0)]
AtLeastOne = Annotated[float, Range(1.0)]
NonNegativeInteger = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
#: No bound that a file meets; :class:`Range` and the records have the real ones.
_LEAST_INTEGER = -(2**63)
_STATES = tuple(state.value for state in TrialState)


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


def read_record(data: object, kind: type[T], what: str, *, place: str = "") -> T:
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

    Raises:
        InvalidFieldError: a field is missing, unknown or of the wrong type, or its value cannot be used.
        MissingDependencyError: cattrs is not installed.
    """
    converter = _converter()
    try:
        return converter.structure(data, kind)
    except Exception as error:
        raise _field_error(error, what, place) from error


@functools.cache
def _converter() -> Converter:
    with try_import("cattrs", install="pip install cattrs") as imports:
        from cattrs import Converter
        from cattrs.cols import homogenous_tuple_structure_factory, is_mapping, is_sequence, list_structure_factory
        from cattrs.gen import make_dict_structure_fn, mapping_structure_factory
    imports.check()
    converter = Converter(detailed_validation=True)
    converter.register_structure_hook(float, lambda value, _: _number(value, float))
    converter.register_structure_hook(int, lambda value, _: _number(value, int))
    converter.register_structure_hook(
        str, lambda value, _: value if type(value) is str else _require(str, value, "must be a string")
    )
    converter.register_structure_hook(TrialState, lambda value, _: TrialState(require_one_of("", value, _STATES)))
    converter.register_structure_hook(bool, lambda value, _: _require(bool, value, "must be true or false"))
    converter.register_structure_hook_func(
        lambda kind: kind == IterationTimeout, lambda value, _: require_timeout("", value)
    )
    converter.register_structure_hook_factory(
        lambda kind: _is_made_of(kind, Annotated),
        lambda kind: lambda value, _: _number(value, kind.__origin__, *kind.__metadata__),
    )
    converter.register_structure_hook_func(
        lambda kind: _is_made_of(kind, Literal), lambda value, kind: require_one_of("", value, get_args(kind))
    )

    def record_reader(kind: Any, converter: Converter) -> Any:
        # cattrs would drop Annotated where annotations are strings, and fail on KW_ONLY under Python 3.10.
        hints = get_type_hints(kind, localns={"KW_ONLY": object}, include_extras=True)
        for field in dataclasses.fields(kind):
            field.type = hints[field.name]
        optional = {name for name, hint in hints.items() if type(None) in get_args(hint)}
        # Generated when it is first needed, which takes a while: it says where in the data an error is.
        read_slowly = functools.cache(lambda: make_dict_structure_fn(kind, converter))

        def read(value: Any, _: Any) -> Any:
            """Takes what is of the type wanted as it is: a submission may have a hundred thousand trials."""
            made = {}
            try:
                for name, part in value.items():
                    wanted = hints[name]
                    if part is None:
                        is_right = name in optional
                    else:
                        is_right = type(part) is wanted and (wanted is str or wanted is bool or _is_exact(part))
                    made[name] = part if is_right else converter.structure(part, wanted)
                return kind(**made)
            except Exception:
                return read_slowly()(value, kind)

        return read

    def frame_reader(kind: Any, converter: Converter) -> Any:
        """cattrs knows no structs: their fields are read as those of a dataclass."""
        hints, nothing = get_type_hints(kind, include_extras=True), dataclasses.MISSING
        fields = [
            (name, hints[name], dataclasses.field(default=nothing if default is NODEFAULT else default))
            for name, default in ((field.name, field.default) for field in structs.fields(kind))
        ]
        twin = dataclasses.make_dataclass(kind.__name__, fields, kw_only=True, frozen=True)
        return lambda value, _: kind(**vars(converter.structure(value, twin)))

    converter.register_structure_hook_factory(lambda kind: isinstance(kind, type(Struct)), frame_reader)
    # By default cattrs reads any iterable as a list, and any container as a record.
    readers: list[tuple[Callable[[Any], bool], Any, _Accepted, str]] = [
        (is_sequence, list_structure_factory, list, "must be a list"),
        (lambda kind: _is_made_of(kind, tuple), homogenous_tuple_structure_factory, list, "must be a list"),
        (is_mapping, mapping_structure_factory, (dict, Mapping), "must be a JSON object"),
        (dataclasses.is_dataclass, record_reader, (dict, Mapping), "must be a JSON object"),
    ]
    for applies, factory, accepted, reason in readers:
        converter.register_structure_hook_factory(applies, _checked(factory, accepted, reason))
    return converter


def _is_made_of(kind: Any, form: Any) -> bool:
    return get_origin(kind) is form


def _checked(factory: Any, accepted: _Accepted, reason: str) -> Callable[[Any, Converter], Callable[[Any, Any], Any]]:
    """Makes hooks that check the value, and the names of a record's fields, before the hooks of ``factory`` read it."""

    def make(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
        read = factory(kind, converter)
        is_record = dataclasses.is_dataclass(kind)
        known = {field.name for field in dataclasses.fields(kind) if field.init} if is_record else set()

        def hook(value: Any, _: Any) -> Any:
            _require(accepted, value, reason)
            if is_record and not known.issuperset(value):
                _refuse_unknown(value, known)
            return read(value, kind)

        return hook

    return make


def _refuse_unknown(data: Mapping[str, Any], known: set[str]) -> None:
    for name in data:
        if name not in known:
            raise InvalidFieldError(name, data[name], f"is no field here; known: {', '.join(sorted(known))}")


def _is_exact(value: object) -> bool:
    """Whether a value is a finite float, or an integer that a float can hold."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= 2**53)


def _number(value: object, kind: type, bounds: Range = Range()) -> float:
    if type(value) is float is kind and bounds.least <= value <= bounds.most and math.isfinite(value):
        return value  # What nearly all numbers are, of which a journal has several in each line.
    number = require_number("", value, at_least=bounds.least)
    if number > bounds.most:
        raise InvalidFieldError("", value, f"must be at most {bounds.most:g}")
    return number if kind is float else require_integer("", value, at_least=_LEAST_INTEGER)


def _require(accepted: _Accepted, value: object, reason: str) -> object:
    if not isinstance(value, accepted):
        raise InvalidFieldError("", value, reason)
    return value


def _field_error(error: Exception, what: str, place: str) -> InvalidFieldError:
    """The first error that cattrs collected, as one that names the place in the data."""
    from cattrs import AttributeValidationNote, BaseValidationError, IterableValidationNote

    while True:
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                place += f".{note.name}"
            elif isinstance(note, IterableValidationNote):
                place += f"[{note.index!r}]"
        if not isinstance(error, BaseValidationError):
            break
        error = error.exceptions[0]
    place = place.lstrip(".")
    if isinstance(error, InvalidFieldError):
        return InvalidFieldError(".".join(filter(None, (place, error.field))) or what, error.value, error.reason)
    if isinstance(error, KeyError):
        return InvalidFieldError(place, None, "is missing")
    raise error
