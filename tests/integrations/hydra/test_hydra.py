"""hydra/launcher=fluid against Hydra's own basic launcher, in applications of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks("hydra")

ROOT = Path(__file__).resolve().parents[3]
APP = Path(__file__).parent / "app"
FLUID = ("hydra/launcher=fluid", "hydra.launcher.devices=2", "hydra.launcher.backend=local", "hydra.launcher.verbose=0")


def run(script: Path, folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs an application in a folder, as its user would."""
    folder.mkdir(exist_ok=True)
    places = [str(ROOT), *([] if path is None else [str(path)]), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "FLUID_RUNS": str(folder.parent / "runs"),
        "ENDED": str(folder.parent / f"{folder.name}.json"),
        "SHADE": "light",
    }
    command = [sys.executable, str(script), "--multirun", "hydra.sweep.dir=out", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=90)


def sweep(folder: Path, launcher: tuple[str, ...], *arguments: str) -> list[dict[str, Any]]:
    """Runs the application under the sweeper that asks in batches; returns how its jobs ended."""
    done = run(APP / "app.py", folder, "hydra/sweeper=halving", *launcher, *arguments, path=APP)
    assert done.returncode == 0, done.stderr
    ended = json.loads((folder.parent / f"{folder.name}.json").read_text())
    for job in ended:
        for place in ("working_dir", "output_dir"):
            job[place] = str(job[place]).replace(str(folder), "")
    return list(ended)


def written(folder: Path) -> dict[str, str]:
    """All files of a sweep, without times and what differs by launcher."""
    files = {}
    for path in sorted((folder / "out").rglob("*")):
        if path.is_file():
            text = re.sub(r"\[\d{4}-[^]]*\]", "", path.read_text()).replace(str(folder), "")
            files[path.relative_to(folder).as_posix()] = "" if path.name == "hydra.yaml" else text
    return files


@pytest.mark.parametrize("options", [("--editable",), ()], ids=["editable", "wheel"])
def test_an_installed_launcher_is_found(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing on PYTHONPATH; all other packages are those of this environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checkout, environment = tmp_path / "checkout", tmp_path / "environment"
    for name in ("fluid", "integrations", "hydra_plugins"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    packages.joinpath("others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, *options, checkout], cwd=tmp_path, check=True)
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("FOUND", str(tmp_path))
    command = [python, Path(__file__).parent / "names_app.py", "--multirun", "model=wide", "model.width=3,4", *FLUID]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "Launching 2 jobs on Fluid" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["3.json", "4.json"]


@pytest.mark.parametrize("chdir", ["True", "False"])
def test_jobs_end_as_under_the_basic_launcher(tmp_path: Path, chdir: str) -> None:
    arguments = ("colour=blue", "fails_at=0.5", f"hydra.job.chdir={chdir}", "+hydra.job.env_set.SHADE=dark")
    basic, on_fluid = tmp_path / "basic", tmp_path / "fluid"
    expected = sweep(basic, (), *arguments)
    ended = sweep(on_fluid, FLUID, *arguments)
    assert [job["status"] for job in ended[:2]] == ["COMPLETED", "FAILED"]
    # Lanes add the traceback as the cause; the basic launcher has the exception itself.
    assert [job.pop("has_traceback") for job in ended] == [job["status"] == "FAILED" for job in ended]
    assert [job.pop("has_traceback") for job in expected] == [False] * 4
    assert ended == expected
    assert written(on_fluid) == written(basic)
    assert "rate 1.0 in job 0" in written(on_fluid)["out/0/app.log"]


def test_a_lock_and_a_death_fail_their_jobs_only(tmp_path: Path) -> None:
    ended = sweep(tmp_path / "fluid", FLUID, "dies_at=1", "locks_at=0.5", "hydra.sweeper.rounds=1")
    assert [job["status"] for job in ended] == ["FAILED", "FAILED"]
    assert "TrialFailedError" in ended[0]["value"] and "SIGKILL" in ended[0]["value"]
    assert "cannot be pickled" in ended[1]["value"]


def test_keep_going_false_ends_a_batch_at_its_first_failure(tmp_path: Path) -> None:
    arguments = (*FLUID, "hydra.launcher.keep_going=False", "fails_at=1", "rate=1,0.9,0.8", "hydra.launcher.devices=1")
    done = run(APP / "app.py", tmp_path / "fluid", *arguments, path=APP)
    assert done.returncode == 1
    assert "NoRateError: no rate 1.0" in done.stderr
    assert "in main" in done.stderr


def test_an_option_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    done = run(APP / "app.py", tmp_path / "fluid", *FLUID, "hydra.launcher.packing=tight", path=APP)
    assert done.returncode == 1
    assert "packing='tight'" in done.stderr
    done = run(APP / "app.py", tmp_path / "fluid", *FLUID, "hydra.launcher.colour=red", path=APP)
    assert done.returncode == 1
    assert "colour" in done.stderr
    done = run(APP / "app.py", tmp_path / "fluid", *FLUID, "+hydra.launcher.trial.thread=2", path=APP)
    assert done.returncode == 1
    assert "hydra.launcher.trial.thread=2: is no field of a Trial" in done.stderr


def test_fields_of_trials_and_reports(tmp_path: Path) -> None:
    import fluid

    folder = tmp_path / "run"
    arguments = ("+hydra.launcher.trial.threads=2", f"hydra.launcher.run_dir={folder}", "rate=0.2,0.4")
    done = run(APP / "app.py", tmp_path / "fluid", *FLUID, *arguments, path=APP)
    assert done.returncode == 0, done.stderr
    trials = fluid.load(folder, metric="return_value", mode="min").trials
    assert sorted(trial.config["rate"] for trial in trials) == [0.2, 0.4]
    assert {trial.metrics["status"] for trial in trials} == {"COMPLETED"}


def test_a_config_can_name_a_class_of_the_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its code does not refer to, named in a group of configs that only the job reads."""
    monkeypatch.setenv("FOUND", str(tmp_path))
    app = Path(__file__).parent / "names_app.py"
    done = run(app, tmp_path / "fluid", *FLUID, "model=wide", "model.width=3,4")
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"{width}.json").read_text()) for width in (3, 4)] == [["Model", 3], ["Model", 4]]


@pytest.mark.frameworks("hydra", "sklearn")
def test_the_example(tmp_path: Path) -> None:
    example = ROOT / "examples" / "frameworks" / "hydra_app.py"
    done = run(example, tmp_path / "fluid", "epochs=1", "hydra.launcher.devices=2")
    assert done.returncode == 0, done.stderr
    logs = sorted((tmp_path / "fluid" / "out").glob("*/hydra_app.log"))
    assert len(logs) == 6
    assert all("accuracy" in log.read_text() for log in logs)
