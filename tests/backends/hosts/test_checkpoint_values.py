"""Which checkpoints a host keeps in its memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.backends.hosts.checkpoints.values import (
    RestoreCosts,
    StoredCheckpoint,
    Worth,
    choose_evictions,
    room_kept,
    worths,
)
from fluid.engine.commands import CheckpointValue


def stored(trial: str, iteration: int = 1, size: int = 100, written: int = 0) -> StoredCheckpoint:
    return StoredCheckpoint(f"{trial}/{iteration}", trial, iteration, size, written)


def leaving(
    checkpoints: list[StoredCheckpoint], need: int, below: Worth | None = None, **values: CheckpointValue
) -> list[str]:
    worth = worths(checkpoints, values, RestoreCosts())
    return [one.path for one in choose_evictions(checkpoints, need, worth, below)]


def test_the_least_likely_to_come_back_goes_first_and_what_is_pinned_last() -> None:
    checkpoints = [stored(trial) for trial in "abcd"]
    values = {"a": CheckpointValue(0.9), "b": CheckpointValue(0.0, pinned=True), "c": CheckpointValue(0.1)}
    assert leaving(checkpoints, 1, **values) == ["c/1"]
    assert leaving(checkpoints, 201, **values) == ["c/1", "d/1", "a/1"], "d is unknown, and so worth 0.5"
    assert leaving(checkpoints, 10**6, **values) == ["c/1", "d/1", "a/1", "b/1"]
    assert leaving(checkpoints, 0, **values) == []


def test_of_a_trial_only_the_newest_is_worth_anything_even_if_it_is_pinned() -> None:
    checkpoints = [stored("a", 2), stored("a", 1), stored("b")]
    values = {"a": CheckpointValue(1.0, pinned=True), "b": CheckpointValue(0.01)}
    assert leaving(checkpoints, 1, **values) == ["a/1"]
    assert leaving(checkpoints, 101, **values) == ["a/1", "b/1"]


def test_of_equal_worth_the_one_written_least_recently_goes_first() -> None:
    checkpoints = [stored("a", written=2, size=100), stored("b", written=1, size=101), stored("c", written=3)]
    assert leaving(checkpoints, 150) == ["b/1", "a/1"]


def test_worth_is_by_byte() -> None:
    """A small file takes almost as long to find on disk as a large one."""
    small, large = stored("a", size=1000), stored("b", size=10**8)
    values = {"a": CheckpointValue(0.1), "b": CheckpointValue(0.9)}
    assert leaving([small, large], 1, **values) == ["b/1"]


def test_a_large_one_that_does_alone_spares_small_ones() -> None:
    checkpoints = [stored("a", size=10), stored("b", size=20), stored("c", size=1000)]
    worth = {"a/1": Worth(False, 1.0, 0), "b/1": Worth(False, 2.0, 0), "c/1": Worth(False, 3.0, 0)}
    assert [one.path for one in choose_evictions(checkpoints, 1000, worth)] == ["c/1"]
    assert [one.path for one in choose_evictions(checkpoints, 1010, worth)] == ["a/1", "c/1"]


def test_nothing_goes_for_what_is_worth_no_more() -> None:
    checkpoints = [stored("a", written=1), stored("b", written=2)]
    worth = worths(checkpoints, {"b": CheckpointValue(0.6)}, RestoreCosts())
    unknown = worth["a/1"]._replace(written=9)
    assert choose_evictions(checkpoints, 1, worth, below=unknown) == []
    assert [one.path for one in choose_evictions(checkpoints, 1, worth, below=worth["b/1"])] == ["a/1"]
    assert choose_evictions(checkpoints, 101, worth, below=worth["b/1"]) == [], "one alone would not do"
    pinned = Worth(True, 0.0, 0)
    assert len(choose_evictions(checkpoints, 101, worth, below=pinned)) == 2


a_checkpoint = st.tuples(
    st.sampled_from("abcdef"), st.integers(1, 3), st.integers(0, 1000), st.integers(0, 5), st.integers(0, 9)
)


@pytest.mark.slow
@given(
    st.lists(a_checkpoint, max_size=12, unique_by=lambda one: one[:2]),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.floats(0, 1), st.booleans())),
    st.integers(0, 5000),
)
def test_what_leaves_is_enough_and_no_more_and_worth_less_than_what_stays(
    made: list[tuple[str, int, int, int, int]], values: dict[str, tuple[float, bool]], need: int
) -> None:
    checkpoints = [stored(*one[:4]) for one in made]
    worth = worths(checkpoints, {trial: CheckpointValue(*value) for trial, value in values.items()}, RestoreCosts())
    gone = choose_evictions(checkpoints, need, worth)
    freed, all_bytes = sum(one.bytes for one in gone), sum(one.bytes for one in checkpoints)
    assert freed >= min(need, all_bytes)
    if freed >= need:
        assert all(freed - one.bytes < need for one in gone), "each that leaves is needed"
    stays = [one for one in checkpoints if one not in gone and one.bytes]
    if gone and freed >= need:
        most = max(gone, key=lambda one: worth[one.path])
        spared = [one for one in stays if worth[one.path] < worth[most.path]]
        assert all(freed - one.bytes < need for one in gone) and freed < need + most.bytes
        assert all(worth[one.path][0] <= worth[most.path][0] for one in spared)
    for one in stays:  # No pinned one leaves while others that are not could have left in its place.
        if not worth[one.path].pinned and any(worth[other.path].pinned for other in gone):
            assert sum(other.bytes for other in stays if not worth[other.path].pinned) < need


@given(
    st.lists(a_checkpoint, max_size=12, unique_by=lambda one: one[:2]),
    st.integers(0, 5000),
    st.tuples(st.booleans(), st.floats(0, 1e-3)),
)
def test_what_leaves_for_another_is_all_worth_less_or_nothing_leaves(
    made: list[tuple[str, int, int, int, int]], need: int, below: tuple[bool, float]
) -> None:
    checkpoints = [stored(*one[:4]) for one in made]
    worth = worths(checkpoints, {}, RestoreCosts())
    gone = choose_evictions(checkpoints, need, worth, below=Worth(*below, written=0))
    assert all(worth[one.path][:2] < below for one in gone)
    assert not gone or sum(one.bytes for one in gone) >= need


# -- how long restores take -----------------------------------------------------------------------------------------


def test_before_anything_is_measured_memory_saves_much() -> None:
    costs = RestoreCosts()
    assert costs.seconds(True, 10**9) < 0.2 * costs.seconds(False, 10**9)
    assert costs.saved(1) > 0.0


def test_medians_of_the_size_count_and_else_those_of_the_nearest() -> None:
    costs = RestoreCosts()
    for seconds in (1.0, 2.0, 30.0):
        costs.record(False, 10**8, seconds)
        costs.record(True, 10**8, seconds / 10)
    assert costs.seconds(False, 10**8) == pytest.approx(2.0)
    assert costs.saved(10**8) == pytest.approx(1.8)
    assert costs.seconds(False, 10**9) == pytest.approx(20.0), "at the same rate"
    for _ in range(40):
        costs.record(False, 10**8, 5.0)
    assert costs.seconds(False, 10**8) == pytest.approx(5.0), "old ones are forgotten"


def test_a_disk_as_fast_as_memory_still_leaves_an_order() -> None:
    costs = RestoreCosts()
    for in_memory in (True, False):
        costs.record(in_memory, 10**8, 0.1)
    assert costs.saved(10**8) > 0.0


def test_what_cannot_be_does_not_count() -> None:
    costs = RestoreCosts()
    for size, seconds in ((0, 1.0), (100, math.inf), (100, -1.0), (100, math.nan)):
        costs.record(False, size, seconds)
    assert costs.seconds(False, 100) == RestoreCosts().seconds(False, 100)


def test_the_room_kept_free() -> None:
    assert room_kept(800, lanes=1, largest=40) == 40
    assert room_kept(800, lanes=8, largest=40) == 100, "an eighth at most"
    assert room_kept(800, lanes=0, largest=40) == 40
