"""Adapts every form of trainable to one interface, :class:`~fluid.trainables.resident.Resident`.

Users write a class, a subclass of Ray Tune's ``Trainable``, a function that yields or returns metrics, or a function
for Ray Tune. Neither Ray nor PyTorch is imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any, Literal

from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError
from fluid.trainables.class_resident import ClassResident, says_it_reports_states
from fluid.trainables.function_resident import GeneratorResident, StateFunctionResident
from fluid.trainables.import_scan import WRAPPED_ELASTIC_CLASS, ImportScan, elastic_class_of, without_request
from fluid.trainables.reporting_resident import ReportingResident
from fluid.trainables.resident import Resident

#: ``state_function``: a function that yields ``(metrics, state)``; ``function``: one that is no generator function: it
#: reports, or returns metrics or an iterator of them.
Kind = Literal["class", "ray_class", "generator", "state_function", "function", "ray_function"]

#: The parameter by which a function says that it yields its state.
_STATE = "state"


# -- forms of trainables ------------------------------------------------------------------------------------


def kind_of(trainable: Any) -> Kind:
    """Returns the form of a trainable.

    Raises:
        InvalidFieldError: Fluid cannot run it.
        MissingDependencyError: it is a function for Ray Tune, and Ray Tune is not installed.
    """
    if is_only_replayed(trainable):
        reason = 'has replay() and nothing to run: it can only be rehearsed, by FluidExecutor(backend="simulated")'
        raise InvalidFieldError("trainable", trainable, reason)
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
    if takes_state(trainable):
        return "state_function"
    _require_config_argument(trainable)
    if inspect.isgeneratorfunction(function):
        return "generator"
    if not _uses_ray(trainable):
        return "function"
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(
            f"trainable={trainable!r}: it imports Ray, which is not installed: pip install 'ray[tune]', or yield a dict"
            " of metrics per iteration"
        )
    return "ray_function"


def is_only_replayed(trainable: Any) -> bool:
    """Whether a trainable tells what its trials do, by ``replay``, and has no code that runs them."""
    runs = callable(getattr(trainable, "step", None)) or (callable(trainable) and not inspect.isclass(trainable))
    return not runs and callable(getattr(trainable, "replay", None))


def can_save(trainable: Any) -> bool:
    """Whether the trials of a trainable can be saved and restored at any time, and so moved to another lane."""
    if is_only_replayed(trainable):
        return True
    if not inspect.isclass(trainable):
        return takes_state(trainable)
    can = all(_defines(trainable, name) for name in ("save_checkpoint", "load_checkpoint"))
    return can and not says_it_reports_states(trainable)


def can_restore(trainable: Any) -> bool:
    """Whether a trial of a trainable may go on from a state; of a function that reports, only its trials can tell."""
    if is_only_replayed(trainable) or takes_state(trainable):
        return True
    if inspect.isclass(trainable):
        return _defines(trainable, "load_checkpoint")
    return not inspect.isgeneratorfunction(_function_of(trainable))


def takes_state(trainable: Any) -> bool:
    """Whether a function takes its state: it has, after the config, a parameter ``state`` that is not bound."""
    if inspect.isclass(trainable) or not callable(trainable):
        return False
    bound = trainable
    while isinstance(bound, functools.partial):
        if _STATE in bound.keywords:
            return False
        bound = bound.func
    try:
        if _STATE not in list(inspect.signature(trainable).parameters)[1:]:
            return False
        for follow in (True, False):  # A wrapper may hide that it takes a config alone.
            inspect.signature(trainable, follow_wrapped=follow).bind({}, state=None)
    except (TypeError, ValueError):  # Other parameters are missing; some built-in callables have no signature.
        return False
    return True


def is_elastic(trainable: Any) -> bool:
    """Whether the trials of a trainable can span several devices; a class says so by ``fluid_elastic = True``."""
    if inspect.isclass(trainable):
        trainable = without_request(trainable)
    if hasattr(trainable, WRAPPED_ELASTIC_CLASS) and elastic_class_of(trainable) is None:
        return False  # Derived from a class that wraps an elastic one, and so only known to Ray Tune.
    return bool(getattr(trainable, "fluid_elastic", False))


def is_fusible(trainable: Any) -> bool:
    """Whether trials of a trainable may train in one step with others; a class says so by ``fluid_fusible = True``.

    Code that does is elastic, too; one that is only replayed has none.
    """
    says_so = bool(getattr(elastic_class_of(trainable) or trainable, "fluid_fusible", False))
    return says_so and (is_elastic(trainable) or is_only_replayed(trainable))


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
        reason = f"must take the config as its only argument, or the config and `state`: {error}"
        raise InvalidFieldError("trainable", trainable, reason) from None
    except ValueError:
        pass  # Some built-in callables have no signature.


def _uses_ray(trainable: Any) -> bool:
    """Whether the code of a function, or what it refers to, imports Ray, as one that reports to Ray Tune does."""
    function = _unwrapped(trainable)
    owner = getattr(function, "__self__", None) if inspect.ismethod(function) else function
    scans = [ImportScan(trainable)]
    if not inspect.isroutine(owner):
        scans.append(ImportScan(owner if inspect.isclass(owner) else type(owner)))
    names = set().union(*(scan.imported | scan.modules for scan in scans))
    if any(_is_rays(name) for name in names):
        return True
    if "ray" not in sys.modules:
        return False
    # What another package provides is not read: it may report on the function's behalf. Ray replaces
    # functions of the standard library itself.
    others = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    loaded = [sys.modules[name] for name in others if name in sys.modules]
    return any(_is_rays(_home_of(value)) for module in loaded for value in list(vars(module).values()))


def _home_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    return str(value.__module__) if isinstance(value, (type, FunctionType)) else ""


def _is_rays(module: str) -> bool:
    return module == "ray" or module.startswith("ray.")


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
        return ClassResident(trainable)
    if kind == "state_function":
        return StateFunctionResident(trainable)
    if kind == "generator":
        return GeneratorResident(trainable)
    if kind == "function":
        return ReportingResident(trainable)
    from fluid.trainables.ray import RayClassResident, RayFunctionResident

    if kind == "ray_class":
        return RayClassResident(trainable, trial_id, folder)
    return RayFunctionResident(trainable, trial_id, folder)


def set_up(resident: Resident, config: dict[str, Any], *, joins: bool = False, loads: bool = False) -> None:
    """Sets a resident up.

    Args:
        resident: a new one.
        config: the trial's.
        joins: whether it will receive its state from another lane; a class's ``setup_to_join``, if it has one, is then
            called instead of ``setup``.
        loads: whether it will be restored from a checkpoint; a class's ``setup_to_load`` is then called, likewise.
    """
    if (joins or loads) and isinstance(resident, ClassResident):
        resident.set_up_by("setup_to_join" if joins else "setup_to_load", config)
    else:
        resident.setup(config)


def elastic_part(resident: Resident) -> Any:
    """Returns a resident's :class:`fluid.elastic.ElasticTrainable`.

    Raises:
        FluidError: its trainable is of another class.
    """
    trainable = getattr(resident, "trainable", None)
    if not is_elastic(trainable) or not hasattr(trainable, "load_elastic_state"):
        raise FluidError("only a subclass of fluid.elastic.ElasticTrainable can train on several devices")
    return trainable
