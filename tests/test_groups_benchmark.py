"""The benchmark of group policies: a session runs under all of them, and the workloads are what they are called."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import groups


def test_a_session_runs_under_all_policies() -> None:
    case = groups.measure(("even", 0, 8))
    for name in groups.RUNS:
        assert case[name]["mean_h"] > 0.0 and 0.0 < case[name]["busy"] <= 1.0
        assert 0.0 <= case[name]["within_fair"] <= 1.0
    found = groups.summary([case])
    assert found["srsf_over_irs"] == pytest.approx(case["srsf"]["mean_h"] / case["irs"]["mean_h"], abs=1e-3)
    assert found["sessions"] == 1 and list(found["by_workload"]) == ["even"]


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
