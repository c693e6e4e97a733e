"""Tests of fluid.forecasting.scenario, what the simulated backend runs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.forecasting.scenario import ALGORITHMS, DISTRIBUTIONS, DeviceChange, Runtimes, Scenario, Workload
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, FusedRates
from fluid.resources import Cluster, Device


def refused(field: str, *fragments: str) -> Any:
    """Expects an error about ``field`` whose message holds the fragments."""
    pattern = f"(?s)^{re.escape(field)}=" + "".join(f"(?=.*{fragment})" for fragment in fragments)
    return pytest.raises(InvalidFieldError, match=pattern)


def draws(runtimes: Runtimes, count: int = 2000, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return [runtimes.draw(rng) for _ in range(count)]


# --- Runtimes


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_draws_are_positive_and_follow_from_the_seed(distribution: str) -> None:
    runtimes = Runtimes(distribution, 2.0, 0.9)
    drawn = draws(runtimes, 200)
    assert all(seconds > 0.0 for seconds in drawn)
    assert drawn == draws(runtimes, 200)
    assert distribution == "constant" or drawn != draws(runtimes, 200, seed=1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_takes_one_number_a_draw(distribution: str) -> None:
    # So that another distribution leaves all that is drawn later as it was.
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    Runtimes(distribution).draw(one)
    other.random()
    assert one.random() == other.random()


def test_constant_runtimes_are_all_alike() -> None:
    assert set(draws(Runtimes("constant", 3.0), 50)) == {3.0}


def test_the_median_of_lognormal_runtimes_is_as_given() -> None:
    drawn = draws(Runtimes("lognormal", 4.0, 0.5))
    assert median(drawn) == pytest.approx(4.0, rel=0.05)
    assert float(np.std(np.log(drawn))) == pytest.approx(0.5, rel=0.05)
    assert set(draws(Runtimes("lognormal", 4.0, 0.0), 50)) == {4.0}


def test_uniform_runtimes_stay_within_their_bounds() -> None:
    drawn = draws(Runtimes("uniform", 4.0, 0.5))
    assert 2.0 <= min(drawn) < 2.1
    assert 5.9 < max(drawn) <= 6.0
    assert median(drawn) == pytest.approx(4.0, rel=0.05)


def test_one_bimodal_trial_in_four_takes_longer() -> None:
    counts = Counter(draws(Runtimes("bimodal", 2.0, 0.5)))
    assert set(counts) == {2.0, 6.0}
    assert counts[6.0] == pytest.approx(500, rel=0.15)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("distribution", value) for value in ("normal", "", None, 1)),
        *(("seconds_per_iteration", value) for value in (0, 0.0, -1, math.nan, math.inf, True, "1", None)),
        *(("sigma", value) for value in (-0.1, math.nan, math.inf, True, "1", None)),
    ],
)
def test_bad_runtimes_are_refused(field: str, value: Any) -> None:
    with refused(field):
        Runtimes(**{field: value})


def test_uniform_runtimes_must_stay_above_zero() -> None:
    with refused("sigma", "uniform"):
        Runtimes("uniform", 1.0, 1.0)
    assert Runtimes("lognormal", 1.0, 1.5).sigma == 1.5


# --- Workload


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("algorithm", value) for value in ("bohb", "", None)),
        *(
            (field, value)
            for field in ("trials", "max_iterations", "interval")
            for value in (0, -1, 1.5, math.nan, math.inf, True, "3", None)
        ),
        *(("eta", value) for value in (1, 0, 2.5, True, None)),
        *(("concurrency", value) for value in (-1, 0.5, True, None)),
    ],
)
def test_a_bad_workload_is_refused(field: str, value: Any) -> None:
    with refused(field):
        Workload(**{field: value})


def test_whole_numbers_of_every_kind_become_ints() -> None:
    workload = Workload("asha", trials=np.int64(9), max_iterations=27.0, eta=3.0, concurrency=np.float32(4), interval=5)  # type: ignore[arg-type]
    assert workload == Workload("asha", 9, 27, 3, 4, 5)
    assert all(type(getattr(workload, field)) is int for field in ("trials", "max_iterations", "eta", "concurrency"))
    scenario = Scenario(Cluster.of(2), c=2.0, d=np.int64(3), seed=7.0)  # type: ignore[arg-type]
    assert (scenario.c, scenario.d, scenario.seed) == (2, 3, 7)
    assert type(scenario.seed) is int
    assert Scenario(Cluster.of(2), seed=2**63 + 1).seed == 2**63 + 1, "a large seed is not rounded"


# --- Scenario


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("alpha", "beta") for value in (0.99, -1, math.nan, math.inf, True, "1", None)),
        *((field, value) for field in ("c", "d") for value in (0, -1, 1.5, True, None)),
        *(
            (field, value)
            for field in ("epsilon", "runtime_error")
            for value in (-0.1, math.nan, math.inf, True, "0", None)
        ),
        *(("early_stop", value) for value in (-0.1, 1.01, math.nan, True, None)),
        *(("seed", value) for value in (-1, 0.5, True, "0", None)),
    ],
)
def test_a_bad_scenario_is_refused(field: str, value: Any) -> None:
    with refused(field):
        Scenario(Cluster.of(2), **{field: value})


def test_a_scenario_on_other_devices_or_with_another_seed_is_otherwise_the_same() -> None:
    scenario = Scenario(
        Cluster.of([Device(0, speed=2.0), Device(1)]),
        Workload("asha"),
        epsilon=0.5,
        changes=(DeviceChange(5.0, lost=1),),
        seed=3,
    )
    larger = scenario.with_devices(8)
    assert larger.cluster == Cluster.of(8)
    assert larger.changes == ()
    assert (larger.workload, larger.epsilon, larger.seed) == (scenario.workload, 0.5, 3)
    again = scenario.with_seed(4)
    assert again.seed == 4
    assert (again.cluster, again.changes) == (scenario.cluster, scenario.changes)


# --- Devices lost and gained


@pytest.mark.parametrize("at", [-0.1, math.nan, math.inf, True, "5", None])
def test_a_change_needs_a_time(at: Any) -> None:
    with refused("at"):
        DeviceChange(at, lost=0)


def test_a_change_is_a_loss_or_a_gain() -> None:
    for wrong in ({}, {"lost": 1, "device": Device(3)}):
        with refused("lost", "either"):
            DeviceChange(1.0, **wrong)  # type: ignore[arg-type]


def test_changes_must_make_sense_in_the_order_of_time() -> None:
    def scenario(*changes: DeviceChange) -> Scenario:
        return Scenario(Cluster.of(2), changes=changes)

    with refused("remove_device", "no device", "5 s"):
        scenario(DeviceChange(5.0, lost=2))
    with refused("remove_device", "no device"):
        scenario(DeviceChange(1.0, lost=1), DeviceChange(2.0, lost=1))
    with refused("remove_device", "no device"):
        scenario(DeviceChange(1.0, lost=0), DeviceChange(2.0, lost=1))
    with refused("add_device", "already a device"):
        scenario(DeviceChange(1.0, device=Device(1)))
    with refused("add_device", "already a device"):
        scenario(DeviceChange(2.0, lost=1), DeviceChange(1.0, device=Device(1)))
    # Listed in any order; in one instant as listed.
    scenario(DeviceChange(9.0, device=Device(0)), DeviceChange(5.0, lost=0))
    scenario(DeviceChange(5.0, lost=0), DeviceChange(5.0, device=Device(0)))
    with refused("add_device", "already a device"):
        scenario(DeviceChange(5.0, device=Device(0)), DeviceChange(5.0, lost=0))


# --- From JSON

FULL: dict[str, Any] = {
    "name": "all of it",
    "devices": [{"host": "a", "speed": 2.0}, {"host": "b"}],
    "workload": {
        "algorithm": "asha",
        "trials": 9,
        "max_iterations": 27,
        "eta": 3,
        "concurrency": 4,
        "interval": 2,
    },
    "runtimes": {"distribution": "uniform", "seconds_per_iteration": 2.0, "sigma": 0.5},
    "alpha": 1.1,
    "beta": 1.05,
    "c": 3,
    "d": 6,
    "epsilon": 0.25,
    "runtime_error": 0.2,
    "early_stop": 0.1,
    "seed": 11,
    "events": [
        {"at": 5, "remove_device": 0},
        {"at": 6.5, "add_device": 0},
        {"at": 7, "add_device": 8},
        {"at": 8, "add_device": {"index": 9, "host": "c", "speed": 0.5}},
    ],
}


def test_every_field_of_a_scenario_is_read() -> None:
    scenario = Scenario.from_json(FULL)
    first = Device(0, "a", "gpu", 2.0)
    assert scenario == Scenario(
        Cluster.of([first, Device(1, "b", "gpu")]),
        Workload("asha", 9, 27, 3, 4, 2),
        Runtimes("uniform", 2.0, 0.5),
        name="all of it",
        alpha=1.1,
        beta=1.05,
        c=3,
        d=6,
        epsilon=0.25,
        runtime_error=0.2,
        early_stop=0.1,
        changes=(
            DeviceChange(5.0, lost=0),
            DeviceChange(6.5, device=first),  # comes back as it was
            DeviceChange(7.0, device=Device(8, "a", "gpu", 2.0)),  # like the first one
            DeviceChange(8.0, device=Device(9, "c", "gpu", 0.5)),
        ),
        seed=11,
    )


def test_only_devices_and_a_workload_are_needed() -> None:
    scenario = Scenario.from_json({"devices": 4, "workload": {}})
    assert scenario == Scenario(Cluster.of(4))
    assert (scenario.c, scenario.d, scenario.seed) == (DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, 0)
    assert (scenario.epsilon, scenario.runtime_error, scenario.early_stop) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("gpus", {"gpus": 4}),
        ("devices", {"devices": 0}),
        ("devices", {"devices": "4"}),
        ("devices[0].speed", {"devices": [{"speed": 0}]}),
        ("workload", {"workload": "asha"}),
        ("workload", {"workload": None}),
        ("workload.algorithm", {"workload": {"algorithm": "sha"}}),
        ("workload.rungs", {"workload": {"rungs": 3}}),
        ("workload.trials", {"workload": {"trials": 2.5}}),
        ("runtimes", {"runtimes": 3}),
        ("runtimes.mean", {"runtimes": {"mean": 3}}),
        ("runtimes.sigma", {"runtimes": {"sigma": -1}}),
        ("alpha", {"alpha": 0.5}),
        ("epsilon", {"epsilon": None}),
        ("early_stop", {"early_stop": 2}),
        ("seed", {"seed": 0.5}),
        ("seed", {"seed": "0"}),
        ("events", {"events": None}),
        ("events", {"events": {}}),
        ("events", {"events": "now"}),
        ("events[0]", {"events": [5]}),
        ("events[0]", {"events": [{"at": 5}]}),
        ("events[0]", {"events": [{"at": 5, "add_device": 7, "remove_device": 0}]}),
        ("events[0].device", {"events": [{"at": 5, "add_device": 7, "device": 0}]}),
        ("events[0].at", {"events": [{"remove_device": 0}]}),
        ("events[0].at", {"events": [{"at": -1, "remove_device": 0}]}),
        ("events[0].at", {"events": [{"at": math.nan, "remove_device": 0}]}),
        ("events[0].remove_device", {"events": [{"at": 5, "remove_device": "0"}]}),
        ("remove_device", {"events": [{"at": 5, "remove_device": 7}]}),
        ("add_device", {"events": [{"at": 5, "add_device": 1.5}]}),
        ("add_device", {"events": [{"at": 5, "add_device": 1}]}),
        ("add_device.index", {"events": [{"at": 5, "add_device": {"host": "c"}}]}),
        ("add_device.kind", {"events": [{"at": 5, "add_device": {"index": 7, "kind": "tpu"}}]}),
    ],
)
def test_a_bad_scenario_in_json_is_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    with refused(field):
        Scenario.from_json({**FULL, **changes})


@pytest.mark.parametrize("field", ["devices", "workload"])
def test_what_is_missing_is_named(field: str) -> None:
    with refused(field, "missing"):
        Scenario.from_json({name: value for name, value in FULL.items() if name != field})


def test_a_scenario_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(FULL), encoding="utf-8")
    assert Scenario.load(path) == Scenario.load(str(path)) == Scenario.from_json(FULL)
    path.write_text('{"devices": 4,', encoding="utf-8")
    with refused("path", r"scenario\.json", "not JSON"):
        Scenario.load(path)
    with refused("path", r"absent\.json", "cannot be read"):
        Scenario.load(tmp_path / "absent.json")


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    distribution=st.sampled_from(DISTRIBUTIONS),
    numbers=st.tuples(*(st.integers(1, 99) for _ in range(4))),
    seed=st.integers(0, 2**63),
)
def test_json_and_keywords_mean_the_same(
    algorithm: str, distribution: str, numbers: tuple[int, int, int, int], seed: int
) -> None:
    trials, iterations, devices, packing = numbers
    data = {
        "devices": devices,
        "workload": {"algorithm": algorithm, "trials": trials, "max_iterations": iterations},
        "runtimes": {"distribution": distribution},
        "c": packing,
        "seed": seed,
    }
    assert Scenario.from_json(json.loads(json.dumps(data))) == Scenario(
        Cluster.of(devices),
        Workload(algorithm, trials=trials, max_iterations=iterations),
        Runtimes(distribution),
        c=packing,
        seed=seed,
    )


# --- fused trials


FUSED = {"devices": 1, "workload": {}, "runtimes": {"distribution": "constant"}, "fused": {"2": 1.1, "4": 1.4}}


def test_rates_of_fused_trials_are_read() -> None:
    scenario = Scenario.from_json({**FUSED, "max_fused": 4})
    assert scenario.fused == FusedRates((1, 2, 4), (1.0, 1.1, 1.4))
    assert scenario.max_fused == 4
    assert Scenario.from_json({"devices": 1, "workload": {}}).fused is None


@pytest.mark.parametrize(
    ("changes", "field", "fragment"),
    [
        ({"fused": {"two": 1.1}}, "fused.two", "number of rows"),
        ({"fused": {"2": 0.9}}, "fused['2']", "at least 1"),
        ({"fused": [1.1]}, "fused", "JSON object"),
        ({"max_fused": 0}, "max_fused", "at least 1"),
        ({"runtimes": {"distribution": "lognormal"}}, "distribution", "constant with fused"),
        ({"runtime_error": 0.1}, "runtime_error", "must be 0 with fused"),
    ],
)
def test_what_fused_trials_cannot_have_is_refused(changes: dict[str, Any], field: str, fragment: str) -> None:
    with refused(field, fragment):
        Scenario.from_json({**FUSED, **changes})


def test_a_pack_faster_than_a_trial_is_refused() -> None:
    with refused("fused", "at least 1"):
        Scenario(Cluster.of(1), runtimes=Runtimes("constant"), fused=FusedRates.of({2: 0.5}))
