"""``fluid run`` as users call it: a sweep from the command line, from a file, and by several drivers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_sweeps import write_script

from fluid.cli import main
from fluid.results.loading import load

ROOT = Path(__file__).resolve().parents[2]
_TRAIN = """
    import argparse, json
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float), parser.add_argument("--layers", type=int)
    given = parser.parse_args()
    for epoch in range(1, 28):
        print(json.dumps({"val_loss": abs(given.lr - 0.01) + 1 / epoch / given.layers}))
"""


def test_a_sweep_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, run_dir = write_script(tmp_path, _TRAIN), str(tmp_path / "run")
    given = ["--space", "lr=log:1e-5:1e-1", "--space", "layers=1,2,4", "--metric", "val_loss", "--samples", "9"]
    given += ["--run-dir", run_dir, "--budget", "9", "--devices", "2", "--verbose", "0"]
    assert main(["run", *given, "--", sys.executable, script, "--lr", "{lr}", "--layers", "{layers}"]) == 0
    result, printed = load(run_dir), capsys.readouterr().out
    assert len(result.trials) == 9 and result.best.iteration == 9
    assert f"best: val_loss {result.best.value:.6g} in iteration 9 of {result.best.trial.trial_id}" in printed
    assert f"results in {result.run_dir}" in printed
    assert f"--lr {result.best.config['lr']!r} --layers {result.best.config['layers']}" in printed


@pytest.mark.slow
def test_a_sweep_file_of_wandb_s_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options give way to those of the command line; what it says in vain is told."""
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, _TRAIN)
    run_dir = str(tmp_path / "run")
    content = {
        "program": "train.py",
        "project": "mine",
        "method": "grid",
        "metric": {"name": "val_loss", "goal": "minimize"},
        "parameters": {"lr": {"values": [0.01, 0.1]}, "layers": {"value": 2}},
        "command": [sys.executable, "${program}", "${args}"],
        "run_cap": 7,
    }
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    assert main(["run", "sweep.json", "--samples", "2", "--budget", "3", "--run-dir", run_dir, "--verbose", "0"]) == 0
    result, printed = load(run_dir), capsys.readouterr()
    assert [trial.config for trial in result.trials] == [{"lr": 0.01, "layers": 2}, {"lr": 0.1, "layers": 2}]
    assert [trial.iteration for trial in result.trials] == [3, 3]
    assert "project of the sweep file has no meaning here" in printed.err


@pytest.mark.slow
def test_a_sweep_all_of_whose_scripts_fail_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write_script(tmp_path, "raise SystemExit('no data here')")
    given = ["run", "--space", "x=1", "--metric", "loss", "--algorithm", "grid", "--verbose", "0", "--devices", "1"]
    assert main([*given, "--run-dir", str(tmp_path / "run"), "--", sys.executable, script]) == 1
    assert "no data here" in capsys.readouterr().err


@pytest.mark.slow
def test_several_drivers_work_one_sweep(tmp_path: Path) -> None:
    """The same command, as of the tasks of a Slurm array."""
    script, run_dir = (
        write_script(tmp_path, _TRAIN.replace("for epoch", "import time\n    for epoch")),
        tmp_path / "run",
    )
    text = Path(script).read_text().replace("    print", "    time.sleep(0.02); print")
    Path(script).write_text(text)
    given = ["run", "--space", "lr=log:1e-5:1e-1", "--space", "layers=2", "--metric", "val_loss", "--samples", "12"]
    given += ["--algorithm", "random", "--budget", "20", "--devices", "1", "--join", "--run-dir", str(run_dir)]
    command = [sys.executable, "-m", "fluid.cli", *given, "--", sys.executable, script]
    drivers = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) for _ in range(2)]
    assert [driver.wait() for driver in drivers] == [0, 0]
    result = load(str(run_dir))
    assert [trial.iteration for trial in result.trials] == [20] * 12


def test_the_scripts_of_the_page(tmp_path: Path) -> None:
    """docs/scripts.md shows the one as it is; the other goes on from what it has saved as if it had never ended."""
    shown = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / 'examples/script/train.py').read_text(encoding='utf-8')}```\n" in shown
    script = ROOT / "examples" / "script" / "train_and_save.py"

    def printed(*arguments: str) -> list[str]:
        command = [sys.executable, str(script), "--lr", "0.3", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()

    whole = printed("--save", "state")
    epoch, loss = json.loads((tmp_path / "state").read_text())
    assert json.loads(whole[-1]) == {"val_loss": loss, "epoch": epoch} and epoch == 27
    (tmp_path / "state").write_text(json.dumps([25, json.loads(whole[24])["val_loss"]]))
    assert printed("--resume", "state") == whole[25:]
