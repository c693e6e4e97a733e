"""Plans for devices of unlike models: the figures and speeds that were measured for the trials' profile keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.cli import main
from fluid.devices.models import speeds_of_all
from fluid.errors import InvalidFieldError
from fluid.measure.profile import MIN_OBSERVATIONS, Profile
from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import PLANNERS, make_planner
from fluid.resources import Cluster, Device, MemoryNeed
from fluid.trialgroup import Trial, TrialGroup

SLOW, FAST = "NVIDIA A100", "NVIDIA H200"


def train(config: dict[str, Any]) -> None:
    """A trainable."""


def profile_of(**seconds: Mapping[str, float]) -> Profile:
    """A profile that has measured these seconds per iteration, by key and device model."""
    profile = Profile()
    for key, by_model in seconds.items():
        for model, each in by_model.items():
            for _ in range(MIN_OBSERVATIONS):
                profile.observe(key, each, model=model)
    return profile


def cluster_of(*models: str | None, speeds: tuple[float, ...] = ()) -> Cluster:
    return Cluster(
        tuple(Device(index, model=model, speed=speeds[index] if speeds else 1.0) for index, model in enumerate(models))
    )


def group_of(**budgets: int) -> TrialGroup:
    """One trial per key, of that name."""
    return TrialGroup(
        [Trial(train, budget=each, trial_id=key, profile_key=key, max_width=1) for key, each in budgets.items()]
    )


# --- one speed of each device


positive = st.floats(0.01, 100.0)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(positive, positive, positive), min_size=1))
def test_a_device_does_all_the_work_in_the_time_that_its_keys_take_there(keys: dict[str, tuple[float, ...]]) -> None:
    work = {key: each[0] for key, each in keys.items()}
    speeds = {key: {SLOW: each[1], FAST: each[2]} for key, each in keys.items()}
    of_all = speeds_of_all(work, speeds)
    for model in (SLOW, FAST):
        seconds = sum(work[key] / speeds[key][model] for key in work)
        assert sum(work.values()) / of_all[model] == pytest.approx(seconds)
        least, most = (best(speeds[key][model] for key in work) for best in (min, max))
        assert least * (1 - 1e-9) <= of_all[model] <= most * (1 + 1e-9)


def test_keys_of_equal_speeds_have_that_speed() -> None:
    speeds = {key: {SLOW: 1.0, FAST: 4.0} for key in "ab"}
    assert speeds_of_all({"a": 3.0, "b": 7.0}, speeds) == pytest.approx({SLOW: 1.0, FAST: 4.0})


# --- from_group


def test_a_plan_uses_the_speeds_that_were_measured() -> None:
    profile, group = profile_of(net={SLOW: 2.0, FAST: 0.5}), group_of(net=12)
    plan = make_planner("fifo").plan(group, cluster_of(SLOW, FAST), profile)
    assert plan.instance.heights.tolist() == [24.0], "seconds on the model of the first device"
    assert [device.speed for device in plan.instance.cluster.devices] == [1.0, 4.0]
    assert plan.placements["net"].device_ids == (1,)
    assert plan.makespan == pytest.approx(6.0)


def test_the_reference_is_the_model_of_the_first_device() -> None:
    profile = profile_of(net={SLOW: 2.0, FAST: 0.5})
    plan = make_planner("fifo").plan(group_of(net=12), cluster_of(FAST, SLOW), profile)
    assert plan.instance.heights.tolist() == [6.0]
    assert [device.speed for device in plan.instance.cluster.devices] == [1.0, 0.25]


def test_keys_of_unlike_speeds_share_one_speed_of_each_device() -> None:
    profile = profile_of(gpu={SLOW: 1.0, FAST: 0.25}, input={SLOW: 1.0, FAST: 1.0})
    instance = Instance.from_group(group_of(gpu=12, input=12), cluster_of(SLOW, FAST), profile)
    assert [device.speed for device in instance.cluster.devices] == pytest.approx([1.0, 24 / (12 / 4 + 12)])


def test_a_key_that_was_measured_on_another_model_only_is_converted() -> None:
    profile = profile_of(old={SLOW: 2.0, FAST: 0.5}, new={FAST: 1.0})
    instance = Instance.from_group(group_of(old=1, new=1), cluster_of(SLOW, FAST), profile)
    assert dict(zip(instance.trial_ids, instance.heights.tolist(), strict=True)) == {"old": 2.0, "new": 4.0}


@pytest.mark.parametrize("cluster", [cluster_of(FAST, FAST), cluster_of(SLOW, FAST, speeds=(1.0, 3.0))])
def test_alike_devices_and_given_speeds_stay_as_they_are(cluster: Cluster) -> None:
    instance = Instance.from_group(group_of(net=12), cluster, profile_of(net={SLOW: 2.0, FAST: 0.5}))
    assert instance.cluster is cluster


def test_alike_devices_are_planned_by_what_was_measured_on_their_model() -> None:
    profile = profile_of(net={SLOW: 2.0, FAST: 0.5})
    for model, seconds in ((SLOW, 24.0), (FAST, 6.0), ("measured nowhere", 24.0)):
        instance = Instance.from_group(group_of(net=12), cluster_of(model), profile)
        assert instance.heights.tolist() == [seconds]


def test_packing_is_that_of_the_model_on_which_most_trials_fit() -> None:
    profile = profile_of(net={SLOW: 1.0, FAST: 1.0})
    for _ in range(MIN_OBSERVATIONS):
        profile.observe("net", 2.0, model=SLOW, co_residents=2)
        profile.observe("net", 1.0, model=FAST, co_residents=2)
    instance = Instance.from_group(group_of(net=12), cluster_of(SLOW, FAST), profile, c=2)
    assert instance.model.c.tolist() == [2]
    assert instance.model.alpha.tolist() == [profile.alpha("net", FAST)]


@pytest.mark.parametrize("planner", PLANNERS)
def test_no_plan_is_below_the_lower_bound(planner: str) -> None:
    profile = profile_of(a={SLOW: 1.0, FAST: 0.2}, b={SLOW: 3.0, FAST: 2.0}, c={SLOW: 0.5, FAST: 0.1})
    plan = make_planner(planner).plan(group_of(a=50, b=20, c=90), cluster_of(SLOW, FAST, SLOW), profile)
    assert plan.lower_bound <= plan.makespan * (1 + 1e-6)


# --- from_json


UNLIKE = [{"model": SLOW}, {"model": FAST}]


def test_an_instance_names_what_was_measured() -> None:
    profile = profile_of(net={SLOW: 2.0, FAST: 0.5})
    profile.observe_memory("net", MemoryNeed(5.0, 7.0), model=SLOW)
    profile.observe_resize(0.25)
    trials: list[dict[str, Any]] = [
        {"profile_key": "net", "budget": 10},
        {"profile_key": "net", "budget": 4, "alpha": 1.5},
    ]
    instance = Instance.from_json({"devices": UNLIKE, "alpha": 1.3, "trials": trials}, profile)
    assert instance.heights.tolist() == [20.0, 8.0]
    assert instance.model.alpha.tolist() == [1.0, 1.5], "what a trial says itself holds, then what was measured"
    assert [device.speed for device in instance.cluster.devices] == [1.0, 4.0]
    assert instance.needs == (MemoryNeed(5.0, 7.0),) * 2
    assert instance.epsilon == 0.25
    assert Plan("fifo", instance, make_planner("fifo").arrange(instance)).makespan == pytest.approx(8.0)


def test_trials_without_a_key_have_the_usual_speeds() -> None:
    profile = profile_of(net={SLOW: 2.0, FAST: 0.5})
    instance = Instance.from_json({"devices": UNLIKE, "trials": [{"runtime_s": 30.0}]}, profile)
    assert [device.speed for device in instance.cluster.devices] == [1.0, 4.0]
    assert Instance.from_json({"devices": UNLIKE, "trials": [{"runtime_s": 30.0}]}).cluster[1].speed == 1.0


@pytest.mark.parametrize(
    ("field", "trial", "fragment"),
    [
        ("trials[0].profile_key", {"profile_key": "other", "budget": 1}, "'net'"),
        ("trials[0].profile_key", {"profile_key": 3, "budget": 1}, "string"),
        ("trials[0].profile_key", {"budget": 3, "runtime_s": 1}, "missing"),
        ("trials[0].budget", {"profile_key": "net"}, "missing"),
        ("trials[0].budget", {"profile_key": "net", "budget": 0}, "at least 1"),
        ("trials[0].runtime_s", {"profile_key": "net", "budget": 1, "runtime_s": 4.0}, "measured"),
    ],
)
def test_a_bad_key_is_refused_by_field(field: str, trial: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InvalidFieldError, match=fragment) as refused:
        Instance.from_json({"devices": UNLIKE, "trials": [trial]}, profile_of(net={SLOW: 2.0}))
    assert refused.value.field == field


@pytest.mark.parametrize("seconds", [10**400, float("inf"), float("nan"), 2e12, -1.0])
def test_a_bad_runtime_beside_measured_keys_is_refused_by_field(seconds: float) -> None:
    trials = [{"runtime_s": seconds}, {"profile_key": "net", "budget": 3}]
    with pytest.raises(InvalidFieldError) as refused:
        Instance.from_json({"devices": UNLIKE, "trials": trials}, profile_of(net={SLOW: 2.0, FAST: 0.5}))
    assert refused.value.field == "trials[0].runtime_s"


def test_a_key_needs_a_profile() -> None:
    with pytest.raises(InvalidFieldError, match="--profile"):
        Instance.from_json({"devices": 1, "trials": [{"profile_key": "net", "budget": 1}]})


def test_fluid_plan_reads_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, data = tmp_path / "profile.json", tmp_path / "instance.json"
    profile_of(net={SLOW: 2.0, FAST: 0.5}).save(saved)
    trial = {"id": "a", "profile_key": "net", "budget": 10}
    data.write_text(json.dumps({"devices": UNLIKE, "trials": [trial]}))
    assert main(["plan", str(data), "--planner", "fifo", "--profile", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == pytest.approx(5.0)
    assert main(["plan", str(data)]) == 2
    assert "trials[0].profile_key='net': can be used with a profile only" in capsys.readouterr().err
    assert main(["plan", str(data), "--profile", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err


def test_models_that_a_key_did_not_see_are_left_out() -> None:
    """All devices of a model went before the key came."""
    assert speeds_of_all({"a": 1.0, "b": 1.0}, {"a": {"A": 1.0, "B": 2.0}, "b": {"A": 1.0}}) == {"A": 1.0}
