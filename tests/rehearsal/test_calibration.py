"""A real run beside the rehearsal that predicted it."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from fluid.rehearsal.calibration import Calibration, kendall_tau
from fluid.rehearsal.outcome import PlayedTrial, SweepOutcome
from fluid.reports.tables.rehearsal import calibration_as_json, calibration_table


def trial(name: str, lr: float, iterations: int = 4, *, ended_s: float = 40.0, seconds: float = 40.0) -> PlayedTrial:
    return PlayedTrial(
        trial_id=name,
        config={"lr": lr},
        state="DONE",
        iterations=iterations,
        value=lr,
        began_s=0.0,
        ended_s=ended_s,
        seconds=seconds,
        device_seconds=seconds,
    )


def outcome(*played: PlayedTrial, **changes: object) -> SweepOutcome:
    made = SweepOutcome(
        makespan_s=80.0,
        device_hours=80.0 / 3600.0,
        busy_share=1.0,
        trace=((10.0, 0.4), (50.0, 0.2)),
        results=sum(each.iterations for each in played),
        trials=len(played),
        devices=1,
        metric="loss",
        mode="min",
        name="a sweep",
        played=played,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_trials_are_matched_by_id_or_else_by_config() -> None:
    first, second = trial("a", 0.2), trial("b", 0.4)
    same = Calibration.of(outcome(first, second), outcome(second, first))
    assert [(one.trial_id, other.trial_id) for one, other in same.matched] == [("b", "b"), ("a", "a")]
    other = Calibration.of(outcome(trial("x", 0.4), trial("y", 0.3)), outcome(first, second))
    assert [(one.trial_id, other.trial_id) for one, other in other.matched] == [("x", "b")]
    assert other.same_decisions == 0.5


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_target_is_near_the_worse_of_the_two_best(mode: str) -> None:
    predicted = outcome(trial("a", 0.2), mode=mode, trace=((10.0, 0.4), (50.0, 0.4)))
    real = outcome(trial("a", 0.2), mode=mode, trace=((20.0, 0.2),))
    target = Calibration.of(predicted, real).target
    assert target == pytest.approx(0.42 if mode == "min" else 0.19)
    times = next(each for each in Calibration.of(predicted, real).figures if each.name == "time to target")
    assert (times.predicted, times.real, times.error) == (10.0, 20.0, -0.5)


def test_what_explains_the_difference() -> None:
    played = (trial("a", 0.2), trial("b", 0.4, ended_s=80.0))
    predicted = outcome(*played)
    assert Calibration.of(predicted, predicted).explain() == ["Nothing differs by 2% or more."]
    slow = outcome(*(replace(each, device_seconds=50.0) for each in played), makespan_s=100.0)
    assert "Iterations took 1.25x the device-seconds that were predicted." in Calibration.of(predicted, slow).explain()
    more = outcome(played[0], trial("b", 0.4, 6, seconds=60.0), makespan_s=100.0)
    calibration = Calibration.of(predicted, more)
    assert "The run did 10 iterations, the rehearsal 8 (+25%)." in calibration.explain()
    assert [other.trial_id for _, other in calibration.differing] == ["b"]
    late = Calibration.of(predicted, outcome(*played, makespan_s=90.0, lead_s=10.0)).explain()
    assert any("began 10 s later than predicted" in line for line in late)
    # Nothing of these differs, but the makespan does.
    unlike = Calibration.of(predicted, outcome(*played, makespan_s=120.0)).explain()
    assert unlike == ["Other decisions: seconds, iterations, starts and idle times differ by less than 2% each."]


def test_orders() -> None:
    rng = np.random.default_rng(0)
    pairs = [tuple(float(value) for value in rng.integers(0, 6, 2)) for _ in range(40)]
    signs = [(np.sign(a - c), np.sign(b - d)) for (a, b), (c, d) in combinations(pairs, 2)]
    untied = [sum(each[side] != 0 for each in signs) for side in (0, 1)]
    expected = sum(one * other for one, other in signs) / math.sqrt(untied[0] * untied[1])
    assert kendall_tau([*pairs, (None, 1.0), (2.0, None)]) == pytest.approx(expected)
    assert kendall_tau([(1, 2), (2, 3), (3, 9)]) == 1.0
    assert kendall_tau([(1, 2), (2, 1)]) == -1.0
    for ordered in ([], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)]):
        assert kendall_tau(ordered) is None


def test_the_table_lists_trials_that_were_decided_otherwise() -> None:
    predicted = outcome(*(trial(f"t{n}", 0.1 * n) for n in range(10)))
    real = outcome(*(trial(f"t{n}", 0.1 * n, 5 if n else 4) for n in range(10)), makespan_s=100.0)
    calibration = Calibration.of(predicted, real)
    file = io.StringIO()
    Console(file=file, width=100).print(calibration_table(calibration, "a run beside its rehearsal"))
    text = file.getvalue()
    assert "makespan" in text and "-20.0 %" in text
    assert "Decisions: 1 of 10 trials reached the same iteration (10 %)" in text
    assert "t1: rehearsed 4, real 5" in text and "and 1 more" in text
    figures = calibration_as_json(calibration)
    assert figures["figures"]["makespan"] == {"rehearsed": 80.0, "real": 100.0, "error": pytest.approx(-0.2)}
    assert len(figures["differing"]) == 9
