"""The files of checkpoints that outlive the run: brought to the run folder and deleted in a thread of their own."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fluid._logs import logger_of
from fluid._waiting import BackgroundThread
from fluid.backends.base import Backend, KeepingBackend
from fluid.keeping import FACTS, KeepRule
from fluid.lane.checkpoints.files import copy_atomically, discard_kept, entries_of, iteration_of
from fluid.lane.checkpoints.paths import folder_name, kept_folder
from fluid.lane.checkpoints.seal import sealed_bytes
from fluid.session.kept_registry import KeptEntry

_HERE = "localhost"
#: Seconds to wait, as the session ends, for checkpoints that come from other machines.
_PATIENCE = 120.0
_log = logger_of("fluid.session")


class KeptFiles:
    """Works on the files in the order it is told to.

    Args:
        folder: the run folder.
        backend: reaches the files of other machines.
        post: has a call made in the session's thread.
    """

    def __init__(self, folder: Path, backend: Backend, post: Callable[[Callable[[], None]], None]) -> None:
        self._folder = str(folder)
        self._backend = backend
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()
        self._waiting = 0
        self._warned = False

    @property
    def is_idle(self) -> bool:
        """Whether all is done."""
        with self._lock:
            return self._waiting == 0

    def bring(self, entry: KeptEntry, done: Callable[[], None]) -> None:
        """Copies a checkpoint to the run folder, if it is elsewhere; then calls ``done`` in the session's thread."""
        if os.path.dirname(entry.path) != self._place_of(entry) or not os.path.isdir(entry.path):
            self._submit(lambda: self._bring(entry), done)

    def discard(self, entry: KeptEntry, *, demote: bool, done: Callable[[], None]) -> None:
        """Deletes a checkpoint; with ``demote``, its trial may still be restored from it."""
        entry.gone = True
        self._submit(lambda: self._discard(entry, demote), done)

    def close(self) -> None:
        """Waits until all is done, for a while."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                _log.warning("checkpoints of other machines have not all come to %s", self._folder)

    def _place_of(self, entry: KeptEntry) -> str:
        return kept_folder(self._folder, folder_name(entry.trial_id))

    def _submit(self, job: Callable[[], None], done: Callable[[], None]) -> None:
        with self._lock:
            self._waiting += 1

        def run() -> None:
            try:
                job()
            except Exception:
                _log.exception("the files of a checkpoint could not be handled")
            finally:
                with self._lock:
                    self._waiting -= 1
                self._post(done)

        self._jobs.put(run)
        if self._thread is None:
            self._thread = BackgroundThread("fluid-kept", self._run)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _bring(self, entry: KeptEntry) -> None:
        if entry.gone:
            return
        name, host, source = os.path.basename(entry.path), entry.host, entry.path
        folder = self._place_of(entry)
        target = os.path.join(folder, name)
        try:
            if host == _HERE:
                copy_atomically(source, folder)
            elif isinstance(self._backend, KeepingBackend):
                self._backend.fetch_kept(host, source, target)
        except (OSError, shutil.Error) as error:
            if not self._warned:
                self._warned = True
                what = f"the checkpoint of iteration {entry.iteration} of trial {entry.trial_id!r}"
                _log.warning("%s could not be brought from %s to %s: %s", what, host, self._folder, error)
            return
        entry.path, entry.host = target, _HERE
        if host != _HERE:
            self._post(lambda: self._tell_to_discard(host, source, demote=True))

    def _discard(self, entry: KeptEntry, demote: bool) -> None:
        if entry.host != _HERE:
            host, path = entry.host, entry.path
            self._post(lambda: self._tell_to_discard(host, path, demote=demote))
        elif entry.path:
            discard_kept(entry.path, demote=demote)

    def _tell_to_discard(self, host: str, path: str, *, demote: bool) -> None:
        if isinstance(self._backend, KeepingBackend):
            self._backend.discard_kept(host, path, demote=demote)


def kept_by_earlier_session(folder: Path, trial_id: str, rule: KeepRule) -> Iterator[KeptEntry]:
    """Finds what an earlier session kept of a trial by the same rule, by the files alone; deletes unfinished copies.

    One whose seal cannot be read stays, and counts for nothing: the error may pass, or its user may know what to do.
    """
    for path in sorted(entries_of(kept_folder(str(folder), folder_name(trial_id))), key=iteration_of):
        size = sealed_bytes(path)
        if os.path.basename(path).startswith("."):
            shutil.rmtree(path, ignore_errors=True)
            continue
        if size is None:
            _log.warning("%s, kept by an earlier session, is damaged or cannot be read: it stays as it is", path)
            continue
        facts: object = None
        with suppress(OSError, ValueError), open(os.path.join(path, FACTS), encoding="utf-8") as file:
            facts = json.load(file)
        chosen = facts if isinstance(facts, dict) else {}
        value = chosen.get("value")
        is_like = (chosen.get("metric"), chosen.get("mode")) == (rule.metric, rule.mode)
        if rule.how == "last" or (is_like and isinstance(value, float)):
            yield KeptEntry(
                trial_id=trial_id,
                iteration=iteration_of(path),
                path=path,
                host=_HERE,
                bytes=size,
                value=value,
                place=rule.place,
            )
