"""Trials that train in several lanes: the engine's commands to messages for members, and back. Without IO.

A trial in one lane is a resident like any other, whatever it could do. It gets an entry here when it is to grow, and
loses it when it is back in one lane, or in none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fluid.backends.lanes.migration import OfTrial
from fluid.backends.lanes.translate import metrics_of
from fluid.elastic.controller import Action, AllHalted, ElasticController, Formed, Phase, Reported, Send
from fluid.elastic.messages import Leave, Left, MemberIterated, MemberRaised
from fluid.engine.commands import Call, Pause, Resize, RunIteration, Save, StartTrial, StopTrial
from fluid.engine.events import (
    Event,
    Failure,
    IterationDone,
    ResizeDone,
    TrialFailed,
    TrialPaused,
    TrialReleased,
    TrialStarted,
)
from fluid.lane import messages as m
from fluid.resources import MemoryNeed

#: Times that members try to meet again where none of them is gone, before the trial fails.
_ATTEMPTS = 3


class Lanes(Protocol):
    """What is needed of the pool."""

    def now(self) -> float:
        """The driver's time, seconds."""
        ...

    def is_up(self, lane_id: int) -> bool:
        """Whether a lane is there, and not told to end."""
        ...

    def is_elastic(self, trial_id: str) -> bool:
        """Whether a trial can span several devices."""
        ...

    def set_up(self, lane_id: int, command: StartTrial, membership: m.Membership) -> None:
        """Has a lane set a trial up as a member."""
        ...

    def send(self, lane_id: int, message: Any) -> None:
        """Sends a lane a message."""
        ...

    def obey(self, command: OfTrial) -> None:
        """Carries a command out, as if it had just come."""
        ...

    def report(self, event: Event) -> None:
        """Tells the engine."""
        ...


@dataclass(slots=True)
class _Elastic:
    """A trial in several lanes, or about to be.

    Attributes:
        term: number of this entry, by which what lanes say is matched with it.
        lanes: where the engine knows it; the first one answers for all.
        alone: lane in which it still trains by itself; ``None`` once it is a member there.
        left: iterations still to run.
        goal: the command under way.
        told: whether the members, or the lane, have been told to stand still for it.
        since: when training stood still, or was to begin, seconds.
        waiting: commands that came meanwhile.
        bereft: whether it lost a lane, and the engine is to say how it goes on.
        finished: whether it said that it has no more to do.
        attempts: times that its members failed to meet in a row.
        memory: device memory that rank 0 measured in the last iteration.
        latest: time of the last event about it, which others must not precede.
    """

    trial_id: str
    epoch: int
    lanes: tuple[int, ...]
    alone: int | None = None
    controller: ElasticController = field(default_factory=ElasticController)
    left: int = 0
    pending_command: StartTrial | Pause | Resize | StopTrial | None = None
    halt_sent: bool = False
    since: float = 0.0
    waiting: list[OfTrial] = field(default_factory=list)
    lost_a_lane: bool = False
    finished: bool = False
    attempts: int = 0
    memory: tuple[float, float] | None = None
    latest: float = 0.0


