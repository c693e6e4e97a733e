"""Messages that wait until it is known what they are to say: starts of trials whose checkpoints are elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import lane_messages as to
import pytest

from fluid._clock import VirtualClock
from fluid.backends.base import CheckpointSource, LaneConnected
from fluid.backends.hosts.sockets import FramedSocket
from fluid.backends.lanes.connections import Deferred, LaneConnection, LaneConnections
from fluid.backends.lanes.registry import HostPayloads, Registry
from fluid.backends.lanes.routing import TrialRouter
from fluid.engine.commands import StartTrial
from fluid.engine.events import Checkpoint
from fluid.lane.protocol import SetUpTrial, ToLane
from fluid.trainables.payload import payload_of
from fluid.wire import decoder


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config


class Lanes:
    """Connections to lanes, and the lanes' ends."""

    def __init__(self) -> None:
        unused: Any = None  # Only waiting needs a launcher.
        self.connections = LaneConnections(unused)
        self._ends: dict[int, FramedSocket] = {}

    def add(self, lane_id: int, host: str = "localhost") -> LaneConnection:
        connection = self.connections.add(lane_id)
        ours, theirs = socket.socketpair()
        self._ends[lane_id] = FramedSocket(theirs, decoder(ToLane))
        self.connections.connect(LaneConnected(lane_id, ours, host))
        return connection

    def received(self, lane_id: int) -> list[Any]:
        self.connections.flush()
        return self._ends[lane_id].receive()

    def close(self) -> None:
        self.connections.close()
        for end in self._ends.values():
            end.close()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.close()


def test_what_follows_a_message_that_is_not_known_yet_waits_for_it(lanes: Lanes) -> None:
    first, second = lanes.add(1), lanes.add(2)
    known: list[Any] = []

    def resolve(lane: LaneConnection) -> Any | None:
        assert lane is first
        return known[0] if known else None

    before, meant, after = to.run("a", 1), to.run("b", 2), to.release("b")
    for message in (before, Deferred(resolve), after):
        lanes.connections.put(first, message)
    lanes.connections.put(second, after)
    assert (lanes.received(1), lanes.received(2)) == ([before], [after])
    lanes.connections.put(first, before)
    assert lanes.received(1) == []
    known.append(meant)
    assert lanes.received(1) == [meant, after, before]


SOURCE = ("10.0.0.7", 1234)


def start(
    lanes: Lanes, clock: VirtualClock, checkpoint: Checkpoint | None, sources: dict[str, CheckpointSource]
) -> Callable[[], Any]:
    """Tells a lane on 10.0.0.8 to start a trial; returns a function that returns the message once it has arrived."""
    unused: Any = None  # No payload is large.
    payloads = HostPayloads(unused)
    registry = Registry(lambda modules: None, payloads)
    registry.register("a", payload_of(train, {}))
    router = TrialRouter(lanes.connections, registry, payloads, clock, "torch", sources.__getitem__)
    lanes.add(1, "10.0.0.8")
    router.execute(StartTrial("a", (1,), iterations=1, checkpoint=checkpoint))

    def sent() -> Any:
        messages = [message for message in lanes.received(1) if isinstance(message, SetUpTrial)]
        return messages[0] if messages else None

    return sent


def test_a_lane_is_told_where_a_checkpoint_of_another_machine_is_served(lanes: Lanes) -> None:
    checkpoint = Checkpoint(3, "/x", host="10.0.0.7")
    sent = start(lanes, VirtualClock(), checkpoint, {"10.0.0.7": CheckpointSource(SOURCE)})
    start_there = sent()
    assert (start_there.command.checkpoint, start_there.source) == (checkpoint, SOURCE)


@pytest.mark.parametrize("checkpoint", [None, Checkpoint(3, "/x", host="10.0.0.8")])
def test_a_lane_that_needs_none_from_elsewhere_is_told_nothing(lanes: Lanes, checkpoint: Checkpoint | None) -> None:
    assert start(lanes, VirtualClock(), checkpoint, {})().source is None


def test_a_trial_waits_for_the_host_of_the_machine_that_has_its_checkpoint(lanes: Lanes) -> None:
    sources = {"10.0.0.7": CheckpointSource(is_coming=True)}
    sent = start(lanes, VirtualClock(), Checkpoint(3, "/x", host="10.0.0.7"), sources)
    assert sent() is None
    sources["10.0.0.7"] = CheckpointSource(SOURCE)
    assert sent().source == SOURCE
    assert sent() is None


def test_it_does_not_wait_for_ever(lanes: Lanes) -> None:
    clock = VirtualClock()
    sources = {"10.0.0.7": CheckpointSource(is_coming=True)}
    checkpoint = Checkpoint(3, "/x", host="10.0.0.7")
    sent = start(lanes, clock, checkpoint, sources)
    assert sent() is None
    clock.advance_to(1e3)
    start_anyway = sent()
    assert (start_anyway.command.checkpoint, start_anyway.source) == (checkpoint, None)
