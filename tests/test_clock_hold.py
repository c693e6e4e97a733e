"""Who holds a virtual clock: the threads that submit, until they wait for the session."""

import concurrent.futures
import threading
import time
from collections.abc import Callable

import pytest

from fluid._clock import VirtualClock
from fluid.session.waits import SessionFuture, SessionWaits
from fluid.waiting.clock_hold import Place, VirtualClockHold
from fluid.waiting.queue import HeldQueue


class Played:
    """A hold, and threads that wait for it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.hold = VirtualClockHold(self.clock)
        self.place = Place()
        self.ended: list[tuple[str, bool]] = []
        self.threads: list[threading.Thread] = []

    def wait(self, name: str, condition: Callable[[], bool], timeout: float | None = None, polls: bool = False) -> None:
        begun = len(self.hold._waits)

        def wait() -> None:
            self.ended.append((name, self.hold.wait_until(condition, self.place, timeout, polls=polls)))
            self.hold.wait_until(lambda: False, Place())  # So that it does not hold the clock.

        self.threads.append(threading.Thread(target=wait, daemon=True))
        self.threads[-1].start()
        await_true(lambda: len(self.hold._waits) > begun)

    def end(self) -> None:
        self.hold.end()
        for thread in self.threads:
            thread.join(10.0)
            assert not thread.is_alive()


@pytest.fixture
def played():
    made = Played()
    yield made
    made.end()


def await_true(condition):
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_thread_that_acts_holds_the_clock_until_it_waits(played):
    free: list[bool] = []
    mover = threading.Thread(target=lambda: free.append(played.hold.await_free()), daemon=True)
    played.hold.take()
    mover.start()
    burnt = time.thread_time()
    while time.thread_time() - burnt < 0.05:
        assert not free
    played.wait("other", lambda: False)  # Another thread that waits lets nothing go.
    assert not free
    threading.Timer(0.05, lambda: played.hold.wake(played.place)).start()
    played.hold.wait_until(lambda: bool(free), played.place, 5.0)
    mover.join(10.0)
    assert free == [True]


def test_a_wake_before_the_wait_is_not_lost(played):
    looks: list[int] = []

    def condition() -> bool:
        looks.append(1)
        if len(looks) == 1:
            played.hold.wake(played.place)  # Between the look and the wait.
        return len(looks) > 1

    assert played.hold.wait_until(condition, played.place)
    assert len(looks) == 2


def test_a_wake_between_look_and_wait_reaches_a_second_waiter_too(played):
    done: list[bool] = []
    played.wait("first", lambda: bool(done))
    looks: list[int] = []

    def condition() -> bool:
        looks.append(1)
        is_done = bool(done)
        if not is_done:
            done.append(True)
            played.hold.wake(played.place)  # "first" waits here already.
        return is_done

    assert played.hold.wait_until(condition, played.place)
    await_true(lambda: played.ended == [("first", True)])


def test_the_woken_thread_acts_at_once(played):
    done: list[bool] = []
    gate = threading.Lock()
    gate.acquire()

    def condition() -> bool:
        if done:
            gate.acquire(timeout=10.0)
        return bool(done)

    played.wait("one", condition)
    assert played.hold.await_free()
    done.append(True)
    in_another_thread(lambda: played.hold.wake(played.place))
    assert played.hold._acting == {played.threads[0].ident}  # Before that thread has run at all.
    gate.release()
    await_true(lambda: bool(played.ended))


def in_another_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(10.0)


def test_what_the_mover_of_the_clock_does_wakes_a_thread_once_it_is_through(played):
    done: list[bool] = []
    played.wait("one", lambda: bool(done))
    assert played.hold.await_free()
    done.append(True)
    played.hold.wake(played.place)
    assert not played.hold._acting
    assert played.hold._waits  # That thread waits still: the mover may do more for it.
    assert played.hold.await_free()  # Once it has acted, and waits again.
    assert played.ended == [("one", True)]


def test_a_thread_that_waits_until_an_instant_has_settled_is_seen_where_nothing_is_left_to_happen(played):
    queue = HeldQueue[str](played.hold)
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(queue.get_settled(None)), daemon=True)
    thread.start()
    await_true(lambda: played.hold._waits)

    def move() -> None:
        assert played.hold.await_free()
        played.hold.await_nudge()
        played.hold.end_settled()

    mover = threading.Thread(target=move, daemon=True)
    mover.start()
    await_true(lambda: played.hold._is_idle)
    queue.put("one")  # By a thread that is neither of the two.
    mover.join(20.0)
    thread.join(20.0)
    assert got == [["one"]]


def test_waits_expire_in_order_of_their_deadlines(played):
    played.wait("late", lambda: False, 5.0)
    played.wait("early", lambda: False, 2.0)
    played.wait("never", lambda: False)
    played.wait("polls", lambda: False, polls=True)
    assert played.hold.next_deadline == 2.0
    assert not played.hold.expire(1.0)
    assert played.hold.expire(2.0)
    await_true(lambda: played.ended == [("early", False)])
    assert played.hold.next_deadline == 5.0
    assert played.hold.expire_polls()
    await_true(lambda: played.ended[1:] == [("polls", False)])
    assert not played.hold.expire_polls()
    assert played.hold.expire(7.0)
    await_true(lambda: played.ended[2:] == [("late", False)])


def test_a_poll_that_begins_where_nothing_is_left_to_happen_is_seen(played):
    returned: list[bool] = []
    mover = threading.Thread(target=lambda: returned.append(bool(played.hold.await_nudge())), daemon=True)
    mover.start()
    played.wait("endless", lambda: False)
    assert not returned
    played.wait("polls", lambda: False, polls=True)
    mover.join(10.0)
    assert returned
    assert played.hold.expire_polls()


def test_a_nudge_ends_one_wait_for_submitters(played):
    played.hold.take()
    played.hold.nudge()
    assert not played.hold.await_free()
    assert not played.hold._nudged
    played.hold.let_go()
    assert played.hold.await_free()


@pytest.mark.parametrize("sleep", [lambda: time.sleep(30.0), threading.Event().wait], ids=["sleep", "event"])
def test_a_thread_that_sleeps_elsewhere_lets_go(played, sleep):
    taken = threading.Event()

    def act() -> None:
        played.hold.take()
        taken.set()
        sleep()

    threading.Thread(target=act, daemon=True).start()
    taken.wait()
    began = time.monotonic()
    assert played.hold.await_free()
    assert time.monotonic() - began >= 0.2


def test_one_that_looks_now_and_then_how_things_stand_lets_go_too(played):
    taken, over = threading.Event(), threading.Event()

    def act() -> None:
        played.hold.take()
        taken.set()
        while not over.wait(0.1):
            played.hold.nudge()  # As a call of the session does.

    threading.Thread(target=act, daemon=True).start()
    taken.wait()
    deadline = time.monotonic() + 30.0
    while not played.hold.await_free():
        assert time.monotonic() < deadline
    over.set()


def test_a_thread_that_has_ended_lets_go_at_once(played, monkeypatch):
    monkeypatch.setattr("fluid.waiting.clock_hold._ASLEEP_S", float("inf"))
    in_another_thread(played.hold.take)
    assert played.hold._acting
    assert played.hold.await_free()


@pytest.mark.parametrize("others", ["none", "act", "idle"])
def test_the_user_is_warned_of_a_thread_that_acts_while_the_clock_goes_on(played, monkeypatch, caplog, others):
    monkeypatch.setattr("fluid.waiting.clock_hold._ASLEEP_S", 0.0)
    come, over = threading.Event(), threading.Event()

    def act() -> None:
        played.hold.take()
        come.wait(20.0)
        played.hold.take()
        over.wait(20.0)

    thread = threading.Thread(target=act, name="submitter", daemon=True)
    thread.start()
    await_true(lambda: played.hold._acting)
    assert played.hold.await_free()  # It sleeps.
    played.clock.advance_to(1.0)
    if others == "act":
        played.hold.take()
    elif others == "idle":
        threading.Thread(target=played.hold.await_nudge, daemon=True).start()
        await_true(lambda: played.hold._is_idle)
    come.set()
    await_true(lambda: thread.ident in played.hold._acting)
    over.set()
    thread.join(20.0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (others == "none")
    assert all(text.startswith("submitter has waited for something else than this session") for text in told)


def test_waits_last_until_the_session_has_ended_though_it_closes(played):
    broken: list[bool] = []
    played.wait("one", lambda: bool(broken))
    played.hold.let_go()
    played.hold.take()  # By a thread that goes on while it closes.
    assert played.hold.await_free()
    assert not played.ended
    broken.append(True)
    played.hold.wake(played.place)
    assert played.hold.await_free()
    await_true(lambda: played.ended == [("one", True)])
    played.hold.end()
    assert not played.hold.wait_until(lambda: False, Place())


def test_futures_are_waited_for_as_the_session_is(played):
    waits = SessionWaits(played.hold)
    future = SessionFuture(waits)
    played.hold.take()

    def move() -> None:
        played.hold.await_free()
        future.set_result(3)
        played.hold.await_free()

    threading.Thread(target=move, daemon=True).start()
    assert future.result() == 3
    other = SessionFuture(waits)
    threading.Thread(target=lambda: played.hold.await_free() and played.hold.expire(9.0), daemon=True).start()
    with pytest.raises(concurrent.futures.TimeoutError):
        other.result(2.0)


def test_a_queue_takes_items_that_come_at_any_time(played):
    queue: HeldQueue[int] = HeldQueue(played.hold)
    got: list[int] = []
    getter = threading.Thread(target=lambda: got.extend(queue.get(None) for _ in range(500)), daemon=True)
    getter.start()
    for item in range(500):
        queue.put(item)
    getter.join(20.0)
    assert got == list(range(500))
    assert queue.empty()


def test_a_wait_until_an_instant_has_settled_ends_when_nothing_more_happens_at_it(played):
    queue = HeldQueue[str](played.hold)
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(queue.get_settled(None)), daemon=True)
    thread.start()
    await_true(lambda: played.hold._waits)
    queue.put("one")
    queue.put("two")
    assert not played.hold.expire(float("-inf"))
    assert played.hold.await_free()  # The thread waits still, though there are items.
    assert got == []
    assert played.hold.end_settled()
    thread.join(10.0)
    assert got == [["one", "two"]]
    assert not played.hold.end_settled()


def test_what_came_before_such_a_wait_ends_it_too(played):
    queue = HeldQueue[str](played.hold)
    queue.put("one")
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(queue.get_settled(5.0, polls=True)), daemon=True)
    thread.start()
    await_true(lambda: played.hold._waits)
    assert played.hold.end_settled()
    thread.join(10.0)
    assert got == [["one"]]


def test_a_poll_with_a_timeout_ends_first_where_nothing_is_left_to_happen(played):
    queue = HeldQueue[str](played.hold)
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(queue.get_settled(5.0, polls=True)), daemon=True)
    thread.start()
    await_true(lambda: played.hold._waits)
    assert played.hold.next_deadline == 5.0
    assert played.hold.expire_limited_polls()
    thread.join(10.0)
    assert got == [[]]
    assert played.clock.now() == 0.0


def test_a_thread_that_keeps_the_clock_holds_it_while_it_sleeps(played):
    released, ended = threading.Event(), threading.Event()

    def keep() -> None:
        with played.hold.keep():
            played.hold.take()
            released.wait(20.0)
        ended.wait(20.0)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    await_true(lambda: played.hold._acting)
    free: list[bool] = []
    mover = threading.Thread(target=lambda: free.append(played.hold.await_free()), daemon=True)
    mover.start()
    mover.join(1.0)
    assert free == []  # Another thread would have lost it by now.
    released.set()
    await_true(lambda: free)
    assert free == [True]
    ended.set()
    thread.join(10.0)
