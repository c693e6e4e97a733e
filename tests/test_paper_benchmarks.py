"""The benchmarks of the paper's figures: what they compare, and that they run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import paper_gains
import paper_shapes

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


def run(seed: int, first: float, end: float, curve: list[tuple[float, float]]) -> dict[str, Any]:
    return {"seed": seed, "first": first, "makespan": end, "curve": curve, "busy": 0.5}


def test_a_gain_is_divided_into_scheduling_and_start_up() -> None:
    ours = [run(0, 2.0, 12.0, [(4.0, 0.5), (7.0, 0.8)]), run(1, 2.0, 22.0, [(12.0, 0.9)])]
    first_come = [run(0, 2.0, 17.0, [(12.0, 0.8)]), run(1, 2.0, 32.0, [(22.0, 0.9)])]
    # The third is of a seed that no other system was measured with.
    tune = [run(0, 10.0, 48.0, [(40.0, 0.6)]), run(7, 0.0, 1.0, [(1.0, 0.9)])]
    runs = {"fluid": ours, "fluid_fifo": first_come, "ray_default": tune}
    gain = paper_gains.gain_of("hyperband", runs, target=0.7)
    assert (gain.scheduling, gain.seeds, gain.total) == (pytest.approx(1.5), 2, pytest.approx(4.0))
    assert gain.start_up == pytest.approx(4.0 / 1.5)
    # With seed 0 Ray Tune's 0.6 is the best that all reach: after 5 s and 10 s. With seed 1 0.7: after 10 s and 20 s.
    assert gain.to_target == pytest.approx(2.0)
    assert gain.is_as_large and gain.unpacked is gain.reused is None
    assert gain.busy == (0.5, 0.5)
    assert not paper_gains.gain_of("syncbohb", runs, target=0.7).is_as_large
    assert paper_gains.gain_of("pbt", {"fluid": ours}, target=0.7).is_as_large is None


def test_trials_of_known_work_count_those_that_share_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ray")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import paper_lanes_workload as known

    monkeypatch.setenv("FLUID_DEVICES", "[3]")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / str(os.getppid())).touch()
    (tmp_path / "3" / "999999999").touch()  # Of a process that was killed.
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "1").touch()
    with known.on_device(tmp_path) as others:
        assert others() == 1
        assert (tmp_path / "3" / str(os.getpid())).exists()
    assert not (tmp_path / "3" / str(os.getpid())).exists()
    monkeypatch.delenv("FLUID_DEVICES")
    with known.on_device(tmp_path) as others:
        assert others() == 0
    config = {"seed": 0, "seconds": 0.5, "lr": 0.01, "fixed": known.FIXED_OF["sleep"]}
    assert known.seconds_of(config, 3) == known.seconds_of(config, 3) != known.seconds_of(config, 4)
    assert known.seconds_of(config, 3) == pytest.approx(0.3, rel=0.3)


def test_what_is_as_large_as_in_the_paper() -> None:
    file = json.loads((ROOT / "benchmarks" / "results" / "paper_shapes.json").read_text())
    tables = file["runs"][0]["figures"]["tables"]
    rows = {what: holds for what, _, _, holds in paper_shapes.compared(tables)}
    assert [[*row] for row in paper_shapes.compared(tables)] == tables["compared"][1:]
    assert set(rows.values()) == {"yes"}
    packing = tables["figure 3.13"][0]
    packing[1], packing[2] = packing[2], packing[1]
    changed = {what: holds for what, _, _, holds in paper_shapes.compared(tables)}
    assert [what for what in rows if changed[what] == "no"] == ["Fig. 3.13a: packing overhead, least to 10"]


@pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench")
def test_concurrency_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    import paper_concurrency

    out, png = tmp_path / "figures.json", tmp_path / "figures.png"
    words = ["--data", str(DATA), "--seeds", "1", "--tasks", "3945", "--samples", "4"]
    paper_concurrency.main([*words, "--json", str(out), "--png", str(png)])
    rows = json.loads(out.read_text())["tables"]
    assert [row["way"] for row in rows["figure 3.10"]] == [way.name for way in paper_concurrency.FIGURE_3_10]
    assert all(row["makespan_s"] > 0.0 for row in (*rows["figure 3.3"], *rows["figure 3.10"]))
    assert "1 sweeps of each" in capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_rows_are_of_the_sweeps_that_all_ways_finish() -> None:
    pytest.importorskip("torch")
    import paper_concurrency

    ways = paper_concurrency.FIGURE_3_3[:2]

    def found(seconds: float | None, makespan: float) -> dict[str, Any]:
        return {"to": {"0.05": seconds, "0.02": None}, "makespan_s": makespan, "busy": 1.0}

    played = {
        ("a", 0): {ways[0].name: found(8.0, 100.0), ways[1].name: found(4.0, 50.0)},
        ("a", 1): {ways[0].name: found(2.0, 100.0), ways[1].name: found(None, 50.0)},
    }
    four, eight = paper_concurrency.rows_of(played, ways)
    assert (four["to_0.05_s"], four["to_0.05_device_s"], four["pairs_0.05"]) == (*map(pytest.approx, (8.0, 32.0)), 1)
    assert (eight["to_0.05_s"], eight["to_0.05_device_s"]) == tuple(map(pytest.approx, (4.0, 32.0)))
    assert eight["to_0.02_s"] is None
    assert (four["makespan_s"], eight["sweeps"]) == (pytest.approx(100.0), 2)


@pytest.mark.slow
@pytest.mark.ray
def test_a_sweep_of_known_work_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ray")
    import paper

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "figures.json"
    words = ["--workloads", "sleep", "--algos", "sha", "--systems", "fluid", "--scale", "tiny", "--devices", "4"]
    monkeypatch.setattr(sys, "argv", ["paper.py", *words, "--json", str(file), "--seed", "5"])
    paper.main()
    (measured,) = json.loads(file.read_text())["cells"]["sleep"]["sha"]["fluid"]
    assert (measured["seed"], measured["trials"]) == (5, 9)
    assert 0.0 < measured["first"] < measured["makespan"] <= measured["seconds"]
    assert 0.0 < measured["busy"] <= 1.0
    assert (tmp_path / "paper_sleep.png").read_bytes().startswith(b"\x89PNG")
