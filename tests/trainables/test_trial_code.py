"""Which trial the code of a thread belongs to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fluid
from fluid.errors import FluidError
from fluid.trainables import trial_code
from fluid.trainables.driver_link import driver_link, in_trial
from fluid.trainables.trial_code import TrialCode, TrialEnded, bind, current_trial, inherit_trials


class Link:
    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id

    def ask(self, request: Any) -> Any:
        raise AssertionError


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TrialCode, TrialCode]]:
    """The code of two trials, in a process whose threads inherit theirs."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(trial_code, "_live", set())
    inherit_trials()
    yield TrialCode(Link("a")).begin(), TrialCode(Link("b")).begin()
    bind(threading.current_thread(), None)


class Starting(threading.Thread):
    """Overrides what a thread's user may."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.found = found

    def start(self) -> None:
        super().start()

    def run(self) -> None:
        self.found.append(current_trial())


def found_in(start: Any) -> Any:
    found: list[Any] = []
    start(found)
    (one,) = found
    return one


def in_thread(found: list[Any]) -> None:
    thread = threading.Thread(target=lambda: found.append(current_trial()))
    thread.start()
    thread.join()


def in_subclass(found: list[Any]) -> None:
    thread = Starting(found)
    thread.start()
    thread.join()


def in_timer(found: list[Any]) -> None:
    timer = threading.Timer(0.0, lambda: found.append(current_trial()))
    timer.start()
    timer.join()


def in_pool(found: list[Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: found.append(current_trial())).result()


def in_thread_of_a_thread(found: list[Any]) -> None:
    thread = threading.Thread(target=in_thread, args=(found,))
    thread.start()
    thread.join()


def in_raw_thread(found: list[Any]) -> None:
    import _thread

    done = threading.Event()
    _thread.start_new_thread(lambda: (found.append(current_trial()), done.set()), ())
    done.wait()


@pytest.mark.parametrize("start", [in_thread, in_subclass, in_timer, in_pool, in_thread_of_a_thread])
def test_a_thread_belongs_to_the_trial_that_starts_it(codes: tuple[TrialCode, TrialCode], start: Any) -> None:
    for code in codes:
        code.enter()
        assert found_in(start) is code and driver_link() is code.link and in_trial()


def test_it_stays_there_when_the_lane_has_gone_on_to_another_trial(codes: tuple[TrialCode, TrialCode]) -> None:
    codes[0].enter()
    may_look, found = threading.Event(), []
    thread = threading.Thread(target=lambda: (may_look.wait(), found.append(driver_link().trial_id)))
    thread.start()
    codes[1].enter()
    may_look.set()
    thread.join()
    assert found == ["a"] and driver_link().trial_id == "b"


def test_a_thread_of_unknown_origin_is_the_only_trials(codes: tuple[TrialCode, TrialCode]) -> None:
    codes[0].enter()
    assert found_in(in_raw_thread) is None
    codes[1].end()
    assert found_in(in_raw_thread) is codes[0]
    codes[0].end()
    assert found_in(in_raw_thread) is None


def test_code_of_a_trial_that_has_ended_is_refused_each_time(codes: tuple[TrialCode, TrialCode]) -> None:
    codes[0].enter()
    codes[0].end()
    for _ in range(2):
        with pytest.raises(TrialEnded):
            fluid.report({"value": 1})
        with pytest.raises(TrialEnded):
            fluid.get_checkpoint()


def test_other_code_has_no_link(codes: tuple[TrialCode, TrialCode]) -> None:
    assert not in_trial()
    with pytest.raises(FluidError, match="only the code of a trial"):
        driver_link()


def test_threads_that_still_run_are_the_trials_own(codes: tuple[TrialCode, TrialCode]) -> None:
    may_end = threading.Event()
    threads = []
    for code in codes:
        code.enter()
        threads.append(threading.Thread(target=may_end.wait))
        threads[-1].start()
    try:
        assert [code.threads() for code in codes] == [[thread] for thread in threads]
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
    assert [code.threads() for code in codes] == [[], []]


def test_threads_that_serve_the_whole_process_are_no_trials(codes: tuple[TrialCode, TrialCode]) -> None:
    may_end = threading.Event()

    def watch() -> None:
        may_end.wait()

    watch.__module__ = "tqdm._monitor"
    codes[0].enter()
    thread = threading.Thread(target=watch)
    thread.start()
    assert codes[0].threads() == []
    may_end.set()
    thread.join()


def test_a_forked_process_reaches_no_reporter(codes: tuple[TrialCode, TrialCode]) -> None:
    codes[0].enter()
    codes[0].reporter = object()  # type: ignore[assignment]
    child = os.fork()
    if not child:
        status = 1
        try:
            fluid.report({})
        except FluidError:
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_nobody_waits_for_a_function_that_catches_its_end(codes: tuple[TrialCode, TrialCode]) -> None:
    code, may_end = codes[0], threading.Event()
    code.enter()

    def catch_all() -> None:
        while not may_end.is_set():
            try:
                fluid.report({})
            except BaseException:
                may_end.wait(0.001)

    code.function = threading.Thread(target=catch_all, daemon=True)
    code.function.start()
    code.end()
    code.await_function()
    assert code.threads() == [code.function]
    may_end.set()
    code.function.join()
