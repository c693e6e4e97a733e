"""What a trial in several lanes asks of the pool: messages for its members, events for the engine, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

from fluid._clock import Clock
from fluid.backends.lanes.migration import OfTrial
from fluid.elastic.actions import Reported, Send
from fluid.elastic.messages import Leave
from fluid.engine.commands import Command, StartTrial, StopTrial
from fluid.engine.events import Event, Failure, IterationDone, TrialFailed
from fluid.lane import protocol as m
from fluid.resources import MemoryNeed


class ToLane(NamedTuple):
    """Send a message to a lane, if the lane is up."""

    lane_id: int
    message: Any


class SetUpMember(NamedTuple):
    """Tell a lane to set a trial up as a member, with the trainable and config that the pool keeps."""

    lane_id: int
    command: StartTrial
    membership: m.Membership


#: What the pool is to do: send to a lane, tell the engine, or carry out a command as if the engine had just given it.
PoolAction = ToLane | SetUpMember | Event | OfTrial


class Outbox:
    """Collects the actions of one trial until :meth:`take`.

    Args:
        trial_id: the trial.
        epoch: number of its time in several lanes, which lanes repeat in all they say.
        process_group: what members communicate through, as of :func:`fluid.elastic.make_group.make_group`.
        clock: the driver's.
        leaving: (trial, lane, epoch) of members whose answer to StopTrial is still to come; shared by all trials.

    Attributes:
        memory: device memory that rank 0 measured in the last iteration, (persistent, ephemeral) bytes.
        latest: time of the latest event about the trial, seconds, which no later event may precede.
    """

    def __init__(
        self, trial_id: str, epoch: int, process_group: str, clock: Clock, leaving: set[tuple[str, int, int]]
    ) -> None:
        self.memory: tuple[float, float] | None = None
        self.latest = 0.0
        self._trial_id = trial_id
        self._epoch = epoch
        self._process_group = process_group
        self._clock = clock
        self._leaving = leaving
        self._actions: list[PoolAction] = []

    def take(self) -> list[PoolAction]:
        """Returns the actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def send(self, action: Send, pending: Command | None) -> None:
        """Sends what the controller has for a member, while the trial carries out the ``pending`` command."""
        lane_id, message = action
        if isinstance(message, StartTrial):
            # The state of those that join later comes from another member.
            membership = m.Membership(self._epoch, self._process_group, takes_over=message is not pending)
            self._actions.append(SetUpMember(lane_id, message, membership))
        elif isinstance(message, m.AdoptResident):
            self.to_lane(lane_id, message)
        else:
            if isinstance(message, Leave) and isinstance(pending, StopTrial):
                self._leaving.add((self._trial_id, lane_id, self._epoch))
            self.to_member(lane_id, message)

    def adoption(self) -> m.AdoptResident:
        """The message by which a lane makes a member of the trial that it has trained by itself so far."""
        return m.AdoptResident(self._trial_id, m.Membership(self._epoch, self._process_group))

    def to_lane(self, lane_id: int, message: Any) -> None:
        """Sends a lane a message."""
        self._actions.append(ToLane(lane_id, message))

    def to_member(self, lane_id: int, message: Any) -> None:
        """Sends the member in a lane one of the controller's messages."""
        self.to_lane(lane_id, m.ToMember(self._trial_id, message))

    def leave(self, lane_ids: set[int]) -> None:
        """Tells the members in these lanes to leave."""
        for lane_id in lane_ids:
            self.to_member(lane_id, Leave())

    def report(self, event: Event) -> None:
        """Tells the engine."""
        self.latest = max(self.latest, event.at)
        self._actions.append(event)

    def fail(self, lane_id: int, message: str) -> None:
        """Tells the member in a lane to leave, and the engine that the trial failed there."""
        self.leave({lane_id})
        self.report(TrialFailed(self._clock.now(), self._trial_id, lane_id, Failure("error", message)))

    def report_iteration(self, reported: Reported, lane_id: int, at: float | None) -> bool:
        """Tells the engine of an iteration.

        Args:
            reported: what the controller says of it.
            lane_id: rank 0's lane.
            at: when it ended, seconds; ``None`` for now.

        Returns:
            Whether the trial says that it has no more to do.
        """
        finished = bool(reported.metrics.plain().get("done", False))
        event = IterationDone(
            max(self._clock.now() if at is None else at, self.latest),
            self._trial_id,
            lane_id,
            iteration=reported.iteration,
            seconds=reported.seconds or 0.0,
            metrics=reported.metrics,
            memory=None if self.memory is None else MemoryNeed(*self.memory),
            finished=finished,
        )
        self.report(event)
        return finished

    def carry_out(self, command: OfTrial) -> None:
        """Gives a command to the pool, as if the engine had just given it."""
        self._actions.append(command)
