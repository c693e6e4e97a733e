"""``cleanup()`` of trials in an executor that stays open: it has ended when the sweep returns, unless it hangs."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune.schedulers import ASHAScheduler

from fluid.integrations.ray_tune.controller import bridge as controller_bridge

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Longest that the clean-up of a test waits, in seconds.
PATIENCE = 20.0


class Cleaned(Climber):
    """Takes a while to clean up, and notes when it has; waits until ``held`` in its folder is gone."""

    def cleanup(self) -> None:
        time.sleep(0.05)
        folder, until = Path(self.config["folder"]), time.monotonic() + PATIENCE
        while (folder / "held").exists() and time.monotonic() < until:
            time.sleep(0.01)
        (folder / f"cleaned-{self.trial_id}").touch()


@pytest.mark.parametrize("way", ["done", "stopped", "by the scheduler"])
def test_all_trials_are_cleaned_up_when_the_sweep_returns(executor: Any, tmp_path: Path, way: str) -> None:
    options: dict[str, Any] = {"config": {"x": 1.0, "folder": str(tmp_path)}, "num_samples": 10}
    if way == "done":
        options["config"]["ends_at"] = 3
    elif way == "stopped":
        options["stop"] = {"training_iteration": 3}
    else:
        options["scheduler"] = ASHAScheduler("training_iteration", "score", "max", max_t=4, grace_period=1)
    done = sweep(Cleaned, tmp_path / "sweep", executor, options)
    cleaned = {path.name.removeprefix("cleaned-") for path in tmp_path.glob("cleaned-*")}
    assert cleaned == {trial.trial_id for trial in done.analysis.trials}


def test_a_clean_up_that_hangs_is_waited_for_a_while(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(controller_bridge, "_CLEANUP_S", 0.2)
    (tmp_path / "held").touch()
    options = {"config": {"x": 1.0, "ends_at": 2, "folder": str(tmp_path)}}
    with caplog.at_level(logging.WARNING, "fluid"):
        done = sweep(Cleaned, tmp_path / "sweep", executor, options)
    assert done.statuses == ["TERMINATED"]
    assert "1 trials have not been cleaned up within 0.2 s" in caplog.text
    assert not list(tmp_path.glob("cleaned-*"))
    (tmp_path / "held").unlink()
