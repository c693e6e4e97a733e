"""Requests of trials to their submitter, on the local backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.results.records import Result
from fluid.session.listeners import TrialListener, TrialRequest
from fluid.trainables.driver_link import driver_link
from fluid.trialgroup import Trial, TrialGroup


class Point:
    """A class that only this process's file defines; lanes get it by value."""

    def __init__(self, x: float) -> None:
        self.x = x


def ask(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"got": driver_link().ask({"name": config["name"], "point": Point(0.5)})}


def ask_in_vain(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        driver_link().ask("anything")
    except Exception as error:
        yield {"raised": f"{type(error).__name__}: {error}"}


class Answering(TrialListener):
    """Answers in a thread of its own, as the submitter's code may take long."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def on_request(self, request: TrialRequest) -> None:
        threading.Thread(target=self._answer, args=(request,)).start()

    def _answer(self, request: TrialRequest) -> None:
        asked = request.read()
        request.answer((request.trial_id, asked["name"], asked["point"].x))
        request.answer("too late")

    def on_result(self, result: Result) -> None:
        self.results.append(result)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path_factory.mktemp("fluid"), verbose=0) as made:
        yield made


@pytest.mark.slow
def test_the_submitter_answers(executor: FluidExecutor) -> None:
    listener = Answering()
    trials = [Trial(ask, {"name": name}, trial_id=name) for name in ("x", "y", "z")]
    assert executor.submit_trialgroup(TrialGroup(trials), listener).wait()
    got = {result.trial_id: result.metrics["got"] for result in listener.results}
    assert got == {name: (name, name, 0.5) for name in ("x", "y", "z")}


def test_a_group_without_a_listener_answers_nothing(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(TrialGroup([Trial(ask_in_vain, trial_id="alone")]))
    (result,) = handle.results()
    assert result.metrics["raised"] == "RequestRefusedError: trial 'alone' has no listener that could answer"


class Silent(TrialListener):
    """Has nothing to say to requests."""

    def on_result(self, result: Result) -> None:
        self.raised = result.metrics["raised"]


class Broken(Silent):
    def on_request(self, request: TrialRequest) -> None:
        raise OSError("the search has no disk")


class Unable(Silent):
    def on_request(self, request: TrialRequest) -> None:
        request.answer(threading.Lock())


@pytest.mark.parametrize(
    ("listener", "error"),
    [
        (Silent(), "RequestRefusedError: the submitter of trial 'Silent' answers no requests"),
        (Broken(), "OSError: the search has no disk"),
        (Unable(), "TypeError: <unlocked _thread.lock object"),
    ],
)
def test_what_is_not_answered_raises_in_the_trial(executor: FluidExecutor, listener: Silent, error: str) -> None:
    handle = executor.submit_trialgroup(TrialGroup([Trial(ask_in_vain, trial_id=type(listener).__name__)]), listener)
    assert handle.wait()
    assert listener.raised.startswith(error)


def test_the_wait_for_an_answer_is_no_time_of_the_iteration(executor: FluidExecutor) -> None:
    class Slow(Answering):
        def _answer(self, request: TrialRequest) -> None:
            began.set()
            go_on.wait()
            super()._answer(request)

    began, go_on, listener = threading.Event(), threading.Event(), Slow()
    handle = executor.submit_trialgroup(TrialGroup([Trial(ask, {"name": "s"}, trial_id="s")]), listener)
    began.wait()
    threading.Timer(1.0, go_on.set).start()
    assert handle.wait()
    assert handle.makespan is not None and listener.results[0].seconds < 0.9


@pytest.mark.slow
def test_an_executor_that_is_closed_does_not_wait_for_an_answer(tmp_path: Path) -> None:
    asked = threading.Event()
    kept: list[TrialRequest] = []

    class Keeping(TrialListener):
        def on_request(self, request: TrialRequest) -> None:
            kept.append(request)
            asked.set()

    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path, verbose=0) as own:
        own.submit_trialgroup(TrialGroup([Trial(ask_in_vain, trial_id="late")]), Keeping())
        asked.wait()
    kept[0].answer("nobody listens")  # Without effect.
