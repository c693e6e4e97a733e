from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.devices.start_queue import StartQueue

ROWS = st.lists(
    st.tuples(st.sampled_from([0.25, 0.5, 1.0, 4.0]), st.sampled_from([1.0, 2.0]), st.sampled_from(["x", "y", None])),
    max_size=20,
)
Row = tuple[float, float, Hashable]


def filled(rows: list[Row]) -> StartQueue:
    queue = StartQueue()
    for row, (width, priority, kind) in enumerate(rows):
        queue.push(row, width, priority, kind)
    return queue


def in_order(rows: list[Row]) -> list[int]:
    return sorted(range(len(rows)), key=lambda row: (-rows[row][1], -rows[row][0], row))


@given(ROWS)
def test_rows_wait_by_priority_then_width_then_as_queued(rows: list[Row]) -> None:
    queue = filled(rows)
    assert list(queue) == in_order(rows)
    assert len(queue) == len(rows)
    assert queue.start(lambda _: True) == in_order(rows)
    assert len(queue) == 0 and list(queue) == []


@given(ROWS, st.sets(st.integers(0, 20)))
def test_removed_rows_are_gone_and_the_others_keep_their_order(rows: list[Row], out: set[int]) -> None:
    queue = filled(rows)
    for row in out & set(range(len(rows))):
        assert queue.width(row) == rows[row][0]
        queue.remove(row)
        assert row not in queue
    assert list(queue) == [row for row in in_order(rows) if row not in out]


@given(ROWS, st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_rows_that_any_device_will_do_for_are_counted_by_width(
    rows: list[Row], bound: set[int], out: set[int], start: set[int]
) -> None:
    queue, left = StartQueue(), set(range(len(rows)))
    for row, (width, priority, kind) in enumerate(rows):
        queue.push(row, width, priority, kind, bound=row in bound)
    for row in out & left:
        queue.remove(row)
    left -= out | set(queue.start(lambda row: row in start))
    assert queue.unbound == Counter(rows[row][0] for row in left - bound)
    queue.clear()
    assert queue.unbound == {}


@given(ROWS, st.sets(st.tuples(st.sampled_from([0.25, 0.5, 1.0, 4.0]), st.sampled_from(["x", "y", None]))))
def test_alike_rows_are_refused_once_and_let_the_others_pass(rows: list[Row], unfit: set[tuple[float, str]]) -> None:
    queue, asked = filled(rows), []

    def place(row: int) -> bool:
        asked.append(row)
        return (rows[row][0], rows[row][2]) not in unfit

    started = queue.start(place)
    assert started == [row for row in in_order(rows) if (rows[row][0], rows[row][2]) not in unfit]
    refused = [(rows[row][0], rows[row][2]) for row in asked if row not in started]
    assert len(refused) == len(set(refused))
    assert list(queue) == [row for row in in_order(rows) if row not in started]


def test_a_row_that_starts_as_long_as_there_is_room() -> None:
    queue, room = filled([(0.5, 1.0, None)] * 5), [3]

    def place(row: int) -> bool:
        room[0] -= 1
        return room[0] >= 0

    assert queue.start(place) == [0, 1, 2]
    assert list(queue) == [3, 4]
    assert queue.widths() == [0.5]
    queue.clear()
    assert len(queue) == 0


def test_of_one_priority_those_that_lead_to_more_come_first_whatever_their_width() -> None:
    queue = StartQueue()
    queue.push(0, 4.0)
    queue.push(1, 1.0, critical=True)
    queue.push(2, 1.0, priority=2.0)
    queue.push(3, 2.0, critical=True)
    assert list(queue) == [2, 3, 1, 0]
    assert queue.widths() == [1.0, 2.0, 1.0, 4.0]


def test_a_row_that_was_first_before_is_so_again() -> None:
    queue = filled([(1.0, 1.0, "x"), (1.0, 1.0, "y"), (2.0, 1.0, "x")])
    queue.push(7, 1.0, kind="y", in_front=True)
    queue.push(8, 1.0, kind="x", in_front=True)
    assert list(queue) == [2, 8, 7, 0, 1]
    queue.remove(8)
    assert queue.start(lambda _: True) == [2, 7, 0, 1]


def test_rows_that_stay_in_line_get_new_widths_where_they_are() -> None:
    queue = StartQueue()
    for row, width in ((1, 1.0), (2, 0.5), (3, 0.5), (4, 1.0)):
        queue.push(row, width, kind="a")
    before = list(queue)
    renamed = queue.set_widths({1: 0.5, 2: 0.25}, lambda row: "a")
    assert renamed == {(-1.0, "a"): (-0.5, "a"), (-0.5, "a"): (-0.25, "a")}
    assert list(queue) == before and [queue.width(row) for row in before] == [0.5, 0.5, 0.25, 0.25]
    assert queue.unbound == {0.5: 2, 0.25: 2}
    queue.push(5, 0.5, kind="a")
    queue.remove(4)
    assert list(queue) == [1, 5, 2, 3] and queue.unbound == {0.5: 2, 0.25: 2}


@pytest.mark.parametrize(
    ("width_of", "kind"),
    [
        pytest.param({1: 0.5, 2: 0.25, 3: 0.2}, "a", id="rows of one class part"),
        pytest.param({1: 0.25, 2: 0.5, 3: 0.5}, "a", id="classes change places"),
        pytest.param({1: 0.5, 2: 0.5, 3: 0.5}, "a", id="classes become one"),
        pytest.param({1: 0.5, 2: 0.25, 3: 0.25}, "b", id="another kind"),
    ],
)
def test_rows_that_do_not_stay_in_line_keep_their_widths(width_of: dict[int, float], kind: str) -> None:
    queue = StartQueue()
    for row, width in ((1, 1.0), (2, 0.5), (3, 0.5)):
        queue.push(row, width, kind="a")
    assert queue.set_widths(width_of, lambda row: kind) is None
    assert [queue.width(row) for row in queue] == [1.0, 0.5, 0.5] and queue.unbound == {1.0: 1, 0.5: 2}
