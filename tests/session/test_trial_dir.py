"""The folder of a trial's own: fluid.trial_dir(), and Trial(chdir=True)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, Trial, TrialGroup
from tests.seeded_programs import ROOT
from tests.waiting import PATIENCE


def writes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(2):
        with open(fluid.trial_dir() / "mine", "a") as file:
            file.write(config["name"])
        yield {"cwd": os.getcwd(), "folder": str(fluid.trial_dir()), "step": step}


def fails_at_first(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with open("tries", "a") as file:  # By a relative path.
        file.write("x")
    yield {"number": len(Path("tries").read_text()), "folder": str(fluid.trial_dir()), "cwd": os.getcwd()}
    if Path("tries").read_text() == "x":
        raise ValueError("at first")
    yield {"number": 0}


@pytest.mark.slow
def test_each_trial_has_its_own(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(writes, {"name": name}, budget=2, trial_id=name) for name in ("a", "b/c", "..")]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        assert handle.wait(PATIENCE)
        live = {trial.trial_id: trial.folder for trial in handle.trials}
        for trial in handle.trials:
            assert {result.metrics["cwd"] for result in trial.results} == {os.getcwd()}
            assert trial.folder == Path(trial.metrics["folder"])
            assert (trial.folder / "mine").read_text() == 2 * trial.trial_id
    assert len(set(live.values())) == 3
    assert {trial.trial_id: trial.folder for trial in fluid.load(tmp_path / "run").trials} == live
    assert all((tmp_path / "run") in folder.parents for folder in live.values() if folder is not None)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "lane"])
def test_it_is_the_working_directory_if_asked_for(tmp_path: Path, packing: Any) -> None:
    home = os.getcwd()
    with FluidExecutor(backend="local", devices=1, packing=packing, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(fails_at_first, budget=2, trial_id=name, chdir=True) for name in "ab"]
        trials.append(Trial(writes, {"name": "c"}, budget=2, trial_id="c"))
        handle = executor.submit_trialgroup(TrialGroup(trials))
        assert handle.wait(PATIENCE)
        found = {trial.trial_id: trial for trial in handle.trials}
    for name in "ab":
        assert found[name].state == "DONE" and found[name].folder is not None
        assert (found[name].folder / "tries").read_text() == "xx"  # A retry finds what the first try has left.
        first = found[name].results[0].metrics
        assert first["cwd"] == first["folder"] == str(found[name].folder)
    assert {result.metrics["cwd"] for result in found["c"].results} == {home}


def test_in_a_sweep(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0):
        space, options = {"name": ["a", "b"]}, {"chdir": True}
        result = fluid.run(writes, space, metric="step", mode="max", algorithm="grid", budget=2, trial_options=options)
    for trial in result.trials:
        assert trial.folder is not None and {result.metrics["cwd"] for result in trial.results} == {str(trial.folder)}
        assert (trial.folder / "mine").read_text() == 2 * trial.config["name"]


def test_local_modules_are_found_there_too(tmp_path: Path) -> None:
    (tmp_path / "local_module.py").write_text("VALUE = 3\n")
    program = """
import fluid, importlib
def train(config):
    yield {"value": importlib.import_module("local_module").VALUE}
options = {"metric": "value", "mode": "max", "algorithm": "grid", "trial_options": {"chdir": True}}
with fluid.FluidExecutor(backend="local", devices=1, verbose=0, run_dir="run"):
    print(fluid.run(train, {"x": [1]}, **options).best.value)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]  # "" is on its path.
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.stdout.strip() == "3.0", ended.stderr


def test_outside_a_trial_it_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fluid.trial_dir() == tmp_path


def test_chdir_is_checked() -> None:
    with pytest.raises(InvalidFieldError, match="chdir='yes': must be True or False"):
        Trial(writes, chdir="yes")  # type: ignore[arg-type]
