"""Rates of fused packs in what ``fluid plan`` reads, and from a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.errors import InvalidFieldError
from fluid.measure.measurements import MIN_OBSERVATIONS
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates
from fluid.planners.instance import Instance
from fluid.resources import Cluster
from fluid.trialgroup import Trial, TrialGroup

RATES = FusedRates((1, 2, 4), (1.0, 1.1, 1.4))


def profile_of(
    processes: dict[int, float], rows: dict[int, float], key: str = "net", model: str | None = None
) -> Profile:
    """Seconds per iteration by processes on a device, and by rows of a pack."""
    profile = Profile()
    for _ in range(MIN_OBSERVATIONS):
        for co_residents, seconds in processes.items():
            profile.observe(key, seconds, co_residents=co_residents, model=model)
        for k, seconds in rows.items():
            profile.observe(key, seconds, rows=k, model=model)
    return profile


def fused_of(instance: Instance) -> list[FusedRates | None]:
    fused = instance.model.fused
    return [None] * len(instance) if fused is None else [fused[row] for row in range(len(instance))]


def test_trials_may_have_rates() -> None:
    trials = [
        {"runtime_s": 10.0, "fused": {"2": 1.1, "4": 1.4}, "alpha": 2.0},
        {"runtime_s": 10.0, "alpha": 1.6},
        {"runtime_s": 10.0, "fused": {"2": 1.1, "4": 1.4}, "c": 3},
        {"runtime_s": 10.0, "fused": {"2": 2.0}},
    ]
    instance = Instance.from_json({"devices": 2, "trials": trials})
    assert fused_of(instance) == [RATES, None, RATES, FusedRates((1, 2), (1.0, 2.0))]
    assert instance.model.c.tolist() == [4, 2, 2, 1], "rows double while that pays, up to c"


def test_rates_for_all_trials() -> None:
    trials: list[dict[str, Any]] = [{"runtime_s": 10.0}, {"runtime_s": 10.0, "fused": {}}]
    instance = Instance.from_json({"devices": 1, "fused": {"64": 6.4}, "trials": trials})
    assert fused_of(instance) == [FusedRates((1, 64), (1.0, 6.4)), None]
    assert instance.model.c.tolist() == [64, 4], "packs have more rows by default"
    assert Instance.from_json({"devices": 1, "c": 16, "fused": {"64": 6.4}, "trials": trials}).model.c.tolist() == [
        16,
        16,
    ]


@pytest.mark.parametrize(
    ("fused", "field"),
    [
        (3, "trials[1].fused"),
        ({"two": 1.1}, "trials[1].fused.two"),
        ({"0": 1.1}, "trials[1].fused.0"),
        ({"2": 0.0}, "trials[1].fused"),
        ({"1": 2.0}, "trials[1].fused"),
        ({"2": "1.1"}, "trials[1].fused['2']"),
    ],
)
def test_bad_rates_are_refused_by_field(fused: object, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        Instance.from_json({"devices": 1, "trials": [{"runtime_s": 1.0}, {"runtime_s": 1.0, "fused": fused}]})
    assert refused.value.field == field


def test_measured_packs_are_planned_if_they_do_more_than_processes() -> None:
    trials = [{"profile_key": "net", "budget": 10}, {"profile_key": "net", "budget": 10, "fused": {}}]
    faster = Instance.from_json(
        {"devices": 2, "trials": trials}, profile_of({1: 1.0, 2: 1.2}, {2: 1.1, 4: 1.4, 8: 2.7})
    )
    assert fused_of(faster) == [FusedRates((1, 2, 4, 8), (1.0, 1.1, 1.4, 2.7)), None]
    assert faster.model.c[0] == 4, "doubling 4 rows gains only 4 %"
    slower = Instance.from_json({"devices": 2, "trials": trials}, profile_of({1: 1.0, 2: 1.05, 3: 1.1}, {2: 1.6}))
    assert fused_of(slower) == [None, None]
    assert slower.model.c.tolist() == [4, 4]


def test_a_group_is_planned_by_measured_packs() -> None:
    profile = profile_of({1: 2.0}, {2: 2.2, 4: 2.8})
    group = TrialGroup([Trial(print, budget=10, profile_key="net") for _ in range(8)])
    instance = Instance.from_group(group, Cluster.of(2), profile, c=2)
    assert fused_of(instance) == [RATES] * 8
    assert instance.model.c.tolist() == [4] * 8, "c bounds processes"
    assert instance.heights.tolist() == [20.0] * 8
    assert Instance.from_group(group, Cluster.of(2), profile, c=2, max_fused=2).model.c.tolist() == [2] * 8
    alone = Instance.from_group(group, Cluster.of(2), profile, c=2, max_fused=1)
    assert fused_of(alone) == [None] * 8
    assert alone.model.c.tolist() == [2] * 8


def test_instances_keep_their_rates_when_rows_are_taken() -> None:
    instance = Instance.build([1.0, 2.0, 3.0], 2, fused=[RATES, None, None])
    assert fused_of(instance.take([2, 0, 0], ["a", "b", "c"])) == [None, RATES, RATES]
    with pytest.raises(InvalidFieldError, match="one for each of the 3 trials"):
        Instance.build([1.0, 2.0, 3.0], 2, fused=[RATES])


def test_fluid_plan_reads_packs_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, data = tmp_path / "profile.json", tmp_path / "instance.json"
    profile_of({1: 1.0}, {2: 1.1, 4: 1.4}).save(saved)
    trial = {"profile_key": "net", "budget": 10}
    data.write_text(json.dumps({"devices": 1, "trials": [{**trial, "id": name} for name in "abcd"]}))
    assert main(["plan", str(data), "--profile", str(saved), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["widths"] == dict.fromkeys("abcd", 0.25)
    assert plan["makespan_s"] == pytest.approx(14.0)
    assert plan["lower_bound_s"] == pytest.approx(14.0)
