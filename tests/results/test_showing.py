from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluid.engine.events import Failure
from fluid.results.best import merit_of, ranked
from fluid.results.metrics import Goal
from fluid.results.records import Result, TrialResult
from fluid.results.sweep import SweepResult


def trial(name: str, *losses: Any, state: str = "DONE", **config: Any) -> TrialResult:
    results = tuple(
        Result(
            trial_id=name,
            iteration=number,
            metrics={"loss": loss, "note": "<b>"},
            seconds=0.5,
            width=1.0,
            device_ids=(0,),
            config=config,
        )
        for number, loss in enumerate(losses, 1)
    )
    return TrialResult(
        trial_id=name,
        group="g",
        config=config,
        state=state,
        iteration=len(results),
        metrics=results[-1].metrics if results else {},
        results=results,
        failure=Failure("error", "ValueError: <no>") if state == "FAILED" else None,
    )


def sweep(*trials: TrialResult, metric: Any = "loss", mode: Any = "min") -> SweepResult:
    return SweepResult(trials=trials, metric=metric, mode=mode, run_dir=Path("runs/x"), name="s", state="DONE")


def test_a_sweep_says_what_is_best() -> None:
    shown = sweep(trial("a", 0.5, 0.25, 0.75, lr=0.1), trial("bad", 0.0, state="FAILED"))
    assert repr(shown).splitlines() == [
        "SweepResult 's': 2 trials (1 DONE, 1 FAILED); DONE, in runs/x",
        "  best: loss=0.25 (less is better) at iteration 2 of trial 'a', config={'lr': 0.1}",
        "  failed first: trial 'bad', ValueError: <no>",
    ]
    assert repr(shown.best) == "BestTrial(loss=0.25 (less is better) at iteration 2 of trial 'a', config={'lr': 0.1})"
    assert repr(shown.trials[0]).startswith("TrialResult('a', DONE, iteration=3, metrics={'loss': 0.75")
    assert repr(sweep(metric=None, mode=None)) == "SweepResult 's': 0 trials; DONE, in runs/x"
    assert len(repr(trial("a", blob="x" * 10_000))) < 500


def test_a_notebook_shows_a_table_with_the_best_first() -> None:
    html = sweep(*(trial(f"t{n}", 100.0 - n, lr=f"<{n}>") for n in range(12)))._repr_html_()
    assert html.index("t11") < html.index("t10") and "<td>89</td>" in html and "2 more trials" in html
    assert "<td>&lt;11&gt;</td>" in html and "<b>" not in html
    assert "<th>loss</th><th>note</th>" in html
    assert "<tbody></tbody>" in sweep(metric=None, mode=None)._repr_html_()


def test_failed_trials_and_those_without_a_value_are_last() -> None:
    trials = [trial("bad", 0.0, state="FAILED"), trial("none"), trial("a", 2.0, float("nan")), trial("b", 1.0, 3.0)]
    for less in (True, False):
        found = ranked(trials, lambda one, less=less: merit_of(one, Goal("loss", less)))  # type: ignore[misc]
        assert [one.trial_id for one in found] == ["b", "a", "none", "bad"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "0.1", True, None, [0.1], 10**400])
def test_what_is_no_finite_number_is_never_best(value: Any) -> None:
    assert sweep(trial("a", value, 5.0), trial("b", value)).best.value == 5.0


def test_several_metrics_have_a_front() -> None:
    both = ("loss", "cost")

    def point(name: str, *pairs: tuple[float, float]) -> TrialResult:
        made = trial(name, *(loss for loss, _ in pairs))
        results = tuple(
            Result(**{**{f: getattr(r, f) for f in Result.__slots__}, "metrics": {"loss": loss, "cost": cost}})
            for r, (loss, cost) in zip(made.results, pairs, strict=True)
        )
        return TrialResult(trial_id=name, state="DONE", results=results, metrics=results[-1].metrics)

    found = sweep(
        point("a", (1.0, 5.0), (0.5, 6.0)),
        point("b", (0.5, 6.0), (3.0, 1.0)),
        point("c", (3.0, 2.0)),
        metric=both,
        mode=("min", "min"),
    )
    assert [(one.trial_id, one.iteration, one.value) for one in found.pareto] == [
        ("a", 2, (0.5, 6.0)),
        ("a", 1, (1.0, 5.0)),
        ("b", 2, (3.0, 1.0)),
    ]
    assert (
        repr(found.pareto[0])
        == "BestTrial(loss=0.5 (less is better), cost=6 (less is better) at iteration 2 of trial 'a', config={})"
    )
    assert "best" not in repr(found)
