"""The trials of a pool that train in several lanes. Without IO: every method returns what the pool is to do.

A trial in one lane is a resident like any other, elastic or not. It gets an
:class:`~fluid.backends.lanes.elastic.ElasticTrial` when it is to grow, and loses it when it is back in one lane,
or in none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from fluid._clock import Clock
from fluid.elastic.members.controller import ElasticController, Phase
from fluid.elastic.messages import Action, AllHalted, Formed, Leave, Left, MemberIterated, MemberRaised, Reported, Send
from fluid.engine.commands import Call, Command, Fork, Pause, Resize, RunIteration, Save, StartTrial, StopTrial
from fluid.engine.events import (
    Event,
    Failure,
    IterationDone,
    ResizeDone,
    SavabilityChanged,
    TrialFailed,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.lane.protocol import AdoptResident, FromMember, Membership, ToMember
from fluid.resources import MemoryNeed
from fluid.trainables.usage import NO_USAGE

# -- migration -----------------------------------------------------------------------------------
#
# Migration of a trial in one lane to another: saved and dropped there, restored here, reported as one resize.


OfTrial = StartTrial | RunIteration | Pause | Save | Fork | StopTrial | Call | Resize


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
            return structs.replace(event, dropped=False), [start, *migration.waiting]
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


# -- elastic actions -----------------------------------------------------------------------------
#
# What a trial in several lanes asks of the pool: messages for its members, events for the engine, in order.


class ToLane(NamedTuple):
    """Send a message to a lane, if the lane is up."""

    lane_id: int
    message: Any


class SetUpMember(NamedTuple):
    """Tell a lane to set a trial up as a member, with the trainable and config that the pool keeps."""

    lane_id: int
    command: StartTrial
    membership: Membership


#: What the pool is to do: send to a lane, tell the engine, or carry out a command as if the engine had just given it.
PoolAction = ToLane | SetUpMember | Event | OfTrial


class Outbox:
    """Collects the actions of one trial until :meth:`take`.

    Args:
        trial_id: the trial.
        epoch: number of its time in several lanes, which lanes repeat in all they say.
        process_group: what members communicate through, as of :func:`fluid.elastic.groups.make.make_group`.
        clock: the driver's.
        leaving: (trial, lane, epoch) of members whose answer to StopTrial is still to come; shared by all trials.

    Attributes:
        memory, usage: what rank 0 measured in the last iteration.
        latest: time of the latest event about the trial, seconds, which no later event may precede.
    """

    def __init__(
        self, trial_id: str, epoch: int, process_group: str, clock: Clock, leaving: set[tuple[str, int, int]]
    ) -> None:
        self.memory: MemoryNeed | None = None
        self.usage = NO_USAGE
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
            membership = Membership(self._epoch, self._process_group, takes_over=message is not pending)
            self._actions.append(SetUpMember(lane_id, message, membership))
        elif isinstance(message, AdoptResident):
            self.to_lane(lane_id, message)
        else:
            if isinstance(message, Leave) and isinstance(pending, StopTrial):
                self._leaving.add((self._trial_id, lane_id, self._epoch))
            self.to_member(lane_id, message)

    def adoption(self) -> AdoptResident:
        """The message by which a lane makes a member of the trial that it has trained by itself so far."""
        return AdoptResident(self._trial_id, Membership(self._epoch, self._process_group))

    def to_lane(self, lane_id: int, message: Any) -> None:
        """Sends a lane a message."""
        self._actions.append(ToLane(lane_id, message))

    def to_member(self, lane_id: int, message: Any) -> None:
        """Sends the member in a lane one of the controller's messages."""
        self.to_lane(lane_id, ToMember(self._trial_id, message))

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
            memory=self.memory,
            usage=self.usage,
            finished=finished,
        )
        self.report(event)
        return finished

    def carry_out(self, command: OfTrial) -> None:
        """Gives a command to the pool, as if the engine had just given it."""
        self._actions.append(command)


# -- elastic trial -------------------------------------------------------------------------------
#
# One trial that trains in several lanes: the engine's commands to messages for its members, and back. Without IO.
#
# What it does next depends on the command under way and on the phase of its generation: :data:`_STEPS` is the table.
# Its methods return what the pool is to do; none calls the pool.


