"""Forecasts in reports: the newest of a session that runs, and how those of one that has ended compare with its end."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.executor import FluidExecutor
from fluid.reports.analysis.forecasts import WrittenForecast, compared, forecast_text
from fluid.reports.page.data import page_data
from fluid.reports.run.loader import RunReader, load_run
from fluid.reports.tables.run import forecasts_json
from fluid.trialgroup import Trial, TrialGroup
from tests.json_fields import undescribed

Sessions = Callable[..., Any]
Captured = pytest.CaptureFixture[str]
#: When sessions begin on their clock, as in conftest.
ZERO = 5000.0


def forecast_at(at: float, middle: float, high: float, group: str = "0", age: float = 0.0) -> str:
    seconds = {"0.1": middle / 2.0, "0.5": middle, "0.9": high}
    return json.dumps({"at": ZERO + at, "group": group, "seconds": seconds, "age_s": age}) + "\n"


def written(session: Sessions, *lines: str, **facts: Any) -> Path:
    """A trial of four iterations of 10 s, which is done."""
    made = session({"sweep": [Trial(print, budget=4, trial_id="a")]}, **facts)
    made.results(*(("a", k, 10.0 * k - 10.0, 10.0 * k, 1.0, (0,), {"loss": 1.0 / k}) for k in range(1, 5)))
    made.end("a", iteration=4)
    path = Path(made.close())
    (path / "forecasts.jsonl").write_text("".join(lines))
    return path


def test_forecasts_are_compared_with_the_end(session: Sessions, capsys: Captured) -> None:
    lines = [forecast_at(5.0, 20.0, 25.0), forecast_at(10.0, 25.0, 40.0), forecast_at(21.0, 18.0, 20.0)]
    path = written(session, *lines)
    found = load_run(path).compared_forecasts
    # At 20 s the forecast of 10 s is the newest.
    assert [(each.share, each.middle, each.high, each.is_covered) for each in found] == [
        (0.25, 35.0, 50.0, True),
        (0.5, 35.0, 50.0, True),
        (0.75, 39.0, 41.0, True),
    ]
    assert main(["report", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "forecast of sweep at 50 %: 50 % by 35 s, 90 % by 50 s; ended at 40 s, in time" in out
    assert page_data([load_run(path)])["runs"][0]["forecasts"] == load_run(path).forecast_lines
    assert main(["report", str(path), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["forecasts"]
    assert (data["group"], data["at_s"], data["end_s"]) == ("0", 21.0, {"0.1": 30.0, "0.5": 39.0, "0.9": 41.0})
    assert data["compared"][0] == {"share": 0.25, "by_50_s": 35.0, "by_90_s": 50.0, "ended_s": 40.0}
    assert undescribed({*data, *data["compared"][0]}, forecasts_json) == set()


def test_a_forecast_that_was_too_early_says_by_how_much(session: Sessions) -> None:
    (one, *_) = load_run(written(session, forecast_at(1.0, 20.0, 29.0))).compared_forecasts
    assert not one.is_covered and one.text.endswith("ended at 40 s, 10 s late")


@pytest.mark.parametrize(
    "line",
    ["{}", '{"at": 5001.0, "group": "0"}', '{"at": "x", "seconds": {}}', '{"at": 1, "seconds": {"x": 1, "2": 3}}', "["],
)
def test_lines_that_are_none_are_passed_over(session: Sessions, line: str) -> None:
    path = written(session, line + "\n", forecast_at(10.0, 25.0, 40.0))
    assert load_run(path).forecasts["0"][-1] == WrittenForecast(10.0, {0.1: 12.5, 0.5: 25.0, 0.9: 40.0})
    assert len(load_run(path).forecast_lines) == 3


def test_before_the_first_forecast_there_is_nothing_to_compare() -> None:
    late = WrittenForecast(30.0, {0.5: 5.0, 0.9: 10.0})
    assert compared("g", [late], 0.0, 40.0)[0].share == 0.75
    assert compared("g", [WrittenForecast(1.0, {0.5: 5.0})], 0.0, 40.0) == []
    assert compared("g", [], 0.0, 40.0) == []


def test_times_of_day() -> None:
    clock = datetime(2026, 1, 31, 12, 0, 0)
    one = WrittenForecast(60.0, {0.5: 30.0, 0.9: 90.0}, age_s=3.0)
    assert forecast_text(one, clock, 65.0) == "90 % by 12:02:30 (50 % by 12:01:30; age 8 s)"
    assert forecast_text(one, None) == "90 % by 150 s (50 % by 90 s)"
    far = WrittenForecast(60.0, {0.5: 7200.0, 0.9: 50000.0})
    assert forecast_text(far, clock) == "90 % by 2026-02-01 01:54 (50 % by 14:01)"
    assert forecast_text(WrittenForecast(0.0, {0.9: 1e300, 0.5: 1.0}), clock).startswith("90 % by ")
    assert forecast_text(WrittenForecast(0.0, {0.9: 1.0}), clock) == ""


def test_new_forecasts_are_read_on(session: Sessions) -> None:
    path = written(session, forecast_at(1.0, 20.0, 29.0))
    reader = RunReader(path)
    reader.read()
    with (path / "forecasts.jsonl").open("a") as file:
        file.write(forecast_at(15.0, 20.0, 25.0))
    run = reader.read_on()
    assert run is not None and run.forecasts == load_run(path).forecasts and len(run.forecasts["0"]) == 2


def train(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    for step in range(20):
        time.sleep(0.1)
        yield {"loss": 1.0 / (step + 1)}


@pytest.mark.slow
def test_a_session_writes_its_forecasts_and_a_report_shows_the_newest(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "run"
    with FluidExecutor(backend="local", devices=2, run_dir=path, verbose=0) as executor:
        handle = executor.submit_trialgroup(
            TrialGroup([Trial(train, {"lr": lr}, budget=20) for lr in (1, 2, 3)], name="live")
        )
        for number, _ in enumerate(handle.results()):
            if number == 25:
                assert main(["report", str(path), "--json"]) == 0
                run = load_run(path)
    (line,) = run.forecast_lines
    assert run.is_running and line.startswith("forecast of live: 90 % by ") and "age" in line
    assert json.loads(capsys.readouterr().out)["forecasts"][0]["end_s"]["0.9"] > 0.0
    ended = load_run(path)
    assert not ended.is_running and ended.read_at is None
    times = [each.at for each in ended.forecasts["0"]]
    assert times == sorted(times) and all(b - a >= 0.99 for a, b in itertools.pairwise(times))
    assert ended.compared_forecasts and ended.compared_forecasts[0].ended == pytest.approx(ended.makespan)
