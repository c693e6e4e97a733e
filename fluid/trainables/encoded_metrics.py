"""Metrics as they travel: encoded in the lane when the trial reports them, decoded by their reader.

What a trial reported is what it had at the report, whatever it does to its lists and arrays afterwards. The driver's
session writes the text to its files and compares the numbers; it runs no code of the metrics' classes.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import cloudpickle

from fluid._logs import logger_of
from fluid.trainables.json_form import is_json, json_form, key_text, message_of

_log = logger_of(__name__)

_ATOMS = frozenset({float, str, bool, type(None)})
#: Types that are no scalars of NumPy or PyTorch, whatever attributes they have.
_PLAIN = _ATOMS | {int, list, tuple, dict}
#: Integers up to this one are floats without rounding.
_EXACT = 1 << 53
_dumps = json.JSONEncoder(check_circular=False).encode


class EncodedMetrics(NamedTuple):
    """What a trial reported of one iteration.

    Attributes:
        text: its JSON form (:func:`fluid.trainables.json_form.json_form`), as ``results.jsonl`` holds it.
        numbers: the metrics that are numbers, by name, NaN and infinities included, as the JSON form has them; nested
            names are joined by ``/``.
        payload: the metrics, pickled, where JSON cannot give them back, types included; ``None`` where it can.
    """

    text: str
    numbers: dict[str, float]
    payload: bytes | None = None

    def decode(self) -> Any:
        """Returns the metrics as the trial reported them, a new copy with each call.

        Unpickling runs code of the metrics' classes: never call this in the session's thread outside of user code.
        Metrics that this process cannot unpickle are returned in their JSON form.
        """
        if self.payload is not None:
            try:
                return pickle.loads(self.payload)
            except KeyboardInterrupt:  # The reader's own.
                raise
            except BaseException as error:  # A __reduce__ may raise anything.
                _log.warning("some metrics cannot be unpickled here, and are in their JSON form: %s", message_of(error))
        return self.plain()

    def plain(self) -> Any:
        """Returns the JSON form, a new copy with each call; runs no code of the metrics' classes."""
        return json.loads(self.text)


#: Of an iteration of which nothing was reported, as in simulations.
NO_METRICS = EncodedMetrics("{}", {})


class IterationRun(NamedTuple):
    """Iterations of one trial that follow each other and are told together, in columns of one element for each.

    Attributes:
        at: when each ended, seconds.
        seconds: wall time of each.
        metrics: what the trial reported of each.
    """

    at: tuple[float, ...]
    seconds: tuple[float, ...]
    metrics: tuple[EncodedMetrics, ...]

    def last(self, count: int) -> IterationRun:
        """Returns the run's last iterations, so many."""
        if count >= len(self.at):
            return self
        return IterationRun(self.at[-count:], self.seconds[-count:], self.metrics[-count:])


def encode_metrics(metrics: Mapping[str, Any]) -> EncodedMetrics:
    """Encodes metrics; scalars of NumPy and PyTorch become plain numbers.

    Raises:
        TypeError: a value can neither be held by JSON nor be pickled.
    """
    plain: dict[str, Any] = {}
    numbers: dict[str, float] = {}
    is_flat = comes_back = True
    for name, value in metrics.items():
        kind = type(value)
        if kind not in _PLAIN:
            value = _number_of(value)
            kind = type(value)
        plain[name] = value
        if kind is float and type(name) is str:
            numbers[name] = value
        elif kind is int and type(name) is str and -_EXACT <= value <= _EXACT:
            numbers[name] = float(value)
        elif kind not in _ATOMS or type(name) is not str:
            is_flat = False
            comes_back = comes_back and type(name) is str and is_json(value)
    form, payload = plain, None
    if not comes_back:
        try:
            payload = cloudpickle.dumps(plain)
        except BaseException as error:  # Their __reduce__ is the user's, and may raise anything.
            names = ", ".join(key_text(name) for name, value in plain.items() if not _can_be_pickled(value))
            raise TypeError(f"these metrics cannot be pickled: {names}: {message_of(error)}") from error
        form = json_form(plain)
    return EncodedMetrics(_dumps(form), numbers if is_flat else numbers_in(form), payload)


def numbers_in(form: Any) -> dict[str, float]:
    """The numbers in the JSON form of metrics, by name; names of nested ones are joined by ``/``.

    A name stands for the value nearest to the top, as in :func:`fluid.keeping.value_of`.
    """
    found: dict[str, float] = {}
    hidden: set[str] = set()  # Names of what is no number: a nested number of that name cannot be reached.
    level = [("", form)] if type(form) is dict else []
    while level:
        deeper: list[tuple[str, Any]] = []
        for prefix, mapping in level:
            for name, value in mapping.items():
                name, kind = f"{prefix}{name}", type(value)
                if kind is dict:
                    deeper.append((f"{name}/", value))
                elif name in found or name in hidden:
                    continue
                elif kind is float:
                    found[name] = value
                elif kind is int:
                    found[name] = _as_float(value)
                elif value is not None or not prefix:
                    hidden.add(name)
        level = deeper
    return found


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except BaseException:  # As above.
        return False
    return True


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:  # As number_of has it.
        return math.nan


def _number_of(value: Any) -> Any:
    """Returns a scalar of NumPy or PyTorch as a plain number; any other value as it is."""
    try:
        return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    except BaseException:  # The class is the user's.
        return value
