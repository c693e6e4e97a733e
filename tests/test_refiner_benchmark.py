"""A short run of the benchmark of the refiner: resizes that pay for all, and gains as predicted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "refiner", raising=False)


def test_refined_resizes_end_a_group_no_later_by_more_than_an_iteration(tmp_path: Path) -> None:
    from refiner import main

    main(["--cases", "10", "--late-cases", "1", "--json", str(tmp_path / "refiner.json")])
    figures = json.loads((tmp_path / "refiner.json").read_text())
    found = figures["group"]["all"]
    assert found["cases"] == 10
    assert found["longer_by_more_than_an_iteration"] == 0
    assert 0 < found["resized"] <= 10 and found["where_resized"] <= found["makespan"] <= 1.0
    assert found["resizes"] < found["resizes_unrefined"]
    assert figures["group"]["nothing"]["makespan"] == 1.0, "a resize that takes no time is made as ever"
    assert abs(found["bias"]) < 0.1
