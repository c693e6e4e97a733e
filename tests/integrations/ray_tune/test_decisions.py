"""How far trials may run ahead of Tune, on worked examples with Tune's own schedulers and stoppers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError

ray = pytest.importorskip("ray")
from ray.tune.experiment import Trial  # noqa: E402
from ray.tune.schedulers import (  # noqa: E402
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    ResourceChangingScheduler,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher, SearchGenerator  # noqa: E402
from ray.tune.stopper import (  # noqa: E402
    CombinedStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    TimeoutStopper,
)

from fluid.integrations.ray_tune.controller.decisions import (  # noqa: E402
    Decision,
    all_known_at_once,
    had_run_its_course,
    next_decision,
)
from fluid.integrations.ray_tune.lane.lane_trial import CheckpointSchedule  # noqa: E402
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler  # noqa: E402
from fluid.integrations.ray_tune.schedulers.sync_bohb import SyncBOHB  # noqa: E402

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_simulation import METRIC, TIMED, Controller, Fickle, a_population, replay  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def result(iteration: int, score: float = 1.0) -> dict[str, Any]:
    return {"training_iteration": iteration, METRIC: score, "done": False}


def started(scheduler: Any, trials: int = 1, stopper: Any = None, **options: Any) -> tuple[Controller, list[Trial]]:
    controller = Controller(scheduler, stopper)
    added = [controller.add(**options) for _ in range(trials)]
    for trial in added:
        trial.set_status(Trial.RUNNING)
    return controller, added


def save_at(iteration: int, at_end: bool = False) -> CheckpointSchedule:
    return CheckpointSchedule(at=frozenset([iteration]), at_end=at_end)


def likely_at(iteration: int) -> CheckpointSchedule:
    return CheckpointSchedule(likely=frozenset([iteration]))


def due_in(checkpoints: CheckpointSchedule, iterations: range) -> list[int]:
    return [iteration for iteration in iterations if checkpoints.due(iteration)]


def next_at(controller: Controller, trial: Trial, iteration: int) -> int | None:
    return next_decision(controller, controller.scheduler, trial, iteration).at


def test_without_anything_that_decides_a_trial_runs_to_its_end() -> None:
    controller, [trial] = started(FIFOScheduler(), every=4)
    decision = next_decision(controller, controller.scheduler, trial, 0)
    assert decision == Decision(None, CheckpointSchedule(every=4), lock_step=True)
    assert due_in(decision.checkpoints, range(1, 13)) == [4, 8, 12]


def test_checkpoints_are_due_at_the_multiples_and_the_single_iterations() -> None:
    checkpoints = CheckpointSchedule(every=3, at=frozenset([7]))
    assert due_in(checkpoints, range(4, 10)) == [6, 7, 9]
    assert due_in(CheckpointSchedule(), range(1, 10)) == []
    assert CheckpointSchedule(at_end=True).due(5, done=True) and not CheckpointSchedule(at_end=True).due(5)


@pytest.mark.parametrize(
    ("criteria", "stopper", "at", "stops"),
    [
        ({"training_iteration": 8}, NoopStopper(), 8, True),
        ({"training_iteration": 7.5}, NoopStopper(), 8, True),
        ({"training_iteration": 2}, NoopStopper(), 4, True),
        ({"training_iteration": float("inf")}, NoopStopper(), None, False),
        ({"time_total_s": 100.0}, NoopStopper(), 4, False),
        ({METRIC: 1.0, "training_iteration": 8}, NoopStopper(), 4, False),
        ({METRIC: 1.0, "training_iteration": 4}, NoopStopper(), 4, True),
        ({}, TimeoutStopper(10), None, False),
        ({}, MaximumIterationStopper(9), 12, True),
        ({"training_iteration": 10}, MaximumIterationStopper(9), 10, True),
        ({}, CombinedStopper(MaximumIterationStopper(5), MaximumIterationStopper(9)), 8, True),
        ({}, CombinedStopper(MaximumIterationStopper(9), FunctionStopper(lambda *_: False)), 4, False),
        ({}, FunctionStopper(lambda *_: False), 4, False),
    ],
)
def test_stop_criteria_and_stoppers(criteria: dict[str, float], stopper: Any, at: int | None, stops: bool) -> None:
    # The trial is at iteration 3, and the stoppers have not been asked about it yet.
    controller, [trial] = started(FIFOScheduler(), stopper=stopper, stopping_criterion=criteria, at_end=True)
    decision = next_decision(controller, controller.scheduler, trial, 3)
    assert (decision.at, decision.stops) == (at, stops)
    # The checkpoint at the end is in the schedule if the end is certain.
    assert decision.checkpoints == CheckpointSchedule(at=frozenset([at] if stops and at else []), at_end=True)


def test_maximum_iteration_counts_the_results_it_has_seen() -> None:
    stopper = MaximumIterationStopper(5)
    controller, [trial] = started(FIFOScheduler(), stopper=stopper)
    for iteration in (1, 2, 1):  # Iteration 1 comes twice: the trial failed and continued from a checkpoint.
        controller.process(trial, result(iteration))
    assert next_at(controller, trial, 1) == 3


class Talkative(MaximumIterationStopper):
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return result[METRIC] > 1 or super().__call__(trial_id, result)


class Renamed(MaximumIterationStopper):
    pass


def test_a_stopper_is_known_by_what_it_does() -> None:
    controller, [trial] = started(FIFOScheduler(), stopper=Talkative(9))
    assert next_at(controller, trial, 0) == 1
    controller, [trial] = started(FIFOScheduler(), stopper=Renamed(9))
    assert next_at(controller, trial, 0) == 9


def test_asha_decides_at_each_rung_and_at_max_t() -> None:
    controller, [trial] = started(ASHAScheduler(**TIMED, grace_period=2, max_t=20, reduction_factor=3), at_end=True)
    assert next_decision(controller, controller.scheduler, trial, 0) == Decision(2, CheckpointSchedule(at_end=True))
    controller.process(trial, result(2))
    assert [next_at(controller, trial, iteration) for iteration in (2, 5)] == [6, 6]
    controller.process(trial, result(6))
    controller.process(trial, result(18))
    assert next_decision(controller, controller.scheduler, trial, 18) == Decision(
        20, save_at(20, at_end=True), stops=True
    )


def test_asha_without_stop_last_trials_decides_nothing_after_the_last_rung() -> None:
    scheduler = ASHAScheduler(**TIMED, grace_period=2, max_t=20, reduction_factor=3, stop_last_trials=False)
    controller, [trial] = started(scheduler)
    # A trial that comes to the last rung first has passed the others.
    controller.process(trial, result(18))
    assert next_at(controller, trial, 18) is None


def test_asha_enters_one_rung_with_each_result() -> None:
    # Rungs at 1, 1.2, 1.44, 1.73: three of them within the second iteration.
    controller, [trial] = started(ASHAScheduler(**TIMED, max_t=9, reduction_factor=1.2))
    for iteration in (1, 2):
        assert next_at(controller, trial, iteration - 1) == iteration
        controller.process(trial, result(iteration))
    # 1.2 and 1.44 are still open, and the trial is in neither.
    assert next_at(controller, trial, 2) == 3


def test_asha_decides_after_a_result_without_the_metric() -> None:
    controller, [trial] = started(ASHAScheduler(**TIMED, grace_period=2, max_t=20))
    controller.process(trial, {"training_iteration": 2, "done": False})
    assert next_at(controller, trial, 2) == 3


def test_hyperband_decides_at_the_rung_of_the_bracket() -> None:
    # The first bracket of HyperBand holds 5 trials that run to the end, the second 8 that start with 27 iterations.
    controller, trials = started(HyperBandScheduler(**TIMED, max_t=81), 7)
    first, second = trials[0], trials[5]
    paused = Decision(81, save_at(81), lock_step=True)
    assert next_decision(controller, controller.scheduler, first, 0) == paused
    assert next_at(controller, second, 26) == 27
    assert next_decision(controller, controller.scheduler, second, 0).follow_up_iterations == 81 - 27
    for trial in trials[1:5]:
        assert controller.process(trial, result(81)) == TrialScheduler.PAUSE
    # The last one of the bracket is not paused, but stopped like those that wait for it.
    assert next_decision(controller, controller.scheduler, first, 80) == Decision(
        81, CheckpointSchedule(), stops=True, lock_step=True
    )
    assert controller.process(first, result(81)) == TrialScheduler.STOP


def test_hyperband_goes_by_the_next_rung_once_all_are_there() -> None:
    controller, trials = started(HyperBandScheduler(**TIMED, max_t=81), 7)
    second, third = trials[5:]
    controller.process(second, result(27, 1.0))
    # The bracket is not full: should another trial come, this one has to wait for it.
    decision = next_decision(controller, controller.scheduler, third, 20)
    assert decision == Decision(27, likely_at(27), lock_step=True, follow_up_iterations=54)
    assert controller.process(third, result(27, 2.0)) == TrialScheduler.CONTINUE
    assert next_at(controller, third, 27) == 81


def test_hyperband_without_stop_last_trials_decides_nothing_after_the_last_rung() -> None:
    controller, [trial] = started(HyperBandScheduler(**TIMED, max_t=9, stop_last_trials=False))
    assert next_at(controller, trial, 0) is None


def test_hyperband_for_bohb_pauses_while_the_bracket_is_not_full() -> None:
    controller, [trial] = started(HyperBandForBOHB(**TIMED, max_t=9))
    decision = next_decision(controller, controller.scheduler, trial, 0)
    assert decision == Decision(1, save_at(1), lock_step=True, follow_up_iterations=8)
    assert controller.process(trial, result(1)) == TrialScheduler.PAUSE
    assert controller.saves[trial] == [1]


def test_a_metric_that_may_stop_the_trial_makes_a_pause_uncertain() -> None:
    controller, [trial, _] = started(HyperBandScheduler(**TIMED, max_t=9), 2, stopping_criterion={METRIC: 5.0})
    assert next_decision(controller, controller.scheduler, trial, 8) == Decision(9, likely_at(9), lock_step=True)


@pytest.mark.parametrize(("burn_in", "at"), [(0, 5), (3, 5), (7.5, 8)])
def test_population_based_training_decides_after_the_interval_and_the_burn_in(burn_in: float, at: int) -> None:
    controller, [trial] = started(a_population(burn_in_period=burn_in))
    assert next_decision(controller, controller.scheduler, trial, 0) == Decision(at, likely_at(at))
    controller.process(trial, result(at))
    assert next_at(controller, trial, at) == at + 5


def test_members_of_a_population_lead_to_what_is_left_until_they_are_to_end() -> None:
    controller, [trial] = started(a_population(), stopping_criterion={"training_iteration": 12})
    assert next_decision(controller, controller.scheduler, trial, 0).follow_up_iterations == 7
    assert next_decision(controller, controller.scheduler, trial, 11).follow_up_iterations == 0


def test_no_trial_waits_for_a_trial_of_asha() -> None:
    controller, [trial] = started(ASHAScheduler(**TIMED, grace_period=2, max_t=20))
    assert next_decision(controller, controller.scheduler, trial, 0).follow_up_iterations == 0


def test_population_based_training_goes_by_the_checkpoint_a_trial_goes_on_from() -> None:
    controller, [good, bad] = started(a_population(quantile_fraction=0.5), 2)
    controller.process(bad, result(5, 1.0))
    controller.process(good, result(5, 2.0))
    assert controller.process(bad, result(10, 1.0)) == TrialScheduler.NOOP
    assert bad.status == Trial.PAUSED
    # It continues from the other trial's fifth iteration, and is due five iterations later.
    assert controller.goes_on_from(bad) == 5
    assert next_at(controller, bad, 5) == 10


def test_population_based_training_in_lock_step_pauses_all_but_the_last() -> None:
    controller, [one, other] = started(a_population(synch=True), 2)
    waits = Decision(5, save_at(5), lock_step=True)
    assert next_decision(controller, controller.scheduler, one, 0) == waits
    assert controller.process(one, result(5)) == TrialScheduler.PAUSE
    assert next_decision(controller, controller.scheduler, other, 4) == Decision(5, likely_at(5), lock_step=True)


def test_median_stopping_decides_at_every_result_after_the_grace_period() -> None:
    controller, [trial] = started(MedianStoppingRule(**TIMED, grace_period=6))
    assert [next_at(controller, trial, iteration) for iteration in (0, 5, 6, 7)] == [6, 6, 7, 8]


def test_median_stopping_does_not_decide_about_a_trial_that_it_paused() -> None:
    scheduler = MedianStoppingRule(**TIMED, grace_period=1, min_samples_required=1, hard_stop=False)
    controller, [good, bad] = started(scheduler, 2)
    controller.process(good, result(1, 2.0))
    assert controller.process(bad, result(1, 1.0)) == TrialScheduler.PAUSE
    assert next_at(controller, bad, 1) is None
    assert next_at(controller, good, 1) == 2


def test_a_replayed_policy_is_saved_at_each_change(tmp_path: Path) -> None:
    controller, [trial] = started(replay(tmp_path, [4, 9]))
    assert next_decision(controller, controller.scheduler, trial, 0) == Decision(4, save_at(4))
    controller.process(trial, result(4))
    assert next_at(controller, trial, 4) == 9
    trial.set_status(Trial.RUNNING)
    controller.process(trial, result(9))
    assert next_at(controller, trial, 9) is None


@pytest.mark.parametrize(
    "scheduler",
    [
        Fickle(**TIMED),
        ResourceChangingScheduler(FIFOScheduler()),
        ASHAScheduler("time_total_s", METRIC, "max"),
        HyperBandScheduler("time_total_s", METRIC, "max"),
        a_population(time_attr="time_total_s"),
        MedianStoppingRule("time_total_s", METRIC, "max"),
    ],
)
def test_what_cannot_be_foreseen_is_the_next_iteration(scheduler: Any) -> None:
    controller, [trial] = started(scheduler)
    assert next_decision(controller, scheduler, trial, 3) == Decision(4, CheckpointSchedule())


def test_a_scheduler_is_known_by_how_it_decides() -> None:
    class Named(ASHAScheduler):
        pass

    controller, [trial] = started(Named(**TIMED, grace_period=4))
    assert next_at(controller, trial, 0) == 4
    controller.scheduler.on_trial_result = lambda *_: TrialScheduler.STOP
    assert next_at(controller, trial, 0) == 1


def test_a_trial_that_the_scheduler_does_not_know_is_looked_at_every_iteration() -> None:
    stranger = Trial("stub", stub=True)
    for scheduler in (ASHAScheduler(**TIMED), HyperBandScheduler(**TIMED), a_population()):
        assert next_at(Controller(scheduler), stranger, 3) == 4


def test_a_negative_iteration_is_refused() -> None:
    controller, [trial] = started(FIFOScheduler())
    with pytest.raises(InvalidFieldError, match="iteration=-1"):
        next_decision(controller, controller.scheduler, trial, -1)


# --- What is known at once


class Picky(BasicVariantGenerator):
    def next_trial(self) -> Any:
        return None


def test_grid_and_random_search_know_all_trials_at_once() -> None:
    controller = Controller(FIFOScheduler())

    def known(search: Any) -> bool:
        controller.search_alg = search
        return all_known_at_once(controller)

    assert known(BasicVariantGenerator())
    assert not known(BasicVariantGenerator(max_concurrent=2))
    assert not known(Picky())
    assert not known(SearchGenerator(Suggests()))
    assert not known(SearchGenerator(ConcurrencyLimiter(Suggests(), max_concurrent=2)))


class Suggests(Searcher):
    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        return None

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass


def test_successive_halving_decides_at_each_rung_and_saves_trials_that_may_be_promoted() -> None:
    scheduler = SuccessiveHalvingScheduler(**TIMED, grace_period=2, max_t=6, reduction_factor=3)
    controller, trials = started(scheduler, trials=3, every=4)
    scheduler.choose_trial_to_run(controller)
    for trial in trials:
        trial.set_status(Trial.RUNNING)
        assert next_decision(controller, scheduler, trial, 0) == Decision(
            2, CheckpointSchedule(every=4, at=frozenset([2])), lock_step=True, follow_up_iterations=4
        )
    for score, trial in enumerate(trials):
        assert controller.process(trial, result(2, score)) == TrialScheduler.PAUSE
    assert scheduler.choose_trial_to_run(controller) is trials[2]
    assert [trial.status for trial in trials] == [Trial.TERMINATED, Trial.TERMINATED, Trial.PENDING]
    assert next_decision(controller, scheduler, trials[2], 2) == Decision(
        6, CheckpointSchedule(every=4), stops=True, lock_step=True
    )


def test_bohb_in_lock_step_looks_at_trials_at_their_end_too_before_it_stops_them() -> None:
    controller, [trial] = started(SyncBOHB(**TIMED, max_t=5, grace_period=5))
    assert next_decision(controller, controller.scheduler, trial, 0) == Decision(5, save_at(5), lock_step=True)


def test_a_halving_that_goes_by_another_time_decides_at_any_iteration() -> None:
    scheduler = SuccessiveHalvingScheduler(METRIC, "max", time_attr="time_total_s", max_t=100)
    controller, [trial] = started(scheduler)
    assert next_at(controller, trial, 7) == 8


# --- Trials that have ended


def ended(controller: Controller, trial: Trial) -> tuple[str, bool]:
    """Tune's status of a trial, and whether it had run its course."""
    at = trial.last_result["training_iteration"]
    return trial.status, had_run_its_course(controller, controller.scheduler, trial, at)


