"""Large tensors of ``tune.with_parameters`` in a sweep of Ray Tune: lanes map one file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
import ray

from fluid import FluidExecutor, Trial, TrialGroup, tune
from fluid.integrations.ray_tune.serialization import pickle_trainable

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

ROWS = 1 << 19


def file_of(address: int) -> str:
    """The file that an address of this process is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[5] if "/" in line else ""
    return ""


def facts(rows: Any, weights: Any) -> dict[str, Any]:
    """What a trial sees of its parameters; it then writes to its tensor."""
    found = {
        "total": float(rows.sum()) + float(weights.sum()),
        "rows_file": file_of(rows.ctypes.data),
        "weights_file": file_of(weights.data_ptr()),
        "rows_writable": rows.flags.writeable,
    }
    weights += 1
    return found


def reports(config: dict[str, Any], rows: Any, weights: Any) -> None:
    tune.report(facts(rows, weights))


class Steps(tune.Trainable):
    def setup(self, config: dict[str, Any], rows: Any, weights: Any) -> None:
        self.facts = facts(rows, weights)

    def step(self) -> dict[str, Any]:
        return {**self.facts, "done": True}


@pytest.mark.parametrize("trainable", [reports, Steps])
def test_tensors_are_mapped_and_arrays_stay_in_the_object_store(
    trainable: Any, executor: FluidExecutor, tmp_path: Path
) -> None:
    given = tune.with_parameters(trainable, rows=np.arange(ROWS), weights=torch.ones(ROWS))
    found = tune.run(
        given, config={"x": tune.grid_search([1, 2, 3])}, executor=executor, storage_path=str(tmp_path), verbose=0
    )
    results = [trial.last_result for trial in found.trials]
    assert {result["total"] for result in results} == {ROWS * (ROWS - 1) / 2 + ROWS}
    (weights_file,) = {result["weights_file"] for result in results}
    assert "/trainable-" in weights_file, "a payload of the host"
    (rows_file,) = {result["rows_file"] for result in results}
    assert "plasma" in rows_file
    assert not any(result["rows_writable"] for result in results)


def test_a_lane_connects_to_ray_only_for_what_is_there(cluster: str) -> None:
    tensor_only = pickle_trainable(tune.with_parameters(Steps, weights=torch.ones(ROWS)))  # type: ignore[arg-type]
    assert (len(tensor_only.kept), tensor_only.needs_ray) == (1, False)
    assert len(tensor_only.content) < 1 << 16
    small = pickle_trainable(tune.with_parameters(Steps, weights=torch.ones(5)))  # type: ignore[arg-type]
    assert (len(small.kept), small.needs_ray) == (0, True)
    holds = {"weights": torch.ones(ROWS), "reference": ray.put(1)}
    mixed = pickle_trainable(tune.with_parameters(Steps, weights=holds))  # type: ignore[arg-type]
    (kept,) = mixed.kept
    assert ray.get(kept.load()["reference"]) == 1


def test_trials_without_tune_get_what_is_in_the_object_store(executor: FluidExecutor) -> None:
    given = tune.with_parameters(reports, rows=np.arange(ROWS), weights=torch.ones(ROWS))
    handle = executor.submit_trialgroup(TrialGroup([Trial(given, {}, budget=1)]))
    (result,) = list(handle.results())
    handle.raise_failures()
    assert result.metrics["total"] == ROWS * (ROWS - 1) / 2 + ROWS
    assert "/trainable-" in result.metrics["weights_file"]
    assert result.metrics["rows_file"] == result.metrics["weights_file"]


#: Forks two processes, and prints the next random id of each.
FORKS = """
import os, sys
import ray
from fluid.trainables.ray_handles import draw_ids_apart
ray.ObjectRef.from_random()
for _ in range(2):
    if os.fork() == 0:
        draw_ids_apart()
        print(ray.ObjectRef.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_processes_forked_from_one_draw_different_ids() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FORKS]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=90, env=environment).stdout
    assert len(set(output.split())) == 2


#: A sweep whose executor is older than Ray's cluster, which asks for a token.
SWEEP = """
import sys
import numpy as np
from fluid import FluidExecutor, tune

def train(config, rows):
    tune.report({"total": float(rows.sum())})

with FluidExecutor("local", devices=1, run_dir=sys.argv[1] + "/run", verbose=0) as executor:
    given = tune.with_parameters(train, rows=np.ones(1 << 18))
    found = tune.run(given, executor=executor, storage_path=sys.argv[1] + "/tune", verbose=0)
print("total", found.trials[0].last_result["total"])
"""


def test_lanes_older_than_the_cluster_have_its_token(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path)}
    environment["RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS"] = "0"
    command = [sys.executable, "-c", SWEEP, str(tmp_path)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120, env=environment).stdout
    assert f"total {float(1 << 18)}" in output
