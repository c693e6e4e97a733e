"""What Python does as a process ends, for the code of trials: their process ends without it, as it was forked.

Threads that are no daemons are awaited, exit functions and finalizers run, child processes of ``multiprocessing`` are
awaited, handlers of loggers are closed, and what files hold is written. What the process was forked with, such as the
temporary folder of a module that the fork server has loaded, belongs to the fork server, and stays.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import sys
import threading
import weakref
from collections.abc import Callable

from fluid._clock import MonotonicClock
from fluid.lane.errors import print_exception
from fluid.lane.process.libraries import end_run_of_mlflow
from fluid.trainables.trial_code import is_function

#: Seconds that threads and child processes of a trial have to end. Python would wait forever, but has printed the error
#: of a script by then, which a lane tells afterwards.
_PATIENCE_S = 10.0
#: Seconds after which exit functions run though threads go on: an engine gives a clean-up that others wait for more.
_OF_THREADS_S = 3.0
_LOOK_AGAIN_S = 0.02
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class ProcessExit:
    """The end of this process, which is made as it begins, before code of trials runs.

    Attributes:
        is_over: whether it has been.
    """

    def __init__(self) -> None:
        self.is_over = False
        atexit._clear()
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util._finalizer_registry.clear()

    def run(self) -> None:
        """Does all of it, once; what is raised goes to the log."""
        if self.is_over:
            return
        self.is_over = True
        clock = MonotonicClock()
        begun, left = clock.now(), list[str]()
        pools = threading.Thread(target=_tell_pools, name="of a pool", daemon=True)
        if any(_may_be_pooled(thread) for thread in threading.enumerate()):
            pools.start()
        for step in (
            lambda: _await_threads(pools, clock, begun + _OF_THREADS_S),
            atexit._run_exitfuncs,
            weakref.finalize._exitfunc,  # type: ignore[attr-defined]
            lambda: _run_finalizers(0),
            lambda: left.extend(_await_children(clock, begun + _PATIENCE_S)),
            lambda: _run_finalizers(),
            lambda: left.extend(_await_threads(pools, clock, begun + _PATIENCE_S)),
            end_run_of_mlflow,  # It has registered that as it was imported, perhaps in the fork server.
            logging.shutdown,
            _write_what_files_hold,
        ):
            _guarded(step)
        if left:
            _guarded(lambda: print(f"the process of the trial is ended: {'; '.join(left)}", file=sys.stderr))


def _guarded(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:
        print_exception()


def _may_be_pooled(thread: threading.Thread) -> bool:
    return thread is not threading.current_thread() and not (is_function(thread) or thread.name.startswith("fluid-"))


def _await_threads(pools: threading.Thread, clock: MonotonicClock, deadline: float) -> list[str]:
    """Waits for the threads that are no daemons, and for the end of pools; returns, in words, what still runs."""
    here = threading.current_thread()
    while True:  # One that ends may have started another.
        running = [
            thread
            for thread in threading.enumerate()
            if thread is pools or not (thread is here or thread.daemon or is_function(thread))
        ]
        if not running or clock.now() >= deadline:
            return [f"its thread {thread.name!r} still runs" for thread in running]
        threading.Thread.join(running[0], min(_LOOK_AGAIN_S, max(0.0, deadline - clock.now())))


def _tell_pools() -> None:
    """Has pools of threads, and what else waits for the end of the interpreter, do what is left, and end."""
    for function in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        _guarded(function)


def _await_children(clock: MonotonicClock, deadline: float) -> list[str]:
    """Ends the daemons of ``multiprocessing`` and waits for the others; returns, in words, which still run."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    children = [] if multiprocessing is None else multiprocessing.active_children()
    for child in children:
        if child.daemon:
            child.terminate()
    for child in children:
        child.join(max(0.0, deadline - clock.now()))
    return [f"its process {child.name!r} still runs" for child in children if child.is_alive()]


def _run_finalizers(least_priority: int | None = None) -> None:
    """Runs those of ``multiprocessing``, which end managers, pools and queues."""
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._run_finalizers(least_priority)


def _write_what_files_hold() -> None:
    """Writes what open files still buffer, of those that this process has opened: the fork server's were frozen."""
    for each in gc.get_objects():
        if type(each) in _BUFFERED and not each.closed:
            _guarded(each.flush)
