"""A lane's store of checkpoints: in host memory, and on disk where that is full.

Host memory is a folder on a RAM disk, so that a checkpoint outlives the lane that wrote it. All lanes of a host share
it (:mod:`fluid.lane.checkpoints.ledger`). Before it is full, the host moves those of the least value to disk
(:mod:`fluid.backends.hosts.checkpoints.keeper`), and readers find them there. What has no room in memory, as what is
there is worth more, a lane writes to disk. The last two of a trial are kept: the driver may use the last but one until
the message about the last has arrived, and a reader does if the last is damaged or gone.

A checkpoint is written and sealed (:mod:`fluid.lane.checkpoints.seal`) under a temporary name and then renamed: a lane
that is killed while it saves leaves the older one intact. Nothing is synced to the disk (fsync), so after a power loss
the newest checkpoints may be damaged or missing; the seal tells.

A trial may continue in another lane while the lane it leaves saves it once more, after calls that are repeated in the
new lane. So a checkpoint of a later iteration, or one that is being read, is not deleted; and a reader whose checkpoint
is gone takes another one of the same iteration, or else an earlier one.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from fluid.lane.checkpoints.files import (
    LinkedCopies,
    checkpoint_name,
    checkpoints_like,
    copy_as,
    copy_atomically,
    copy_checked,
    delete_at_once,
    delete_unread,
    entries_of,
    iteration_of,
    locked_for_reading,
    newest_in,
    share,
    unshare,
    write_atomically,
)
from fluid.lane.checkpoints.ledger import RestoreSample, StoreLedger
from fluid.lane.checkpoints.paths import (
    checkpoints_folder,
    folder_name,
    host_of,
    kept_folder,
    settled_path,
    trial_of_folder,
)
from fluid.lane.checkpoints.seal import damage_by_lengths, freed_bytes, is_shared, sealed_bytes
from fluid.lane.checkpoints.trial_files import copy_trial_files
from fluid.lane.errors import one_line
from fluid.lane.payloads import payloads_on_disk
from fluid.lane.protocol import LaneOptions

#: Checkpoints of a trial that are kept.
_KEPT = 2
#: Share of the RAM disk that checkpoints leave free for other uses, such as data loaders.
_RESERVE = 0.1
#: Most trials that a warning names.
_MOST_TOLD = 20


class Stored(NamedTuple):
    """Where a checkpoint was written, and the bytes of its files."""

    path: str
    in_memory: bool
    bytes: int = 0


class CheckpointStore:
    """Writes the checkpoints of one lane's trials; finds, copies and deletes those of any trial.

    Args:
        lane_id: part of the checkpoints' names, which are unique among lanes; -1 for a host, which only copies.
        run_folder: folder of the run, on disk.
        memory_folder: folder on a RAM disk, with a ledger; empty if there is none.
        ledger: that ledger, if this process uses it already.
    """

    def __init__(
        self, lane_id: int, run_folder: str, memory_folder: str = "", ledger: StoreLedger | None = None
    ) -> None:
        self._lane_id = lane_id
        self._run_folder = run_folder
        self._memory_folder = memory_folder
        self._ledger = ledger or StoreLedger(memory_folder)
        self._written = 0
        #: Bytes of each trial's last checkpoint, the estimate for its next one.
        self._sizes: dict[str, int] = {}
        #: Name of the checkpoint from which each trial would be restored; its folder may change.
        self._last: dict[str, str] = {}

    def save(
        self,
        trial_id: str,
        iteration: int,
        write: Callable[[str], None],
        *,
        durable: bool = False,
        keep: bool = False,
        summed: bool = True,
    ) -> Stored:
        """Writes a checkpoint and deletes the trial's obsolete ones, except those that outlive the run.

        Args:
            trial_id: the trial.
            iteration: iterations it has done.
            write: fills the empty folder it is given; called a second time, for disk, if memory is too small.
            durable: whether to write to disk at once.
            keep: whether to write to disk, where it outlives the run.
            summed: whether its files are summed at once, also in memory.

        Raises:
            Exception: what ``write`` raised when writing to disk.
        """
        self._written += 1
        name = checkpoint_name(iteration, self._lane_id, self._written)
        stored = None if durable or keep else self._save_in_memory(trial_id, name, write, summed=summed)
        if stored is None:
            folder, size = write_atomically(self._kept(trial_id) if keep else self._disk(trial_id), name, write)
            stored = Stored(folder, False, size)
        self._delete_older(trial_id, iteration, {name, self._last.get(trial_id, "")})
        self._last[trial_id] = name
        return stored

    def save_in_memory(self, trial_id: str, number: int, write: Callable[[str], None]) -> Stored | None:
        """Writes a checkpoint to host memory, where it stays until the caller deletes it; ``None`` if it could not be.

        Args:
            trial_id: names its folder; of no trial that is saved by :meth:`save`.
            number: tells it from the trial's others, the higher the newer.
            write: fills the empty folder it is given.
        """
        self._written += 1
        return self._save_in_memory(trial_id, checkpoint_name(number, self._lane_id, self._written), write)

    def save_start(self, child: str, parent: str, iteration: int, write: Callable[[str], None]) -> Stored:
        """As :meth:`save`, of the state of a trial, the parent, from which another one, the child, is to start."""
        self._sizes[child] = self._sizes.get(parent, 0)
        try:
            return self.save(child, iteration, write, summed=False)
        finally:
            self.forget_resident(child)  # It starts in any lane.

    def fork(self, child: str, path: str) -> Stored:
        """Makes a checkpoint of a trial, of whichever lane, the state from which another one, the child, is to start.

        The original stays. The two have their files in common where that can be: then it costs neither time nor room.

        Args:
            child: the trial that is to start.
            path: the original's folder, on this machine.

        Raises:
            OSError, shutil.Error: the original is gone or damaged, or the disk is full.
        """
        iteration, in_memory = iteration_of(path), self.is_in_memory(path)
        if os.path.isdir(path) and (damage := damage_by_lengths(path)) is not None:
            raise OSError(f"the checkpoint of iteration {iteration} is damaged: {damage}")
        root = self._memory(child) if in_memory else self._disk(child)
        try:
            made = share(path, root, self._free_name(child, iteration))
        except OSError:  # It is being read; other disks, another user's files, too many links, no links at all.
            with locked_for_reading(path) as exists:
                if not exists:
                    raise FileNotFoundError(f"the checkpoint of iteration {iteration} is gone: {path}") from None
                made = copy_as(path, self._disk(child), self._free_name(child, iteration))
        return Stored(made, self.is_in_memory(made), sealed_bytes(made) or 0)

    def fork_saved(self, child: str, parent: str, path: str) -> Stored:
        """As :meth:`fork`, also of a checkpoint that has moved since; copies the parent's own folder, too.

        Args:
            child: the trial that is to start.
            parent: the trial that the checkpoint is of.
            path: where it was written, in this run or another one.

        Raises:
            OSError, shutil.Error: no checkpoint of that iteration can be read, or the disk is full.
        """
        is_ours = self._is_ours(path)
        problem: OSError | None = None
        for place in self._copies(parent, path) if is_ours else [path]:
            try:
                made = self.fork(child, place)
            except OSError as error:  # It is gone, or about to be: another copy will do.
                problem = problem or error
                continue
            try:
                copy_trial_files(self._run_folder, parent, child, "" if is_ours else path)
            except BaseException:
                self.delete(child)
                raise
            return made
        raise problem or FileNotFoundError(path)

    def _is_ours(self, path: str) -> bool:
        """Whether a checkpoint was written to a folder of this run, also in the memory of an earlier session of it."""
        ours = tuple(os.path.join(folder, "") for folder in (self._memory_folder, self._run_folder) if folder)
        settled = settled_path(path, self._run_folder)
        return path.startswith(ours) or (settled is not None and not os.path.isdir(path))

    def _copies(self, trial_id: str, path: str) -> Iterator[str]:
        """Yields the folders that may have a checkpoint, or one of its iteration: it may have moved.

        Raises:
            OSError: this process cannot open files at the moment.
        """
        yield path
        for place in self.places(trial_id, settled_path(path, self._run_folder) or path):
            if iteration_of(place) == iteration_of(path):
                yield place

    def _free_name(self, trial_id: str, iteration: int) -> str:
        """A name for a checkpoint of a trial, which an earlier session has not given."""
        while True:
            self._written += 1
            name = checkpoint_name(iteration, self._lane_id, self._written)
            if not any(os.path.lexists(os.path.join(root, name)) for root in self._roots(trial_id)):
                return name

    def own(self, trial_id: str, path: str) -> str:
        """Sees to it that a checkpoint has its files in common with no other one; returns its folder then.

        Raises:
            OSError, shutil.Error: there is no room.
        """
        if not is_shared(path):
            return path
        if not self.is_in_memory(path):
            unshare(path)
            return path
        size = sealed_bytes(path) or 0
        if self._has_space(size) and self._ledger.reserve(size):
            try:
                unshare(path)
            except OSError:
                self._ledger.correct(-size)
            else:
                return path
        copy_atomically(path, self._disk(trial_id))
        return os.path.join(self._disk(trial_id), os.path.basename(path))

    def persist(self, path: str) -> str:
        """Copies a checkpoint from host memory, of whichever lane, to disk; returns its path there.

        Raises:
            OSError: it is gone, or the disk is full, or it is not in host memory.
        """
        if not self.is_in_memory(path):
            raise FileNotFoundError(path)
        folder = checkpoints_folder(self._run_folder, os.path.basename(os.path.dirname(path)))
        on_disk = os.path.join(folder, os.path.basename(path))
        with locked_for_reading(path) as held:
            if held:
                copy_atomically(path, folder)
        if not os.path.isdir(on_disk):
            raise FileNotFoundError(path)
        return on_disk

    def places(self, trial_id: str, path: str) -> Iterator[str]:
        """Yields the folders that a trial may be restored from, the best first; they may be gone when they are opened.

        The checkpoint itself comes first, in memory, or where it was written, or where it may have moved, on disk; then
        others of its iteration; then earlier ones.

        Args:
            trial_id: the trial.
            path: where the checkpoint was written.

        Raises:
            OSError: this process cannot open files at the moment.
        """
        roots = dict.fromkeys((*self._roots(trial_id), os.path.dirname(path), self._kept(trial_id)))
        copies = [os.path.join(self._memory(trial_id), os.path.basename(path))] * bool(self._memory_folder)
        yield from copies
        for place in checkpoints_like(path, roots, self._disk(trial_id)):
            if place not in copies:
                yield place

    def is_in_memory(self, path: str) -> bool:
        """Whether a checkpoint is in host memory."""
        return bool(self._memory_folder) and path.startswith(os.path.join(self._memory_folder, ""))

    def note_restore(self, path: str, size: int, seconds: float) -> None:
        """Tells the host how long reading and loading a checkpoint from its memory, or its disk, took."""
        self._ledger.tell_restore(RestoreSample(self.is_in_memory(path), size, seconds))

    def protect(self, trial_id: str, path: str) -> None:
        """Keeps the checkpoint from which a trial was restored until after its next save."""
        self._last[trial_id] = os.path.basename(path)

    def forget_resident(self, trial_id: str) -> None:
        """Drops the records that matter only while the trial is resident; its checkpoints stay."""
        self._sizes.pop(trial_id, None)
        self._last.pop(trial_id, None)

    def keep_copy(self, trial_id: str, path: str) -> Stored:
        """Copies a checkpoint, of whichever lane, to where it outlives the run, unless it is there.

        Raises:
            OSError: it is gone, or the disk is full.
        """
        kept = self._kept(trial_id)
        copy = os.path.join(kept, os.path.basename(path))
        for place in (path, os.path.join(self._disk(trial_id), os.path.basename(path))):
            if os.path.isdir(copy):
                break
            with locked_for_reading(place) as held:
                if held:
                    copy_atomically(place, kept)
        size = sealed_bytes(copy)
        if size is None:
            raise FileNotFoundError(path)
        return Stored(copy, False, size)

    def keep_newest(self, trial_id: str) -> Stored | None:
        """Copies a trial's newest checkpoint to where it outlives the run; ``None`` if none is newer than those there.

        Raises:
            OSError: the disk is full.
        """
        there = max(map(iteration_of, entries_of(self._kept(trial_id))), default=0)
        found = [path for root in self._roots(trial_id) for path in newest_in(root) if iteration_of(path) > there]
        return self.keep_copy(trial_id, max(found, key=iteration_of)) if found else None

    def delete(self, trial_id: str) -> None:
        """Deletes every checkpoint of a trial, except those that outlive the run."""
        for root in self._roots(trial_id):
            for path in entries_of(root):
                size = self._counted(path)
                if delete_at_once(path):
                    self._ledger.correct(-size)
            with suppress(OSError):
                os.rmdir(root)
        self.forget_resident(trial_id)

    def _save_in_memory(
        self, trial_id: str, name: str, write: Callable[[str], None], *, summed: bool = True
    ) -> Stored | None:
        """Writes a checkpoint to memory; returns ``None`` if it does not fit, and what is there is worth more."""
        expected, ledger = self._sizes.get(trial_id, 0), self._ledger
        reserve = functools.partial(ledger.reserve, expected)
        if not self._has_space(expected) or not ledger.await_room(reserve, expected, folder_name(trial_id)):
            return None
        try:
            path, size = write_atomically(self._memory(trial_id), name, write, summed=summed)
        except BaseException as error:
            self._ledger.correct(-expected)
            if not isinstance(error, Exception):
                raise
            # Lack of space raises various errors. Any other error is raised again by writing to disk.
            return None
        self._sizes[trial_id] = size
        fits = ledger.correct(size - expected) or ledger.await_room(lambda: ledger.correct(0), size)
        if not os.path.isdir(path):  # The host has moved it.
            return Stored(os.path.join(self._disk(trial_id), name), False, size)
        if not fits or not self._has_space(0):
            if delete_at_once(path):
                self._ledger.correct(-size)
            return None
        return Stored(path, True, size)

    def _has_space(self, size: int) -> bool:
        """Whether the RAM disk itself has room, which other programs may fill, too."""
        if not self._memory_folder:
            return False
        try:
            disk = shutil.disk_usage(self._memory_folder)
        except OSError:
            return False
        return disk.free - size >= _RESERVE * disk.total

    def _counted(self, path: str) -> int:
        """The bytes that the ledger no longer counts once a checkpoint is deleted; 0 for one on disk."""
        return freed_bytes(path) if self.is_in_memory(path) else 0

    def _memory(self, trial_id: str) -> str:
        return os.path.join(self._memory_folder, folder_name(trial_id))

    def _disk(self, trial_id: str) -> str:
        return checkpoints_folder(self._run_folder, folder_name(trial_id))

    def _kept(self, trial_id: str) -> str:
        return kept_folder(self._run_folder, folder_name(trial_id))

    def _roots(self, trial_id: str) -> list[str]:
        """The folders that may hold checkpoints of a trial, apart from those that outlive the run."""
        return [self._memory(trial_id)] * bool(self._memory_folder) + [self._disk(trial_id)]

    def _delete_older(self, trial_id: str, iteration: int, kept: set[str]) -> None:
        """Deletes a trial's checkpoints up to an iteration, except those kept and those being read."""
        with suppress(OSError):  # Without descriptors they stay until the next save.
            for root in self._roots(trial_id):
                for path in entries_of(root):
                    if os.path.basename(path) not in kept and iteration_of(path) <= iteration:
                        size = self._counted(path)
                        delete_unread(path, functools.partial(self._ledger.correct, -size))


