"""The examples of XGBoost and LightGBM run, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks("xgboost", "lightgbm", "sklearn")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["xgboost_sweep", "lightgbm_sweep"])
def test_example(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "frameworks" / f"{name}.py"), "--samples", "4", "--devices", "1"]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"right on ([\d.]+)% of the digits", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 80.0
