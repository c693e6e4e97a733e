"""A worker as a trial: it asks the driver for batches of joblib's tasks, and runs them until there are no more.

A worker is one iteration, however many batches it runs: a batch costs one request to the driver.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid.trainables.driver_link import driver_link
from fluid.trainables.exception_pickle import dump_exception

with try_import("joblib", extra="joblib") as _imports:
    from joblib._memmapping_reducer import get_memmapping_reducers
    from joblib.externals.loky.backend.reduction import dumps


#: The initializer that this process has called last, pickled with its arguments.
_initialized = b""


class TaskError(NamedTuple):
    """Why a batch has no results.

    Attributes:
        exception: what a task raised, pickled.
        traceback: its traceback in the lane.
    """

    exception: bytes
    traceback: str


def work(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs batches until the driver has no more; the metrics say how many tasks those were.

    Args:
        config: ``threads``: most threads of BLAS and OpenMP; without it, those of the lane. ``initializer``: a
            function and its arguments, pickled; without it, none.

    Raises:
        Exception: what the initializer raised.
    """
    _imports.check()
    _initialize(config.get("initializer", b""))
    link, clock = driver_link(), MonotonicClock()
    _, reducers = get_memmapping_reducers()
    batches, seconds = 0, 0.0
    with _limited_threads(config.get("threads")):
        batch = link.ask(None)
        while batch is not None:
            begun = clock.now()
            outcome = _run(batch, reducers)
            batches, seconds = batches + 1, seconds + clock.now() - begun
            batch = None  # Its arrays are freed while the driver is asked.
            batch = link.ask(outcome)
    yield {"batches": batches, "seconds": seconds}


def _initialize(pickled: bytes) -> None:
    """Calls an initializer, unless it is the one that this process has called last."""
    global _initialized
    if pickled and pickled != _initialized:
        function, arguments = pickle.loads(pickled)
        function(*arguments)
        _initialized = pickled


def _run(batch: bytes, reducers: dict[type, Any]) -> bytes:
    """Runs a batch; returns the list of its results, or a :class:`TaskError`, pickled."""
    try:
        return bytes(dumps(pickle.loads(batch)(), reducers=reducers))
    except BaseException as error:  # As with joblib's other backends, SystemExit too reaches the caller.
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return pickle.dumps(TaskError(dump_exception(error), text))


@contextlib.contextmanager
def _limited_threads(threads: int | None) -> Iterator[None]:
    """Limits the threads of libraries that are loaded already, which read the environment no more."""
    if threads is None or "threadpoolctl" not in sys.modules:
        yield
        return
    with sys.modules["threadpoolctl"].threadpool_limits(threads):
        yield
