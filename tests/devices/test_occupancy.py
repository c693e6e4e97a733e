"""Tests of fluid.devices.occupancy."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fluid.devices.occupancy import Occupancy
from fluid.resources import Cluster, Device, MemoryNeed

QUARTER, THIRD, HALF = 1 / 4, 1 / 3, 1 / 2


def on(*devices: Device, watermark: float = 1.0) -> Occupancy:
    """An idle occupancy of these devices."""
    return Occupancy(Cluster(devices, watermark))


def alike(count: int, **fields: object) -> Occupancy:
    """An idle occupancy of so many alike devices."""
    return on(*(Device(index, **fields) for index in range(count)))  # type: ignore[arg-type]


def hosts(layout: str, speeds: Sequence[float] | None = None) -> Occupancy:
    """One device per letter, on the host of that name."""
    return on(*(Device(i, host=host, speed=speeds[i] if speeds else 1.0) for i, host in enumerate(layout)))


def resize(occupancy: Occupancy, row: int, width: float, need: MemoryNeed | None = None) -> tuple[int, ...] | None:
    """Gives a row another width if it can have it; returns its devices then."""
    chosen = occupancy.devices_for(row, width, need)
    if chosen is not None:
        occupancy.move(row, chosen, width, need)
    return chosen


def place_all(occupancy: Occupancy, widths: Sequence[float], first: int = 0) -> list[tuple[int, ...] | None]:
    """Places rows ``first``, ``first + 1``, ... of these widths."""
    return [occupancy.place(row, width) for row, width in enumerate(widths, first)]


# --- Packed trials: the most idle device


def test_packed_trials_take_idle_devices_first_then_the_fewest_residents() -> None:
    occupancy = alike(3)
    assert place_all(occupancy, [QUARTER] * 7) == [(0,), (1,), (2,), (0,), (1,), (2,), (0,)]
    occupancy.release(1)
    occupancy.release(4)
    assert occupancy.place(7, QUARTER) == (1,), "idle again"
    occupancy.release(2)
    assert occupancy.place(8, QUARTER) == (1,), "of two devices with one resident the lower index"
    assert occupancy.place(9, QUARTER) == (2,)


def test_of_equally_idle_devices_the_fastest_comes_first_then_the_lowest_index() -> None:
    occupancy = on(Device(0), Device(1, speed=2.0), Device(2, speed=2.0), Device(3, speed=3.0))
    assert place_all(occupancy, [HALF] * 8) == [(3,), (1,), (2,), (0,), (3,), (1,), (2,), (0,)]


def test_a_device_takes_as_many_as_its_residents_tolerate_and_no_more() -> None:
    occupancy = alike(2)
    assert place_all(occupancy, [THIRD] * 7) == [(0,), (1,), (0,), (1,), (0,), (1,), None]
    occupancy.release(3)
    assert occupancy.place(7, THIRD) == (1,)


def test_the_smallest_limit_of_the_residents_counts() -> None:
    occupancy = alike(1)
    assert place_all(occupancy, [QUARTER, HALF, QUARTER]) == [(0,), (0,), None]
    occupancy.release(1)
    assert place_all(occupancy, [QUARTER, QUARTER, QUARTER, QUARTER], first=3) == [(0,), (0,), (0,), None]


def test_a_newcomer_does_not_join_more_than_it_tolerates() -> None:
    occupancy = alike(2)
    place_all(occupancy, [QUARTER] * 5)  # three on device 0, two on device 1
    assert occupancy.place(5, HALF) is None
    assert occupancy.place(6, THIRD) == (1,)


def test_a_trial_of_width_one_has_its_device_alone() -> None:
    occupancy = alike(2)
    assert place_all(occupancy, [1.0, QUARTER, QUARTER, 1.0]) == [(0,), (1,), (1,), None]
    occupancy.release(0)
    assert occupancy.place(4, 1.0) == (0,)
    assert occupancy.open_slots(0) == 0
    assert occupancy.open_slots(1) == 2


# --- Wide trials


def test_a_host_is_preferred_among_those_that_are_equally_good() -> None:
    occupancy = hosts("abcb", [1, 1, 2, 1])
    assert occupancy.place(0, 1.0, host="b") == (2,), "the fastest one is on another host"
    assert occupancy.place(1, 1.0, host="b") == (1,)
    assert occupancy.place(2, HALF, near=1, host="b") == (3,), "on the host of a device that is taken"
    assert occupancy.place(3, HALF, host="b") == (0,), "idle"
    assert occupancy.place(4, HALF, host="b") == (3,), "as idle as the other one"
    occupancy = hosts("aabb")
    assert occupancy.place(0, 2.0, host="b") == (2, 3)
    assert occupancy.place(1, 1.0, host="elsewhere") == (0,)


def test_a_trial_that_leaves_its_device_prefers_its_host() -> None:
    occupancy = hosts("ababb")
    place_all(occupancy, [1.0, HALF, 1.0, 1.0, HALF])
    assert occupancy.place(5, HALF, near=1) == (1,)
    occupancy.release(0)
    occupancy.release(3)
    assert resize(occupancy, 5, 1.0) == (3,), "not device 0, on another host"
    occupancy.place(6, HALF, host="a")
    assert resize(occupancy, 5, HALF) == (1,), "of three devices with a slot, one on its host"


def test_a_wide_trial_stays_on_one_host_where_it_can() -> None:
    occupancy = hosts("abab")
    assert occupancy.place(0, 2.0) == (0, 2)
    assert occupancy.place(1, 2.0) == (1, 3)


def test_the_tightest_host_that_holds_a_wide_trial_comes_first() -> None:
    occupancy = hosts("aaaabbbcc")
    assert occupancy.place(0, 3.0) == (4, 5, 6)
    assert occupancy.place(1, 2.0) == (7, 8)
    assert occupancy.place(2, 4.0) == (0, 1, 2, 3), "left whole by the narrower ones"


def test_a_trial_too_wide_for_any_host_takes_the_fewest() -> None:
    occupancy = hosts("abbbcc")
    assert occupancy.place(0, 5.0) == (1, 2, 3, 4, 5)
    assert occupancy.place(1, 2.0) is None


def test_equal_speeds_come_before_mixed_ones_and_the_fastest_first() -> None:
    assert hosts("aaaaa", [1, 2, 1, 2, 1]).place(0, 3.0) == (0, 2, 4)
    assert hosts("aaaaa", [1, 2, 1, 2, 1]).place(0, 2.0) == (1, 3)
    assert hosts("aabb", [1, 2, 1, 1]).place(0, 2.0) == (2, 3), "two alike on another host"


def test_mixed_speeds_on_one_host_come_before_several_hosts() -> None:
    assert set(hosts("abab", [1, 2, 2, 1]).place(0, 2.0) or ()) in ({0, 2}, {1, 3})
    assert set(hosts("abbac", [1, 2, 3, 2, 2]).place(0, 2.0) or ()) in ({0, 3}, {1, 2})


def test_a_width_of_one_takes_the_fastest_idle_device() -> None:
    occupancy = hosts("aab", [1, 2, 3])
    assert place_all(occupancy, [1.0] * 4) == [(2,), (1,), (0,), None]


def test_wide_trials_need_idle_devices() -> None:
    occupancy = alike(4)
    occupancy.place(0, QUARTER)
    assert occupancy.place(1, 4.0) is None
    assert occupancy.place(2, 3.0) == (1, 2, 3)
    assert occupancy.free_count == 0


def test_a_refused_trial_changes_nothing() -> None:
    occupancy = alike(2)
    occupancy.place(0, 1.0)
    assert occupancy.place(1, 2.0) is None
    assert (occupancy.held, occupancy.residents, occupancy.free_count) == ({0: (0,)}, {0: [0], 1: []}, 1)


# --- Memory: the sum of the peaks stays within what is usable (docs/theory.md, section 8)


def test_a_device_is_never_filled_beyond_its_usable_memory() -> None:
    occupancy = on(Device(0, memory_bytes=100.0), Device(1, memory_bytes=50.0), watermark=0.9)
    need = MemoryNeed(20.0, 20.0)
    assert occupancy.place(0, QUARTER, need) == (0,)
    assert occupancy.place(1, QUARTER, need) == (1,)
    assert occupancy.place(2, QUARTER, need) == (0,)
    assert occupancy.place(3, QUARTER, need) is None, "90 usable bytes hold two of 40, 45 hold one"
    assert occupancy.place(4, QUARTER, MemoryNeed(5.0)) == (1,)
    assert occupancy.place(5, QUARTER, MemoryNeed(0.0, 10.0)) == (0,)
    assert occupancy.place(6, QUARTER, MemoryNeed(0.0, 0.1)) is None
    occupancy.release(0)
    assert occupancy.place(7, QUARTER, need) == (0,)


def test_devices_without_room_are_passed_over_also_by_wide_trials() -> None:
    occupancy = on(*(Device(i, memory_bytes=m) for i, m in enumerate([10.0, 100.0, 10.0, 100.0])))
    assert occupancy.place(0, 3.0, MemoryNeed(50.0)) is None
    assert occupancy.place(1, 2.0, MemoryNeed(50.0)) == (1, 3)
    assert occupancy.place(2, 2.0, MemoryNeed(10.0)) == (0, 2)


def test_a_trial_whose_need_is_unknown_counts_nothing() -> None:
    occupancy = alike(1, memory_bytes=100.0)
    assert occupancy.place(0, QUARTER) == (0,)
    assert occupancy.place(1, QUARTER, MemoryNeed(100.0)) == (0,)
    assert occupancy.place(2, QUARTER) == (0,)
    assert occupancy.place(3, QUARTER, MemoryNeed(1.0)) is None
    occupancy.release(1)
    assert occupancy.place(1, QUARTER) == (0,), "this time its need is unknown"
    assert occupancy.place(3, QUARTER, MemoryNeed(1.0)) == (0,)


def test_a_packed_trial_finds_the_one_device_with_room() -> None:
    occupancy = alike(4, memory_bytes=10.0)
    for row, size in enumerate([9.0, 8.0, 3.0, 7.0]):
        occupancy.place(row, HALF, MemoryNeed(size))
    assert occupancy.place(4, HALF, MemoryNeed(6.0)) == (2,)
    assert occupancy.place(5, HALF, MemoryNeed(2.5)) == (3,)
    assert occupancy.place(6, HALF, MemoryNeed(2.0)) == (1,)
    assert occupancy.place(7, HALF, MemoryNeed(1.0)) == (0,), "entries passed over were not lost"


# --- Resizing


def test_growing_keeps_the_devices_and_prefers_their_host_and_speed() -> None:
    occupancy = hosts("abbabb", [1, 2, 2, 1, 1, 2])
    assert occupancy.place(0, 2.0) == (1, 2)
    assert resize(occupancy, 0, 3.0) == (1, 2, 5)
    assert resize(occupancy, 0, 4.0) == (1, 2, 5, 4), "the same host at another speed before another host"
    assert resize(occupancy, 0, 6.0) == (1, 2, 5, 4, 0, 3)
    assert occupancy.free_count == 0


def test_growing_stays_on_the_host_of_the_first_device_where_it_can() -> None:
    occupancy = hosts("aabbbb")
    occupancy.place(0, 1.0)
    occupancy.place(1, 1.0, host="b")
    assert occupancy.held == {0: (0,), 1: (2,)}
    assert resize(occupancy, 1, 3.0) == (2, 3, 4)
    assert resize(occupancy, 0, 2.0) == (0, 1)


def test_growing_moves_a_trial_to_a_host_that_can_hold_it_whole() -> None:
    occupancy = hosts("abbccc")
    occupancy.place(0, 1.0)
    assert resize(occupancy, 0, 2.0) == (1, 2), "the tightest fit"
    assert resize(occupancy, 0, 3.0) == (3, 4, 5)
    assert resize(occupancy, 0, 4.0) == (3, 4, 5, 1), "no host has four devices: as many on one host as can be"
    assert resize(occupancy, 0, 3.0) == (3, 4, 5)
    assert occupancy.free_count == 3


def test_growing_onto_several_hosts_takes_few() -> None:
    occupancy = hosts("abccdd")
    occupancy.place(0, 1.0)
    assert resize(occupancy, 0, 3.0) == (0, 2, 3)
    assert resize(occupancy, 0, 2.0) == (2, 3)


def test_growing_does_not_move_a_trial_to_slower_devices_than_it_could_have() -> None:
    occupancy = hosts("abbc", [2, 1, 1, 2])
    occupancy.place(0, 1.0)
    assert resize(occupancy, 0, 2.0) == (0, 3)
    occupancy = hosts("abbc", [2, 1, 1, 1])
    occupancy.place(0, 1.0)
    assert resize(occupancy, 0, 2.0) == (1, 2), "all others are as slow"


def test_growing_beyond_what_is_idle_changes_nothing() -> None:
    occupancy = alike(3)
    place_all(occupancy, [1.0, 1.0])
    assert resize(occupancy, 0, 3.0) is None
    assert occupancy.held == {0: (0,), 1: (1,)}
    assert occupancy.free_count == 1


def test_shrinking_keeps_the_most_numerous_kin_then_the_fastest() -> None:
    occupancy = hosts("abbb", [3, 1, 1, 2])
    occupancy.place(0, 4.0)
    assert resize(occupancy, 0, 3.0) == (3, 1, 2), "on one host"
    assert resize(occupancy, 0, 2.0) == (1, 2)
    assert occupancy.free_count == 2
    occupancy = hosts("ab", [1, 2])
    occupancy.place(0, 2.0)
    assert resize(occupancy, 0, 1.0) == (1,)


@pytest.mark.parametrize("width", [HALF, 1.0])
def test_shrinking_to_a_single_device_keeps_the_fastest(width: float) -> None:
    occupancy = on(Device(0))
    occupancy.place(0, 1.0)
    occupancy.add_device(Device(1, speed=2.0))
    assert resize(occupancy, 0, 2.0) == (0, 1)
    assert resize(occupancy, 0, width) == (1,)
    assert occupancy.residents == {0: [], 1: [0]}


def test_shrinking_to_a_packed_width_takes_an_open_slot() -> None:
    occupancy = alike(3)
    occupancy.place(0, QUARTER)
    occupancy.place(1, 2.0)
    assert resize(occupancy, 1, QUARTER) == (0,)
    assert occupancy.residents == {0: [0, 1], 1: [], 2: []}
    assert occupancy.free_count == 2


def test_without_an_open_slot_a_trial_lets_others_in_on_a_device_it_has() -> None:
    occupancy = alike(3)
    occupancy.place(0, 1.0)
    occupancy.place(1, 2.0)
    assert resize(occupancy, 1, HALF) == (1,)
    assert occupancy.open_slots(1) == 1
    assert resize(occupancy, 0, HALF) == (1,), "there is one now"
    assert place_all(occupancy, [HALF] * 5, first=2) == [(0,), (2,), (0,), (2,), None]


def test_a_slot_without_the_memory_is_no_slot() -> None:
    occupancy = alike(2, memory_bytes=10.0)
    occupancy.place(0, HALF, MemoryNeed(6.0))
    occupancy.place(1, 1.0, MemoryNeed(5.0))
    assert resize(occupancy, 1, HALF, MemoryNeed(5.0)) == (1,)
    occupancy.release(0)
    occupancy.place(2, HALF, MemoryNeed(5.0))
    assert occupancy.held[2] == (0,)
    assert resize(occupancy, 1, THIRD, MemoryNeed(5.0)) == (0,)


def test_a_trial_that_leaves_a_shared_device_moves() -> None:
    occupancy = alike(3)
    place_all(occupancy, [QUARTER] * 4)
    occupancy.release(1)
    assert resize(occupancy, 3, 1.0) == (1,)
    assert occupancy.residents == {0: [0], 1: [3], 2: [2]}
    assert resize(occupancy, 0, 1.0) == (0,), "alone, it has its device already"
    assert occupancy.open_slots(0) == 0
    place_all(occupancy, [QUARTER], first=5)
    assert resize(occupancy, 2, 2.0) is None, "it cannot take its own device from the one it shares it with"


def test_a_packed_trial_that_would_tolerate_fewer_stays_only_where_it_may() -> None:
    occupancy = alike(1)
    place_all(occupancy, [QUARTER] * 3)
    assert resize(occupancy, 0, HALF) is None
    assert occupancy.open_slots(0) == 1
    assert resize(occupancy, 0, THIRD) == (0,)
    assert occupancy.open_slots(0) == 0


# --- Devices come and go


def test_a_device_that_is_added_is_idle() -> None:
    occupancy = alike(1)
    occupancy.place(0, 1.0)
    occupancy.add_device(Device(9, host="b", speed=2.0))
    assert (len(occupancy), occupancy.free_count) == (2, 1)
    assert occupancy.place(1, QUARTER) == (9,)
    assert occupancy.speeds([(0,), (9,), (0, 9)]) == [1.0, 2.0, 1.0]


def test_who_was_on_a_device_that_is_removed_loses_all_it_holds() -> None:
    occupancy = alike(4)
    place_all(occupancy, [3.0, QUARTER, QUARTER])
    assert occupancy.remove_device(1) == [0]
    assert occupancy.held == {1: (3,), 2: (3,)}
    assert (len(occupancy), occupancy.free_count) == (3, 2)
    assert occupancy.remove_device(3) == [1, 2]
    assert occupancy.remove_device(0) == []
    assert occupancy.held == {}
    assert place_all(occupancy, [1.0, 1.0]) == [(2,), None]


def test_a_device_that_comes_back_slower_is_known_as_it_is_now() -> None:
    occupancy = on(Device(0, speed=3.0), Device(1, speed=2.0))
    place_all(occupancy, [HALF, HALF])
    occupancy.remove_device(0)
    occupancy.add_device(Device(0, speed=1.0))
    assert place_all(occupancy, [HALF, HALF, HALF], first=2) == [(0,), (1,), (0,)]


# --- Anything in any order, against a model that looks at everything every time

HOSTS = ("a", "b", "c")
SPEEDS = (1.0, 2.0)
MEMORY = (None, 8.0, 16.0)
WIDTHS = st.sampled_from([QUARTER, THIRD, HALF, 1.0, 2.0, 3.0, 4.0])
NEEDS = st.sampled_from([None, MemoryNeed(0.0), MemoryNeed(1.0, 2.0), MemoryNeed(4.0, 1.0), MemoryNeed(9.0)])


def devices(indices: st.SearchStrategy[int]) -> st.SearchStrategy[Device]:
    return st.builds(
        Device,
        index=indices,
        host=st.sampled_from(HOSTS),
        speed=st.sampled_from(SPEEDS),
        memory_bytes=st.sampled_from(MEMORY),
    )


class OccupancyMachine(RuleBasedStateMachine):
    """Random changes; the model knows only which row holds which devices, at which width, with which need."""

    WATERMARK = 0.75

    def __init__(self) -> None:
        super().__init__()
        self.rows = itertools.count()
        self.devices: dict[int, Device] = {}
        self.held: dict[int, tuple[int, ...]] = {}
        self.width: dict[int, float] = {}
        self.need: dict[int, MemoryNeed | None] = {}

    @initialize(made=st.lists(devices(st.integers(0, 9)), min_size=1, max_size=6, unique_by=lambda d: d.index))
    def begin(self, made: list[Device]) -> None:
        self.occupancy = Occupancy(Cluster(tuple(made), self.WATERMARK))
        self.devices = {device.index: device for device in made}

    # The model.

    def there(self, index: int) -> list[int]:
        return [row for row, held in self.held.items() if index in held]

    def limit(self, rows: list[int]) -> float:
        return min((max(1, round(1 / self.width[row])) for row in rows), default=math.inf)

    def filled(self, rows: list[int]) -> float:
        return sum(need.peak_bytes for row in rows if (need := self.need[row]) is not None)

    def usable(self, index: int) -> float:
        memory = self.devices[index].memory_bytes
        return math.inf if memory is None else memory * self.WATERMARK

    def has_memory(self, index: int, need: MemoryNeed | None, without: int | None = None) -> bool:
        rows = [row for row in self.there(index) if row != without]
        return self.filled(rows) + (need.peak_bytes if need else 0.0) <= self.usable(index)

    def open_devices(
        self, width: float, need: MemoryNeed | None, without: int | None = None, host: str | None = None
    ) -> list[int]:
        """Devices that take one more packed trial, in the order in which they are to be chosen."""
        fitting = []
        for index in self.devices:
            rows = [row for row in self.there(index) if row != without]
            room = len(rows) < min(round(1 / width), self.limit(rows)) and all(self.width[row] < 1 for row in rows)
            if room and self.has_memory(index, need, without):
                device = self.devices[index]
                fitting.append((len(rows), -device.speed, device.host != host, index))
        return [index for *_, index in sorted(fitting)]

    def idle_devices(self, need: MemoryNeed | None) -> list[int]:
        return [index for index in self.devices if not self.there(index) and self.has_memory(index, need)]

    # The changes.

    @rule(width=WIDTHS, need=NEEDS, host=st.sampled_from((None, *HOSTS)))
    def place(self, width: float, need: MemoryNeed | None, host: str | None) -> None:
        row = next(self.rows)
        idle = self.idle_devices(need)
        chosen = self.occupancy.place(row, width, need, host=host)
        if width < 1.0:
            order = self.open_devices(width, need, host=host)
            assert chosen == ((order[0],) if order else None)
        else:
            assert (chosen is None) == (len(idle) < round(width))
            if chosen is not None:
                self.check_wide(chosen, idle, host)
        if chosen is not None:
            self.held[row], self.width[row], self.need[row] = chosen, width, need

    def check_wide(self, chosen: tuple[int, ...], idle: list[int], host: str | None) -> None:
        """One host and speed if there is such a set, else one host, and of alike sets the fastest, there if it can."""
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(idle)
        kin: dict[tuple[str, float], int] = {}
        on_host: dict[str, int] = {}
        for index in idle:
            device = self.devices[index]
            kin[device.host, device.speed] = kin.get((device.host, device.speed), 0) + 1
            on_host[device.host] = on_host.get(device.host, 0) + 1
        alike = [speed for (_, speed), count in kin.items() if count >= len(chosen)]
        taken = [self.devices[index] for index in chosen]
        if alike:
            assert {device.speed for device in taken} == {max(alike)}
            if host is not None and kin.get((host, max(alike)), 0) >= len(chosen):
                assert {device.host for device in taken} == {host}
        if alike or max(on_host.values()) >= len(chosen):
            assert len({device.host for device in taken}) == 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        self.occupancy.release(row)
        self.forget(row)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), width=WIDTHS)
    def resize(self, data: st.DataObject, width: float) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        before, need, idle = self.held[row], self.need[row], self.idle_devices(self.need[row])
        alone = all(self.there(index) == [row] for index in before)
        expected = self.occupancy.devices_for(row, width, need)
        after = resize(self.occupancy, row, width, need)
        assert after == expected
        if width < 1.0:
            host = self.devices[before[0]].host
            shared = [index for index in self.open_devices(width, need, row, host) if index not in before]
            shared = [index for index in shared if self.there(index)]
            stays = len(self.there(before[0])) <= round(1 / width)
            assert after is None or len(after) == 1
            assert (after is None) == (not shared and not stays)
            assert after is None or (after == (shared[0],) if shared else after[0] in before)
        elif alone:
            assert (after is None) == (len(idle) + len(before) < round(width))
            if after is not None:
                self.check_resized(before, after, idle)
        else:
            assert (after is None) == (len(idle) < round(width))
            if after is not None:
                self.check_wide(after, idle, self.devices[before[0]].host)
        if after is not None:
            assert len(after) == max(1, round(width))
            self.held[row], self.width[row] = after, width

    def check_resized(self, before: tuple[int, ...], after: tuple[int, ...], idle: list[int]) -> None:
        """One host if one can hold the trial: a host of its own first, and another one unless it is slower."""
        assert len(set(after)) == len(after)
        assert set(after) <= {*before, *idle}
        host_of = {index: device.host for index, device in self.devices.items()}
        room = Counter(host_of[index] for index in (*before, *idle))
        whole = {host for host, count in room.items() if count >= len(after)}
        own, used = {host_of[index] for index in before}, {host_of[index] for index in after}
        if own & whole:
            (host,) = used
            assert host in own
            kept = {index for index in before if host_of[index] == host}
            assert kept <= set(after) or set(after) <= kept
            if len(after) > len(before):
                assert host == host_of[before[0]] or host_of[before[0]] not in whole
        elif len(used) > 1:
            assert set(before) <= set(after) or set(after) <= set(before)
            kin = Counter((host_of[index], self.devices[index].speed) for index in idle)
            alike = [speed for (_, speed), count in kin.items() if count >= len(after)]
            assert not whole or not alike or max(alike) < min(self.devices[index].speed for index in after)

    @precondition(lambda self: len(self.devices) < 8)
    @rule(data=st.data())
    def add_device(self, data: st.DataObject) -> None:
        absent = [index for index in range(10) if index not in self.devices]
        device = data.draw(devices(st.sampled_from(absent)))
        self.devices[device.index] = device
        self.occupancy.add_device(device)

    @precondition(lambda self: self.devices)
    @rule(data=st.data())
    def remove_device(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.devices)))
        evicted = self.occupancy.remove_device(index)
        assert sorted(evicted) == sorted(self.there(index))
        for row in evicted:
            self.forget(row)
        del self.devices[index]

    def forget(self, row: int) -> None:
        del self.held[row], self.width[row], self.need[row]

    # What always holds.

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "occupancy"):
            return
        occupancy = self.occupancy
        assert occupancy.held == self.held
        assert {index: sorted(rows) for index, rows in occupancy.residents.items()} == {
            index: sorted(self.there(index)) for index in self.devices
        }
        assert len(occupancy) == len(self.devices)
        assert occupancy.free_count == sum(not self.there(index) for index in self.devices)

    @invariant()
    def no_device_is_overfilled(self) -> None:
        for index in self.devices:
            rows = self.there(index)
            assert len(rows) <= self.limit(rows)
            assert len(rows) <= 1 or all(self.width[row] < 1.0 for row in rows), "wide trials do not share devices"
            assert self.filled(rows) <= self.usable(index)
            open_slots = self.limit(rows) - len(rows) if rows else 0
            assert self.occupancy.open_slots(index) == open_slots

    @invariant()
    def a_width_has_an_open_device_if_one_is_open_to_it(self) -> None:
        if hasattr(self, "occupancy"):
            for width in (QUARTER, THIRD, HALF, 1.0):
                is_open = any(self.occupancy.is_open(index, width) for index in self.devices)
                assert self.occupancy.has_open(width) is is_open

    @invariant()
    def a_set_is_as_fast_as_its_slowest_device(self) -> None:
        if self.held:
            sets = list(self.held.values())
            expected = [min(self.devices[index].speed for index in held) for held in sets]
            assert self.occupancy.speeds(sets) == expected


TestOccupancyMachine = OccupancyMachine.TestCase
TestOccupancyMachine.settings = settings(max_examples=60, stateful_step_count=40)
