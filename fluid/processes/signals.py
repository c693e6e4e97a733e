"""Signals on which only the driver acts, although schedulers send them to every process of a job.

Slurm sends the signal of ``--signal`` and SIGTERM to each process of a step, systemd to each process of a unit. The
driver then drains its trials (:mod:`fluid.session`), for which it needs its lanes.

The handler does nothing; it is not SIG_IGN, because programs that a trial starts would inherit that. A handler is reset
when another program is executed, and :func:`restore_in_forks` resets it in forks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: The signals.
FOR_THE_DRIVER = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)


def leave_to_driver(*numbers: int) -> None:
    """Makes this process ignore signals that are meant for the driver; to be called in the main thread.

    Args:
        numbers: the signals, by default :data:`FOR_THE_DRIVER`.
    """
    for number in numbers or FOR_THE_DRIVER:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)  # Libraries need not expect that a read or write is interrupted.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers or FOR_THE_DRIVER)


@contextmanager
def blocked_for_driver() -> Iterator[None]:
    """Blocks these signals in this thread, so that a program that it starts is not ended before it has handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DRIVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_in_forks() -> None:
    """Gives processes that are forked from this one the default actions: ``Pool.terminate()`` waits for their end."""
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore)


#: The signals that a thread blocked before it began to fork.
_forking = threading.local()


def _block() -> None:
    # A signal must not reach the child before it has its default actions: it would be lost.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DRIVER)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore() -> None:
    for number in FOR_THE_DRIVER:
        if signal.getsignal(number) is _do_nothing:  # Else the trial has set a handler of its own.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _unblock()


def _do_nothing(*_: object) -> None:
    pass
