from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from fluid.reports.analysis.knee import Knee
from fluid.reports.tables.comparison import advice_text, advise, as_json, comparison_table, sweep_table
from fluid.resources import Cluster
from fluid.simulation.simulation_result import SimulationResult


def result(planner: str, n: int, makespan: float, **fields: Any) -> SimulationResult:
    values: dict[str, Any] = {
        "planner": planner,
        "n": n,
        "makespan": makespan,
        "busy_device_seconds": 0.5 * n * makespan,
        "utilisation": 0.5,
        "lower_bound": 10.0,
        "device_hours": n * makespan / 3600.0,
        "resizes": 3,
        "trials": 9,
        "stopped": 0,
        "groups": (),
        "segments": (),
        "trial_ids": (),
        "cluster": Cluster.of(n),
        "device_changes": (),
    }
    return SimulationResult(**{**values, **fields})


def text_of(thing: RenderableType, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(thing)
    return file.getvalue()


def sweep(planner: str, makespans: dict[int, float]) -> list[SimulationResult]:
    return [result(planner, n, makespan) for n, makespan in makespans.items()]


def test_planners_side_by_side() -> None:
    results = [result("fifo", 4, 60.0), result("portfolio", 4, 20.0, lower_bound=0.0)]
    text = text_of(comparison_table(results, 60.0, "some work"))
    fifo, portfolio = (line.split() for line in text.splitlines() if line.startswith((" fifo", " portfolio")))
    assert fifo == ["fifo", "60", "s", "1.00x", "50", "%", "6.00x", "0.0667", "3"]
    assert portfolio == ["portfolio", "20", "s", "*", "3.00x", "50", "%", "-", "0.0222", "3"]
    assert text.startswith("some work\n")
    assert "stopped" not in text
    assert "stopped" in text_of(comparison_table([result("fifo", 1, 1.0, stopped=2)], 1.0, ""))


def test_a_narrow_comparison() -> None:
    text = text_of(comparison_table([result("portfolio", 4, 20.0)], 60.0, "some work", compact=True), 40)
    assert " portfolio    20 s *     3.00x  50 % " in text.splitlines()


def test_the_best_of_each_number_of_devices_is_marked() -> None:
    results = [*sweep("fifo", {2: 40.0, 1: 80.0}), *sweep("static", {2: 30.0, 1: 80.0})]
    lines = [line.split() for line in text_of(sweep_table(results, "some work")).splitlines()[4:]]
    assert [line[:2] for line in lines[:2]] == [["1", "fifo"], ["static", "80"]]
    assert [line[0] for line in lines if "*" in line[1:]] == ["1", "static", "static"]
    for width in (40, 60):
        assert "static" in text_of(sweep_table(results, "some work", compact=True), width)


def test_the_knee_is_the_end_of_the_last_step_that_pays() -> None:
    # Perfect steps cut by half; these cut by 49 %, 31 %, 10 % and 20 %.
    advice = advise(sweep("portfolio", {1: 100.0, 2: 51.0, 4: 35.0, 8: 31.5, 16: 25.2}))
    assert (advice.fastest.n, advice.cheapest.n, advice.knee.n) == (16, 1, 4)
    assert advice.knee_found.before is not None
    assert advice.knee_found.before[0] == 2
    text = text_of(advice_text(advice), 200)
    assert "fastest   16 GPUs: 25.2 s, 0.112 GPU-hours" in text
    assert "knee      4 GPUs: 35 s, 0.0389 GPU-hours" in text
    assert "adding GPUs pays up to 4. The step from 2 to 4 shortens the makespan by 31 %" in text
    assert "Each step beyond saves less" in text


def test_a_number_that_took_longer_than_fewer_is_passed_over() -> None:
    found = Knee.of([(1, 100.0), (2, 50.0), (4, 90.0), (8, 48.0)])
    assert (found.n, found.before) == (2, (1, 100.0))  # From 4 to 8 devices alone, it would seem to pay.
    found = Knee.of([(1, 100.0), (2, 50.0), (4, 90.0), (8, 25.0)])
    assert (found.n, found.before) == (8, (2, 50.0))
    assert "The step from 2 to 8 shortens the makespan by 50 %" in found.sentence("device")
    assert Knee.of([(1, 0.0), (2, 0.0)]).sentence("device")  # Nothing was run.


def test_half_of_perfect_is_enough_to_pay() -> None:
    assert advise(sweep("portfolio", {4: 100.0, 8: 75.0})).knee.n == 8
    assert advise(sweep("portfolio", {4: 100.0, 8: 75.1})).knee.n == 4


def test_if_no_step_pays_the_knee_is_the_fewest() -> None:
    advice = advise(sweep("portfolio", {4: 100.0, 8: 99.0}))
    assert advice.knee_found.before is None
    assert "Knee: 4 GPUs. Each step to more GPUs saves less" in text_of(advice_text(advice), 200)


def test_fastest_and_cheapest_break_ties_for_the_user() -> None:
    advice = advise(sweep("portfolio", {1: 80.0, 2: 40.0, 4: 40.0}))
    assert (advice.fastest.n, advice.cheapest.n) == (2, 2)


def test_advice_is_about_the_best_planner() -> None:
    results = [*sweep("fifo", {1: 80.0, 2: 80.0}), *sweep("portfolio", {1: 80.0, 2: 41.0})]
    assert advise(results).planner == "portfolio"
    assert [run.n for run in advise(results).runs] == [1, 2]
    assert advise(sweep("fifo", {1: 80.0})).planner == "fifo"


def test_cores_are_not_gpus() -> None:
    advice = advise([result("fifo", 2, 9.0, cluster=Cluster.of(2, kind="cpu"))])
    assert "2 cores" in text_of(advice_text(advice))
    assert "Only one number of devices was simulated" in text_of(advice_text(advice), 200)
    assert "core-hours" in text_of(comparison_table([advice.knee], 9.0, ""))


def test_as_json() -> None:
    results = sweep("portfolio", {1: 80.0, 2: 41.0})
    data = as_json(results, advise(results))
    assert data["advice"] == {"planner": "portfolio", "fastest": 2, "cheapest": 1, "knee": 2}
    assert [entry["devices"] for entry in data["results"]] == [1, 2]
    assert data["results"][1]["makespan_s"] == pytest.approx(41.0)
    assert "advice" not in as_json(results)
