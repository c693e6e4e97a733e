"""A run that Ctrl-C ends: what is said, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hpbandster")

pytestmark = pytest.mark.slow

DRIVER = """
import sys, time
import ConfigSpace
from fluid import FluidExecutor
from fluid.integrations.hpbandster import run

def train(config):
    while True:
        yield {"loss": 1.0}
        open(config["log"], "a").write("x")
        time.sleep(0.05)

if __name__ == "__main__":
    space = ConfigSpace.ConfigurationSpace({"x": (0.0, 1.0), "log": [sys.argv[1] + "/log"]})
    executor = FluidExecutor("local", 2, run_dir=sys.argv[1] + "/run", verbose=0, max_packing=1)
    run("HyperBand", space, train, min_budget=10**5, max_budget=10**5, n_iterations=2, executor=executor)
"""


def test_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        while not (tmp_path / "log").exists():
            assert driver.poll() is None
        os.killpg(driver.pid, signal.SIGINT)  # As a terminal does: lanes receive it too.
        _, err = driver.communicate(timeout=90)
    assert driver.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert "interrupted by KeyboardInterrupt: 2 trials were cut off; run(..., previous_result=...) goes on" in err
    assert "dropped" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(driver.pid, 0)
