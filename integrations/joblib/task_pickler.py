"""Pickles batches of tasks as joblib's own processes get them: large NumPy arrays go through memory-mapped files."""

from __future__ import annotations

import pickletools
import sys
from typing import Any

from fluid._imports import try_import

with try_import("joblib", extra="joblib"):
    from joblib._memmapping_reducer import TemporaryResourcesManager, get_memmapping_reducers
    from joblib.externals.loky.backend.reduction import dumps


class TaskPickler:
    """Pickles the batches of one call of ``Parallel``.

    An array is written once, and every batch refers to its file. The files are deleted by :meth:`close`, or by
    joblib's resource tracker if the driver is killed.

    Args:
        temp_folder: where files go; ``None`` for joblib's choice, ``/dev/shm`` if it is large enough.
        max_nbytes: size in bytes from which an array goes into a file; ``None`` for never.
        mmap_mode: how workers map it, ``"r"`` for read-only; ``None`` if they are to load it.
    """

    def __init__(self, temp_folder: str | None, max_nbytes: float | None, mmap_mode: str | None) -> None:
        self._temp_folder = temp_folder
        #: Made for the first large array, as it starts a process that watches over the files.
        self._manager: Any = None
        self._reducers, _ = get_memmapping_reducers(
            temp_folder_resolver=self._folder,
            max_nbytes=max_nbytes,
            mmap_mode=mmap_mode,
            unlink_on_gc_collect=False,
        )

    def dumps(self, batch: Any) -> bytes:
        """Pickles a batch, by cloudpickle.

        Raises:
            Exception: it cannot be pickled.
        """
        return bytes(dumps(batch, reducers=self._reducers))

    def close(self) -> None:
        """Deletes the files; a worker that has mapped one keeps what it has mapped."""
        if self._manager is not None:
            self._manager._clean_temporary_resources(force=True)
            self._manager = None

    def _folder(self) -> str:
        if self._manager is None:
            self._manager = TemporaryResourcesManager(self._temp_folder)
        return str(self._manager.resolve_temp_folder_name())


def modules_of(pickled: bytes) -> list[str]:
    """Returns the modules, of those loaded here, that unpickling imports; sorted."""
    modules: set[str] = set()
    pushed: list[Any] = []
    memo: list[Any] = []
    for code, argument, _ in pickletools.genops(pickled):
        if code.name == "STACK_GLOBAL":
            modules.update(name for name in pushed[-2:-1] if isinstance(name, str) and name in sys.modules)
        elif code.name == "MEMOIZE":
            memo.append(pushed[-1])
            continue
        fetched = memo[int(argument or 0)] if code.name in ("BINGET", "LONG_BINGET") else argument
        pushed = [*pushed[-1:], fetched]
    return sorted(modules)
