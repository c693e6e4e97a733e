"""Requests of a lane's trials to the driver: messages out, messages in."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lane_messages as to
import pytest
from msgspec import structs

from fluid.engine.events import IterationDone, LaneReady, TrialAsked, TrialFailed
from fluid.errors import FluidError
from fluid.trainables.driver_link import RequestRefusedError, driver_link, dump_message
from fluid.trainables.exception_pickle import dump_exception


@pytest.fixture
def lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Any:
    made = fork(make_server(), 0)
    made.receive(LaneReady)
    return made


def ask_each_time(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    link = driver_link()
    for iteration in range(5):
        try:
            yield {"got": link.ask((iteration, config["name"]))}
        except LookupError as error:
            yield {"raised": repr(error)}


def tell_of_refusals(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        driver_link().ask("first")
    except RequestRefusedError as error:
        with open(config["path"], "w", encoding="utf-8") as file:
            file.write(str(error))
        raise
    yield {}


def answer(lane: Any, asked: TrialAsked, value: Any) -> None:
    lane.send(to.answer(asked.trial_id, asked.request_id, dump_message(value)))


def test_an_answer_reaches_the_iteration_that_asked(lane: Any) -> None:
    lane.start("a", ask_each_time, {"name": "x"}, 2)
    for iteration, value in enumerate([0.25, {"list": [1, None]}]):
        asked = lane.receive(TrialAsked)
        assert (asked.trial_id, pickle.loads(asked.payload)) == ("a", (iteration, "x"))
        answer(lane, asked, value)
        assert lane.receive(IterationDone).metrics == {"got": value}


def test_an_exception_in_place_of_an_answer_is_raised(lane: Any) -> None:
    lane.start("a", ask_each_time, {"name": "x"}, 2)
    asked = lane.receive(TrialAsked)
    lane.send(to.answer("a", asked.request_id, dump_exception(KeyError("why")), True))
    assert lane.receive(IterationDone).metrics == {"raised": "KeyError('why')"}
    asked = lane.receive(TrialAsked)
    answer(lane, structs.replace(asked, request_id=99), "to another request")
    answer(lane, asked, "right")
    assert lane.receive(IterationDone).metrics == {"got": "right"}


def test_messages_that_come_while_a_trial_waits_are_obeyed_afterwards(lane: Any) -> None:
    lane.start("a", ask_each_time, {"name": "x"}, 1)
    asked = lane.receive(TrialAsked)
    lane.start("b", ask_each_time, {"name": "y"}, 1)
    lane.send(to.run("a", 1))
    answer(lane, asked, 1)
    got = {}
    while len(got) < 2:  # Both run on, in the lane's order.
        message = lane.receive(TrialAsked)
        got[pickle.loads(message.payload)] = message
        answer(lane, message, 2)
    assert set(got) == {(1, "x"), (0, "y")}


@pytest.mark.parametrize("message", [to.release("a"), to.shut_down()])
def test_a_trial_that_is_to_leave_is_refused_at_once(lane: Any, message: Any, tmp_path: Any) -> None:
    path = tmp_path / "refused"
    lane.start("a", tell_of_refusals, {"path": str(path)}, 1)
    lane.receive(TrialAsked)
    lane.send(message)
    assert lane.receive(TrialFailed).failure.message == "RequestRefusedError: trial 'a' has ended"
    assert path.read_text() == "trial 'a' has ended"


def test_threads_of_a_trial_may_ask_at_the_same_time(lane: Any) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        link, got = driver_link(), {}

        def ask(number: int) -> None:
            got[number] = link.ask(number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield {"right": got == {0: 0, 1: 10, 2: 20}}

    lane.start("a", train, {}, 1)
    asked = [lane.receive(TrialAsked) for _ in range(3)]
    for one in reversed(asked):
        answer(lane, one, 10 * pickle.loads(one.payload))
    assert lane.receive(IterationDone).metrics == {"right": True}


def test_a_process_that_the_trial_started_cannot_ask(lane: Any) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        link = driver_link()
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                link.ask(1)
            except FluidError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        yield {"child": os.read(reader, 1000).decode()}

    lane.start("a", train, {}, 1)
    assert "ask in the trial itself" in lane.receive(IterationDone).metrics["child"]


def test_only_a_trials_code_has_a_link() -> None:
    with pytest.raises(FluidError, match="only the code of a trial"):
        driver_link()


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match=r"lock.*cannot be pickled"):
        dump_message(threading.Lock())
