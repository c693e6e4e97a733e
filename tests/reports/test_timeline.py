from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import make_planner
from fluid.planners.rollout import Segment
from fluid.reports.run.timeline import Bar, DeviceChange, Timeline
from fluid.resources import Cluster


def timeline(
    segments: Sequence[Segment], n: int, makespan: float | None = None, changes: Sequence[DeviceChange] = ()
) -> Timeline:
    rows = 1 + max((segment.row for segment in segments), default=-1)
    end = max((segment.end for segment in segments), default=0.0) if makespan is None else makespan
    names = tuple(f"t{row}" for row in range(rows))
    return Timeline(Cluster.of(n).devices, tuple(segments), names, end, changes=tuple(changes))


def packed(row: int, start: float, end: float, device: int = 0, p: int = 4) -> Segment:
    return Segment(row, start, end, (device,), 1.0 / p)


def wide(row: int, start: float, end: float, *devices: int) -> Segment:
    return Segment(row, start, end, devices, float(len(devices)))


def slots(bars: Sequence[Bar]) -> list[tuple[int, int, int]]:
    return [(bar.row, bar.slot, bar.slots) for bar in bars]


# --- Bars


def test_a_lone_trial_has_its_device_to_itself() -> None:
    assert timeline([wide(0, 0.0, 4.0, 0)], 1).bars[0] == (Bar(0, 0, 0.0, 4.0, 0, 1),)


def test_neighbours_get_slots_side_by_side() -> None:
    line = timeline([packed(0, 0.0, 4.0), packed(1, 0.0, 2.0), packed(2, 0.0, 3.0)], 1)
    assert slots(line.bars[0]) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_a_free_slot_is_used_again_and_nobody_moves() -> None:
    line = timeline([packed(0, 0.0, 9.0), packed(1, 0.0, 2.0), packed(2, 2.0, 5.0), packed(3, 4.0, 6.0)], 1)
    assert slots(line.bars[0]) == [(0, 0, 3), (1, 1, 3), (2, 1, 3), (3, 2, 3)]


def test_a_new_run_of_bars_counts_its_own_slots() -> None:
    line = timeline([packed(0, 0.0, 2.0), packed(1, 0.0, 2.0), wide(2, 2.0, 5.0, 0), packed(3, 5.0, 6.0)], 1)
    assert slots(line.bars[0]) == [(0, 0, 2), (1, 1, 2), (2, 0, 1), (3, 0, 1)]


def test_a_wide_trial_has_a_bar_on_each_device() -> None:
    line = timeline([wide(0, 0.0, 1.0, 2, 0)], 3)
    assert [len(line.bars[device]) for device in range(3)] == [1, 0, 1]


segment_lists = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 10), st.integers(1, 3)), max_size=40
).map(
    lambda entries: [
        Segment(
            row,
            float(start),
            float(start + length),
            tuple((device + offset) % 4 for offset in range(width)),
            float(width),
        )
        for row, (device, start, length, width) in enumerate(entries)
    ]
)


@given(segment_lists)
def test_bars_that_overlap_never_share_a_slot(segments: list[Segment]) -> None:
    line = timeline(segments, 4)
    for bars in line.bars.values():
        assert all(0 <= bar.slot < bar.slots for bar in bars)
        for one in bars:
            for other in bars:
                if one is not other and one.start < other.end and other.start < one.end:
                    assert one.slot != other.slot
                    assert one.slots == other.slots
        # No more slots than trials at one time need.
        for bar in bars:
            starts = [other.start for other in bars]
            busiest = max(sum(other.start <= at < other.end for other in bars) for at in starts)
            assert bar.slots <= busiest


# --- Blocks


def test_adjacent_lanes_are_one_block_and_scattered_ones_several() -> None:
    line = timeline([wide(0, 0.0, 1.0, 5, 0, 1, 2)], 6)
    assert [(block.lane, block.lanes) for block in line.blocks] == [(0, 3), (5, 1)]


def test_lanes_are_counted_over_the_devices_there_are() -> None:
    cluster = Cluster(tuple(device for device in Cluster.of(5).devices if device.index != 1))
    line = Timeline(cluster.devices, (wide(0, 0.0, 1.0, 0, 2),), ("t",), 1.0)
    assert [(block.lane, block.lanes) for block in line.blocks] == [(0, 2)]


