"""A deadline that is met is never said to be missed, whatever first iterations and first starts take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, LimitReachedError, Trial, TrialGroup
from fluid.rehearsal import Overheads, RehearsalBackend, ReplayedIteration


class WarmsUp:
    """Its first iteration takes many times the seconds of the others."""

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": 1.0 / i}, config["first" if i == 1 else "later"]) for i in iterations]


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    while True:
        time.sleep(config["seconds"])
        yield {"loss": 1.0}


def said(caplog: pytest.LogCaptureFixture, what: str = "cannot be met") -> list[str]:
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


@pytest.mark.parametrize(
    ("trials", "devices", "first", "overheads", "deadline"),
    [
        (4, 4, 100.0, Overheads(), 410.0),  # All know first iterations alone, all equal.
        (8, 2, 100.0, Overheads(), 1640.0),  # Those of later trials come when others have long ended.
        (12, 2, 10.0, Overheads(server_s=60.0, lane_s=0.5, start_s=0.5), 1920.0),
    ],
    ids=["warm-up", "later warm-ups", "first starts"],
)
def test_first_iterations_and_starts_cause_no_false_alarm(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trials: int,
    devices: int,
    first: float,
    overheads: Overheads,
    deadline: float,
) -> None:
    backend = RehearsalBackend(devices, overheads=overheads)
    made = [Trial(WarmsUp, {"first": first, "later": 10.0, "x": i}, budget=30) for i in range(trials)]
    with FluidExecutor(backend, run_dir=tmp_path / "run", verbose=0, deadline=deadline) as executor:
        handle = executor.submit_trialgroup(TrialGroup(made))
        assert handle.wait()
    assert said(caplog) == []


def test_money_that_suffices_is_not_said_to_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"budget_usd": 0.5, "price_per_device_hour": 1.0}  # 1,800 device-seconds
    made = [Trial(WarmsUp, {"first": 100.0, "later": 10.0, "x": i}, budget=30) for i in range(4)]  # They take 1,560.
    with FluidExecutor(RehearsalBackend(4), run_dir=tmp_path / "run", verbose=0, **options) as executor:
        handle = executor.submit_trialgroup(TrialGroup(made))
        assert handle.wait()
    assert said(caplog, "does not suffice") == []


def test_a_miss_is_said_as_soon_as_second_iterations_tell_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = [Trial(WarmsUp, {"first": 30.0, "later": 30.0, "x": i}, budget=30) for i in range(4)]
    told = []
    with FluidExecutor(RehearsalBackend(4), run_dir=tmp_path / "run", verbose=0, deadline=600.0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(made))
        with pytest.raises(LimitReachedError):
            for result in handle.results():
                told += [result.iteration] if said(caplog) and not told else []
    assert told and told[0] <= 4


@pytest.mark.slow
def test_two_real_trials_that_end_in_time_cause_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = [Trial(train, {"seconds": 2.0, "x": i}, budget=2) for i in range(2)]
    began = time.monotonic()
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0, deadline=12.0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(made))
        assert handle.wait()
    if time.monotonic() - began < 10.0:  # Else it was close: the machine had much else to do.
        assert said(caplog) == []
