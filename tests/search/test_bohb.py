"""BOHB: its options, its model, its searcher and its brackets. That it decides as HpBandSter's is in integrations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.search import BOHB, SearchOutcome, lograndint, loguniform, make_space, randint, uniform, when
from fluid.search.algorithms import make_scheduler, shape_for
from fluid.search.bohb import BohbSearcher
from fluid.search.brackets import Brackets
from fluid.search.density import Density, DensityModels, truncated_normal
from fluid.search.domains import FloatRange
from fluid.search.rungs import halving_shape
from fluid.search.suggestion import ELSEWHERE

GREEDY = BOHB(random_fraction=0.0)


def searcher(space: Any = None, options: BOHB = GREEDY, mode: str = "min", **given: Any) -> BohbSearcher:
    given = {"seed": 0, "points": (), **given}
    return BohbSearcher(make_space(space or {"x": uniform(0, 1)}), options, mode=mode, **given)


def heard(
    config: dict[str, Any], value: float | None, state: str = "PAUSED", budget: int = 1, token: int = 0, **facts: Any
) -> SearchOutcome:
    values = None if value is None else (value,)
    facts = {"iteration": budget, **facts}
    return SearchOutcome(token=token, config=config, values=values, state=state, budget=budget, **facts)


def mean_of_last(made: BohbSearcher, tell: Any, count: int = 40) -> float:
    """Where it suggests at last; ``tell`` returns what each suggestion comes to."""
    found = []
    for _ in range(count):
        suggestion = made.ask()
        found.append(suggestion.config["x"])
        for outcome in tell(suggestion.token, suggestion.config):
            (made.observe if outcome.state == "PAUSED" else made.tell)(outcome)
    return float(np.mean(found[-15:]))


# -- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_points_in_model": 1}, "min_points_in_model=1: must be at least 2"),
        ({"top_n_percent": 0}, "top_n_percent=0: must be at least 1"),
        ({"top_n_percent": 100}, "top_n_percent=100: must be at most 99"),
        ({"num_samples": 0}, "num_samples=0: must be at least 1"),
        ({"num_samples": "9"}, "num_samples='9': must be a number, without quotes"),
        ({"random_fraction": 1.5}, "random_fraction=1.5: must be from 0 to 1"),
        ({"random_fraction": -0.1}, "random_fraction=-0.1: must be at least 0"),
        ({"bandwidth_factor": 0}, "bandwidth_factor=0: must be greater than 0"),
        ({"bandwidth_factor": math.nan}, "bandwidth_factor=nan: must be a number, not NaN"),
        ({"min_bandwidth": 2}, "min_bandwidth=2: must be greater than 0, and at most 1"),
        ({"synchronous": "yes"}, "synchronous='yes': must be True or False"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        BOHB(**options)
    assert text in str(caught.value)


def test_too_few_points_for_the_space_are_refused() -> None:
    space = {"a": uniform(0, 1), "b": uniform(0, 1), "c": [1, 2], "one": [7]}
    with pytest.raises(InvalidFieldError, match="min_points_in_model=3: must be at least 4, as the space has 3"):
        searcher(space, BOHB(min_points_in_model=3))
    searcher(space, BOHB(min_points_in_model=4))


def test_spaces_that_it_cannot_search_are_refused() -> None:
    optuna_space: Any = lambda trial: {"x": trial.suggest_float("x", 0, 1)}  # noqa: E731
    with pytest.raises(InvalidFieldError, match="algorithm='bohb': models no function of an Optuna trial"):
        searcher(optuna_space)
    tune = pytest.importorskip("ray.tune")
    with pytest.raises(InvalidFieldError, match=r"space\['x'\]=.*: is a normal distribution, .*; give it bounds"):
        searcher({"x": tune.randn(0, 1)})


@pytest.mark.parametrize("points", [{"x": 0.5}, "x", 3])
def test_points_must_be_a_list(points: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"points=.*: must be a list of dicts"):
        searcher(points=points)


# -- the model


def test_a_truncated_normal_is_what_scipy_draws() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for _ in range(200):
        mean, deviation, share = rng.random(), 10 ** rng.uniform(-3, 1), rng.random()
        bounds = -mean / deviation, (1 - mean) / deviation
        expected = stats.truncnorm.ppf(share, *bounds, loc=mean, scale=deviation)
        assert truncated_normal(mean, deviation, share) == pytest.approx(expected, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("deviation", [1e-3, 1.0, 1e6])
def test_a_truncated_normal_stays_in_its_bounds(mean: float, deviation: float) -> None:
    found = [truncated_normal(mean, deviation, share) for share in (0.0, 1e-300, 0.5, 1.0 - 2**-53)]
    assert found == sorted(found) and 0.0 <= found[0] <= found[-1] <= 1.0


def test_a_density_is_that_of_statsmodels() -> None:
    kernel_density = pytest.importorskip("statsmodels.nonparametric.kernel_density")
    rng, choices = np.random.default_rng(1), np.array([0, 3, 0])
    data = np.column_stack([rng.random(12), rng.integers(3, size=12), rng.random(12)])
    theirs = kernel_density.KDEMultivariate(data=data, var_type="cuc", bw="normal_reference", rng=0)
    theirs.bw = np.clip(theirs.bw, 0.25, None)
    ours = Density(data, choices, 0.25)
    np.testing.assert_allclose(ours.bandwidths, theirs.bw, rtol=1e-14)
    for vector in ([0.2, 1, 0.9], [0.5, 2, 0.1], [1.0, 0, 0.0]):
        assert ours.at(vector) == pytest.approx(float(theirs.pdf(vector)), rel=1e-13)


def test_the_model_is_of_the_largest_budget_with_enough_results() -> None:
    models, rng = DensityModels([0], GREEDY), np.random.default_rng(0)
    for x in np.linspace(0, 1, 30):
        models.add(1, [x], abs(x - 0.9), rng)
    first = [models.suggest(rng) for _ in range(20)]
    for x in np.linspace(0, 1, 30):
        models.add(9, [x], abs(x - 0.1), rng)
    second = [models.suggest(rng) for _ in range(20)]
    assert abs(np.mean([vector[0] for vector in first if vector]) - 0.9) < 0.15
    assert abs(np.mean([vector[0] for vector in second if vector]) - 0.1) < 0.15
    for x in np.linspace(0, 1, 30):  # What comes to a smaller budget later says nothing any more.
        models.add(1, [x], abs(x - 0.9), rng)
    assert abs((models.suggest(rng) or [1.0])[0] - 0.1) < 0.4


def test_there_is_no_model_before_there_are_enough_results() -> None:
    models, rng = DensityModels([0, 2], GREEDY), np.random.default_rng(0)
    for count in range(1, 7):  # Three good ones, and three others.
        assert models.suggest(rng) is None
        models.add(1, [count / 7, count % 2], float(count), rng)
    assert models.suggest(rng) is not None


def test_a_space_of_constants_has_no_model() -> None:
    made = searcher({"x": 3, "y": [1]})
    for _ in range(9):
        suggestion = made.ask()
        assert suggestion.config == {"x": 3, "y": 1}
        made.observe(heard(suggestion.config, 1.0, token=suggestion.token))


# -- the searcher


@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_suggests_what_is_good(mode: str) -> None:
    sign = 1.0 if mode == "min" else -1.0
    made = searcher(mode=mode)
    found = mean_of_last(made, lambda token, config: [heard(config, sign * abs(config["x"] - 0.3), token=token)])
    assert abs(found - 0.3) < 0.15


def test_what_fails_is_avoided_at_the_rung_that_it_was_on_its_way_to() -> None:
    def tell(token: int, config: dict[str, Any]) -> list[SearchOutcome]:
        if config["x"] < 0.5:
            failed = heard(config, -9.0, "FAILED", budget=3, token=token, iteration=1)  # As with on_oom="worst".
            return [heard(config, 0.0, token=token), failed]
        return [heard(config, 1.0, token=token), heard(config, 1.0, budget=3, token=token)]

    assert mean_of_last(searcher(), tell) > 0.6


@pytest.mark.parametrize("state", ["FAILED", "INFEASIBLE", "DONE"])
def test_what_comes_to_no_number_is_avoided(state: str) -> None:
    def tell(token: int, config: dict[str, Any]) -> list[SearchOutcome]:
        value = None if config["x"] < 0.5 else 1.0
        return [heard(config, value, "PAUSED" if value else state, token=token)]

    assert mean_of_last(searcher(), tell) > 0.6


def results(made: BohbSearcher) -> dict[int, int]:
    return {budget: len(losses) for budget, (_, losses) in made._models._results.items()}


def test_each_rung_of_a_trial_counts_once() -> None:
    made = searcher(options=BOHB(min_points_in_model=99))
    config = made.ask().config
    for budget in (1, 3):
        made.observe(heard(config, 0.5, budget=budget))
    made.tell(heard(config, 0.5, "STOPPED", budget=3))  # It is told at its end what it had come to at the rung.
    assert results(made) == {1: 1, 3: 1}
    config = made.ask().config
    made.tell(heard(config, None, "STOPPED", budget=1, token=1, iteration=0))  # It never ran.
    assert results(made) == {1: 1, 3: 1}
    made.tell(heard(config, 0.5, "DONE", budget=3, token=1, iteration=2))  # It has ended by itself.
    assert results(made) == {1: 1, 3: 2}
    config = {"x": 0.25}
    made.observe(heard(config, 0.5, budget=1, token=ELSEWHERE))
    made.tell(heard(config, 0.5, "STOPPED", budget=1, token=ELSEWHERE))
    assert results(made) == {1: 2, 3: 2}


def test_points_come_first_and_the_rest_is_drawn() -> None:
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    made = searcher(space, points=[{"x": 0.25}, {"x": 0.5, "y": 0.5}])
    first, second, third = (made.ask().config for _ in range(3))
    assert first["x"] == 0.25 and second == {"x": 0.5, "y": 0.5}
    plain = searcher(space)
    assert [plain.ask().config for _ in range(3)][2] == third


def test_a_suggestion_follows_from_its_place_and_the_results() -> None:
    """Not from what was asked before: a sweep that goes on gives the configs that were tried as points."""
    space = {"x": uniform(0, 1), "lr": loguniform(1e-4, 1), "kind": ["a", "b"], "m": when("kind", "a", uniform(0, 1))}
    whole = searcher(space, BOHB())
    done = []
    for _ in range(30):
        config = whole.ask().config
        done.append(config)
        whole.observe(heard(config, config["x"] + config.get("m", 0.3), token=len(done) - 1))
    again = searcher(space, BOHB(), points=done[:20])
    for token in range(20):
        config = again.ask().config
        again.observe(heard(config, config["x"] + config.get("m", 0.3), token=token))
    for token in range(20, 30):
        config = again.ask().config
        assert config == done[token]
        again.observe(heard(config, config["x"] + config.get("m", 0.3), token=token))


def test_a_shared_searcher_suggests_others() -> None:
    first, second = searcher(points=[{"x": 0.5}]), searcher(points=[{"x": 0.5}])
    second.share()
    assert first.ask().config == {"x": 0.5}
    assert second.ask().config != {"x": 0.5} and first.ask().config != second.ask().config


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        (uniform(-2, 3), [-2, 0.5, 2.9]),
        (uniform(0, 1, step=0.25), [0.0, 0.5, 1.0]),
        (loguniform(1e-4, 1e-1), [1e-4, 3e-3]),
        (FloatRange(-1e308, 1.7e308), [-1e308, 5e307, 1.7e308]),
        (randint(1, 10, 3), [1, 4, 7]),
        (lograndint(1, 1000), [1, 2, 30, 999]),
        (["a", None, 3.5], ["a", None, 3.5]),
    ],
)
def test_values_come_back_from_their_places(domain: Any, values: list[Any]) -> None:
    axis = searcher({"x": domain})._axes["x"]
    for value in values:
        place = axis.place(value)
        assert axis.value(place) == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)
        assert axis.choices or 0.0 <= place <= 1.0


def test_values_of_tunes_ranges_come_back_from_their_places() -> None:
    tune = pytest.importorskip("ray.tune")
    for domain, values in ((tune.qloguniform(5, 1000, 5), [5, 100, 1000]), (tune.quniform(0, 1, 0.25), [0.25, 1.0])):
        axis = searcher({"x": domain})._axes["x"]
        assert [axis.value(axis.place(value)) for value in values] == values
        assert axis.value(0.501) % (values[0]) == 0


def test_every_suggestion_is_of_the_space() -> None:
    space = {
        "lr": loguniform(1e-4, 1),
        "n": randint(1, 5),
        "kind": ["a", "b", "c"],
        "m": when("kind", ["a", "b"], {"x": uniform(0, 0.5, step=0.125), "deep": when("kind", "a", lograndint(1, 9))}),
        "never": when("kind", "c", [7]),
        "c": 3,
    }
    made = searcher(space)
    known = make_space(space)
    for token in range(60):
        config = made.ask().config
        known.check_point("config", config)
        assert ("m" in config) == (config["kind"] != "c") and ("never" in config) == (config["kind"] == "c")
        made.observe(heard(config, config["lr"] if token % 9 else None, token=token))


# -- brackets


def test_a_bracket_begins_when_the_one_before_has_ended() -> None:
    scheduler = Brackets([halving_shape(2, (1, 2), 2), halving_shape(2, (2,), 2)], one_by_one=True)
    assert scheduler.may_start(0) and scheduler.may_start(1) and not scheduler.may_start(2)
    assert [scheduler.start() is not None for _ in range(2)] == [True, True]
    assert not scheduler.may_start(0)
    scheduler.reached(0, 0.1)
    scheduler.reached(1, 0.2)
    assert not scheduler.may_start(0)
    scheduler.reached(0, 0.1)
    assert scheduler.may_start(1) and not scheduler.may_start(2)


def test_a_bracket_whose_trials_have_failed_has_ended_and_one_tried_again_has_not() -> None:
    scheduler = Brackets([halving_shape(1, (1, 2), 2), halving_shape(1, (2,), 2)], one_by_one=True)
    scheduler.start()
    scheduler.ended(0)
    assert scheduler.may_start(0)
    scheduler.retried(0)
    assert not scheduler.may_start(0)


def test_side_by_side_all_may_start() -> None:
    scheduler = Brackets([halving_shape(1, (1, 2), 2)] * 2)
    assert scheduler.may_start(99)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_it_has_the_brackets_of_hyperband(one_by_one: bool) -> None:
    facts: dict[str, Any] = {"rungs": (1, 3, 9), "eta": 3, "samples": 17}
    shape = shape_for("bohb", one_by_one=one_by_one, **facts)
    assert shape.brackets == shape_for("hyperband", **facts).brackets == ((9, 3, 1), (5, 1), (3,))
    assert shape.one_by_one is one_by_one
    scheduler, other = make_scheduler("bohb", one_by_one=one_by_one, **facts), make_scheduler("hyperband", **facts)
    assert [scheduler.start() for _ in range(18)] == [other.start() for _ in range(18)]
