"""Trials that lanes were told to stop and have not cleaned up yet, and who waits for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fluid.engine.commands import Command, StopLane, StopTrial
from fluid.engine.events import Event, LaneLost, TrialFailed, TrialReleased, TrialSaved
from fluid.session.waits import SessionFuture, SessionWaits


class Departures:
    """Follows the departures of stopped trials. Used in the session's thread only.

    Args:
        group_of: returns the group of a trial; ``None`` if the trial was forgotten.
        waits: of the session.
    """

    def __init__(self, group_of: Callable[[str], str | None], waits: SessionWaits) -> None:
        self._group_of, self._waits = group_of, waits
        #: The group of each trial that is about to leave a lane, by lane.
        self._leaving: dict[int, dict[str, str]] = {}
        #: The group and the trial, or any of the group where that is ``None``, for which a future waits.
        self._waiting: list[tuple[str, str | None, SessionFuture]] = []

    def follow(self, events: Iterable[Event], commands: Iterable[Command]) -> None:
        """Takes what happened, and what the engine answered."""
        if self._leaving:
            for event in events:
                if isinstance(event, (TrialReleased, TrialFailed)) or (isinstance(event, TrialSaved) and event.dropped):
                    if event.lane_id is not None:
                        self._has_left(event.lane_id, event.trial_id)
                elif isinstance(event, LaneLost):
                    self._leaving.pop(event.lane_id, None)
        for command in commands:
            if isinstance(command, StopTrial):
                group_id = self._group_of(command.trial_id)
                if group_id is not None:
                    for lane_id in command.lane_ids:
                        self._leaving.setdefault(lane_id, {})[command.trial_id] = group_id
            elif isinstance(command, StopLane):
                self._leaving.pop(command.lane_id, None)
        for group_id, trial_id, answer in list(self._waiting):
            if not self._leaves(group_id, trial_id):
                self._waiting.remove((group_id, trial_id, answer))
                answer.set_result(None)

    def of(self, group_id: str) -> tuple[str, ...]:
        """Ids of a group's stopped trials that lanes have not cleaned up."""
        leaving = {trial for trials in self._leaving.values() for trial, group in trials.items() if group == group_id}
        return tuple(sorted(leaving))

    def wait_for(self, group_id: str, trial_id: str | None = None) -> SessionFuture:
        """Returns what is set when all stopped trials of a group, or one of them, have left their lanes."""
        answer = SessionFuture(self._waits)
        if self._leaves(group_id, trial_id):
            self._waiting.append((group_id, trial_id, answer))
        else:
            answer.set_result(None)
        return answer

    def give_up(self) -> None:
        """Ends all waiting, as the session ends."""
        for *_, answer in self._waiting:
            answer.set_result(None)
        self._waiting.clear()

    def _leaves(self, group_id: str, trial_id: str | None) -> bool:
        leaving = self.of(group_id)
        return bool(leaving) if trial_id is None else trial_id in leaving

    def _has_left(self, lane_id: int, trial_id: str) -> None:
        leaving = self._leaving.get(lane_id, {})
        leaving.pop(trial_id, None)
        if not leaving:
            self._leaving.pop(lane_id, None)