@pytest.mark.parametrize(
    ("criteria", "stopper", "over"),
    [
        ({}, NoopStopper(), False),
        ({"training_iteration": 3}, NoopStopper(), True),
        ({"training_iteration": 4}, NoopStopper(), False),
        ({f"a/{METRIC}": 2.0}, NoopStopper(), True),
        ({f"a/{METRIC}": 2.5}, NoopStopper(), False),
        ({"another": 0.0}, NoopStopper(), False),
        ({}, MaximumIterationStopper(1), True),
        ({}, MaximumIterationStopper(2), False),
        ({}, CombinedStopper(MaximumIterationStopper(1), FunctionStopper(lambda *_: False)), True),
        ({}, FunctionStopper(lambda *_: True), False),
    ],
)
def test_what_the_user_asked_for_is_the_end_of_a_trial(criteria: dict[str, float], stopper: Any, over: bool) -> None:
    controller, [trial] = started(FIFOScheduler(), stopper=stopper, stopping_criterion=criteria)
    controller.process(trial, {**result(3), "a": {METRIC: 2.0}})
    if trial.status == Trial.RUNNING:
        trial.update_last_result({**result(3), "a": {METRIC: 2.0}, "done": True})  # As if it had ended.
        controller.stop_trial(trial)
    assert ended(controller, trial) == (Trial.TERMINATED, over)


