"""Ctrl-C and signal handlers wherever the main thread is: an interrupt ends one call, and nothing of the session."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialListener
from fluid.trialgroup import Trial, TrialGroup
from fluid.waiting.waits import AwaitedThread
from tests.session.test_pump import IdleBackend

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
#: Files in whose lines an interrupt may matter: those of the session, and what Python's locks and futures are made of.
_WHERE = ("fluid/session/", "fluid/executor.py", "fluid/_", "/threading.py", "/concurrent/futures/", "/contextlib.py")


class At:
    """Acts at the n-th line that the main thread comes to in a call, as a signal handler does.

    Args:
        line: n, from 1.
        act: what is done there; it may raise.

    Attributes:
        acted: whether the call had so many lines.
    """

    def __init__(self, line: int, act: Callable[[], None]) -> None:
        self._left, self._act = line, act
        self.acted = False

    def __enter__(self) -> At:
        self._before = sys.gettrace()
        sys.settrace(self._follow)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _follow(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in _WHERE):
            return None
        if event == "line" and not self.acted:
            self._left -= 1
            if not self._left:
                self.acted = True
                self._act()
        return self._follow


def interrupt() -> None:
    raise KeyboardInterrupt


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1000):
        yield {"loss": step}


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor("local", 1, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        yield executor


def group(*names: str, budget: int = 1) -> TrialGroup:
    return TrialGroup([Trial(train, budget=budget, trial_id=name) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("request_", ["add", "extend", "stop", "submit", "call", "wait", "results", "status"])
def test_a_call_that_is_interrupted_at_any_line_was_made_or_was_not(executor: FluidExecutor, request_: str) -> None:
    handle = executor.submit_trialgroup(group("first"))
    assert handle.wait(PATIENCE)
    budget, line = 1, 0
    while True:
        line += 1
        name = f"trial-{line}"
        calls: dict[str, Callable[[], object]] = {
            "add": lambda name=name: handle.add(Trial(train, trial_id=name)),
            "extend": lambda: handle.extend("first", 1),
            "stop": lambda name=name: handle.stop(name),
            "submit": lambda name=name: executor.submit_trialgroup(group(name)),
            "call": lambda: handle.call("first", "method"),
            "wait": lambda: handle.wait(0.0),
            "results": lambda: next(handle.results()),
            "status": executor.status,
        }
        if request_ == "stop":
            handle.add(Trial(train, trial_id=name, budget=10**6))
        at = At(line, interrupt)
        try:
            with at:
                calls[request_]()
        except KeyboardInterrupt:
            pass
        executor.status()  # All that was handed to the session's thread before has been done.
        if request_ == "add":
            assert (name in handle.states) == (name in handle._group)
        elif request_ == "extend":
            budget = handle._group["first"].budget
            assert executor._session._state.trials["first"].progress.budget == budget
        elif request_ == "stop":
            stopped = executor._session._state.trials[name].state.value in ("STOPPING", "STOPPED")
            assert stopped == handle._group.is_stopped(name)
            handle.stop(name)
        if not at.acted:
            break
    assert line > 5
    assert handle.wait(PATIENCE)
    assert sum(result.trial_id == "first" for result in handle.results()) == budget
    assert all(each.wait(PATIENCE) for each in executor.handles)


def test_waits_that_are_interrupted_again_and_again_harm_nobody(executor: FluidExecutor) -> None:
    """Signals come while the main thread wakes up for a result: at each of its locks, sooner or later."""
    main, is_armed = threading.main_thread().ident, [True]
    assert main is not None

    def handler(*_: object) -> None:
        if is_armed[0]:
            raise KeyboardInterrupt

    class Interrupts(TrialListener):
        def on_result(self, result: Result) -> None:
            if is_armed[0]:
                signal.pthread_kill(main, signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        noisy = executor.submit_trialgroup(group("noisy", budget=300), Interrupts())
        handle = executor.submit_trialgroup(group("quiet", budget=300))
        interrupts = 0
        while True:
            try:
                if noisy.wait(PATIENCE) and handle.wait(PATIENCE) and len(list(handle.results())) == 300:
                    break
            except KeyboardInterrupt:
                interrupts += 1
        is_armed[0] = False
    finally:
        is_armed[0] = False
        signal.signal(signal.SIGUSR2, before)
    assert interrupts
    assert executor.submit_trialgroup(group("after")).wait(PATIENCE)


@contextmanager
def interrupting_soon() -> Iterator[None]:
    """An interrupt comes while the main thread waits."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_thread_whose_join_was_interrupted_is_still_awaited() -> None:
    over = threading.Event()
    thread = AwaitedThread("fluid-test", lambda: over.wait(PATIENCE))
    thread.start()
    with interrupting_soon():
        thread.join()
    assert thread.is_alive()
    over.set()
    thread.join()
    assert not thread.is_alive() and thread not in threading.enumerate()


def test_a_close_that_was_interrupted_can_be_waited_for(executor: FluidExecutor) -> None:
    closing = threading.Event()
    heard: list[str] = []

    class Lasts(TrialListener):
        def on_broken(self, error: BaseException) -> None:
            closing.wait(PATIENCE)
            heard.append(str(error))

    executor.submit_trialgroup(group("a"), Lasts())
    with interrupting_soon():
        executor.close()
    assert not heard
    closing.set()
    executor.close()
    assert heard == ["the executor was closed"]


READS: dict[str, Callable[[FluidExecutor, TrialGroupHandle], object]] = {
    "done": lambda executor, handle: (handle.done, handle.makespan, handle.failures),
    "states": lambda executor, handle: handle.states,
    "trials": lambda executor, handle: handle.trials,
    "status": lambda executor, handle: executor.status(),
    "add": lambda executor, handle: handle.add(Trial(train, trial_id="b")),
    "wait": lambda executor, handle: handle.wait(0.001),
    "call": lambda executor, handle: handle.call("a", "method").result(0.001),
    "close": lambda executor, handle: executor.close(),
}


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_a_signal_handler_may_close_the_executor_wherever_the_main_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    monkeypatch.setattr("fluid.session.waits._LIMIT_S", 10.0)  # A deadlock ends as an error of close().
    line, acted = 1, True
    while acted:
        executor = FluidExecutor(backend=IdleBackend(), run_dir=tmp_path / f"run-{line}", verbose=0)
        handle = executor.submit_trialgroup(group("a"))
        errors: list[BaseException] = []

        def close(executor: FluidExecutor = executor, errors: list[BaseException] = errors) -> None:
            try:
                executor.close()
            except BaseException as error:
                errors.append(error)

        try:
            with At(line, close) as at:
                READS[read](executor, handle)
        except (FluidError, TimeoutError):
            pass  # The executor is closed, or the call has no answer yet.
        acted = at.acted
        executor.close()
        assert not errors
        line += 1 + line // 8
    assert line > 2
