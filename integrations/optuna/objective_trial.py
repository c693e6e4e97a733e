"""Optuna's trial as an objective in a lane has it: every method and property is a request to the driver's own trial.

The names are those of the Optuna that is installed. The driver's end is :mod:`fluid.integrations.optuna.answering`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from fluid._imports import try_import
from fluid.errors import FluidError
from fluid.integrations.optuna.known_objects import as_message
from fluid.integrations.optuna.request import Request, Target
from fluid.trainables.driver_link import ATOMS, driver_link
from fluid.trainables.trial_code import DriverLink

with try_import("Optuna", extra="optuna"):
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import Trial

Class = TypeVar("Class", bound=type)

#: Attributes of their objects that are set by ``__init__``, and so are no members of the classes.
_OF_TRIAL = ("relative_search_space",)
_OF_STUDY = ("study_name", "_study_id", "_directions")


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


@_remote_members(BaseStorage, (), ())
class ObjectiveStorage:
    """The study's ``storage`` in a lane, which Optuna's own helpers write attributes to."""

    def _ask(self, name: str, call: Any = None) -> Any:
        return _ask(driver_link(), "storage", name, call)

    def __reduce__(self) -> Any:
        return lane_storage, ()


@_remote_members(Study, _OF_STUDY, ("ask", "optimize", "tell"))
class ObjectiveStudy(Study):  # type: ignore[misc]
    """The study in a lane, that of ``trial.study`` and of the objective's own names: a ``Study`` without its state.

    What can be read of it, ``stop``, and what adds to it are requests of the trial whose code asks.
    """

    def __init__(self) -> None:
        self._storage = lane_storage()

    def optimize(self, *_: object, **__: object) -> None:
        """As in ``study.optimize``, which refuses to be called within an objective."""
        raise RuntimeError("Nested invocation of `Study.optimize` method isn't allowed.")

    @property
    def ask(self) -> Any:
        """Not supported."""
        return self.__getattr__("ask")

    @property
    def tell(self) -> Any:
        """Not supported."""
        return self.__getattr__("tell")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"study.{name} is not supported in an objective on Fluid: the study itself is in the driver's process"
        )

    def __reduce__(self) -> Any:
        return lane_study, ()

    def _ask(self, name: str, call: Any = None) -> Any:
        return _ask(driver_link(), "study", name, call)


@functools.cache
def lane_study() -> ObjectiveStudy:
    """Returns the study of this lane's trials; there is one object, as in the driver."""
    return ObjectiveStudy()


@functools.cache
def lane_storage() -> ObjectiveStorage:
    """Returns the storage of this lane's trials."""
    return ObjectiveStorage()


@_remote_members(Trial, _OF_TRIAL, ("number", "suggest_categorical"))
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
        self.study = lane_study()
        self.storage = lane_storage()

    @property
    def number(self) -> int:
        """The trial's number, from 0."""
        return self._number

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Returns one of the choices: the objective's own, not a copy that comes from the driver."""
        if not isinstance(choices, Collection) or ATOMS.issuperset(map(type, choices)):
            return self._ask("suggest_categorical", ((name, choices), {}))
        own = list(choices)
        return own[_ask(self._link, "choice", name, ((own,), {}))]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trial.{name} is not supported in an objective on Fluid")

    def __reduce__(self) -> Any:
        raise FluidError("a trial cannot be pickled: use it in the process in which the objective runs")

    def _ask(self, name: str, call: Any = None) -> Any:
        return _ask(self._link, "trial", name, call)


def _ask(link: DriverLink, target: Target, name: str, call: Any) -> Any:
    return link.ask(tuple(Request(target, name, as_message(call))))
