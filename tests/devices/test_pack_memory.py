"""Memory of fused trials: what they share counts once for each of their lanes, against sums over the lanes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.devices.memory import SharingGroups
from fluid.devices.occupancy import Occupancy
from fluid.errors import InvalidFieldError
from fluid.resources import Cluster, Device, MemoryNeed

GROUP = "fused"
PARTS = st.tuples(st.integers(0, 6).map(float), st.integers(0, 9).map(float))


def need_of(parts: tuple[float, float], shared: float) -> MemoryNeed:
    """The need of a trial of these own persistent and ephemeral bytes."""
    return MemoryNeed(parts[0] + shared, parts[1], shared)


def device_with(needs: Sequence[MemoryNeed], rows: int, memory: float = 1e6) -> Occupancy:
    """A device on which these trials are fused, so many in a lane."""
    occupancy = Occupancy(Cluster((Device(0, kind="gpu", memory_bytes=memory),), 1.0))
    occupancy.groups.rows[GROUP] = rows
    for row, need in enumerate(needs):
        occupancy.groups.of[row] = GROUP
        occupancy.hold(row, (0,), 1 / 64, need)
    return occupancy


def exact(parts: Sequence[tuple[float, float]], shared: float, rows: int) -> float:
    """Bytes of packs of so many rows: the rows' own, and what they share once in each lane."""
    return sum(map(sum, parts)) + shared * -(-len(parts) // rows)


@given(st.lists(PARTS, min_size=1, max_size=9), st.integers(0, 20).map(float), st.integers(1, 5), st.data())
def test_what_is_shared_counts_once_in_each_lane(
    parts: list[tuple[float, float]], shared: float, rows: int, data: st.DataObject
) -> None:
    more = data.draw(PARTS)
    filled, with_more = exact(parts, shared, rows), exact([*parts, more], shared, rows)
    usable = filled + data.draw(st.integers(0, 30))
    memory = device_with([need_of(each, shared) for each in parts], rows, max(1.0, usable)).memory
    assert memory.running_bytes(0) == memory.placed_bytes(0) == memory.taken_bytes(0) == filled
    assert sum(memory.part_bytes(0, row) or 0.0 for row in range(len(parts))) == pytest.approx(filled)
    need = need_of(more, shared)
    assert memory.added_bytes(0, need) == with_more - filled
    assert memory.fits(0, need) is (with_more <= max(1.0, usable))
    gone = data.draw(st.permutations(range(len(parts))))[: data.draw(st.integers(1, len(parts)))]
    rest = [each for row, each in enumerate(parts) if row not in gone]
    assert memory.left_bytes(0, need, gone) == (
        exact([*rest, parts[gone[-1]]], shared, rows) - (exact(rest, shared, rows) if rest else 0.0)
    )


def test_sixteen_rows_that_share_their_data_fit_where_four_copies_would() -> None:
    need = MemoryNeed(205e6, 5e6, 200e6)
    occupancy = device_with([], 16, 900e6)
    placed = 0
    while occupancy.memory.fits(0, need) and placed < 16:
        occupancy.groups.of[placed] = GROUP
        occupancy.hold(placed, (0,), 1 / 64, need)
        placed += 1
    assert placed == 16 and occupancy.memory.taken_bytes(0) == 360e6
    apart = device_with([], 1, 900e6)
    for row in range(4):
        assert apart.memory.fits(0, need)
        apart.hold(row, (0,), 1 / 4, need)
    assert not apart.memory.fits(0, need), "trials that are not fused share nothing"


def test_a_trial_among_many_counts_its_part_of_what_is_shared() -> None:
    groups = SharingGroups({})
    groups.rows[GROUP] = 4
    assert groups.typical(GROUP, MemoryNeed(9.0, 3.0, 8.0)) == MemoryNeed(3.0, 3.0)
    assert groups.typical(None, MemoryNeed(9.0, 3.0, 8.0)).peak_bytes == 12.0


@given(st.lists(st.builds(need_of, PARTS, st.integers(0, 9).map(float)), min_size=1, max_size=4))
def test_the_most_and_the_least_of_needs_are_those_of_each_part(needs: list[MemoryNeed]) -> None:
    for of, combined in ((max, MemoryNeed.most(*needs)), (min, MemoryNeed.least(*needs))):
        for part in ("persistent_bytes", "own_persistent_bytes", "ephemeral_bytes"):
            assert getattr(combined, part) == of(getattr(need, part) for need in needs)
    assert all(MemoryNeed.most(*needs).covers(need) and need.covers(MemoryNeed.least(*needs)) for need in needs)
    assert MemoryNeed.most() == MemoryNeed.least() == MemoryNeed()


def test_more_cannot_be_shared_than_is_held() -> None:
    with pytest.raises(InvalidFieldError, match="shared_bytes") as caught:
        MemoryNeed(1.0, 5.0, 2.0)
    assert "at most persistent_bytes, 1" in str(caught.value)
