"""Trials whose schedules agree at first are one run until then, and have the metrics that each has alone."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fluid
from fluid import Trial
from fluid.reports.run.loader import load_run
from fluid.reports.tables.why import as_json
from fluid.search import schedule
from tests.session.shared_prefix_trainables import (
    BUDGET,
    GRID,
    NODES,
    PARTS,
    Walk,
    alone,
    lines,
    walk,
)
from tests.waiting import PATIENCE, eventually

#: Runs the grid of the folder and the options given; goes on if it is there.
PROGRAM = """
import sys
import fluid
from tests.session.shared_prefix_trainables import BUDGET, GRID, walk

if __name__ == "__main__":
    space = {**GRID, "log": sys.argv[2]}
    fluid.run(
        walk, space, metric="place", mode="min", algorithm="grid", budget=BUDGET, run_dir=sys.argv[1], devices=2,
        if_exists="resume", name="grid", output=fluid.Output(verbose=0),
    )
"""


def run_grid(run_dir: Path, log: Path, **options: Any) -> fluid.SweepResult:
    given = {"metric": "place", "mode": "min", "algorithm": "grid", "budget": BUDGET, "name": "grid", **options}
    space = {**GRID, "log": str(log)}
    return fluid.run(walk, space, run_dir=run_dir, devices=2, output=fluid.Output(verbose=0), **given)


def require_as_alone(result: fluid.SweepResult) -> None:
    """Each trial has each iteration once, and those of a sample the metrics of the trial alone with the same seed."""
    assert len(result.trials) == 48 and not result.failures
    for trial in result.trials:
        assert [one.iteration for one in trial.results] == list(range(1, BUDGET + 1))
        assert [bool(one.source) for one in trial.results] == [one <= PARTS[-1] for one in range(1, BUDGET + 1)]
    for trial in random.Random(0).sample(list(result.trials), 8):
        assert trial.seeds is not None
        assert [dict(one.metrics) for one in trial.results] == alone(dict(trial.config), trial.seeds, BUDGET)


@pytest.mark.slow
def test_a_grid_of_48_schedules_runs_each_beginning_once(tmp_path: Path) -> None:
    result = run_grid(tmp_path / "run", tmp_path / "log")
    require_as_alone(result)
    assert len(lines(tmp_path / "log")) == NODES == 640 <= 0.35 * 48 * BUDGET


@pytest.mark.slow
def test_a_grid_of_48_schedules_goes_on_after_its_driver_was_killed(tmp_path: Path) -> None:
    folder, log, out = tmp_path / "run", tmp_path / "log", tmp_path / "out"
    killed_at = random.randrange(1, NODES)
    with out.open("wb") as output:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(log)], stdout=output, stderr=output, start_new_session=True
        )
    eventually(lambda: program.poll() is not None or (log.exists() and len(lines(log)) >= killed_at))
    program.send_signal(signal.SIGKILL)
    program.wait(PATIENCE)
    result = run_grid(folder, log, if_exists="resume")
    require_as_alone(result)


# -- what trials' code does with schedules ---------------------------------------------------------------------------

#: Four trials that agree on 4 iterations; then two and two on 4 more.
TREE = [{"lr": schedule({0: 0.1, 4: middle, 8: last})} for middle in (0.1, 0.2) for last in (1.0, 2.0)]


def run(tmp_path: Path, trainable: Any, configs: list[dict[str, Any]], **options: Any) -> list[fluid.TrialResult]:
    trials = [
        Trial(trainable, each, budget=12, trial_id=f"t{number}", **options) for number, each in enumerate(configs)
    ]
    with fluid.FluidExecutor(backend="local", devices=1, verbose=0, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup(trials, name="g"))
        assert handle.wait(PATIENCE)
        return list(handle.trials)


def require_equal(trainable: Any, configs: list[dict[str, Any]], found: list[fluid.TrialResult]) -> None:
    for trial, config in zip(found, configs, strict=True):
        assert trial.seeds is not None and trial.state == "DONE", trial.failure
        assert [one.iteration for one in trial.results] == list(range(1, 13))
        assert [dict(one.metrics) for one in trial.results] == alone(config, trial.seeds, 12, trainable)


class SavesAll(Walk):
    """Its states hold its config, which a trial gets back that starts from that of a shared run."""

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "state").write_bytes(pickle.dumps(self.__dict__))

    def load_checkpoint(self, folder: Any) -> None:
        self.__dict__.update(pickle.loads((Path(folder) / "state").read_bytes()))


class CatchesAll(SavesAll):
    """Takes a value of its own where it gets none."""

    def rate(self) -> float:
        try:
            return super().rate()
        except Exception:
            return 100.0


def yields_config(config: dict[str, Any], state: Any = None) -> Any:
    kept = state or {"done": 0, "place": random.random(), "config": config}
    while True:
        kept["place"] += kept["config"]["lr"].at(kept["done"]) * random.random()
        kept["done"] += 1
        yield {"place": kept["place"]}, kept


@pytest.mark.parametrize("trainable", [Walk, SavesAll, CatchesAll, yields_config])
def test_a_state_of_a_shared_run_may_hold_its_config(trainable: Any, tmp_path: Path) -> None:
    found = run(tmp_path, trainable, TREE)
    require_equal(trainable, TREE, found)
    assert [sum(bool(one.source) for one in trial.results) for trial in found] == [8] * 4


def test_nested_schedules_are_told_apart_in_a_state_that_holds_the_config(tmp_path: Path) -> None:
    configs = [
        {"lr": schedule({0: 1.0, 4: one}), "deep": [{"wd": schedule({0: 1.0, 4: other})}]}
        for one in (2.0, 3.0)
        for other in (4.0, 5.0)
    ]
    require_equal(SavesDeep, configs, run(tmp_path, SavesDeep, configs))


class SavesDeep(SavesAll):
    def rate(self) -> float:
        return super().rate() + 10.0 * float(self.config["deep"][0]["wd"].at(self.done))


def asked_by_worker(part: Any) -> float:
    try:
        return float(part.at(10))
    except Exception:
        return 9.0


class AsksAhead(Walk):
    """Computes what it adds to its rate from all of its schedule, in one of several ways, and catches errors."""

    def set_up(self) -> None:
        part, how = self.config["lr"], self.config["how"]
        self.extra = 5.0
        try:
            if how == "at":
                self.extra = part.at(11)
            elif how == "text":
                self.extra = float(len(str(self.config)))
            elif how == "law":
                self.extra = float(part.span(0).stop)
            else:
                with multiprocessing.get_context(how).Pool(1) as pool:
                    self.extra = pool.map(asked_by_worker, [part])[0]
        except Exception:
            self.extra = 7.0

    def rate(self) -> float:
        return super().rate() + self.extra


@pytest.mark.parametrize(
    "how",
    ["at", "text", "law", pytest.param("fork", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_code_that_asks_ahead_runs_alone_and_why_says_so(how: str, tmp_path: Path) -> None:
    configs = [{**config, "how": how} for config in TREE[::3]]
    found = run(tmp_path, AsksAhead, configs)
    require_equal(AsksAhead, configs, found)
    assert not any(one.source for trial in found for one in trial.results)
    whole = load_run(tmp_path / "run")
    story = str(as_json(whole, [trial for trial in whole.trials if trial.trial_id == "t0"]))
    assert "runs alone from its start" in story and "asked for" in story


# -- what differs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "others",
    [
        [1, 1.0],
        [1, True],
        [np.zeros(2), np.ones(2)],
        [np.zeros(2), np.zeros(2, np.float32)],
        [{"a": [1]}, {"a": (1,)}],
        [0.0, -0.0],
    ],
    ids=repr,
)
def test_trials_whose_other_fields_differ_share_nothing(others: list[Any], tmp_path: Path) -> None:
    configs = [{"lr": config["lr"], "other": other} for config, other in zip(TREE[:2], others, strict=True)]
    found = run(tmp_path, Walk, configs)
    require_equal(Walk, configs, found)
    assert not any(one.source for trial in found for one in trial.results)
    assert found[0].seeds != found[1].seeds
