"""The example of Hugging Face's Trainer runs, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks("transformers", "sklearn")

ROOT = Path(__file__).resolve().parents[3]


def test_example(tmp_path: Path) -> None:
    script = ROOT / "examples" / "frameworks" / "transformers_sweep.py"
    command = [sys.executable, str(script), "--samples", "2", "--epochs", "2", "--devices", "1"]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Writing model shards" not in done.stderr
    found = re.search(r"loss ([\d.]+) per character", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 4.0  # 4.3 without training.
