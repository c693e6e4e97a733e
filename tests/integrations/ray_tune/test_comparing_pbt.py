"""PBT by Ray Tune on a benchmark, as ``fluid rehearse --algorithms raytune-pbt`` plays it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluid.integrations.comparing.algorithms import BenchmarkSweep
from fluid.rehearsal.sources import source_by_name
from tests.rehearsal import recorded_sweeps

pytest.importorskip("onnxruntime")
NAME = "raytune-pbt"
DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench"),
]


@pytest.mark.slow
def test_pbt_on_an_own_run(cluster: str, tmp_path: Path) -> None:
    recorded_sweeps.sweep(tmp_path / "run", samples=12, algorithm="random")  # Its configs have a constant.
    benchmark = source_by_name(f"run:{tmp_path / 'run'}")
    found = BenchmarkSweep(benchmark=benchmark, algorithm=NAME, devices=8, budget=9).play(tmp_path / "own")
    assert found.best is not None and {trial.iterations for trial in found.played} == {9}
    assert {trial.config["fixed"] for trial in found.played} == {3}


@pytest.mark.slow
def test_pbt(cluster: str, tmp_path: Path) -> None:
    benchmark = source_by_name("lcbench:3945", DATA)
    found, again, other = (
        BenchmarkSweep(benchmark=benchmark, algorithm=NAME, devices=8, budget=10, seed=seed).play(tmp_path / name)
        for name, seed in (("run", 0), ("again", 0), ("other", 1))
    )
    assert found.trials >= 16 and found.best is not None
    assert {trial.iterations for trial in found.played} == {10}
    assert (again.trace, again.makespan_s) == (found.trace, found.makespan_s)
    assert other.trace != found.trace
