"""What a host does with the checkpoints of its trials when asked, whether or not a lane of theirs is left.

It copies them to disk, or to where they outlive the run, and deletes them: one after the other, in the order in which
that was asked for, in a thread of its own. It does so at the same time as lanes and the host's other threads, which
write, move and delete checkpoints, too: each of those appears, and disappears, as a whole.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid.lane.checkpoints.files import discard_kept
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.lane.errors import one_line
from fluid.lane.protocol import CheckpointForked, CheckpointPersisted, CheckpointReport
from fluid.waiting.waits import BackgroundThread

_log = logger_of(__name__)
#: Seconds in which what was asked for is still begun once the host closes.
_CLOSE_S = 5.0


class CheckpointJobs:
    """Carries out requests about checkpoints on this machine; its methods wait for nothing, except for :meth:`close`.

    Args:
        host: name of the machine.
        store: finds the session's checkpoints there.
        report: called in the thread with each answer.
    """

    def __init__(self, host: str, store: CheckpointStore, report: Callable[[CheckpointReport], None]) -> None:
        self._host = host
        self._store = store
        self._report = report
        self._clock = MonotonicClock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        #: When to begin no further ones, once the host closes.
        self._end_at = float("inf")

    def persist(self, trial_id: str, path: str, *, keep: bool) -> None:
        """Copies a checkpoint: see :meth:`fluid.backends.base.CheckpointStores.persist`."""
        self._put(lambda: self._report(self._persisted(trial_id, path, keep)))

    def fork(self, child: str, parent: str, path: str) -> None:
        """Makes a checkpoint the start of another trial: see :meth:`fluid.backends.base.CheckpointStores.fork`."""
        self._put(lambda: self._report(self._forked(child, parent, path)))

    def delete(self, trial_id: str, *, keep_newest: bool) -> None:
        """Deletes a trial's checkpoints: see :meth:`fluid.backends.base.CheckpointStores.forget`."""
        self._put(lambda: self._delete(trial_id, keep_newest))

    def discard(self, path: str, *, demote: bool) -> None:
        """Removes a checkpoint from those that outlive the run: see :func:`discard_kept`."""
        self._put(lambda: discard_kept(path, demote=demote))

    def close(self) -> None:
        """Ends the thread, once what was asked for is done; after a while, once the job in progress is."""
        self._end_at = self._clock.now() + _CLOSE_S
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = BackgroundThread("fluid-checkpoint-jobs", self._run)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and self._clock.now() < self._end_at:
            try:
                job()
            except Exception:
                _log.exception("the checkpoints of a trial could not be handled")

    def _persisted(self, trial_id: str, path: str, keep: bool) -> CheckpointPersisted:
        begun, size, problem = self._clock.now(), 0, ""
        try:
            if keep:
                path, _, size = self._store.keep_copy(trial_id, path)
            else:
                path = self._store.persist(path)
        except Exception as error:  # An answer is waited for.
            problem = one_line(error)
            _log.debug("%s could not be copied: %s", path, problem)
        return CheckpointPersisted(trial_id, path, self._host, keep, size, self._clock.now() - begun, problem)

    def _forked(self, child: str, parent: str, path: str) -> CheckpointForked:
        begun = self._clock.now()
        try:
            made, in_memory, _ = self._store.fork_saved(child, parent, path)
        except Exception as error:  # An answer is waited for.
            _log.debug("no trial can start from %s: %s", path, error)
            return CheckpointForked(
                child, parent, self._host, seconds=self._clock.now() - begun, problem=one_line(error)
            )
        return CheckpointForked(child, parent, self._host, made, in_memory, self._clock.now() - begun)

    def _delete(self, trial_id: str, keep_newest: bool) -> None:
        if keep_newest:
            try:
                self._store.keep_newest(trial_id)
            except (OSError, shutil.Error) as error:  # Those that are there stay: they move to disk as the host ends.
                _log.warning(
                    "the last checkpoint of trial %r could not be copied to disk: %s", trial_id, one_line(error)
                )
                return
        self._store.delete(trial_id)
