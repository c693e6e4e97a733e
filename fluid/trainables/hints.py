"""What is said besides of an exception that a trainable raised, where it tells of a common mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from fluid.trainables.json_form import message_of

#: What objectives of Optuna ask of their trial.
_OF_A_TRIAL = re.compile(r"suggest_\w+|report|should_prune|set_user_attr")
#: What the hp of Keras Tuner has.
_OF_KERAS_TUNER = ("Int", "Float", "Choice", "Boolean", "Fixed")
_NO_ATTRIBUTE = re.compile(r"'dict' object has no attribute '(\w+)'")
#: Most names of a config that are told.
_MOST_NAMES = 12


def add_hint(error: Exception, config: Mapping[str, Any]) -> None:
    """Notes on an exception of a trainable what its config has, if it asked that for something else.

    The note is among the exception's ``__notes__``, which Python 3.11 and later print with it.
    """
    with suppress(Exception):  # It looks at objects of the user's, whose methods may raise.
        hint = _hint(error, config)
        notes: list[str] = getattr(error, "__notes__", [])
        if hint and hint not in notes:
            vars(error)["__notes__"] = [*notes, hint]


def _hint(error: Exception, config: Mapping[str, Any]) -> str:
    if isinstance(error, KeyError):
        return _of_key(error, config)
    if isinstance(error, AttributeError):
        return _of_attribute(error, config)
    if type(error).__name__ == "TrialPruned":
        return "Fluid stops trials itself, as algorithm='asha' says; a trial that has no more to do returns"
    return ""


def _of_key(error: KeyError, config: Mapping[str, Any]) -> str:
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in config or not _is_at_hand(error.__traceback__, config):
        return ""
    names = list(map(str, config))
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"config has {', '.join(names[:_MOST_NAMES])}{rest}" if names else "config is empty"


def _of_attribute(error: AttributeError, config: Mapping[str, Any]) -> str:
    found = _NO_ATTRIBUTE.search(message_of(error))
    if found is None:
        return ""
    name = found[1]
    if name in config:
        return f"a config is a dict: config[{name!r}]"
    if name in _OF_KERAS_TUNER:
        return "a trainable is called with its config, a dict: give fluid.run a space with names, and read config['lr']"
    if not _OF_A_TRIAL.fullmatch(name):
        return ""
    return (
        "Fluid calls a trainable with its config, a dict. A function of an Optuna trial is an objective: pass it to"
        " optimize() of fluid.integrations.optuna"
    )


def _is_at_hand(trace: TracebackType | None, config: Mapping[str, Any]) -> bool:
    """Whether the code that raised has the config, by itself or as part of its object."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return any(isinstance(value, dict) and value.keys() == config.keys() for value in _at_hand(trace))


def _at_hand(trace: TracebackType | None) -> Iterator[Any]:
    """The variables of a frame, and the attributes of what they are."""
    for value in [] if trace is None else trace.tb_frame.f_locals.values():
        yield value
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield from list(attributes.values())
