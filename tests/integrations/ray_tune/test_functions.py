"""Functions for Ray Tune on Fluid go on from the checkpoints that they report, and no iteration is reported twice."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune import Checkpoint, CheckpointConfig

from fluid import tune
from fluid.lane.protocol import LaneOptions

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LENGTH = 9


def train(config: dict[str, Any]) -> None:
    """Each value follows from the one before; its first process dies where its config says."""
    value, step = 1, 0
    checkpoint = tune.get_checkpoint() if config["asks"] else None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            value, step = json.loads((Path(folder) / "state.json").read_text())
    notes = Path(config["folder"], f"{config['x']}")
    with notes.open("a") as file:
        file.write(f"begins at {step}\n")
    while step < LENGTH:
        time.sleep(0.05)
        value, step = value * 31 % 1_000_003, step + 1
        if step == config.get("dies_at") and notes.read_text().count("begins") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % config["every"]:
            tune.report({"value": value, "step": step})
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps([value, step]))
            tune.report({"value": value, "step": step}, checkpoint=Checkpoint.from_directory(folder))


def value_at(step: int) -> int:
    return pow(31, step, 1_000_003)


@pytest.fixture
def saving(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An executor whose lanes save each state that there is."""
    from fluid import FluidExecutor

    always = functools.partial(LaneOptions, save_after=0.0, save_ratio=0.0)
    monkeypatch.setattr("fluid.backends.hosts.host.LaneOptions", always)
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "fluid", verbose=0) as made:
        yield made


def run(executor: Any, folder: Path, **options: Any) -> Any:
    config = {"x": tune.grid_search([0, 1, 2]), "folder": str(folder), "asks": True, "every": 1, **options}
    settings = {"config": config, "checkpoint_config": CheckpointConfig(num_to_keep=2)}
    return sweep(train, folder / "sweep", executor, settings)


def begun(folder: Path, trial: int) -> list[int]:
    return [int(line.split()[-1]) for line in (folder / str(trial)).read_text().splitlines()]


@pytest.mark.parametrize("every", [1, 3])
def test_a_function_whose_process_dies_goes_on_from_its_newest_checkpoint(
    saving: Any, tmp_path: Path, every: int
) -> None:
    done = run(saving, tmp_path, every=every, dies_at=6)
    assert done.statuses == ["TERMINATED"] * 3
    for index, trial in enumerate(done.trials):
        assert trial.iterations == list(range(1, LENGTH + 1)), "none is missing, and none came twice"
        assert [row["value"] for row in trial.rows] == [value_at(step) for step in range(1, LENGTH + 1)]
        assert all(row["step"] == row["training_iteration"] for row in trial.rows)
        first, second = begun(tmp_path, index)
        assert first == 0 and second in ([4, 5] if every == 1 else [3])


def test_checkpoints_of_a_function_that_asks_for_none_are_not_gone_on_from(saving: Any, tmp_path: Path) -> None:
    done = run(saving, tmp_path, asks=False, dies_at=6)
    for index, trial in enumerate(done.trials):
        assert trial.status == "TERMINATED" and set(trial.iterations) == set(range(1, LENGTH + 1))
        assert all(row["step"] == row["training_iteration"] for row in trial.rows)
        assert begun(tmp_path, index) == [0, 0], "it begins again"


def test_a_function_leaves_a_device_that_is_drained(saving: Any, tmp_path: Path) -> None:
    import threading

    def drain() -> None:
        while not all((tmp_path / str(trial)).exists() for trial in (0, 1)):
            time.sleep(0.02)
        time.sleep(0.2)
        assert saving.drain(1, 60.0)

    drains = threading.Thread(target=drain)
    drains.start()
    done = run(saving, tmp_path)
    drains.join()
    assert done.statuses == ["TERMINATED"] * 3
    for trial in done.trials:
        assert trial.iterations == list(range(1, LENGTH + 1))
        assert [row["value"] for row in trial.rows] == [value_at(step) for step in range(1, LENGTH + 1)]
    starts = [begin for trial in range(3) for begin in begun(tmp_path, trial)]
    assert len(starts) == 4 and max(starts) > 0, "one went on from its state on the other device"
