"""Memory of trials that take turns in lanes, against brute force over the lanes that they may be in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.devices.occupancy import Occupancy
from fluid.policies.turns import LaneLoad, find_lane
from fluid.policies.urgent.rooms import Room, RoomMate, who_pauses
from fluid.resources import Cluster, Device, MemoryNeed

NEEDS = st.builds(MemoryNeed, st.integers(0, 6).map(float), st.integers(0, 9).map(float))
GROUP = "turns"


def device_with(needs: Sequence[MemoryNeed], per_lane: int, memory: float = 1e6) -> Occupancy:
    """A device on which these trials run, taking turns; their lanes are not known yet."""
    occupancy = Occupancy(Cluster((Device(0, kind="gpu", memory_bytes=memory),), 1.0))
    occupancy.groups.turns.add(GROUP)
    occupancy.groups.rows[GROUP] = per_lane
    for row, need in enumerate(needs):
        occupancy.groups.of[row] = GROUP
        occupancy.hold(row, (0,), 1 / 64, need)
    return occupancy


def arrangements(count: int, lanes: int, per_lane: int) -> Iterator[tuple[int, ...]]:
    """All ways to give so many trials one of these lanes each."""
    for lane_of in itertools.product(range(lanes), repeat=count):
        if all(lane_of.count(lane) <= per_lane for lane in lane_of):
            yield lane_of


def exact(needs: Sequence[MemoryNeed], lane_of: Sequence[int]) -> float:
    """The left side of the safety condition."""
    persistent = sum(need.persistent_bytes for need in needs)
    sizes = {
        lane: max(need.ephemeral_bytes for need, its in zip(needs, lane_of, strict=True) if its == lane)
        for lane in lane_of
    }
    return persistent + sum(sizes.values())


@settings(max_examples=60)
@given(st.lists(NEEDS, min_size=1, max_size=5), st.integers(1, 5))
def test_unknown_lanes_count_as_the_worst_arrangement(needs: list[MemoryNeed], per_lane: int) -> None:
    memory = device_with(needs, per_lane).memory
    lanes = -(-len(needs) // per_lane)
    worst = max(exact(needs, lane_of) for lane_of in arrangements(len(needs), lanes, per_lane))
    assert memory.running_bytes(0) == memory.placed_bytes(0) == memory.taken_bytes(0) == worst
    if per_lane == 1:
        assert worst == sum(need.peak_bytes for need in needs)


@settings(max_examples=300)
@given(st.data())
def test_known_lanes_count_as_they_are_and_take_what_the_lane_finder_takes(data: st.DataObject) -> None:
    needs = data.draw(st.lists(NEEDS, min_size=1, max_size=8))
    per_lane = data.draw(st.integers(1, 4))
    lane_of: list[int] = []
    for _ in needs:
        lane_of.append(data.draw(st.sampled_from([lane for lane in range(8) if lane_of.count(lane) < per_lane])))
    filled, more = exact(needs, lane_of), data.draw(NEEDS)
    usable = filled + data.draw(st.integers(0, 16))
    occupancy = device_with(needs, per_lane, max(1.0, usable))
    occupancy.groups.lane_of.update(enumerate(lane_of))
    memory = occupancy.memory
    assert memory.running_bytes(0) == memory.filled_bytes(0) == filled
    loads = [
        LaneLoad(
            lane,
            sum(need.persistent_bytes for need, its in zip(needs, lane_of, strict=True) if its == lane),
            max(need.ephemeral_bytes for need, its in zip(needs, lane_of, strict=True) if its == lane),
            trials=lane_of.count(lane),
        )
        for lane in sorted(set(lane_of))
    ]
    found = find_lane(more, loads, max(1.0, usable), most_per_lane=per_lane)
    assert memory.fits(0, more) is (found is not None)
    row = data.draw(st.sampled_from(range(len(needs))))
    others = [place for place in range(len(needs)) if place != row]
    rest = exact([needs[place] for place in others], [lane_of[place] for place in others])
    state = needs[row].persistent_bytes
    assert memory.paused_bytes(0, row) == filled - rest - state
    choices = [lane for lane in range(9) if [lane_of[place] for place in others].count(lane) < per_lane]
    least = min(
        exact([*(needs[place] for place in others), more], [*(lane_of[place] for place in others), lane])
        for lane in choices
    )
    assert memory.fits_in_place_of(0, more, row) is (least + state <= max(1.0, usable))
    occupancy.release(row)
    assert memory.running_bytes(0) == rest
    assert row not in occupancy.groups.lane_of


@settings(max_examples=100)
@given(st.lists(NEEDS, min_size=1, max_size=6), NEEDS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_leaving_trials_free_what_the_others_and_the_next_one_do_not_need(
    needs: list[MemoryNeed], more: MemoryNeed, per_lane: int, rng: random.Random
) -> None:
    memory = device_with(needs, per_lane).memory
    lacking = memory.filled_bytes(0) + memory.added_bytes(0, more)
    order = rng.sample(range(len(needs)), len(needs))
    for place in range(len(order)):
        lacking -= memory.left_bytes(0, more, order[: place + 1])
        left = [needs[row] for row in order[place + 1 :]]
        assert lacking == device_with([*left, more], per_lane).memory.running_bytes(0)
    assert lacking == more.peak_bytes


def test_ten_thousand_arrivals_and_departures_never_overflow_a_device() -> None:
    """Trials are admitted by the ledger, get lanes by the finder, and leave in any order, so that lanes have gaps."""
    rng = random.Random(7)
    most_running = 0
    for usable, per_lane in itertools.product((20.0, 40.0, 80.0), (2, 4, 16)):
        occupancy = device_with([], per_lane, usable)
        needs: dict[int, MemoryNeed] = {}
        for row in range(1200):
            need = MemoryNeed(float(rng.randint(0, 3)), float(rng.randint(0, 12)))
            occupancy.groups.of[row] = GROUP
            if occupancy.place(row, 1 / 64, need) is not None:
                needs[row] = need
                lanes = occupancy.groups.lane_of
                loads = []
                for lane in sorted({lanes[other] for other in needs if other != row}):
                    there = [needs[other] for other in needs if other != row and lanes[other] == lane]
                    persistent = sum(each.persistent_bytes for each in there)
                    loads.append(LaneLoad(lane, persistent, max(e.ephemeral_bytes for e in there), len(there)))
                choice = find_lane(need, loads, usable, most_per_lane=per_lane)
                assert choice is not None
                new = max((lanes[other] for other in needs if other != row), default=0) + 1
                lanes[row] = new if choice.lane is None else choice.lane
            filled = exact(list(needs.values()), [occupancy.groups.lane_of[other] for other in needs])
            assert filled == occupancy.memory.placed_bytes(0) <= usable
            most_running = max(most_running, len(needs))
            while needs and rng.random() < 0.5:
                occupancy.release(gone := rng.choice(list(needs)))
                del needs[gone]
    assert most_running > 10


def test_trials_in_no_such_group_need_the_sum_of_their_peaks() -> None:
    needs = [MemoryNeed(1.0, 5.0), MemoryNeed(2.0, 7.0)]
    occupancy = device_with(needs, 4)
    assert occupancy.memory.running_bytes(0) == 10.0
    occupancy.groups.turns.clear()
    assert occupancy.memory.running_bytes(0) == 15.0
    assert occupancy.memory.added_bytes(0, MemoryNeed(1.0, 1.0)) == 2.0


def test_a_trial_among_many_takes_its_part_of_its_lane() -> None:
    groups = device_with([], 4).groups
    assert groups.typical(GROUP, MemoryNeed(1.0, 8.0)).peak_bytes == 3.0
    assert groups.typical("fused", MemoryNeed(1.0, 8.0)) == groups.typical(None, MemoryNeed(1.0, 8.0))
    assert groups.typical("fused", MemoryNeed(1.0, 8.0)).peak_bytes == 9.0


def test_room_is_made_by_the_trials_whose_peaks_make_the_lane_large() -> None:
    """Pausing one of two equally large trials would free nothing, and pausing the small one neither."""
    needs = [MemoryNeed(1.0, 10.0), MemoryNeed(1.0, 10.0), MemoryNeed(1.0, 1.0)]
    memory = device_with(needs, 4).memory
    newcomer = MemoryNeed(1.0, 2.0)

    def room(usable: float) -> Room:
        free = usable - memory.taken_bytes(0) + memory.ephemeral_bytes(0)
        mates = [RoomMate(row, gain=1.0 + row, size=needs[row].peak_bytes, most=8) for row in range(3)]
        return Room(
            0, mates, 8, 1.0, free, peaks=lambda left: memory.ephemeral_bytes(0, without=left, joining=[newcomer])
        )

    found = {usable: who_pauses(room(usable)) for usable in (14.0, 13.0, 6.0, 5.0)}
    assert {
        usable: None if pausing is None else [each.row for each in pausing] for usable, pausing in found.items()
    } == {
        14.0: [],  # 4 bytes of all states, and 10 of the lane.
        13.0: [0, 1],
        6.0: [0, 1],  # The states of both stay.
        5.0: None,
    }
