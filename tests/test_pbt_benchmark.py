"""benchmarks/pbt.py: its figures, its network, and a rehearsal of one task."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pbt

    yield pbt
    for name in ("pbt", "pbt_workload"):
        sys.modules.pop(name, None)


def test_ratios_are_of_runs_of_the_same_seed(benchmark: Any) -> None:
    def run(seed: int, seconds: float, iterations: int = 100) -> dict[str, float]:
        return {"seed": seed, "seconds": seconds, "iterations": iterations, "exploits": 2, "best": float(seed)}

    runs = {"fluid": [run(0, 4.0), run(1, 6.0)], "ray": [run(1, 12.0, 50)], "ray_reuse_actors": []}
    found = benchmark.summary(runs)
    assert set(found) == {"fluid", "ray"}
    assert (found["fluid"]["ratio"], found["ray"]["ratio"], found["ray"]["ratio_per_iteration"]) == (1.0, 2.0, 4.0)
    assert found["fluid"]["best"] == 0.5 and found["ray"]["spread"] == 0.0
    assert benchmark.table_of(found).row_count == 2


def test_the_network_learns_and_goes_on_from_a_checkpoint(benchmark: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    data = tmp_path / "digits.npz"
    benchmark.write_digits(data)
    config = {"data": str(data), "seed": 1, "rate": 0.1, "momentum": 0.5}
    first, again = benchmark.Member(), benchmark.Member()
    first.setup(config)
    losses = [first.step()["loss"] for _ in range(3)]
    first.save_checkpoint(str(tmp_path))
    again.setup({**config, "seed": 2})
    again.load_checkpoint(str(tmp_path))
    assert losses[2] < losses[0] and again.step() == first.step()


def test_the_recorded_figures_are_those_that_the_docs_tell(benchmark: Any) -> None:
    for run in json.loads((ROOT / "benchmarks" / "results" / "pbt.json").read_text())["runs"]:
        found = run["figures"]
        told, again = found["summary"], benchmark.summary(found["runs"])
        assert set(told) == set(again) == {"fluid", "fluid_no_exploits", "ray_reuse_actors"}
        assert all(again[way] == pytest.approx(told[way]) for way in told)
        assert told["ray_reuse_actors"]["ratio"] > 1.5 and told["fluid_no_exploits"]["ratio"] > 0.7


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench")
def test_a_task_is_rehearsed(benchmark: Any) -> None:
    pytest.importorskip("onnxruntime")
    found = benchmark.rehearse(str(DATA), ["3945"], seeds=1)
    assert benchmark.regret_table(found).row_count == 2
    assert all(0.0 <= value <= 1.0 for of_way in found["3945"].values() for value in of_way)
