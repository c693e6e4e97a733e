"""What Python does as a process ends, for the code of trials: their process ends without it, as it was forked.

In this order, as Python: threads that are no daemons are awaited, exit functions and finalizers run, child processes of
``multiprocessing`` are awaited, and handlers of loggers are closed. What the process was forked with, such as the
temporary folder of a module that the fork server has loaded, belongs to the fork server, and stays.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref

from fluid._clock import MonotonicClock
from fluid.lane.errors import print_exception
from fluid.lane.library_settings import end_run_of_mlflow

#: Seconds that threads and child processes of a trial have to end. Python would wait forever, but has printed the error
#: of a script by then, which a lane tells afterwards.
_PATIENCE_S = 10.0


class ProcessExit:
    """The end of this process, which is made as it begins, before code of trials runs."""

    def __init__(self) -> None:
        self._is_over = False
        atexit._clear()
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False

    def run(self) -> None:
        """Does all of it, once; what is raised goes to the log."""
        if self._is_over:
            return
        self._is_over = True
        clock = MonotonicClock()
        deadline = clock.now() + _PATIENCE_S
        left = [f"its thread {name!r} still runs" for name in _await_threads(clock, deadline)]
        for function in (atexit._run_exitfuncs, weakref.finalize._exitfunc):  # type: ignore[attr-defined]
            try:
                function()
            except BaseException:
                print_exception()
        left += [f"its process {name!r} still runs" for name in _await_children(clock, deadline)]
        end_run_of_mlflow()  # It has registered that as it was imported, perhaps in the fork server.
        logging.shutdown()
        if left:
            print(f"the process of the trial is ended: {'; '.join(left)}", file=sys.stderr)


def _await_threads(clock: MonotonicClock, deadline: float) -> list[str]:
    """Waits for the threads that are no daemons; returns the names of those that still run."""
    here, found = threading.current_thread(), []
    waited = [thread for thread in threading.enumerate() if thread is not here and not thread.daemon]
    futures = sys.modules.get("concurrent.futures.thread")
    if futures is not None and (pooled := list(futures._threads_queues)):  # Some are daemons, as what has made them.
        threading.Thread(target=futures._python_exit, daemon=True).start()  # It tells them to do what is left.
        waited = [*pooled, *(thread for thread in waited if thread not in pooled)]
    for thread in waited:
        threading.Thread.join(thread, max(0.0, deadline - clock.now()))
        if thread.is_alive():
            found.append(thread.name)
    return found


def _await_children(clock: MonotonicClock, deadline: float) -> list[str]:
    """Ends the daemons of ``multiprocessing`` and waits for the others; returns the names of those that still run."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    children = [] if multiprocessing is None else multiprocessing.active_children()
    for child in children:
        if child.daemon:
            child.terminate()
    for child in children:
        child.join(max(0.0, deadline - clock.now()))
    return [child.name for child in children if child.is_alive()]
