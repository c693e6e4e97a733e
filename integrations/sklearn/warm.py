"""The executor of fits that are given none: kept warm for the next fit, as joblib keeps its workers.

Lanes take a second to load scikit-learn, and a search within ``cross_val_score`` is fitted again and again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluid.executor import FluidExecutor
from fluid.resources import Device

#: Seconds without a fit after which the executor is closed.
IDLE_S = 60.0
#: Fits after which a new one is made, as a session remembers its trials.
_MOST_FITS = 100


class _LentExecutor:
    """An executor, and what another fit must have in common to use it.

    Args:
        devices: number of CPU cores.
        key: where its lanes can import from, and how many there are.

    Attributes:
        executor: the executor.
        folder: its run folder.
        key: as given.
        fits: that it has run.
    """

    def __init__(self, devices: int, key: tuple[Any, ...]) -> None:
        self.key = key
        self.fits = 0
        self.folder = Path(tempfile.mkdtemp(prefix="fluid-search-"))
        try:
            cores = [Device(index) for index in range(devices)]
            self.executor = FluidExecutor("local", cores, packing="off", run_dir=self.folder, verbose=0)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        #: Ends its processes, and deletes its files; at the end of the program at the latest.
        self.close = weakref.finalize(self, _close, self.executor, self.folder, os.getpid())


def _close(executor: FluidExecutor, folder: Path, process: int) -> None:
    if os.getpid() != process:  # A forked process leaves its parent's alone.
        return
    executor.close()
    if not executor.session.names_files:  # Else the user may want to read them.
        shutil.rmtree(folder, ignore_errors=True)


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
        kept = self._take(key) or _LentExecutor(devices, key)
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
        if kept is None:
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


WARM = WarmExecutor()
