"""A script that goes on: from what it has written as a checkpoint, or from the beginning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from script_sweeps import wait_until, write_script

from fluid.cli import main
from fluid.results.loading import load
from fluid.results.records import TrialResult
from fluid.scripts.checkpoint import copy_steady, signature_of

ROOT = Path(__file__).resolve().parents[2]
_EPOCHS = 200
#: Trains 200 epochs, slowly in its first start; goes on from --resume. It saves before it reports, or --late, after.
_SCRIPT = f"""
    import argparse, json, os, sys, time
    parser = argparse.ArgumentParser()
    parser.add_argument("--save"), parser.add_argument("--resume"), parser.add_argument("--late", action="store_true")
    given, folder = parser.parse_args(), os.environ["FLUID_TRIAL_DIR"]
    with open(os.path.join(folder, "starts"), "a") as file:
        file.write(f"{{given.resume}}\\n")
    is_first = len(open(os.path.join(folder, "starts")).readlines()) == 1
    def save():
        os.makedirs(given.save, exist_ok=True)
        with open(os.path.join(given.save, "state"), "w") as file:
            file.write(str(epoch))
    epoch = int(open(os.path.join(given.resume, "state")).read()) if given.resume else 0
    while epoch < {_EPOCHS}:
        epoch += 1
        time.sleep(0.03 if is_first else 0)
        given.late or save()
        print(json.dumps({{"loss": 1 / epoch, "epoch": epoch}}), flush=True)
        given.late and save()
"""
#: The same by fluid.report and fluid.get_checkpoint.
_REPORTS = f"""
    import os, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    import fluid
    with open(os.path.join(os.environ["FLUID_TRIAL_DIR"], "starts"), "a") as file:
        file.write(f"{{fluid.get_checkpoint()}}\\n")
    is_first = len(open(os.path.join(os.environ["FLUID_TRIAL_DIR"], "starts")).readlines()) == 1
    epoch = int((fluid.get_checkpoint() / "state").read_text()) if fluid.get_checkpoint() else 0
    while epoch < {_EPOCHS}:
        epoch += 1
        time.sleep(0.03 if is_first else 0)
        fluid.report({{"loss": 1 / epoch, "epoch": epoch}}, save=lambda to: (to / "state").write_text(str(epoch)))
"""


def go_on_after(
    number: int, folder: Path, text: str, words: list[str], options: list[str]
) -> tuple[TrialResult, list[str], str]:
    """Ends ``fluid run`` by a signal after some epochs, goes on; returns the trial, its starts, and what it printed."""
    run_dir = folder / "run"
    given = ["run", "--space", "x=1", "--metric", "loss", "--mode", "min", "--run-dir", str(run_dir), "--devices", "1"]
    given += ["--algorithm", "grid", "--budget", str(_EPOCHS), "--verbose", "0", "--config-in-env", *options]
    command = ["--", sys.executable, write_script(folder, text), *words]
    first = subprocess.Popen(
        [sys.executable, "-m", "fluid.cli", *given, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    results = run_dir / "results.jsonl"
    wait_until(lambda: results.exists() and results.read_text().count("\n") >= 3)
    first.send_signal(number)
    assert first.wait() in (128 + number, -number)
    assert main([*given, "--resume", *command]) == 0
    (trial,) = load(str(run_dir)).trials
    assert trial.folder is not None
    log = trial.folder.parent / "output.log"
    return trial, (trial.folder / "starts").read_text().splitlines(), log.read_text() if log.exists() else ""


_FLAG = ["--checkpoint-flag", "--resume {checkpoint}", "--iteration-key", "epoch"]
_CASES = [
    pytest.param(_SCRIPT, ["--save", "{checkpoint}"], _FLAG, id="flag"),
    pytest.param(
        _SCRIPT,
        ["--save", "{checkpoint}", "--late"],
        _FLAG,
        id="late",
    ),
    pytest.param(_REPORTS, [], [], id="fluid.report"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words", "options"), _CASES)
def test_a_script_goes_on_from_its_checkpoint(text: str, words: list[str], options: list[str], tmp_path: Path) -> None:
    trial, starts, _ = go_on_after(signal.SIGTERM, tmp_path, text, words, options)
    assert [one.metrics["epoch"] for one in trial.results] == list(range(1, _EPOCHS + 1))
    assert [start == "None" for start in starts] == [True, False]


@pytest.mark.slow
def test_a_checkpoint_of_a_later_iteration_is_not_gone_on_from(tmp_path: Path) -> None:
    """As of a script that has run on before it could be stopped: here it lies, and so would leave an epoch out."""
    text = _SCRIPT.replace("file.write(str(epoch))", "file.write(str(epoch + 1))")
    trial, starts, log = go_on_after(signal.SIGTERM, tmp_path, text, ["--save", "{checkpoint}"], _FLAG)
    assert [one.metrics["epoch"] for one in trial.results] == list(range(1, _EPOCHS + 1))
    assert [start == "None" for start in starts] == [True, False, True]
    assert log.count("its checkpoint was of a later iteration") == 1


@pytest.mark.slow
def test_a_script_without_a_checkpoint_begins_again_and_says_so(tmp_path: Path) -> None:
    trial, starts, log = go_on_after(signal.SIGKILL, tmp_path, _SCRIPT, ["--save", "{checkpoint}"], [])
    assert [one.metrics["epoch"] for one in trial.results] == list(range(1, _EPOCHS + 1))
    assert starts == ["None", "None"]
    assert log.count("begins again") == 1


def test_a_copy_is_of_a_checkpoint_that_nobody_writes(tmp_path: Path) -> None:
    path, target = tmp_path / "state", tmp_path / "copy"
    target.mkdir()
    file = path.open("w")
    file.write("half")
    file.flush()

    class Writer:
        def stand_still(self) -> list[int]:
            return [os.getpid()]

        def let_run(self, seconds: float) -> None:
            file.write(" and half")
            file.close()

    copy_steady(str(path), str(target), Writer())
    assert (target / "script").read_text() == "half and half"
    assert signature_of(str(path)) != signature_of(str(target / "script"))
