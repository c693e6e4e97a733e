"""The session's thread and the code of users: it survives what that raises, and never waits for itself."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import LimitReachedError, TrialListener
from fluid.session.waits import SessionFuture, SessionWaits
from fluid.trialgroup import Trial, TrialGroup
from tests.session.test_pump import IdleBackend
from tests.waiting import eventually

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(10**6):
        yield {"loss": step}


def fails(config: dict[str, Any]) -> None:
    raise ValueError("fails")


class Greets:
    """Has a method to call."""

    def setup(self, config: dict[str, Any]) -> None: ...

    def step(self) -> dict[str, Any]:
        time.sleep(0.01)
        return {"loss": 1.0}

    def greet(self) -> str:
        return "hi"


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor("local", 1, packing="off", run_dir=tmp_path / "run", verbose=0, spare_lanes=0) as executor:
        yield executor


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[FluidExecutor]:
    """An executor whose trials never start."""
    executor = FluidExecutor(backend=IdleBackend(), run_dir=tmp_path / "idle", verbose=0)
    yield executor
    executor.close()


def group(*names: str, budget: int = 1, trainable: Any = train) -> TrialGroup:
    return TrialGroup([Trial(trainable, budget=budget, trial_id=name) for name in names])


class OnResult(TrialListener):
    """Does something at each result."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.raised: list[BaseException] = []

    def on_result(self, result: Result) -> None:
        try:
            self.act()
        except BaseException as error:
            self.raised.append(error)
            raise


# -- the session's thread never waits for itself --------------------------------------------------------------------

WAITS: dict[str, Callable[[FluidExecutor, TrialGroupHandle], object]] = {
    "wait": lambda executor, other: other.wait(),
    "wait a second": lambda executor, other: other.wait(1.0),
    "results": lambda executor, other: list(other.results()),
    "call": lambda executor, other: other.call("other", "greet").result(),
    "exception": lambda executor, other: other.call("other", "greet").exception(),
    "cleanup": lambda executor, other: other.await_cleanup(1.0),
    "run": lambda executor, other: fluid.run(
        train, {"x": [1]}, metric="loss", algorithm="grid", samples=1, executor=executor
    ),
    "drain": lambda executor, other: executor.drain(0, 1.0),
    "drain_all": lambda executor, other: executor.drain_all(1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WAITS)
def test_a_listener_that_would_wait_is_told_so(what: str, tmp_path: Path) -> None:
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0, spare_lanes=0) as executor:
        other = executor.submit_trialgroup(group("other", trainable=Greets, budget=10**9))
        listener = OnResult(lambda: WAITS[what](executor, other))
        assert executor.submit_trialgroup(group("one"), listener).wait(PATIENCE)
        (error,) = listener.raised
        assert isinstance(error, FluidError) and "a listener cannot wait for" in str(error)
        other.stop("other")
        assert other.wait(PATIENCE)


def test_a_listener_may_ask_for_what_is_there(executor: FluidExecutor) -> None:
    first = executor.submit_trialgroup(group("first"))
    assert first.wait(PATIENCE)
    other = executor.submit_trialgroup(group("other"))
    assert other.wait(PATIENCE)
    seen: list[object] = []
    listener = OnResult(lambda: seen.extend([first.wait(), len(list(first.results())), other.wait(0.0)]))
    assert executor.submit_trialgroup(group("one"), listener).wait(PATIENCE)
    assert seen == [True, 1, True] and not listener.raised


@pytest.mark.slow
def test_listeners_of_two_executors_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each would wait for the other's session: one of the two is told so. That is so for closing them, too."""
    executors = [FluidExecutor("local", 1, run_dir=tmp_path / str(n), verbose=0, spare_lanes=0) for n in range(2)]
    both, handles, heard = threading.Barrier(2), [], []

    def act(other: int) -> None:
        both.wait(PATIENCE)
        try:
            heard.append(handles[other].wait())
        except FluidError as error:
            heard.append(str(error))
        executors[other].close()

    for executor, listener in zip(executors, [OnResult(lambda: act(1)), OnResult(lambda: act(0))], strict=True):
        handles.append(executor.submit_trialgroup(group("one"), listener))
    eventually(lambda: len(heard) == 2)
    for executor in executors:
        executor.close()
    assert any("a listener cannot wait for" in str(text) for text in heard)


@pytest.mark.slow
def test_close_says_where_a_listener_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fluid.session.waits._TELL_S", 0.5)
    monkeypatch.setattr("fluid.session.waits._LIMIT_S", 1.0)
    is_stuck, over = threading.Event(), threading.Event()

    def stuck_here() -> None:
        is_stuck.set()
        over.wait(PATIENCE)

    executor = FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0)
    executor.submit_trialgroup(group("one"), OnResult(stuck_here))
    assert is_stuck.wait(PATIENCE)
    with pytest.raises(FluidError, match=r"fluid-pump has not ended within 1 s(.|\n)*stuck_here"):
        executor.close()
    assert "close() waits for the thread fluid-pump" in caplog.text and "stuck_here" in caplog.text
    over.set()
    executor.close()
    assert executor._session._pump._thread is not None and not executor._session._pump._thread.is_alive()


