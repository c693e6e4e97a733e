"""Copies checkpoints from host memory to Tune's storage, in the driver, where lanes have only written them to memory.

Tune sees each as one in its storage, and finds it there whenever it looks: before it writes the experiment's state,
from which a sweep is restored; before it may delete one, which it does when the trial has a newer one; when it goes on
from one on another machine; and at the end of the sweep. A lane that dies takes nothing with it.

All but the copying runs in the controller's thread, and so does a copy for which the controller waits while no thread
is free.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pyarrow import fs as pyarrow_fs
from ray.tune.schedulers import PopulationBasedTraining

from fluid._clock import MonotonicClock
from fluid.integrations.ray_tune.controller.decisions import may_read_checkpoints
from fluid.integrations.ray_tune.controller.tune_trial import checkpoint_path
from fluid.integrations.ray_tune.lane.lane_trial import FailedSave
from fluid.integrations.ray_tune.lane.memory_saves import CheckpointWanted, SavedInMemory, opened
from fluid.integrations.ray_tune.private_api import before_state_is_written, donated_path
from fluid.lane.checkpoints.store import delete_places

_log = logging.getLogger(__name__)
#: Checkpoints of a trial that stay in memory in any case: Tune is about to be told of the last one.
_KEPT = 2
#: Copies under way at a time, and the niceness of their threads: a trial that goes on reads its state meanwhile.
_THREADS, _NICENESS = 2, 10
#: Seconds for which a copy waits, unless it is needed, so that the trial that goes on can read its state first.
_HEAD_START_S = 1.0


class MemoryCheckpoints:
    """The checkpoints of one sweep that lanes have written to host memory.

    Args:
        controller: Tune's.
        scheduler: the user's.
        rehearsed: whether the sweep is rehearsed: it then has no states.

    Attributes:
        are_used: whether lanes may write checkpoints to host memory: with population based training, unless callbacks
            may read each as soon as it is made.
    """

    def __init__(self, controller: Any, scheduler: Any, *, rehearsed: bool) -> None:
        self.are_used = (
            isinstance(scheduler, PopulationBasedTraining)
            and not rehearsed
            and not may_read_checkpoints(controller)
            and before_state_is_written(controller, self.settle)
        )
        self._controller = controller
        self._scheduler = scheduler
        self._pool: ThreadPoolExecutor | None = None
        self._clock = MonotonicClock()
        #: With the copying of each, by its path in Tune's storage.
        self._saved: dict[str, tuple[SavedInMemory, Future[None]]] = {}
        #: Set for a path once its copy is needed.
        self._needed: dict[str, threading.Event] = {}
        #: Those paths by Tune's id of the trial, the oldest first.
        self._of_trial: dict[str, deque[str]] = {}
        #: Of those that could not be copied.
        self._failed: set[str] = set()
        #: Those that were being read when they were to be deleted.
        self._left: list[SavedInMemory] = []

    def hand_over(self, saved: Any, trial_id: str) -> Any:
        """Begins to copy a checkpoint that Tune is about to be given.

        Args:
            saved: what a lane has returned.
            trial_id: Tune's id of the trial.

        Returns:
            What Tune is to be given; a :class:`FailedSave` if the checkpoint cannot be copied, as others before.
        """
        if not isinstance(saved, SavedInMemory):
            return saved
        path = str(saved.checkpoint.path)
        if path not in self._saved or self._saved[path][0].places != saved.places:
            paths = self._of_trial.setdefault(trial_id, deque())
            for before in paths:
                self.settle_one(before)
            if path in paths:  # The trial was set back, and counts its checkpoints anew.
                paths.remove(path)
                self._forget(path)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "fluid-tune-storage", _let_lanes_go_first)
            needed = self._needed[path] = threading.Event()
            self._saved[path] = saved, self._pool.submit(self._store_later, saved, needed, self._clock.now())
            paths.append(path)
            self._drop_old(paths)
        if self._failed:  # The storage may be full: from now on Tune is told of it at once.
            error = self._finish(path)
            if isinstance(error, Exception):
                return FailedSave("".join(traceback.format_exception(error)), error)
        return saved.result

    def find(self, saved: Any) -> Any:
        """Returns a checkpoint of Tune as one in memory, if it is there, or else as it is."""
        known = None if saved is None else self._saved.get(str(saved.checkpoint.path))
        return saved if known is None else SavedInMemory(saved, known[0].places)

    def settle(self) -> None:
        """Waits until all checkpoints that Tune was given are in its storage."""
        for needed in self._needed.values():
            needed.set()
        for path in self._saved:
            self.settle_one(path)

    def settle_one(self, path: str) -> None:
        """Waits until a checkpoint is in Tune's storage; one that cannot be copied is logged."""
        if path not in self._saved or path in self._failed or self._finish(path) is None:
            return
        if (error := self._copy(path)) is not None:
            self._failed.add(path)
            _log.error("The checkpoint %s could not be written to the sweep's storage: %s", path, error)

    def answer(self, trial_id: str, wanted: CheckpointWanted) -> bool:
        """Answers a trial that goes on from a checkpoint; returns whether Tune was given that by a lane's memory."""
        self.settle_one(wanted.path)
        return wanted.path in self._saved

    def close(self) -> None:
        """Waits for all copies, and deletes what is in memory."""
        self.settle()
        for path in list(self._saved):
            self._forget(path)
        for saved in self._left:
            delete_places(saved.places)
        self._left.clear()
        self._of_trial.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _drop_old(self, paths: deque[str]) -> None:
        """Drops a trial's checkpoints from memory but for the newest, and for those from which trials are to go on."""
        if len(paths) > _KEPT:
            wanted = self._wanted()
            for path in [path for path in list(paths)[:-_KEPT] if path not in wanted]:
                paths.remove(path)
                self._forget(path)

    def _wanted(self) -> set[str | None]:
        """Paths of the checkpoints from which trials go on, or others may go on in an exploit.

        Tune deletes those of a trial that has newer ones (``num_to_keep``), also while another trial that is to go on
        from one waits for a device.
        """
        going_on = {
            checkpoint_path(trial.latest_checkpoint_result)
            for trial in self._controller.get_trials()
            if not trial.is_finished()
        }
        return going_on | {donated_path(member) for member in self._scheduler._trial_state.values()}

    def _finish(self, path: str) -> BaseException | None:
        """Has a copy made at once, and waits for it; returns why it failed, if it has."""
        _, copying = self._saved[path]
        if copying.cancel():  # All threads wait for the head starts of others.
            return self._copy(path)
        self._needed[path].set()
        return copying.exception()

    def _copy(self, path: str) -> BaseException | None:
        """Copies a checkpoint in the controller's thread; returns why that failed, if it has."""
        saved, done = self._saved[path][0], Future[None]()
        try:
            _store(saved)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        self._saved[path] = saved, done
        return done.exception()

    def _store_later(self, saved: SavedInMemory, needed: threading.Event, at: float) -> None:
        """Copies a checkpoint that was handed over at that time, seconds, to Tune's storage."""
        needed.wait(max(0.0, at + _HEAD_START_S - self._clock.now()))
        _store(saved)

    def _forget(self, path: str) -> None:
        saved, _ = self._saved.pop(path)
        self._needed.pop(path, None)
        self._failed.discard(path)
        delete_places(saved.places)
        if any(map(os.path.isdir, saved.places)):
            self._left.append(saved)


def _let_lanes_go_first() -> None:
    """Lowers the priority of the calling thread, where threads have one of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _store(saved: SavedInMemory) -> None:
    """Copies a checkpoint to Tune's storage.

    Raises:
        OSError: it is gone, or cannot be written there.
    """
    with opened(saved) as folder:
        if folder is None:
            raise FileNotFoundError(saved.places[0])
        checkpoint, files = saved.checkpoint, saved.checkpoint.filesystem
        files.create_dir(checkpoint.path)
        # By this thread alone, which has its niceness; uploads to S3 by several threads may hang, too.
        pyarrow_fs.copy_files(folder, checkpoint.path, destination_filesystem=files, use_threads=False)
