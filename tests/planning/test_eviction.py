"""Which checkpoints leave host memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fluid.planning.eviction import InMemory, evictions

CHECKPOINTS = st.lists(
    st.builds(
        InMemory,
        key=st.uuids().map(str),
        bytes=st.floats(1.0, 100.0),
        returns=st.floats(0.0, 1.0),
        saved_s=st.floats(0.0, 10.0),
        pinned=st.booleans(),
        used=st.floats(0.0, 100.0),
    ),
    max_size=12,
)


@given(CHECKPOINTS, st.floats(-1.0, 500.0))
def test_enough_leaves_and_none_of_greater_worth_than_what_stays(held: list[InMemory], excess: float) -> None:
    leaving = evictions(held, excess)
    gone = [one for one in held if one.key in leaving]
    stays = [one for one in held if one.key not in leaving]
    assert sum(one.bytes for one in gone) >= excess or not stays
    if gone:
        assert sum(one.bytes for one in gone if one.key != leaving[-1]) < excess  # no more than needed
    for one in gone:
        assert all((one.pinned, one.worth) <= (other.pinned, other.worth) for other in stays)


def test_a_large_checkpoint_goes_before_a_small_one_that_saves_as_much() -> None:
    large, small = InMemory("large", 80.0, 0.5), InMemory("small", 8.0, 0.5)
    assert evictions([small, large], 1.0) == ["large"]


def test_of_the_same_worth_the_least_recently_used_goes_and_pinned_ones_last() -> None:
    held = [InMemory("new", 1.0, 0.5, used=2.0), InMemory("old", 1.0, 0.5, used=1.0)]
    assert evictions([InMemory("pinned", 1.0, 0.0, pinned=True), *held], 3.0) == ["old", "new", "pinned"]
