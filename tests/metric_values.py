"""Values of metrics as users make them, for tests of how they are read back: made, compared, and changed afterwards."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst


class Point(NamedTuple):
    x: Any
    y: Any = -0.0


@dataclass
class Record:
    name: Any
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Fixed:
    value: Any


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


def _local() -> type:
    """A class that no other process can import, like those of scripts and notebooks: it is pickled by value."""

    @dataclass(repr=False)
    class Local:
        value: Any

        def __repr__(self) -> str:
            return f"Local({self.value!r})"

    return Local


Local = _local()

_TIMES = st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.sampled_from([None, timezone.utc]))
_FLOATS = st.floats() | st.sampled_from([-0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308])
_INTS = st.integers() | st.sampled_from([2**53 + 1, -(2**63), 2**64, 10**40])
#: Without lone surrogates, which no file of text in UTF-8 holds.
_TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ["", "NaN", "null", "a/b", "\0"]
)
_DECIMALS = st.decimals(allow_nan=False) | st.sampled_from([Decimal("0.10"), Decimal("-0"), Decimal("Infinity")])
_KEYED = (
    st.booleans() | _INTS | _TEXTS | st.floats(allow_nan=False) | st.binary(max_size=4) | _DECIMALS | st.fractions()
)
_ATOMS = (
    st.none()
    | st.booleans()
    | _INTS
    | _FLOATS
    | _TEXTS
    | st.binary(max_size=6)
    | st.complex_numbers()
    | _DECIMALS
    | st.fractions()
    | _TIMES
    | st.dates(date(1, 1, 1), date(9999, 12, 31))
    | st.timedeltas(timedelta(-9), timedelta(9))
    | st.uuids()
    | st.sampled_from([*Colour, *Level, PurePosixPath("a/b"), range(3), Ellipsis, NotImplemented, int, math.sin])
)
_DTYPES = st.sampled_from(["?", "i1", "u8", "i4", "f2", "f4", "f8", "c8", "M8[s]", "m8[ms]", "U3", "S2"])
_SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
_ARRAYS = _DTYPES.flatmap(lambda dtype: npst.arrays(dtype, _SHAPES))
_SCALARS = st.sampled_from(["?", "i1", "u8", "f2", "f4", "f8", "c8"]).flatmap(
    lambda dtype: npst.from_dtype(np.dtype(dtype))
)
_HASHED = st.recursive(
    _KEYED | st.none(), lambda inner: st.tuples(inner, inner) | st.builds(Point, inner, inner), max_leaves=4
)


def _nesting(inner: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Any]]:
    """Each way in which a value can hold others."""
    lists = st.lists(inner, max_size=4)
    tables = st.dictionaries(_TEXTS, inner, max_size=3)
    return [
        lists,
        lists.map(tuple),
        lists.map(deque),
        lists.map(_object_array),
        tables,
        st.dictionaries(_HASHED, inner, max_size=3),
        tables.map(OrderedDict),
        tables.map(lambda table: defaultdict(list, table)),
        st.sets(_HASHED, max_size=3),
        st.frozensets(_HASHED, max_size=3),
        st.binary(max_size=4).map(bytearray),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, lists),
        st.builds(Fixed, inner),
        st.builds(Local, inner),
    ]


def _object_array(items: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        array[place] = item
    return array


_ANY = st.recursive(_ATOMS | _ARRAYS | _SCALARS, lambda inner: st.one_of(_nesting(inner)), max_leaves=8)
_SHARED = _ANY.map(lambda shared: [shared, {"again": shared}, (shared,)])
#: Strategies of all kinds of values.
KINDS = (_ATOMS, _ARRAYS, _SCALARS, _SHARED, *_nesting(_ANY))


def made(of_each: int = 12) -> list[Any]:
    """Values, so many of each kind: the same in each run."""
    found: list[Any] = []
    for kind in KINDS:

        @settings(
            max_examples=of_each,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(kind)
        def collect(value: Any) -> None:
            found.append(value)

        collect()
    return found


def write(values: list[Any], path: Path) -> str:
    """Writes values to a file, for :func:`reported`."""
    path.write_bytes(cloudpickle.dumps(values))
    return str(path)


def metrics_of(number: int, value: Any) -> dict[str, Any]:
    """What a trial reports in an iteration, from 1, of a value."""
    twice = [value, value]
    return {"loss": 1.0 / number, "value": value, "nested": {"deep": {"twice": twice}}, "again": twice}


def reported(path: str, first: int = 1) -> Iterator[dict[str, Any]]:
    """The metrics of each value in a file. Whoever has reported one changes it, and all that is in it."""
    values = cloudpickle.loads(Path(path).read_bytes())
    for number, value in enumerate(values[first - 1 :], first):
        metrics = metrics_of(number, value)
        yield metrics
        changed(metrics)


def expected(number: int, value: Any) -> dict[str, Any]:
    """What is read back of :func:`metrics_of`: a scalar of NumPy that is a metric itself is a plain number."""
    metrics = metrics_of(number, value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        metrics["value"] = value.item()
    return metrics


def changed(value: Any, seen: set[int] | None = None) -> None:
    """Changes a value, and all that is in it, as a trial may that goes on with its own objects."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        changed(part, seen)
    if isinstance(value, (list, deque)):
        value.extend(["later"] * 3)
    elif isinstance(value, dict):
        value.clear()
        value["later"] = True
    elif isinstance(value, set):
        value ^= {"later"}
    elif isinstance(value, bytearray):
        value += b"later"
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = np.zeros((), value.dtype) if value.dtype != object else "later"
    elif is_dataclass(value) and not isinstance(value, (type, Fixed)):
        setattr(value, fields(value)[0].name, "later")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return list(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(value.flat)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, one.name) for one in fields(value)]
    return []


