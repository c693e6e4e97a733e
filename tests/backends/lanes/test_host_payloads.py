"""Messages whose payloads a launcher keeps on a lane's host."""

from __future__ import annotations

import functools
import select
import socket
from collections.abc import Iterator
from typing import Any, cast

import lane_messages as to
import pytest
from msgspec import structs

from fluid.backends.base import Keeping, LaneConnected, Launcher
from fluid.backends.hosts.sockets import FramedSocket
from fluid.backends.lanes.connections import Deferred, LaneConnections
from fluid.backends.lanes.registry import HostPayloads
from fluid.elastic.messages import Prepared
from fluid.engine.commands import StopTrial
from fluid.engine.events import Failure, PausePurpose, TrialFailed, TrialPaused, TrialStarted
from fluid.lane.protocol import FromMember, KeptPayload, ShipTrainable, ToLane
from fluid.wire import decoder

TRAINABLE = ShipTrainable(0, b"trainable", ())
START = to.set_up("a", 0, b"config", 1)


class Keeper:
    """The part of a launcher that keeps payloads."""

    def __init__(self) -> None:
        self.keeping = dict.fromkeys(("t", "c"), Keeping.UNDER_WAY)
        self.kept: dict[str, bytes] = {}

    def keep(self, lane_id: int, name: str, data: bytes) -> Keeping:
        self.kept[name] = data
        return self.keeping[name]

    def drop(self, name: str) -> None:
        self.kept.pop(name, None)


class Driver:
    """Connections with one lane, and that lane's end."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.lanes = LaneConnections(cast(Launcher, self.keeper))
        self.payloads = HostPayloads(cast(Launcher, self.keeper))
        for name in self.keeper.keeping:
            self.payloads.add(name)
        ours, theirs = socket.socketpair()
        self.lane = self.lanes.add(0)
        self.lanes.connect(LaneConnected(0, ours))
        self.wire = FramedSocket(theirs, decoder(ToLane))

    def put(self, *messages: Any) -> None:
        for message in messages:
            self.lanes.put(self.lane, message)
        self.lanes.flush()

    def large(self, name: str, whole: Any) -> Deferred:
        return Deferred(functools.partial(self.payloads.shipment, name=name, whole=whole))

    def sent(self) -> list[Any]:
        self.lanes.flush()
        has_come = select.select([self.wire.fileno()], [], [], 0.0)[0]
        return self.wire.receive() if has_come else []


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.wire.close()
    made.lanes.close()


def test_a_lane_is_told_of_a_payload_once_its_host_has_it_and_of_nothing_after_it_before(driver: Driver) -> None:
    driver.put(to.run("b", 1), driver.large("t", TRAINABLE), driver.large("c", START), to.run("a", 1))
    assert driver.sent() == [to.run("b", 1)]
    assert driver.keeper.kept == {"t": b"trainable"}
    driver.keeper.keeping["t"] = Keeping.DONE
    assert driver.sent() == [structs.replace(TRAINABLE, payload=KeptPayload("t"))]
    assert driver.sent() == []
    assert driver.keeper.kept["c"] == b"config"
    driver.keeper.keeping["c"] = Keeping.DONE
    assert driver.sent() == [structs.replace(START, config=KeptPayload("c")), to.run("a", 1)]
    driver.put(to.run("a", 2))
    assert driver.sent() == [to.run("a", 2)]


def test_a_payload_that_a_host_refuses_is_sent_whole(driver: Driver) -> None:
    driver.keeper.keeping = dict.fromkeys(("t", "c"), Keeping.REFUSED)
    driver.put(driver.large("t", TRAINABLE), driver.large("c", START))
    assert driver.sent() == [TRAINABLE, START]


def test_a_payload_that_is_dropped_before_it_left_is_sent_whole(driver: Driver) -> None:
    driver.put(driver.large("c", START), driver.large("t", TRAINABLE))
    driver.payloads.remove("c")
    assert driver.keeper.kept == {}
    assert driver.sent() == [START]
    assert driver.keeper.kept == {"t": b"trainable"}


def test_a_lane_that_is_to_end_does_not_wait_for_payloads(driver: Driver) -> None:
    driver.put(driver.large("c", START))
    driver.lane.leaving = True
    driver.put(to.shut_down())
    assert driver.sent() == [StopTrial("", ()), to.shut_down()]


@pytest.mark.parametrize(
    "answer",
    [
        TrialStarted(0.0, "a", 0, iteration=0, seconds=0.0),
        TrialFailed(0.0, "a", 0, Failure("error", "")),
        FromMember(0.0, "a", 1, Prepared(0, "", 0.0)),
    ],
    ids=["started", "failed", "prepared"],
)
def test_a_config_is_needed_until_every_lane_has_answered(answer: Any) -> None:
    keeper = Keeper()
    payloads = HostPayloads(cast(Launcher, keeper))

    def is_dropped() -> bool:
        keeper.kept["c"] = b""
        payloads.drop_unread("c")
        return "c" not in keeper.kept

    payloads.starting(0, "a", "c")
    payloads.starting(0, "a", "c")
    payloads.starting(1, "b", "c")
    payloads.hear(0, TrialPaused(0.0, "a", 0, iteration=0, purpose=PausePurpose.RESIZE))
    payloads.hear(1, answer)  # Of a trial that it was not told to start.
    payloads.lane_is_gone(1)
    payloads.hear(0, answer)
    assert not is_dropped()
    payloads.hear(0, answer)
    assert is_dropped()
    payloads.hear(0, answer)


def test_the_config_of_a_forgotten_trial_is_dropped_once_no_lane_is_to_read_it() -> None:
    keeper = Keeper()
    keeper.kept = {"c": b"", "d": b""}
    payloads = HostPayloads(cast(Launcher, keeper))
    for lane_id, name in enumerate("cd"):
        payloads.add(name)
        payloads.starting(lane_id, name, name)
        payloads.remove(name)
    assert keeper.kept.keys() == {"c", "d"}
    payloads.hear(0, TrialStarted(0.0, "c", 0, iteration=0, seconds=0.0))
    assert keeper.kept.keys() == {"d"}
    payloads.lane_is_gone(1)
    assert not keeper.kept