# -- what users' code raises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_callbacks_of_a_call_may_raise_anything(
    executor: FluidExecutor, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    handle = executor.submit_trialgroup(group("a", trainable=Greets, budget=10**6))
    called: list[str] = []

    def rude(_: object) -> None:
        raise error

    future = handle.call("a", "greet")
    future.add_done_callback(rude)
    future.add_done_callback(lambda done: called.append(done.result()))
    eventually(lambda: called)
    assert future.result() == "hi" and "a callback of a future raised" in caplog.text
    handle.stop("a")
    assert handle.wait(PATIENCE)


def test_a_callback_that_exits_in_the_callers_thread_exits_there() -> None:
    future = SessionFuture(SessionWaits())
    future.set_result(3)
    with pytest.raises(SystemExit):
        future.add_done_callback(lambda _: sys.exit())


def test_a_lock_that_an_interrupted_thread_never_gave_back_keeps_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.session.waits._LOST_S", 0.0)
    future, over = SessionFuture(SessionWaits()), threading.Event()
    holder = threading.Thread(target=lambda: future._condition.acquire() and over.wait(PATIENCE))
    holder.start()
    answers = threading.Thread(target=future.set_result, args=(3,))
    answers.start()
    answers.join(PATIENCE)
    assert not answers.is_alive() and future.result(PATIENCE) == 3
    over.set()
    holder.join(PATIENCE)


class RudeGroup(TrialGroup):
    """Raises whatever it is asked, once it is told to."""

    is_rude = False

    def __getitem__(self, trial_id: str) -> Trial:
        if self.is_rude:
            raise SystemExit
        return super().__getitem__(trial_id)


class Raises(TrialListener):
    def on_start(self, trial_id: str) -> None:
        raise ValueError("on_start")


