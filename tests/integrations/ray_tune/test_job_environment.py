"""The environment variables of the driver's job, in trials that run in lanes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray

from fluid import FluidExecutor, tune

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

VARIABLES = {"OMP_NUM_THREADS": "3,2", "COLOUR": "blue", "LONGER": "${COLOUR}ish ${UNSET}"}


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[str]:
    """The address of a cluster to which this process is connected with variables of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
        ray.init(ray_cluster, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": VARIABLES})
        yield ray_cluster
        ray.shutdown()


class Environment(tune.Trainable):
    def step(self) -> dict[str, Any]:
        return {"seen": {name: os.environ.get(name) for name in VARIABLES}}


def test_variables_of_the_job_arrive_in_lanes_and_its_threads_beat_the_request(
    executor: FluidExecutor, tmp_path: Path
) -> None:
    assert "COLOUR" not in os.environ
    done = sweep(
        Environment, tmp_path, executor, {"stop": {"training_iteration": 1}, "resources_per_trial": {"cpu": 2}}
    )
    assert [trial.rows[0]["seen"] for trial in done.trials] == [
        {"OMP_NUM_THREADS": "3", "COLOUR": "blue", "LONGER": "blueish "}
    ]
