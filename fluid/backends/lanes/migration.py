"""Moving a trial from one lane to another: saved and dropped there, restored here, told as one resize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fluid.engine.commands import Call, Pause, Resize, RunIteration, Save, StartTrial, StopTrial
from fluid.engine.events import Event, ResizeDone, TrialFailed, TrialSaved, TrialStarted

OfTrial = StartTrial | RunIteration | Pause | Save | StopTrial | Call | Resize


@dataclass(slots=True)
class _Move:
    """One trial on its way.

    Attributes:
        begun: when its resize was asked for, seconds.
        restoring: it has left its old lane.
        waiting: commands that came meanwhile.
    """

    command: Resize
    begun: float
    restoring: bool = False
    waiting: list[OfTrial] = field(default_factory=list)


class Migrations:
    """The trials that are between two lanes."""

    def __init__(self) -> None:
        self._migrations: dict[str, _Move] = {}

    def begin(self, command: Resize, now: float) -> Save:
        """Begins a move; returns the command for the old lane."""
        self._migrations[command.trial_id] = _Move(command, now)
        return Save(command.trial_id, command.old_lane_ids, drop=True)

    def hold(self, command: OfTrial) -> bool:
        """Keeps a command for a trial that has not left its old lane yet; returns whether it did."""
        move = self._migrations.get(command.trial_id)
        if move is None or move.restoring:
            return False
        move.waiting.append(command)
        return True

    def translate(self, event: Event) -> tuple[Event, Sequence[OfTrial]]:
        """Looks at what lanes report.

        Returns:
            The event the engine is to see in its place, and the commands that go on with the move.
        """
        if not isinstance(event, (TrialSaved, TrialStarted, TrialFailed)):
            return event, ()
        move = self._migrations.get(event.trial_id)
        if move is None:
            return event, ()
        if isinstance(event, TrialFailed):
            del self._migrations[event.trial_id]
            return event, ()
        command = move.command
        if isinstance(event, TrialSaved):
            if not event.dropped or move.restoring:
                return event, ()
            move.restoring = True
            start = StartTrial(command.trial_id, command.lane_ids, command.iterations, event.checkpoint)
            # For the engine it has not left: it is saved, and that is worth knowing.
            return replace(event, dropped=False), [start, *move.waiting]
        if event.lane_id != command.lane_ids[0] or not move.restoring:
            return event, ()
        del self._migrations[event.trial_id]
        return ResizeDone(event.at, event.trial_id, event.at - move.begun), ()

    def lane_lost(self, lane_id: int) -> None:
        """Gives up the moves from or to a lane that is gone: the engine hears of the lane."""
        for trial_id, move in list(self._migrations.items()):
            here = move.command.lane_ids if move.restoring else move.command.old_lane_ids
            if lane_id in here:
                del self._migrations[trial_id]
