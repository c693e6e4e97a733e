"""Tasks of the tests, in a module that lanes import as they would a user's."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from fluid.trainables.driver_link import in_trial


def process_of(number: int) -> tuple[int, bool]:
    """This process, and whether it is a lane's."""
    return os.getpid(), in_trial()


def fail_at(number: int, bad: int) -> int:
    if number == bad:
        raise LookupError(f"no {number}")
    return number


class UnpicklableError(Exception):
    """Can be raised, but not pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("two arguments are needed")
        self.lock = threading.Lock()


def fail_unpicklably(number: int) -> None:
    raise UnpicklableError(number, number)


def recurse(number: int) -> int:
    return recurse(number)


def return_lock(number: int) -> Any:
    return threading.Lock()


def exit_at_once(number: int) -> None:
    raise SystemExit(3)


def describe_array(array: Any) -> tuple[str, bool, float]:
    """The file that an array is mapped from, whether it may be written, and its sum."""
    base = array
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    return str(getattr(base, "filename", "")), bool(array.flags.writeable), float(array.sum())


def nested(number: int) -> tuple[str, list[int]]:
    """The backend that a task's own Parallel takes, and what it computes."""
    inner = joblib.Parallel(n_jobs=2)
    squares = inner(joblib.delayed(pow)(each, 2) for each in range(number))
    return type(inner._backend).__name__, squares


def nested_fluid(number: int) -> list[int]:
    """A task whose own Parallel asks for Fluid."""

    with joblib.parallel_config("fluid"):
        return joblib.Parallel(n_jobs=2)(joblib.delayed(pow)(each, 2) for each in range(number))


def die_until(number: int, folder: str, deaths: int) -> int:
    """Kills its process so many times; then returns the number."""
    for death in range(deaths):
        mark = Path(folder) / f"{number}-{death}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_for(path: str, seconds: float = 120.0) -> None:
    """Waits until a file is there."""
    deadline = time.monotonic() + seconds
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} is not there after {seconds:g} s"
        time.sleep(0.01)


def nap(number: int) -> int:
    time.sleep(0.1)
    return number


def touch_and_wait(number: int, folder: str) -> None:
    """Says that it runs, and never ends."""
    (Path(folder) / f"runs-{number}").touch()
    wait_for(str(Path(folder) / "never"))


def threads_of(number: int) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


#: What initializers were called with in this process.
begun: list[Any] = []


def begin(value: Any, *more: Any) -> None:
    begun.append(value)


def begun_here(number: int) -> tuple[int, list[Any]]:
    """This process, and what initializers were called with in it."""
    return os.getpid(), list(begun)


def fail_to_begin() -> None:
    raise LookupError("no licence")


def warn_of(number: int) -> int:
    warnings.warn(f"number {number}", RuntimeWarning, stacklevel=1)
    return number


def put(shared: Any, key: Any) -> None:
    shared[key] = key
