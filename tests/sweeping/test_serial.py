"""Work of several threads, one piece at a time."""

from __future__ import annotations

import threading

from fluid.sweeping.serial import SerialWork


def test_work_is_done_once_and_never_two_pieces_at_a_time() -> None:
    work, done, at_work = SerialWork(), [], []
    work.start(lambda: None)

    def piece(number: int) -> None:
        at_work.append(number)
        assert at_work == [number]
        done.append(number)
        at_work.clear()

    def bring(first: int) -> None:
        for number in range(first, first + 2_000):
            work.add(lambda number=number: piece(number))  # type: ignore[misc]
            work.do()

    threads = [threading.Thread(target=bring, args=(2_000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8_000)), "none is left behind"


def test_a_thread_that_works_takes_what_others_bring_meanwhile() -> None:
    work, done = SerialWork(), []

    def outer() -> None:
        def bring() -> None:
            work.add(lambda: done.append(threading.current_thread()))
            work.do()

        other = threading.Thread(target=bring)
        other.start()
        other.join()
        assert not done, "the other thread does not wait, and does not work"

    work.start(outer)
    assert done == [threading.current_thread()]


def test_an_error_leaves_the_rest_for_later() -> None:
    work, done = SerialWork(), []
    work.add(lambda: done.append(1))
    try:
        work.start(lambda: done.append(1 / 0))
    except ZeroDivisionError:
        assert not done
        work.do()
    assert done == [1]
