"""Sweeps by BOHB that go on in another session, with the same decisions."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import Counter, once

import fluid
from fluid import FluidExecutor, InvalidFieldError, TrialListener
from fluid.executor import executor_in_force
from fluid.search import BOHB, uniform, when

SPACE = {"x": uniform(0.0, 1.0)}


class Unhurried(Counter):
    """So slow that the next config is suggested, and its trial submitted, before an iteration has ended."""

    def step(self) -> dict[str, Any]:
        time.sleep(0.03)
        return super().step()


class CopyAt(TrialListener):
    """Copies the run folder as it is after so many results, as a session that is killed then leaves it.

    Not at a rung: there the next config is about to be suggested, and one result more would be known.
    """

    def __init__(self, copies: dict[int, Path]) -> None:
        self._copies = dict(copies)
        self._count = 0

    def on_result(self, result: Any) -> None:
        self._count += 1
        due = next((number for number in self._copies if number <= self._count), None)
        if due is None or result.iteration not in (2, 5, 8):
            return
        executor = executor_in_force()
        assert executor is not None
        with contextlib.suppress(shutil.Error):  # Checkpoints that are dropped meanwhile.
            shutil.copytree(executor.run_dir, self._copies.pop(due), symlinks=True)


@pytest.mark.slow
@pytest.mark.parametrize(("synchronous", "at"), [(False, (1, 30)), (True, (20,))])
def test_a_killed_sweep_goes_on_with_the_same_decisions(synchronous: bool, at: tuple[int, ...], tmp_path: Path) -> None:
    space = {"x": uniform(0.0, 1.0), "kind": ["a", "b"], "m": when("kind", "a", uniform(0.0, 1.0)), "c": 3}
    options = {"metric": "loss", "mode": "min", "budget": 9, "name": "sweep", "samples": 20}
    options |= {"algorithm": BOHB(synchronous=synchronous, random_fraction=0.2)}
    copies = {number: tmp_path / f"killed-{number}" for number in at}
    sharing = fluid.Sharing(packing="off")
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "whole", verbose=0, packing="off"):
        whole = fluid.run(Unhurried, space, callbacks=[CopyAt(copies)], **options)
    decided = [(trial.config, trial.iteration, trial.state) for trial in whole.trials]
    for folder in copies.values():
        assert folder.is_dir()
        again = fluid.run(
            *(Unhurried, space),
            **options,
            run_dir=folder,
            resume=True,
            devices=1,
            sharing=sharing,
            output=fluid.Output(verbose=0),
        )
        assert [(trial.config, trial.iteration, trial.state) for trial in again.trials] == decided
        for trial in again.trials:
            assert [one.iteration for one in trial.results] == list(range(1, trial.iteration + 1))


def test_other_brackets_are_refused_where_a_sweep_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "metric": "loss",
        "mode": "min",
        "budget": 3,
        "name": "sweep",
        "run_dir": tmp_path / "run",
    }
    options |= {"output": fluid.Output(verbose=0), "devices": 1, "resume": True}
    fluid.run(once, {**SPACE, "calls": str(tmp_path / "calls")}, algorithm="bohb", **options)
    with pytest.raises(InvalidFieldError, match="with one_by_one False, not True"):
        fluid.run(once, {**SPACE, "calls": str(tmp_path / "calls")}, algorithm=BOHB(synchronous=True), **options)
