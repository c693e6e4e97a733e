"""Tests of fluid.planners.instance."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.measure.profile import MIN_OBSERVATIONS, Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH
from fluid.planners.instance import Instance, cluster_from_json, read_json_object
from fluid.planners.planner import Plan
from fluid.planners.portfolio import PLANNERS, make_planner
from fluid.resources import Cluster, Device, MemoryNeed
from fluid.trialgroup import Trial, TrialGroup

GIGABYTE = 1e9


def train(config: dict[str, Any]) -> None:
    """A trainable."""


def refused(field: str, *fragments: str) -> Any:
    """Expects an error about ``field`` whose message holds the fragments."""
    pattern = f"(?s)^{re.escape(field)}=" + "".join(f"(?=.*{fragment})" for fragment in fragments)
    return pytest.raises(InvalidFieldError, match=pattern)


def profile_of(**paces: float) -> Profile:
    """A profile that has measured these seconds per iteration."""
    profile = Profile()
    for key, seconds in paces.items():
        for _ in range(MIN_OBSERVATIONS):
            profile.observe(key, seconds)
    return profile


def memory_cluster(*gigabytes: float | None, watermark: float = 1.0) -> Cluster:
    """Devices of so much memory each."""
    devices = [Device(i, memory_bytes=None if g is None else g * GIGABYTE) for i, g in enumerate(gigabytes)]
    return Cluster(tuple(devices), watermark)


# --- build


def test_an_instance_holds_one_entry_per_trial() -> None:
    instance = Instance.build([4, 12.5, 30], 5, alpha=[1.0, 1.1, 1.2], beta=1.05, c=2, d=9, epsilon=0.5)
    assert (len(instance), instance.n, instance.epsilon) == (3, 5, 0.5)
    assert instance.heights.tolist() == [4.0, 12.5, 30.0]
    assert instance.model.alpha.tolist() == [1.0, 1.1, 1.2]
    assert instance.model.c.tolist() == [2, 2, 2]
    assert instance.model.d.tolist() == [5, 5, 5], "never more devices than there are"
    assert instance.priority.tolist() == [1.0, 1.0, 1.0]
    assert instance.needs == (None, None, None)
    assert len(set(instance.trial_ids)) == 3


def test_uncertain_runtimes_are_a_column_and_certain_ones_are_none() -> None:
    assert Instance.build([1.0, 2.0], 2).sigma is None
    instance = Instance.build([1.0, 2.0], 2, sigma=[0.0, 0.5])
    assert instance.sigma is not None and instance.sigma.tolist() == [0.0, 0.5]
    taken = instance.take([1, 1, 0], ["a", "b", "c"]).sigma
    assert taken is not None and taken.tolist() == [0.5, 0.5, 0.0]
    with pytest.raises(InvalidFieldError, match=r"sigma.*-0\.5"):
        Instance.build([1.0], 1, sigma=-0.5)
    with pytest.raises(InvalidFieldError, match="sigma"):
        Instance.build([1.0], 1, sigma=[0.1, 0.2])


def test_heights_are_copied() -> None:
    heights = np.array([1.0, 2.0])
    instance = Instance.build(heights, 1)
    heights[0] = 99.0
    assert instance.heights.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("height", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_bad_height_is_refused_and_named(height: float) -> None:
    with refused("runtime_s", "above 0") as caught:
        Instance.build([1.0, height, 2.0], 2)
    assert caught.value.value == height or math.isnan(height)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("trials", {"heights": []}),
        ("trials", {"heights": [[1.0], [2.0]]}),
        ("runtime_s", {"heights": ["fast", "slow"]}),
        ("runtime_s", {"heights": None}),
        ("runtime_s", {"heights": [1.0, [2.0]]}),
        ("devices", {"cluster": 0}),
        ("devices", {"cluster": -2}),
        ("devices", {"cluster": True}),
        ("alpha", {"alpha": 0.5}),
        ("alpha", {"alpha": [1.0, 1.0, 1.0]}),
        ("beta", {"beta": math.nan}),
        ("c", {"c": 0}),
        ("d", {"d": [1, 0]}),
        ("epsilon", {"epsilon": -1.0}),
        ("epsilon", {"epsilon": math.nan}),
        ("priority", {"priority": math.nan}),
        ("priority", {"priority": [1.0, math.inf]}),
        ("priority", {"priority": [1.0, 2.0, 3.0]}),
        ("priority", {"priority": []}),
        ("priority", {"priority": "high"}),
        ("id", {"trial_ids": ["a", "a"]}),
        ("trial_ids", {"trial_ids": ["a"]}),
        ("trial_ids", {"trial_ids": ["a", "b", "c"]}),
        ("needs", {"needs": [None]}),
    ],
)
def test_a_bad_argument_is_refused_by_name(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Instance.build(**{"heights": [1.0, 2.0], "cluster": 4, **arguments})
    assert caught.value.field == field


# --- memory


def test_a_trial_that_fits_nowhere_is_refused_with_its_need_and_the_room() -> None:
    with refused("memory", "'big'", "7000000000 bytes", "3600000000 usable"):
        Instance.build(
            [1.0, 1.0],
            memory_cluster(1, 4, watermark=0.9),
            trial_ids=["small", "big"],
            needs=[MemoryNeed(GIGABYTE), MemoryNeed(5 * GIGABYTE, 2 * GIGABYTE)],
        )


def test_memory_that_is_not_known_bounds_nothing() -> None:
    needs = [MemoryNeed(1e15), None]
    assert Instance.build([1.0, 1.0], memory_cluster(1, None), needs=needs).needs == tuple(needs)
    assert Instance.build([1.0, 1.0], memory_cluster(1), needs=[None, MemoryNeed()]).n == 1


def test_a_need_may_fill_a_device_to_the_last_usable_byte() -> None:
    cluster = memory_cluster(4, watermark=0.5)
    assert len(Instance.build([1.0], cluster, needs=[MemoryNeed(GIGABYTE, GIGABYTE)])) == 1
    with refused("memory"):
        Instance.build([1.0], cluster, needs=[MemoryNeed(GIGABYTE, GIGABYTE * 1.001)])


def test_no_trial_may_span_more_devices_than_it_fits_on() -> None:
    needs = [MemoryNeed(10 * GIGABYTE), MemoryNeed(2 * GIGABYTE), None]
    instance = Instance.build([9.0, 9.0, 9.0], memory_cluster(16, 16, 4, 4, 1), d=[8, 8, 3], needs=needs)
    assert instance.model.d.tolist() == [2, 4, 3]


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_trial_of_a_plan_ends_where_memory_differs(name: str) -> None:
    # One device of four holds the trial: a plan for four would wait for ever, with a makespan of 0.
    instance = Instance.build([8.0], memory_cluster(16, 4, 4, 4), needs=[MemoryNeed(10 * GIGABYTE)])
    plan = Plan(name, instance, make_planner(name).arrange(instance))
    assert plan.makespan == pytest.approx(8.0)
    assert plan.placements["trial-00000"].device_ids == (0,)


@given(
    gigabytes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=6),
    trials=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([None, 0.5, 1, 2, 4])), min_size=1, max_size=8),
    name=st.sampled_from(sorted(PLANNERS)),
)
def test_plans_end_every_trial_whatever_the_memory(
    gigabytes: list[int], trials: list[tuple[int, float | None]], name: str
) -> None:
    room = max(gigabytes)
    needs = [None if g is None else MemoryNeed(min(g, room) * GIGABYTE * 0.75, 1.0) for _, g in trials]
    instance = Instance.build([float(h) for h, _ in trials], memory_cluster(*gigabytes), needs=needs)
    schedule = Plan(name, instance, make_planner(name).arrange(instance)).schedule
    assert set(schedule.finished) == set(range(len(instance)))
    assert not schedule.queued
    assert not schedule.running


# --- from_group


def test_the_height_of_a_trial_is_its_budget_times_its_pace() -> None:
    group = TrialGroup(
        [
            Trial(train, budget=27, trial_id="a", profile_key="fast"),
            Trial(train, budget=3, trial_id="b", profile_key="slow"),
        ]
    )
    instance = Instance.from_group(group, Cluster.of(4), profile_of(fast=0.5, slow=8.0))
    assert instance.trial_ids == ("a", "b")
    assert instance.heights.tolist() == pytest.approx([13.5, 24.0])


def test_a_key_nobody_has_measured_counts_with_the_median_pace() -> None:
    group = TrialGroup([Trial(train, budget=2, profile_key=key) for key in ("a", "b", "c", "new")])
    instance = Instance.from_group(group, Cluster.of(4), profile_of(a=1.0, b=3.0, c=100.0))
    assert instance.heights.tolist() == pytest.approx([2.0, 6.0, 200.0, 6.0])


def test_keys_outside_the_group_do_not_move_the_median() -> None:
    group = TrialGroup([Trial(train, profile_key="a"), Trial(train, profile_key="new")])
    instance = Instance.from_group(group, Cluster.of(4), profile_of(a=2.0, elsewhere=100.0, another=90.0))
    assert instance.heights.tolist() == pytest.approx([2.0, 2.0])


def test_without_a_profile_an_iteration_takes_a_second() -> None:
    group = TrialGroup([Trial(train, budget=27), Trial(train, budget=9)])
    for profile in (None, Profile()):
        instance = Instance.from_group(group, Cluster.of(4), profile)
        assert instance.heights.tolist() == [27.0, 9.0]
        assert instance.model.alpha.tolist() == instance.model.beta.tolist() == [1.0, 1.0]
        assert instance.model.c.tolist() == [DEFAULT_MAX_PACKING] * 2
        assert instance.model.d.tolist() == [4, 4]
        assert instance.epsilon == 0.0


def test_limits_are_the_callers_and_each_trials_own() -> None:
    group = TrialGroup([Trial(train, max_width=w) for w in (None, 1, 3, 99)])
    instance = Instance.from_group(group, Cluster.of(16), c=3, d=6)
    assert instance.model.c.tolist() == [3, 3, 3, 3]
    assert instance.model.d.tolist() == [6, 1, 3, 6]


def test_stopped_trials_are_left_out() -> None:
    group = TrialGroup([Trial(train, trial_id=name, budget=5) for name in "abc"])
    group.stop("b")
    group.extend("c", 2)
    instance = Instance.from_group(group, Cluster.of(2))
    assert instance.trial_ids == ("a", "c")
    assert instance.heights.tolist() == [5.0, 7.0]


@pytest.mark.parametrize("stop", [False, True])
def test_a_group_without_an_active_trial_is_refused(stop: bool) -> None:
    group = TrialGroup([Trial(train, trial_id="a")] if stop else [], name="rung-3")
    if stop:
        group.stop("a")
    with refused("group", "rung-3", "no active trial"):
        Instance.from_group(group, Cluster.of(2))


def test_priority_memory_and_measured_overheads_come_along() -> None:
    profile = Profile()
    for seconds, where in ((1.0, {}), (1.2, {"co_residents": 2}), (0.6, {"width": 2})):
        for _ in range(MIN_OBSERVATIONS):
            profile.observe("net", seconds, **where)
    profile.observe_resize(0.25)
    group = TrialGroup(
        [
            Trial(train, profile_key="net", priority=3.0, memory=MemoryNeed(5.0, 1.0)),
            Trial(train, profile_key="net"),
        ]
    )
    instance = Instance.from_group(group, Cluster.of(8), profile)
    assert instance.priority.tolist() == [3.0, 1.0]
    assert instance.needs == (MemoryNeed(5.0, 1.0), profile.memory("net"))
    assert instance.epsilon == profile.epsilon > 0.0
    assert instance.model.alpha.tolist() == [profile.alpha("net")] * 2
    assert instance.model.beta.tolist() == [profile.beta("net")] * 2
    assert instance.model.c.tolist() == [profile.packing_limit("net", DEFAULT_MAX_PACKING)] * 2


def test_measured_memory_counts_where_the_trial_names_none() -> None:
    profile = profile_of(net=1.0)
    profile.observe("net", 1.0, memory=MemoryNeed(5 * GIGABYTE, GIGABYTE))
    group = TrialGroup([Trial(train, trial_id="a", profile_key="net")])
    with refused("memory", "'a'", "6000000000 bytes"):
        Instance.from_group(group, memory_cluster(4), profile)
    known = TrialGroup([Trial(train, profile_key="net", memory=MemoryNeed(GIGABYTE))])
    assert Instance.from_group(known, memory_cluster(4), profile).needs == (MemoryNeed(GIGABYTE),)


# --- from_json

FULL: dict[str, Any] = {
    "devices": 5,
    "c": 2,
    "d": 5,
    "alpha": 1.1,
    "beta": 1.05,
    "epsilon": 0.5,
    "trials": [
        {"id": "a", "runtime_s": 4.0},
        {
            "id": "b",
            "runtime_s": 30,
            "alpha": 1.2,
            "beta": 1.0,
            "c": 3,
            "d": 4,
            "priority": 2.0,
            "max_width": 2,
            "persistent_bytes": 5,
            "ephemeral_bytes": 7,
        },
        {"runtime_s": 1, "max_width": 64},
    ],
}


def test_every_field_of_an_instance_is_read() -> None:
    instance = Instance.from_json(FULL)
    assert instance.trial_ids == ("a", "b", "trial-00002")
    assert instance.heights.tolist() == [4.0, 30.0, 1.0]
    assert instance.model.alpha.tolist() == [1.1, 1.2, 1.1]
    assert instance.model.beta.tolist() == [1.05, 1.0, 1.05]
    assert instance.model.c.tolist() == [2, 3, 2]
    assert instance.model.d.tolist() == [5, 2, 5]
    assert instance.priority.tolist() == [1.0, 2.0, 1.0]
    assert instance.needs == (None, MemoryNeed(5, 7), None)
    assert (instance.n, instance.epsilon) == (5, 0.5)


def test_only_devices_and_trials_are_needed() -> None:
    instance = Instance.from_json({"devices": 16, "trials": [{"runtime_s": 4.0}]})
    assert instance.cluster == Cluster.of(16)
    assert instance.model.c.tolist() == [DEFAULT_MAX_PACKING]
    assert instance.model.d.tolist() == [DEFAULT_MAX_WIDTH]
    assert instance.model.alpha.tolist() == instance.model.beta.tolist() == [1.0]
    assert instance.epsilon == 0.0


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in FULL.items() if name != field}


def with_trial(**fields: Any) -> dict[str, Any]:
    return {**FULL, "trials": [{"id": "a", "runtime_s": 1.0}, {"id": "b", "runtime_s": 2.0, **fields}]}


@pytest.mark.parametrize(
    ("field", "data", "fragments"),
    [
        ("devices", without("devices"), ("missing",)),
        ("trials", without("trials"), ("missing",)),
        ("gpus", {**FULL, "gpus": 4}, ("4", "no field", "devices")),
        ("trials[0].runtime_s", {**FULL, "trials": [{"id": "a"}]}, ("missing",)),
        ("trials[1].runtime", with_trial(runtime=3), ("3", "no field", "runtime_s")),
        *(("trials", {**FULL, "trials": wrong}, ()) for wrong in ([], "ab", None, 3, {})),
        *(("trials[0]", {**FULL, "trials": wrong}, ()) for wrong in ([1], [None], ["a"])),
        ("runtime_s", with_trial(runtime_s=0), ()),
        *(
            ("trials[1].runtime_s", with_trial(runtime_s=wrong), ())
            for wrong in (-1, math.nan, math.inf, "4", None, True)
        ),
        *(("trials[1].alpha", with_trial(alpha=wrong), ()) for wrong in (0.9, math.nan, math.inf, "1", None, [1.1])),
        *(("beta", {**FULL, "beta": wrong}, ()) for wrong in (0.9, math.nan, "1", None, [1.1, 1.2])),
        *(("c", {**FULL, "c": wrong}, ()) for wrong in (0, 1.5, True, "2", None)),
        *(("trials[1].d", with_trial(d=wrong), ()) for wrong in (0, -3, 1.5, True, "2", None)),
        *(("trials[1].max_width", with_trial(max_width=wrong), ()) for wrong in (0, 1.5, True, "2", None)),
        *(("trials[1].priority", with_trial(priority=wrong), ()) for wrong in (-1, math.nan, "high", None)),
        *(
            ("trials[1].persistent_bytes", with_trial(persistent_bytes=wrong), ())
            for wrong in (-1, math.nan, "1GB", None)
        ),
        *(("trials[1].ephemeral_bytes", with_trial(ephemeral_bytes=wrong), ()) for wrong in (-1, True)),
        *(("epsilon", {**FULL, "epsilon": wrong}, ()) for wrong in (-0.1, math.nan, "0", None)),
        *(("devices", {**FULL, "devices": wrong}, ()) for wrong in (0, -1, 2.5, math.nan, True, "4", None, {}, [])),
        ("id", with_trial(id="a"), ("two trials",)),
        ("id", {**FULL, "trials": [{"id": 1, "runtime_s": 1}, {"id": "1", "runtime_s": 1}]}, ("two trials",)),
    ],
)
def test_a_bad_instance_is_refused_by_field(field: str, data: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with refused(field, *fragments):
        Instance.from_json(data)


# --- devices


def test_devices_are_a_count_or_a_list() -> None:
    assert cluster_from_json(3) == cluster_from_json(3.0) == Cluster.of(3)
    assert cluster_from_json([{}, {}, {}]) == Cluster.of(3)
    cluster = cluster_from_json(
        [{"index": 7, "host": "b", "kind": "cpu", "speed": 2.0, "memory_bytes": 1e9}, {"index": 0}, {"host": "c"}]
    )
    assert cluster[7] == Device(7, "b", "cpu", 2.0, 1e9)
    assert cluster[0] == Device(0, kind="gpu")
    assert cluster[2] == Device(2, "c", "gpu"), "a device without an index has that of its place in the list"


@pytest.mark.parametrize(
    ("field", "devices"),
    [
        ("devices[0]", [0, 1]),
        ("devices[0]", [None]),
        ("devices[0]", ["gpu0"]),
        ("devices", [{"index": 1}, {}]),
        ("devices[0].memory", [{"memory": 5}]),
        ("devices[0].index", [{"index": -1}]),
        ("devices[0].index", [{"index": True}]),
        ("devices[0].kind", [{"kind": "tpu"}]),
        ("devices[0].speed", [{"speed": 0}]),
        ("devices[0].speed", [{"speed": "fast"}]),
        ("devices[0].memory_bytes", [{"memory_bytes": -1}]),
        ("devices[0].memory_bytes", [{"memory_bytes": math.nan}]),
    ],
)
def test_bad_devices_are_refused_by_field(field: str, devices: list[Any]) -> None:
    with refused(field):
        cluster_from_json(devices)


# --- load


def test_an_instance_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(FULL), encoding="utf-8")
    for given_as in (path, str(path)):
        instance = Instance.load(given_as)
        assert instance.trial_ids == ("a", "b", "trial-00002")
        assert instance.heights.tolist() == [4.0, 30.0, 1.0]


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "is not JSON"),
        (b'{"devices": 5,\n "trials": [}', "line 2"),
        (b"[1, 2]", "one JSON object"),
        (b"5", "one JSON object"),
        (b"null", "one JSON object"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
    ],
    ids=["empty", "broken", "list", "number", "null", "not text", "deep list", "deep object"],
)
def test_a_file_without_an_object_is_refused_and_named(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with refused("path", r"broken\.json", fragment):
        Instance.load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with refused("path", r"absent\.json", "cannot be read"):
        Instance.load(tmp_path / "absent.json")
    with refused("path", "cannot be read"):
        read_json_object(tmp_path)
