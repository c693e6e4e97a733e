"""Pickles Tune's trainables and their arguments for lanes, which are no workers of Ray.

A pickle may hold references to Ray's object store: ``tune.with_parameters`` makes them, and users may; and users may
give handles of actors. A lane joins the driver's cluster when it unpickles the first of them, or its code uses Ray;
other lanes never do.

All processes of a node map the NumPy arrays and Arrow tables of the object store, but each trial gets a copy of its
PyTorch tensors. So tensors of ``tune.with_parameters`` are sent beside the trainable, as all large parameters are of
trials that Ray Tune does not run: see :mod:`fluid.shared_data.parameters`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
import ray.cloudpickle

from fluid.integrations.ray_tune.private_api import (
    DEFAULT_ENV_VARS,
    ENV_VARS_TO_PROPAGATE,
    ParameterRegistry,
    environment_of_job,
)
from fluid.integrations.ray_tune.resources.requests import THREADS_VARIABLE
from fluid.shared_data.parameters import LARGE_PARAMETERS, KeptValue, TrialParameters
from fluid.shared_data.pickling import dump_shared
from fluid.trainables.pickling import dump_trainable
from fluid.trainables.ray_handles import RayCluster, is_handle
from fluid.trainables.script_names import ByValue

#: Refers to an environment variable.
_REFERENCE = re.compile(r"\$\{(\w+)\}")


class PickledArguments(NamedTuple):
    """A pickled value.

    Attributes:
        content: the pickle.
        needs_ray: whether it holds handles of Ray's actors, references to its objects, or data sets of Ray Data, whose
            content, and text in older releases, is computed by Ray.
        kept: values that are not in it, but that it refers to by their positions here.
    """

    content: bytes
    needs_ray: bool
    kept: tuple[KeptValue, ...] = ()

    def unpickle(self) -> Any:
        """Returns the value. If it has handles of Ray, this process joins their cluster."""
        return _ArgumentUnpickler(self).load()


class _Pickler(ByValue, ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Records whether what it pickled needs Ray, and leaves out large tensors of parameters."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.needs_ray = False
        self.kept: list[KeptValue] = []

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not KeptValue:
            return None
        self.kept.append(obj)
        return len(self.kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        if is_handle(obj) or str(type(obj).__module__).startswith("ray.data."):
            self.needs_ray = True
        if type(obj) is ParameterRegistry and "torch" in sys.modules and ray.is_initialized():
            return _reduce_registry(obj)
        return super().reducer_override(obj)


class _ArgumentUnpickler(pickle.Unpickler):
    """Reads what :class:`_Pickler` wrote."""

    def __init__(self, arguments: PickledArguments) -> None:
        super().__init__(io.BytesIO(arguments.content))
        self._kept = arguments.kept

    def persistent_load(self, pid: int) -> KeptValue:
        return self._kept[pid]


def _reduce_registry(registry: Any) -> Any:
    kept = {name: _kept_tensors(reference) for name, reference in registry.references.items()}
    if not any(kept.values()):
        return NotImplemented
    return TrialParameters, ({name: value or registry.references[name] for name, value in kept.items()},)


def _kept_tensors(reference: Any) -> KeptValue | None:
    """Returns a value of the object store that has large tensors; ``None`` if it has none."""
    try:
        pickled = dump_shared(ray.get(reference))
    except Exception:  # A __reduce__ may raise anything. Ray has pickled it, in its way.
        return None
    tensor_bytes = sum(
        buffer.nbytes for buffer, of_tensor in zip(pickled.buffers, pickled.is_writable, strict=True) if of_tensor
    )
    return KeptValue(pickled) if tensor_bytes >= LARGE_PARAMETERS else None


def pickle_arguments(value: Any) -> PickledArguments:
    """Pickles a value as Ray does."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return PickledArguments(file.getvalue(), pickler.needs_ray, tuple(pickler.kept))


def pickle_trainable(trainable: type) -> PickledArguments:
    """Pickles a trainable, by value where a lane could not import it.

    Raises:
        InvalidFieldError: it cannot be pickled.
    """
    attempts: list[PickledArguments] = []

    def dumps(value: Any) -> bytes:
        attempts.append(pickle_arguments(value))
        return attempts[-1].content

    dump_trainable(trainable, dumps=dumps, pickler=ray.cloudpickle)
    return attempts[-1]


class ActorEnvironment(NamedTuple):
    """What Tune sets up in the processes of its actors, to be set up in lanes likewise.

    Attributes:
        cluster: for code that uses Ray.
        variables: environment variables.
    """

    cluster: RayCluster
    variables: Mapping[str, str]

    @classmethod
    def of_driver(cls) -> ActorEnvironment:
        """Returns what this driver's actors would have."""
        # Threads are set per trial.
        wanted = {name: value for name, value in environment_of_job().items() if name != THREADS_VARIABLE}
        passed = {name: os.environ[name] for name in ENV_VARS_TO_PROPAGATE if name in os.environ}
        return cls(RayCluster.of_driver(), {**wanted, **DEFAULT_ENV_VARS, **passed})

    def apply(self) -> None:
        """Sets up this process. Its environment variables may refer to others, as in Ray's workers."""
        for name, value in self.variables.items():
            os.environ[name] = _REFERENCE.sub(lambda found: os.environ.get(found[1], ""), value)
        self.cluster.be_default()


class ShippedTrainable:
    """A trainable class that is pickled with the lane trial's class and unpickled at its first use in a lane.

    Attributes:
        __wrapped__: the class, in the process that pickled it; Fluid looks there for modules to import early.
    """

    def __init__(self, trainable: type, environment: ActorEnvironment) -> None:
        self.__wrapped__: type | None = trainable
        self._pickled = pickle_trainable(trainable)
        self._environment = environment

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive, (self._pickled, self._environment)

    def trainable_here(self) -> type:
        """The class, in a process whose environment stays as it is."""
        if self.__wrapped__ is None:
            self.__wrapped__ = self._pickled.unpickle()
        return self.__wrapped__

    @property
    def trainable(self) -> type:
        """The class."""
        if self.__wrapped__ is None:
            self._environment.apply()
            self.__wrapped__ = self._pickled.unpickle()
        return self.__wrapped__


def _receive(pickled: PickledArguments, environment: ActorEnvironment) -> ShippedTrainable:
    shipped = ShippedTrainable.__new__(ShippedTrainable)
    shipped.__wrapped__ = None
    shipped._pickled = pickled
    shipped._environment = environment
    return shipped