@given(segment_lists)
def test_blocks_cover_each_segment_once(segments: list[Segment]) -> None:
    line = timeline(segments, 4)
    for position, segment in enumerate(segments):
        lanes = [
            lane
            for block in line.blocks
            if block.segment == position
            for lane in range(block.lane, block.lane + block.lanes)
        ]
        assert sorted(lanes) == sorted(set(segment.devices))


# --- Utilisation


def test_co_residents_count_once() -> None:
    line = timeline([packed(0, 0.0, 4.0), packed(1, 1.0, 2.0)], 2, makespan=8.0)
    assert line.busy_fractions == {0: 0.5, 1: 0.0}
    assert line.utilisation == 0.25


def test_stretches_in_which_a_device_is_shared() -> None:
    line = timeline([packed(0, 0.0, 4.0), packed(1, 1.0, 2.0), wide(2, 4.0, 6.0, 0, 1)], 2)
    assert line.shared_intervals == {0: ((0.0, 4.0),), 1: ()}


def test_utilisation_over_time() -> None:
    times, shares = timeline([wide(0, 0.0, 2.0, 0, 1), wide(1, 2.0, 3.0, 1)], 2, makespan=4.0).utilisation_steps()
    assert times.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert shares.tolist() == [1.0, 0.5, 0.0]


@given(segment_lists.filter(bool), st.integers(1, 50))
def test_bins_average_to_the_utilisation(segments: list[Segment], count: int) -> None:
    line = timeline(segments, 4)
    bins = line.utilisation_bins(count)
    assert bins.shape == (count,)
    assert np.all((bins > -1e-9) & (bins < 1.0 + 1e-9))
    assert float(bins.mean()) == pytest.approx(line.utilisation)


def test_an_absent_device_does_not_count() -> None:
    changes = [(2.0, 1, False), (6.0, 1, True)]
    line = timeline([wide(0, 0.0, 8.0, 0), wide(1, 0.0, 2.0, 1)], 2, changes=changes)
    assert line.absences == {1: ((2.0, 6.0),)}
    assert line.busy_fractions == {0: 1.0, 1: 0.5}
    assert line.device_seconds == 12.0
    assert line.utilisation == pytest.approx(10.0 / 12.0)
    times, shares = line.utilisation_steps()
    assert times.tolist() == [0.0, 2.0, 6.0, 8.0]
    assert shares.tolist() == [1.0, 1.0, 0.5]


def test_a_device_that_joins_late_and_one_that_stays_away() -> None:
    line = timeline([wide(0, 0.0, 10.0, 0)], 3, changes=[(3.0, 2, True), (4.0, 1, False)])
    assert line.absences == {1: ((4.0, 10.0),), 2: ((0.0, 3.0),)}


def test_a_change_after_the_end_is_no_absence() -> None:
    assert timeline([wide(0, 0.0, 2.0, 0)], 2, changes=[(5.0, 1, False)]).absences == {}


def test_nothing_at_all() -> None:
    line = timeline([], 2)
    assert line.utilisation == 0.0
    assert line.blocks == ()
    assert line.utilisation_bins(3).tolist() == [0.0, 0.0, 0.0]


# --- Where timelines come from


def test_stages_of_a_trial_are_one_trial() -> None:
    names = ("trial 3, stage 0", "trial 4, stage 0", "trial 3, stage 1")
    line = Timeline(Cluster.of(1).devices, (), names, 0.0)
    assert line.names == ("trial 3", "trial 4")
    assert line.trials == (0, 1, 0)


def test_a_plan_as_a_timeline() -> None:
    instance = Instance.build([4.0, 4.0, 12.0, 30.0], 5, c=2, d=5)
    plan = Plan("static", instance, make_planner("static").arrange(instance))
    line = Timeline.of_plan(plan)
    assert (line.makespan, len(line.devices)) == (pytest.approx(12.0), 5)
    assert line.lower_bound == pytest.approx(8.2)
    assert line.utilisation == pytest.approx((3 * 10.0 + 12.0 + 4.0) / 60.0)
    widest = max(line.blocks, key=lambda block: block.lanes)
    assert (line.segments[widest.segment].row, widest.lanes) == (3, 3)
    assert {block.slots for block in line.blocks if line.segments[block.segment].row in (0, 1)} == {2}
