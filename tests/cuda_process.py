"""A process apart in which tests use CUDA: a process that has used it keeps its context, and cannot fork safely."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import cloudpickle

T = TypeVar("T")


class CudaProcess:
    """Calls functions in one process, which sees the first GPU only.

    Args:
        environment: additional variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_enter, initargs=(dict(environment),))

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function there, which may be defined in a test; returns what it returns, or raises what it raises."""
        called: T = self._pool.submit(_call, cloudpickle.dumps((function, arguments))).result()
        return called

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()


def _enter(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def _call(pickled: bytes) -> Any:
    function, arguments = cloudpickle.loads(pickled)
    return function(*arguments)
