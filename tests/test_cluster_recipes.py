"""The scripts of docs/cluster.md with stand-ins for Slurm's programs, and its manifest for Kubernetes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

import fluid

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: Iterations of the sweep below take so long that a signal comes before its end.
SWEEP = """
import os
import time

import fluid
from fluid.search import uniform


def train(config, state):
    done = 0 if state is None else state
    while True:
        time.sleep(0.04)
        done += 1
        yield {"loss": config["x"] / done}, done


folder = f"runs/{os.environ['SLURM_JOB_ID']}"
options = {"metric": "loss", "samples": 8, "algorithm": "random", "budget": 20}
fluid.run(train, {"x": uniform(0, 1)}, run_dir=folder, resume=True, **options)
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n((?s:.*?))^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)


def one_node_script() -> str:
    (script,) = (block for block in blocks("cluster.md", "bash") if "#SBATCH --nodes=1\n" in block)
    return script


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a job: its script, its virtual environment, and stand-ins for Slurm's programs."""
    programs = {
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        # A step: its processes get the signal of --signal.
        "srun": 'while [[ $1 == -* ]]; do shift; done\necho $$ > step.pid\nexec "$@"',
        "scontrol": 'echo "$@" >> scontrol.log',
    }
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    for name, lines in programs.items():
        (environment / name).write_text(f"#!/bin/bash\n{lines}\n", encoding="utf-8")
        (environment / name).chmod(0o755)
    (environment / "activate").write_text(f'PATH={shlex.quote(str(environment))}:"$PATH"\n', encoding="utf-8")
    (tmp_path / "sweep.py").write_text(SWEEP, encoding="utf-8")
    (tmp_path / "sweep.sbatch").write_text(one_node_script(), encoding="utf-8")
    return tmp_path


def begin(job: Path) -> subprocess.Popen[bytes]:
    variables = {"SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "2", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(["bash", "sweep.sbatch"], cwd=job, env={**os.environ, **variables})


@pytest.mark.slow
def test_a_job_that_was_queued_again_goes_on_with_its_sweep(job: Path) -> None:
    results = job / "runs" / "42" / "results.jsonl"
    with begin(job) as first:
        eventually(lambda: results.exists() and results.read_bytes().count(b"\n") > 20)
        os.kill(int((job / "step.pid").read_text()), signal.SIGUSR1)
        assert first.wait() == 128 + signal.SIGUSR1
    assert (job / "scontrol.log").read_text() == "requeue 42\n"
    assert results.read_bytes().count(b"\n") < 160
    with begin(job) as second:
        assert second.wait() == 0
    assert (job / "scontrol.log").read_text() == "requeue 42\n"
    trials = fluid.load(job / "runs" / "42").trials
    assert [[result.iteration for result in trial.results] for trial in trials] == [list(range(1, 21))] * 8


@pytest.mark.slow
def test_a_job_that_was_cancelled_is_not_queued_again(job: Path) -> None:
    results = job / "runs" / "42" / "results.jsonl"
    with begin(job) as process:
        eventually(lambda: results.exists() and results.read_bytes().count(b"\n") > 1)
        os.kill(int((job / "step.pid").read_text()), signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not (job / "scontrol.log").exists()


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_shell_scripts_can_be_read(page: str) -> None:
    for script in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_slurm_is_asked_for_what_fluid_hears() -> None:
    from fluid.session.notice import SIGUSR1_DEADLINE_S

    scripts = [block for block in blocks("cluster.md", "bash") if "#SBATCH" in block]
    (array,) = (script for script in scripts if "#SBATCH --array" in script)
    assert len(scripts) == 3 and len(array.splitlines()) <= 10
    queued_again = f'"$status" -eq {128 + signal.SIGUSR1} '
    assert [script for script in scripts if queued_again not in script] == [array]
    for script in scripts:
        (seconds,) = re.findall(r"^#SBATCH --signal=(?:B:)?USR1@(\d+)$", script, re.MULTILINE)
        assert int(seconds) > SIGUSR1_DEADLINE_S


def manifest() -> Mapping[str, Any]:
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("cluster.md", "yaml")
    loaded: Mapping[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_job_of_kubernetes_has_the_fields_of_a_ray_job() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    containers = [container for pod in pods for container in pod["containers"]]
    assert len({container["image"] for container in containers}) == 1
    for pod in pods:
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_pods_are_left_the_time_that_ray_takes_to_drain_them() -> None:
    (workers,) = manifest()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > 30


def test_ray_is_the_version_of_the_image() -> None:
    (dockerfile,) = re.findall(r"FROM rayproject/ray:([\d.]+)", (DOCS / "cluster.md").read_text(encoding="utf-8"))
    assert manifest()["spec"]["rayClusterSpec"]["rayVersion"] == dockerfile
