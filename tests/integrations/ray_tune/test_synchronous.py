"""Synchronous Successive Halving and BOHB: promotions, waiting, and what the model receives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")
from ray.tune import Trainable
from ray.tune.experiment import Trial
from ray.tune.search import Searcher, SearchGenerator

from fluid import tune
from fluid.errors import InvalidFieldError

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_simulation import METRIC, TIMED, Controller
from tune_sweeps import Climber

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

SCORE = {"metric": "score", "mode": "max"}
Score = Callable[[int], float]


def halving(**options: Any) -> Any:
    return tune.SuccessiveHalvingScheduler(**{**TIMED, "max_t": 9, **options})


class Simulated:
    """A sweep with given results, in which a seeded generator picks the trial that reports next.

    Args:
        scheduler: decides.
        scores: of each trial, by iteration; an exception is a trial that fails there, ``None`` one that ends.
        seed: of the order.
    """

    def __init__(self, scheduler: Any, scores: Sequence[Callable[[int], Any]], seed: int = 0) -> None:
        self.scheduler = scheduler
        self.controller = Controller(scheduler)
        self.trials = [self.controller.add(experiment_tag=f"{number}_x") for number in range(len(scores))]
        self.scores = dict(zip(self.trials, scores, strict=True))
        self.random = Random(seed)
        self.lengths = dict.fromkeys(self.trials, 0)
        #: Trials under way after each choice of the scheduler.
        self.batches: list[list[int]] = []

    def run(self) -> list[int]:
        """Runs the sweep and returns the length of each trial."""
        while self.scheduler.choose_trial_to_run(self.controller) is not None:
            ready = [trial for trial in self.trials if trial.status == Trial.PENDING]
            self.batches.append([self.trials.index(trial) for trial in ready])
            for trial in self.random.sample(ready, len(ready)):
                trial.set_status(Trial.RUNNING)
                self._train(trial)
        assert all(trial.is_finished() for trial in self.trials), "a trial waits for ever"
        return list(self.lengths.values())

    def _train(self, trial: Trial) -> None:
        while trial.status == Trial.RUNNING:
            self.lengths[trial] += 1
            score = self.scores[trial](self.lengths[trial])
            if isinstance(score, Exception):
                self.controller.fail(trial, recovers=False)
                continue
            done = score is None
            result = {"training_iteration": self.lengths[trial], METRIC: 0.0 if done else score, "done": done}
            self.controller.process(trial, result)


def constant(*values: float) -> list[Score]:
    return [lambda _, value=value: value for value in values]  # type: ignore[misc]


# --- Promotions


def test_the_best_third_goes_on_in_one_step() -> None:
    simulated = Simulated(halving(), constant(1, 3, 2, 5, 4, 6, 9, 8, 7))
    assert simulated.run() == [1, 1, 1, 1, 1, 1, 9, 3, 3]
    assert simulated.batches == [list(range(9)), [6, 7, 8], [6]]


def test_the_least_is_the_best_if_it_is_to_be() -> None:
    assert Simulated(halving(mode="min", max_t=3), constant(3, 1, 2)).run() == [1, 3, 1]


def test_what_is_no_number_is_the_worst_and_of_equals_the_first_goes_on() -> None:
    for mode in ("min", "max"):
        assert Simulated(halving(mode=mode, max_t=3), constant(math.nan, 5, 5)).run() == [1, 3, 1]


def test_only_the_rung_counts() -> None:
    fades, blooms = (lambda i: 9.0 - i), (lambda i: float(i))
    assert Simulated(halving(grace_period=3, max_t=6, reduction_factor=2), [fades, blooms]).run() == [6, 3]
    assert Simulated(halving(grace_period=5, max_t=6, reduction_factor=2), [fades, blooms]).run() == [5, 6]


def test_the_last_rung_is_max_t() -> None:
    assert max(Simulated(halving(max_t=20), constant(*range(27))).run()) == 20
    assert Simulated(halving(max_t=4, grace_period=4), constant(1, 2)).run() == [4, 4]


@given(
    scores=st.lists(st.lists(st.integers(0, 9), min_size=20, max_size=20), min_size=1, max_size=30),
    factor=st.integers(2, 4),
    max_t=st.integers(1, 20),
    size=st.none() | st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_it_is_successive_halving_in_any_order_of_results(
    scores: list[list[int]], factor: int, max_t: int, size: int | None, seed: int
) -> None:
    scheduler = halving(max_t=max_t, reduction_factor=factor, bracket_size=size)
    lengths = Simulated(scheduler, [lambda i, of=of: of[i - 1] for of in scores], seed).run()  # type: ignore[misc]
    expected = []
    for begin in range(0, len(scores), size or len(scores)):
        expected += by_hand(scores[begin : begin + (size or len(scores))], factor, max_t)
    assert lengths == expected


def by_hand(scores: list[list[int]], factor: int, max_t: int) -> list[int]:
    """Returns the length of each trial."""
    lengths, left, rung, stage = [0] * len(scores), list(range(len(scores))), 1, 0
    while True:
        for trial in left:
            lengths[trial] = rung
        if rung == max_t:
            return lengths
        stage += 1
        left.sort(key=lambda trial: (-scores[trial][rung - 1], trial))
        left = left[: max(1, len(scores) // factor**stage)]
        rung = min(rung * factor, max_t)


def test_a_trial_that_fails_or_ends_is_not_waited_for_and_takes_no_place() -> None:
    fails, ends = (lambda i: ValueError() if i == 2 else 9.0), (lambda i: None if i == 2 else 8.0)
    scores = [*constant(1, 2, 3), fails, ends, *constant(4, 5, 6, 7)]
    simulated = Simulated(halving(), scores)
    # Of the three trials that the first rung promotes, two do not reach the second; the third has no rival there.
    assert simulated.run() == [1, 1, 1, 2, 2, 1, 1, 1, 9]
    fails_at_once = [lambda _: ValueError()] * 2
    assert Simulated(halving(max_t=3), [*fails_at_once, *constant(1, 2)]).run() == [1, 1, 1, 3]
    assert Simulated(halving(), fails_at_once).run() == [1, 1]


def test_a_trial_that_tries_again_keeps_its_place() -> None:
    simulated = Simulated(halving(max_t=3), constant(1, 3, 2))
    controller, [_, best, _] = simulated.controller, simulated.trials
    simulated.scheduler.choose_trial_to_run(controller)
    best.set_status(Trial.RUNNING)
    simulated.scheduler.on_trial_error(controller, best)
    best.set_status(Trial.PENDING)
    simulated.scheduler.on_trial_add(controller, best)
    assert best.status == Trial.PENDING
    assert simulated.run() == [1, 3, 1]


# --- Brackets


def test_brackets_run_one_after_another() -> None:
    simulated = Simulated(halving(max_t=3, bracket_size=3), constant(1, 3, 2, 5, 4, 6, 8, 9))
    assert simulated.run() == [1, 3, 1, 1, 1, 3, 1, 3]
    assert simulated.batches == [[0, 1, 2], [1], [3, 4, 5], [5], [6, 7], [7]]


class Numbers(Searcher):
    """Suggests 0, 1, 2, ..."""

    def __init__(self) -> None:
        super().__init__(**SCORE)
        self.given = 0

    def suggest(self, trial_id: str) -> dict[str, int]:
        self.given += 1
        return {"x": self.given - 1}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_text(str(self.given))

    def restore(self, checkpoint_path: str) -> None:
        self.given = int(Path(checkpoint_path).read_text())


def test_a_searcher_is_asked_for_the_next_bracket_when_the_last_has_ended(tmp_path: Path) -> None:
    simulated = Simulated(halving(max_t=3, bracket_size=3), [])
    controller = simulated.controller
    controller.search_alg = SearchGenerator(searcher := Numbers())
    controller.search_alg.add_configurations(tune.Experiment("numbers", Climber, num_samples=6))
    simulated.trials = [controller.add(experiment_tag="1_x")]
    for count in (2, 3):
        assert controller.search_alg.searcher.suggest("x") is not None
        simulated.trials.append(controller.add(experiment_tag=f"{count}_x"))
    assert controller.search_alg.searcher.suggest("x") is None
    assert controller.search_alg.metric == "score"
    simulated.scores = dict(zip(simulated.trials, constant(1, 3, 2), strict=True))
    simulated.lengths = dict.fromkeys(simulated.trials, 0)
    simulated.run()
    assert controller.search_alg.searcher.suggest("x") is not None
    # Tune saves and restores the searcher behind the gate without noticing the gate.
    controller.search_alg.save_to_dir(str(tmp_path), "now")
    restored = SearchGenerator(again := Numbers())
    restored.restore_from_dir(str(tmp_path))
    assert again.given == searcher.given == 3


def test_as_many_brackets_at_once_as_asked() -> None:
    scheduler = tune.SyncBOHB(**TIMED, max_t=3, brackets_at_once=2)
    simulated = Simulated(scheduler, constant(*range(8)))
    simulated.run()
    assert simulated.batches[:2] == [[0, 1, 2, 3, 4], [2]]
    assert "no trials" in scheduler.debug_string()


def test_a_bracket_that_a_limit_keeps_small_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    simulated = Simulated(halving(max_t=3, bracket_size=9), constant(1, 2, 3))
    assert simulated.run() == [1, 1, 3]
    assert "Comparing 3 trials and not 9" in caplog.text


def test_restored_trials_are_where_they_were() -> None:
    before = Simulated(halving(bracket_size=9), constant(1, 3, 2, 5, 4, 6, 9, 8, 7))
    before.scheduler.choose_trial_to_run(before.controller)
    # All have reached the first rung; six have been stopped, and one has continued by one step.
    for trial, number in zip(before.trials, range(9), strict=True):
        score = before.scores[trial](1)
        trial.update_last_result({"training_iteration": 2 if number == 6 else 1, METRIC: score, "done": False})
        trial.set_status(Trial.TERMINATED if number < 6 else Trial.PENDING)
        before.lengths[trial] = trial.last_result["training_iteration"]
        if number >= 6:
            before.controller._schedule_trial_save(trial)
    after = halving(bracket_size=9)
    before.scheduler = before.controller.scheduler = after
    for trial in reversed(before.trials):
        after.on_trial_add(before.controller, trial)
    assert before.run() == [1, 1, 1, 1, 1, 1, 9, 3, 3]


# --- BOHB


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"max_t": 81}, [81, 27, 9, 6, 5]),
        ({"max_t": 27, "grace_period": 3}, [9, 3, 3]),
        ({"max_t": 100, "reduction_factor": 10}, [100, 10, 3]),
        ({"max_t": 243}, [243, 81, 27, 18, 9, 6]),
        ({"max_t": 1}, [1]),
    ],
)
def test_the_brackets_are_those_of_hpbandster(options: dict[str, Any], sizes: list[int]) -> None:
    scheduler = tune.SyncBOHB(**SCORE, **options)
    brackets = [scheduler._schedule(number) for number in range(len(sizes) + 1)]
    assert [bracket.size for bracket in brackets] == [*sizes, sizes[0]]
    assert brackets[0].rungs[-1] == options["max_t"]
    assert brackets[0].rungs[0] >= options.get("grace_period", 1)
    assert [len(bracket.rungs) for bracket in brackets] == [*range(len(sizes), 0, -1), len(sizes)]
    assert scheduler.configurations() == sum(sizes)
    assert scheduler.configurations(len(sizes) + 1) == sum(sizes) + sizes[0]


def test_the_model_receives_a_stage_when_it_is_complete_in_the_order_of_its_trials() -> None:
    scheduler = tune.SyncBOHB(**TIMED, max_t=3)
    simulated = Simulated(scheduler, constant(1, 3, 2), seed=5)
    told: list[tuple[str, Any]] = []
    searcher = simulated.controller.search_alg.searcher.searcher
    searcher.on_trial_result = lambda trial_id, result: told.append((trial_id, result["hyperband_info"]["budget"]))
    assert simulated.run() == [1, 3, 1]
    ids = [trial.trial_id for trial in simulated.trials]
    assert told == [*((trial_id, 1.0) for trial_id in ids), (ids[1], 3.0)]


# --- Invalid arguments


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_t": 0}, "max_t"),
        ({"max_t": math.inf}, "max_t"),
        ({"max_t": 2, "grace_period": 3}, "max_t"),
        ({"grace_period": 0}, "grace_period"),
        ({"reduction_factor": 1}, "reduction_factor"),
        ({"reduction_factor": 0.5}, "reduction_factor"),
        ({"mode": "best"}, "mode"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options: dict[str, Any], field: str) -> None:
    for scheduler in (tune.SuccessiveHalvingScheduler, tune.SyncBOHB):
        with pytest.raises(InvalidFieldError) as refused:
            scheduler(**{**SCORE, **options})
        assert refused.value.field == field


def test_arguments_of_one_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="bracket_size"):
        halving(bracket_size=0)
    with pytest.raises(InvalidFieldError, match="brackets_at_once"):
        tune.SyncBOHB(brackets_at_once=0)
    with pytest.raises(InvalidFieldError, match="brackets"):
        tune.SyncBOHB().configurations(0)


@pytest.mark.slow
def test_metric_and_mode_may_be_the_sweeps() -> None:
    scheduler = tune.SuccessiveHalvingScheduler()
    with pytest.raises(InvalidFieldError, match="metric"):
        Controller(scheduler).add()
    assert scheduler.set_search_properties("score", "max")
    assert scheduler.metric == "score"
    Controller(scheduler).add()
    assert not scheduler.set_search_properties("loss", None)
    assert not scheduler.set_search_properties(None, "min")
    anonymous = tune.SuccessiveHalvingScheduler()
    assert anonymous.set_search_properties(None, "max")
    assert anonymous.metric == "_metric"


@pytest.mark.slow
def test_a_result_that_does_not_say_goes_by() -> None:
    simulated = Simulated(halving(max_t=3), constant(1))
    [trial] = simulated.trials
    simulated.scheduler.choose_trial_to_run(simulated.controller)
    assert simulated.scheduler.on_trial_result(simulated.controller, trial, {"training_iteration": 3}) == "CONTINUE"
    assert simulated.run() == [3]


@pytest.mark.slow
def test_the_schedulers_are_names_of_fluid_tune() -> None:
    assert {"SuccessiveHalvingScheduler", "SyncBOHB"} <= set(dir(tune))
    assert issubclass(tune.SyncBOHB, tune.SuccessiveHalvingScheduler)
    assert issubclass(Climber, Trainable)
