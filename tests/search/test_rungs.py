"""The rungs and brackets of successive halving and Hyperband, against published tables."""

from __future__ import annotations

import pytest

from fluid.search.rungs import brackets_for, halving_shape, hyperband_shapes, rungs_of

#: Table 1 of Li et al. (JMLR 2018), R = 81 and eta = 3: n_i and r_i of each bracket. Where the paper's table has 27, 9
#: and 6 trials, its Algorithm 1 has 34, 15 and 8, as Ray Tune's HyperBandScheduler has.
HYPERBAND_81 = [
    ((1, 3, 9, 27, 81), (81, 27, 9, 3, 1)),
    ((3, 9, 27, 81), (34, 11, 3, 1)),
    ((9, 27, 81), (15, 5, 1)),
    ((27, 81), (8, 2)),
    ((81,), (5,)),
]


def test_hyperband_table() -> None:
    shapes = hyperband_shapes(rungs_of(81, 3, 1), 3)
    assert [(shape.rungs, shape.sizes) for shape in shapes] == HYPERBAND_81


@pytest.mark.ray
def test_hyperband_as_ray_tune_has_it() -> None:
    hyperband = pytest.importorskip("ray.tune.schedulers").HyperBandScheduler(
        time_attr="training_iteration", metric="loss", mode="min", max_t=81, reduction_factor=3
    )
    shapes = hyperband_shapes(rungs_of(81, 3, 1), 3)
    steps = range(len(shapes) - 1, -1, -1)
    assert [shape.sizes[0] for shape in shapes] == [hyperband._get_n0(s) for s in steps]
    assert [shape.rungs[0] for shape in shapes] == [hyperband._get_r0(s) for s in steps]


@pytest.mark.parametrize(
    ("budget", "eta", "least", "rungs"),
    [
        (27, 3, 1, (1, 3, 9, 27)),
        (1, 3, 1, (1,)),
        (2, 3, 1, (2,)),
        (10, 3, 1, (1, 3, 10)),
        (100, 3, 1, (1, 4, 11, 33, 100)),
        (27, 3, 3, (3, 9, 27)),
        (27, 3, 4, (9, 27)),
        (16, 2, 1, (1, 2, 4, 8, 16)),
        (5, 5, 5, (5,)),
    ],
)
def test_rungs(budget: int, eta: int, least: int, rungs: tuple[int, ...]) -> None:
    assert rungs_of(budget, eta, least) == rungs


def test_rungs_ascend_from_the_least_budget_to_the_budget() -> None:
    for eta in (2, 3, 4):
        for least in (1, 2, 5):
            for budget in range(least, 300):
                rungs = rungs_of(budget, eta, least)
                assert rungs[-1] == budget
                assert rungs[0] >= least
                assert list(rungs) == sorted(set(rungs))


def test_each_rung_of_a_bracket_has_at_least_one_trial() -> None:
    assert halving_shape(5, (1, 3, 9, 27), 3).sizes == (5, 1, 1, 1)


def test_brackets_try_exactly_the_samples() -> None:
    rungs = rungs_of(27, 3, 1)
    for samples in range(1, 150):
        brackets = brackets_for(samples, rungs, 3)
        assert sum(shape.sizes[0] for shape in brackets) == samples
    assert brackets_for(49, rungs, 3) == hyperband_shapes(rungs, 3)
    assert brackets_for(98, rungs, 3) == hyperband_shapes(rungs, 3) * 2