def persist_checkpoints(memory_folder: str, run_folder: str, *, temporary: bool) -> None:
    """Empties host memory after the last lane has ended: the last two checkpoints of each trial move to disk.

    A checkpoint is deleted once its copy on disk is whole. What cannot be copied, as the disk is full, stays in memory,
    and a warning names it. Payloads that lanes read are deleted, also on disk.

    Args:
        memory_folder: the run's folder in host memory; empty if it has none.
        run_folder: the run's folder on disk.
        temporary: whether the run will not be resumed: both folders are then deleted.
    """
    left: dict[str, str] = {}
    if temporary:
        shutil.rmtree(run_folder, ignore_errors=True)
    elif memory_folder:
        left = _move_to_disk(memory_folder, run_folder)
    if memory_folder:
        shutil.rmtree(payloads_on_disk(run_folder, os.path.basename(memory_folder)), ignore_errors=True)
        _clear(memory_folder, left)


def _move_to_disk(memory_folder: str, run_folder: str) -> dict[str, str]:
    """Copies the last two checkpoints of each trial to disk; returns why one could not be, by its path."""
    saved = {trial.name: newest_in(trial.path) for trial in _entries(memory_folder) if not trial.name.startswith(".")}
    left: dict[str, str] = {}
    copies = LinkedCopies()
    for rank in range(_KEPT):  # The newest of every trial come first, in case the disk fills up.
        for name, checkpoints in saved.items():
            for checkpoint in checkpoints[rank : rank + 1]:
                try:
                    copy_checked(checkpoint, checkpoints_folder(run_folder, name), copies=copies)
                except (OSError, shutil.Error) as error:
                    if os.path.isdir(checkpoint):
                        left[checkpoint] = _why(error)
    if left:
        newest: dict[str, int] = {}
        for path in left:
            trial = os.path.basename(os.path.dirname(path))
            newest[trial] = max(newest.get(trial, 0), iteration_of(path))
        _tell_left(memory_folder, run_folder, newest, next(iter(left.values())))
    return left