#: Times that members try to form a generation although all of them are alive, before the trial fails.
_ATTEMPTS = 3


class ElasticTrial:
    """A trial in several lanes, or about to be.

    Args:
        trial_id: its name.
        epoch: number of this object, which lanes repeat in all they say; answers to an earlier one are ignored.
        lanes: the lanes in which the engine knows the trial; the first one answers for all.
        alone: the lane in which it still trains by itself; ``None`` if it is a member there, or not set up yet.
        left: iterations still to run.
        outbox: takes its actions.
        clock: the driver's.
        is_up: whether a lane runs and was not told to end.

    Attributes:
        closed: whether the trial is back in one lane, or in none. Its commands are then not for this object.
    """

    def __init__(
        self,
        trial_id: str,
        *,
        epoch: int,
        lanes: tuple[int, ...],
        alone: int | None,
        left: int,
        outbox: Outbox,
        clock: Clock,
        is_up: Callable[[int], bool],
    ) -> None:
        self.trial_id = trial_id
        self.epoch = epoch
        self.left = left
        self.closed = False
        self._lanes = lanes
        self._alone = alone
        self._outbox = outbox
        self._clock = clock
        self._is_up = is_up
        self._controller = ElasticController()
        #: The command under way.
        self._pending: StartTrial | Pause | Resize | StopTrial | None = None
        #: The lanes of the last StartTrial or Resize.
        self._named: tuple[int, ...] = ()
        #: Commands that came meanwhile.
        self._waiting: list[OfTrial] = []
        #: Whether the members, or the lane, have been told to stand still for the pending command.
        self._halt_sent = False
        #: Whether the pending resize is part of a save, so that the engine is not told of it.
        self._silent = False
        #: When training stood still, or was to begin, seconds.
        self._since = 0.0
        #: Times in a row that the members failed to form a generation.
        self._attempts = 0
        #: Whether it lost a lane, and stands still until the engine says how it goes on.
        self._lost_a_lane = False
        #: Whether it said that it has no more to do.
        self._finished = False

    # -- what happens to it ----------------------------------------------------------------------------------

    def execute(self, command: OfTrial) -> list[PoolAction]:
        """Carries a command out, or keeps it until the pending one is done."""
        self._execute(command)
        return self._outbox.take()

    def hear(self, lane_id: int, message: FromMember, at: float) -> list[PoolAction]:
        """Takes what a member says; ``at`` is when, seconds on the driver's clock."""
        if isinstance(message.message, MemberIterated):
            self._outbox.memory, self._outbox.usage = message.memory, message.usage
        self._act(self._controller.receive(lane_id, message.message), at)
        self._advance()
        return self._outbox.take()

    def follow(self, event: IterationDone | TrialPaused | TrialFailed) -> list[PoolAction]:
        """Looks at what a lane reports of the trial as of one that it trains by itself; the engine sees that, too."""
        if isinstance(event, TrialFailed):
            self._failed(event)
        elif event.lane_id == self._alone and isinstance(event, IterationDone):
            self.left = 0 if event.finished else max(0, self.left - event.count)
            self._advance()
        elif event.lane_id == self._alone and isinstance(self._pending, Pause):
            self._pending, self._since, self.left = None, event.at, 0
            self._catch_up()
        return self._outbox.take()

    def lane_lost(self, lane_id: int) -> list[PoolAction]:
        """Goes on without a lane that is gone; the pool reports the loss."""
        self._outbox.latest = self._clock.now()
        if lane_id == self._alone:
            self._fall_apart()
        elif self._controller.is_member(lane_id):
            self._lost(lane_id)
        return self._outbox.take()

    # -- commands --------------------------------------------------------------------------------------------

    def _execute(self, command: OfTrial) -> None:
        if isinstance(command, (Call, Fork)) and (self._pending is None or isinstance(self._pending, Pause)):
            self._outbox.to_lane(command.lane_ids[0], command)
        elif self._pending is not None and not (isinstance(self._pending, Pause) and isinstance(command, StopTrial)):
            self._waiting.append(command)
        else:
            _COMMANDS[type(command)](self, command)
            self._advance()

    def _start(self, command: StartTrial) -> None:
        self._set_pending(command)
        for lane_id in command.lane_ids:
            self._prepare(lane_id, command)
        if not all(map(self._is_up, command.lane_ids)):
            self._fall_apart()

    def _run(self, command: RunIteration) -> None:
        self._dismiss_newcomers()  # Of a resize that was called off.
        if self._alone is None:
            self.left += command.iterations
        else:
            self._close(command)

    def _pause(self, command: Pause) -> None:
        if self._lost_a_lane:
            return  # It stands still, and the loss of the lane answers.
        self._set_pending(command)
        for lane_id in command.next_lane_ids:
            if self._is_up(lane_id) and lane_id not in self._lanes:
                self._prepare(lane_id)

    def _resize(self, command: Resize) -> None:
        if not all(self._is_up(lane_id) for lane_id in command.lane_ids):
            self._lost_a_lane = True  # The engine will hear of the lane, and give another command.
            return
        paused_at = self._since
        self._set_pending(command)
        self._since = min(self._since, paused_at or self._since)
        self._dismiss_newcomers(but=command.lane_ids)
        for lane_id in command.lane_ids:
            if lane_id != self._alone:
                self._prepare(lane_id)
        if self._alone is not None:
            lane_id, self._alone = self._alone, None
            self._act(self._controller.adopt(lane_id, self._outbox.adoption()))

    def _stop(self, command: StopTrial) -> None:
        self._dismiss_newcomers(but=command.lane_ids)
        if self._alone is not None:
            self._close(command)
        else:
            self._set_pending(command)

    def _save(self, command: Save) -> None:
        """Saves it in the first lane. If it is to leave, it leaves the other lanes first; the engine is not told."""
        if not command.drop:
            self._outbox.to_lane(self._lanes[0], command)
            return
        self._dismiss_newcomers()  # Of a resize that was called off.
        if self._alone is not None:
            self._close(command)
            return
        self._set_pending(Resize(self.trial_id, self._lanes[:1], self._lanes, iterations=0))
        self._silent = True
        self._waiting.append(Save(self.trial_id, self._lanes[:1], drop=True, durable=command.durable))

    def _set_pending(self, command: StartTrial | Pause | Resize | StopTrial) -> None:
        self._pending, self._since = command, self._clock.now()
        self._named = command.lane_ids if isinstance(command, (StartTrial, Resize)) else self._named
        self._halt_sent, self._silent, self._attempts = False, False, 0

    def _prepare(self, lane_id: int, command: StartTrial | None = None) -> None:
        if not self._controller.is_member(lane_id):
            start = command or StartTrial(self.trial_id, (lane_id,), iterations=0)
            self._act(self._controller.prepare(lane_id, start))

    def _dismiss_newcomers(self, but: tuple[int, ...] = ()) -> None:
        """Tells lanes to leave that were prepared for a resize that does not come about."""
        for lane_id in self._controller.newcomers:
            if lane_id not in but:
                self._act(self._controller.dismiss(lane_id))

    def _catch_up(self) -> None:
        """Carries out what came while another command was under way."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            if self.closed:
                self._outbox.carry_out(command)
            else:
                self._execute(command)

    def _failed(self, event: TrialFailed) -> None:
        newcomer = event.lane_id not in self._lanes and (self._pending is None or isinstance(self._pending, Pause))
        raised = MemberRaised(event.failure.message, event.failure.traceback)
        self._act(self._controller.receive(event.lane_id, raised), event.at)
        if newcomer:
            self._advance()  # It has not been resized yet: the engine will leave it where it is.
        else:
            self._fall_apart()

    def _lost(self, lane_id: int) -> None:
        pending = self._pending
        is_newcomer = lane_id in self._controller.newcomers
        self._act(self._controller.member_lost(lane_id))
        left = tuple(lane for lane in self._lanes if lane != lane_id)
        if isinstance(pending, StartTrial) or not (left or isinstance(pending, StopTrial)):
            return self._fall_apart()
        if not isinstance(pending, StopTrial) and (isinstance(pending, Resize) or not is_newcomer):
            self._pending, self._lost_a_lane, self._lanes = None, True, left
            self._catch_up()
        self._advance()

    def _fall_apart(self) -> None:
        """Gives up a trial that failed, or whose lane is gone: the engine stops it in the lanes it knows of."""
        self._outbox.leave(set(self._controller.members) - {*self._lanes, *self._named})
        if isinstance(self._pending, StopTrial):
            self._waiting.insert(0, self._pending)
        self.left = 0
        self._close()

    # -- the next step ---------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Does the next thing that can be done for the pending command, or trains on."""
        step = None if self.closed else _STEPS.get((type(self._pending), self._controller.phase))
        if step is not None:
            step(self, self._pending)

    def _train(self, _: None) -> None:
        if not self._lost_a_lane and self.left > 0 and self._alone is None:
            self._act(self._controller.run(self.left))

    def _mend(self, _: Pause | None) -> None:
        if not self._lost_a_lane:  # It broke although all members are there.
            self._form(self._lanes)

    def _form_when_ready(self, pending: StartTrial) -> None:
        if all(map(self._controller.is_ready, pending.lane_ids)):
            self._form(pending.lane_ids)

    def _resize_when_ready(self, pending: Resize) -> None:
        controller = self._controller
        staying = (lane_id for lane_id in controller.ranks if controller.is_member(lane_id))
        if all(map(controller.is_ready, (*pending.lane_ids, *staying))):
            self._form(pending.lane_ids)

    def _halt_when_ready(self, pending: Pause) -> None:
        if self._newcomers_are_ready():
            if pending.next_lane_ids and all(map(self._controller.is_ready, pending.next_lane_ids)):
                self._act(self._controller.connect(pending.next_lane_ids))
            if not self._controller.is_connecting:
                self._halt()

    def _report_pause(self, pending: Pause) -> None:
        """The members stand still; a trial that trains by itself is told to, once its newcomers are ready."""
        if self._alone is not None:
            if not self._halt_sent and (self._newcomers_are_ready() or not self.left):
                self._halt_sent = True
                self._outbox.to_lane(self._alone, pending)
            return
        self._pending, self.left, self._since = None, 0, self._clock.now()
        done, purpose = self._controller.iteration, pending.purpose
        self._outbox.report(TrialPaused(self._since, self.trial_id, self._lanes[0], iteration=done, purpose=purpose))
        self._catch_up()

    def _newcomers_are_ready(self) -> bool:
        return all(map(self._controller.is_ready, self._controller.newcomers))

    def _halt(self, _: object = None) -> None:
        if not self._halt_sent:
            self._halt_sent = True
            self._act(self._controller.halt())

    def _release(self, pending: StopTrial) -> None:
        """Lets the lanes go that were named, or all if no survivor stays."""
        controller = self._controller
        rest = tuple(lane for lane in self._lanes if lane not in pending.lane_ids and lane in controller.survivors)
        if rest and not self._lost_a_lane:
            self._form(rest)
            return
        for lane_id in pending.lane_ids:
            if controller.is_member(lane_id):
                self._outbox.to_lane(lane_id, pending)
            elif self._is_up(lane_id):
                self._outbox.report(TrialReleased(self._clock.now(), self.trial_id, lane_id))
        self._outbox.leave(set(controller.members) - set(pending.lane_ids))
        self._close()

    def _form(self, lanes: tuple[int, ...]) -> None:
        if self._attempts > _ATTEMPTS:
            first = self._lanes[0]
            self._outbox.fail(first, f"its {len(lanes)} lanes cannot connect to each other; see their logs")
            self._act(self._controller.member_lost(first))
            self._fall_apart()
            return
        self._attempts += 1
        self._act(self._controller.form(lanes))

    def _close(self, command: OfTrial | None = None) -> None:
        """Leaves the trial to its one lane, or to none; the pool does what is still to be done there."""
        self.closed = True
        for following in (*([command] if command is not None else []), *self._waiting):
            self._outbox.carry_out(following)

    # -- what its controller decides -------------------------------------------------------------------------

    def _act(self, actions: list[Action], at: float | None = None) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._outbox.send(action, self._pending)
            elif isinstance(action, Reported):
                self.left = max(0, self.left - 1)
                self._finished |= self._outbox.report_iteration(action, self._lanes[0], at)
            elif isinstance(action, AllHalted):
                self._finished |= action.finished
                self.left = 0 if self._finished else self.left
            elif isinstance(action, Formed):
                self._formed(action)

    def _formed(self, formed: Formed) -> None:
        pending, now = self._pending, self._clock.now()
        self._attempts = 0
        if isinstance(pending, StartTrial):
            self.left = pending.iterations
            iteration, seconds = formed.iteration, now - self._since
            self._outbox.report(TrialStarted(now, self.trial_id, self._lanes[0], iteration=iteration, seconds=seconds))
        elif isinstance(pending, Resize):
            self._lanes, self.left, self._lost_a_lane = pending.lane_ids, pending.iterations, False
            if pending.done is not None:
                # Some iterations may have been reported since the engine counted those that are left.
                self.left -= self._controller.iteration - pending.done
            if not self._silent:
                self._outbox.report(ResizeDone(now, self.trial_id, now - self._since, self._lanes[0]))
        elif isinstance(pending, StopTrial):
            self._lanes = tuple(lane_id for lane_id in self._lanes if lane_id not in pending.lane_ids)
        if not isinstance(pending, Pause):
            self._pending = None
        self._halt_sent, self.left = False, 0 if self._finished else self.left
        if len(formed.members) == 1 and self._pending is None:
            left, self.left = self.left, 0
            self._close(RunIteration(self.trial_id, self._lanes, left) if left > 0 else None)
        else:
            self._catch_up()


