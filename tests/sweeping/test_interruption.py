"""Signals to a driver that runs a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

import fluid

DRIVER = """
import sys
import fluid
from fluid.search import uniform
from sweep_trainables import Counter

space = {"x": uniform(0.0, 1.0)}
try:
    fluid.run(Counter, space, metric="loss", samples=9, budget=10**9, algorithm="random", run_dir=sys.argv[1])
except fluid.SweepInterrupted as cut:
    print("cut", len(cut.cut_off), cut.result.state, cut.result.best.value > 0.0)
    raise
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_with_what_there_is(number: signal.Signals, status: int, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""), str(Path(fluid.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    results = tmp_path / "run" / "results.jsonl"
    eventually(lambda: (results.is_file() and results.stat().st_size) or process.poll() is not None)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert out == "cut 9 UNFINISHED True\n"
    assert f"fluid: interrupted by {number.name}: 9 of 9 trials had not ended" in err
    assert "Traceback" not in err
    assert fluid.load(tmp_path / "run").best.metrics["count"] > 0
