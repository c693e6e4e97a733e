"""The last one of several trials of uncertain length: closed forms, Monte Carlo, and what is certain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.planners.instance import completion_of


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("k", [1, 2, 7, 100])
def test_alike_trials_end_last_alike(k: int, sigma: float) -> None:
    """Orloj, eq. 4.6: the last of k alike ones ends by l with F(l)^k."""
    found = completion_of(np.full(k, 60.0), sigma)
    assert found.odds_last == pytest.approx(np.full(k, 1.0 / k), abs=1e-6)
    for z in (-1.0, 0.0, 1.0, 2.0, 3.0):
        assert found.ends.odds_by(60.0 * math.exp(z * sigma)) == pytest.approx(_cdf(z) ** k, abs=2e-3)


@pytest.mark.parametrize(("medians", "sigmas"), [((10.0, 8.0), (0.2, 0.9)), ((1.0, 1.0), (0.001, 1.5))])
def test_two_trials_are_compared_exactly(medians: tuple[float, float], sigmas: tuple[float, float]) -> None:
    """The logarithm of the ratio of two lognormal times is normal; the mean of the greater follows from it."""
    found = completion_of(medians, sigmas)
    apart, both = math.log(medians[0] / medians[1]), math.hypot(*sigmas)
    assert found.odds_last[0] == pytest.approx(_cdf(apart / both), abs=1e-3)
    means = [median * math.exp(sigma**2 / 2) for median, sigma in zip(medians, sigmas, strict=True)]
    expected = means[0] * _cdf((apart + sigmas[0] ** 2) / both) + means[1] * _cdf((sigmas[1] ** 2 - apart) / both)
    assert found.mean == pytest.approx(expected, rel=5e-3)


def test_a_certain_trial_ends_last_if_the_others_are_done_by_then() -> None:
    """It has an atom of the odds, exactly the product of the others' odds."""
    found = completion_of([100.0, 90.0, 95.0, 99.0], [0.0, 0.5, 0.1, 0.0])
    done = _cdf(math.log(100 / 90) / 0.5) * _cdf(math.log(100 / 95) / 0.1)
    assert found.odds_last[0] == pytest.approx(done, abs=1e-6)
    assert found.odds_last[3] == 0.0
    assert found.ends.odds_by(99.9) == 0.0
    assert found.ends.odds_by(100.0) == pytest.approx(done, abs=1e-6)


def test_certain_trials_are_exact() -> None:
    """The longest one ends last; equally long ones share that. A trial that is done never does, unless all are."""
    found = completion_of([3.0, 5.0, 5.0, 0.0], 0.0)
    assert found.odds_last.tolist() == [0.0, 0.5, 0.5, 0.0]
    assert found.mean == found.ends.quantile(0.5) == 5.0
    assert completion_of([0.0, 0.0], [1.0, 0.0]).odds_last.tolist() == [0.5, 0.5]
    assert completion_of([0.0, 2.0], [1.0, 0.5]).odds_last.tolist() == [0.0, 1.0]


def test_a_certain_trial_far_below_never_ends_last() -> None:
    """It changes nothing of the others."""
    alone, beside = completion_of([9.0, 8.0], 0.3), completion_of([9.0, 8.0, 0.1], [0.3, 0.3, 0.0])
    assert beside.odds_last[:2].tolist() == pytest.approx(alone.odds_last.tolist())
    assert beside.odds_last[2] == 0.0
    assert beside.mean == pytest.approx(alone.mean)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(0, 10**6))
def test_agrees_with_draws(k: int, spread: float, seed: int) -> None:
    """Odds, mean and quantiles are those of 40,000 draws, to four standard errors."""
    rng = np.random.default_rng(seed)
    medians, sigmas = np.exp(spread * rng.standard_normal(k)), rng.uniform(0.0, 1.0, k) * (rng.random(k) < 0.8)
    draws = medians * np.exp(sigmas * rng.standard_normal((40_000, k)))
    found, last = completion_of(medians, sigmas), draws.max(axis=1)
    assert found.odds_last.sum() == pytest.approx(1.0)
    certain = np.flatnonzero(sigmas == 0.0)
    if not (len(certain) > 1 and medians[certain].max() == np.sort(medians[certain])[-2]):
        shares = np.bincount(draws.argmax(axis=1), minlength=k) / len(draws)
        assert np.abs(found.odds_last - shares).max() < 4.0 * 0.5 / math.sqrt(len(draws)) + 2e-3
    assert found.mean == pytest.approx(last.mean(), abs=5.0 * last.std() / 200.0 + 3e-3 * last.mean())
    for q in (0.1, 0.5, 0.9):
        assert (last <= found.ends.quantile(q) * (1.0 + 1e-9)).mean() >= q - 0.015
        assert (last < found.ends.quantile(q) * (1.0 - 1e-9)).mean() <= q + 0.015


@pytest.mark.parametrize(
    ("medians", "sigmas", "field"),
    [([], 0.0, "medians"), ([-1.0], 0.0, "medians"), ([math.nan], 0.0, "medians"), ([1.0], -0.1, "sigmas")],
)
def test_what_is_no_time_is_refused(medians: list[float], sigmas: float, field: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidFieldError, match=field):
        completion_of(medians, sigmas)