_COMMANDS: dict[type, Callable[[ElasticTrial, Any], None]] = {
    StartTrial: ElasticTrial._start,
    RunIteration: ElasticTrial._run,
    Pause: ElasticTrial._pause,
    Resize: ElasticTrial._resize,
    StopTrial: ElasticTrial._stop,
    Save: ElasticTrial._save,
}

#: What to do next, by the type of the pending command and the phase of the generation. A pair that is missing waits:
#: for the members' answers (JOINING, BREAKING), or, in a resize, for the last of them to stand still.
_STEPS: dict[tuple[type, Phase], Callable[[ElasticTrial, Any], None]] = {
    (type(None), Phase.IDLE): ElasticTrial._train,
    (type(None), Phase.BROKEN): ElasticTrial._mend,
    (StartTrial, Phase.IDLE): ElasticTrial._form_when_ready,
    (StartTrial, Phase.BROKEN): ElasticTrial._form_when_ready,
    (Pause, Phase.IDLE): ElasticTrial._report_pause,
    (Pause, Phase.RUNNING): ElasticTrial._halt_when_ready,
    (Pause, Phase.BROKEN): ElasticTrial._mend,
    (Resize, Phase.IDLE): ElasticTrial._resize_when_ready,
    (Resize, Phase.BROKEN): ElasticTrial._resize_when_ready,
    (StopTrial, Phase.IDLE): ElasticTrial._release,
    (StopTrial, Phase.RUNNING): ElasticTrial._halt,
    (StopTrial, Phase.BROKEN): ElasticTrial._release,
}


