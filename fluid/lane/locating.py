"""Finds a checkpoint on this machine, or has it fetched from the machine that has it, once for all lanes here."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fluid._private_files import make_folder
from fluid.lane.checkpoint_files import iteration_of
from fluid.lane.checkpoint_paths import checkpoints_folder, settled_path
from fluid.lane.checkpoint_seal import is_of_the_process
from fluid.lane.errors import one_line, print_exception
from fluid.lane.messages import LaneOptions
from fluid.lane.run_paths import folder_name
from fluid.lane.store_ledger import StoreLedger

#: A checkpoint from another machine goes to host memory if so many of its size are free there.
_ROOM = 4


class Located(NamedTuple):
    """What is known of a checkpoint that is to be restored.

    Attributes:
        path: its folder, for :meth:`fluid.lane.checkpoint_store.CheckpointStore.places`; it may not exist.
        problem: why it is not on this machine, in one line; empty if that is not known.
        fetched: whether it was just fetched from another machine.
    """

    path: str
    problem: str = ""
    fetched: bool = False


class CheckpointLocator:
    """Finds and fetches checkpoints for a lane.

    Args:
        options: the lane's.
    """

    def __init__(self, options: LaneOptions) -> None:
        self._options = options

    def locate(self, trial_id: str, path: str, source: tuple[str, int] | None) -> Located:
        """Finds a checkpoint on this machine, or fetches it, or else the best one that can replace it.

        Args:
            trial_id: the trial that it is of.
            path: where it was written.
            source: where the server of the machine that has it listens; ``None`` for this machine.

        Raises:
            OSError: this process cannot open files at the moment.
        """
        session_folder = self._options.session_folder or self._options.run_folder
        here = path if os.path.isdir(path) else settled_path(path, session_folder) or path
        if source is None or self._is_here(trial_id, here):
            return Located(here)
        try:
            with self._locked(trial_id):
                if self._is_here(trial_id, here):  # Another lane has just fetched it.
                    return Located(here)
                return Located(here, self._fetch(trial_id, path, source), fetched=True)
        except Exception as error:
            if is_of_the_process(error):
                raise
            print_exception()
            what = f"the checkpoint of iteration {iteration_of(path)}"
            return Located(here, f"{what} could not be fetched from {source[0]}: {one_line(error)}")

    def _fetch(self, trial_id: str, path: str, source: tuple[str, int]) -> str:
        """Fetches a checkpoint; returns what was wrong with better ones."""
        # Only here, as few lanes need it.
        from fluid.lane.fetching import fetch_checkpoint
        from fluid.lane.link_rates import LinkRates

        options = self._options
        rates = LinkRates(options.memory_folder or options.run_folder)

        ledger, reserved = StoreLedger(options.memory_folder), 0

        def place_for(name: str, size: int) -> str:
            nonlocal reserved
            *memory, disk = self._folders(trial_id)
            ledger.correct(-reserved)  # One that came before was damaged.
            has_room = bool(memory) and shutil.disk_usage(options.memory_folder).free > _ROOM * size
            has_room = has_room and ledger.reserve(size)
            reserved = size if has_room else 0
            return os.path.join(memory[0] if has_room else disk, name)

        try:
            return fetch_checkpoint(source, options.session_key, path, place_for, rates).problem
        except BaseException:
            ledger.correct(-reserved)
            raise
        finally:
            ledger.close()

    def _is_here(self, trial_id: str, path: str) -> bool:
        name = os.path.basename(path)
        return any(map(os.path.isdir, (path, *(os.path.join(folder, name) for folder in self._folders(trial_id)))))

    def _folders(self, trial_id: str) -> list[str]:
        """The folders on this machine for checkpoints of a trial: in host memory, if there is one, and on disk."""
        options, name = self._options, folder_name(trial_id)
        memory = [os.path.join(options.memory_folder, name)] if options.memory_folder else []
        return [*memory, checkpoints_folder(options.run_folder, name)]

    @contextmanager
    def _locked(self, trial_id: str) -> Iterator[None]:
        """Keeps other lanes of this machine from fetching checkpoints of a trial, where folders can be locked."""
        folder = self._folders(trial_id)[0]
        descriptor = -1
        with suppress(OSError):
            make_folder(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)
