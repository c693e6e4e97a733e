"""Admission by memory (docs/theory.md, section 8), against a model of what lanes really hold on a device.

In the model, each lane has a CUDA context, hosts residents of which at most one runs, and holds the persistent bytes
of all and the ephemeral bytes of the one that runs. Placement knows trials that run, and one number of reserved bytes
for a device. What it admits must fit by the model.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fluid.devices.occupancy import Occupancy
from fluid.resources import Cluster, Device, MemoryNeed

GIB = float(1 << 30)
NEEDS = st.builds(MemoryNeed, st.integers(0, 6).map(float), st.integers(0, 6).map(float))


def one_device(memory: float, watermark: float = 0.9) -> Occupancy:
    return Occupancy(Cluster((Device(0, kind="gpu", memory_bytes=memory),), watermark))


# --- The condition itself


@given(st.lists(NEEDS, min_size=1, max_size=8), st.floats(1.0, 40.0), st.floats(0.1, 1.0))
def test_a_device_takes_just_what_fits_under_the_watermark(
    needs: list[MemoryNeed], memory: float, watermark: float
) -> None:
    occupancy = one_device(memory, watermark)
    filled = 0.0
    for row, need in enumerate(needs):
        fits = filled + need.persistent_bytes + need.ephemeral_bytes <= memory * watermark
        assert (occupancy.place(row, 1 / 8, need) is not None) is fits
        filled += need.peak_bytes if fits else 0.0
        assert occupancy.memory.filled_bytes(0) == filled


def test_the_default_watermark_is_nine_tenths() -> None:
    occupancy = one_device(100.0)
    assert occupancy.place(0, 0.5, MemoryNeed(60.0, 30.1)) is None
    assert occupancy.place(0, 0.5, MemoryNeed(60.0, 30.0)) == (0,)


def test_both_parts_count() -> None:
    """Residents of different lanes may reach their peaks at the same moment."""
    occupancy = one_device(100.0)
    assert occupancy.place(0, 0.5, MemoryNeed(10.0, 40.0)) == (0,)
    assert occupancy.place(1, 0.5, MemoryNeed(10.0, 40.0)) is None
    assert occupancy.place(1, 0.5, MemoryNeed(40.0, 0.0)) == (0,)


@given(st.lists(NEEDS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_leaving_gives_back_what_was_taken(needs: list[MemoryNeed], rng: random.Random) -> None:
    occupancy = one_device(100.0)
    placed = [row for row, need in enumerate(needs) if occupancy.place(row, 1 / 8, need)]
    rng.shuffle(placed)
    for row in placed:
        occupancy.release(row)
    assert occupancy.memory.filled_bytes(0) == 0.0
    assert occupancy.place(99, 0.5, MemoryNeed(90.0)) == (0,)


# --- What lanes take for themselves


@pytest.mark.parametrize(("contexts", "expected"), [(0, 4), (1, 4), (4, 3), (8, 2)])
def test_contexts_count_when_they_are_reserved(contexts: int, expected: int) -> None:
    """A context is there for as long as its lane, whether or not a trial runs in it."""
    occupancy = one_device(10.0 * GIB)
    occupancy.memory.reserve(0, contexts * 0.5 * GIB)
    placed = [occupancy.place(row, 1 / 8, MemoryNeed(1.5 * GIB, 0.5 * GIB)) for row in range(8)]
    assert sum(place is not None for place in placed) == expected
    occupancy.memory.reserve(0, -contexts * 0.5 * GIB)
    assert 0 not in occupancy.memory.reserved


@pytest.mark.parametrize(("lanes", "expected"), [(0, 4), (1, 4), (4, 4), (6, 3)])
def test_a_lane_counts_whether_it_is_there_or_still_has_to_come(lanes: int, expected: int) -> None:
    """90 usable, trials of 18, lanes of 5, of which one is beyond the watermark: 4 x 18 + 3 x 5 = 87."""
    occupancy = one_device(100.0)
    occupancy.memory.set_lanes(0, lanes, lanes * 5.0, 5.0)
    placed = [occupancy.place(row, 1 / 8, MemoryNeed(18.0)) for row in range(8)]
    assert sum(place is not None for place in placed) == expected


def test_a_trial_alone_has_room_for_its_lane_and_for_no_others() -> None:
    occupancy = one_device(100.0)
    occupancy.memory.set_lanes(0, 1, 5.0, 5.0)
    assert occupancy.place(0, 1.0, MemoryNeed(90.0)) == (0,)
    occupancy.release(0)
    occupancy.memory.set_lanes(0, 2, 10.0, 5.0)
    assert occupancy.place(0, 1.0, MemoryNeed(90.0)) is None
    assert occupancy.place(0, 1.0, MemoryNeed(85.0)) == (0,)


@pytest.mark.parametrize(("own", "added"), [([], 0.0), ([2.0], 2.0), ([5.0, 4.0], 5.0), ([1.0, 1.0], 2.0)])
def test_a_further_lane_adds_what_is_not_beyond_the_watermark(own: list[float], added: float) -> None:
    memory = one_device(100.0).memory
    if own:
        memory.set_lanes(0, len(own), sum(own), 5.0)
    assert memory.new_lane_bytes(0) == added
    memory.set_lanes(0, len(own) + 1, sum(own) + 5.0, 5.0)
    assert memory.lane_bytes(0, 0) == max(0.0, sum(own) - 5.0) + added


def test_lanes_are_gone_with_their_device() -> None:
    occupancy = one_device(10.0)
    occupancy.memory.set_lanes(0, 4, 4.0, 1.0)
    occupancy.remove_device(0)
    occupancy.add_device(Device(0, memory_bytes=10.0))
    assert occupancy.memory.lane_bytes(0, 4) == 0.0


# --- What is learnt after a trial was placed


def test_a_trial_measured_alone_leaves_no_more_than_the_rest() -> None:
    occupancy = one_device(10.0)
    assert occupancy.place(0, 1.0) == (0,), "unknown, so it runs alone"
    assert occupancy.place(1, 0.5, MemoryNeed(1.0)) is None, "and no other trial is packed there"
    occupancy.memory.set_need(0, MemoryNeed(5.0, 1.0))
    occupancy.tolerate(0, 0.5)
    assert occupancy.memory.running_bytes(0) == 6.0
    assert occupancy.memory.need_of(0) == MemoryNeed(5.0, 1.0)
    assert occupancy.place(1, 0.5, MemoryNeed(5.0, 1.0)) is None, "two of them do not fit"
    assert occupancy.place(1, 0.5, MemoryNeed(3.0)) == (0,)


def test_what_was_learnt_is_forgotten_with_the_row() -> None:
    occupancy = one_device(10.0)
    occupancy.place(0, 0.5)
    occupancy.memory.set_need(0, MemoryNeed(9.0))
    occupancy.release(0)
    assert occupancy.place(0, 0.5) == (0,)
    assert occupancy.memory.filled_bytes(0) == 0.0
    occupancy.memory.set_need(0, MemoryNeed(9.0))
    occupancy.memory.set_need(0, None)
    assert occupancy.memory.filled_bytes(0) == 0.0


def test_more_than_fits_is_counted_and_keeps_others_off_the_device() -> None:
    """It is in use, whatever the watermark says; and what leaves makes room again."""
    occupancy = one_device(10.0)
    occupancy.place(0, 0.25, MemoryNeed(1.0))
    occupancy.place(1, 0.25, MemoryNeed(1.0))
    occupancy.memory.set_need(0, MemoryNeed(20.0))
    assert occupancy.memory.filled_bytes(0) == 21.0
    assert occupancy.place(2, 0.25, MemoryNeed(0.0)) is None
    occupancy.release(0)
    assert occupancy.place(2, 0.25, MemoryNeed(8.0)) == (0,)


# --- Anything in any order


@dataclass
class BookLane:
    """A lane as the device sees it."""

    #: Persistent bytes of its residents, by row.
    persistent: dict[int, float] = field(default_factory=dict)
    #: Row that runs, and its ephemeral bytes.
    running: tuple[int, float] | None = None


class Admission(RuleBasedStateMachine):
    """Random arrivals, pauses, measurements and ends on one device; the engine's use of placement is imitated."""

    MEMORY, CONTEXT, WATERMARK = 40.0, 1.0, 0.9

    def __init__(self) -> None:
        super().__init__()
        self.rows = itertools.count()
        self.lanes: list[BookLane] = []
        self.needs: dict[int, MemoryNeed] = {}

    @initialize()
    def begin(self) -> None:
        self.occupancy = one_device(self.MEMORY, self.WATERMARK)

    def free_lane(self) -> BookLane:
        """An idle lane; a new one has its context counted before a trial is placed."""
        for lane in self.lanes:
            if lane.running is None:
                return lane
        self.lanes.append(BookLane())
        self.occupancy.memory.reserve(0, self.CONTEXT)
        return self.lanes[-1]

    def drop_empty(self, lane: BookLane) -> None:
        if not lane.persistent:
            self.lanes.remove(lane)
            self.occupancy.memory.reserve(0, -self.CONTEXT)

    @rule(need=NEEDS)
    def arrive(self, need: MemoryNeed) -> None:
        row, lane = next(self.rows), self.free_lane()
        if self.occupancy.place(row, 1 / 8, need) is None:
            self.drop_empty(lane)
            return
        self.needs[row] = need
        lane.persistent[row], lane.running = need.persistent_bytes, (row, need.ephemeral_bytes)

    def running(self) -> list[BookLane]:
        return [lane for lane in self.lanes if lane.running is not None]

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """Its state stays: no peak any more, but what it holds between iterations."""
        lane = data.draw(st.sampled_from(self.running()))
        assert lane.running is not None
        row, lane.running = lane.running[0], None
        self.occupancy.release(row)
        self.occupancy.memory.reserve(0, lane.persistent[row])

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.running()))
        assert lane.running is not None
        row, lane.running = lane.running[0], None
        self.occupancy.release(row)
        del lane.persistent[row]
        self.drop_empty(lane)

    @precondition(lambda self: any(lane.running is None for lane in self.lanes))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """A kept state runs again where it is; its bytes are then counted with it and not twice."""
        lane = data.draw(st.sampled_from([lane for lane in self.lanes if lane.running is None]))
        row = data.draw(st.sampled_from(sorted(lane.persistent)))
        state = lane.persistent[row]
        if self.occupancy.place(row, 1 / 8, self.needs[row], near=0, only=True, own_state=state) is not None:
            self.occupancy.memory.reserve(0, -state)
            lane.running = row, self.needs[row].ephemeral_bytes

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def measured_smaller(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.running()))
        assert lane.running is not None
        row, ephemeral = lane.running
        need = MemoryNeed(self.needs[row].persistent_bytes, ephemeral / 2)
        self.occupancy.memory.set_need(row, need)
        self.needs[row], lane.running = need, (row, need.ephemeral_bytes)

    @invariant()
    def the_device_holds_it_all(self) -> None:
        """sum of persistent + per lane the ephemeral of who runs + a context per lane."""
        if not hasattr(self, "occupancy"):
            return
        persistent = sum(sum(lane.persistent.values()) for lane in self.lanes)
        ephemeral = sum(lane.running[1] for lane in self.lanes if lane.running is not None)
        truth = persistent + ephemeral + self.CONTEXT * len(self.lanes)
        assert self.occupancy.memory.filled_bytes(0) == truth

    @invariant()
    def no_trial_was_admitted_over_the_watermark(self) -> None:
        if hasattr(self, "occupancy") and self.running():
            assert self.occupancy.memory.filled_bytes(0) <= self.MEMORY * self.WATERMARK


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=100, stateful_step_count=40)


def test_a_need_that_shrinks_makes_room_and_one_that_grows_admitted_nothing_wrong() -> None:
    occupancy = one_device(100.0)
    memory = occupancy.memory
    assert occupancy.place(0, 0.5, MemoryNeed(70.0)) == (0,)
    memory.set_need(0, MemoryNeed(15.0))
    assert occupancy.place(1, 0.5, MemoryNeed(60.0)) == (0,)
    assert memory.placed_bytes(0) == 75.0
    memory.set_need(0, MemoryNeed(80.0))
    assert (memory.placed_bytes(0), memory.filled_bytes(0)) == (75.0, 140.0)
