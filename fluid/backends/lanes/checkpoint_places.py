"""Where checkpoints are: the engine's commands for the stores of hosts, and what hosts report of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable

from fluid.backends.base import CheckpointSource, Launcher
from fluid.backends.lanes.connections import LaneConnections
from fluid.backends.lanes.registry import Registry
from fluid.backends.retention import StoringLauncher
from fluid.engine.checkpoint_places import CheckpointPlaced, PrefetchCheckpoint, ValueCheckpoints
from fluid.engine.commands import Persist
from fluid.engine.events import Checkpoint
from fluid.lane import messages as m
from fluid.lane.checkpoint_files import iteration_of
from fluid.lane.checkpoint_messages import CheckpointMoved
from fluid.lane.checkpoint_paths import trial_folder_name
from fluid.lane.run_paths import folder_name, trial_of_folder

#: The commands for stores of hosts; and all that are carried out here.
OF_HOSTS = (ValueCheckpoints, PrefetchCheckpoint)
OfStores = ValueCheckpoints | PrefetchCheckpoint | Persist


class CheckpointPlaces:
    """Tells the stores of hosts what checkpoints are worth, and the engine where they are.

    Args:
        launcher: has the stores, if its hosts keep checkpoints in memory.
        lanes: the connections.
        registry: what the trials are.
    """

    def __init__(self, launcher: Launcher, lanes: LaneConnections, registry: Registry) -> None:
        self._checkpoints_at: Callable[[str], CheckpointSource] = launcher.checkpoints_at
        self._stores = launcher.stores if isinstance(launcher, StoringLauncher) else None
        self._lanes = lanes
        self._registry = registry

    def execute(self, command: OfStores) -> None:
        """Carries a command out."""
        if isinstance(command, Persist):
            self._persist(command)
        elif isinstance(command, ValueCheckpoints):
            if self._stores is not None:
                self._stores.value(command.values)
        else:
            self._prefetch(command)

    def forget(self, trial_id: str) -> None:
        """Forgets a trial that no command will name again."""
        if self._stores is not None:
            self._stores.forget(trial_id)

    def hear(self, moved: CheckpointMoved, now: float) -> list[CheckpointPlaced]:
        """Takes what a host reports; returns what the engine is to know.

        Args:
            moved: the report.
            now: the time, seconds.
        """
        path, in_memory, host = moved
        name = trial_folder_name(path)
        trial_id = trial_of_folder(name) or self._registry.find(lambda trial_id: folder_name(trial_id) == name)
        if trial_id is None or trial_id not in self._registry:
            return []  # It was forgotten meanwhile.
        return [CheckpointPlaced(now, trial_id, Checkpoint(iteration_of(path), path, host, in_memory))]

    def _prefetch(self, command: PrefetchCheckpoint) -> None:
        checkpoint = command.checkpoint
        if self._stores is None or not os.path.basename(checkpoint.path):
            return
        source = None
        if checkpoint.host != command.host:
            source = self._checkpoints_at(checkpoint.host).address
            if source is None:
                return  # Its machine does not serve it yet; the trial's lane will wait for that.
        self._stores.prefetch(command.host, command.trial_id, checkpoint.path, source)

    def _persist(self, command: Persist) -> None:
        lane, checkpoint = self._lanes.get(command.lane_id), command.checkpoint
        if lane is not None and not lane.leaving:
            persist = m.PersistCheckpoint(command.trial_id, checkpoint.iteration, checkpoint.path, command.keep)
            self._lanes.put(lane, persist)