def difference(found: Any, wanted: Any, at: str = "") -> str:
    """Where a value that was read back differs from what it was, in type too; empty if it does not.

    NaN is itself, and -0.0 is not 0.0. A scalar of NumPy may have become a plain number.
    """
    if isinstance(wanted, np.generic) and not isinstance(found, np.generic):
        wanted = wanted.item()
    if isinstance(wanted, np.ndarray) and wanted.ndim == 0 and not isinstance(found, np.ndarray):
        wanted = wanted.item()
    if type(found) is not type(wanted):
        return f"{at}: {found!r} of {type(found)}, not {wanted!r} of {type(wanted)}"
    if isinstance(wanted, np.ndarray):
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return f"{at}: {found!r}, not {wanted!r}"
        if wanted.dtype != object:
            return "" if found.tobytes() == wanted.tobytes() else f"{at}: {found!r}, not {wanted!r}"
    if isinstance(wanted, (set, frozenset)):
        return _first(difference(a, b, f"{at}{{}}") for a, b in _paired(found, wanted)) or _lengths(found, wanted, at)
    if isinstance(wanted, Mapping):
        keys = difference(list(found), list(wanted), f"{at} keys") or _lengths(found, wanted, at)
        factories = [getattr(one, "default_factory", None) for one in (found, wanted)]
        return (
            keys
            or ("" if factories[0] is factories[1] else f"{at}: {factories}")
            or _first(difference(found[key], wanted[key], f"{at}[{key!r}]") for key in wanted)
        )
    if parts := _parts(wanted):
        others = _parts(found)
        inner = (difference(a, b, f"{at}[{n}]") for n, (a, b) in enumerate(zip(others, parts, strict=False)))
        return _first(inner) or _lengths(others, parts, at)
    if isinstance(wanted, np.ndarray):
        return ""  # It is empty.
    return "" if _atom(found) == _atom(wanted) else f"{at}: {found!r}, not {wanted!r}"


def _atom(value: Any) -> Any:
    """A value that is equal for equal atoms, also where these compare as unequal (NaN) or equal (-0.0)."""
    is_number = isinstance(value, (float, complex, Decimal, np.generic))
    return repr(value) if is_number else (value, getattr(value, "tzinfo", None))


