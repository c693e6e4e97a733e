"""Several drivers on one study in a database, with executors that share a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from waiting import eventually

import fluid

pytestmark = [pytest.mark.slow]

_DRIVER = """
import sys
import time

import optuna

import fluid.joint.membership
from fluid import FluidExecutor
from fluid.integrations.optuna import optimize

fluid.joint.membership.LEASE_S = 3.0


def train(config, state):
    done = state or 0
    while True:
        done += 1
        time.sleep(0.05)
        yield {"loss": abs(config["lr"] - 0.01) + 1 / done, "count": done}, done


storage, folder, trials = sys.argv[1:]
study = optuna.load_study(study_name="shared", storage=storage)
space = {"lr": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)}
with FluidExecutor("local", 1, packing="off", verbose=0, run_dir=folder, join=True) as executor:
    optimize(study, train, int(trials), executor=executor, space=space, metric="loss", budget=20)
"""


def _results(folder: Path, pid: int) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob(f"members/*-{pid}-*/results.jsonl"))


def test_a_trial_of_a_killed_driver_goes_on_in_the_other_from_its_checkpoint(tmp_path: Path) -> None:
    storage, folder = f"sqlite:///{tmp_path}/study.db", tmp_path / "shared"
    study = optuna.create_study(study_name="shared", storage=storage)
    program = tmp_path / "driver.py"
    program.write_text(_DRIVER)
    command = [sys.executable, str(program), storage, str(folder), "2"]
    drivers = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    try:
        eventually(lambda: _results(folder, drivers[0].pid) >= 6)
        os.kill(drivers[0].pid, signal.SIGKILL)
        assert drivers[1].wait(90.0) == 0
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
    states = {trial.number: trial.state.name for trial in study.trials}
    assert set(states.values()) == {"COMPLETE"}, states
    # Two of the driver that is left, and the one that the other had: as far as it came, its iterations count once.
    found = fluid.load(folder, metric="loss", mode="min")
    assert len(found.trials) == len(states) >= 3
    for trial in found.trials:
        assert [result.iteration for result in trial.results] == list(range(1, 21))
        # None was computed again from the beginning: its state came along.
        assert [result.metrics["count"] for result in trial.results] == list(range(1, 21))
