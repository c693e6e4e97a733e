"""Optuna's trial as an objective in a lane has it: every method and property is a request to the driver's own trial.

The names are those of the Optuna that is installed. The driver's end is :mod:`fluid.integrations.optuna.answering`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fluid._imports import try_import
from fluid.errors import FluidError
from fluid.integrations.optuna.request import Request
from fluid.trainables.trial_code import DriverLink

with try_import("Optuna", extra="optuna"):
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import Trial

Class = TypeVar("Class", bound=type)

#: Attributes of their objects that are set by ``__init__``, and so are no members of the classes.
_OF_TRIAL = ("relative_search_space",)
_OF_STUDY = ("study_name",)


def _remote_members(source: type, attributes: Sequence[str], excluded: Sequence[str]) -> Callable[[Class], Class]:
    """Gives a class the public members of another one, as requests to the driver's object."""

    def decorate(cls: Class) -> Class:
        public = [name for name in dir(source) if not name.startswith("_") and name not in excluded]
        for name in public:
            member = getattr(source, name)
            if callable(member):
                setattr(cls, name, _remote_method(name, member))
            elif isinstance(member, property):
                setattr(cls, name, _remote_property(name))
        for name in attributes:
            setattr(cls, name, _remote_property(name))
        return cls

    return decorate


def _remote_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: ObjectiveTrial | ObjectiveStudy | ObjectiveStorage, *args: Any, **kwargs: Any) -> Any:
        return self._ask(name, (args, kwargs))

    return call


def _remote_property(name: str) -> property:
    return property(lambda self: self._ask(name))


@_remote_members(Study, _OF_STUDY, ("ask", "optimize", "pruner", "sampler", "tell"))
class ObjectiveStudy:
    """The ``study`` of a trial in a lane: what can be read of it, ``stop``, and what adds to it.

    Args:
        link: to the driver.
    """

    def __init__(self, link: DriverLink) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trial.study.{name} is not supported in an objective on Fluid: the study itself is in the driver's process"
        )

    def _ask(self, name: str, call: Any = None) -> Any:
        return self._link.ask(tuple(Request("study", name, call)))

    def _is_multi_objective(self) -> bool:
        """As in Optuna, whose pruning callbacks for other libraries ask for it."""
        return len(self._ask("directions")) > 1


@_remote_members(BaseStorage, (), ())
class ObjectiveStorage:
    """The ``storage`` of a trial in a lane, which Optuna's own helpers write attributes to.

    Args:
        link: to the driver.
    """

    def __init__(self, link: DriverLink) -> None:
        self._link = link

    def _ask(self, name: str, call: Any = None) -> Any:
        return self._link.ask(tuple(Request("storage", name, call)))


@_remote_members(Trial, _OF_TRIAL, ("number",))
class ObjectiveTrial(Trial):  # type: ignore[misc]
    """The trial that an objective in a lane gets: a ``Trial``, as libraries ask for one, with nothing of its state.

    Args:
        link: to the driver.
        number: the trial's.
        storage_id: by which the study's storage knows it.

    Attributes:
        study: the trial's study.
        storage: the study's storage.
    """

    def __init__(self, link: DriverLink, number: int, storage_id: int) -> None:
        self._link = link
        self._number = number
        self._trial_id = storage_id
        self.study = ObjectiveStudy(link)
        self.storage = ObjectiveStorage(link)

    @property
    def number(self) -> int:
        """The trial's number, from 0."""
        return self._number

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trial.{name} is not supported in an objective on Fluid")

    def __reduce__(self) -> Any:
        raise FluidError("a trial cannot be pickled: use it in the process in which the objective runs")

    def _ask(self, name: str, call: Any = None) -> Any:
        return self._link.ask(tuple(Request("trial", name, call)))
