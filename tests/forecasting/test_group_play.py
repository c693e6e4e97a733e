from __future__ import annotations

import math
import random
from functools import cache

import pytest
from group_player import Played, PlayedGroup, play

DEVICES = (8, 8, 8, 8)
#: General, with much computing power, with much memory, with both.
CLASSES = (0b1111, 0b1100, 0b1010, 0b1000)
MIXES = range(12)


def mix(seed: int, seconds: float) -> list[PlayedGroup]:
    """30 groups that come in half an hour, of trials of that length."""
    choose = random.Random(seed)
    now = 0.0
    groups = []
    for _ in range(30):
        now += choose.expovariate(30 / 1800)
        groups.append(
            PlayedGroup(choose.choice(CLASSES), 1 + int(choose.lognormvariate(math.log(100), 1.0)), seconds, now)
        )
    return groups


@cache
def played(policy: str, seconds: float, fairness: float = 0.0) -> list[Played]:
    return [play(policy, mix(seed, seconds), DEVICES, fairness) for seed in MIXES]


def mean_ratio(policy: str, seconds: float) -> float:
    """Geometric mean over the mixes of the policy's mean completion time over that of ``"irs"``."""
    pairs = zip(played(policy, seconds), played("irs", seconds), strict=True)
    return math.exp(sum(math.log(other.mean / irs.mean) for other, irs in pairs) / len(MIXES))


@pytest.mark.parametrize("seconds", [8.0, 16.0])
def test_groups_end_sooner_on_average_where_scarce_devices_are_given_first(seconds: float) -> None:
    assert mean_ratio("srsf", seconds) > 1.06
    assert mean_ratio("fifo", seconds) > 1.2


@pytest.mark.parametrize("policy", ["srsf", "irs"])
@pytest.mark.parametrize("seconds", [8.0, 16.0])
def test_with_a_fairness_of_2_groups_take_at_most_their_fair_time_and_none_twice_that(
    policy: str, seconds: float
) -> None:
    assert all(each.within_fair >= 0.69 for each in played(policy, seconds, 2.0))
    assert max(each.worst for each in played(policy, seconds, 2.0)) <= 2.0


def test_fairness_lets_more_groups_end_in_their_fair_time() -> None:
    within = [[each.within_fair for each in played("irs", 8.0, fairness)] for fairness in (0.0, 2.0)]
    assert sum(within[1]) > sum(within[0])
    assert max(each.worst for each in played("fifo", 8.0)) > 2.0  # It takes a policy to be fair.
