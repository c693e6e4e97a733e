"""Migration of a trial in one lane to another: saved and dropped there, restored here, reported as one resize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fluid.engine.commands import Call, Pause, Resize, RunIteration, Save, StartTrial, StopTrial
from fluid.engine.events import Event, ResizeDone, SavabilityChanged, TrialFailed, TrialSaved, TrialStarted

OfTrial = StartTrial | RunIteration | Pause | Save | StopTrial | Call | Resize


@dataclass(slots=True)
class _Migration:
    """One trial on its way.

    Attributes:
        begun: when the engine asked for it, seconds.
        restoring: whether the trial has left its old lane.
        waiting: commands that came before that.
    """

    command: Resize
    begun: float
    restoring: bool = False
    waiting: list[OfTrial] = field(default_factory=list)


class Migrations:
    """The trials that are between two lanes."""

    def __init__(self) -> None:
        self._migrations: dict[str, _Migration] = {}

    def begin(self, command: Resize, now: float) -> Save:
        """Begins a migration; returns the command for the old lane."""
        self._migrations[command.trial_id] = _Migration(command, now)
        return Save(command.trial_id, command.old_lane_ids, drop=True)

    def is_leaving(self, trial_id: str) -> bool:
        """Whether a trial that migrates has not left its old lane yet, so that its commands are to be held."""
        migration = self._migrations.get(trial_id)
        return migration is not None and not migration.restoring

    def hold(self, command: OfTrial) -> None:
        """Keeps a command until its trial, which is leaving a lane, is in the new one."""
        self._migrations[command.trial_id].waiting.append(command)

    def translate(self, event: Event) -> tuple[Event, Sequence[OfTrial]]:
        """Looks at what lanes report.

        Returns:
            The event the engine is to see in its place, and the commands that go on with the migration.
        """
        if not isinstance(event, (TrialSaved, TrialStarted, TrialFailed, SavabilityChanged)):
            return event, ()
        migration = self._migrations.get(event.trial_id)
        if migration is None:
            return event, ()
        if isinstance(event, SavabilityChanged):
            if event.refuses and not migration.restoring:
                del self._migrations[event.trial_id]  # What waits is for the new lane, to which the trial will not go.
            return event, ()
        if isinstance(event, TrialFailed):
            del self._migrations[event.trial_id]
            return event, ()
        command = migration.command
        if isinstance(event, TrialSaved):
            if not event.dropped or migration.restoring:
                return event, ()
            migration.restoring = True
            start = StartTrial(
                command.trial_id, command.lane_ids, iterations=command.iterations, checkpoint=event.checkpoint
            )
            # The engine is told of the checkpoint, but not of the departure.
            return replace(event, dropped=False), [start, *migration.waiting]
        if event.lane_id != command.lane_ids[0] or not migration.restoring:
            return event, ()
        del self._migrations[event.trial_id]
        return ResizeDone(event.at, event.trial_id, event.at - migration.begun), ()

    def lane_lost(self, lane_id: int) -> None:
        """Gives up the migrations from or to a lane that is gone; the engine hears of the lane."""
        for trial_id, migration in list(self._migrations.items()):
            here = migration.command.lane_ids if migration.restoring else migration.command.old_lane_ids
            if lane_id in here:
                del self._migrations[trial_id]