# -- elastic -------------------------------------------------------------------------------------


class ElasticTrials:
    """Knows which commands and messages are about trials in several lanes, and hands them to those trials.

    Args:
        is_up: whether a lane runs and was not told to end.
        is_elastic: whether a trial can span several devices.
        clock: the driver's.
        process_group: what members communicate through, as of :func:`fluid.elastic.groups.make.make_group`.
    """

    def __init__(
        self,
        is_up: Callable[[int], bool],
        is_elastic: Callable[[str], bool],
        clock: Clock,
        process_group: str,
    ) -> None:
        self._is_up = is_up
        self._is_elastic = is_elastic
        self._clock = clock
        self._process_group = process_group
        self._trials: dict[str, ElasticTrial] = {}
        #: Iterations still to run, of trials in one lane; those in several keep their own.
        self._left: dict[str, int] = {}
        #: (trial, lane, epoch) of members that were told to leave and whose answer the engine waits for.
        self._leaving: set[tuple[str, int, int]] = set()
        self._epochs = itertools.count(1)

    def concerns(self, command: OfTrial) -> bool:
        """Whether a command is for :meth:`execute`; otherwise its trial trains, or is to train, in one lane."""
        return command.trial_id in self._trials or (_is_wide(command) and self._is_elastic(command.trial_id))

    def execute(self, command: OfTrial) -> list[PoolAction]:
        """Carries out a command that it :meth:`concerns`."""
        trial = self._trials.get(command.trial_id)
        if trial is None:
            here = command.old_lane_ids if isinstance(command, Resize) else command.lane_ids
            if not isinstance(command, StartTrial) and not any(map(self._is_up, here)):
                return []  # It was lost when the engine gave this command; the engine will start it again.
            trial = self._trials[command.trial_id] = self._open(command)
        return self._kept(trial, trial.execute(command))

    def count(self, command: OfTrial) -> None:
        """Counts the iterations a trial in one lane was told to run: one that is about to end need not wait to grow."""
        if isinstance(command, StartTrial):
            self._left[command.trial_id] = command.iterations
        elif isinstance(command, RunIteration):
            self._left[command.trial_id] = self._left.get(command.trial_id, 0) + command.iterations
        elif isinstance(command, (Pause, StopTrial)):
            self._left.pop(command.trial_id, None)

    def forget(self, trial_id: str) -> None:
        """Forgets a trial that no command will name again."""
        self._left.pop(trial_id, None)

    def hear(self, lane_id: int, message: FromMember, at: float) -> list[PoolAction]:
        """Takes what a member says.

        Args:
            lane_id: where it is.
            message: what it says.
            at: when, seconds on the driver's clock.
        """
        if isinstance(message.message, Left):
            key = (message.trial_id, lane_id, message.epoch)
            if key not in self._leaving:
                return []
            self._leaving.discard(key)
            return [TrialReleased(at, message.trial_id, lane_id)]
        trial = self._trials.get(message.trial_id)
        if trial is None or trial.epoch != message.epoch:
            return []
        return self._kept(trial, trial.hear(lane_id, message, at))

    def follow(self, event: Event) -> list[PoolAction]:
        """Looks at what lanes report of trials in one lane, which the engine sees, too."""
        if not isinstance(event, (IterationDone, TrialPaused, TrialFailed)):
            return []
        trial = self._trials.get(event.trial_id)
        if trial is not None:
            return self._kept(trial, trial.follow(event))
        if isinstance(event, TrialFailed):
            self._left.pop(event.trial_id, None)
        elif isinstance(event, IterationDone) and event.trial_id in self._left:
            self._left[event.trial_id] = 0 if event.finished else max(0, self._left[event.trial_id] - event.count)
        return []

    def lane_lost(self, lane_id: int) -> list[PoolAction]:
        """Goes on without a lane that is gone; the pool reports the loss."""
        self._leaving -= {key for key in self._leaving if key[1] == lane_id}
        lost = [self._kept(trial, trial.lane_lost(lane_id)) for trial in list(self._trials.values())]
        return list(itertools.chain.from_iterable(lost))

    def _open(self, command: OfTrial) -> ElasticTrial:
        here = command.old_lane_ids if isinstance(command, Resize) else command.lane_ids
        epoch = next(self._epochs)
        return ElasticTrial(
            command.trial_id,
            epoch=epoch,
            lanes=here,
            alone=here[0] if not isinstance(command, StartTrial) and len(here) == 1 else None,
            left=self._left.pop(command.trial_id, 0),
            outbox=Outbox(command.trial_id, epoch, self._process_group, self._clock, self._leaving),
            clock=self._clock,
            is_up=self._is_up,
        )

    def _kept(self, trial: ElasticTrial, actions: list[PoolAction]) -> list[PoolAction]:
        """Returns the actions; a trial that is back in one lane, or in none, is kept no longer."""
        if trial.closed:
            del self._trials[trial.trial_id]
            if trial.left:
                self._left[trial.trial_id] = trial.left
        return actions


def _is_wide(command: OfTrial) -> bool:
    """Whether a command is about several lanes."""
    if isinstance(command, Resize):
        return len(command.lane_ids) > 1 or len(command.old_lane_ids) > 1
    if isinstance(command, Pause):
        return len(command.next_lane_ids) > 1 or len(command.lane_ids) > 1
    return len(command.lane_ids) > 1 and not isinstance(command, StopTrial)