class ElasticTrials:
    """The trials of a pool that train in several lanes.

    Args:
        lanes: the pool.
        process_group: what members talk through, as of :func:`fluid.elastic.make_group.make_group`.
    """

    def __init__(self, lanes: Lanes, process_group: str) -> None:
        self._lanes = lanes
        self._process_group = process_group
        self._trials: dict[str, _Elastic] = {}
        #: Iterations that an elastic trial in one lane still has to run.
        self._left: dict[str, int] = {}
        #: (trial, lane, term) of members that were asked to leave and whose answer the engine waits for.
        self._awaited: set[tuple[str, int, int]] = set()
        self._terms = itertools.count(1)
        self._handlers: dict[type, Callable[[_Elastic, Any], None]] = {
            StartTrial: self._start,
            RunIteration: self._run,
            Pause: self._pause,
            Resize: self._resize,
            StopTrial: self._stop,
            Save: self._save,
        }

    # -- what the engine asks ------------------------------------------------------------------------------

    def execute(self, command: OfTrial) -> bool:
        """Carries a command out, or keeps it for later; returns False if the trial trains in one lane."""
        trial = self._trials.get(command.trial_id)
        if trial is None:
            if not self._lanes.is_elastic(command.trial_id) or not _is_wide(command):
                self._count(command)
                return False
            trial = self._open(command)
        if isinstance(command, Call) and (trial.pending_command is None or isinstance(trial.pending_command, Pause)):
            return False
        if trial.pending_command is not None and not (
            isinstance(trial.pending_command, Pause) and isinstance(command, StopTrial)
        ):
            trial.waiting.append(command)
        else:
            self._handlers[type(command)](trial, command)
            self._advance(trial)
        return True

    def forget(self, trial_id: str) -> None:
        """Forgets a trial that will not be named any more."""
        self._left.pop(trial_id, None)

    def _count(self, command: OfTrial) -> None:
        """Keeps count of how far a trial in one lane was told to run: one that is about to end need not wait."""
        if isinstance(command, StartTrial):
            self._left[command.trial_id] = command.iterations
        elif isinstance(command, RunIteration):
            self._left[command.trial_id] = self._left.get(command.trial_id, 0) + command.iterations
        elif isinstance(command, (Pause, StopTrial)):
            self._left.pop(command.trial_id, None)

    def _open(self, command: OfTrial) -> _Elastic:
        here = command.old_lane_ids if isinstance(command, Resize) else command.lane_ids
        alone = here[0] if not isinstance(command, StartTrial) and len(here) == 1 else None
        trial = _Elastic(command.trial_id, next(self._terms), here, alone)
        self._trials[trial.trial_id] = trial
        return trial

    def _start(self, trial: _Elastic, command: StartTrial) -> None:
        self._set_goal(trial, command)
        for lane_id in command.lane_ids:
            self._prepare(trial, lane_id, command)

    def _run(self, trial: _Elastic, command: RunIteration) -> None:
        self._dismiss(trial)  # A resize that was called off.
        if trial.alone is None:
            trial.left += command.iterations
        else:
            self._close(trial, command)

    def _pause(self, trial: _Elastic, command: Pause) -> None:
        self._set_goal(trial, command)
        for lane_id in command.then:
            if self._lanes.is_up(lane_id) and lane_id not in trial.lanes:
                self._prepare(trial, lane_id)

    def _resize(self, trial: _Elastic, command: Resize) -> None:
        if not all(self._lanes.is_up(lane_id) for lane_id in command.lane_ids):
            trial.lost_a_lane = True  # The engine will hear of the lane, and ask for something else.
            return
        paused_at = trial.since
        self._set_goal(trial, command)
        trial.since = min(trial.since, paused_at or trial.since)
        self._dismiss(trial, but=command.lane_ids)
        for lane_id in command.lane_ids:
            if lane_id != trial.alone and not trial.controller.is_member(lane_id):
                self._prepare(trial, lane_id)
        if trial.alone is not None:
            lane_id, trial.alone = trial.alone, None
            adopt = m.AdoptResident(trial.trial_id, self._terms_of(trial))
            self._act(trial, trial.controller.adopt(lane_id, adopt))

    def _stop(self, trial: _Elastic, command: StopTrial) -> None:
        self._dismiss(trial, but=command.lane_ids)
        if trial.alone is not None:
            self._close(trial, command)
        else:
            self._set_goal(trial, command)

    def _save(self, trial: _Elastic, command: Save) -> None:
        """Has the first lane save it; if it is to leave, it leaves the others first, without a word to the engine."""
        if not command.drop:
            self._lanes.send(trial.lanes[0], m.SaveResident(trial.trial_id, drop=False))
            return
        self._dismiss(trial)  # A resize that was called off.
        if trial.alone is not None:
            self._close(trial, command)
            return
        self._set_goal(trial, Resize(trial.trial_id, trial.lanes[:1], trial.lanes, 0))
        trial.halt_sent = True
        trial.waiting.append(Save(trial.trial_id, trial.lanes[:1], drop=True))

    def _set_goal(self, trial: _Elastic, pending_command: StartTrial | Pause | Resize | StopTrial) -> None:
        trial.pending_command, trial.halt_sent, trial.since, trial.attempts = (
            pending_command,
            False,
            self._lanes.now(),
            0,
        )

    def _prepare(self, trial: _Elastic, lane_id: int, command: StartTrial | None = None) -> None:
        if not trial.controller.is_member(lane_id):
            start = command or StartTrial(trial.trial_id, (lane_id,), 0)
            self._act(trial, trial.controller.prepare(lane_id, start))

    def _dismiss(self, trial: _Elastic, but: tuple[int, ...] = ()) -> None:
        """Has those leave who were prepared for a resize that does not come about."""
        controller = trial.controller
        for lane_id in controller.newcomers:
            if lane_id not in but:
                self._act(trial, controller.dismiss(lane_id))

    # -- what lanes say ------------------------------------------------------------------------------------

    def hear(self, lane_id: int, message: m.FromMember, at: float) -> None:
        """Takes what a member says.

        Args:
            lane_id: where it is.
            message: what it says.
            at: when, on the driver's clock.
        """
        if isinstance(message.message, Left):
            key = (message.trial_id, lane_id, message.epoch)
            if key in self._awaited:
                self._awaited.discard(key)
                self._lanes.report(TrialReleased(at, message.trial_id, lane_id))
            return
        trial = self._trials.get(message.trial_id)
        if trial is None or trial.epoch != message.epoch:
            return
        if isinstance(message.message, MemberIterated):
            trial.memory = message.memory
        self._act(trial, trial.controller.receive(lane_id, message.message), at)
        self._advance(trial)

    def follow(self, event: Event) -> None:
        """Looks at what lanes report of themselves, which the engine sees, too."""
        if isinstance(event, IterationDone):
            if event.trial_id in self._left:
                self._left[event.trial_id] = 0 if event.finished else max(0, self._left[event.trial_id] - 1)
                if event.trial_id in self._trials:
                    self._advance(self._trials[event.trial_id])
        elif isinstance(event, TrialPaused):
            trial = self._trials.get(event.trial_id)
            if trial is not None and trial.alone == event.lane_id and isinstance(trial.pending_command, Pause):
                trial.pending_command, trial.since = None, event.at
                self._left.pop(event.trial_id, None)
                self._catch_up(trial)
        elif isinstance(event, TrialFailed):
            self._failed(event)

    def _failed(self, event: TrialFailed) -> None:
        trial = self._trials.get(event.trial_id)
        if trial is None:
            self._left.pop(event.trial_id, None)
            return
        lane_id, failed = event.lane_id, MemberRaised(event.failure.message, event.failure.traceback)
        newcomer = lane_id not in trial.lanes and (
            trial.pending_command is None or isinstance(trial.pending_command, Pause)
        )
        self._act(trial, trial.controller.receive(lane_id, failed), event.at)
        if newcomer:
            self._advance(trial)  # It was still to go there: the engine will let it stay where it is.
        else:
            self._fall_apart(trial)

    def lane_lost(self, lane_id: int) -> None:
        """Takes note that a lane is gone, of which the engine has been told."""
        self._awaited = {key for key in self._awaited if key[1] != lane_id}
        for trial in list(self._trials.values()):
            trial.latest = self._lanes.now()
            if lane_id == trial.alone:
                self._fall_apart(trial)
            elif trial.controller.is_member(lane_id):
                self._lost(trial, lane_id)

    def _lost(self, trial: _Elastic, lane_id: int) -> None:
        pending_command, controller = trial.pending_command, trial.controller
        is_newcomer = lane_id in controller.newcomers
        self._act(trial, controller.member_lost(lane_id))
        if isinstance(pending_command, StartTrial):
            self._fall_apart(trial)
            return
        if not isinstance(pending_command, StopTrial) and (isinstance(pending_command, Resize) or not is_newcomer):
            trial.pending_command, trial.lost_a_lane = None, True
            trial.lanes = tuple(lane for lane in trial.lanes if lane != lane_id)
            self._catch_up(trial)
        if trial.trial_id in self._trials:
            self._advance(trial)

    # -- getting on ----------------------------------------------------------------------------------------

    def _act(self, trial: _Elastic, actions: list[Action], at: float | None = None) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(trial, action)
            elif isinstance(action, Reported):
                self._report_iteration(trial, action, self._lanes.now() if at is None else at)
            elif isinstance(action, AllHalted):
                trial.finished |= action.finished
                trial.left = 0 if trial.finished else trial.left
            elif isinstance(action, Formed):
                self._formed(trial, action)

    def _send(self, trial: _Elastic, action: Send) -> None:
        if isinstance(action.message, StartTrial):
            membership = self._terms_of(trial)._replace(takes_over=action.message is not trial.pending_command)
            self._lanes.set_up(action.member, action.message, membership)
        elif isinstance(action.message, m.AdoptResident):
            self._lanes.send(action.member, action.message)
        else:
            if isinstance(action.message, Leave) and isinstance(trial.pending_command, StopTrial):
                self._awaited.add((trial.trial_id, action.member, trial.epoch))
            self._lanes.send(action.member, m.ToMember(trial.trial_id, action.message))

    def _advance(self, trial: _Elastic) -> None:
        """Does the next thing that can be done towards what the trial is to do."""
        phase = trial.controller.phase
        if self._trials.get(trial.trial_id) is not trial or phase in (Phase.RENDEZVOUS, Phase.JOINING, Phase.BREAKING):
            return
        pending_command = trial.pending_command
        if isinstance(pending_command, StopTrial):
            if phase is Phase.RUNNING:
                self._halt(trial)
            else:
                self._let_go(trial, pending_command)
        elif isinstance(pending_command, Resize):
            if phase is Phase.RUNNING:
                return  # Its last iteration has been reported; soon all members will have said that they stand still.
            staying = (lane_id for lane_id in trial.controller.ranks if trial.controller.is_member(lane_id))
            if all(trial.controller.is_ready(lane_id) for lane_id in (*pending_command.lane_ids, *staying)):
                self._form(trial, pending_command.lane_ids)
        elif trial.lost_a_lane:
            return
        elif isinstance(pending_command, StartTrial):
            if all(trial.controller.is_ready(lane_id) for lane_id in pending_command.lane_ids):
                self._form(trial, pending_command.lane_ids)
        elif phase is Phase.BROKEN:
            self._form(trial, trial.lanes)  # Nobody is gone.
        elif isinstance(pending_command, Pause):
            self._advance_to_pause(trial, pending_command)
        elif phase is Phase.IDLE and trial.left > 0 and trial.alone is None:
            self._act(trial, trial.controller.run(trial.left))

    def _advance_to_pause(self, trial: _Elastic, pending_command: Pause) -> None:
        controller = trial.controller
        settled = all(controller.is_ready(lane_id) for lane_id in controller.newcomers)
        if trial.alone is not None:
            if not trial.halt_sent and (settled or not self._left.get(trial.trial_id, 0)):
                trial.halt_sent = True
                self._lanes.send(trial.alone, m.PauseResident(trial.trial_id, may_move=not pending_command.then))
        elif controller.phase is Phase.RUNNING:
            if settled:
                self._halt(trial)
        else:
            trial.pending_command, trial.left, trial.since = None, 0, self._lanes.now()
            self._report(trial, TrialPaused(trial.since, trial.trial_id, trial.lanes[0], controller.iteration))
            self._catch_up(trial)

    def _halt(self, trial: _Elastic) -> None:
        if not trial.halt_sent:
            trial.halt_sent = True
            self._act(trial, trial.controller.halt())

    def _form(self, trial: _Elastic, lanes: tuple[int, ...]) -> None:
        if trial.attempts > _ATTEMPTS:
            failure = Failure("error", f"its {len(lanes)} lanes cannot talk to each other; see their logs")
            self._lanes.send(trial.lanes[0], m.ToMember(trial.trial_id, Leave()))
            self._lanes.report(TrialFailed(self._lanes.now(), trial.trial_id, trial.lanes[0], failure))
            self._act(trial, trial.controller.member_lost(trial.lanes[0]))
            self._fall_apart(trial)
            return
        trial.attempts += 1
        self._act(trial, trial.controller.form(lanes))

    def _formed(self, trial: _Elastic, formed: Formed) -> None:
        pending_command, now = trial.pending_command, self._lanes.now()
        trial.attempts = 0
        if isinstance(pending_command, StartTrial):
            trial.left = pending_command.iterations
            seconds = now - trial.since
            self._report(trial, TrialStarted(now, trial.trial_id, trial.lanes[0], formed.iteration, seconds))
        elif isinstance(pending_command, Resize):
            trial.lanes, trial.left, trial.lost_a_lane = pending_command.lane_ids, pending_command.iterations, False
            if pending_command.done is not None:
                # Some iterations may have been reported since the engine counted those that are left.
                trial.left -= trial.controller.iteration - pending_command.done
            if not trial.halt_sent:
                self._report(trial, ResizeDone(now, trial.trial_id, now - trial.since, trial.lanes[0]))
        elif isinstance(pending_command, StopTrial):
            trial.lanes = tuple(lane_id for lane_id in trial.lanes if lane_id not in pending_command.lane_ids)
        if not isinstance(pending_command, Pause):
            trial.pending_command = None
        trial.halt_sent = False
        trial.left = 0 if trial.finished else trial.left
        if len(formed.members) == 1 and trial.pending_command is None:
            self._close(trial, RunIteration(trial.trial_id, trial.lanes, trial.left) if trial.left > 0 else None)
        else:
            self._catch_up(trial)

    def _let_go(self, trial: _Elastic, pending_command: StopTrial) -> None:
        """Has lanes leave that stand still, or all of them."""
        controller = trial.controller
        rest = tuple(
            lane for lane in trial.lanes if lane not in pending_command.lane_ids and lane in controller.survivors
        )
        if rest and not trial.lost_a_lane:
            self._form(trial, rest)
            return
        for lane_id in pending_command.lane_ids:
            if controller.is_member(lane_id):
                self._lanes.send(lane_id, m.ReleaseResident(trial.trial_id))
            elif self._lanes.is_up(lane_id):
                self._lanes.report(TrialReleased(self._lanes.now(), trial.trial_id, lane_id))
        for lane_id in set(controller.members) - set(pending_command.lane_ids):
            self._lanes.send(lane_id, m.ToMember(trial.trial_id, Leave()))
        self._close(trial)

    # -- the end -------------------------------------------------------------------------------------------

    def _close(self, trial: _Elastic, command: OfTrial | None = None) -> None:
        """Leaves a trial to its one lane, or to none."""
        del self._trials[trial.trial_id]
        for following in (*([command] if command is not None else []), *trial.waiting):
            self._lanes.obey(following)

    def _fall_apart(self, trial: _Elastic) -> None:
        """Gives up a trial that failed, or whose lane is gone: the engine stops it in the lanes it knows of."""
        known = (
            trial.pending_command.lane_ids if isinstance(trial.pending_command, (StartTrial, Resize)) else trial.lanes
        )
        for lane_id in set(trial.controller.members) - set(known):
            self._lanes.send(lane_id, m.ToMember(trial.trial_id, Leave()))
        if isinstance(trial.pending_command, StopTrial):
            trial.waiting.insert(0, trial.pending_command)
        self._left.pop(trial.trial_id, None)
        self._close(trial)

    def _catch_up(self, trial: _Elastic) -> None:
        """Carries out what came while something else was under way."""
        waiting, trial.waiting = trial.waiting, []
        for command in waiting:
            self._lanes.obey(command)

    # -- what the engine is told ---------------------------------------------------------------------------

    def _report_iteration(self, trial: _Elastic, reported: Reported, at: float) -> None:
        trial.left = max(0, trial.left - 1)
        metrics = metrics_of(reported.metrics)
        finished = bool(metrics.get("done", False))
        trial.finished |= finished
        memory = None if trial.memory is None else MemoryNeed(*trial.memory)
        at = max(at, trial.latest)
        seconds = reported.seconds or 0.0
        self._report(
            trial,
            IterationDone(at, trial.trial_id, trial.lanes[0], reported.iteration, seconds, metrics, memory, finished),
        )

    def _report(self, trial: _Elastic, event: Event) -> None:
        trial.latest = max(trial.latest, event.at)
        self._lanes.report(event)

    def _terms_of(self, trial: _Elastic) -> m.Membership:
        return m.Membership(trial.epoch, self._process_group)


def _is_wide(command: OfTrial) -> bool:
    """Whether a command is about several lanes."""
    if isinstance(command, Resize):
        return len(command.lane_ids) > 1 or len(command.old_lane_ids) > 1
    if isinstance(command, Pause):
        return len(command.then) > 1 or len(command.lane_ids) > 1
    return len(command.lane_ids) > 1 and not isinstance(command, StopTrial)
