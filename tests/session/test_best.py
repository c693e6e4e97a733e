from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fluid.executor import FluidExecutor
from fluid.results.best import BestSoFar, BestTracker
from fluid.trainables.encoded_metrics import encode_metrics
from fluid.trialgroup import Search, Shown, Trial, TrialGroup, TrialState

A, B = Trial(print, {"lr": 0.1}, trial_id="a"), Trial(print, {"lr": 0.2}, trial_id="b")


def tracked(search: Search | None, *results: tuple[Trial, int, Any]) -> BestTracker:
    tracker = BestTracker(search)
    for trial, iteration, metrics in results:
        tracker.hear(trial, iteration, encode_metrics(metrics).numbers)
    return tracker


def at(tracker: BestTracker) -> tuple[str, int, float] | None:
    best = tracker.best()
    return None if best is None else (best.trial_id, best.iteration, best.value)


def test_the_best_iteration_of_any_trial_is_kept() -> None:
    results = [(A, 1, {"loss": 3.0}), (B, 1, {"loss": 1.0}), (B, 2, {"loss": 2.0}), (A, 2, {"loss": 1.5})]
    assert tracked(Search("loss", "min"), *results).best() == BestSoFar(
        metric="loss", mode="min", value=1.0, trial_id="b", iteration=1, config={"lr": 0.2}
    )
    assert at(tracked(Search("loss", "max"), *results)) == ("a", 1, 3.0)


def test_the_best_trial_may_be_shown_otherwise_later() -> None:
    tracker = tracked(Search("loss"), (A, 1, {"loss": 1.0}), (B, 1, {"loss": 2.0}))
    assert at(tracker) == ("a", 1, 1.0)
    tracker.show(Trial(print, {}, trial_id="a", shown=Shown("a", {"suggested": 0.3})))
    best = tracker.best()
    assert best is not None and best.config == {"suggested": 0.3}
    tracker.show(Trial(print, {}, trial_id="unheard of"))
    assert at(tracker) == ("a", 1, 1.0)


def test_the_first_number_that_is_no_bookkeeping_counts_without_a_search() -> None:
    tracker = tracked(None, (A, 1, {"epoch": 1, "note": "x", "done": False, "val_acc": 0.5, "loss": 1.0}))
    tracker.hear(B, 1, {"loss": 0.0, "val_acc": 0.75})
    best = tracker.best()
    assert best is not None and (best.metric, best.mode, best.value) == ("val_acc", "max", 0.75)
    assert tracked(None, (A, 1, {"epoch": 1, "text": "x"})).best() is None
    nested = tracked(None, (A, 1, {"epoch": 1, "eval": {"loss": 2.0}})).best()
    assert nested is not None and nested.metric == "eval/loss"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "low", True, [1.0], np.array([1.0, 2.0])])
def test_what_is_no_finite_number_does_not_count(bad: Any) -> None:
    assert at(tracked(Search("loss"), (A, 1, {"loss": bad}), (A, 2, {}), (B, 1, {"loss": 7}))) == ("b", 1, 7.0)


@pytest.mark.parametrize(
    "number",
    [2, np.float32(2.0), np.float64(2.0), np.array(2.0), np.int64(2), np.array([2.0]), Decimal(2), Fraction(2)],
)
def test_numbers_of_other_libraries_count(number: Any) -> None:
    assert at(tracked(Search("loss"), (A, 1, {"loss": number}))) == ("a", 1, 2.0)


def test_nested_metrics_are_found_by_their_path() -> None:
    assert at(tracked(Search("eval/loss"), (A, 1, {"eval": {"loss": 2.0}}))) == ("a", 1, 2.0)


def test_a_failed_trial_is_best_only_if_all_have_failed() -> None:
    tracker = tracked(Search("loss"), (A, 1, {"loss": 1.0}), (B, 1, {"loss": 2.0}))
    assert at(tracker) == ("a", 1, 1.0)
    tracker.end("a", TrialState.FAILED)
    assert at(tracker) == ("b", 1, 2.0)
    tracker.end("b", TrialState.FAILED)
    best = tracker.best()
    assert best is not None and (best.trial_id, best.failed) == ("a", True)
    tracker.enter(B)  # It goes on.
    assert at(tracker) == ("b", 1, 2.0)
    alone = tracked(Search("loss"), (A, 1, {"loss": 1.0}))
    alone.end("a", TrialState.FAILED)
    assert at(alone) == ("a", 1, 1.0)
    alone.enter(B)
    assert at(alone) is None, "one that runs may still be better"
    alone.hear(B, 1, {"loss": 5.0})
    assert at(alone) == ("b", 1, 5.0)


def test_what_the_submitter_says_counts() -> None:
    tracker = tracked(Search("loss"), (A, 1, {"loss": 1.0}), (B, 1, {"loss": 2.0}))
    tracker.end("a", TrialState.STOPPED)
    tracker.say("a", "FAILED")
    assert at(tracker) == ("b", 1, 2.0)
    tracker.say("a", "DONE")
    assert at(tracker) == ("a", 1, 1.0)


def test_of_equal_values_that_of_the_trial_submitted_first_is_the_best() -> None:
    tracker = BestTracker(Search("loss"))
    tracker.enter(A)
    tracker.enter(B)
    tracker.hear(B, 1, {"loss": 1.0})
    assert at(tracker) == ("b", 1, 1.0)
    tracker.hear(A, 3, {"loss": 1.0})
    tracker.hear(A, 4, {"loss": 1.0})
    assert at(tracker) == ("a", 3, 1.0)


def test_what_a_forgotten_trial_reported_counts_on() -> None:
    tracker = tracked(Search("loss"), (A, 1, {"loss": 1.0}), (B, 1, {"loss": 2.0}))
    tracker.forget("a")
    assert at(tracker) == ("a", 1, 1.0)
    tracker.end("b", TrialState.FAILED)
    tracker.forget("b")
    assert at(tracker) == ("a", 1, 1.0)
    failed = tracked(Search("loss"), (A, 1, {"loss": 1.0}))
    failed.end("a", TrialState.FAILED)
    failed.forget("a")
    assert at(failed) == ("a", 1, 1.0)


def test_a_trial_of_a_search_is_shown_by_its_own_name() -> None:
    shown = Shown("trial 7", {"x": 1}, iterations=4, metrics="result")
    tracker = tracked(Search("loss"), (Trial(print, {"blob": 0}, shown=shown), 2, {"result": {"loss": 1.0}, "loss": 0}))
    best = tracker.best()
    assert best is not None and (best.trial_id, best.iteration, best.config) == ("trial 7", 6, {"x": 1})


def count_down(config: dict[str, Any]) -> Any:
    for step in range(3):
        yield {"loss": config["x"] - step}


@pytest.mark.slow
def test_a_session_that_is_resumed_knows_the_best_of_before(tmp_path: Path) -> None:
    with FluidExecutor("local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(count_down, {"x": x}, budget=3, trial_id=f"t{x}") for x in (5.0, 7.0)]
        executor.submit_trialgroup(TrialGroup(trials, search=Search("loss", "min"))).wait()
        before = executor.status().groups[0].best
    assert before == BestSoFar(metric="loss", mode="min", value=3.0, trial_id="t5.0", iteration=3, config={"x": 5.0})
    with FluidExecutor.resume(tmp_path / "run", backend="local", devices=1, verbose=0) as executor:
        assert executor.status().groups[0].best == before
        assert executor.status().run_dir == tmp_path / "run"