class Strict(logging.Handler):
    """Lets no warning pass, as some test suites have it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())
        raise SystemExit(record.getMessage())


def test_a_handler_of_the_log_may_raise_anything(executor: FluidExecutor) -> None:
    strict = Strict()
    logging.getLogger().addHandler(strict)
    try:
        failing = executor.submit_trialgroup(TrialGroup([Trial(fails, trial_id="a")]), Raises())
        assert failing.wait(PATIENCE) and failing.states == {"a": "FAILED"}
    finally:
        logging.getLogger().removeHandler(strict)
    assert any("failed" in text for text in strict.heard) and any("raised" in text for text in strict.heard)
    assert not executor.closed and executor.submit_trialgroup(TrialGroup([Trial(train)])).wait(PATIENCE)


class Fades:
    """A listener whose methods are gone once it was accepted, as those of a proxy whose object is gone."""

    def __init__(self) -> None:
        self.is_gone = False

    def __getattr__(self, name: str) -> Any:
        if self.is_gone or not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *facts: setattr(self, "is_gone", True)


def test_a_listener_whose_methods_are_gone_ends_nothing(executor: FluidExecutor) -> None:
    fades: Any = Fades()
    handle = executor.submit_trialgroup(TrialGroup([Trial(train, trial_id="a")]), fades)
    assert handle.wait(PATIENCE) and handle.states == {"a": "DONE"} and fades.is_gone
    assert not executor.closed


def test_a_group_of_the_users_own_class_ends_nothing(executor: FluidExecutor) -> None:
    rude = RudeGroup([Trial(train, budget=5, trial_id="rude")])
    handle = executor.submit_trialgroup(rude, OnResult(lambda: setattr(rude, "is_rude", True)))
    assert handle.wait(PATIENCE)
    assert executor.submit_trialgroup(group("other")).wait(PATIENCE)


def test_a_listener_that_is_async_is_told_of_and_harms_nothing(
    executor: FluidExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    class Async(TrialListener):
        async def on_result(self, result: Result) -> None:  # type: ignore[override]
            raise AssertionError

    assert executor.submit_trialgroup(group("a", budget=3), Async()).wait(PATIENCE)
    (record,) = [record for record in caplog.records if "is async" in record.getMessage()]
    assert "on_result of listener Async" in record.getMessage()


class Duck:
    """A listener that is derived from nothing."""

    def on_start(self, trial_id: str) -> None: ...
    def on_result(self, result: Result) -> None: ...
    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None: ...
    def on_request(self, request: Any) -> None: ...
    def on_broken(self, error: BaseException) -> None: ...


def test_a_listener_need_not_be_derived_from_the_protocol(executor: FluidExecutor) -> None:
    duck: Any = Duck()
    assert executor.submit_trialgroup(group("a"), duck).wait(PATIENCE)
    result = fluid.run(
        train, {"x": fluid.search.uniform(0, 1)}, metric="loss", samples=1, callbacks=[duck], executor=executor
    )
    assert len(result.trials) == 1


# -- checked, then done, then told ----------------------------------------------------------------------------------


def test_what_is_asked_of_another_groups_trial_changes_nothing(idle: FluidExecutor) -> None:
    one, other = idle.submit_trialgroup(group("a")), idle.submit_trialgroup(group("b"))
    asked: list[Callable[[], object]] = [
        lambda: one.stop("b"),
        lambda: one.extend("b", 5),
        lambda: one.pause("b"),
        lambda: one.resume("b"),
        lambda: one.rank("b", fluid.search_shape.Rung(0, 1), 0.5),
        lambda: one.call("b", "greet"),
        lambda: one.show_config("b", {"x": 1}),
        lambda: one.forget("b"),
    ]
    for ask in asked:
        with pytest.raises(InvalidFieldError, match="trial_id='b'"):
            ask()
    trial = idle._session._state.trials["b"]
    assert other.states == {"b": "QUEUED"} and trial.progress.budget == 1 and not trial.held


def test_a_device_that_is_not_there_cannot_be_removed(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError, match="device_id=5: is not in use"):
        executor.remove_device(5)


def test_the_user_hears_that_trials_wait_for_a_device(
    executor: FluidExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    handle = executor.submit_trialgroup(group("a", budget=10**6))
    executor.remove_device(0)
    assert "no device is left: 1 unfinished trials wait until add_device() adds one" in caplog.text
    assert not executor.closed
    executor.add_device(Device(0))
    handle.stop("a")
    assert handle.wait(PATIENCE)


def test_where_no_device_works_further_groups_are_refused_and_further_trials_fail(tmp_path: Path) -> None:
    executor = FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0, max_failures=0, spare_lanes=0)
    try:
        handle = executor.submit_trialgroup(group("a"))
        assert handle.wait(PATIENCE)
        (executor.run_dir / "logs").rename(tmp_path / "gone")  # No lane can be started any more.
        executor.remove_device(0)
        executor.add_device(Device(0))
        handle.extend("a", 1)
        assert handle.wait(PATIENCE)
        eventually(lambda: not executor.devices)
        with pytest.raises(FluidError, match="no device is left"):
            executor.submit_trialgroup(group("b"))
        handle.add(Trial(train, trial_id="c"))
        assert handle.wait(PATIENCE) and handle.states["c"] == "FAILED"
    finally:
        executor.close()


@pytest.mark.slow
def test_a_session_that_was_drained_refuses_work_and_says_why(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(group("done"))
    assert handle.wait(PATIENCE)
    waiting = executor.submit_trialgroup(group("a", trainable=Greets, budget=10**9))
    eventually(lambda: waiting.states == {"a": "RUNNING"})
    assert not executor.drain_all(0.0)  # That trial cannot be saved.
    assert executor.closed
    refused: list[Callable[[], object]] = [
        lambda: executor.submit_trialgroup(group("b")),
        lambda: waiting.add(Trial(train, trial_id="b")),
        lambda: handle.extend("done", 1),
        lambda: waiting.resume("a"),
        lambda: waiting.call("a", "greet"),
        lambda: waiting.wait(),
        lambda: list(waiting.results()),
        lambda: fluid.run(train, {"x": [1]}, metric="loss", algorithm="grid"),  # In the block of this executor.
    ]
    for ask in refused:
        with pytest.raises(LimitReachedError, match="the session was drained: 0 of 1 unfinished trials are saved"):
            ask()
    assert handle.wait() and waiting.states.keys() == {"a"}


@pytest.mark.slow
def test_default_names_are_new_in_a_session_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from fluid import trialgroup

    caplog.set_level(logging.INFO)
    numbers = trialgroup._trial_names, trialgroup._group_names
    first = [Trial(train), Trial(train)]
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0) as executor:
        assert executor.submit_trialgroup(earlier := TrialGroup(first)).wait(PATIENCE)
    # In a new process, they are counted from 0.
    trialgroup._trial_names, trialgroup._group_names = (type(each)(each._pattern) for each in numbers)
    try:
        with FluidExecutor.resume(tmp_path / "run", backend="local", devices=1, verbose=0) as executor:
            further = TrialGroup([Trial(train)])
            assert executor.submit_trialgroup(further).wait(PATIENCE)
            assert further.name != earlier.name
    finally:
        trialgroup._trial_names, trialgroup._group_names = numbers
