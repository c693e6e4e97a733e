"""Sweeps of Ray Tune that a signal ends: exit status, what is said, and that a restored sweep repeats nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

DRIVER = """
import os, sys, time
import ray
from fluid import FluidExecutor, tune

class Count(tune.Trainable):
    def setup(self, config):
        self.total = 0
    def step(self):
        time.sleep(0.1)
        self.total += 1
        print("step", flush=True)
        open(os.environ["STEPS"], "a").write("x\\n")
        return {"total": self.total, "done": self.total >= 25}
    def save_checkpoint(self, folder):
        open(folder + "/total", "w").write(str(self.total))
    def load_checkpoint(self, folder):
        self.total = int(open(folder + "/total").read())

if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    run_dir, verbose = folder + "/fluid" + sys.argv[2], int(os.environ["VERBOSE"])
    executor = FluidExecutor("local", 2, run_dir=run_dir, verbose=verbose, max_packing=1)
    if sys.argv[2] == "tuner":
        config = tune.RunConfig(name="sweep", storage_path=folder + "/tune", verbose=0)
        tune.Tuner(
            Count, tune_config=tune.TuneConfig(num_samples=3), run_config=config, executor=executor
        ).fit()
    elif sys.argv[2] == "restore":
        tune.Tuner.restore(folder + "/tune/sweep", Count, executor=executor).fit()
    else:
        tune.run(
            Count,
            name="sweep",
            storage_path=folder + "/tune",
            num_samples=3,
            verbose=0,
            executor=executor,
            resume=sys.argv[2] == "resume",
        )
    print("the script goes on", flush=True)
"""


def start(folder: Path, how: str, verbose: int = 1) -> subprocess.Popen[str]:
    (folder / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}
    environment |= {"STEPS": str(folder / "steps"), "VERBOSE": str(verbose)}
    return subprocess.Popen(
        [sys.executable, str(folder / "driver.py"), str(folder), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for_steps(driver: subprocess.Popen[str], folder: Path, steps: int) -> None:
    while not (folder / "steps").exists() or len((folder / "steps").read_text().splitlines()) < steps:
        assert driver.poll() is None, driver.communicate()[1]


def totals(folder: Path) -> dict[str, list[int]]:
    found = {}
    for path in sorted((folder / "tune" / "sweep").glob("*/result.json")):
        found[path.parent.name] = [json.loads(line)["total"] for line in path.read_text().splitlines()]
    return found


@pytest.mark.parametrize(
    ("number", "status", "how", "again", "call"),
    [
        (signal.SIGTERM, 143, "run", "resume", "tune.run(..., storage_path="),
        (signal.SIGUSR1, 138, "tuner", "restore", "Tuner.restore("),
    ],
)
def test_a_sweep_that_gets_notice_is_saved_and_repeats_nothing_when_it_goes_on(
    tmp_path: Path, number: int, status: int, how: str, again: str, call: str
) -> None:
    driver = start(tmp_path, how)
    try:
        wait_for_steps(driver, tmp_path, 12)
        driver.send_signal(number)
        out, err = driver.communicate(timeout=120)
    finally:
        driver.kill()
    assert driver.returncode == status, err
    assert "the script goes on" not in out
    assert "3 of 3 trials were cut off; go on with " + call in err
    before = totals(tmp_path)
    assert sum(map(len, before.values())) >= 4
    done = subprocess.run(
        [*list(driver.args)[:-1], again],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "STEPS": str(tmp_path / "steps"), "VERBOSE": "0"},
        check=False,
    )
    assert "the script goes on" in done.stdout, done.stderr
    assert totals(tmp_path).keys() >= before.keys()
    for values in totals(tmp_path).values():
        assert values == list(range(1, 26))


@pytest.mark.parametrize("verbose", [0, 1])
def test_ctrl_c_ends_a_sweep_with_130_and_says_how_to_go_on_unless_it_is_quiet(tmp_path: Path, verbose: int) -> None:
    driver = start(tmp_path, "run", verbose)
    try:
        wait_for_steps(driver, tmp_path, 8)
        driver.send_signal(signal.SIGINT)
        out, err = driver.communicate(timeout=120)
    finally:
        driver.kill()
    assert driver.returncode == 130, err
    assert "the script goes on" not in out
    call = f"tune.run(..., storage_path={str(tmp_path / 'tune')!r}, name='sweep', resume=True"
    if verbose:
        assert "interrupted by SIGINT: 3 of 3 trials were cut off" in err and call in err
    else:
        assert "fluid" not in err
