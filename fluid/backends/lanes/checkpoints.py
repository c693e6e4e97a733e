"""Where checkpoints are: what the stores of hosts are told, and what hosts report of checkpoints."""

from __future__ import annotations

import os
from typing import Any

from fluid.backends.base import Launcher
from fluid.backends.lanes.connections import LaneConnection, LaneConnections
from fluid.backends.lanes.registry import Registry
from fluid.elastic.messages import Left
from fluid.engine.commands import ForkSaved, Persist, PrefetchCheckpoint, ValueCheckpoints
from fluid.engine.events import (
    Checkpoint,
    CheckpointPlaced,
    TrialFailed,
    TrialForked,
    TrialNotKept,
    TrialReleased,
    TrialSaved,
)
from fluid.keeping import Kept, WorstKept
from fluid.lane.checkpoints.files import iteration_of
from fluid.lane.checkpoints.paths import folder_name, trial_folder_name, trial_of_folder
from fluid.lane.protocol import CheckpointForked, CheckpointPersisted, CheckpointReport, FromMember, KeepBar

#: The commands that are carried out here.
OfHosts = ValueCheckpoints | PrefetchCheckpoint | Persist | ForkSaved


class CheckpointPlaces:
    """Tells the stores of hosts what checkpoints are worth, and what to do with them; the engine, where they are.

    Args:
        launcher: has the stores.
        lanes: the connections.
        registry: what the trials are.
    """

    def __init__(self, launcher: Launcher, lanes: LaneConnections, registry: Registry) -> None:
        self._launcher = launcher
        self._stores = launcher.stores
        self._lanes = lanes
        self._registry = registry
        #: Trials that were forgotten, and may still be saved by lanes; and whether their newest checkpoint is kept.
        self._forgotten: dict[str, bool] = {}

    def execute(self, command: OfHosts) -> None:
        """Carries a command out."""
        if isinstance(command, ValueCheckpoints):
            self._stores.value(command.values)
        elif isinstance(command, PrefetchCheckpoint):
            self._prefetch(command)
        elif isinstance(command, ForkSaved):
            checkpoint = command.checkpoint
            self._stores.fork(checkpoint.host, command.trial_id, command.parent, checkpoint.path)
        else:
            checkpoint = command.checkpoint
            self._stores.persist(checkpoint.host, command.trial_id, checkpoint.path, keep=command.keep)

    def discard(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint: see :meth:`fluid.backends.base.Backend.discard_kept`."""
        self._stores.discard(host, path, demote=demote)

    # -- trials that are forgotten -----------------------------------------------------------------------------

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        """Forgets a trial that no command will name again; its checkpoints are deleted once no lane writes any."""
        self._forgotten[trial_id] = keep_newest
        self._delete_if_settled(trial_id)

    def hear_lane(self, lane: LaneConnection, message: Any) -> None:
        """Takes a message of a lane: it may have got rid of a trial."""
        has_left = isinstance(message, (TrialReleased, TrialFailed))
        has_left |= isinstance(message, TrialSaved) and message.dropped
        has_left |= isinstance(message, FromMember) and isinstance(message.message, Left)
        if has_left:
            lane.trials.discard(message.trial_id)
            self._delete_if_settled(message.trial_id)
        if isinstance(message, TrialForked):
            self._drop_unknown(message.trial_id)

    def lane_is_gone(self, lane: LaneConnection) -> None:
        """Takes note that a lane writes no checkpoint any more."""
        trials, lane.trials = lane.trials, set()
        for trial_id in trials.intersection(self._forgotten):
            self._delete_if_settled(trial_id)

    def close(self) -> None:
        """Has the checkpoints of all trials deleted that were forgotten: the lanes that are left are killed."""
        for trial_id, keep_newest in self._forgotten.items():
            self._stores.forget(trial_id, keep_newest=keep_newest)
        self._forgotten.clear()

    def _drop_unknown(self, trial_id: str) -> None:
        """Deletes what was saved for a trial to start from that was forgotten meanwhile."""
        if trial_id not in self._registry:
            self._stores.forget(trial_id, keep_newest=False)

    def _delete_if_settled(self, trial_id: str) -> None:
        if trial_id in self._forgotten and not any(trial_id in lane.trials for lane in self._lanes):
            self._stores.forget(trial_id, keep_newest=self._forgotten.pop(trial_id))

    # -- what hosts report -------------------------------------------------------------------------------------

    def hear(
        self, report: CheckpointReport, now: float
    ) -> list[CheckpointPlaced | TrialSaved | TrialNotKept | TrialForked]:
        """Takes what a host reports; returns what the engine is to know.

        Args:
            report: what the host did.
            now: the time, seconds.
        """
        if isinstance(report, CheckpointPersisted):
            return [_persisted(report, now)]
        if isinstance(report, CheckpointForked):
            self._drop_unknown(report.trial_id)
            return [_forked(report, now)] if report.trial_id in self._registry else []
        path, in_memory, host = report.path, report.in_memory, report.host
        name = trial_folder_name(path)
        trial_id = trial_of_folder(name) or self._registry.find(lambda trial_id: folder_name(trial_id) == name)
        if trial_id is None or trial_id not in self._registry:
            return []  # It was forgotten meanwhile.
        return [CheckpointPlaced(now, trial_id, Checkpoint(iteration_of(path), path, host, in_memory))]

    def _prefetch(self, command: PrefetchCheckpoint) -> None:
        checkpoint = command.checkpoint
        if not os.path.basename(checkpoint.path):
            return
        source = None
        if checkpoint.host != command.host:
            source = self._launcher.checkpoints_at(checkpoint.host).address
            if source is None:
                return  # Its machine does not serve it yet; the trial's lane will wait for that.
        self._stores.prefetch(command.host, command.trial_id, checkpoint.path, source)


def _forked(report: CheckpointForked, now: float) -> TrialForked:
    checkpoint = None
    if not report.problem:
        checkpoint = Checkpoint(iteration_of(report.path), report.path, report.host, report.in_memory)
    seconds, problem = report.seconds, report.problem
    parent, trial_id = report.parent, report.trial_id
    return TrialForked(
        now, trial_id, parent=parent, lane_id=None, checkpoint=checkpoint, seconds=seconds, problem=problem
    )


def _persisted(report: CheckpointPersisted, now: float) -> TrialSaved | TrialNotKept:
    iteration, failed = iteration_of(report.path), bool(report.problem)
    if failed and report.keep:
        return TrialNotKept(now, report.trial_id, iteration=iteration, reason=report.problem)
    checkpoint = Checkpoint(iteration, report.path, host=report.host, in_memory=failed)
    kept = Kept(report.bytes) if report.keep else None
    return TrialSaved(now, report.trial_id, None, checkpoint, seconds=report.seconds, copied=True, kept=kept)


# -- retention -----------------------------------------------------------------------------------
#
# Tells lanes which checkpoints are to outlive the run.


class LaneRetention:
    """Tells lanes which checkpoints are worth keeping beyond the run.

    Args:
        lanes: the connections.
    """

    def __init__(self, lanes: LaneConnections) -> None:
        self._lanes = lanes
        #: By group.
        self._bars: dict[str, KeepBar] = {}

    def set_bar(self, group: str, bar: WorstKept | None, room: int | None) -> None:
        """Tells all lanes what is worth keeping."""
        message = self._bars[group] = KeepBar(group, bar, room)
        for lane in self._lanes:
            if not lane.leaving:
                self._lanes.put(lane, message)
        self._lanes.flush()

    def tell(self, lane: LaneConnection) -> None:
        """Tells a lane that is being started what is worth keeping."""
        for bar in self._bars.values():
            self._lanes.put(lane, bar)
