"""What the trials are: their pickled trainables and configs, each trainable under a key of its own."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from fluid.backends.base import Keeping, Launcher
from fluid.backends.lanes.connections import LaneConnection
from fluid.elastic.messages import Prepared
from fluid.engine.commands import StopTrial
from fluid.engine.events import TrialFailed, TrialStarted
from fluid.keeping import KeepRule
from fluid.lane import protocol as m
from fluid.lane.protocol import ShipTrainable
from fluid.processes.interpreters import import_path
from fluid.random_state import Seeds
from fluid.trainables.payload import LARGE_BYTES, TrainablePayload, TrialPayload
from fluid.trial_fields import TrialProcess

# -- host payloads -------------------------------------------------------------------------------
#
# Large payloads, trainables and configs, which the launcher keeps on the hosts of lanes, once for all lanes there.


class HostPayloads:
    """Has payloads kept on the hosts of lanes that are to read them, and dropped when no lane is.

    Args:
        launcher: keeps them.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        #: How many trainables and trials have each payload, by name.
        self._uses: Counter[str] = Counter()
        #: Lane, trial and config of the trials with large configs that lanes were told to start and have not yet.
        self._starts: list[tuple[int, str, str]] = []

    def add(self, name: str) -> None:
        """Counts a trainable or a trial that has a payload."""
        self._uses[name] += 1

    def remove(self, name: str) -> None:
        """Counts one less; drops the payload of the last one."""
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
            self.drop_unread(name)

    def shipment(
        self, lane: LaneConnection, name: str, whole: m.ShipTrainable | m.SetUpTrial
    ) -> m.ShipTrainable | m.SetUpTrial | StopTrial | None:
        """Returns the message by which a lane gets a payload; ``None`` while the lane's host does not have it yet.

        Args:
            lane: the lane. If it was told to end, it neither waits nor gets the payload.
            name: the payload's.
            whole: the message with the payload.
        """
        data = whole.payload if isinstance(whole, m.ShipTrainable) else whole.config
        assert isinstance(data, bytes)
        is_used = name in self._uses  # If not, all that has it was forgotten before the message could leave.
        keeping = self._launcher.keep(lane.lane_id, name, data) if is_used else Keeping.REFUSED
        if keeping is Keeping.UNDER_WAY and lane.leaving:
            return StopTrial("", ())  # It does nothing: the lane would only drop the trial again.
        if keeping is Keeping.UNDER_WAY:
            return None
        if keeping is Keeping.REFUSED:
            return whole
        kept = m.KeptPayload(name)
        if isinstance(whole, m.ShipTrainable):
            return structs.replace(whole, payload=kept)
        return structs.replace(whole, config=kept)

    def renew(self, lane_id: int, name: str, data: bytes) -> None:
        """Has a payload kept again that a lane did not find on its host."""
        self._launcher.drop(name)
        self._launcher.keep(lane_id, name, data)

    # -- configs: their lanes read them once ---------------------------------------------------------------

    def starting(self, lane_id: int, trial_id: str, name: str) -> None:
        """Takes note that a lane is told to start a trial with a large config."""
        self._starts.append((lane_id, trial_id, name))

    def hear(self, lane_id: int, message: Any) -> None:
        """Takes a message of a lane: one that answers a start comes after the config was read."""
        if not self._starts:
            return
        is_answer = isinstance(message, (TrialStarted, TrialFailed)) or (
            isinstance(message, m.FromMember) and isinstance(message.message, Prepared)
        )
        if is_answer:
            for start in self._starts:
                if start[:2] == (lane_id, message.trial_id):
                    self._starts.remove(start)
                    self._drop_unused(start[2])
                    return

    def lane_is_gone(self, lane_id: int) -> None:
        """Forgets the starts in a lane of which no message will come any more."""
        gone = [start for start in self._starts if start[0] == lane_id]
        self._starts = [start for start in self._starts if start[0] != lane_id]
        for _, _, name in gone:
            self._drop_unused(name)

    def _drop_unused(self, name: str) -> None:
        if name not in self._uses:
            self.drop_unread(name)

    def drop_unread(self, name: str) -> None:
        """Drops a config that no lane is going to read; where a trial starts again, hosts get it again."""
        if not any(start[2] == name for start in self._starts):
            self._launcher.drop(name)


# -- registry ------------------------------------------------------------------------------------


#: Most trainables that are kept though no trial uses them: more trials of one are often to come.
_KEPT = 64
#: Most bytes of those, unless it is a single one.
_KEPT_BYTES = 1 << 28


@functools.lru_cache(256)
def _one_of(alike: TrialProcess) -> TrialProcess:
    """One object for all that are alike."""
    return alike


@dataclass(slots=True)
class _Known:
    """A trainable, and the number of trials that use it."""

    payload: TrainablePayload
    trials: int = 0

    @property
    def size(self) -> int:
        """Bytes of the pickled trainable."""
        return len(self.payload.pickled)

    @property
    def name(self) -> str | None:
        """Its name where hosts keep it, if it is large."""
        return f"trainable-{self.payload.digest.hex()}" if self.size >= LARGE_BYTES else None


