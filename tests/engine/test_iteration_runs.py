"""Runs of short iterations, which a lane tells together: the engine counts, learns and reports them as it does each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_helpers import Hand, none, only
from hypothesis import given
from hypothesis import strategies as st

from fluid.engine.commands import Command, KillLane, Report
from fluid.engine.events import IterationDone
from fluid.measure.profile import Profile
from fluid.results.journal import IterationReported, encode
from fluid.trainables.encoded_metrics import IterationRun, encode_metrics


def run_of(hand: Hand, trial_id: str, seconds: list[float], **more: Any) -> list[Any]:
    """Has a trial tell of iterations that took these seconds, as one run."""
    first, at = hand.trial(trial_id).progress.done + 1, []
    for each in seconds:
        hand.now += each
        at.append(hand.now)
    metrics = tuple(encode_metrics({"n": first + place}) for place in range(len(seconds)))
    run = IterationRun(tuple(at), tuple(seconds), metrics)
    facts: dict[str, Any] = {"iteration": first + len(seconds) - 1, "seconds": seconds[-1], "metrics": metrics[-1]}
    lane = hand.lane(trial_id)
    return hand.do(IterationDone(hand.now, trial_id, lane, run=run if len(seconds) > 1 else None, **facts, **more))


def begun(**spec: Any) -> Hand:
    hand = Hand(profile=Profile())
    hand.submit("a", **spec)
    hand.started("a")
    return hand


def test_a_run_is_one_report_with_all_its_iterations() -> None:
    hand = begun(budget=10)
    report = only(run_of(hand, "a", [0.5, 0.25, 0.25]), Report)
    assert (report.iteration, report.count, report.seconds) == (3, 3, 0.25)
    told = [(number, at, seconds, metrics.decode()) for number, at, seconds, metrics in report.iterations]
    assert told == [(1, 0.5, 0.5, {"n": 1}), (2, 0.75, 0.25, {"n": 2}), (3, 1.0, 0.25, {"n": 3})]
    entry = encode(report)
    assert entry is not None and (entry["what"], entry["iteration"]) == (IterationReported.__name__, 3)
    assert json.loads(json.dumps(entry)) == entry
    alone = only(run_of(hand, "a", [0.5]), Report)
    assert alone.run is None and [(number, at) for number, at, _, _ in alone.iterations] == [(4, 1.5)]


def test_a_run_that_ends_at_the_budget_ends_the_trial() -> None:
    hand = begun(budget=4)
    run_of(hand, "a", [0.5, 0.5, 0.5, 0.5])
    assert hand.end("a") == "DONE"


def test_a_run_that_says_it_has_finished_ends_the_trial() -> None:
    hand = begun(budget=40)
    run_of(hand, "a", [0.5, 0.5], finished=True)
    assert (hand.end("a"), hand.trial("a").progress.done) == ("DONE", 2)


def test_of_a_run_that_repeats_iterations_the_rest_is_reported() -> None:
    hand = begun(budget=10)
    hand.saved("a", hand.lane("a"), 0)
    run_of(hand, "a", [0.5, 0.5, 0.5])
    hand.failed("a", hand.lane("a"), "out_of_memory")
    hand.started("a")
    report = only(run_of(hand, "a", [0.5] * 5), Report)
    assert [number for number, _, _, _ in report.iterations] == [4, 5]
    assert [metrics.decode() for _, _, _, metrics in report.iterations] == [{"n": 4}, {"n": 5}]


def test_a_run_must_follow_what_was_done() -> None:
    hand = begun(budget=10)
    run = IterationRun((1.0, 2.0), (1.0, 1.0), (encode_metrics({}), encode_metrics({})))
    lane_id = hand.lane("a")
    killed = only(hand.do(IterationDone(2.0, "a", lane_id, iteration=3, seconds=1.0, run=run)), KillLane)
    assert killed.lane_id == lane_id and "'a' reports iteration 3 after 0" in killed.reason
    assert none(hand.do(IterationDone(2.0, "a", lane_id, iteration=3, seconds=1.0, run=run)), Command)
    assert hand.trial("a").progress.done == 0 and hand.reports("a") == []
    hand.lose(lane_id)
    assert hand.states()["a"] == "STARTING", "it is tried again"


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_trial_is_known_as_well_by_runs_as_by_single_iterations(lengths: list[int]) -> None:
    by_runs, one_by_one = begun(budget=10**6), begun(budget=10**6)
    for length in [1, *lengths]:  # A lane tells the first one alone.
        run_of(by_runs, "a", [0.25] * length)
        for _ in range(length):
            run_of(one_by_one, "a", [0.25])
    ours, theirs = by_runs.trial("a"), one_by_one.trial("a")
    assert ours.progress.done == theirs.progress.done
    assert (ours.pace.observed, ours.pace.solo) == (theirs.pace.observed, pytest.approx(theirs.pace.solo))
    assert ours.pace.seconds == pytest.approx(theirs.pace.seconds)
    known, wanted = by_runs.state.estimates.of_key(ours), one_by_one.state.estimates.of_key(theirs)
    assert (known.longest, known.observed) == (wanted.longest, wanted.observed)
    assert known.seconds_alone == pytest.approx(wanted.seconds_alone)
    assert known.pace == pytest.approx(wanted.pace)
    left = [hand.state.seconds_left("group of a") for hand in (by_runs, one_by_one)]
    assert left[0] == pytest.approx(left[1])


def test_an_iteration_that_prepared_something_is_no_pace() -> None:
    profile = Profile()
    hand = Hand(profile=profile)
    hand.submit("a", budget=20, profile_key="net")
    hand.started("a")
    hand.iterate("a", 2)
    hand.iterate("a", seconds=9.0, settled=False)
    assert hand.trial("a").pace.solo == profile.seconds_per_iteration("net") == 1.0
