"""However a sweep ends, what it returns, what its run folder says and what it prints agree on what has not ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.rehearsal import RehearsalBackend, ReplayedIteration
from fluid.search import uniform


class Steps:
    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["x"] / i}, 10.0) for i in iterations]


@pytest.mark.parametrize("algorithm", ["random", "asha"])
@pytest.mark.parametrize("limit", ["deadline", "time_budget_s"])
@pytest.mark.parametrize("seconds", [9.0, 15.0, 21.0, 35.0])
def test_all_words_on_the_end_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, limit: str, seconds: float
) -> None:
    backend, run_dir = RehearsalBackend(2), tmp_path / "run"
    with fluid.FluidExecutor(backend, run_dir=run_dir, verbose=0) as executor:
        result = fluid.run(
            Steps,
            {"x": uniform(0.0, 1.0)},
            metric="loss",
            algorithm=algorithm,
            samples=4,
            budget=2,
            seed=0,
            executor=executor,
            **{limit: seconds},
        )
    # A trial whose budget is used up is done, everywhere; one that waits for a decision may still be extended.
    assert all(trial.state in ("DONE", "STOPPED") for trial in result.trials if trial.iteration == 2)
    stored = {trial.trial_id: trial for trial in fluid.load(run_dir).trials}
    for trial in result.trials:
        assert stored[trial.trial_id].iteration == trial.iteration
        assert (stored[trial.trial_id].state in ("DONE", "STOPPED")) == (trial.state in ("DONE", "STOPPED"))
    open_trials = [trial for trial in result.trials if trial.state in ("UNFINISHED", "PAUSED")]
    said = re.findall(r"(\d+) of (\d+) trials had not ended", capsys.readouterr().err)
    assert said == ([(str(len(open_trials)), str(len(result.trials)))] if open_trials else [])
    assert result.state == ("UNFINISHED" if open_trials else "DONE")
