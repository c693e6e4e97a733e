"""Population based training that goes on in another session, with the same decisions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import InvalidFieldError, SweepResult
from fluid.search import PBT, uniform

SPACE = {"rate": uniform(0.05, 0.9)}


def slow(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    for iteration in range(1 + (state or 0), 100):
        time.sleep(0.03)
        yield {"error": config["rate"] / iteration}, iteration


def go_on(run_dir: Path, **options: Any) -> SweepResult:
    given = {"metric": "error", "samples": 6, "budget": 16, "devices": 2, "output": fluid.Output(verbose=0), **options}
    return fluid.run(slow, SPACE, run_dir=run_dir, resume=True, name="sweep", **given)


def ends(result: SweepResult) -> list[fluid.TrialResult]:
    """The last trial of each member."""
    return list({trial.trial_id.rpartition("-")[2].partition(".")[0]: trial for trial in result.trials}.values())


def iterations(trial: fluid.TrialResult) -> list[int]:
    return [one.iteration for one in trial.results]


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_time_budget_ends_it_for_now(synchronous: bool, tmp_path: Path) -> None:
    options = PBT(ready=2, synchronous=synchronous)
    parts = [go_on(tmp_path / "run", algorithm=options, time_budget_s=0.8) for _ in range(2)]
    assert parts[0].state == "UNFINISHED"
    result = go_on(tmp_path / "run", algorithm=options)
    assert result.state == "DONE" and not result.failures
    assert all(trial.iteration == 16 or not trial.results for trial in ends(result))
    for trial in filter(iterations, result.trials):
        assert iterations(trial) == list(range(iterations(trial)[0], trial.iteration + 1))
    if synchronous:
        whole = go_on(tmp_path / "whole", algorithm=options)
        assert [(one.trial_id, one.config, iterations(one)) for one in result.trials] == [
            (one.trial_id, one.config, iterations(one)) for one in whole.trials
        ]


@pytest.mark.slow
def test_other_arguments_are_refused(tmp_path: Path) -> None:
    options = PBT(ready=2, synchronous=True)
    go_on(tmp_path / "run", algorithm=options)
    for other in (PBT(ready=3, synchronous=True), PBT(ready=2, synchronous=True, quantile=0.5)):
        with pytest.raises(InvalidFieldError, match="does not follow from these arguments"):
            go_on(tmp_path / "run", algorithm=other)
    with pytest.raises(InvalidFieldError, match=r"config\['rate'\]"):
        go_on(tmp_path / "run", algorithm=options, seed=4)


DRIVER = """
import os, signal, sys
import fluid
from fluid.search import PBT
from test_population_resume import SPACE, slow

left = int(sys.argv[3])


class Killer(fluid.TrialListener):
    def on_result(self, result):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)


fluid.run(slow, SPACE, metric="error", samples=6, budget=16, devices=2, run_dir=sys.argv[1], resume=True, name="sweep",
          algorithm=PBT(ready=2, synchronous=sys.argv[2] == "True"), callbacks=[Killer()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("synchronous", "after"), [(True, (13, 14)), (True, (40, 1)), (False, (30, 20))])
def test_a_killed_sweep_makes_the_same_decisions(synchronous: bool, after: tuple[int, int], tmp_path: Path) -> None:
    run_dir, places = tmp_path / "run", [str(Path(__file__).parent), str(Path(fluid.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])}
    for results in after:
        command = [sys.executable, "-c", DRIVER, str(run_dir), str(synchronous), str(results)]
        driver = subprocess.run(command, env=environment, check=False, capture_output=True)
        assert driver.returncode == -signal.SIGKILL, driver.stderr.decode()[-2000:]
    options = PBT(ready=2, synchronous=synchronous)
    result = go_on(run_dir, algorithm=options)
    assert result.state == "DONE" and not result.failures
    assert all(trial.iteration == 16 or not trial.results for trial in ends(result))
    for trial in filter(iterations, result.trials):
        assert iterations(trial) == list(range(iterations(trial)[0], trial.iteration + 1)), "none repeated or lost"
    if synchronous:
        whole = go_on(tmp_path / "whole", algorithm=options)
        assert [(one.trial_id, one.config, iterations(one)) for one in result.trials] == [
            (one.trial_id, one.config, iterations(one)) for one in whole.trials
        ]