def _why(error: OSError) -> str:
    """Why a checkpoint could not be copied: of several files, why the first could not."""
    files = error.args[0] if isinstance(error, shutil.Error) and error.args else None
    return str(files[0][-1]) if isinstance(files, list) else one_line(error)


def _tell_left(memory_folder: str, run_folder: str, newest: Mapping[str, int], reason: str) -> None:
    from fluid._logs import logger_of

    names = [trial_of_folder(name) or name for name in newest]
    shown = [f"{name!r} of iteration {iteration}" for name, iteration in zip(names, newest.values(), strict=True)]
    if len(shown) > _MOST_TOLD:
        shown[_MOST_TOLD:] = [f"{len(shown) - _MOST_TOLD:,} more"]
    logger_of("fluid.session").warning(
        "checkpoints could not be moved from %s to the run folder %s, and stay in host memory, which a reboot empties: "
        "those of trials %s (%s). Free some space: the next session that starts on this machine moves them, and "
        "the session finds them when it is resumed.",
        memory_folder,
        run_folder,
        ", ".join(shown),
        reason,
    )


def _clear(memory_folder: str, left: Collection[str]) -> None:
    """Deletes a folder in host memory, except some checkpoints; its lock last: the next session finds it by that."""
    kept = {os.path.dirname(path) for path in left}
    for entry in _entries(memory_folder):
        if entry.path in kept:
            for other in entries_of(entry.path):
                if other not in left:
                    shutil.rmtree(other, ignore_errors=True)
        elif left or not entry.name.startswith("."):
            shutil.rmtree(entry.path, ignore_errors=True)
    with suppress(OSError):
        if all(name.startswith(".") for name in os.listdir(memory_folder)):
            shutil.rmtree(memory_folder, ignore_errors=True)


