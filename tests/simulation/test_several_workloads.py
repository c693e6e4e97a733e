"""Several workloads in one simulation: they arrive one after another, on devices that not all of them may use."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fluid import Cluster, Device, Requires
from fluid.errors import InvalidFieldError
from fluid.forecasting.scenario import ArrivingWorkload, DeviceChange, Runtimes, Scenario, Workload
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.reports.tables.comparison import policies_as_json, policy_tables
from fluid.simulation.simulate import simulate
from fluid.simulation.sized import Terms, simulate_fixed

BIG, SMALL = Device(0, kind="gpu", memory_bytes=8e9), Device(1, kind="gpu", memory_bytes=2e9)
SECOND = Runtimes("constant", 1.0)
NEEDS_BIG = Requires(memory_bytes=6e9)


def scenario(*workloads: ArrivingWorkload, **fields: Any) -> Scenario:
    return Scenario(
        **{"cluster": Cluster((BIG, SMALL)), "runtimes": SECOND, "c": 1, "d": 1, **fields}, workloads=workloads
    )


def completions(given: Scenario, planner: str = "portfolio") -> list[float]:
    result = simulate(given, make_planner(planner, c=1, d=1))
    return [workload.completion for workload in result.workloads]


@pytest.mark.parametrize("algorithm", ["random", "successive_halving", "hyperband", "syncbohb", "asha", "pbt"])
@pytest.mark.parametrize("planner", ["fifo", "portfolio"])
def test_one_of_several_workloads_alone_runs_as_a_single_one(algorithm: str, planner: str) -> None:
    shape = {"algorithm": algorithm, "trials": 9, "max_iterations": 9}
    fields: dict[str, Any] = {"cluster": Cluster.of(3), "early_stop": 0.2, "runtime_error": 0.3, "seed": 4}
    alone = simulate(Scenario(workload=Workload(**shape), **fields), make_planner(planner))
    listed = simulate(Scenario(workloads=(ArrivingWorkload(**shape),), **fields), make_planner(planner))
    assert listed.groups == alone.groups
    assert listed.lower_bound == alone.lower_bound
    assert listed.workloads[0].completion == alone.makespan


@pytest.mark.parametrize("policy", ["irs", "srsf", "fifo"])
def test_workloads_arrive_when_they_are_to_and_run_where_they_may(policy: str) -> None:
    first = ArrivingWorkload("random", trials=2, max_iterations=10)
    late = ArrivingWorkload("random", trials=3, max_iterations=5, at=12.5, requires=NEEDS_BIG)
    latest = ArrivingWorkload("random", trials=1, max_iterations=5, at=100.0)
    result = simulate(scenario(first, late, latest, group_policy=policy), make_planner("fifo"), record=True)
    assert [workload.completion for workload in result.workloads] == [10.0, 15.0, 5.0]
    assert [workload.arrived for workload in result.workloads] == [0.0, 12.5, 100.0]
    assert [group.submitted for group in result.groups] == [0.0, 12.5, 100.0]
    assert result.makespan == 105.0 and result.mean_completion == 10.0 and result.group_policy == policy
    late_rows = {row for row, name in enumerate(result.trial_ids) if name.startswith("2-")}
    assert {segment.devices for segment in result.segments if segment.row in late_rows} == {(0,)}
    assert result.lower_bound <= result.makespan


def test_the_policy_decides_which_workload_is_first() -> None:
    long = ArrivingWorkload("random", trials=8, max_iterations=10)
    short = ArrivingWorkload("random", trials=2, max_iterations=10, at=5.0)
    assert completions(scenario(long, short, group_policy="fifo")) == [40.0, 45.0]
    assert completions(scenario(long, short, group_policy="srsf")) == [50.0, 15.0]


def test_workloads_of_one_owner_are_one() -> None:
    long = ArrivingWorkload("random", trials=8, max_iterations=10, owner="ann")
    short = ArrivingWorkload("random", trials=2, max_iterations=10, at=5.0)
    result = simulate(scenario(long, replace(short, owner="ann"), group_policy="srsf"), make_planner("fifo"))
    assert [workload.completion for workload in result.workloads] == [40.0, 45.0]
    assert result.mean_completions == {"ann": 42.5}


def test_priority_is_above_the_policy() -> None:
    long = ArrivingWorkload("random", trials=8, max_iterations=10, priority=2.0)
    short = ArrivingWorkload("random", trials=2, max_iterations=10, at=5.0)
    assert completions(scenario(long, short, group_policy="srsf")) == [40.0, 45.0]


def test_workloads_have_trials_of_their_own() -> None:
    """Other workloads change neither the paces of a workload's trials nor which of them are promoted."""
    one = ArrivingWorkload("successive_halving", trials=9, max_iterations=9)
    other = ArrivingWorkload("asha", trials=5, max_iterations=9, at=1000.0, runtimes=Runtimes("lognormal", 2.0, 0.1))
    alone = scenario(one, runtimes=Runtimes(), cluster=Cluster.of(2))
    both = replace(alone, workloads=(one, other))
    assert completions(both)[0] == completions(alone)[0]


