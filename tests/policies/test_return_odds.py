"""The probability that a trial goes on from its rung, against all orders of arrival, and against chance."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.policies.checkpoints import MOST_FOLLOWED, arriving_odds, final_odds, odds_at
from fluid.search_shape import Rung


def among_the_best(order: tuple[int, ...], reported: int, places: int) -> list[bool]:
    """Whether each of the first trials, by rank among those, is among the best in the end."""
    return [score < places for score in sorted(order[:reported])]


def promoted_by_arrivals(order: tuple[int, ...], reported: int, eta: int) -> list[bool]:
    """The same of trials that go on as soon as they are among the best 1/eta, now or after a later arrival."""
    first = sorted(order[:reported])
    best: set[int] = set()
    for there in range(reported, len(order) + 1):
        best.update(sorted(order[:there])[: there // eta])
    return [score in best for score in first]


@pytest.mark.parametrize(("size", "places"), [(1, 1), (4, 1), (5, 2), (6, 3), (6, 6)])
def test_final_odds_equal_the_share_of_all_orders(size: int, places: int) -> None:
    orders = list(itertools.permutations(range(size)))
    for reported in range(1, size + 1):
        found = [among_the_best(order, reported, places) for order in orders]
        shares = [sum(each) / len(orders) for each in zip(*found, strict=True)]
        assert final_odds(reported, size, places) == pytest.approx(shares, abs=1e-12)


@pytest.mark.parametrize(("size", "eta"), [(1, 2), (4, 2), (6, 2), (6, 3), (7, 3)])
def test_arriving_odds_equal_the_share_of_all_orders(size: int, eta: int) -> None:
    orders = list(itertools.permutations(range(size)))
    for reported in range(1, size + 1):
        found = [promoted_by_arrivals(order, reported, eta) for order in orders]
        shares = [sum(each) / len(orders) for each in zip(*found, strict=True)]
        assert arriving_odds(reported, size, eta) == pytest.approx(shares, abs=1e-12)


def test_odds_of_a_large_rung_agree_with_chance() -> None:
    chance, size, places, reported, draws = random.Random(7), 81, 27, 40, 4000
    found = [0] * reported
    for _ in range(draws):
        order = list(range(size))
        chance.shuffle(order)
        for rank, goes_on in enumerate(among_the_best(tuple(order), reported, places)):
            found[rank] += goes_on
    for rank, odds in enumerate(final_odds(reported, size, places)):
        assert found[rank] / draws == pytest.approx(odds, abs=0.035)  # over 4 standard deviations


@given(st.integers(1, 200), st.integers(0, 200), st.data())
def test_final_odds_fall_with_the_rank_and_add_up_to_the_places(size: int, places: int, data: st.DataObject) -> None:
    reported = data.draw(st.integers(1, size))
    odds = odds_at(Rung(size=size, places=places), reported)
    assert len(odds) == reported and all(0.0 <= each <= 1.0 for each in odds)
    assert all(better >= worse - 1e-12 for better, worse in itertools.pairwise(odds))
    # Of all trials as many go on as there are places: of those reported, their share.
    assert sum(odds) == pytest.approx(min(places, size) * reported / size, rel=1e-6, abs=1e-9)


@given(st.integers(1, 120), st.integers(2, 5), st.data())
def test_waiting_for_arrivals_never_lowers_the_odds(size: int, eta: int, data: st.DataObject) -> None:
    reported = data.draw(st.integers(1, size))
    at_once = odds_at(Rung(size=size, places=eta, promotes_at_once=True), reported)
    at_the_end = final_odds(reported, size, size // eta) if size >= eta else (0.0,) * reported
    assert all(first >= last - 1e-9 for first, last in zip(at_once, at_the_end, strict=True))
    assert at_once[: reported // eta] == (1.0,) * (reported // eta)


def test_rungs_without_limit_and_without_promotions() -> None:
    assert odds_at(Rung(size=9), 4) == (0.0,) * 4
    assert odds_at(Rung(places=3), 0) == ()
    # The only one of a rung without limit is among the best third with a probability of a third; of a large one, too.
    assert odds_at(Rung(places=3), 1) == pytest.approx((1 / 3,))
    assert odds_at(Rung(size=30000, places=10000), 1) == pytest.approx((1 / 3,))
    many = odds_at(Rung(places=3, promotes_at_once=True), MOST_FOLLOWED + 1)
    assert many[0] == pytest.approx(1.0) and many[-1] == pytest.approx(0.0)


def test_a_trial_more_than_expected_counts() -> None:
    assert len(odds_at(Rung(size=3, places=1), 4)) == 4
    assert odds_at(Rung(size=3, places=1), 4) == pytest.approx((1.0, 0.0, 0.0, 0.0))
