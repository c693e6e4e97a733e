"""How an objective moves to lanes: the driver's objects that it refers to stay what they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.integrations.optuna.known_objects import is_copied_by_value, reduce_with_name
from fluid.trainables.script_names import pickling_by

with try_import("Optuna", extra="optuna"):
    from optuna.storages import InMemoryStorage

if TYPE_CHECKING:
    from optuna.study import Study

#: Types of which pickle makes a copy, apart from classes of the user's.
_CONTAINERS = (list, dict, set, bytearray)


@contextmanager
def moving(study: Study, *, is_objective: bool) -> Iterator[None]:
    """Has what is pickled for trials in this thread refer to this very study, and not to a copy of it.

    An objective or a trainable may find the study by name, in its closure or its globals, or the storage that keeps it
    in memory. The functions and instances in an objective can be named in its requests.

    Args:
        study: whose trials they are.
        is_objective: whether they run a plain objective, rather than a trainable, whose lanes need no Optuna.
    """
    from fluid.integrations.optuna.objective_trial import lane_storage, lane_study

    storage = study._storage if isinstance(study._storage, InMemoryStorage) else None

    def reduce(obj: Any, reduced: Any) -> Any:
        if obj is study:
            return lane_study, ()
        if obj is storage and storage is not None:
            return lane_storage, ()
        return reduce_with_name(obj, reduced) if is_objective else reduced

    with pickling_by(reduce):
        yield


def shared_with_callbacks(study: Study, objective: Any, callbacks: Sequence[Callable[..., Any]]) -> str:
    """Names the objects that an objective and a callback both refer to, and may both change; empty if there is none.

    Each trial has a copy of the objective's, so that neither of the two sees what the other one changes.
    """
    of_objective = _referred(objective)
    names: dict[int, str] = {}
    for callback in callbacks:
        for key, (name, value) in _referred(callback).items():
            if key in of_objective and value is not study:
                names[key] = of_objective[key][0] or name or f"the {type(value).__name__} itself"
    return ", ".join(names.values())


def _referred(function: Any) -> dict[int, tuple[str, Any]]:
    """Returns what a callable refers to and may change, by ``id()``; its own object has no name."""
    found: list[tuple[str, Any]] = []
    while isinstance(function, functools.partial):
        found += [(f"args[{number}]", value) for number, value in enumerate(function.args)]
        found += function.keywords.items()
        function = function.func
    if isinstance(function, MethodType):
        found.append(("", function.__self__))
        function = function.__func__
    elif not isinstance(function, FunctionType):
        found.append(("", function))
        function = vars(type(function)).get("__call__")
    if isinstance(function, FunctionType):
        used = inspect.getclosurevars(function)
        found += [*used.nonlocals.items(), *used.globals.items()]
    return {
        id(value): (name, value) for name, value in found if type(value) in _CONTAINERS or is_copied_by_value(value)
    }
