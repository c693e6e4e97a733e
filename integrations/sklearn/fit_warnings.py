"""Warnings of fits and scorers: recorded in the lane, issued in the driver, where the user can see and catch them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fluid.trainables.exception_pickle import dump_exception, load_exception
from fluid.trainables.json_form import message_of


class FitWarning(NamedTuple):
    """A warning that the filters of the search have let through in a lane.

    Attributes:
        pickled: the warning.
        text: what it says.
        module: of the code that it is about, for the filters.
        filename: of that code.
        lineno: the line there.
    """

    pickled: bytes
    text: str
    module: str | None
    filename: str
    lineno: int


@contextmanager
def recorded(found: list[FitWarning]) -> Iterator[None]:
    """Adds the warnings of a block to a list; they are shown nowhere else."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            if caught:
                modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
                found += [_recorded(each, modules.get(each.filename)) for each in caught]


def issue(found: Iterable[FitWarning]) -> None:
    """Issues the warnings of a search, under the filters in force: by default, equal ones are shown once."""
    registry: dict[Any, Any] = {}
    for each in found:
        warning = _warning_of(each)
        warnings.warn_explicit(
            warning, type(warning), each.filename, each.lineno, module=each.module, registry=registry
        )


def _recorded(caught: warnings.WarningMessage, module: str | None) -> FitWarning:
    warning = caught.message if isinstance(caught.message, Warning) else caught.category(caught.message)
    return FitWarning(dump_exception(warning), message_of(warning), module, caught.filename, caught.lineno)


def _warning_of(each: FitWarning) -> Warning:
    found = load_exception(each.pickled)
    return found if isinstance(found, Warning) else UserWarning(each.text)  # The driver may not have its class.
