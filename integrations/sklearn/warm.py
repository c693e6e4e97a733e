"""The executor of fits that are given none: kept warm for the next fit, as joblib keeps its workers.

Lanes take a second to load scikit-learn, and a search within ``cross_val_score`` is fitted again and again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fluid.executor import FluidExecutor
from fluid.resources import Device

#: Seconds without a fit after which the executor is closed.
IDLE_S = 60.0
#: Fits after which a new one is made, as a session remembers its trials.
_MOST_FITS = 100


@dataclass(eq=False)
class _LentExecutor:
    """An executor, and what another fit must have in common to use it.

    Attributes:
        executor: the executor.
        folder: its run folder.
        key: where its lanes can import from, and how many there are.
        fits: that it has run.
    """

    executor: FluidExecutor
    folder: tempfile.TemporaryDirectory[str]
    key: tuple[Any, ...]
    fits: int = 0

    def close(self) -> None:
        """Ends its processes, and deletes its files."""
        self.executor.close()
        self.folder.cleanup()


class WarmExecutor:
    """Lends an executor on CPU cores, and closes it when nothing has borrowed it for a while. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: _LentExecutor | None = None
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def lend(self, devices: int) -> Iterator[FluidExecutor]:
        """Lends the executor that is kept, or a new one if it is lent or another one is needed.

        Args:
            devices: number of CPU cores.
        """
        key = (devices, os.getpid(), os.getcwd(), *sys.path)
        kept = self._take(key) or _make(devices, key)
        try:
            yield kept.executor
        except BaseException:
            kept.close()
            raise
        kept.fits += 1
        self._give_back(kept)

    def _take(self, key: tuple[Any, ...]) -> _LentExecutor | None:
        with self._lock:
            kept, self._idle = self._idle, None
            if self._timer is not None:
                self._timer.cancel()
        if kept is None or kept.key[1] != os.getpid():  # A forked process leaves its parent's alone.
            return None
        if kept.key == key and kept.fits < _MOST_FITS and not kept.executor.closed:
            return kept
        kept.close()
        return None

    def _give_back(self, kept: _LentExecutor) -> None:
        with self._lock:
            if self._idle is None:
                self._idle = kept
                self._timer = threading.Timer(IDLE_S, self._expire, (kept,))
                self._timer.daemon = True
                self._timer.start()
                return
        kept.close()  # Another fit, of another thread, has brought its own back.

    def _expire(self, kept: _LentExecutor) -> None:
        with self._lock:
            if self._idle is not kept:
                return
            self._idle = None
        kept.close()


def _make(devices: int, key: tuple[Any, ...]) -> _LentExecutor:
    folder = tempfile.TemporaryDirectory(prefix="fluid-search-", ignore_cleanup_errors=True)
    try:
        cores = [Device(index) for index in range(devices)]
        executor = FluidExecutor("local", cores, packing="off", run_dir=folder.name, verbose=0)
    except BaseException:
        folder.cleanup()
        raise
    return _LentExecutor(executor, folder, key)


WARM = WarmExecutor()