def test_asha_stops_early_or_at_the_last_rung() -> None:
    controller, [good, bad] = started(ASHAScheduler(**TIMED, max_t=9, grace_period=1, reduction_factor=3), 2)
    assert controller.process(good, result(1, 2.0)) == TrialScheduler.CONTINUE
    assert controller.process(bad, result(1, 1.0)) == TrialScheduler.STOP
    assert controller.process(good, result(9, 2.0)) == TrialScheduler.STOP
    assert ended(controller, good) == (Trial.TERMINATED, True)
    assert ended(controller, bad) == (Trial.TERMINATED, False)


@pytest.mark.slow
def test_hyperband_stops_early_or_at_the_last_rung() -> None:
    # Two trials run to the end; of the other three, one is promoted from the first rung.
    controller, trials = started(HyperBandScheduler(**TIMED, max_t=3, reduction_factor=3), 5)
    for score, trial in enumerate(trials[:2]):
        controller.process(trial, result(3, score))
    for score, trial in enumerate(trials[2:]):
        controller.process(trial, result(1, score))
    best = trials[4]
    best.set_status(Trial.RUNNING)
    controller.process(best, result(3, 2.0))
    assert [ended(controller, trial)[0] for trial in trials] == [Trial.TERMINATED] * 5
    assert [ended(controller, trial)[1] for trial in trials] == [True, True, False, False, True]


@pytest.mark.slow
def test_halving_in_lock_step_stops_early_or_at_the_last_rung() -> None:
    scheduler = SuccessiveHalvingScheduler(**TIMED, grace_period=1, max_t=3, reduction_factor=3)
    controller, trials = started(scheduler, trials=3)
    scheduler.choose_trial_to_run(controller)
    for score, trial in enumerate(trials):
        trial.set_status(Trial.RUNNING)
        controller.process(trial, result(1, score))
    scheduler.choose_trial_to_run(controller)
    trials[2].set_status(Trial.RUNNING)
    controller.process(trials[2], result(3, 2.0))
    assert [ended(controller, trial) for trial in trials] == [(Trial.TERMINATED, over) for over in (False, False, True)]


@pytest.mark.slow
def test_of_a_scheduler_that_is_not_known_every_stop_is_early() -> None:
    controller, [trial] = started(Fickle(**TIMED, max_t=9))
    controller.process(trial, result(9, 0.0))
    assert ended(controller, trial) == (Trial.TERMINATED, False)
