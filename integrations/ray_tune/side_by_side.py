"""Sweeps side by side: several threads of one process call Tune at once, on one executor or on several.

Tune itself expects one sweep at a time. Where there is no Ray it starts one, of which two threads would start two, and
which ends with the thread that started it. It writes its registry without a lock, so sweeps begin one after another.
And it keeps trainables by name, so that a sweep would go on with another one's trainable of the same name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.tune.experiment import Experiment

from fluid.errors import InvalidFieldError
from fluid.processes.lasting_thread import call_in_lasting_thread

#: Held while a sweep begins, and whether the one of this thread does.
_beginning = threading.Lock()
_here = threading.local()
#: Held while :data:`_running` changes.
_changing = threading.Lock()
#: Trainables of the sweeps that run now, with the names under which Tune keeps them.
_running: list[tuple[str, Any]] = []
_NO_START = "TUNE_DISABLE_AUTO_INIT"


@contextmanager
def alone_until_begun() -> Iterator[None]:
    """Waits until no other sweep begins; none does until :func:`has_begun` is called in this thread, or to the end."""
    if not getattr(_here, "begins", False):
        _beginning.acquire()
        _here.begins = True
    try:
        yield
    finally:
        has_begun()


def has_begun() -> None:
    """Lets the next sweep begin: that of this thread has registered what it runs."""
    if getattr(_here, "begins", False):
        _here.begins = False
        _beginning.release()


def start_ray() -> None:
    """Starts Ray or connects to it, as Tune would in a moment, unless this process is connected or is not to be."""
    if os.environ.get(_NO_START) != "1" and not ray.is_initialized():
        call_in_lasting_thread(ray.init)


@contextmanager
def in_use(trainable: Any) -> Iterator[None]:
    """Keeps the name of a trainable while its sweep runs.

    Args:
        trainable: what ``tune.run`` or ``Tuner`` is given. Strings name what is registered, and experiments were
            registered when they were made, so neither registers anything now.

    Raises:
        InvalidFieldError: another sweep of this process runs a different trainable of that name.
    """
    registers = isinstance(trainable, type) or (callable(trainable) and not isinstance(trainable, Experiment))
    if not registers and not isinstance(trainable, str):
        yield
        return
    used = (Experiment.get_trainable_name(trainable), trainable)
    with _changing:
        if registers and any(name == used[0] and other is not trainable for name, other in _running):
            raise InvalidFieldError(
                "trainable",
                used[0],
                "another sweep of this process runs a different trainable of this name, by which Tune keeps them: call "
                f"tune.register_trainable({used[0] + '-2'!r}, trainable), and pass that name instead of the trainable",
            )
        _running.append(used)
    try:
        yield
    finally:
        with _changing:
            del _running[next(i for i, (name, other) in enumerate(_running) if other is trainable)]
