"""The forest over configs, and the curves of trials that were stopped."""

from __future__ import annotations

import numpy as np
import pytest

from fluid.rehearsal.config_guess import TREES, ConfigColumns, ConfigForest
from fluid.rehearsal.curves import curve_table
from fluid.rehearsal.replayable import ReplayedIteration
from fluid.rehearsal.run_records import RecordedTrial

ensemble = pytest.importorskip("sklearn.ensemble")


def test_the_forest_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 3)).astype(np.float32).astype(np.float64)
    targets = np.stack([rows[:, 0] + rows[:, 1] ** 2, 10.0 * rows[:, 2]], axis=1)
    scales = np.array([1.0, 10.0])
    forest = ConfigForest(rows, targets, scales, seed=3)
    theirs = ensemble.RandomForestRegressor(n_estimators=TREES, max_features=0.6, random_state=3)
    theirs.fit(rows, targets / scales)
    for row in rng.normal(size=(20, 3)):
        expected = theirs.predict(row[None])[0] * scales
        assert forest.predict(row).mean(axis=0) == pytest.approx(expected)
    # About e^-1 of the trees have not seen a trial.
    assert forest.left_out.mean() == pytest.approx(0.37, abs=0.05)
    assert [len(each) for each in forest.predict_left_out(rows)] == forest.left_out.sum(axis=1).tolist()


def test_columns_of_configs() -> None:
    configs = [{"lr": "0.1", "act": "relu", "k": "1"}, {"lr": "0.001", "act": "tanh", "k": "1"}, {"act": "relu"}]
    columns = ConfigColumns(configs)
    assert columns.names == ("act", "lr")
    assert columns.rows.shape == (3, 3)
    assert columns.rows[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert columns.rows[2, 2] < columns.rows[1, 2] < columns.rows[0, 2]  # What is missing lies below.
    assert columns.is_inside({"lr": "0.01", "act": "relu"})
    assert not columns.is_inside({"lr": "0.2", "act": "relu"})
    assert not columns.is_inside({"lr": "0.01", "act": "selu"})
    assert columns.nearest({"lr": "0.002", "act": "tanh"}) == 1
    assert columns.key({"lr": "0.1", "act": "relu"}) == ("relu", "0.1")


def _trial(name: str, level: float, last: int, fall: float = 1.0) -> RecordedTrial:
    known = {i: ReplayedIteration({"loss": level + fall / i, "count": 10 * i}, 2.0) for i in range(1, last + 1)}
    return RecordedTrial(name, {"level": level}, known)


def test_stopped_curves_go_on_from_their_last_value() -> None:
    trials = [_trial(f"good-{n}", 0.1 * n, 16) for n in range(8)] + [_trial("bad", 5.0, 3)]
    table = curve_table(trials, "loss")
    (loss,) = table.metrics
    assert table.grid[0] == 1
    assert table.grid[-1] == 16
    assert table.counters[("count",)].at(7) == 70
    bad = loss.values[-1]
    assert not np.isnan(loss.values).any()
    assert np.all(np.diff(bad) < 0.0)
    assert bad[-1] == pytest.approx(5.0 + 1 / 16, abs=0.05)  # Not near the good ones, that alone were recorded so far.
    assert np.all(loss.spread[:-1] == 0.0)
    numbers, values = table.anchored(loss, 8, trials[8])
    assert numbers[:3].tolist() == [1.0, 2.0, 3.0]
    assert values[:3] == pytest.approx([6.0, 5.5, 5.0 + 1 / 3])


def test_losses_of_many_orders_are_followed_on_a_logarithmic_scale() -> None:
    trials = [
        RecordedTrial(
            str(n), {"n": n}, {i: ReplayedIteration({"loss": 10.0 ** (-i - 0.1 * n)}, 1.0) for i in range(1, last)}
        )
        for n, last in enumerate([9, 9, 9, 9, 4])
    ]
    (loss,) = curve_table(trials, "loss").metrics
    assert loss.is_log
    assert loss.shown(loss.values[4, -1:])[0] == pytest.approx(10.0**-8.4, rel=0.05)


def test_values_that_are_no_numbers_are_left_out() -> None:
    known = {1: ReplayedIteration({"loss": float("nan"), "name": "a"}, 1.0)}
    table = curve_table([_trial("fine", 1.0, 4), RecordedTrial("diverged", {"level": 9.0}, known)], "loss")
    (loss,) = table.metrics
    assert np.isfinite(loss.values).all()
    assert loss.known.tolist() == [4.0, 0.0]
    assert table.others == (("name",),)
