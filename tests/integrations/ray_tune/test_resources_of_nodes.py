"""Requests for what only some nodes of a cluster have."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.tune")
import ray
from ray_drive import OTHER_MACHINE

from fluid import FluidExecutor, InvalidFieldError
from fluid.backends.hosts.folders import HERE

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def both_nodes(two_nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """Devices on the driver's node, which has four CPUs, and on the other one, which has two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
        patch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
        ray.init(two_nodes.address, log_to_driver=False, logging_level="ERROR")
        folder = tmp_path_factory.mktemp("fluid")
        with FluidExecutor(backend="ray", devices=6, run_dir=folder, verbose=0) as made:
            yield made
        ray.shutdown()


@pytest.mark.parametrize(
    ("request_", "host"), [({"cpu": 1, f"node:{OTHER_MACHINE}": 0.001}, OTHER_MACHINE), ({"cpu": 4}, HERE)]
)
def test_trials_run_only_where_there_is_what_they_request(
    both_nodes: FluidExecutor, tmp_path: Path, request_: dict[str, float], host: str
) -> None:
    options = {"config": {"x": 1.0}, "num_samples": 6, "stop": {"training_iteration": 2}}
    done = sweep(Climber, tmp_path, both_nodes, {**options, "resources_per_trial": request_})
    assert done.statuses == ["TERMINATED"] * 6
    ids = {trial.trial_id for trial in done.analysis.trials}
    results = map(json.loads, (both_nodes.run_dir / "results.jsonl").read_text().splitlines())
    used = {device for result in results if result["trial"] in ids for device in result["devices"]}
    assert used and {device.host for device in both_nodes.devices if device.index in used} == {host}


def test_what_no_single_node_has_is_refused(both_nodes: FluidExecutor, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="no node has so much of CPU; one has 4 at most"):
        sweep(Climber, tmp_path, both_nodes, {"config": {"x": 1.0}, "resources_per_trial": {"cpu": 5}})
