"""One trial that trains in several lanes: the engine's commands to messages for its members, and back. Without IO.

What it does next depends on the command under way and on the phase of its generation: :data:`_STEPS` is the table.
Its methods return what the pool is to do; none calls the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid._clock import Clock
from fluid.backends.lanes.elastic_actions import Outbox, PoolAction
from fluid.backends.lanes.migration import OfTrial
from fluid.backends.lanes.translate import message_of
from fluid.elastic.actions import Action, AllHalted, Formed, Reported, Send
from fluid.elastic.controller import ElasticController, Phase
from fluid.elastic.messages import MemberIterated, MemberRaised
from fluid.engine.commands import Call, Pause, Resize, RunIteration, Save, StartTrial, StopTrial
from fluid.engine.events import (
    IterationDone,
    PausePurpose,
    ResizeDone,
    TrialFailed,
    TrialPaused,
    TrialReleased,
    TrialStarted,
)
from fluid.lane import protocol as m

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

    def hear(self, lane_id: int, message: m.FromMember, at: float) -> list[PoolAction]:
        """Takes what a member says; ``at`` is when, seconds on the driver's clock."""
        if isinstance(message.message, MemberIterated):
            self._outbox.memory = message.memory
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
        if isinstance(command, Call) and (self._pending is None or isinstance(self._pending, Pause)):
            self._outbox.to_lane(command.lane_ids[0], message_of(command))
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
            self._outbox.to_lane(self._lanes[0], message_of(command))
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
                self._halt_sent, may_move = True, pending.purpose is PausePurpose.PREEMPT
                self._outbox.to_lane(self._alone, m.PauseResident(self.trial_id, may_move=may_move))
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
                self._outbox.to_lane(lane_id, message_of(pending))
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
