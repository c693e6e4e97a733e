"""Adapts every form of trainable to one interface, :class:`~fluid.trainables.resident.Resident`.

Users write one of four forms: a class, a subclass of Ray Tune's ``Trainable``, a generator function, or a function for
Ray Tune. Neither Ray nor PyTorch is imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import cloudpickle

from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError
from fluid.trainables.resident import NoIterationLeftError, Resident, Step, step_of, stray_stop_iteration

Kind = Literal["class", "ray_class", "generator", "ray_function"]

#: The folder, within a checkpoint, that a trainable's ``save_checkpoint`` writes to.
_FOLDER = "state"
#: The file, within a checkpoint, with what ``save_checkpoint`` returned.
_RETURNED = "returned.pkl"
#: Attribute by which a Ray Tune class names the elastic class that it wraps.
_WRAPPED_ELASTIC_CLASS = "fluid_elastic_class"
#: The method by which a Ray Tune class requests resources.
_RESOURCE_REQUEST = "default_resource_request"
_OF_EVERY_CLASS = {"__doc__", "__firstlineno__", "__module__", "__qualname__", "__static_attributes__"}


# -- forms of trainables ------------------------------------------------------------------------------------


def kind_of(trainable: Any) -> Kind:
    """Returns the form of a trainable.

    Raises:
        InvalidFieldError: Fluid cannot run it.
        MissingDependencyError: it is a function for Ray Tune, and Ray Tune is not installed.
    """
    if inspect.isclass(trainable):
        if not callable(getattr(trainable, "step", None)):
            raise InvalidFieldError("trainable", trainable, "a class needs a step() method that returns its metrics")
        return "ray_class" if _is_from_ray(trainable) else "class"
    if callable(getattr(trainable, "step", None)):
        raise InvalidFieldError("trainable", trainable, "pass the class itself, not an instance of it")
    if not callable(trainable):
        raise InvalidFieldError("trainable", trainable, "must be a class with step(), or a function of one config")
    function = _function_of(trainable)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidFieldError("trainable", trainable, "asynchronous functions are not supported")
    _require_config_argument(trainable)
    if inspect.isgeneratorfunction(function):
        return "generator"
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(
            f"trainable={trainable!r}: a function that yields nothing needs Ray Tune, which is not installed: "
            "pip install 'ray[tune]', or yield a dict of metrics per iteration"
        )
    return "ray_function"


def can_save(trainable: Any) -> bool:
    """Whether the trials of a trainable can be saved and restored, and so moved to another lane."""
    return inspect.isclass(trainable) and all(
        _defines(trainable, name) for name in ("save_checkpoint", "load_checkpoint")
    )


def is_elastic(trainable: Any) -> bool:
    """Whether the trials of a trainable can span several devices; a class says so by ``fluid_elastic = True``."""
    if inspect.isclass(trainable):
        trainable = without_request(trainable)
    if hasattr(trainable, _WRAPPED_ELASTIC_CLASS) and elastic_class_of(trainable) is None:
        return False  # Derived from a class that wraps an elastic one, and so only known to Ray Tune.
    return bool(getattr(trainable, "fluid_elastic", False))


def elastic_class_of(trainable: Any) -> Any:
    """Returns the elastic class that a Ray Tune class wraps, see :func:`fluid.elastic.as_tune_trainable`.

    Returns:
        The class, which lanes run in its place, without Ray Tune; ``None`` if it wraps none. That includes classes
        derived from one that does: they may override its methods, and run as they are.
    """
    if not isinstance(trainable, type):
        return None
    return vars(without_request(trainable)).get(_WRAPPED_ELASTIC_CLASS)


def without_request(trainable: type) -> type:
    """Returns the class that ``ray.tune.with_resources`` was given: what it returns only adds a request to it."""
    while _RESOURCE_REQUEST in (own := vars(trainable)) and len(trainable.__bases__) == 1:
        if own.keys() - _OF_EVERY_CLASS - {_RESOURCE_REQUEST}:
            break
        trainable = trainable.__bases__[0]
    return trainable


def profile_name(trainable: Any) -> str:
    """Returns the name under which trials of this trainable share their measurements."""
    function = trainable if inspect.isclass(trainable) else _unwrapped(trainable)
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _is_from_ray(cls: type) -> bool:
    # By name: importing Ray to find out would cost seconds.
    return any(base.__module__.startswith("ray.tune.") and base.__name__ == "Trainable" for base in cls.__mro__)


def _defines(cls: type, name: str) -> bool:
    """Whether a class has a method of that name, other than the stub of Ray Tune's base class."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is not None and not owner.__module__.startswith("ray.tune.trainable")


def _unwrapped(trainable: Any) -> Any:
    while isinstance(trainable, functools.partial):
        trainable = trainable.func
    return trainable


def _function_of(trainable: Any) -> Any:
    function = _unwrapped(trainable)
    if inspect.isfunction(function) or inspect.ismethod(function) or inspect.isbuiltin(function):
        return function
    return type(function).__call__


def _require_config_argument(trainable: Any) -> None:
    try:
        inspect.signature(trainable).bind({})
    except TypeError as error:
        raise InvalidFieldError("trainable", trainable, f"must take the config as its only argument: {error}") from None
    except ValueError:
        pass  # Some built-in callables have no signature.


# -- adapters -------------------------------------------------------------------------------------------------


