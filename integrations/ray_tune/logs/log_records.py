"""Records of what Tune's loggers are to write, as they are sent from the driver to the process of the loggers."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import ray.cloudpickle
from ray.tune.utils.util import SafeFallbackEncoder

from fluid.integrations.ray_tune.private_api import Trial
from fluid.integrations.ray_tune.serialization import pickle_arguments
from fluid.measure.json_input import without_surrogates

#: Types of values that every process can unpickle.
_PLAIN = frozenset({str, int, float, bool, type(None), bytes})
_CONFIG = "config"
#: A lone surrogate in a pickle.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


class SentTrial:
    """What loggers read of a trial; equal and hashed by its id, as Tune's own.

    Attributes:
        trial_id: Tune's.
        local_path: its folder in the driver's files.
        name: as Tune shows it.
        config_pickle: content of ``params.pkl``.
        config_text: content of ``params.json``.
        config: the config as JSON shows it; stands for it in results.
        evaluated_params: those of the searcher, as TensorBoard shows them.
        checkpoint: the newest; ``None`` if there is none.
        storage: where earlier logs are kept, if there is a checkpoint.
    """

    def __init__(self, trial: Trial) -> None:
        trial.init_local_path()
        self.trial_id: str = trial.trial_id
        self.local_path: str = str(trial.local_path)
        self.name = str(trial)
        self.config_pickle: bytes = ray.cloudpickle.dumps(trial.config)
        self.config_text = json.dumps(trial.config, indent=2, sort_keys=True, cls=SafeFallbackEncoder)
        self.config: Any = json.loads(json.dumps(trial.config, cls=SafeFallbackEncoder))
        self.evaluated_params: Any = shown_params(trial)
        self.checkpoint: Any = trial.checkpoint
        self.storage: Any = None if trial.checkpoint is None else trial.storage

    def init_local_path(self) -> None:
        """Does nothing: the driver has made the folder."""

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.trial_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SentTrial) and other.trial_id == self.trial_id


def shown_params(trial: Trial) -> Any:
    """The parameters that the searcher chose, in a form to be sent that files can hold."""
    shown = _shown(trial.evaluated_params)
    return without_surrogates(shown) if _SURROGATE.search(pickle.dumps(shown)) else shown


class ShownValue:
    """Stands for a value that only the driver can unpickle: loggers write it as they write the value."""

    def __init__(self, value: Any) -> None:
        self._text = _text_of(str, value)
        self._representation = _text_of(repr, value)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return self._representation


class LoggedResult(NamedTuple):
    """A result on its way to the loggers.

    Attributes:
        pickled: the result; ``None`` if it cannot be pickled, or needs Ray, to which the loggers are not connected.
        shown: the same with a :class:`ShownValue` for each value of a class that the loggers' process may not have;
            ``None`` if there are no such values.
        has_own_config: whether the trial's own config was taken out, which is not sent with each result.
    """

    pickled: bytes | None
    shown: bytes | None
    has_own_config: bool

    @classmethod
    def of(cls, result: dict[str, Any], own_config: Any) -> LoggedResult:
        """Returns a result, as it is now, in a form to be sent."""
        has_own_config = own_config is not None and result.get(_CONFIG) is own_config
        if has_own_config:
            result = {**result, _CONFIG: None}
        with suppress(RecursionError):  # Of a value that holds itself.
            if _is_plain(result):
                return cls(pickle.dumps(result, pickle.HIGHEST_PROTOCOL), None, has_own_config)
        whole = None
        with suppress(Exception):
            pickled = pickle_arguments(result)
            whole = None if pickled.needs_ray else pickled.content
        shown = {_shown_name(name): _shown(value) for name, value in result.items()}
        return cls(whole, pickle.dumps(shown, pickle.HIGHEST_PROTOCOL), has_own_config)

    def unpickle(self, trial: SentTrial) -> dict[str, Any]:
        """Returns the result for the loggers, with escapes for lone surrogates, which no file of theirs can hold."""
        result: dict[str, Any] | None = None
        if self.pickled is not None:
            try:
                result = pickle.loads(self.pickled)
            except Exception:
                if self.shown is None:
                    raise
        if result is None:
            assert self.shown is not None
            result = pickle.loads(self.shown)
        if _SURROGATE.search(self.pickled or b"") or _SURROGATE.search(self.shown or b""):
            result = without_surrogates(result)
        if self.has_own_config:
            result[_CONFIG] = trial.config
        return result


class LogStart(NamedTuple):
    """A trial starts, or has changed. ``loggers`` are the positions of those that are told of the start."""

    loggers: tuple[int, ...]
    trial: SentTrial


class LogResult(NamedTuple):
    """A trial has a result, of an iteration of the controller."""

    loggers: tuple[int, ...]
    trial_id: str
    iteration: int
    result: LoggedResult


class LogEnd(NamedTuple):
    """A trial has ended; ``failed`` as for ``LoggerCallback.log_trial_end``."""

    loggers: tuple[int, ...]
    trial_id: str
    failed: bool
    evaluated_params: Any


class LogFlush(NamedTuple):
    """The driver waits until the files have all earlier records; the answer is the same."""


class LoggerFailed(NamedTuple):
    """A logger has raised.

    Attributes:
        exception: what it raised, pickled.
        traceback: its text.
    """

    exception: bytes
    traceback: str


class LogLine(NamedTuple):
    """A line for the driver's log.

    Attributes:
        attributes: of the ``logging.LogRecord``.
    """

    attributes: dict[str, Any]


def _is_plain(value: Any) -> bool:
    """Whether every process can unpickle a value."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is dict:
        return all(type(name) in _PLAIN and _is_plain(one) for name, one in value.items())
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    is_numpy = kind.__module__ == "numpy" and isinstance(value, np.generic | np.ndarray)
    return is_numpy and not value.dtype.hasobject


def _portable(value: Any) -> Any:
    """A copy of a value that every process can unpickle.

    Of a class derived from text or numbers, such as an enum's, it is the text or the number, as which Tune's loggers
    take it.

    Raises:
        RecursionError: the value holds itself.
    """
    if _is_plain(value):
        return value
    if isinstance(value, dict):
        return {_shown_name(name): _portable(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_portable, value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return ShownValue(value)


def _shown(value: Any) -> Any:
    """A copy of any value that every process can unpickle."""
    try:
        return _portable(value)
    except RecursionError:
        return ShownValue(value)


def _shown_name(name: Any) -> Any:
    return name if type(name) in _PLAIN else _text_of(str, name)


def _text_of(function: Callable[[Any], str], value: Any) -> str:
    """What ``str`` or ``repr`` makes of a value, or what they would without the value's own methods, if these fail."""
    try:
        return function(value)
    except Exception:
        return object.__repr__(value)