def test_a_waiting_workload_gets_the_device_that_comes() -> None:
    waits = ArrivingWorkload("random", trials=1, max_iterations=5, requires=Requires(memory_bytes=7e9, wait=True))
    change = DeviceChange(20.0, device=replace(BIG, index=2))
    given = scenario(waits, cluster=Cluster((SMALL,)), changes=(change,))
    assert completions(given) == [25.0]


def test_the_engine_is_told_policy_and_fairness() -> None:
    seen: set[tuple[str, float]] = set()

    def watch(state: EngineState, now: float) -> None:
        seen.add((state.shares.policy, state.shares._fairness))

    given = scenario(ArrivingWorkload("random", trials=2, max_iterations=3), group_policy="fifo", fairness=2.0)
    simulate(given, make_planner("fifo"), watch=watch)
    assert seen == {("fifo", 2.0)}


def test_several_workloads_are_not_sized() -> None:
    with pytest.raises(InvalidFieldError, match="must be one workload"):
        simulate_fixed(scenario(ArrivingWorkload()), make_planner("fifo"), 2, Terms(most=2))


JSON: dict[str, Any] = {"devices": [{"memory_bytes": 8e9}, {"memory_bytes": 2e9}], "c": 1, "d": 1}


def test_workloads_are_read_from_json() -> None:
    workloads = [
        {"trials": 3, "at": 2, "owner": "ann", "priority": 2, "preempt": True, "name": "a"},
        {"algorithm": "asha", "requires": {"memory_bytes": 6e9, "kind": "gpu", "tags": []}, "runtimes": {"sigma": 1}},
    ]
    got = Scenario.from_json({**JSON, "workloads": workloads, "group_policy": "srsf", "fairness": 1})
    assert got.workloads == (
        ArrivingWorkload(trials=3, at=2.0, owner="ann", priority=2.0, preempt=True, name="a"),
        ArrivingWorkload("asha", requires=Requires(memory_bytes=6e9, kind="gpu"), runtimes=Runtimes(sigma=1.0)),
    )
    assert (got.group_policy, got.fairness) == ("srsf", 1.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"workloads": [{"trials": 0}]}, "workloads[0].trials=0: must be at least 1"),
        ({"workloads": [{}, {"at": -1}]}, "workloads[1].at=-1.0: must be at least 0"),
        ({"workloads": [{"when": 1}]}, "workloads[0].when=1: is no field here"),
        ({"workloads": [{"requires": {"kind": "tpu"}}]}, "workloads[0].requires.kind='tpu'"),
        ({"workloads": [{"requires": {"memory_bytes": 9e9}}]}, "must be met by a device at all times"),
        ({"workloads": [{"requires": {"memory_bytes": 9e9, "wait": True}}]}, "must be met by a device in the end"),
        ({"workloads": [{"name": "a"}, {"name": "a"}]}, "workloads[1].name='a': is the name of an earlier one"),
        ({"workloads": [{}], "workload": {}}, "cannot be given beside workload"),
        ({"workloads": []}, "workload=None: is missing"),
        ({"workloads": [{}], "group_policy": "lifo"}, "group_policy='lifo': must be one of"),
        ({"workloads": [{}], "fairness": -1}, "fairness=-1.0: must be at least 0"),
        (
            {"workloads": [{"requires": {"memory_bytes": 6e9}}], "events": [{"at": 3, "remove_device": 0}]},
            "workloads[0].requires='memory of at least 5.588 GiB': must be met by a device at all times",
        ),
    ],
)
def test_errors_name_field_and_value(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError) as error:
        Scenario.from_json({**JSON, **data})
    assert message in str(error.value)


def test_workloads_have_deadlines_which_results_say_were_met(tmp_path: Path) -> None:
    read = {"devices": 4, "name": "due", "c": 1, "d": 1}
    runtimes = {"seconds_per_iteration": 50.0}
    tight = {"name": "tight", "trials": 16, "max_iterations": 2, "runtimes": runtimes, "deadline": "11m 40s"}
    loose = {
        "name": "loose",
        "trials": 20,
        "max_iterations": 4,
        "runtimes": runtimes,
        "deadline": [["15m", 1], [2e3, 2]],
    }
    plain = {"name": "plain", "trials": 1, "max_iterations": 1, "runtimes": runtimes, "weight": 0.001}
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({**read, "group_policy": "fifo", "workloads": [loose, tight, plain]}))
    found = simulate(Scenario.load(path), make_planner("portfolio"))
    first, second, third = found.workloads
    assert (first.met, second.met, third.met) == (False, True, None), "without its deadline, the second would be last"
    assert second.deadline == 700.0 and first.deadline == 900.0
    console = Console(file=io.StringIO(), width=120)
    console.print(policy_tables([found], "title"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "deadlines met" in shown and "1 of 2" in shown and " late" in shown
    (run,) = policies_as_json([found])["results"]
    assert [each.get("deadline_met") for each in run["workloads"]] == [False, True, None]
    without = simulate(scenario(ArrivingWorkload(trials=1), ArrivingWorkload(trials=1)), make_planner("portfolio"))
    assert "deadline_met" not in policies_as_json([without])["results"][0]["workloads"][0]


def test_a_deadline_of_a_workload_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="deadline='soon'"):
        ArrivingWorkload(deadline="soon")
    with pytest.raises(InvalidFieldError, match="weight=0"):
        ArrivingWorkload(weight=0)
