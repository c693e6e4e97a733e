"""A lane's part in a trial of several lanes: messages in, messages out."""

from __future__ import annotations

from typing import Any

import lane_messages as to
import pytest

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")

from elastic.trainables import Regression  # noqa: E402

from fluid.elastic.groups.rendezvous import RendezvousStore  # noqa: E402
from fluid.elastic.messages import (  # noqa: E402
    LOOPBACK,
    Abort,
    Broken,
    Halted,
    Join,
    Joined,
    Leave,
    Left,
    MemberIterated,
    Prepared,
    RunMember,
    StoreGet,
    StorePut,
)
from fluid.engine.events import IterationDone, TrialFailed, TrialPaused, TrialReleased  # noqa: E402
from fluid.lane.protocol import AdoptResident, FromMember, Membership, ShipTrainable, ToMember  # noqa: E402
from fluid.trainables.pickling import dump_config, dump_trainable  # noqa: E402

MEMBERSHIP = Membership(7, "torch")


def receive_from_member(lane: Any, kind: type | tuple[type, ...]) -> Any:
    """Returns the next message of a member, which must be of that kind, or of one of those kinds."""
    said = lane.receive(FromMember, "a")
    assert said.epoch == MEMBERSHIP.epoch and isinstance(said.message, kind), said
    return said.message


def send_to_member(lane: Any, message: Any) -> None:
    lane.send(ToMember("a", message))


def loss_of(message: Any) -> float:
    metrics = message.metrics
    return float((metrics if isinstance(metrics, dict) else metrics.decode())["loss"])


@pytest.fixture
def addresses() -> tuple[str, str]:
    """Of the machines of two lanes."""
    return (LOOPBACK, LOOPBACK)


@pytest.fixture
def pair(make_server: Any, fork: Any, addresses: tuple[str, str]) -> list[Any]:
    """Two lanes in which a trial is set up as a member."""
    server = make_server(preload=["torch"])
    lanes = [fork(server, number, address=address) for number, address in enumerate(addresses)]
    for lane in lanes:
        lane.send(ShipTrainable(0, dump_trainable(Regression), ()))
        lane.send(to.set_up("a", 0, dump_config({}), 0, membership=MEMBERSHIP))
    for lane, address in zip(lanes, addresses, strict=True):
        prepared = receive_from_member(lane, Prepared)
        assert (prepared.iteration, prepared.address) == (0, address)
    return lanes


def meet(
    lanes: list[Any], generation: int, sync: bool = True, addresses: tuple[str, str] = (LOOPBACK, LOOPBACK)
) -> None:
    for rank, lane in enumerate(lanes):
        send_to_member(lane, Join(generation, rank, len(lanes), addresses[rank], sync))
    store = RendezvousStore()
    #: The ranks that have not joined, and do not wait for a value.
    busy = list(range(len(lanes)))
    while busy:
        rank = busy.pop(0)
        message = receive_from_member(lanes[rank], (StorePut, StoreGet, Joined))
        if isinstance(message, Joined):
            assert message.generation == generation
            continue
        if isinstance(message, StorePut):
            busy.append(rank)
        for answer in store.receive(rank, message):
            send_to_member(lanes[answer.member], answer.message)
            busy.append(answer.member)


@pytest.mark.parametrize("addresses", [(LOOPBACK, LOOPBACK), (LOOPBACK, "127.0.0.3")])
def test_lanes_train_together_and_one_goes_on_alone(pair: list[Any], addresses: tuple[str, str]) -> None:
    trial = Regression()
    trial.setup({})
    expected = [float(trial.step()["loss"]) for _ in range(4)]
    meet(pair, 1, addresses=addresses)
    for lane in pair:
        send_to_member(lane, RunMember(1, 2))
    done = [receive_from_member(pair[0], MemberIterated) for _ in range(2)]
    for lane in pair:
        assert receive_from_member(lane, Halted) == Halted(1, 2, False)
    send_to_member(pair[1], Leave())
    receive_from_member(pair[1], Left)
    send_to_member(pair[0], Join(2, 0, 1, "", False))
    assert receive_from_member(pair[0], Joined).iteration == 2
    pair[0].send(to.run("a", 2))
    alone = [pair[0].receive(IterationDone, "a") for _ in range(2)]
    assert [one.iteration for one in alone] == [3, 4], "it goes on as a resident like any other"
    assert [loss_of(one) for one in (*done, *alone)] == pytest.approx(expected, abs=1e-5)


def test_a_resident_becomes_a_member_as_it_is(pair: list[Any]) -> None:
    send_to_member(pair[0], Join(1, 0, 1, "", False))
    receive_from_member(pair[0], Joined)
    pair[0].send(to.run("a", 3), to.pause("a"), AdoptResident("a", MEMBERSHIP))
    assert pair[0].receive(TrialPaused, "a").iteration <= 3
    iteration = receive_from_member(pair[0], Prepared).iteration
    meet(pair, 1)
    for lane in pair:
        send_to_member(lane, RunMember(1, 1))
    assert receive_from_member(pair[0], MemberIterated).iteration == iteration + 1
    assert receive_from_member(pair[1], Halted).iteration == iteration + 1, "the other one had taken its state"


def test_an_abort_is_heard_by_who_waits_for_others(pair: list[Any]) -> None:
    meet(pair, 1)
    send_to_member(pair[0], RunMember(1, 5))  # The other member is not told, and does not come.
    send_to_member(pair[0], Abort(1))
    assert receive_from_member(pair[0], Broken).iteration == 0
    send_to_member(pair[1], Abort(1))
    assert receive_from_member(pair[1], Broken).generation == 1
    meet(pair, 2, sync=False)
    for lane in pair:
        lane.send(to.release("a"))
    for lane in pair:
        lane.receive(TrialReleased, "a")


def test_what_is_no_elastic_trainable_cannot_become_a_member(make_server: Any, fork: Any) -> None:
    lane = fork(make_server(), 0)
    lane.send(
        ShipTrainable(0, dump_trainable(Plain), ()),
        to.set_up("a", 0, dump_config({}), 0),
        AdoptResident("a", MEMBERSHIP),
    )
    assert "ElasticTrainable" in lane.receive(TrialFailed, "a").failure.message


class Plain:
    fluid_elastic = True  # It says so, and is not.

    def step(self) -> dict[str, Any]:
        return {}

    def setup(self, config: dict[str, Any]) -> None:
        pass
