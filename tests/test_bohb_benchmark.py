"""benchmarks/bohb.py: its figures, and a task with few configs."""

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
    import bohb

    yield bohb
    for name in ("bohb", "rehearsal", "tpe_rungs"):
        sys.modules.pop(name, None)


def test_spreads_are_those_within_a_task(benchmark: Any) -> None:
    def seed(ours: float, theirs: float) -> dict[str, float]:
        return {"bohb": ours, "hpbandster-bohb": theirs, "hyperband": 0.5}

    row = benchmark.row_of([[seed(0.1, 0.2), seed(0.3, 0.2)], [seed(0.8, 0.9), seed(1.0, 0.9)]])
    assert row["bohb"] == {"mean": pytest.approx(0.55), "spread": pytest.approx(0.02**0.5)}
    assert row["hpbandster-bohb"]["spread"] == row["hyperband"]["spread"] == 0.0
    assert row["difference"]["mean"] == pytest.approx(0.0, abs=1e-12)
    assert row["difference"]["spread"] == pytest.approx(0.02**0.5)


def test_the_recorded_figures_are_within_the_spread(benchmark: Any) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "bohb.json").read_text())["runs"][0]["figures"]["regrets"]
    assert len(found) == 12
    apart = benchmark.row_of(list(found.values()))["difference"]
    assert abs(apart["mean"]) <= apart["spread"]


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench")
def test_a_task_is_played(benchmark: Any) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("hpbandster")
    found = benchmark.play("3945", str(DATA), devices=4, samples=4, seeds=2, jobs=1)
    assert len(found) == 2 and all(set(one) == set(benchmark.WAYS) for one in found)
    assert all(0.0 <= value <= 1.0 for one in found for value in one.values())
    assert benchmark.table_of({"3945": found}).row_count == 2
