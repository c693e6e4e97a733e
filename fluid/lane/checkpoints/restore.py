"""Restores a trial from the best of its checkpoints that can be used: its newest, else an earlier one, else none."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fluid._private_files import make_folder
from fluid.lane.checkpoints.files import iteration_of, locked_for_reading
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.paths import checkpoints_folder, folder_name, settled_path
from fluid.lane.checkpoints.seal import damage_by_lengths, damage_of, is_of_the_process
from fluid.lane.errors import one_line, print_exception
from fluid.lane.protocol import LaneOptions

#: Most characters of a reason.
_LONGEST = 500


class Restored(NamedTuple):
    """What a trial was restored from.

    Attributes:
        path: the checkpoint; ``None`` if the trial begins afresh.
        iteration: iterations done by its state.
        reason: why it was not the checkpoint wanted, in one line; empty if it was one of the same iteration.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged.
    """

    path: str | None
    iteration: int
    reason: str
    cannot_load: bool


def restore_best(
    places: Iterable[str],
    iteration: int,
    load: Callable[[str], None],
    renew: Callable[[], None],
    is_innocent: Callable[[BaseException], bool],
    problem: str = "",
    is_in_memory: Callable[[str], bool] = lambda path: False,
) -> Restored:
    """Restores a trial that was set up.

    Args:
        places: folders of its checkpoints, the best first; some may not exist.
        iteration: that of the checkpoint wanted.
        load: restores the trial from a folder.
        renew: sets the trial up anew; called before a ``load`` that follows one that raised, and in the end if no
            checkpoint could be used and one had raised.
        is_innocent: whether an error of ``load`` says nothing about the checkpoint, such as a lack of memory.
        problem: why the checkpoint wanted is not among the places, if that is known.
        is_in_memory: whether a folder is in host memory: its files are then read once, by ``load``, and not summed.

    Raises:
        BaseException: what ``renew`` raised, and errors of ``load`` that say nothing about the checkpoint.
        OSError: this process cannot open files at the moment.
    """
    problems = [problem] if problem else []
    is_soiled = cannot_load = False
    for path in places:
        with locked_for_reading(path) as exists:
            if not exists:
                continue
            damage = damage_by_lengths(path) if is_in_memory(path) else damage_of(path)
            if damage is not None:
                problems.append(f"the checkpoint of iteration {iteration_of(path)} is damaged: {damage}")
                continue
            if is_soiled:
                renew()
            try:
                load(path)
            except BaseException as error:
                if is_innocent(error):
                    raise
                print_exception()
                problems.append(f"loading the checkpoint of iteration {iteration_of(path)} raised {one_line(error)}")
                is_soiled = cannot_load = True
            else:
                found = iteration_of(path)
                return Restored(path, found, _reason(problems, iteration) if found < iteration else "", False)
    if is_soiled:
        renew()
    return Restored(None, 0, _reason(problems, iteration), cannot_load)


def _reason(problems: list[str], iteration: int) -> str:
    wanted = f"checkpoint of iteration {iteration} "
    if not any(wanted in problem for problem in problems):
        problems = [f"the {wanted}is gone", *problems]
    return "; ".join(problems)[:_LONGEST]


# -- locating ------------------------------------------------------------------------------------
#
# Finds a checkpoint on this machine, or has it fetched from the machine that has it, once for all lanes here.


#: A checkpoint from another machine goes to host memory if so many of its size are free there.
_ROOM = 4


class Located(NamedTuple):
    """What is known of a checkpoint that is to be restored.

    Attributes:
        path: its folder, for :meth:`fluid.lane.checkpoints.store.CheckpointStore.places`; it may not exist.
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
        from fluid.lane.checkpoints.fetch import LinkRates, fetch_checkpoint

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
