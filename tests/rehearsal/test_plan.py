"""What a rehearsal in force changes of the executors of a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing
from fluid.rehearsal.outcome import outcome_of
from fluid.results.run_files import read_facts


class Source:
    """Replays trials of any trainable."""

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["lr"] / i}, 60.0) for i in iterations]


def never_run(config: Mapping[str, Any]) -> Any:
    raise AssertionError("a rehearsal runs no trainable")
    yield {}


class Listening:
    """A logger that must not hear of what has not happened."""

    is_logger = True

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a rehearsal tells loggers nothing: {name}")


def test_devices_folder_and_options_are_the_plans(tmp_path: Path) -> None:
    began: list[Path] = []
    plan = RehearsalPlan(
        devices=3, source=Source(), options=(("planner", "fifo"),), folder=tmp_path / "out", began=began.append
    )
    asked = tmp_path / "asked"
    for _ in range(2):
        with rehearsing(plan), fluid.FluidExecutor(backend="local", devices=1, run_dir=asked, verbose=0) as executor:
            trials = [fluid.Trial(never_run, {"lr": lr}, budget=2) for lr in (0.1, 0.2, 0.3)]
            executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
    assert began == [tmp_path / "out" / "1", tmp_path / "out" / "2"]
    assert not asked.exists()
    assert read_facts(began[0])["planner"] == "fifo"
    assert (outcome_of(began[0], "loss").devices, outcome_of(began[0], "loss").makespan_s) == (3, 120.0)


def test_loggers_hear_nothing(tmp_path: Path) -> None:
    plan = RehearsalPlan(devices=1, source=Source(), folder=tmp_path)
    with rehearsing(plan):
        loggers: Any = [Listening()]
        with fluid.FluidExecutor(loggers=loggers, metrics_port=0, verbose=0) as executor:
            assert executor.metrics_address is None
            executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(never_run, {"lr": 0.1})])).wait()


def test_nothing_is_resumed(tmp_path: Path) -> None:
    space = {"lr": fluid.search.uniform(0.1, 1.0)}
    for _ in range(2):
        with rehearsing(RehearsalPlan(devices=2, source=Source(), folder=tmp_path / "out")):
            asked = {"run_dir": tmp_path / "asked", "name": "sweep", "resume": True}
            result = fluid.run(never_run, space, metric="loss", samples=3, budget=3, **asked)
        assert len(result.trials) == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1", "2"]
    plan = RehearsalPlan(devices=1, source=Source())
    with rehearsing(plan), pytest.raises(InvalidFieldError, match="cannot be resumed in a rehearsal"):
        fluid.FluidExecutor.resume(tmp_path / "out" / "1")
