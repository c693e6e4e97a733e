"""A trial's way to ask its driver: code that runs in a lane sends a request, and waits for the answer.

The submitter answers, with :meth:`fluid.session.listeners.TrialListener.on_request`. What is asked is up to them:
integrations put a search library's objects in the driver within reach of a trial's code.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from fluid.errors import FluidError
from fluid.trainables.json_form import message_of
from fluid.trainables.trial_code import DriverLink, current_trial

#: Types whose values are the same in every process.
ATOMS = frozenset({float, int, str, bool, type(None), bytes})


class RequestRefusedError(FluidError):
    """A request to the driver has no answer: the trial has ended, or its submitter answers none."""


def driver_link() -> DriverLink:
    """Returns the link of the trial whose code calls it, in any of its threads.

    Raises:
        FluidError: the caller is no code of a trial in a lane.
    """
    code = current_trial()
    if code is None or code.link is None:
        raise FluidError("only the code of a trial, in its lane, has a link to the driver")
    return code.link


def in_trial() -> bool:
    """Whether the caller is code of a trial in a lane."""
    code = current_trial()
    return code is not None and code.link is not None


def dump_message(value: Any) -> bytes:
    """Pickles a request or an answer.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        # cloudpickle takes ten times as long; it is needed for what one of the processes cannot import.
        return pickle.dumps(value) if is_plain(value) else bytes(cloudpickle.dumps(value))
    except BaseException as error:  # A __reduce__ may raise anything.
        raise TypeError(f"{value!r:.200} cannot be pickled: {message_of(error)}") from error


def is_plain(value: Any) -> bool:
    """Whether a value is made of atoms, lists, tuples and dicts only."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if kind is tuple or kind is list:
        return all(map(is_plain, value))
    return kind is dict and all(is_plain(name) and is_plain(part) for name, part in value.items())
