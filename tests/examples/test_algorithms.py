"""The set-up of searches: number of configurations, grids, and the space of population based training."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
from ray.tune.search.sample import Categorical
from sweep_configs import WORKLOADS
from tuning.algorithms import SearchRequest, band, grid, method
from tuning.scales import SCALE_NAMES, SCALES

from fluid import tune
from fluid.errors import InvalidFieldError

pytestmark = pytest.mark.filterwarnings("ignore")


def request(name: str, samples: int | None = None, scale: str = "small") -> SearchRequest:
    return SearchRequest(WORKLOADS[name], WORKLOADS[name].scale(scale), samples, 0, 2)


def test_a_band_of_hyperband() -> None:
    # Table 1 of the Hyperband paper has 81, 34 (27 there), 15 (9), 8 (6) and 5; Tune rounds up before, not after.
    assert band(81) == 81 + 34 + 15 + 8 + 5
    assert band(9) == 9 + 5 + 3
    assert band(1) == 1


def test_a_band_is_what_tune_fills() -> None:
    from ray.tune.schedulers import HyperBandScheduler

    for max_t in (3, 9, 27, 81):
        scheduler = HyperBandScheduler(max_t=max_t, reduction_factor=3)
        assert band(max_t) == sum(scheduler._get_n0(halvings) for halvings in range(scheduler._s_max_1))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 81])
def test_a_grid_stays_within_the_space_and_the_number_of_points(name: str, most: int) -> None:
    space = WORKLOADS[name].space
    points = grid(space, most)
    assert list(points) == list(space)
    assert math.prod(map(len, points.values())) <= most
    for key, values in points.items():
        assert len(set(values)) == len(values) <= 3
        domain: Any = space[key]
        if isinstance(domain, Categorical):
            assert set(values) <= set(domain.categories)
        else:
            assert all(domain.lower <= value < domain.upper for value in values)
    if most >= 9:
        assert math.prod(map(len, points.values())) >= 9


def test_the_values_of_a_grid() -> None:
    space = {"rate": tune.loguniform(1e-3, 1.0), "layers": tune.randint(2, 5), "kind": tune.choice(["a", "b"])}
    points = grid(space, 18)
    assert points["rate"] == pytest.approx([10**-2.5, 10**-1.5, 10**-0.5])
    assert points["layers"] == [2, 3, 4]
    assert points["kind"] == ["a", "b"]
    with pytest.raises(InvalidFieldError, match=r"space\['f'\]"):
        grid({"f": tune.sample_from(lambda _: 1)}, 3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_population_based_training_stays_within_the_space(name: str) -> None:
    workload = WORKLOADS[name]
    search = method("pbt", request(name))
    assert search.samples == SCALES[name]["small"].population
    explore = search.scheduler._custom_explore_fn
    for value in (-1e9, 1e9):
        tried = explore({**dict.fromkeys(workload.changing, value), "other": 7})
        assert tried["other"] == 7
        for key in workload.changing:
            assert tried[key] == (workload.space[key].lower if value < 0 else workload.space[key].upper)


@pytest.mark.parametrize(("algorithm", "samples"), [("random", 9), ("asha", 27), ("hyperband", 17), ("pbt", 6)])
def test_how_many_configurations(algorithm: str, samples: int) -> None:
    assert method(algorithm, request("cifar10")).samples == samples
    assert method(algorithm, request("cifar10", 5)).samples == 5


def test_every_workload_has_every_scale() -> None:
    assert SCALES.keys() == WORKLOADS.keys()
    for name, scales in SCALES.items():
        assert tuple(scales) == SCALE_NAMES
        assert all(scale.fixed.keys() == scales["full"].fixed.keys() for scale in scales.values()), name
