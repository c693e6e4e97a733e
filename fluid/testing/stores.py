"""Simulated stores of checkpoints: each host's memory holds so many bytes, and its disk the rest.

A checkpoint that is written goes to memory. What then does not fit leaves it for the disk, by a rule that is given.
Writing takes no time, and reading so many seconds per byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import structs

from fluid.backends.simulated.backend import SimulatedBackend
from fluid.engine.commands import CheckpointValue, Command, PrefetchCheckpoint, Save, StartTrial, ValueCheckpoints
from fluid.engine.events import Checkpoint, CheckpointPlaced, Event, Restoring, Source, TrialSaved, TrialStarted
from fluid.errors import require_number


class InMemory(NamedTuple):
    """A checkpoint in a host's memory.

    Attributes:
        trial_id: its trial.
        bytes: that it takes.
        value: what the engine has told of it.
        saved_s: seconds by which a restore is faster from memory than from disk.
        used: when it was written or read last, in steps.
    """

    trial_id: str
    bytes: float
    value: CheckpointValue
    saved_s: float
    used: int


#: Returns the trials whose checkpoints leave a memory, so that so many bytes become free.
Rule = Callable[[Sequence[InMemory], float], Sequence[str]]


def least_recently_used(held: Sequence[InMemory], excess: float) -> list[str]:
    """Returns what leaves memory if values do not count."""
    leaving: list[str] = []
    for one in sorted(held, key=lambda one: one.used):
        if excess <= 0.0:
            break
        leaving.append(one.trial_id)
        excess -= one.bytes
    return leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStores:
    """What the stores of all hosts are like.

    Example:
        >>> from fluid.testing.stores import SimulatedStores
        >>> SimulatedStores(memory_bytes=8e9, checkpoint_bytes=1e9).seconds("disk")
        1.0

    Args:
        memory_bytes: most bytes of checkpoints in the memory of one host.
        checkpoint_bytes: of each checkpoint.
        memory_s, disk_s, host_s: seconds to read a byte from memory, from disk, and from another host.
        rule: says which checkpoints leave memory.
        fetches: whether checkpoints are brought to memory when the engine asks for that.

    Raises:
        InvalidFieldError: a field cannot be used.
    """

    memory_bytes: float
    checkpoint_bytes: float
    memory_s: float = 1e-10
    disk_s: float = 1e-9
    host_s: float = 5e-10
    rule: Rule = least_recently_used
    fetches: bool = False

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "checkpoint_bytes", "memory_s", "disk_s", "host_s"):
            require_number(name, getattr(self, name), at_least=0.0)

    def seconds(self, source: Source) -> float:
        """Seconds to read a checkpoint from a source."""
        per_byte = {"device": 0.0, "memory": self.memory_s, "disk": self.disk_s, "host": self.host_s}[source]
        return per_byte * self.checkpoint_bytes


class StoringBackend(SimulatedBackend):
    """A simulated backend whose trials are restored from the stores of its hosts.

    Args:
        truth, devices: as of the simulated backend.
        stores: what the stores are like.
        copies: trials that begin from the checkpoint of another one, by id: as PBT does.
        more: further arguments of the simulated backend.

    Attributes:
        restored: restores so far, by source.
        fetched: checkpoints that were brought to memory ahead of a restore.
    """

    def __init__(
        self,
        truth: Any,
        devices: Iterable[Any] = (),
        *,
        stores: SimulatedStores,
        copies: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(truth, devices, **more)
        self.stores = stores
        self.copies = copies or {}
        self.restored: Counter[Source] = Counter()
        self.fetched = 0
        self._values: dict[str, CheckpointValue] = {}
        #: trial -> its newest checkpoint, wherever it is, and when it was used last, in steps.
        self._newest: dict[str, Checkpoint] = {}
        self._used: dict[str, int] = {}
        self._restoring: dict[str, Restoring] = {}
        self._handlers |= {ValueCheckpoints: self._value, PrefetchCheckpoint: self._fetch}

    def drop(self, trial_id: str) -> None:
        """Deletes the checkpoints of a trial that has ended."""
        for known in (self._newest, self._used, self._values):
            known.pop(trial_id, None)

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out, at this instant: what checkpoints are worth is known before any is written."""
        super().execute([*_values_of(commands), *(each for each in commands if not isinstance(each, ValueCheckpoints))])

    def poll(self, timeout: float | None = None) -> list[Event]:
        """As of the simulated backend; a trial that starts from a checkpoint says where that was."""
        return [
            structs.replace(event, restoring=self._restoring.pop(event.trial_id, None))
            if isinstance(event, TrialStarted)
            else event
            for event in super().poll(timeout)
        ]

    # -- commands --------------------------------------------------------------------------------------------

    def _setup_seconds(self, command: StartTrial) -> float:
        trial_id = command.trial_id if command.checkpoint is not None else self.copies.get(command.trial_id)
        checkpoint = None if trial_id is None else self._newest.get(trial_id, command.checkpoint)
        if trial_id is None or checkpoint is None:
            return super()._setup_seconds(command)
        source: Source = "disk"
        if checkpoint.in_memory:
            source = "memory" if self._devices.host_of(command.lane_ids[0]) == checkpoint.host else "host"
        self._use(trial_id)
        self.restored[source] += 1
        seconds = self.stores.seconds(source)
        self._restoring[command.trial_id] = Restoring(source, seconds, int(self.stores.checkpoint_bytes))
        return super()._setup_seconds(command) + seconds

    def _save(self, command: Save) -> None:
        before = len(self._ready)
        super()._save(command)
        for place in range(before, len(self._ready)):
            saved = self._ready[place]
            if isinstance(saved, TrialSaved):
                self._newest[saved.trial_id] = saved.checkpoint
                self._use(saved.trial_id)
                if saved.checkpoint.in_memory:
                    self._evict(saved.checkpoint.host)

    def _value(self, command: ValueCheckpoints) -> None:
        self._values.update(command.values)

    def _fetch(self, command: PrefetchCheckpoint) -> None:
        checkpoint = self._newest.get(command.trial_id)
        if not self.stores.fetches or checkpoint is None or checkpoint.in_memory:
            return
        before, used = dict(self._newest), dict(self._used)
        self._newest[command.trial_id] = replace(checkpoint, in_memory=True, host=command.host)
        self._use(command.trial_id)
        gone = self._evict(command.host, tell=False)
        unknown = CheckpointValue(0.5)
        value = self._values.get(command.trial_id, unknown)
        if any(self._values.get(name, unknown)[::-1] >= value[::-1] for name in gone):
            self._newest, self._used = before, used  # What would have to go is not worth less.
            return
        self.fetched += 1
        for trial_id in (*gone, command.trial_id):
            self._ready.append(CheckpointPlaced(self.now(), trial_id, self._newest[trial_id]))

    # -- inside ----------------------------------------------------------------------------------------------

    def _use(self, trial_id: str) -> None:
        self._used[trial_id] = max(self._used.values(), default=0) + 1

    def _evict(self, host: str, *, tell: bool = True) -> list[str]:
        """Moves checkpoints to disk until those in the memory of a host fit there; returns whose."""
        there = [name for name, each in self._newest.items() if each.in_memory and each.host == host]
        excess = len(there) * self.stores.checkpoint_bytes - self.stores.memory_bytes
        if excess <= 0.0:
            return []
        gone = list(self.stores.rule([self._held(name) for name in there], excess))
        for trial_id in gone:
            self._newest[trial_id] = replace(self._newest[trial_id], in_memory=False)
            if tell:
                self._ready.append(CheckpointPlaced(self.now(), trial_id, self._newest[trial_id]))
        return gone

    def _held(self, trial_id: str) -> InMemory:
        value = self._values.get(trial_id, CheckpointValue(0.5))
        saved = self.stores.seconds("disk") - self.stores.seconds("memory")
        return InMemory(trial_id, self.stores.checkpoint_bytes, value, saved, self._used[trial_id])


def _values_of(commands: Sequence[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, ValueCheckpoints)]
