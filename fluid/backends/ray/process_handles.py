"""Processes of this machine that Ray started: held by descriptor, and killed if they do not end."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

from fluid._clock import MonotonicClock
from fluid.processes.children import process_start_time

#: Seconds for killed processes to vanish.
_END_S = 5.0


class ProcessHandles:
    """Descriptors of processes, whose numbers may be given to others once they have ended."""

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}
        self._clock = MonotonicClock()

    def watch(self, pid: int, start_time: int) -> None:
        """Holds a process, unless it is in another container, where numbers mean something else."""
        self._drop_ended()
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                handle = os.pidfd_open(pid)
                if start_time >= 0 and process_start_time(pid) == start_time:
                    self._handles[pid] = handle
                else:
                    os.close(handle)

    def send_signal(self, pid: int, number: int) -> None:
        """Sends a process a signal, if it is held."""
        if pid in self._handles:
            with suppress(OSError):
                signal.pidfd_send_signal(self._handles[pid], number)

    def end(self) -> None:
        """Waits for all that were told to end, and kills those that do not."""
        deadline = self._clock.now() + _END_S
        while self._handles and self._clock.now() < deadline:
            self._drop_ended(deadline - self._clock.now())
        for handle in self._handles.values():
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        if self._handles:
            self._drop_ended(_END_S)

    def close(self) -> None:
        """Closes the descriptors."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _drop_ended(self, wait: float = 0.0) -> None:
        poller = select.poll()
        for handle in self._handles.values():
            poller.register(handle, select.POLLIN)
        ended = {handle for handle, _ in poller.poll(wait * 1000)} if self._handles else set()
        for pid, handle in list(self._handles.items()):
            if handle in ended:
                os.close(handle)
                del self._handles[pid]
