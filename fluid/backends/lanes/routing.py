"""Which lanes a command about a trial is for, and what of a lane's messages the engine is to know.

A trial is in one lane, or between two of them (:mod:`fluid.backends.lanes.elastic`), or it trains in several
(:mod:`fluid.backends.lanes.elastic`): that decides what its commands mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from fluid._clock import Clock
from fluid.backends.base import CheckpointSource
from fluid.backends.lanes.connections import Deferred, LaneConnection, LaneConnections
from fluid.backends.lanes.elastic import ElasticTrials, Migrations, OfTrial, PoolAction, SetUpMember, ToLane
from fluid.backends.lanes.registry import HostPayloads, Registry
from fluid.backends.lanes.times import located
from fluid.engine.commands import Resize, StartTrial, StopTrial
from fluid.engine.events import Event, TrialFailed, TrialForked, TrialReleased, TrialSaved
from fluid.errors import FluidError
from fluid.lane.protocol import FromMember, Membership, ModulesLoaded, PayloadMissing, SetUpTrial

#: Seconds for a host to be started on a machine that has a checkpoint; then the trial starts without it.
_SOURCE_S = 30.0


class TrialRouter:
    """Knows where each trial of a pool is, and so which lanes a command is for.

    Args:
        lanes: the connections.
        registry: what the trials are.
        payloads: their large ones.
        clock: the driver's.
        process_group: what the lanes of one trial communicate through: ``"torch"`` or ``"horovod"``.
        checkpoints_at: tells where the checkpoints of a machine, given its name, are served to others.

    Attributes:
        hears_all: whether lanes that were told to end are heard, too, as the session ends.
    """

    def __init__(
        self,
        lanes: LaneConnections,
        registry: Registry,
        payloads: HostPayloads,
        clock: Clock,
        process_group: str,
        checkpoints_at: Callable[[str], CheckpointSource],
    ) -> None:
        self.hears_all = False
        self._checkpoints_at = checkpoints_at
        self._lanes = lanes
        self._registry = registry
        self._payloads = payloads
        self._clock = clock
        self._migrations = Migrations()
        self._elastic = ElasticTrials(lanes.is_up, registry.is_elastic, clock, process_group)
        self._events: list[Event] = []
        #: Trials that must not begin afresh.
        self._must_restore: set[str] = set()

    def check(self, command: OfTrial) -> None:
        """Refuses a command that its trial cannot follow.

        Raises:
            FluidError: the trial was not registered, or cannot run in several lanes.
        """
        several = len(command.lane_ids) > 1 or (isinstance(command, Resize) and len(command.old_lane_ids) > 1)
        if several and not isinstance(command, StopTrial) and not self._registry.is_elastic(command.trial_id):
            raise FluidError(f"{command}: this trial can run in one lane only")
        if isinstance(command, (StartTrial, Resize)) and command.trial_id not in self._registry:
            raise FluidError(f"{command}: the trial was not registered")

    def execute(self, command: OfTrial) -> list[Event]:
        """Carries a command out, or keeps it for later; returns what the engine is to know at once."""
        if isinstance(command, StartTrial) and command.must_restore:
            self._must_restore.add(command.trial_id)
        self._execute(command)
        return self._take()

    def hear(self, lane: LaneConnection, message: Any) -> list[Event]:
        """Takes a message of a lane; returns what the engine is to know. One that was told to end is not heard."""
        self._payloads.hear(lane.lane_id, message)
        if isinstance(message, PayloadMissing):
            data = self._registry.payload(message.name)
            if data is not None:
                self._payloads.renew(lane.lane_id, message.name, data)
            return []
        if isinstance(message, ModulesLoaded):
            self._registry.preload(message.modules)
            return []
        if isinstance(message, TrialForked) and message.trial_id not in self._registry:
            return []  # It was forgotten meanwhile.
        if isinstance(message, TrialSaved) and message.kept is not None:
            self._registry.note_kept(message.trial_id, message.kept.value)
        at = self._time_of(message.at + lane.offset)
        is_heard = self.hears_all or not lane.leaving
        if isinstance(message, FromMember):
            if is_heard:
                self._perform(self._elastic.hear(lane.lane_id, message, at))
            return self._take()
        event, commands = self._migrations.translate(located(message, at, lane.host))
        if is_heard:
            self._events.append(event)
            self._perform(self._elastic.follow(event))
        for command in commands:
            self._execute(command)
        return self._take()

    def _time_of(self, at: float) -> float:
        """Returns when something happened, which is not later than now: clocks of machines drift apart.

        Raises:
            ValueError: it is no time.
        """
        now = self._clock.now()
        if -math.inf < at <= now:
            return at
        if not math.isfinite(at):
            raise ValueError(f"{at} is no time")
        return now

    def lane_leaves(self, lane_id: int) -> list[Event]:
        """Goes on without a lane that was lost or told to end: trials in several lanes do not count on it any more."""
        self._perform(self._elastic.lane_lost(lane_id))
        return self._take()

    def lane_is_gone(self, lane_id: int) -> None:
        """Gives up migrations from or to a lane of which no message will come any more."""
        self._migrations.lane_lost(lane_id)
        self._payloads.lane_is_gone(lane_id)

    def forget(self, trial_id: str) -> None:
        """Forgets a trial that no command will name again."""
        self._elastic.forget(trial_id)
        self._must_restore.discard(trial_id)

    def _execute(self, command: OfTrial) -> None:
        if self._migrations.is_leaving(command.trial_id):
            self._migrations.hold(command)
        elif self._elastic.concerns(command):
            self._perform(self._elastic.execute(command))
        else:
            self._elastic.count(command)
            self._execute_in_one_lane(command)

    def _execute_in_one_lane(self, command: OfTrial) -> None:
        if isinstance(command, StartTrial):
            self._set_up(command.lane_ids[0], command)
        elif isinstance(command, StopTrial):
            for lane_id in command.lane_ids:  # Each says for itself that it is rid of the trial.
                self._lanes.send(lane_id, command)
        elif isinstance(command, Resize):
            old = command.old_lane_ids[0]
            if old in self._lanes:
                self._lanes.send(old, self._migrations.begin(command, self._clock.now()))
        else:
            self._lanes.send(command.lane_ids[0], command)

    def _perform(self, actions: Iterable[PoolAction]) -> None:
        """Does what a trial in several lanes asks for, in order."""
        for action in actions:
            if isinstance(action, ToLane):
                self._lanes.send(action.lane_id, action.message)
            elif isinstance(action, SetUpMember):
                self._set_up(action.lane_id, action.command, action.membership)
            elif isinstance(action, Event):
                self._events.append(action)
            else:
                self._execute(action)

    def _set_up(self, lane_id: int, command: StartTrial, membership: Membership | None = None) -> None:
        """Tells a lane to set a trial up; with ``membership``, as a member."""
        if self._lanes.is_up(lane_id):
            if membership is None and command.trial_id in self._must_restore:  # It moves, say.
                command = structs.replace(command, must_restore=True)
            lane = self._lanes[lane_id]
            lane.trials.add(command.trial_id)
            key, config = self._registry.look_up(command.trial_id)
            if key not in lane.known:
                lane.known.add(key)
                self._ship(lane, key)
            name = self._registry.large_config(command.trial_id)
            if name is not None:
                self._payloads.starting(lane_id, command.trial_id, name)
            keep = self._registry.rule(command.trial_id)
            process = self._registry.process(command.trial_id, lane.threads)
            start = functools.partial(SetUpTrial, command, key, config, membership, process=process, keep=keep)
            is_known = command.checkpoint is None and name is None
            self._lanes.put(lane, start() if is_known else self._deferred(command, start, name))

    def _ship(self, lane: LaneConnection, key: int) -> None:
        """Makes a trainable known to a lane."""
        message, name = self._registry.shipment(key), self._registry.large_trainable(key)
        if name is None:
            self._lanes.put(lane, message)
        else:
            self._lanes.put(lane, Deferred(functools.partial(self._payloads.shipment, name=name, whole=message)))

    def _deferred(self, command: StartTrial, start: Callable[..., SetUpTrial], name: str | None) -> Deferred:
        """The message that starts a trial, once it is known where another machine's checkpoints are served, and the
        host has the config, if that is large and so has a name."""
        deadline = self._clock.now() + _SOURCE_S
        checkpoint = command.checkpoint

        def resolve(lane: LaneConnection) -> Any | None:
            address = None
            if checkpoint is not None and checkpoint.host != lane.host:
                source = self._checkpoints_at(checkpoint.host)
                if source.is_coming and self._clock.now() < deadline:
                    return None
                address = source.address
            whole = start(source=address)
            return whole if name is None else self._payloads.shipment(lane, name, whole)

        return Deferred(resolve)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        if self._registry.has_large_configs:
            for event in events:
                if isinstance(event, (TrialReleased, TrialFailed)):
                    name = self._registry.large_config(event.trial_id)
                    if name is not None:  # The trial has probably ended.
                        self._payloads.drop_unread(name)
        return events
