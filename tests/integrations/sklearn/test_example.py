"""The example runs as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks("sklearn")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "frameworks" / "sklearn_search.py"


def test_the_example_stops_candidates_early_and_finds_a_good_one(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--samples", "6", "--passes", "3", "--jobs", "1"]
    environment = {**os.environ, "FLUID_RUNS": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    passes = re.search(r"passes over the data: (\d+), of 18", run.stdout)
    assert passes and int(passes[1]) < 18
    right = re.search(r"best: .*, right on ([\d.]+)% of the digits held out", run.stdout)
    assert right and float(right[1]) > 85