class Registry:
    """Keeps what lanes are to be sent.

    Args:
        preload: called with the modules that a new trainable imports; see
            :meth:`fluid.backends.base.Launcher.preload`.
        payloads: told which large payloads there are.
    """

    def __init__(self, preload: Callable[..., None], payloads: HostPayloads) -> None:
        self._preload = preload
        self._payloads = payloads
        #: The key, the config, and what the trial asks of its process: but for its seeds, which are packed, most ask
        #: for the same.
        self._trials: dict[str, tuple[int, bytes, TrialProcess, bytes | None]] = {}
        #: CPU threads of the lane in which each trial that asks for no number began.
        self._threads: dict[str, int] = {}
        #: Key of each trainable, by its digest. A key is not used again.
        self._keys: dict[bytes, int] = {}
        self._next_key = 0
        self._trainables: dict[int, _Known] = {}
        #: Keys of those that no trial uses, in the order in which they fell idle.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_bytes = 0
        #: Names of large configs, by trial.
        self._large_configs: dict[str, str] = {}
        #: Which checkpoints outlive the run, of the trials that have such ones.
        self._rules: dict[str, KeepRule] = {}

    def preload(self, modules: Sequence[str]) -> None:
        """Has modules loaded that trials were found to load, for later lanes; no lane waits for that."""
        self._preload(modules, late=True)

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._trials

    def find(self, is_it: Callable[[str], bool]) -> str | None:
        """Returns the first trial, by its id, of which something is so; ``None`` if there is none."""
        return next(filter(is_it, self._trials), None)

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes in a trial, which is new."""
        key = self._key_of(payload.trainable)
        known = self._trainables[key]
        known.trials += 1
        if key in self._idle:
            del self._idle[key]
            self._idle_bytes -= known.size
        asked = payload.process
        seeds = None if asked.seeds is None else asked.seeds.packed()
        self._trials[trial_id] = (key, payload.config, _one_of(asked._replace(seeds=None)), seeds)
        if payload.keep is not None:
            self._rules[trial_id] = payload.keep
        if payload.config_digest:
            name = self._large_configs[trial_id] = f"config-{payload.config_digest.hex()}"
            self._payloads.add(name)

    def forget(self, trial_id: str) -> list[int]:
        """Drops a trial.

        Returns:
            The keys of trainables that were dropped, as no trial has used them for long.
        """
        trial = self._trials.pop(trial_id, None)
        if trial is None:
            return []
        self._rules.pop(trial_id, None)
        self._threads.pop(trial_id, None)
        name = self._large_configs.pop(trial_id, None)
        if name is not None:
            self._payloads.remove(name)
        known = self._trainables[trial[0]]
        known.trials -= 1
        if not known.trials:
            self._idle[trial[0]] = None
            self._idle_bytes += known.size
        dropped = []
        while len(self._idle) > _KEPT or (len(self._idle) > 1 and self._idle_bytes > _KEPT_BYTES):
            dropped.append(self._drop_idle())
        return dropped

    @property
    def has_large_configs(self) -> bool:
        """Whether a trial's config is large."""
        return bool(self._large_configs)

    def large_config(self, trial_id: str) -> str | None:
        """Returns the name of a trial's config, if that is large."""
        return self._large_configs.get(trial_id)

    def look_up(self, trial_id: str) -> tuple[int, bytes]:
        """Returns the key of a trial's trainable, and its pickled config."""
        return self._trials[trial_id][:2]

    def process(self, trial_id: str, threads: int) -> TrialProcess:
        """Returns what a trial that is set up in a lane asks of its process.

        A trial keeps the number of CPU threads with which it began, as its sums depend on it.

        Args:
            trial_id: the trial.
            threads: the lane's.
        """
        _, _, asked, seeds = self._trials[trial_id]
        if asked.threads is None and (first := self._threads.setdefault(trial_id, threads)) != threads:
            asked = asked._replace(threads=first)
        return asked._replace(seeds=None if seeds is None else Seeds.unpack(seeds))

    def rule(self, trial_id: str) -> KeepRule | None:
        """Returns which checkpoints of a trial outlive the run; ``None`` if none do."""
        return self._rules.get(trial_id)

    def note_kept(self, trial_id: str, value: float | None) -> None:
        """Takes the metric of a checkpoint that outlives the run: the next one of the trial must beat it."""
        rule = self._rules.get(trial_id)
        if rule is not None and value is not None and rule.is_better(value, rule.best):
            self._rules[trial_id] = rule._replace(best=value)

    def is_elastic(self, trial_id: str) -> bool:
        """Whether a trial can span several devices."""
        return trial_id in self._trials and self._trainables[self._trials[trial_id][0]].payload.elastic

    def large_trainable(self, key: int) -> str | None:
        """Returns the name of a trainable's payload, if that is large."""
        return self._trainables[key].name

    def payload(self, name: str) -> bytes | None:
        """Returns a large payload; ``None`` if all that has it was forgotten."""
        for known in self._trainables.values():
            if known.name == name:
                return known.payload.pickled
        return next((self._trials[each][1] for each, found in self._large_configs.items() if found == name), None)

    def shipment(self, key: int) -> ShipTrainable:
        """Returns the message that makes a trainable known to a lane."""
        known = self._trainables[key].payload
        return ShipTrainable(key, known.pickled, tuple(import_path()), known.script)

    def _drop_idle(self) -> int:
        """Drops the trainable that has been idle longest; returns its key."""
        key, _ = self._idle.popitem(last=False)
        known = self._trainables.pop(key)
        self._idle_bytes -= known.size
        del self._keys[known.payload.digest]
        if known.name is not None:
            self._payloads.remove(known.name)
        return key

    def _key_of(self, trainable: TrainablePayload) -> int:
        key = self._keys.setdefault(trainable.digest, self._next_key)
        if key == self._next_key:
            self._next_key += 1
            known = self._trainables[key] = _Known(trainable)
            if known.name is not None:
                self._payloads.add(known.name)
            self._preload(trainable.imports)
        return key
