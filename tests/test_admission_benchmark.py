"""The benchmark of admission where memory is scarce: all of its parts run, with few cases and draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import admission

from fluid.policies.admission import Candidate, DeviceRoom


@pytest.mark.slow
def test_all_parts_run_and_fluid_ends_no_group_later(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    admission.main(["--quick", "--json", str(written)])
    found = json.loads(written.read_text())
    ratios = found["choice"]["ratios"]
    assert ratios["fluid"]["worst"] >= 0.75 and ratios["fluid"]["mean"] >= ratios["greedy"]["mean"]
    assert ratios["queue order"]["mean"] < 0.6
    (sweep,) = found["sweeps"].values()
    assert sweep["queue order"]["makespan"] == sweep["queue order"]["mean_end"] == 1.0
    assert sweep["fluid"]["makespan"] <= 1.02 and sweep["fluid"]["mean_end"] <= 1.0
    assert sweep["gain per byte alone"]["makespan"] > 1.1 and sweep["gain per byte alone"]["mean_end"] < 0.8
    assert all(seconds > 0.0 for ways in found["cost"].values() for seconds in ways.values())


def test_the_best_choice_is_found() -> None:
    candidates = [Candidate(0, 6.0, 40.0), Candidate(1, 5.0, 36.0), Candidate(2, 5.0, 36.0), Candidate(3, 1.0, 32.0)]
    assert admission.best_gain(candidates, [DeviceRoom(0, 72.0, 8)]) == 10.0
    assert admission.best_gain(candidates, [DeviceRoom(0, 72.0, 1)]) == 6.0
    assert admission.best_gain(candidates, [DeviceRoom(0, 72.0, 8), DeviceRoom(1, 72.0, 8)]) == 17.0
    # With one slot the one of most gain is best, though two others gain more per byte.
    candidates = [Candidate(0, 8.0, 6.0), Candidate(1, 7.0, 1.0), Candidate(2, 4.0, 1.0)]
    assert admission.best_gain(candidates, [DeviceRoom(0, 9.0, 1)]) == 8.0
    assert admission.best_gain(candidates, [DeviceRoom(0, 6.0, 2), DeviceRoom(1, 0.0, 3)]) == 11.0


def test_a_sweep_runs_all_of_its_groups() -> None:
    groups = [(0.0, [(30.0, 10.0), (20.0, 5.0)]), (100.0, [(40.0, 10.0)])]
    sweep = admission.MixedSweep([80.0], groups, c=4, alpha=1.0)
    found = sweep.run()
    assert set(sweep.ends) == {0, 1, 2} and found["makespan"] == 110.0
