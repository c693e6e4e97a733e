"""Examples that Ctrl-C ends: exit status, how many trials were cut off, and how to go on."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


def interrupt(home: Path, *command: str, when: Callable[[], bool]) -> tuple[int, str, str]:
    """Runs an example, sends it Ctrl-C once ``when`` holds, and returns its status, stdout and stderr."""
    with open(home / "out", "w+") as out, open(home / "err", "w+") as err:
        driver = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]],
            env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            while not when():
                assert driver.poll() is None, (home / "err").read_text()
            os.killpg(driver.pid, signal.SIGINT)  # As a terminal does: lanes receive it too.
            driver.wait(120)
        finally:
            driver.kill()
    return driver.returncode, (home / "out").read_text(), (home / "err").read_text()


def test_an_example_without_tune(tmp_path: Path) -> None:
    def has_results() -> bool:
        files = (tmp_path / "fluid_runs").glob("*/results.jsonl")
        return any(path.read_text().count("\n") > 3 for path in files)

    status, _, err = interrupt(tmp_path, "custom_searcher.py", when=has_results)
    assert status == 130, err
    assert err.splitlines()[-1] == "interrupted by Ctrl-C"
    assert re.search(r"\d+ trials? that had not ended w.* dropped; FluidExecutor.resume\('.*'\) goes on", err)
    assert "Traceback" not in err


@pytest.mark.ray
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "ray")), reason="needs Ray and PyTorch"
)
def test_a_sweep_of_tune_prints_its_outcome_so_far(data: str, tmp_path: Path) -> None:
    options = ["--algo", "random", "--scale", "small", "--samples", "12", "--devices", "2", "--data", data]
    status, out, err = interrupt(
        tmp_path,
        "cifar10.py",
        *options,
        "--run-dir",
        str(tmp_path / "run"),
        when=lambda: "the best so far" in (tmp_path / "out").read_text(),
    )
    assert status == 130, err
    found = re.search(r"interrupted by SIGINT: (\d+) of 12 trials were cut off; go on with Tuner.restore\('", err)
    assert found, err
    assert f"interrupted: {found[1]} trials were cut off" in out
    assert "best: accuracy" in out
    assert "paused" in out
    assert "stopped" not in out
