"""A sweep whose trials report the metric later than the first rung, and that goes on in a later call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vain_trainables as trainables

import fluid
from fluid import SweepResult
from fluid.search import uniform


def test_a_sweep_whose_metric_comes_late_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sweep(samples: int, **options: Any) -> SweepResult:
        space = {"x": uniform(0.0, 1.0)}
        arguments = {"metric": "loss", "budget": 9, "samples": samples, "name": "late", "run_dir": tmp_path / "run"}
        output = fluid.Output(verbose=0)
        return fluid.run(trainables.validates_every_third, space, **arguments, output=output, **options)

    first = sweep(9)
    caplog.clear()
    second = sweep(18, resume=True)
    assert "has reported a number" not in caplog.text, "the first call has got the metric"
    assert len(second.trials) == 18 and {trial.state for trial in second.trials} <= {"DONE", "STOPPED"}
    lengths = [trial.iteration for trial in second.trials]
    assert min(lengths) == 3 and max(lengths) == 9
    assert all(mine.iteration >= other.iteration for mine, other in zip(second.trials, first.trials, strict=False))
