"""benchmarks/rehearsal.py on one task and few trials."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import rehearsal

    monkeypatch.setattr(rehearsal, "SAMPLES", 4)
    yield rehearsal
    sys.modules.pop("rehearsal", None)


def test_cells_are_played_once(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [benchmark.Cell("3945", "random", 4, way, 0) for way in ("portfolio", "fifo", "without turns")]
    known = {cell.name: benchmark.play(cell, str(DATA)) for cell in cells}
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(json.dumps(found) + "\n" for found in known.values()))
    assert benchmark.read_cells(path) == known
    rows = benchmark.compare(known, "fifo")
    assert [(row["algorithm"], row["devices"]) for row in rows] == [("random", "4"), ("random", "all"), ("all", "all")]
    assert all(row["makespan_s"] > 1.0 for row in rows)
    assert benchmark.compare(known, "without turns")[0]["sweeps"] == 1
    monkeypatch.setattr(benchmark, "cells_of", lambda tasks, full: cells)
    out = tmp_path / "means.json"
    png = tmp_path / "means.png"
    words = ["--data", str(DATA), "--cells", str(path), "--out", str(out), "--png", str(png), "--jobs", "1"]
    benchmark.main(words)
    content = json.loads(out.read_text())
    assert content["sweeps"] == 3 and content["rows"][0]["way"] == "fifo"
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_cells(benchmark: Any) -> None:
    tasks = [str(number) for number in range(34)]
    cells = benchmark.cells_of(tasks, full=False)
    assert len(cells) == len(set(cells)) == 34 * 3 * 3 * 2 * 2 + 6 * 3 * 3 * 2 * 2 + 6 * 3 * 3 * 3 * 2
    assert len(benchmark.cells_of(tasks, full=True)) > 10 * len(cells)
