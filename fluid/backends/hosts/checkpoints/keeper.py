"""Keeps the checkpoints of a host's lanes in its memory by what they are worth there; the others go to disk.

Lanes write their checkpoints to host memory themselves, as long as the ledger (:mod:`fluid.lane.checkpoints.ledger`)
has room. Two threads of the host's process work in the background. The one moves the checkpoints of the least value to
disk before the room is used up, or when a lane asks for room. The other copies into memory what the engine wants there:
from disk, or from another host. Which those are, :mod:`fluid.backends.hosts.checkpoints.values` decides. What the
engine asks to be copied to disk, or deleted, a third one does (:mod:`fluid.backends.hosts.checkpoints.jobs`), also
without memory.

All of that can be ended at any moment: a checkpoint appears in its new place as a whole, and before it leaves the old
one. Several hosts on one machine share the folder; one of them at a time makes room there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.checkpoints.jobs import CheckpointJobs
from fluid.backends.hosts.checkpoints.memory import MemoryFolder
from fluid.backends.hosts.checkpoints.values import (
    LATEST,
    UNKNOWN,
    RestoreCosts,
    StoredCheckpoint,
    Worth,
    choose_evictions,
    room_kept,
    worths,
)
from fluid.engine.commands import CheckpointValue
from fluid.lane.checkpoints.fetch import LinkRates, fetch_checkpoint
from fluid.lane.checkpoints.files import iteration_of
from fluid.lane.checkpoints.ledger import RestoreSample, RoomWish, StoreLedger
from fluid.lane.checkpoints.paths import folder_name
from fluid.lane.checkpoints.seal import freed_bytes, sealed_bytes
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.lane.protocol import CheckpointForked, CheckpointMoved, CheckpointPersisted, CheckpointReport
from fluid.waiting.waits import BackgroundThread, await_descriptor

# -- checkpoint wishes ---------------------------------------------------------------------------
#
# Which checkpoints the engine wants in a host's memory: a wish for which there is no room yet is tried again.


#: Seconds after which a wish without room is tried again in any case.
_TRY_AGAIN_S = 2.0
#: So many of them, the oldest, are tried again at once: each looks through what is in memory.
_TRIED_AGAIN = 4


class Wanted(NamedTuple):
    """A checkpoint that is to come into memory.

    Attributes:
        trial: name of its trial's folder.
        path: where it was written.
        source: where the server of the machine that has it listens; ``None`` for this machine.
    """

    trial: str
    path: str
    source: tuple[str, int] | None


class CheckpointWishes:
    """The wishes of one host, at most one of a trial; its methods may be called in any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        #: By trial, the oldest first; and the trials of those that are to be tried now.
        self._wanted: dict[str, Wanted] = {}
        self._due: set[str] = set()
        self._closed = False

    def add(self, wanted: Wanted) -> None:
        """Adds a wish, instead of an earlier one of that trial."""
        with self._condition:
            self._wanted.pop(wanted.trial, None)
            self._wanted[wanted.trial] = wanted
            self._due.add(wanted.trial)
            self._condition.notify_all()

    def drop(self, trial: str, wanted: Wanted | None = None) -> None:
        """Drops the wish of a trial, if there is one; if one is given, only that."""
        with self._condition:
            if wanted is None or self._wanted.get(trial) is wanted:
                self._wanted.pop(trial, None)
                self._due.discard(trial)

    def revalue(self, values: Mapping[str, CheckpointValue]) -> None:
        """Takes what is worth something else now, by trial: what is not pinned has started, or is not about to."""
        for trial, value in values.items():
            if not value.pinned:
                self.drop(trial)
        self.try_again()

    def try_again(self) -> None:
        """Has those without room tried again: there may be some now."""
        with self._condition:
            if self._wanted:
                self._due.update(islice(self._wanted, _TRIED_AGAIN))
                self._condition.notify_all()

    def next(self) -> Wanted | None:
        """Waits for a wish that is to be tried, which stays until it is dropped; ``None`` once they are closed."""
        with self._condition:
            while not self._closed:
                for trial, wanted in self._wanted.items():
                    if trial in self._due:
                        self._due.discard(trial)
                        return wanted
                if not self._condition.wait(_TRY_AGAIN_S if self._wanted else None):
                    self._due.update(islice(self._wanted, _TRIED_AGAIN))
            return None

    def close(self) -> None:
        """Ends what waits."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


# -- checkpoint keeper ---------------------------------------------------------------------------


_log = logger_of(__name__)

#: Seconds between two looks at how much memory is left.
_LOOK_S = 2.0
#: After a count for lanes that have ended, so many times as long passes before the next one: each trial's may end.
_REST = 50.0
#: Locked while checkpoints are chosen and moved; and by the host that makes room.
_TURN, _LEADER = ".moving", ".keeper"


class KeeperOptions(NamedTuple):
    """What a keeper is told once.

    Attributes:
        host: name of its machine.
        memory_folder: the session's folder in host memory; empty if there is none.
        run_folder: the run's folder on this machine.
        limit: most bytes of host memory for checkpoints; ``None`` for a share of what is left.
        reserved_bytes: of shared memory, which another program may take.
        key: the session's, by which other machines know this one.
    """

    host: str
    memory_folder: str
    run_folder: str
    limit: int | None = None
    reserved_bytes: float = 0.0
    key: bytes = b""


class NoRoomError(Exception):
    """What is in memory is worth more than what is to come."""


class CheckpointKeeper:
    """Keeps the checkpoints of this machine's lanes; implements :class:`fluid.backends.base.CheckpointStores`.

    Args:
        options: what it is told once.
        wake: called from its threads when :meth:`poll` has something to report.
    """

    def __init__(self, options: KeeperOptions, wake: Callable[[], None]) -> None:
        self._options = options
        self._wake = wake
        self._clock = MonotonicClock()
        self._ledger = StoreLedger(options.memory_folder)
        self._folder = MemoryFolder(options.memory_folder, options.run_folder)
        self._costs = RestoreCosts()
        #: Guards what follows.
        self._lock = threading.Lock()
        #: By name of the trial's folder.
        self._values: dict[str, CheckpointValue] = {}
        self._reports: list[CheckpointReport] = []
        self._lanes = 0
        #: Lanes that have ended since the last count, perhaps in the middle of a save.
        self._lost: set[int] = set()
        #: When lanes that have ended are a reason to count anew.
        self._recount_at = 0.0
        self._closing = threading.Event()
        #: Held by the thread that chooses and moves.
        self._turn = threading.Lock()
        #: Bytes reserved for a checkpoint that is being brought.
        self._coming = 0
        #: Of the largest checkpoint in memory; ``None`` before the first count.
        self._largest: int | None = None
        #: When to try again to move checkpoints that could not be moved.
        self._retry_at = 0.0
        self._wishes = CheckpointWishes()
        store = CheckpointStore(-1, options.run_folder, options.memory_folder, self._ledger)
        self._jobs = CheckpointJobs(options.host, store, self._report)
        self._threads: list[BackgroundThread] = []
        self._pipe = self._leader = -1
        if options.memory_folder:
            with suppress(OSError):  # Host memory is full: everything goes to disk.
                self._ledger.create(*self._limits(0))
                self._pipe = self._ledger.open_pipe()
                self._start(self._keep_room, "fluid-checkpoint-keeper")

    # -- for the host ----------------------------------------------------------------------------------------

    def value(self, values: Mapping[str, CheckpointValue]) -> None:
        """Takes what checkpoints of trials are worth, by trial."""
        by_folder = {folder_name(trial_id): value for trial_id, value in values.items()}
        with self._lock:
            self._values |= by_folder
        self._wishes.revalue(by_folder)

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        """Drops what is known of a trial, and deletes its checkpoints, except those that outlive the run.

        Args:
            trial_id: the trial.
            keep_newest: whether its newest one becomes one of those.
        """
        with self._lock:
            self._values.pop(folder_name(trial_id), None)
        self._wishes.drop(folder_name(trial_id))
        self._jobs.delete(trial_id, keep_newest=keep_newest)

    def persist(self, host: str, trial_id: str, path: str, *, keep: bool) -> None:
        """Copies a checkpoint: see :meth:`fluid.backends.base.CheckpointStores.persist`."""
        if host == self._options.host:
            self._jobs.persist(trial_id, path, keep=keep)
        else:
            problem = f"{host} has no host of this session"
            self._report(CheckpointPersisted(trial_id, path, host, keep, problem=problem))

    def fork(self, host: str, child: str, parent: str, path: str) -> None:
        """Makes a checkpoint the start of a trial: see :meth:`fluid.backends.base.CheckpointStores.fork`."""
        if host == self._options.host:
            self._jobs.fork(child, parent, path)
        else:
            self._report(CheckpointForked(child, parent, host, problem=f"{host} has no host of this session"))

    def discard(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint: see :meth:`fluid.backends.base.CheckpointStores.discard`."""
        if host == self._options.host:
            self._jobs.discard(path, demote=demote)

    def prefetch(self, host: str, trial_id: str, path: str, source: tuple[str, int] | None) -> None:
        """Brings a checkpoint into memory, in the background, if nothing there that has to go for it is worth more.

        If there is, and the trial is pinned, that is tried again until it is pinned no more.

        Args:
            host: name of the machine; nothing is done for another one.
            trial_id: the trial.
            path: where it was written.
            source: where the server of the machine that has it listens; ``None`` for this machine.
        """
        if self._pipe < 0 or host != self._options.host:
            return
        if len(self._threads) < 2:
            self._start(self._bring_wanted, "fluid-prefetching")
        self._wishes.add(Wanted(folder_name(trial_id), path, source))

    def note_lanes(self, running: int, lost: int | None = None) -> None:
        """Takes how many lanes run, and the number of one that has just ended."""
        with self._lock:
            self._lanes = running
            self._lost |= set() if lost is None else {lost}
        if lost is not None and self._ledger.read().used:  # Else it was not saving: room is reserved first.
            self._ledger.wake_host()

    def poll(self) -> list[CheckpointReport]:
        """Returns what has moved, and was copied, since the last call."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Ends the threads, once the checkpoint that one is moving has moved, and what was asked for is done."""
        self._jobs.close()
        self._closing.set()
        self._wishes.close()
        self._ledger.wake_host()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.abandon()

    def abandon(self) -> None:
        """Closes the descriptors; all that is called in a process forked from the host."""
        self._ledger.close()
        for descriptor in (self._pipe, self._leader):
            if descriptor >= 0:
                os.close(descriptor)
        self._pipe = self._leader = -1

    # -- room for the next checkpoints -----------------------------------------------------------------------

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = BackgroundThread(name, run)
        self._threads.append(thread)
        thread.start()

    def _keep_room(self) -> None:
        while not self._leads():  # Another host of this machine does it.
            if self._closing.wait(_LOOK_S):
                return
        is_first = True  # The host before may have been killed.
        while True:
            await_descriptor(self._pipe, 0.0 if is_first else _LOOK_S)
            if self._closing.is_set():
                return
            self._ledger.begin_turn()
            try:
                self._do_what_is_wanted(self._ledger.read_pipe(self._pipe), count=is_first)
                is_first = False
                self._wishes.try_again()
            except Exception as error:  # The next checkpoints go to disk.
                _log.debug("no room could be made in host memory: %s", error)
                self._retry_at = self._clock.now() + _LOOK_S
            finally:
                self._ledger.end_turn()

    def _leads(self) -> bool:
        """Whether this host makes room on its machine; if it does, no other one can."""
        if self._leader < 0:
            path = os.path.join(self._options.memory_folder, _LEADER)
            self._leader = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._leader, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _do_what_is_wanted(self, told: Sequence[RestoreSample | RoomWish], *, count: bool) -> None:
        wishes = [one for one in told if isinstance(one, RoomWish)]
        with self._lock:
            for one in told:
                if isinstance(one, RestoreSample):
                    self._costs.record(*one)
            count |= bool(self._lost) and self._clock.now() >= self._recount_at
        use = self._ledger.limit(*self._limits(self._ledger.read().used))
        if wishes or count or (use.used > use.full_at and self._clock.now() >= self._retry_at):
            self._make_room(wishes)

    def _limits(self, taken: int) -> tuple[int, int]:
        """Returns the most bytes in memory, and those above which checkpoints are moved to disk."""
        options = self._options
        limit = options.limit
        if limit is None:
            limit = host_memory.checkpoint_bytes(options.memory_folder, taken, options.reserved_bytes)
        largest = limit if self._largest is None else self._largest
        return limit, limit - room_kept(limit, self._lanes, largest)

    def _count(self) -> tuple[list[StoredCheckpoint], int]:
        """Counts what is in memory; returns that, and the bytes used."""
        found: list[StoredCheckpoint] = []
        begun = self._clock.now()
        with self._lock:
            lost, self._lost = self._lost, set()

        def count() -> int:
            nonlocal found
            found, drafts = self._folder.scan(lost)
            return sum(one.bytes for one in found) + max(drafts, self._coming)

        used = self._ledger.recount(count).used
        self._recount_at = self._clock.now() + _REST * (self._clock.now() - begun)
        self._largest = max((one.bytes for one in found), default=None)
        self._ledger.limit(*self._limits(used))
        return found, used

    def _make_room(self, wishes: Sequence[RoomWish]) -> None:
        """Makes room for checkpoints of lanes that wait, and for the next ones."""
        granted = 0
        for wish in wishes:
            with self._moving():
                coming = StoredCheckpoint("", wish.trial, LATEST, wish.bytes)
                if self._make_room_for(coming, granted, self._ledger.read().limit):
                    granted += wish.bytes
        with self._moving():
            found, used = self._count()
            full_at = self._ledger.read().full_at
            if used > full_at:
                leaving = choose_evictions(found, used - full_at, self._worths(found))
                if not self._move_out(leaving):
                    self._retry_at = self._clock.now() + _LOOK_S

    def _make_room_for(self, coming: StoredCheckpoint, taken: int, most: int) -> bool:
        """Moves checkpoints to disk that are worth less than one to come; returns whether that has room then.

        Args:
            coming: the one to come.
            taken: bytes of others to come.
            most: most bytes that all may take.
        """
        found, used = self._count()
        need = used + taken + coming.bytes - most
        if need <= 0:
            return True
        worth = self._worths([*found, coming])
        leaving = choose_evictions(found, need, worth, below=worth[coming.path])
        return bool(leaving) and self._move_out(leaving)

    def _move_out(self, leaving: list[StoredCheckpoint]) -> bool:
        """Moves checkpoints to disk; returns whether all have gone."""
        all_gone = True
        for one in leaving:
            if self._closing.is_set():
                return False
            freed = freed_bytes(one.path)
            try:
                place = self._folder.to_disk(one)
            except (OSError, shutil.Error) as error:  # The disk is full, or the checkpoint was deleted.
                _log.debug("%s could not be moved to disk: %s", one.path, error)
                place = None
            if place is None:
                all_gone &= not os.path.isdir(one.path)
            else:
                self._ledger.correct(-freed)
                self._report(CheckpointMoved(place, False, self._options.host))
        return all_gone

    # -- what is wanted in memory ----------------------------------------------------------------------------

    def _bring_wanted(self) -> None:
        while (wanted := self._wishes.next()) is not None:
            try:
                self._bring(wanted)
            except NoRoomError:
                _log.debug("%s is not worth more than what is in memory", wanted.path)
                if self._values.get(wanted.trial, UNKNOWN).pinned:
                    continue  # It is tried again.
            except Exception as error:  # It is gone or damaged, or its machine is: its trial finds another.
                _log.debug("%s could not be brought into memory: %s", wanted.path, error)
            self._wishes.drop(wanted.trial, wanted)

    def _bring(self, wanted: Wanted) -> None:
        """Copies a checkpoint into memory, unless it is there.

        Raises:
            NoRoomError: what would have to go is worth more.
            OSError, shutil.Error: it cannot be copied.
        """
        name = os.path.basename(wanted.path)
        place = self._folder.place(wanted.trial, name)
        if not os.path.isdir(place):
            try:
                here = self._folder.on_disk(wanted.trial, wanted.path)
                if here is not None:
                    self._reserve(here)
                    self._folder.from_disk(here.path, wanted.trial)
                elif wanted.source is not None:
                    self._fetch(wanted, wanted.source)
                else:
                    raise FileNotFoundError(wanted.path)
                # The seal came over the network, too, and is not counted.
                self._ledger.correct((sealed_bytes(place) or 0) - self._coming)
            except BaseException:
                self._ledger.correct(-self._coming)
                raise
            finally:
                self._coming = 0
        if os.path.isdir(place):
            self._report(CheckpointMoved(place, True, self._options.host))

    def _fetch(self, wanted: Wanted, source: tuple[str, int]) -> None:
        name = os.path.basename(wanted.path)

        def place_for(found: str, size: int) -> str:
            if found != name:
                raise FileNotFoundError(f"{wanted.path} is damaged or gone")
            self._reserve(StoredCheckpoint("", wanted.trial, iteration_of(name), size))
            return self._folder.place(wanted.trial, name)

        rates = LinkRates(self._options.memory_folder)
        fetch_checkpoint(source, self._options.key, wanted.path, place_for, rates)

    def _reserve(self, coming: StoredCheckpoint) -> None:
        """Reserves room in memory, for which checkpoints of less value go to disk.

        Raises:
            NoRoomError: what would have to go is worth more, or is being read.
        """
        with self._moving():
            full_at = self._ledger.read().full_at
            if not self._make_room_for(coming, 0, full_at) or not self._ledger.reserve(coming.bytes):
                raise NoRoomError
            self._coming = coming.bytes

    # -- both ------------------------------------------------------------------------------------------------

    def _worths(self, found: Sequence[StoredCheckpoint]) -> dict[str, Worth]:
        with self._lock:
            return worths(found, self._values, self._costs)

    def _report(self, report: CheckpointReport) -> None:
        with self._lock:
            self._reports.append(report)
        self._wake()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Keeps the other thread, and other hosts on this machine, from choosing and moving at the same time."""
        with self._turn:
            descriptor = os.open(os.path.join(self._options.memory_folder, _TURN), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
