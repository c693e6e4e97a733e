"""Calls in a thread that stays, as Linux may end a process when the thread that started it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_lasting_thread(function: Callable[[], T]) -> T:
    """Calls a function in the main thread or, from any other thread, in one that lasts as long as this process.

    Processes that the function starts may have asked to be killed with their parent (``PR_SET_PDEATHSIG``), as those of
    Ray do. To Linux that parent is the thread, so they would go when the caller's thread ends.

    Returns:
        What the function returns; it also raises what the function raises.
    """
    if threading.current_thread() is threading.main_thread():
        return function()
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)
            return
        threading.Event().wait()  # For ever.

    threading.Thread(target=call, name="fluid-lasting", daemon=True).start()
    return done.result()