def _paired(found: Any, wanted: Any) -> list[tuple[Any, Any]]:
    def order(one: Any) -> str:
        return f"{type(one)} {one!r}"

    return list(zip(sorted(found, key=order), sorted(wanted, key=order), strict=False))


def _lengths(found: Any, wanted: Any, at: str) -> str:
    return "" if len(found) == len(wanted) else f"{at}: {len(found)} items, not {len(wanted)}"


def _first(differences: Iterator[str]) -> str:
    return next(filter(None, differences), "")


class Text(str):
    """The text of a value that JSON cannot hold; that of a set has its items in any order."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and sorted(self) == sorted(other)


def as_json(value: Any) -> Any:
    """The JSON form of a value, as the documents say: what can be compared is a number, and the rest is text."""
    if value is None or type(value) in (bool, str, float) or (type(value) is int and abs(value) < 1 << 4096):
        return value
    if isinstance(value, Mapping):
        return {key if type(key) is str else repr(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(inner) for inner in value]
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        item = value.item()
        return item if type(item) in (bool, int, float, str) else Text(repr(value))
    if isinstance(value, (float, Decimal, Fraction)):
        return float(value)
    if isinstance(value, int):
        return int(value)
    return str(value) if isinstance(value, str) else Text(repr(value))


def json_difference(found: Any, value: Any) -> str:
    """Where the JSON form of a value, as it was read, differs from what it should be; empty if it does not."""
    return _json_difference(found, as_json(value), "")


def _json_difference(found: Any, wanted: Any, at: str) -> str:
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        return _first(_json_difference(found[key], wanted[key], f"{at}[{key!r}]") for key in wanted)
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        inner = zip(found, wanted, strict=True)
        return _first(_json_difference(a, b, f"{at}[{n}]") for n, (a, b) in enumerate(inner))
    if isinstance(wanted, Text):
        return "" if wanted == found else f"{at}: {found!r}, not {str(wanted)!r}"
    same = type(found) is type(wanted) and (repr(found) == repr(wanted))
    return "" if same else f"{at}: {found!r}, not {wanted!r}"


def wrong(metrics: Mapping[int, Any], values: list[Any], compare: Callable[[Any, Any], str] = difference) -> list[str]:
    """What differs of the metrics of some iterations from what was reported, the first few first."""
    found = {number: compare(metrics[number], expected(number, value)) for number, value in enumerate(values, 1)}
    return [f"iteration {number}{text}" for number, text in found.items() if text]


def by_yield(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reports the values in a file; nothing takes time, so that results travel in batches."""
    yield from reported(config["path"])


def with_state(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """The same, and can be saved."""
    done = state or 0
    for metrics in reported(config["path"], done + 1):
        done += 1
        yield metrics, done


def by_report(config: dict[str, Any]) -> None:
    """The same, as a function that reports."""
    import fluid

    for metrics in reported(config["path"]):
        fluid.report(metrics)


class ByStep:
    """The same, as a class."""

    def setup(self, config: dict[str, Any]) -> None:
        self._reported, self._done = reported(config["path"]), 0

    def step(self) -> dict[str, Any]:
        self._done += 1
        return next(self._reported)

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "done").write_text(str(self._done), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        raise NotImplementedError("no test has it go on elsewhere")


class Replayed:
    """The same on a virtual clock: it changes what it has returned of a trial when it is asked for more of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._returned: dict[str, list[dict[str, Any]]] = {}

    def replay(self, config: Mapping[str, Any], iterations: range) -> list[Any]:
        from fluid.rehearsal import ReplayedIteration

        for metrics in self._returned.get(config["group"], ()):
            changed(metrics)
        values = cloudpickle.loads(Path(self._path).read_bytes())
        returned = [metrics_of(number, values[number - 1]) for number in iterations]
        self._returned[config["group"]] = returned
        return [ReplayedIteration(metrics, seconds=1.0) for metrics in returned]
