"""What a handle offers while trials run: calls, listeners, errors, and forgetting. On the local backend."""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import CallFailedError, TrialFailedError, TrialListener
from fluid.trialgroup import Trial, TrialGroup

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class LossIsNaNError(Exception):
    """What trials here raise."""


@dataclass(frozen=True)
class FrozenError(Exception):
    """Its attributes cannot be set."""

    code: int

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenError, (self.code,)


class NoMessageError(Exception):
    """Its message cannot be made."""

    def __str__(self) -> str:
        raise SystemExit


def no_message() -> None:
    raise NoMessageError


class Unreadable:
    """Cannot be unpickled, for a reason that cannot be told."""

    def __reduce__(self) -> tuple[Any, ...]:
        return no_message, ()


class Model:
    """Counts, can be saved, and has methods to call."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps, self.history = config, 0, []

    def step(self) -> dict[str, Any]:
        if self.steps + 1 == self.config.get("fails_at"):
            raise LossIsNaNError(self.steps)
        self.steps += 1
        return {"step": self.steps, "pid": os.getpid()}

    def note(self, *words: str, **more: Any) -> tuple[int, list[Any]]:
        self.history += [*words, *more.items()]
        return self.steps, self.history

    def fail(self) -> None:
        raise LossIsNaNError("called")

    def fail_frozen(self) -> None:
        raise FrozenError(3)

    def unreadable(self) -> Unreadable:
        return Unreadable()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "state.json").write_text(json.dumps([self.steps, self.history]))

    def load_checkpoint(self, folder: str) -> None:
        self.steps, self.history = json.loads((Path(folder) / "state.json").read_text())


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {}


class Listener(TrialListener):
    """Keeps what it is told, and acts on it."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.act: Callable[[Any], None] = lambda news: None
        self.threads: set[str] = set()

    def _tell(self, *news: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.told.put(news)
        self.act(news)

    def on_start(self, trial_id: str) -> None:
        self._tell("start", trial_id)

    def on_result(self, result: Result) -> None:
        self._tell("result", result.trial_id, result.iteration)

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._tell("end", trial_id, state, failure and failure.kind)

    def on_broken(self, error: BaseException) -> None:
        self._tell("broken", str(error))

    def hear(self, count: int) -> list[Any]:
        return [self.told.get(timeout=PATIENCE) for _ in range(count)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FluidExecutor]]:
    """Makes executors of one device, and closes them."""
    made: list[FluidExecutor] = []

    def make(**options: Any) -> FluidExecutor:
        options = {"backend": "local", "devices": 1, "run_dir": tmp_path / f"run-{len(made)}", "verbose": 0, **options}
        made.append(FluidExecutor(**options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def one(executor: FluidExecutor, trainable: Any = Model, listener: Any = None, **fields: Any) -> TrialGroupHandle:
    """Submits the trial a."""
    return executor.submit_trialgroup(TrialGroup([Trial(trainable, trial_id="a", **fields)]), listener)


def trials_of(executor: FluidExecutor) -> dict[str, Any]:
    """What the engine keeps of trials, by id."""
    return dict(executor._session._state.trials)


# -- calls ----------------------------------------------------------------------------------------------------------


def test_methods_are_called_in_order_and_return(make: Callable[..., FluidExecutor]) -> None:
    handle = one(make(), budget=3)
    before = handle.call("a", "note", "early")
    assert handle.wait(PATIENCE)
    answers = [handle.call("a", "note", "one"), handle.call("a", "note", "two", x=2)]
    handle.extend("a", 2)
    assert handle.wait(PATIENCE)
    assert before.result(PATIENCE)[1] == ["early"]
    assert answers[0].result(PATIENCE) == (3, ["early", "one"])
    assert answers[1].result(PATIENCE) == (3, ["early", "one", "two", ("x", 2)])
    assert [result.iteration for result in handle.results()] == [1, 2, 3, 4, 5]
    assert not answers[0].cancel()


def test_what_a_method_raises_reaches_the_caller(make: Callable[..., FluidExecutor]) -> None:
    handle = one(make(), budget=1)
    with pytest.raises(LossIsNaNError, match="called") as caught:
        handle.call("a", "fail").result(PATIENCE)
    cause = caught.value.__cause__
    assert isinstance(cause, CallFailedError) and "in fail" in str(cause) and cause.method == "fail"
    assert pickle.loads(pickle.dumps(cause)).failure == cause.failure
    with pytest.raises(AttributeError, match="nothing"):
        handle.call("a", "nothing").result(PATIENCE)
    assert handle.wait(PATIENCE) and handle.states == {"a": "DONE"}


def test_whatever_a_method_raises_or_returns_the_session_goes_on(make: Callable[..., FluidExecutor]) -> None:
    handle = one(make(), budget=1)
    with pytest.raises(FrozenError) as caught:
        handle.call("a", "fail_frozen").result(PATIENCE)
    assert caught.value.code == 3 and isinstance(caught.value.__cause__, CallFailedError)
    with pytest.raises(CallFailedError, match="cannot read what it returned"):
        handle.call("a", "unreadable").result(PATIENCE)
    assert handle.wait(PATIENCE) and handle.call("a", "note").result(PATIENCE) == (1, [])


def test_calls_that_cannot_be_are_refused(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    handle = one(executor, trainable=train, budget=1)
    with pytest.raises(FluidError, match="has no methods"):
        handle.call("a", "note").result(PATIENCE)
    with pytest.raises(InvalidFieldError, match="trial_id='b'"):
        handle.call("b", "note")
    with pytest.raises(InvalidFieldError, match="method=3"):
        handle.call("a", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match=r"args\[1\]"):
        handle.call("a", "note", 1, threading.Lock())
    with pytest.raises(InvalidFieldError, match="lock="):
        handle.call("a", "note", lock=threading.Lock())
    assert handle.wait(PATIENCE)
    handle.stop("a")
    with pytest.raises(InvalidFieldError, match="STOPPED"):
        handle.call("a", "note")
    assert not handle._session.waits.calls


def test_a_call_whose_process_dies_is_made_again_and_not_for_ever(make: Callable[..., FluidExecutor]) -> None:
    handle = one(make(max_failures=1), budget=2)
    assert handle.wait(PATIENCE)
    deadly, after = handle.call("a", "die"), handle.call("a", "note", "after")
    with pytest.raises(CallFailedError, match="killed"):
        deadly.result(PATIENCE)
    assert after.result(PATIENCE) == (2, ["after"])
    assert handle.states == {"a": "DONE"}
    assert [result.iteration for result in handle.results()] == [1, 2]


def test_calls_end_with_the_trial_and_with_the_executor(make: Callable[..., FluidExecutor]) -> None:
    executor = make(packing="off")
    group = TrialGroup(
        [Trial(Model, budget=10**9, trial_id="a"), Trial(Model, trial_id="b"), Trial(Model, trial_id="c")]
    )
    handle = executor.submit_trialgroup(group)
    waiting = {name: handle.call(name, "note") for name in "bc"}
    handle.stop("b")
    with pytest.raises(CallFailedError, match="stopped"):
        waiting["b"].result(PATIENCE)
    executor.close()
    with pytest.raises(FluidError, match="not answered"):
        waiting["c"].result(PATIENCE)
    with pytest.raises(FluidError, match="closed"):
        handle.call("a", "note")


# -- listeners ------------------------------------------------------------------------------------------------------


def test_a_listener_is_told_of_everything_in_order(make: Callable[..., FluidExecutor]) -> None:
    executor, listener = make(), Listener()
    handle = one(executor, budget=2, listener=listener)
    assert handle.wait(PATIENCE)
    handle.extend("a", 1)
    assert handle.wait(PATIENCE)
    handle.stop("a")
    executor.close()
    assert listener.hear(8) == [
        ("start", "a"),
        ("result", "a", 1),
        ("result", "a", 2),
        ("end", "a", "DONE", None),
        ("start", "a"),
        ("result", "a", 3),
        ("end", "a", "DONE", None),
        ("end", "a", "STOPPED", None),
    ]
    assert listener.hear(1) == [("broken", "the executor was closed")] and listener.told.empty()
    assert listener.threads == {"fluid-pump"}
    assert handle.makespan is not None and not handle._inbox._reports
    with pytest.raises(FluidError, match="listener"):
        handle.results()


def test_a_listener_may_use_its_handle(make: Callable[..., FluidExecutor]) -> None:
    listener = Listener()
    handles: list[TrialGroupHandle] = []
    submitted = threading.Event()

    def act(news: Any) -> None:
        submitted.wait(PATIENCE)
        if news == ("result", "a", 2):
            handles[0].extend("a", 2)  # before it hears that it is done
        elif news == ("end", "a", "DONE", None) and not handles[1:]:
            handles.append(handles[0])
        elif news[0] == "end":
            handles[0].forget("a")

    listener.act = act
    handles.append(one(make(), budget=2, listener=listener))
    submitted.set()
    ends = [news for news in listener.hear(8) if news[0] == "end"]
    assert ends == [("end", "a", "DONE", None)] * 2, "they come in the order in which they happened"
    assert handles[0].wait(PATIENCE)
    with pytest.raises(InvalidFieldError, match="unknown"):
        handles[0].call("a", "note")


def test_a_listener_that_raises_harms_nobody(
    make: Callable[..., FluidExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Listener):
        def on_result(self, result: Result) -> None:
            raise RuntimeError("no")

    with caplog.at_level(logging.ERROR, "fluid.session.inbox"):
        handle = one(make(), budget=2, listener=Bad())
        assert handle.wait(PATIENCE)
    assert len(caplog.records) == 2 and handle.states == {"a": "DONE"}


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_trial_raised_is_the_cause_of_its_failure(make: Callable[..., FluidExecutor]) -> None:
    executor = make(max_failures=5)
    handle = one(executor, config={"fails_at": 2}, budget=3, retry_errors=False)
    assert handle.wait(PATIENCE)
    with pytest.raises(TrialFailedError) as caught:
        handle.raise_failures()
    assert isinstance(caught.value.__cause__, LossIsNaNError) and caught.value.__cause__.args == (1,)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.trial_id, again.failure) == ("a", caught.value.failure)
    assert len(list(handle.results())) == 1, "it was tried once"
    executor.close()
    journal = (executor.run_dir / "journal.jsonl").read_text()
    assert "exception" not in journal.replace('"exception": null', ""), "what was raised is not written"


# -- forgetting -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forgotten_trial_is_gone_also_when_the_session_is_resumed(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    group = TrialGroup([Trial(Model, trial_id=name) for name in "abc"], name="g")
    handle = executor.submit_trialgroup(group)
    assert handle.wait(PATIENCE)
    handle.stop("b")
    with pytest.raises(InvalidFieldError, match="trial_id='x'"):
        handle.forget("x")
    for name in "ab":
        handle.forget(name)
    assert handle.states == {"c": "DONE"} and [trial.id for trial in group] == ["c"]
    assert list(trials_of(executor)) == ["c"] and "a" not in executor._session.backend._pool._registry  # type: ignore[attr-defined]
    with pytest.raises(InvalidFieldError, match="taken"):
        handle.add(Trial(Model, trial_id="a"))
    assert len(list(handle.results())) == 3
    handle.add(Trial(Model, config={"fails_at": 1}, trial_id="d", retry_errors=False))
    assert handle.wait(PATIENCE)
    handle.forget("c")
    executor.close()
    resumed = FluidExecutor.resume(executor.run_dir, backend="local", devices=1, verbose=0)
    try:
        (handle,) = resumed.handles
        assert handle.states == {"d": "FAILED"} and handle.name == "g"
        with pytest.raises(InvalidFieldError, match="taken"):
            handle.add(Trial(Model, trial_id="c"))
        handle.forget("d")
        assert not trials_of(resumed)
    finally:
        resumed.close()
    with FluidExecutor.resume(executor.run_dir, backend="local", devices=1, verbose=0) as resumed:
        assert resumed.handles[0].wait(0) and not trials_of(resumed)
