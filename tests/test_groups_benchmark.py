"""The benchmark of group policies: a session runs under all of them, and the workloads are what they are called."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import groups


@pytest.mark.slow
@pytest.mark.parametrize("pauses", [False, True])
def test_a_session_runs_under_all_policies(pauses: bool) -> None:
    case = groups.measure(("even", 0, 8, pauses))
    assert (groups.RANDOM in case) == (not pauses)
    for name in groups.RUNS.keys() & case.keys():
        assert case[name]["mean_h"] > 0.0 and 0.0 < case[name]["busy"] <= 1.0
        assert 0.0 <= case[name]["within_fair"] <= 1.0
    found = groups.summary([case])
    assert found["srsf_over_irs"] == pytest.approx(case["srsf"]["mean_h"] / case["irs"]["mean_h"], abs=1e-3)
    assert found["sessions"] == 1 and list(found["by_workload"]) == ["even"]


@pytest.mark.slow
def test_with_pauses_groups_want_the_same_and_end_sooner() -> None:
    session = groups.scenario("high", 0, 20)
    shorter = groups.with_pauses(session)
    for one, other in zip(session.workloads, shorter.workloads, strict=True):
        assert (one.trials, one.at, one.requires) == (other.trials, other.at, other.requires)
        assert other.max_iterations * shorter.runtimes.seconds_per_iteration == pytest.approx(
            one.max_iterations * session.runtimes.seconds_per_iteration
        )
    longer, paused = (replace(each, group_policy="srsf") for each in (session, shorter))
    assert groups.run(paused, pauses=True).mean_completion < groups.run(longer).mean_completion


def test_the_figures_of_one_way_leave_those_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "groups.json"
    groups.write(path, {"sessions": 1})
    groups.write(path, {"sessions": 2}, way="pauses")
    groups.write(path, {"sessions": 3})
    assert json.loads(path.read_text()) == {"sessions": 3, "pauses": {"sessions": 2}}


def test_a_group_alone_is_fair() -> None:
    session = groups.scenario("high", 3, 8)
    session = replace(session, workloads=session.workloads[:1])
    result = groups.run(session)
    assert groups.fair_ratios(session, result) == pytest.approx([1.0])


def test_workloads_differ_as_they_are_called() -> None:
    made = {name: groups.scenario(name, 0).workloads for name in groups.WORKLOADS}
    trials = {name: fmean(each.trials for each in workloads) for name, workloads in made.items()}
    work = {name: fmean(each.trials * each.max_iterations for each in workloads) for name, workloads in made.items()}
    assert trials["low"] < trials["even"] < trials["high"]
    assert work["small"] < work["even"] < work["large"]
    assert all(len(workloads) == groups.GROUPS for workloads in made.values())
