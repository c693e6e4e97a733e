"""benchmarks/rehearsal.py on one task and few trials."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fluid.errors import InvalidFieldError

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
    assert benchmark.compare(known, "without turns")[0]["pairs"] == 1
    monkeypatch.setattr(benchmark, "cells_of", lambda tasks, full: cells)
    out = tmp_path / "means.json"
    png = tmp_path / "means.png"
    words = ["--data", str(DATA), "--cells", str(path), "--out", str(out), "--png", str(png), "--jobs", "1"]
    benchmark.main(words)
    content = json.loads(out.read_text())
    assert content["sweeps"] == 3 and content["rows"][0]["way"] == "fifo"
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_cell_is_played(benchmark: Any, tmp_path: Path) -> None:
    cells = [benchmark.Cell("3945", "random", 4, "portfolio", seed) for seed in range(5)]
    played = benchmark.play_all(cells, str(DATA), tmp_path / "cells.jsonl", jobs=1, minutes=9.0)
    assert set(played.known) == {cell.name for cell in cells} and not played.failed


def test_the_cells(benchmark: Any) -> None:
    tasks = [str(number) for number in range(34)]
    cells = benchmark.cells_of(tasks, full=False)
    assert len(cells) == len(set(cells)) == 34 * 3 * 3 * 2 * 2 + 6 * 3 * 3 * 2 * 2 + 6 * 3 * 3 * 3 * 2
    assert len(benchmark.cells_of(tasks, full=True)) > 10 * len(cells)


def test_times_are_compared_where_both_sweeps_reach_the_target(benchmark: Any) -> None:
    def cell(name: str, to_5: float | None, to_1: float | None = None, makespan: float = 100.0) -> dict[str, Any]:
        return {"cell": name, "to_0.05": to_5, "to_0.01": to_1, "makespan_s": makespan, "device_hours": 1.0}

    cells = [
        cell("1|asha|4|portfolio|0", 10.0, 50.0),
        cell("1|asha|4|fifo|0", 40.0, None, makespan=200.0),
        cell("1|asha|4|portfolio|1", 20.0),
        cell("1|asha|4|fifo|1", None, makespan=200.0),
        cell("1|tpe|4|portfolio|0", 10.0),
        cell("1|tpe|4|fifo|0", 90.0),
        cell("1|tpe|4|fifo|1", 90.0),  # Without its like.
    ]
    rows = {(row["algorithm"], row["devices"]): row for row in benchmark.compare({c["cell"]: c for c in cells}, "fifo")}
    asha = rows["asha", "4"]
    assert (asha["pairs"], asha["to_0.05"], asha["to_0.05_pairs"], asha["makespan_s"]) == (2, 4.0, 1, 2.0)
    assert (asha["reached_0.05"], asha["reached_portfolio_0.05"]) == (0.5, 1.0)
    assert (asha["to_0.01"], asha["reached_0.01"], asha["reached_portfolio_0.01"]) == (None, 0.0, 0.5)
    assert not asha["other_configs"] and rows["tpe", "4"]["other_configs"] and rows["all", "all"]["other_configs"]
    assert rows["all", "all"]["to_0.05"] == pytest.approx(6.0)
    console = Console(width=140, file=io.StringIO())
    console.print(benchmark.table_of(list(rows.values())))
    text = console.file.getvalue()
    assert "tpe *" in text and "asha *" not in text and "50, 100 %" in text
    assert "makespans and device-hours compare sweeps of other configs" in " ".join(text.split())


def test_a_line_that_was_torn_is_played_again(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"cell": "a", "to_0.05": 1.0}\n{"cell": "b", "to')
    assert set(benchmark.read_cells(path)) == {"a"}


def test_a_sweep_that_fails_is_told_with_its_traceback(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"cell": "torn')
    bad, good = benchmark.Cell("1", "random", 4, "fifo", 0), benchmark.Cell("3945", "asha", 64, "fifo", 0)
    monkeypatch.setattr(benchmark, "cells_of", lambda tasks, full: [bad, good])
    with pytest.raises(SystemExit, match=re.escape("1 sweeps failed: 1|random|4|fifo|0")):
        benchmark.main(["--data", str(DATA), "--cells", str(path), "--jobs", "1"])
    said = capsys.readouterr().err
    assert "1|random|4|fifo|0 failed:" in said and "in play" in said and "InvalidFieldError: task='1'" in said
    assert "1 of 2 sweeps were not played" in said
    assert set(benchmark.read_cells(path)) == {good.name}
    with pytest.raises(InvalidFieldError, match="tasks='1'"):
        benchmark.main(["--data", str(DATA), "--cells", str(path), "--tasks", "1"])
