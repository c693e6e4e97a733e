"""The benchmarks of forecasts, deadlines and odds, in small."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import calibration_native
import calibration_sweeps
import deadlines
import odds


@pytest.mark.slow
def test_deadlines_are_met_at_little_more_than_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "FACTORS", (1.5,))
    (case,) = deadlines.measure(["successive_halving"], 2, (2, 8, deadlines.MOST))
    assert case["sweeps"] == case["met"] == 2
    assert case["least_cost_ratio"] <= case["cost_ratio"] < 1.0, "trials run only on devices that are paid for"
    assert case["work_device_hours"] <= case["device_hours"] < 1.25 * case["work_device_hours"]
    figures = deadlines.summary([case, {**case, "device_hours": 0.0, "met": 1}])
    assert (figures["met"], figures["sweeps"]) == (3, 4)
    assert figures["cost_ratio_in_all"]["successive_halving"] == pytest.approx(case["cost_ratio"] / 2, abs=0.002)
    least = figures["least_cost_ratio_in_all"]["successive_halving"]
    assert least == pytest.approx(case["least_cost_ratio"], abs=0.002)


def test_forecasts_of_groups_are_compared_with_their_ends() -> None:
    runs = [calibration_native.run_group(calibration_native.scenario_of(seed)) for seed in (1, 4)]
    taken = [each for run in runs for each in run.taken]
    assert [each.share for each in taken] == list(calibration_native.SHARES) * 2
    figures = calibration_native.figures_of(taken)
    assert figures["forecasts"] == 6 and 0.5 < figures["median_over_true"] < 2.0
    assert figures["covered_by_0.1"] <= figures["covered_by_0.5"] <= figures["covered_by_0.9"]
    assert 0.0 < figures["pinball_over_eta"] < 1.0
    named = calibration_native.odds_of_the_first(taken)
    assert sum(found["forecasts"] for found in named.values()) == 6
    speed = calibration_native.measure_speed(trials=100, runs=2)
    assert set(speed) == {"all_run", "64_run", "all_run_some_end_early", "64_run_some_end_early"}


def test_forecasts_of_sweeps_are_compared_with_their_ends() -> None:
    figures = calibration_sweeps.measure(4, with_real=False)["simulated"]
    assert figures["all"]["forecasts"] == 12 and figures["by_share"]["0.5"]["forecasts"] == 4
    assert all(figures["by_algorithm"][name]["forecasts"] == 3 for name in calibration_sweeps.ALGORITHMS)
    covered = [figures["all"][f"covered_by_{odds}"] for odds in calibration_sweeps.ODDS]
    assert covered == sorted(covered) and covered[-1] >= 0.5
    assert 0.4 < figures["all"]["actual_over_median"] < 2.5


def test_known_odds_change_nothing_where_runtimes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odds, "ERRORS", (0.0, 1.0))
    console = Console(quiet=True)
    certain, uncertain = odds.widening(console, seeds=3)
    assert certain["ratio"] == 1.0 and certain["resizes_with"] == certain["resizes_without"]
    assert 0.7 < uncertain["ratio"] < 1.3
    (queue,) = odds.order(console, draws=10)
    assert queue["at_equal_odds"] < 1.0
