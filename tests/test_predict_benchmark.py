"""The benchmark of predictions before a trial's first iteration: all of its parts run, with few seeds and trials."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import predict
import predict_offline


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "runs"))


@pytest.mark.slow
def test_cohorts_predict_the_measured_grid_and_one_key_does_not(tmp_path: Path) -> None:
    written, figure = tmp_path / "figures.json", tmp_path / "figure.png"
    predict.main(["--part", "offline", "--quick", "--json", str(written), "--figure", str(figure)])
    found = json.loads(written.read_text())["offline"]
    for net in ("mlp", "cnn"):
        by_cohorts, by_one_key = found[net]["figures"]["cohorts"], found[net]["figures"]["one key"]
        assert by_cohorts["seconds_error"] <= 0.2 and by_cohorts["too_small"] <= 0.03
        assert by_one_key["seconds_error"] > 0.5 and by_one_key["density"] < by_cohorts["density"]
        assert len(found[net]["cohorts"]) > 1
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_devices_are_filled_first_fit() -> None:
    assert predict_offline.pack([3.0, 2.0, 2.0, 1.0], 4.0) == [[0, 3], [1, 2]]


def test_makespans_of_bimodal_sweeps_are_near_those_of_known_runtimes() -> None:
    found = predict.main(["--part", "makespan", "--quick", "--settings", "narrow"])["makespan"]
    (one,) = (found[name]["narrow"] for name in found if name != "seeds")
    assert one["lower bound"]["mean_ratio"] <= one["known runtimes"]["mean_ratio"] == 1.0
    assert one["cohorts"]["mean_ratio"] <= 1.1 and one["one key"]["mean_ratio"] > one["cohorts"]["mean_ratio"]


def test_the_grid_measures_seconds_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import predict_grid
    import predict_workload

    monkeypatch.setattr(predict_workload, "BATCHES", (32, 256))
    monkeypatch.setattr(predict_workload, "WIDTHS", {"mlp": (32,), "cnn": (32,)})
    monkeypatch.setattr(predict_workload, "SAMPLES", {"mlp": 256, "cnn": 256})
    rows = predict_grid.measure_grid(["mlp", "cnn"], rounds=1, iterations=1, data=None)
    assert len(rows) == 8  # Two networks, two batch sizes and two optimizers.
    for row in rows:
        assert row["seconds"][0] > 0.0 and row["counted_bytes"] > 0
    size = {
        tuple(row["config"][name] for name in ("net", "batch_size", "optimizer")): row["counted_bytes"] for row in rows
    }
    for net in ("mlp", "cnn"):
        assert size[net, 256, "adam"] > size[net, 32, "adam"] > size[net, 32, "sgd"]


@pytest.mark.long
@pytest.mark.slow
def test_a_real_sweep_is_predicted_and_none_of_its_trials_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import predict_real

    monkeypatch.setattr(predict_real, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(predict_real, "SAMPLES", 64)
    monkeypatch.setattr(predict_real, "BUDGET", 3)
    found = predict.main(["--part", "real", "--quick"])["real"]
    for name in ("cohorts", "one key"):
        assert found[name]["failed"] == [] and found[name]["trials"] == 7
    assert found["cohorts"]["predicted"] > 0