def make_resident(trainable: Any, *, trial_id: str, folder: str) -> Resident:
    """Makes the adapter for a trainable; no code of the user's runs before its ``setup``.

    Args:
        trainable: what the user gave.
        trial_id: passed on to Ray Tune's trainables.
        folder: the trial's own folder; need not exist.

    Raises:
        InvalidFieldError, MissingDependencyError: see :func:`kind_of`.
    """
    kind = kind_of(trainable)
    if kind == "class":
        return _ClassResident(trainable)
    if kind == "generator":
        return _GeneratorResident(trainable)
    from fluid.trainables.ray import RayClassResident, RayFunctionResident  # Loaded only for Ray's trainables.

    if kind == "ray_class":
        return RayClassResident(trainable, trial_id, folder)
    return RayFunctionResident(trainable, trial_id, folder)


def set_up(resident: Resident, config: dict[str, Any], *, joins: bool = False) -> None:
    """Sets a resident up.

    Args:
        resident: a new one.
        config: the trial's.
        joins: whether it will receive its state from another lane; a class's ``setup_to_join``, if it has one, is then
            called instead of ``setup``.
    """
    if joins and isinstance(resident, _ClassResident):
        resident.set_up_to_join(config)
    else:
        resident.setup(config)


def load_trainable(trainable: Any, config: dict[str, Any], checkpoint: str, *, trial_id: str, folder: str) -> Any:
    """Returns the object of a trainable's class, set up and restored from a checkpoint.

    Args:
        trainable: a class that can be saved.
        config: the trial's.
        checkpoint: folder that :meth:`~fluid.trainables.resident.Resident.save` filled.
        trial_id: passed on to Ray Tune's trainables.
        folder: the trial's own folder.

    Raises:
        InvalidFieldError: the trainable is no class that can be saved.
    """
    if not can_save(trainable):
        raise InvalidFieldError("trainable", trainable, "cannot be saved, so it has no checkpoint to load")
    resident = make_resident(trainable, trial_id=trial_id, folder=folder)
    resident.setup(config)
    resident.restore(checkpoint)
    return resident.trainable  # type: ignore[attr-defined]  # Classes have one.


def elastic_part(resident: Resident) -> Any:
    """Returns a resident's :class:`fluid.elastic.ElasticTrainable`.

    Raises:
        FluidError: its trainable is of another class.
    """
    trainable = getattr(resident, "trainable", None)
    if not is_elastic(trainable) or not hasattr(trainable, "load_elastic_state"):
        raise FluidError("only a subclass of fluid.elastic.ElasticTrainable can train on several devices")
    return trainable


class _ClassResident:
    """A class with ``step`` and, optionally, ``setup``, ``save_checkpoint``, ``load_checkpoint`` and ``cleanup``.

    Without ``setup`` the config goes to ``__init__``.
    """

    def __init__(self, cls: type) -> None:
        self._class = cls
        self.trainable: Any = None

    def setup(self, config: dict[str, Any]) -> None:
        try:
            if hasattr(self._class, "setup"):
                self.trainable = self._class()
                self.trainable.setup(config)
            else:
                self.trainable = self._class(config)
        except StopIteration as error:
            raise stray_stop_iteration("setup") from error

    def set_up_to_join(self, config: dict[str, Any]) -> None:
        if not hasattr(self._class, "setup_to_join"):
            self.setup(config)
            return
        self.trainable = self._class()
        self.trainable.setup_to_join(config)

    def step(self) -> Step:
        try:
            metrics = self.trainable.step()
        except NoIterationLeftError:
            return Step(None, True)
        except StopIteration as error:
            raise stray_stop_iteration("step") from error
        return step_of(metrics, "step()")

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.trainable, method)(*args, **kwargs)

    def save(self, path: str) -> None:
        folder = os.path.join(path, _FOLDER)
        os.mkdir(folder)
        try:
            returned = self.trainable.save_checkpoint(folder)
        except StopIteration as error:
            raise stray_stop_iteration("save_checkpoint") from error
        if returned is None or isinstance(returned, (str, os.PathLike)):
            returned = _Relative(_relative("" if returned is None else os.fspath(returned), folder))
        with open(os.path.join(path, _RETURNED), "wb") as file:
            cloudpickle.dump(returned, file)

    def restore(self, path: str) -> None:
        with open(os.path.join(path, _RETURNED), "rb") as file:
            returned = pickle.load(file)
        if isinstance(returned, _Relative):
            returned = os.path.normpath(os.path.join(path, _FOLDER, returned.path))
        try:
            self.trainable.load_checkpoint(returned)
        except StopIteration as error:
            raise stray_stop_iteration("load_checkpoint") from error

    def cleanup(self) -> None:
        cleanup = getattr(self.trainable, "cleanup", None)
        if cleanup is not None:
            cleanup()


class _GeneratorResident:
    """A generator function, which yields the metrics of one iteration at a time. Its state cannot be saved."""

    def __init__(self, function: Callable[[dict[str, Any]], Iterator[Mapping[str, Any]]]) -> None:
        self._function = function
        self._iterator: Iterator[Mapping[str, Any]] | None = None

    def setup(self, config: dict[str, Any]) -> None:
        self._iterator = iter(self._function(config))

    def step(self) -> Step:
        assert self._iterator is not None
        try:
            metrics = next(self._iterator)
        except StopIteration:
            return Step(None, True)
        return step_of(metrics, "the generator")

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise FluidError(f"{method!r} cannot be called: a generator function has no methods; write a class")

    def save(self, path: str) -> None:
        raise FluidError(
            "a generator function cannot be saved, because its state is not accessible; write a class instead"
        )

    def restore(self, path: str) -> None:
        raise FluidError("a generator function cannot be restored; write a class instead")

    def cleanup(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _Relative(NamedTuple):
    """Marks a checkpoint that is a path within the trainable's folder, not an object."""

    path: str


def _relative(path: str, folder: str) -> str:
    relative = os.path.relpath(os.path.join(folder, path), folder)
    if relative.split(os.sep)[0] == os.pardir:
        raise FluidError(f"save_checkpoint returned {path!r}, which is outside the folder it was given")
    return relative
