"""The benchmark of what a resume costs: a short run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def test_a_short_run(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "resuming.py"), "--trials", "8", "--rounds", "1"]
    command += ["--baseline", str(ROOT), "--json", str(figures)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(figures.read_text())
    assert found["trials"] == 8 and found["this"].keys() == {"this", "baseline"} and min(found["this"].values()) > 0.0
