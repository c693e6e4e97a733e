"""The backend that joblib knows as ``"fluid"``."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.executor_source import ExecutorSource
from fluid.integrations.joblib.dispatch import Batch, Workers
from fluid.integrations.joblib.task_pickler import TaskPickler
from fluid.trainables.driver_link import in_trial

with try_import("joblib", extra="joblib") as _imports:
    from joblib import register_parallel_backend
    from joblib._parallel_backends import FallbackToBackend, SequentialBackend
    from joblib.parallel import AutoBatchingMixin, ParallelBackendBase

_imports.check()

#: The host of devices of this machine, on the local backend.
_HERE = "localhost"


class FluidBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs joblib's tasks on Fluid's lanes; ``joblib.parallel_config("fluid", ...)`` makes it.

    Example:
        >>> import joblib
        >>> import fluid.integrations.joblib
        >>> with joblib.parallel_config("fluid", n_jobs=2, devices=2, verbose=0):
        ...     joblib.Parallel()(joblib.delayed(pow)(2, n) for n in range(5))
        [1, 2, 4, 8, 16]

    Args:
        executor: runs the tasks; ``None``, the default, for the one in force, or a new one, which is closed when the
            block of ``parallel_config`` is left.
        inner_max_num_threads: most threads of a worker; ``None``, the default, for those of a lane, one on a CPU.
        nesting_level: joblib's.
        initializer: called in each process before its first task; ``None``, the default, for nothing.
        initargs: its arguments.
        options: of the new executor, as for :class:`fluid.FluidExecutor`.

    Raises:
        InvalidFieldError: ``executor`` is none, or comes with options of a new one; or ``initializer`` is no function.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    #: All devices.
    default_n_jobs = -1

    def __init__(
        self,
        executor: FluidExecutor | None = None,
        *,
        inner_max_num_threads: int | None = None,
        nesting_level: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        _require_function(initializer)
        if executor is not None and not isinstance(executor, FluidExecutor):
            raise InvalidFieldError("executor", executor, "must be a FluidExecutor")
        if executor is not None and options:
            name, value = next(iter(options.items()))
            raise InvalidFieldError(name, value, "is an option of a new executor, and executor is given")
        self.parallel: Any = None
        self._executors = ExecutorSource(executor, options)
        self._first: dict[str, Any] = {"initializer": initializer, "initargs": initargs}
        self._settings: dict[str, Any] = {}
        #: Those of the call of ``Parallel`` that goes on; ``None`` until it submits.
        self._workers: Workers | None = None

    # -- as of joblib 1.3 ------------------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Returns the number of workers for what a caller asks for: -1 stands for all devices, as ``None`` does."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            n_jobs = self.default_n_jobs
        if in_trial():
            return 1
        if multiprocessing.current_process().daemon:
            if n_jobs != 1:
                text = "Fluid-backed parallel loops cannot run in a process of multiprocessing, setting n_jobs=1"
                warnings.warn(text, stacklevel=3)
            return 1
        return n_jobs if n_jobs > 0 else max(1, self._executors.get().max_devices + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Prepares a call of ``Parallel``; returns the number of workers."""
        if self.parallel is not None:  # Such as by a generator that was not read to its end.
            raise FallbackToBackend(self._sibling())
        workers = self.effective_n_jobs(n_jobs)
        if workers == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self._settings = {"n_jobs": workers, **self._first, **settings}
        _require_function(self._settings["initializer"])
        self.parallel = parallel
        return workers

    def submit(self, func: Callable[[], list[Any]], callback: Callable[[Batch], None] | None = None) -> Batch:
        """Runs a batch of tasks on a lane."""
        if self._workers is None:
            self._workers = self._make_workers()
        return self._workers.submit(func, callback)

    #: Its name before joblib 1.5.
    apply_async = submit

    def retrieve_result_callback(self, out: Batch) -> list[Any]:
        """Returns the results of a batch, or raises what one of its tasks raised."""
        return out.results()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Ends the workers, and kills those that run tasks; the next batch gets new ones."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def terminate(self) -> None:
        """Ends the workers of a call."""
        self.abort_everything()
        self.parallel = None
        self.reset_batch_stats()

    # -- Fluid's ---------------------------------------------------------------------------------------------

    def _make_workers(self) -> Workers:
        executor, settings = self._executors.get(), self._settings
        is_shared = all(device.host == _HERE for device in executor.devices)
        pickler = TaskPickler(
            settings.get("temp_folder"),
            settings.get("max_nbytes", 1e6) if is_shared else None,
            settings.get("mmap_mode", "r"),
        )
        config: dict[str, Any] = {} if self.inner_max_num_threads is None else {"threads": self.inner_max_num_threads}
        if settings["initializer"] is not None:
            config["initializer"] = pickler.dumps((settings["initializer"], tuple(settings["initargs"])))
        return Workers(executor, settings["n_jobs"], config, pickler)

    def _sibling(self) -> FluidBackend:
        """Another backend on the same executor, for a call while one goes on."""
        sibling = FluidBackend(
            inner_max_num_threads=self.inner_max_num_threads, nesting_level=self.nesting_level, **self._first
        )
        sibling._executors = self._executors
        return sibling


def _require_function(initializer: Any) -> None:
    if initializer is not None and not callable(initializer):
        raise InvalidFieldError("initializer", initializer, "must be a function")


def register() -> None:
    """Makes the backend known to joblib, as ``"fluid"``."""
    register_parallel_backend("fluid", FluidBackend)
