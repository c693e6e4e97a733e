"""Tests of fluid.planners.rollout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from fluid.planners.arrangement import Arrangement, KeepWidths, Replanner, Running, WidthChange, start_order
from fluid.planners.instance import Instance
from fluid.planners.rollout import Rollout, Segment, roll_out, start
from fluid.resources import Cluster, Device, MemoryNeed

QUARTER, HALF = 1 / 4, 1 / 2


def arrange(instance: Instance, widths: ArrayLike, replanner: Replanner | None = None) -> Arrangement:
    """These widths, in starting order."""
    column = np.asarray(widths, dtype=np.float64)
    order = start_order(column, instance.heights, instance.priority)
    return Arrangement(column, order, replanner or KeepWidths(), replan_at_start=replanner is not None, name="test")


def submit(
    rollout: Rollout,
    heights: Sequence[float],
    widths: Sequence[float],
    **model: Any,
) -> range:
    """Submits trials of these heights and widths, and starts those that fit; returns their rows."""
    instance = Instance.build(heights, 64, c=8, d=64, **model)
    rows = rollout.submit(instance, arrange(instance, widths))
    rollout.dispatch()
    return rows


def rollout_of(
    heights: Sequence[float],
    widths: Sequence[float],
    cluster: int | Cluster,
    *,
    epsilon: float = 0.0,
    **options: Any,
) -> Rollout:
    """A rollout in which these trials were submitted at time 0, with segments recorded."""
    rollout = Rollout(Cluster.of(cluster) if isinstance(cluster, int) else cluster, epsilon, record=True)
    submit(rollout, heights, widths, **options)
    return rollout


def speeds(*of: float) -> Cluster:
    return Cluster(tuple(Device(index, speed=speed) for index, speed in enumerate(of)))


def drain(rollout: Rollout) -> list[tuple[float, list[int]]]:
    """Runs to the end; returns each instant at which trials end, with their rows in order."""
    ended = []
    while rollout.running:
        rows = rollout.advance(math.inf)
        ended.append((rollout.now, sorted(rows)))
        rollout.dispatch()
    return ended


# --- Rates


def test_two_trials_on_a_device_slow_each_other_down_while_both_are_there() -> None:
    # 4 s of work take 5 s in company, then 6 s are left at full speed.
    rollout = rollout_of([10.0, 4.0], [HALF, HALF], 1, alpha=1.25)
    assert drain(rollout) == [(pytest.approx(5.0), [1]), (pytest.approx(11.0), [0])]


def test_a_lone_resident_runs_at_full_speed() -> None:
    assert drain(rollout_of([10.0, 4.0], [QUARTER, QUARTER], 2, alpha=1.3)) == [(4.0, [1]), (10.0, [0])]


def test_rates_follow_arrivals_too() -> None:
    rollout = rollout_of([10.0], [QUARTER], 1, alpha=1.25)
    assert rollout.advance(2.0) == []
    submit(rollout, [8.0], [QUARTER], alpha=1.25)
    assert rollout.remaining(0) == 8.0
    assert rollout.advance(7.0) == []
    submit(rollout, [6.4], [QUARTER], alpha=1.25)  # three residents from 7 s on
    assert rollout.remaining(0) == rollout.remaining(1) == pytest.approx(4.0)
    assert rollout.next_end == pytest.approx(7.0 + 4.0 * 1.25**2)
    assert sorted(rollout.advance(math.inf)) == [0, 1]
    assert rollout.remaining(2) == pytest.approx(2.4)
    assert rollout.next_end == pytest.approx(13.25 + 2.4), "alone again"


@pytest.mark.parametrize(
    ("width", "seconds"), [(1.0, 10.0), (2.0, 5.5), (4.0, 10 / 4 * 1.1**3), (8.0, 10 / 8 * 1.1**7)]
)
def test_a_wide_trial_advances_by_its_width_over_its_overhead(width: float, seconds: float) -> None:
    assert drain(rollout_of([10.0], [width], 8, beta=1.1)) == [(pytest.approx(seconds), [0])]


def test_a_wide_trial_is_as_fast_as_its_slowest_device() -> None:
    assert drain(rollout_of([12.0], [3.0], speeds(2.0, 4.0, 2.0))) == [(pytest.approx(2.0), [0])]
    assert drain(rollout_of([12.0, 12.0], [1.0, 1.0], speeds(2.0, 4.0))) == [(3.0, [0]), (6.0, [1])]


def test_every_trial_pays_its_own_overhead() -> None:
    rollout = rollout_of([4.0, 4.0], [HALF, HALF], 1, alpha=[1.0, 1.5])
    assert drain(rollout) == [(pytest.approx(4.0), [0]), (pytest.approx(4.0 + 4.0 - 4.0 / 1.5), [1])]


# --- What the planner does not know


# --- One instant


def test_trials_that_end_at_one_instant_end_together() -> None:
    rollout = rollout_of([3.0] * 5, [QUARTER] * 4 + [1.0], 2, alpha=1.1)
    assert drain(rollout) == [(3.0, [4]), (pytest.approx(3 * 1.1**3), [0, 1, 2, 3])]


def test_an_instant_is_not_split_by_rounding() -> None:
    rollout = rollout_of([0.1 + 0.2, 0.3, 0.3 + 1e-9], [1.0] * 3, 3)
    assert [rows for _, rows in drain(rollout)] == [[0, 1], [2]]


def test_all_completions_of_an_instant_are_processed_before_anything_starts() -> None:
    # Seen one by one, the first device to fall idle would take all that wait.
    rollout = rollout_of([4.0] * 2 + [1.0] * 4, [1.0] * 2 + [QUARTER] * 4, 2)
    assert sorted(rollout.advance(math.inf)) == [0, 1]
    rollout.dispatch()
    assert [len(rows) for rows in rollout.occupancy.residents.values()] == [2, 2]


def test_time_stands_at_the_limit_when_nothing_ends_before_it() -> None:
    rollout = rollout_of([5.0], [1.0], 1)
    assert rollout.advance(3.0) == []
    assert rollout.now == 3.0
    assert rollout.advance(5.0) == [0]
    assert rollout.next_end == math.inf


# --- Resizing


def test_a_pause_goes_on_when_others_are_let_in() -> None:
    rollout = rollout_of([10.0], [2.0], 2, epsilon=2.0)
    rollout.advance(1.0)
    rollout.resize(0, 1.0)
    rollout.advance(2.0)
    assert rollout.resize(0, HALF)
    assert drain(rollout) == [(11.0, [0])]
    assert [segment.pause for segment in rollout.segments] == [0.0, 1.0, 1.0]


def test_neighbours_speed_up_when_a_trial_moves_out_and_slow_down_when_it_moves_in() -> None:
    rollout = rollout_of([10.0, 10.0], [1.0, HALF], 2, alpha=1.25)
    rollout.advance(2.0)
    assert rollout.resize(0, HALF)
    assert rollout.occupancy.held == {0: (1,), 1: (1,)}
    rollout.advance(3.25)
    assert rollout.remaining(0) == rollout.remaining(1) == pytest.approx(7.0)
    assert rollout.resize(1, 1.0)
    assert rollout.occupancy.held == {0: (1,), 1: (0,)}
    rollout.advance(4.25)
    assert rollout.remaining(0) == pytest.approx(6.0)
    assert rollout.remaining(1) == pytest.approx(6.0)


def test_a_resize_for_which_there_is_no_room_changes_nothing() -> None:
    rollout = rollout_of([10.0, 8.0], [1.0, 1.0], 2, epsilon=0.5)
    rollout.advance(2.0)
    assert not rollout.resize(0, 2.0)
    assert rollout.occupancy.held == {0: (0,), 1: (1,)}
    assert rollout.width(0) == 1.0
    assert rollout.resizes == 0
    assert drain(rollout) == [(8.0, [1]), (10.0, [0])]
    assert len(rollout.segments) == 2


def test_apply_carries_out_resizes_in_order() -> None:
    rollout = rollout_of([10.0, 10.0], [3.0, 1.0], 4)
    rollout.apply([WidthChange(0, 1.0), WidthChange(1, 3.0)])
    assert rollout.occupancy.held == {0: (0,), 1: (3, 1, 2)}


# --- Snapshots


def test_a_snapshot_of_nothing_is_empty() -> None:
    seen = Rollout(Cluster.of(3)).snapshot()
    assert len(seen) == 0
    assert (seen.free, seen.n) == (3, 3)


# --- The queue


def test_priority_comes_before_width_and_width_before_the_order_of_submission() -> None:
    rollout = rollout_of([1.0, 2.0, 3.0, 4.0], [HALF, 1.0, 1.0, 1.0], 1, priority=[1.0, 1.0, 2.0, 1.0])
    assert [row for _, rows in drain(rollout) for row in rows] == [2, 3, 1, 0]


def test_a_trial_short_of_memory_lets_its_likes_pass() -> None:
    cluster = Cluster((Device(0, memory_bytes=10.0),), memory_watermark=1.0)
    needs = [MemoryNeed(6.0), MemoryNeed(6.0), MemoryNeed(4.0)]
    rollout = rollout_of([3.0, 2.0, 1.0], [QUARTER] * 3, cluster, needs=needs)
    assert sorted(rollout.running) == [0, 2]
    assert drain(rollout) == [(1.0, [2]), (3.0, [0]), (5.0, [1])]


# --- Devices come and go


# --- Rollouts


class Widen:
    """Gives every idle device to the first running trial; remembers what it saw."""

    moves_only_devices = True

    def __init__(self) -> None:
        self.seen: list[Running] = []

    def replan(self, running: Running) -> list[WidthChange]:
        self.seen.append(running)
        return [WidthChange(int(running.rows[0]), float(running.widths[0] + running.free))] if running.free else []

    def make_room(self, running: Running, waiting: Any) -> list[WidthChange]:
        raise AssertionError("a rollout starts all trials at time 0")


def test_a_rollout_replans_at_each_departure_once_nothing_is_queued() -> None:
    instance = Instance.build([8.0, 4.0, 4.0, 2.0], 3, epsilon=0.25)
    replanner = Widen()
    rollout = roll_out(instance, arrange(instance, [1.0] * 4, replanner), record=True)
    assert [running.rows.tolist() for running in replanner.seen] == [[0, 3], [0]]
    assert [running.free for running in replanner.seen] == [1, 1]
    # At 4 s row 0 gets a second device and stands still for 0.25 s; at 6 s a third, with 0.5 s of work left.
    assert rollout.now == pytest.approx(6.25 + 0.5 / 3)
    assert rollout.finished[0] == rollout.now
    assert rollout.resizes == 2


def test_a_start_is_replanned_free_of_charge_if_devices_are_idle() -> None:
    instance = Instance.build([8.0, 4.0], 4, epsilon=0.25)
    replanner = Widen()
    rollout = start(instance, arrange(instance, [1.0, 1.0], replanner))
    assert rollout.occupancy.held == {0: (0, 2, 3), 1: (1,)}
    assert replanner.seen[0].epsilon == 0.0
    assert rollout.resizes == 0


def test_a_start_with_a_queue_is_not_replanned() -> None:
    instance = Instance.build([8.0, 4.0], 3)
    replanner = Widen()
    rollout = start(instance, arrange(instance, [2.0, 2.0], replanner))
    assert (rollout.queued, rollout.occupancy.free_count) == (1, 1)
    assert replanner.seen == []


def test_a_rollout_gives_up_when_it_is_told_to() -> None:
    instance = Instance.build([8.0, 4.0], 2)
    arrangement = arrange(instance, [1.0, 1.0])
    assert roll_out(instance, arrangement, give_up_after=8.0).now == 8.0
    given_up = roll_out(instance, arrangement, give_up_after=7.9)
    assert given_up.now == math.inf
    assert sorted(given_up.finished) == [1]


def test_segments_are_kept_only_if_asked_for() -> None:
    instance = Instance.build([8.0, 4.0], 2)
    assert roll_out(instance, arrange(instance, [1.0, 1.0])).segments == []
    assert len(roll_out(instance, arrange(instance, [1.0, 1.0]), record=True).segments) == 2


# --- Whatever happens, work is neither lost nor made up


def work_done(segments: Sequence[Segment], row: int, alpha: float, beta: float, speed: dict[int, float]) -> float:
    """Work of one row, in seconds at width 1 and speed 1, read off the segments of all rows alone."""
    total = 0.0
    for segment in (segment for segment in segments if segment.row == row):
        slowest, begin = min(speed[device] for device in segment.devices), segment.start + segment.pause
        if segment.width >= 1.0:
            total += slowest * segment.width / beta ** (segment.width - 1.0) * (segment.end - begin)
            continue
        there = [other for other in segments if other.devices == segment.devices]
        times = {begin, segment.end, *(other.start for other in there), *(other.end for other in there)}
        cuts = sorted(time for time in times if begin <= time <= segment.end)
        for a, b in itertools.pairwise(cuts):
            residents = sum(other.start <= a and b <= other.end for other in there)
            total += slowest / alpha ** (residents - 1) * (b - a)
    return total


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["advance", "part", "resize", "resize", "submit", "lose", "gain", "withdraw"]),
        st.integers(0, 99),
        st.sampled_from([QUARTER, 1 / 3, HALF, 1.0, 2.0, 3.0]),
    ),
    max_size=25,
)


def ended(rollout: Rollout) -> list[int]:
    """Rows that have no work left."""
    return [row for row in rollout.finished if row not in rollout.running and rollout.remaining(row) <= 1e-9]
