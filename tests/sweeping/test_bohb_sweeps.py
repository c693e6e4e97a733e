"""Sweeps by BOHB: from the results at each rung follow the next configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import curve, fail_above_one, unhurried

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult, TrialListener
from fluid.search import BOHB, loguniform, uniform
from fluid.search.bohb import BohbSearcher
from fluid.search.searchers import SearchOutcome
from fluid.sweeping.algorithms import named
from tests.sweeping.test_rehearsed import rehearse

SPACE = {"x": uniform(0.0, 1.0)}


def sweep(executor: FluidExecutor, trainable: Any = curve, space: Any = None, **options: Any) -> SweepResult:
    given = {"metric": "loss", "mode": "min", "budget": 9, "algorithm": "bohb", **options}
    return fluid.run(trainable, space or SPACE, executor=executor, **given)


def test_one_round_of_hyperbands_brackets_by_default(executor: FluidExecutor) -> None:
    result = sweep(executor)
    assert len(result.trials) == 9 + 5 + 3 and result.name == "curve-bohb"
    reached = [trial.iteration for trial in result.trials]
    assert sorted(reached[:9]) == [1] * 6 + [3] * 2 + [9]
    assert sorted(reached[9:14]) == [3] * 4 + [9] and reached[14:] == [9] * 3


def test_with_one_rung_there_are_as_many_trials_as_of_other_algorithms(executor: FluidExecutor) -> None:
    result = sweep(executor, budget=1, samples=None)
    assert len(result.trials) == 64
    late = sorted(trial.config["x"] for trial in result.trials[32:])
    assert late[16] < 0.3, "a model has suggested most of them"


def test_options_are_those_of_the_search(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BOHB] = []
    usual = BohbSearcher.__init__

    def note(self: BohbSearcher, space: Any, options: BOHB, **given: Any) -> None:
        made.append(options)
        usual(self, space, options, **given)

    monkeypatch.setattr(BohbSearcher, "__init__", note)
    for given in ("BOHB", BOHB(num_samples=9)):
        sweep(executor, algorithm=given, samples=1)
    assert made == [BOHB(), BOHB(num_samples=9)]


def test_the_searcher_hears_of_each_rung_once(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int, Any]] = []
    usual = BohbSearcher.observe

    def note(self: BohbSearcher, outcome: SearchOutcome) -> None:
        heard.append((outcome.token, outcome.budget, outcome.values))
        usual(self, outcome)

    monkeypatch.setattr(BohbSearcher, "observe", note)
    points = [{"x": 0.5}] * 9 + [{"x": 2.0}]
    result = sweep(executor, fail_above_one, {"x": [0.5, 2.0], "lr": loguniform(1e-4, 1)}, points=points)
    expected = set()
    for token, trial in enumerate(result.trials):
        first = 1 if token < 9 else 3 if token < 14 else 9
        rungs = [rung for rung in (1, 3, 9) if first <= rung <= trial.iteration]
        expected |= {(token, rung, (trial.config["x"],)) for rung in rungs}
        if trial.state == "FAILED":  # At its second iteration, on its way to the next rung.
            expected.add((token, max(3, first), None))
    assert sorted(heard, key=str) == sorted(expected, key=str)
    assert any(values is None for _, _, values in heard)


class Starts(TrialListener):
    """Which trials began, and which had ended for good by then: that none of them goes on is not known before."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.beside: dict[str, set[str]] = {}

    def on_start(self, trial_id: str) -> None:
        self.beside.setdefault(trial_id, set(self.open))
        self.open.add(trial_id)

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        self.open.discard(trial_id)


@pytest.mark.parametrize("synchronous", [False, True])
def test_brackets_one_by_one_or_side_by_side(synchronous: bool, executor: FluidExecutor) -> None:
    starts = Starts()
    algorithm = BOHB(synchronous=synchronous)
    result = sweep(executor, algorithm=algorithm, callbacks=[starts], name=f"sync-{synchronous}")
    assert len(result.trials) == 17
    bracket = {trial.trial_id: sum(number >= first for first in (9, 14)) for number, trial in enumerate(result.trials)}
    overlap = [
        (trial_id, other)
        for trial_id, others in starts.beside.items()
        for other in others
        if bracket[other] < bracket[trial_id]
    ]
    if synchronous:  # Else they may be: it takes a trial of the last rung that is still under way.
        assert not overlap
    search = next(handle for handle in executor.handles if handle.name == f"sync-{synchronous}").search
    assert search is not None and search.shape is not None
    assert search.shape.brackets == ((9, 3, 1), (5, 1), (3,)) and search.shape.concurrency == 3
    assert search.shape.one_by_one is synchronous


def test_a_bracket_begins_although_all_of_the_one_before_have_failed(executor: FluidExecutor) -> None:
    points = [{"x": 2.0}] * 9
    result = sweep(
        executor, fail_above_one, {"x": uniform(0, 2)}, points=points, algorithm=BOHB(synchronous=True), min_budget=1
    )
    assert [trial.state for trial in result.trials[:9]].count("FAILED") >= 3
    assert len(result.trials) == 17


def test_with_one_rung_trials_run_side_by_side_also_if_brackets_do_not(executor: FluidExecutor) -> None:
    starts = Starts()
    options = {"budget": 1, "samples": 9, "algorithm": BOHB(synchronous=True), "name": "one-rung"}
    sweep(executor, unhurried, callbacks=[starts], **options)
    search = next(handle for handle in executor.handles if handle.name == "one-rung").search
    assert search is not None and search.shape is not None and not search.shape.one_by_one
    assert any(starts.beside.values())


def test_a_sweep_is_named_by_its_algorithm(executor: FluidExecutor) -> None:
    assert sweep(executor, budget=1, samples=1, algorithm=BOHB(num_samples=9)).name.startswith("curve-bohb")
    assert (named(BOHB()), named("BOHB"), named("asha")) == ("bohb", "BOHB", "asha")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": BOHB(min_points_in_model=2), "space": {"x": uniform(0, 1), "y": uniform(0, 1)}}, "at least 3"),
        ({"metric": ["loss", "gain"], "mode": ["min", "max"]}, "'bohb' compares trials by one metric"),
        ({"algorithm": "tunebohb"}, "did you mean 'bohb'?"),
        ({"algorithm": BOHB(), "space": None, "searcher": fluid.search.AskTell(dict, print)}, "algorithm='bohb': must"),
        ({"space": lambda trial: {"x": trial.suggest_float("x", 0, 1)}}, "models no function of an Optuna trial"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"points": {"x": 0.5}}, "points={'x': 0.5}: must be a list of dicts"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], text: str, executor: FluidExecutor) -> None:
    given = {"metric": "loss", "mode": "min", "algorithm": "bohb", "space": SPACE, **options}
    with pytest.raises(InvalidFieldError) as caught:
        fluid.run(curve, given.pop("space"), executor=executor, **given)
    assert text in str(caught.value)


def test_the_same_seed_gives_the_same_rehearsed_sweep(tmp_path: Path) -> None:
    (first, end), (second, same_end) = (rehearse(tmp_path / name, algorithm="bohb") for name in ("first", "second"))
    configs = [[(trial.config, trial.iteration) for trial in result.trials] for result in (first, second)]
    assert configs[0] == configs[1] and end == same_end and len(first.trials) == 16
