"""The lane finder against brute force, which tries every lane by the definition of the safety condition."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from fluid.errors import InvalidFieldError
from fluid.policies.turns import LaneLoad, find_lane
from fluid.resources import MemoryNeed

#: A lane as the brute force sees it: the needs of its trials.
Trials = list[MemoryNeed]


def bytes_of(lanes: Sequence[Trials]) -> float:
    """The left side of the safety condition, from single trials."""
    persistent = sum(trial.persistent_bytes for lane in lanes for trial in lane)
    sizes = [max((trial.ephemeral_bytes for trial in lane), default=0.0) for lane in lanes]
    return persistent + sum(sizes)


def loads_of(lanes: Sequence[Trials]) -> list[LaneLoad]:
    """Lanes as the finder sees them; their numbers are not their places."""
    return [
        LaneLoad(
            10 + place,
            sum(trial.persistent_bytes for trial in lane),
            max((trial.ephemeral_bytes for trial in lane), default=0.0),
            trials=len(lane),
        )
        for place, lane in enumerate(lanes)
    ]


def feasible(
    need: MemoryNeed, lanes: Sequence[Trials], usable: float, new: float, most: float, each: float
) -> list[int | None]:
    """Places of all lanes that the trial can join, ``None`` for a new one."""
    found: list[int | None] = []
    if len(lanes) < most and bytes_of([*lanes, [need]]) + new <= usable:
        found.append(None)
    for place, lane in enumerate(lanes):
        joined = [*lanes[:place], [*lane, need], *lanes[place + 1 :]]
        if len(lane) < each and bytes_of(joined) <= usable:
            found.append(place)
    return found


def preferred(need: MemoryNeed, lanes: Sequence[Trials], places: list[int | None]) -> int | None:
    """The place that the finder's documentation names among the feasible ones."""
    if None in places:
        return None
    sizes = {
        place: max((trial.ephemeral_bytes for trial in lanes[place]), default=0.0) for place in filter_none(places)
    }
    large_enough = [place for place, size in sizes.items() if size >= need.ephemeral_bytes]
    among = large_enough or list(sizes)
    smallest = min(sizes[place] for place in among)
    equal = [place for place in among if sizes[place] == smallest]
    fewest = min(len(lanes[place]) for place in equal)
    return next(place for place in equal if len(lanes[place]) == fewest)


def filter_none(places: list[int | None]) -> list[int]:
    return [place for place in places if place is not None]


def draw_need(rng: random.Random) -> MemoryNeed:
    return MemoryNeed(float(rng.randint(0, 6)), float(rng.choice((0, 1, 2, 4, 7, 11, 15))))


def test_the_finder_equals_brute_force_in_ten_thousand_cases() -> None:
    """Whole bytes, so that sums are exact in any order."""
    rng = random.Random(24)
    new_lanes = joined = grown = refused = 0
    for _ in range(10_000):
        lanes = [[draw_need(rng) for _ in range(rng.randint(0, 4))] for _ in range(rng.randint(0, 6))]
        need, new = draw_need(rng), float(rng.randint(0, 3))
        # Around what is taken, so that there are many cases of each kind; at times less than is taken already.
        usable = max(0.0, bytes_of(lanes) + rng.randint(-3, 20))
        most = rng.choice((None, 1, 2, 4))
        each = rng.choice((None, 1, 3))
        places = feasible(need, lanes, usable, new, most or math.inf, each or math.inf)
        options = {"new_lane_bytes": new, "most_lanes": most, "most_per_lane": each}
        choice = find_lane(need, loads_of(lanes), usable, **options)  # type: ignore[arg-type]
        if not places:
            assert choice is None
            refused += 1
            continue
        place = preferred(need, lanes, places)
        before = 0.0 if place is None else max((trial.ephemeral_bytes for trial in lanes[place]), default=0.0)
        after = [*map(list, lanes), []] if place is None else list(map(list, lanes))
        after[-1 if place is None else place].append(need)
        expected = loads_of(after)[-1 if place is None else place]
        assert choice == expected._replace(lane=None if place is None else 10 + place)
        assert bytes_of(after) + (new if place is None else 0.0) <= usable
        new_lanes += place is None
        joined += place is not None and before >= need.ephemeral_bytes
        grown += place is not None and before < need.ephemeral_bytes
    assert min(new_lanes, joined, grown, refused) > 500


def test_a_lane_never_shrinks_below_the_trials_that_it_has() -> None:
    """The algorithm as it is printed would make this lane of 9 bytes one of 1, and let the device overflow."""
    lanes = [LaneLoad(0, persistent_bytes=1.0, ephemeral_bytes=9.0, trials=1)]
    assert find_lane(MemoryNeed(1.0, 1.0), lanes, 10.0) is None
    assert find_lane(MemoryNeed(0.0, 1.0), lanes, 10.0) == LaneLoad(0, 1.0, 9.0, trials=2)


def test_a_new_lane_pays_for_its_context() -> None:
    lanes = [LaneLoad(0, 1.0, 2.0, trials=1)]
    assert find_lane(MemoryNeed(1.0, 2.0), lanes, 9.0, new_lane_bytes=3.0) == LaneLoad(None, 1.0, 2.0, trials=1)
    assert find_lane(MemoryNeed(1.0, 2.0), lanes, 8.0, new_lane_bytes=3.0) == LaneLoad(0, 2.0, 2.0, trials=2)


def test_without_a_bound_on_memory_only_the_counts_bound() -> None:
    need = MemoryNeed(1e12, 1e12)
    assert find_lane(need, [], None) == LaneLoad(None, 1e12, 1e12, trials=1)
    lanes = [LaneLoad(4, trials=2), LaneLoad(5, trials=1)]
    assert find_lane(need, lanes, None, most_lanes=2) == LaneLoad(5, 1e12, 1e12, trials=2)
    assert find_lane(need, lanes, None, most_lanes=2, most_per_lane=1) is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"usable_bytes": -1.0}, "usable_bytes"),
        ({"usable_bytes": 1.0, "new_lane_bytes": -1.0}, "new_lane_bytes"),
        ({"usable_bytes": 1.0, "most_lanes": 0}, "most_lanes"),
        ({"usable_bytes": 1.0, "most_per_lane": 0}, "most_per_lane"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        find_lane(MemoryNeed(), [], **options)  # type: ignore[arg-type]