def checkpoints_on_disk(run_folder: str, trial_id: str) -> str:
    """Returns the folder on disk that holds a trial's checkpoints."""
    return checkpoints_folder(run_folder, folder_name(trial_id))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []


# -- own store -----------------------------------------------------------------------------------
#
# The store of this lane's checkpoints in host memory, for code that writes others there than those of residents.


#: The driver's machine, by the name in the paths of checkpoints.
_DRIVERS = "localhost"


class OwnStore(NamedTuple):
    """Where this lane writes checkpoints, and the run's folder on its machine."""

    store: CheckpointStore
    run_folder: str
    memory_folder: str

    @property
    def is_of_driver(self) -> bool:
        """Whether the driver's process can read what is written to this machine's memory."""
        return bool(self.memory_folder) and host_of(os.path.join(self.memory_folder, "")) == _DRIVERS

    def places_of(self, path: str) -> tuple[str, ...]:
        """Where a checkpoint may be that was written to host memory: there, or where the host moves it on disk."""
        settled = settled_path(path, self.run_folder)
        return (path,) if settled is None else (path, settled)


_own: OwnStore | None = None


def set_own_store(store: CheckpointStore, options: LaneOptions) -> None:
    """Makes a lane's store known in its process."""
    global _own
    _own = OwnStore(store, options.run_folder, options.memory_folder)


def own_store() -> OwnStore | None:
    """The store of the lane that this process is; ``None`` in a process that is none."""
    return _own


def delete_places(places: tuple[str, ...]) -> None:
    """Deletes a checkpoint that no resident needs, unless it is being read.

    Args:
        places: as :meth:`OwnStore.places_of` returned; the first one is in host memory.
    """
    in_memory, *on_disk = places
    folder = os.path.dirname(in_memory)
    ledger, size = StoreLedger(os.path.dirname(folder)), freed_bytes(in_memory)
    delete_unread(in_memory, lambda: ledger.correct(-size))
    ledger.close()
    emptied = [folder]
    for place in on_disk:
        delete_unread(place)
        emptied += [os.path.dirname(place), os.path.dirname(os.path.dirname(place))]
    for folder in emptied:
        with suppress(OSError):  # It has other checkpoints, or was never made.
            os.rmdir(folder)
