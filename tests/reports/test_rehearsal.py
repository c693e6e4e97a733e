"""Figures, table and picture of rehearsed sweeps."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from fluid.errors import InvalidFieldError
from fluid.rehearsal.outcome import SweepOutcome
from fluid.reports.tables.rehearsal import Spread, ValueScale, figures_of, knee_of, rehearsal_table
from fluid.results.metrics import Goal


def outcome(
    makespan_s: float, *trace: tuple[float, float], devices: int = 1, metric: str | None = "loss", mode: str = "min"
) -> SweepOutcome:
    return SweepOutcome(
        makespan_s=makespan_s,
        device_hours=devices * makespan_s / 3600.0,
        busy_share=0.5,
        trace=trace,
        results=9,
        trials=3,
        devices=devices,
        metric=metric,
        mode=None if metric is None else mode,
    )


def shown(outcomes: dict[str, list[SweepOutcome]], width: int = 160, **options: object) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(rehearsal_table(outcomes, "a sweep", **options))  # type: ignore[arg-type]
    return file.getvalue()


def test_distances_from_the_best() -> None:
    less, more = ValueScale(Goal("loss", True), 0.2), ValueScale(Goal("acc", False), 80.0)
    assert (less.within(0.05), more.within(0.05)) == pytest.approx((0.21, 76.0))
    assert (less.regret(0.3), more.regret(70.0)) == pytest.approx((0.1, 10.0))
    known = ValueScale(Goal("acc", False), 80.0, worst=40.0)
    assert known.within(0.05) == pytest.approx(78.0)
    assert [known.regret(value) for value in (80.0, 60.0, 40.0, 84.0)] == pytest.approx([0.0, 0.5, 1.0, -0.1])
    assert ValueScale(Goal("loss", True), 3.0, worst=3.0).regret(3.0) == 0.0


def test_spreads_with_targets_that_are_never_reached() -> None:
    assert Spread.of([]) is None
    spread = Spread.of([3.0, None, 1.0])
    assert spread == Spread(3.0, 1.0, math.inf)
    assert spread is not None and spread.as_json(2.0) == {"median": 6.0, "low": 2.0, "high": None}


def test_times_are_to_the_best_of_the_same_seed() -> None:
    """Other seeds draw other configs, of which the best is better: that is no target for these."""
    outcomes = {
        "1": [outcome(900.0, (100.0, 1.0), (800.0, 0.5)), outcome(900.0, (100.0, 0.2), (700.0, 0.1))],
        "2": [outcome(500.0, (50.0, 1.0), (400.0, 0.5), devices=2), outcome(500.0, (300.0, 0.1), devices=2)],
    }
    one, two = figures_of(outcomes)
    assert (one.seconds_within(0.05), two.seconds_within(0.05)) == (Spread(750.0, 700.0, 800.0), Spread(350, 300, 400))
    assert "within 5 % of the best of the same seed; the best of all is 0.1" in shown(outcomes)
    # With a known best, and of a single seed, there is one target for all.
    known = figures_of(outcomes, scale=ValueScale(Goal("loss", True), 0.1, worst=1.0))
    assert known[0].seconds_within(0.05) == Spread(math.inf, 700.0, math.inf)
    assert known[0].regret == Spread(pytest.approx(0.2222, abs=1e-3), 0.0, pytest.approx(0.4444, abs=1e-3))
    single = {name: each[:1] for name, each in outcomes.items()}
    assert figures_of(single)[1].seconds_within(0.05) == Spread(400.0, 400.0, 400.0)
    assert "within 5 % of the best of all; the best of all is 0.5" in shown(single)


def test_the_table_has_ranges_and_marks_what_was_never_reached() -> None:
    outcomes = {
        "random": [outcome(3600.0, (1800.0, 0.5)), outcome(7200.0, (3600.0, 0.1))],
        "asha": [outcome(1800.0, (900.0, 0.1)), outcome(1800.0)],
    }
    scale = ValueScale(Goal("loss", True), 0.1, worst=1.1)
    text = shown(outcomes, label="algorithm", scale=scale, price=2.0)
    random, asha = (line for line in text.splitlines() if line.strip().startswith(("random", "asha")))
    assert "90 min (60-120)" in random and "$3.00" in random
    assert "0.2 (0-0.4)" in random  # The regret.
    assert "never (60 min-never)" in random and "never (15 min-never)" in asha
    assert "medians over 2 seeds, with the least and the most; regret: 0 at the best known loss, 0.1" in text
    assert "(" not in "".join(shown(outcomes, label="algorithm", compact=True).splitlines()[3:6])


def test_sweeps_without_a_metric() -> None:
    (row,) = figures_of({"4": [outcome(10.0, metric=None, devices=4)]})
    assert (row.best, row.regret, row.seconds_within(0.05), row.usd, row.devices) == (None, None, None, None, 4)
    text = shown({"4": [outcome(10.0, metric=None)]})
    assert "best" not in text and "to 5 %" not in text
    assert figures_of({"1": []}) == []


def test_the_knee_of_medians() -> None:
    outcomes = {
        str(devices): [outcome(seconds, devices=devices), outcome(2.0 * seconds, devices=devices)]
        for devices, seconds in ((1, 100.0), (2, 52.0), (4, 45.0))
    }
    knee = knee_of(figures_of(outcomes))
    assert knee is not None and (knee.n, knee.makespan) == (2, 78.0)
    assert knee_of(figures_of({"a": outcomes["1"], "b": outcomes["1"]})) is None  # As many devices: no sizes.


@pytest.mark.parametrize("label", ["devices", "algorithm"])
@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_the_picture(label: str, seeds: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fluid.reports.figures.rehearsal import draw_rehearsal, save_rehearsal

    outcomes = {
        str(n): [outcome(100.0 * (seed + 1) / n, (10.0 / n, 1.0), (50.0 / n, 0.1), devices=n) for seed in range(seeds)]
        for n in (1, 4)
    }
    figure = draw_rehearsal(outcomes, "a sweep", label=label, price=2.0)
    assert len(figure.axes) == (3 if label == "devices" else 1)
    assert [line.get_label() for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")] == (
        ["1 device", "4 devices"] if label == "devices" else ["1", "4"]
    )
    save_rehearsal(tmp_path / "a.png", outcomes, label=label)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidFieldError, match="outcomes"):
        draw_rehearsal({})
