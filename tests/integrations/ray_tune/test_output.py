"""What trials of Tune print reaches the driver as it does without Fluid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from fluid import FluidExecutor, tune

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

_SCRIPT = """
import logging, os, shutil, subprocess, sys, warnings

import ray
from fluid import FluidExecutor, tune

_, system, address, folder = sys.argv


def train(config):
    print("to stdout", config["x"])
    print("to stderr", config["x"], file=sys.stderr)
    sys.stdout.flush()
    os.write(1, b"by a library\\n")
    subprocess.run(["sh", "-c", "echo by a child; echo its error >&2"], check=True)
    logging.getLogger("user").warning("logged")
    warnings.warn("warned")
    print("several\\nlines\\n\\nand an empty one")
    tune.report({"loss": config["x"]})
    print("at the end", config["x"])


class Model(tune.Trainable):
    def setup(self, config):
        print("set up", config["x"])

    def step(self):
        print("step", self.iteration)
        return {"loss": 1.0, "done": self.iteration == 1}


ray.init(address, logging_level="ERROR")
for trainable in (train, Model):
    name = trainable.__name__
    options = {}
    if system == "fluid":
        options["executor"] = FluidExecutor("local", devices=2, run_dir=f"{folder}/run-{name}")
    sweep = tune.run(
        trainable,
        name=name,
        config={"x": tune.grid_search([1, 2, 3])},
        storage_path=folder,
        log_to_file=("out.txt", "err.txt"),
        verbose=0,
        **options,
    )
    for trial in sweep.trials:
        for kind in ("out", "err"):
            shutil.copy(f"{trial.storage.trial_working_directory}/{kind}.txt", f"{folder}/{trial}.{kind}.txt")
ray.shutdown()
"""


#: What the trials print. Ray's workers may add how they were ended.
_PRINTED = re.compile(
    r"(to std\w+|at the end|set up|step) \d|by a library|by a child|its error|logged|.*warn.*"
    r"|several|lines||and an empty one"
)


def _run(system: str, address: str, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Runs the sweeps; returns the lines of trials on stdout and on stderr, and the files of ``log_to_file``."""
    script = folder / "script.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0", "RAY_AIR_NEW_OUTPUT": "0"}
    command = [sys.executable, str(script), system, address, str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder, timeout=600)
    shown = []
    for text in (ran.stdout, ran.stderr):
        found = re.findall(r"^\((\w+) pid=\d+\) (.*)$", text, re.MULTILINE)
        shown.append(
            sorted(f"{name}: {line}".replace(str(folder), "") for name, line in found if _PRINTED.fullmatch(line))
        )
    written = (path.read_text(encoding="utf-8").replace(str(folder), "") for path in folder.glob("*.txt"))
    files = sorted(text.replace(":actor_name:train\n", "") for text in written)  # A mark of Ray's own.
    return shown[0], shown[1], files


@pytest.mark.long
def test_the_lines_and_files_are_those_of_ray_tune(ray_cluster: str, tmp_path: Path) -> None:
    results = []
    for system in ("stock", "fluid"):
        (tmp_path / system).mkdir()
        results.append(_run(system, ray_cluster, tmp_path / system))
    (stock_out, stock_err, stock_files), (out, err, files) = results
    assert files == stock_files and len(files) == 12
    # Ray may end before it has shown the last lines.
    assert Counter(stock_out) <= Counter(out) and Counter(stock_err) <= Counter(err)
    assert (len(out), len(err)) == (33, 15)
    assert out.count("train: by a child") == 3 and out.count("Model: step 0") == 3
    assert err.count("train: logged") == 3 and "train: to stderr 2" in err


def speak(config: dict[str, Any]) -> None:
    print("spoken")
    tune.report({"loss": 1.0})


def test_a_user_who_told_ray_not_to_show_what_workers_print_sees_nothing(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster's fixture connects with ``log_to_driver=False``."""
    executor = FluidExecutor("local", devices=1, run_dir=tmp_path / "run")
    tune.run(speak, storage_path=str(tmp_path / "results"), verbose=0, executor=executor)
    captured = capsys.readouterr()
    assert "spoken" not in captured.out + captured.err
    (log,) = (tmp_path / "run").glob("trials/*/output.log")
    assert log.read_text(encoding="utf-8") == "spoken\n"
