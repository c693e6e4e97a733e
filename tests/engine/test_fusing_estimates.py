"""How many rows and packs are tried, kept and given up, by what was measured."""

from __future__ import annotations

import math

import pytest

from fluid.engine.estimates.key_estimates import FusingEstimate
from fluid.measure.profile import Profile


def observed(seconds: dict[int, float], packs: dict[int, float] | None = None, rows: int = 0) -> Profile:
    """A profile of steps of so many rows, and of several packs of ``rows`` each."""
    profile = Profile()
    for _ in range(5):
        for count, each in seconds.items():
            profile.observe("net", each, rows=count)
        for count, each in (packs or {}).items():
            profile.observe("net", each, co_residents=count, rows=rows)
    return profile


def estimate(
    profile: Profile,
    most: int = 64,
    packs: int = 4,
    *,
    work: float = math.inf,
    insists: bool = False,
    busy: float = 0.1,
) -> FusingEstimate:
    found = FusingEstimate()
    found.begin(most, packs, insists=insists)
    for _ in range(2):
        found.update(profile, "net", None, work=work, trying_packs_pays=work == math.inf)
        found.busy.append(busy)
    return found


def test_a_trial_runs_alone_first() -> None:
    found = estimate(Profile())
    assert (found.rows, found.packs, found.is_over) == (1, 1, False)


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ({1: 1.0}, 2),
        ({1: 1.0, 2: 1.1}, 4),
        ({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, 16),
        ({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.6}, 4),
        ({1: 1.0, 2: 2.3}, 4),
        ({1: 1.0, 2: 2.3, 4: 2.5}, 8),
    ],
)
def test_rows_double_while_that_pays(seconds: dict[int, float], rows: int) -> None:
    found = estimate(observed(seconds), packs=1)
    assert (found.rows, found.packs, found.is_over) == (rows, 1, False)


@pytest.mark.parametrize("seconds", [{1: 1.0, 2: 2.6}, {1: 1.0, 2: 2.3, 4: 4.2}])
def test_what_gets_slower_is_not_fused(seconds: dict[int, float]) -> None:
    found = estimate(observed(seconds))
    assert (found.rows, found.is_over) == (1, True)


def test_little_work_repays_no_further_doubling() -> None:
    assert estimate(observed({1: 1.0, 2: 1.1}), work=0.1).rows == 2


def test_a_first_step_that_compiles_has_to_be_repaid_by_more_work() -> None:
    found = estimate(observed({1: 1.0}), work=0.0)
    found.prepared(21.0, 2, 1.0)
    assert found.worth_trying == 0.2, "what the first pack has to prepare serves all sizes"
    found = estimate(observed({1: 1.0, 2: 1.2}), work=0.0)
    found.prepared(21.2, 2, 1.0)
    assert found.worth_trying == pytest.approx(5 * 20.0)


def test_lanes_bound_the_rows() -> None:
    found = estimate(observed({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5}))
    found.limit(4)
    found.update(observed({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5}), "net", None, work=math.inf, trying_packs_pays=False)
    assert (found.rows, found.is_over) == (4, False)
    found.limit(1)
    assert (found.rows, found.is_over) == (1, True)


def test_who_insists_fuses_without_measuring() -> None:
    found = estimate(Profile(), insists=True)
    assert (found.rows, found.packs, found.is_over) == (64, 1, False)


def test_packs_are_added_while_that_pays_once_rows_are_known() -> None:
    settled = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.6}
    found = estimate(observed(settled, {1: 1.3}, 4))
    assert (found.rows, found.packs, found.total) == (4, 2, 8)
    found = estimate(observed(settled, {1: 1.3, 2: 1.5, 3: 2.2}, 4))
    assert (found.rows, found.packs) == (4, 2)
    assert found.gain == pytest.approx(8 / 1.5)
    assert found.expected is not None
    assert found.expected.stretch(8) == pytest.approx(1.5)


def test_no_pack_is_added_beside_one_that_keeps_the_device_busy() -> None:
    found = estimate(observed({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.6}, {1: 1.3}, 4), busy=0.97)
    assert (found.rows, found.packs) == (4, 1)


def test_a_gain_above_the_rows_is_noise() -> None:
    assert estimate(observed({1: 1.0, 2: 0.5})).gain == 2.0


def test_one_step_suffices_where_fusing_is_hopeless() -> None:
    profile = observed({1: 1.0})
    profile.observe("net", 2.9, rows=2)
    assert not estimate(profile).is_over
    profile = observed({1: 1.0})
    profile.observe("net", 3.1, rows=2)
    assert estimate(profile).is_over
