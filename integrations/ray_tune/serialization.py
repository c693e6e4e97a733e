"""Bringing Tune's trainables and their arguments to lanes, which are no workers of Ray.

What is pickled may hold references to Ray's object store: ``tune.with_parameters`` puts them there, and so may users.
A lane that is sent any joins the driver's cluster first, once; others never pay for that.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
import ray.cloudpickle

from fluid.integrations.ray_tune.private_api import DEFAULT_ENV_VARS, ENV_VARS_TO_PROPAGATE
from fluid.trainables.pickling import dump_trainable


class PickledArguments(NamedTuple):
    """Something pickled.

    Attributes:
        content: the pickle.
        refers: whether it holds references to Ray's object store.
    """

    content: bytes
    refers: bool


class _Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Notes whether it met a reference."""

    refers = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef):
            self.refers = True
        return super().reducer_override(obj)


def pack(value: Any) -> PickledArguments:
    """Pickles a value as Ray does."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return PickledArguments(file.getvalue(), pickler.refers)


def pack_trainable(trainable: type) -> PickledArguments:
    """Pickles a trainable, by value where a lane could not import it.

    Raises:
        InvalidFieldError: it cannot be pickled.
    """
    parcels: list[PickledArguments] = []

    def dumps(value: Any) -> bytes:
        parcels.append(pack(value))
        return parcels[-1].content

    dump_trainable(trainable, dumps=dumps, pickler=ray.cloudpickle)
    return parcels[-1]


class Surroundings(NamedTuple):
    """What Tune sets up for its actors, for a lane to set up likewise.

    Attributes:
        address: of the cluster, for code that uses Ray.
        namespace: of the driver's job.
        environment: variables.
    """

    address: str
    namespace: str
    environment: Mapping[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this driver."""
        context = ray.get_runtime_context()
        passed = {name: os.environ[name] for name in ENV_VARS_TO_PROPAGATE if name in os.environ}
        return cls(
            context.gcs_address, context.namespace, {**DEFAULT_ENV_VARS, **passed, "RAY_ADDRESS": context.gcs_address}
        )

    def enter(self) -> None:
        """Sets this process up."""
        os.environ.update(self.environment)

    def open(self, arguments: PickledArguments) -> Any:
        """Unpickles in a lane."""
        if arguments.refers and not ray.is_initialized():
            # Quietly, and leaving the process's own logging alone: the lane is not about Ray.
            ray.init(
                address=self.address,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
                ignore_reinit_error=True,
            )
        return ray.cloudpickle.loads(arguments.content)


class ShippedTrainable:
    """A trainable class that unpickles in a lane when it is first asked for.

    Attributes:
        __wrapped__: the class, in the process that packed it; from it Fluid learns what lanes should import early.
    """

    def __init__(self, trainable: type, surroundings: Surroundings) -> None:
        self.__wrapped__: type | None = trainable
        self._parcel = pack_trainable(trainable)
        self._surroundings = surroundings

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive, (self._parcel, self._surroundings)

    def open(self, arguments: PickledArguments) -> Any:
        """Unpickles something sent along."""
        return self._surroundings.open(arguments)

    @property
    def trainable(self) -> type:
        """The class."""
        if self.__wrapped__ is None:
            self._surroundings.enter()
            self.__wrapped__ = self._surroundings.open(self._parcel)
        return self.__wrapped__


def _receive(arguments: PickledArguments, surroundings: Surroundings) -> ShippedTrainable:
    shipped = ShippedTrainable.__new__(ShippedTrainable)
    shipped.__wrapped__ = None
    shipped._parcel = arguments
    shipped._surroundings = surroundings
    return shipped
