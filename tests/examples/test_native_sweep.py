"""The three data sets under fluid.run, at the smallest scale."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
from native_sweep import TASKS, main, summary
from tuning.scales import SCALES

import fluid

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "algorithm",
    ["asha", "tpe", *(pytest.param(name, marks=pytest.mark.long) for name in ("sha", "hyperband", "random"))],
)
@pytest.mark.parametrize("workload", TASKS)
def test_it_runs(workload: str, algorithm: str, data: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    options = ["--workload", workload, "--algorithm", algorithm, "--scale", "tiny", "--data", data, "--devices", "2"]
    result = main([*options, "--run-dir", str(tmp_path / "run")])
    scale, task = SCALES[workload]["tiny"], TASKS[workload]
    assert len(result.trials) == scale.samples
    lengths = sorted(trial.iteration for trial in result.trials)
    assert lengths[-1] == scale.max_t
    if algorithm == "random":
        assert set(lengths) == {scale.max_t}
    else:
        assert lengths[0] == 1
    assert not result.failures
    assert math.isfinite(result.best.value)
    assert f"{len(result.trials)} trials" in summary(result)
    stored = fluid.load(tmp_path / "run")
    assert (stored.metric, stored.mode) == (task.metric, task.mode)
    assert stored.best.value == result.best.value
    assert stored.best.trial_id == result.best.trial_id
    assert stored.best.checkpoint is not None
    assert stored.best.checkpoint_iteration == stored.best.iteration
    assert {trial.trial_id: trial.state for trial in stored.trials} == {
        trial.trial_id: trial.state for trial in result.trials
    }
