"""Members that connect before they are resized: what the controller tells them, and real groups that do it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import Controller, make_groups, meet, together  # noqa: E402
from elastic.quick import QuickRun  # noqa: E402
from elastic.test_controller import HERE, Trial  # noqa: E402
from elastic.test_torch_group import summed  # noqa: E402
from elastic.trainables import Regression  # noqa: E402

from fluid._clock import MonotonicClock  # noqa: E402
from fluid.elastic.groups.generation import GenerationBrokenError  # noqa: E402
from fluid.elastic.groups.torch_group import TorchConnection, TorchGroup  # noqa: E402
from fluid.elastic.members.protocol import MemberProtocol  # noqa: E402
from fluid.elastic.messages import (  # noqa: E402
    Abort,
    Connect,
    Connected,
    Disconnect,
    Formed,
    Halted,
    MembersConnected,
    StoreGet,
    StorePut,
    StoreValues,
)

CONFIG = {"optimizer": "adamw"}


@pytest.fixture
def trial() -> Trial:
    """Trains in members 1 and 2, generation 1, while 3 is ready."""
    made = Trial()
    made.ready(1, 2)
    made.form(1, 2)
    made.run()
    made.ready(3)
    made.take_events()
    return made


def connect(trial: Trial, *members: int) -> int:
    """Connects them; returns the number."""
    trial.do(trial.controller.connect(members))
    sent = trial.take_sent()
    assert [message for _, message in sent] == [
        Connect(sent[0][1].generation, rank, len(members), HERE) for rank in range(len(members))
    ]
    for member, message in sent:
        trial.receive(member, Connected(message.generation))
    assert trial.take_events() == [MembersConnected("")]
    return int(sent[0][1].generation)


def halt(trial: Trial) -> None:
    for member in trial.controller.ranks:
        trial.receive(member, Halted(trial.controller.generation, 1, False))
    trial.take_events()


def test_members_meet_while_the_old_generation_trains(trial: Trial) -> None:
    trial.do(trial.controller.connect([1, 2, 3]))
    assert trial.controller.is_connecting
    assert trial.take_sent() == [(rank + 1, Connect(2, rank, 3, HERE)) for rank in range(3)]
    trial.receive(3, StoreGet(2, 0, ("a",)))
    trial.receive(1, StorePut(2, "a", b"x"))
    trial.receive(1, StorePut(1, "b", b"of the generation that trains"))
    assert trial.take_sent() == [(3, StoreValues(2, 0, (b"x",)))]
    trial.receive(1, Connected(2))
    trial.receive(2, Connected(2))
    assert trial.controller.is_connecting and trial.take_events() == []
    trial.receive(3, Connected(2))
    assert not trial.controller.is_connecting and trial.take_events() == [MembersConnected("")]
    halt(trial)
    joins = trial.form(1, 2, 3, iteration=1)
    assert [(join.generation, join.connection) for join in joins] == [(3, 2)] * 3
    assert trial.take_events() == [Formed(3, (1, 2, 3), 1)]


def test_there_is_nothing_to_connect(trial: Trial) -> None:
    assert trial.controller.connect([1]) == []
    assert trial.controller.connect([1, 2]) == []
    assert trial.controller.connect([3]) == [], "the state is handed over first"
    connect(trial, 1, 2, 3)
    assert trial.controller.connect([1, 2, 3]) == []


def test_the_same_members_use_their_connections_again(trial: Trial) -> None:
    number = connect(trial, 1, 2, 3)
    halt(trial)
    trial.form(1, 2, 3, iteration=1)
    trial.run()
    assert trial.controller.connect([1, 2]) == []
    halt(trial)
    assert [join.connection for join in trial.form(1, 2, iteration=1)] == [1, 1]
    told = [send for send in trial.take_sent() if isinstance(send[1], Disconnect)]
    assert told == [(1, Disconnect(number)), (2, Disconnect(number))], "3 has left"


def test_other_members_than_those_that_connected(trial: Trial) -> None:
    number = connect(trial, 1, 2, 3)
    trial.do(trial.controller.dismiss(3))
    assert [send for send in trial.take_sent() if isinstance(send[1], Disconnect)] == [
        (1, Disconnect(number)),
        (2, Disconnect(number)),
    ]
    trial.ready(4)
    halt(trial)
    assert [join.connection for join in trial.form(1, 2, 4, iteration=1)] == [0, 0, 0]


@pytest.mark.parametrize("lost", [1, 3])
def test_a_member_is_lost_while_they_connect(trial: Trial, lost: int) -> None:
    trial.do(trial.controller.connect([1, 2, 3]))
    trial.take_sent()
    trial.do(trial.controller.member_lost(lost))
    assert not trial.controller.is_connecting
    assert trial.take_events() == [MembersConnected(f"member {lost} is gone")]
    left = [1, 2] if lost == 3 else [3]
    told = [member for member, message in trial.take_sent() if message == Disconnect(2)]
    assert told == left, "members of a broken generation close theirs by themselves"


def test_a_member_cannot_connect(trial: Trial) -> None:
    trial.do(trial.controller.connect([1, 2, 3]))
    trial.take_sent()
    trial.receive(2, Connected(2, "a port is closed"))
    assert trial.take_events() == [MembersConnected("a port is closed")]
    assert trial.take_sent() == [(member, Disconnect(2)) for member in (1, 2, 3)]
    trial.receive(1, Connected(2))
    assert trial.controller.connect([1, 2, 3]) == [], "once is enough"
    halt(trial)
    assert [join.connection for join in trial.form(1, 2, 3, iteration=1)] == [0, 0, 0]


def test_a_generation_that_breaks_loses_all_connections(trial: Trial) -> None:
    connect(trial, 1, 2, 3)
    trial.do(trial.controller.member_lost(2))
    assert trial.take_sent() == [(1, Abort(1)), (3, Disconnect(2))]
    assert trial.controller._connections.find((1, 2, 3)) == trial.controller._connections.find((1, 2)) == 0


def test_few_connections_are_kept(trial: Trial) -> None:
    trial.ready(4, 5, 6)
    halt(trial)
    for newcomer in (3, 4, 5, 6):
        trial.form(*range(1, newcomer + 1), iteration=1)
    assert [send for send in trial.take_sent() if isinstance(send[1], Disconnect)] == [
        *[(member, Disconnect(1)) for member in (1, 2)],
        *[(member, Disconnect(2)) for member in (1, 2, 3)],
    ]


# -- groups ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["gloo", "auto"])
def groups(request: pytest.FixtureRequest) -> list[TorchGroup]:
    """Two that train together in generation 1, and a newcomer."""
    return [*make_groups(2, backend=request.param), TorchGroup("cpu", request.param)]


def connect_groups(groups: list[TorchGroup], number: int) -> list[object]:
    controller = Controller(number)
    numbered = list(enumerate(groups))
    return together(numbered, lambda at: at[1].connect(controller.rendezvous(at[0]), at[0], len(groups)))


def join(groups: list[TorchGroup], generation: int, connection: int) -> None:
    controller = Controller(generation)

    def configure(group: TorchGroup) -> None:
        rank = groups.index(group)
        group.configure(controller.rendezvous(rank), rank, len(groups), connection)

    assert together(groups, configure) == [None] * len(groups)


def test_groups_connect_while_they_train(groups: list[TorchGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    two = groups[:2]
    connecting = threading.Thread(target=connect_groups, args=(groups, 2))
    connecting.start()
    while connecting.is_alive():
        assert together(two, summed) == [3.0, 3.0]
    connecting.join()
    monkeypatch.setattr(TorchConnection, "connect", None)  # No connection is made any more.
    join(groups, 3, 2)
    assert together(groups, summed) == [6.0] * 3
    groups[2].shutdown()
    join(two, 4, 1)
    assert together(two, summed) == [3.0, 3.0]


def test_connections_that_are_not_wanted_any_more(groups: list[TorchGroup]) -> None:
    controller = Controller(2)
    raised: list[Exception] = []

    def connect_alone() -> None:
        try:
            groups[0].connect(controller.rendezvous(0), 0, 3)
        except GenerationBrokenError as error:
            raised.append(error)

    waiting = threading.Thread(target=connect_alone)
    waiting.start()
    while not groups[0]._kept:
        pass
    groups[0].disconnect(2)
    waiting.join()
    assert [str(error) for error in raised] == ["generation 2 was aborted"] and not groups[0]._kept
    assert together(groups[:2], summed) == [3.0, 3.0], "the generation that trains is not touched"
    with pytest.raises(GenerationBrokenError, match="the connections 2 of generation 3 are closed"):
        groups[0].configure(Controller(3).rendezvous(0), 0, 3, 2)


def test_connections_that_are_not_wanted_any_more_before_their_thread_runs(
    groups: list[TorchGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin: list[threading.Thread] = []
    sent: list[object] = []
    member: Any = groups[2]  # Of a member, the protocol uses here what a group has, too.
    protocol = MemberProtocol(member, sent.append, MonotonicClock())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: begin.append(self))
        protocol.preview(Connect(2, 0, 3, HERE))
    protocol.preview(Disconnect(2))
    (thread,) = begin
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive() and not groups[2]._kept
    assert sent[-1] == Connected(2, "generation 2 was aborted")


def test_a_generation_that_breaks_closes_what_is_kept(groups: list[TorchGroup]) -> None:
    connect_groups(groups, 2)
    kept = [group._kept[2] for group in groups]
    for group in groups[:2]:
        group.abort(1)
        group.shutdown()
    assert [connection.guard.is_broken for connection in kept] == [True, True, False]
    meet(groups, 3)
    assert together(groups, summed) == [6.0] * 3


@pytest.mark.slow
def test_a_run_connects_its_spares_before_it_is_resized() -> None:
    with QuickRun(Regression, CONFIG, 1) as run:
        losses = [result.metrics["loss"] for result in run.run(2)]
        run.prepare(1)
        number = run._controller._connections.find((0, 1))
        assert number
        run.resize(2)
        assert run._controller._connection == number
        losses += [result.metrics["loss"] for result in run.run(2)]
    with QuickRun(Regression, CONFIG, 1) as run:
        assert losses == pytest.approx([result.metrics["loss"] for result in run.run(4)], rel=1e-5)
