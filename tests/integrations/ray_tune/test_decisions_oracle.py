"""Whole sweeps of Tune's own schedulers: every decision must have been announced."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ray = pytest.importorskip("ray")
import numpy as np  # noqa: E402
from ray.tune.experiment import Trial  # noqa: E402
from ray.tune.schedulers import (  # noqa: E402
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.stopper import (  # noqa: E402
    CombinedStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    TimeoutStopper,
)

from fluid.integrations.ray_tune.controller.decisions import Decision, next_decision  # noqa: E402
from fluid.integrations.ray_tune.schedulers.successive_halving import SuccessiveHalvingScheduler  # noqa: E402
from fluid.integrations.ray_tune.schedulers.sync_bohb import SyncBOHB  # noqa: E402

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_simulation import METRIC, TIMED, Controller, Fickle, Sweep, a_population, replay  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@dataclass
class Oracle:
    """Announces the next decision of each trial when it starts and after each decision, and compares with Tune.

    Attributes:
        controller: runs the trials.
        books: the scheduler's record of a trial, which changes at a decision.
        exact: whether something must happen at each announced iteration; nothing may happen before it in any case.
        decisions: number of announced decisions.
        foreseen: number of those that were more than one iteration ahead.
    """

    controller: Controller
    books: Callable[[Any, Trial], object]
    exact: bool
    announced: dict[Trial, Decision] = field(default_factory=dict)
    decisions: int = 0
    foreseen: int = 0

    def announce(self, trial: Trial, iteration: int) -> None:
        before = copy.deepcopy(vars(self.controller._stopper).get("_iter"))
        decision = next_decision(self.controller, self.controller.scheduler, trial, iteration)
        assert decision.at is None or decision.at > iteration
        assert vars(self.controller._stopper).get("_iter") == before
        assert not any(decision.checkpoints.due(likely) for likely in decision.checkpoints.likely)
        self.announced[trial] = decision
        self.foreseen += decision.at is None or decision.at > iteration + 1

    def watch(self, trial: Trial, iteration: int, ends: bool, process: Callable[[], str]) -> None:
        decision = self.announced[trial]
        assert decision.at is None or iteration <= decision.at, "the trial ran past a decision"
        before = self.books(self.controller.scheduler, trial)
        self.controller.saves[trial].clear()
        action = process()
        saved = iteration in self.controller.saves[trial]
        if ends:
            assert action == TrialScheduler.STOP
            return
        if iteration != decision.at:
            assert action == TrialScheduler.CONTINUE, f"unannounced, after {iteration}: {decision}"
            assert self.books(self.controller.scheduler, trial) == before
            assert saved == (decision.checkpoints.due(iteration))
            return
        self.decisions += 1
        if decision.stops:
            assert action == TrialScheduler.STOP
            assert saved == (decision.checkpoints.due(iteration))
        elif action == TrialScheduler.STOP:
            assert not saved or trial.checkpoint_at_end or decision.checkpoints.due(iteration)
        elif self.exact:
            assert action != TrialScheduler.CONTINUE or self.books(self.controller.scheduler, trial) != before
            assert not saved or iteration in decision.checkpoints.likely or decision.checkpoints.due(iteration)
        if trial.status == Trial.RUNNING:
            self.announce(trial, iteration)


def run(
    scheduler: Any,
    seed: int,
    *,
    books: Callable[[Any, Trial], object],
    exact: bool = True,
    trials: int = 12,
    plain: bool = False,
) -> Oracle:
    """Runs a sweep and checks it with the oracle.

    Args:
        plain: without failures, checkpoints, stop criteria and stoppers.
    """
    rng = random.Random(seed)
    # Schedulers draw brackets, and trials to copy, from the global generators.
    random.seed(seed)
    np.random.seed(seed)
    stopper = NoopStopper() if plain else a_stopper(rng)
    criteria = {} if plain else some_criteria(rng)
    foreseen = METRIC not in criteria and not any(isinstance(one, FunctionStopper) for one in all_of(stopper))
    oracle = Oracle(Controller(scheduler, stopper), books, exact and foreseen)

    def options() -> dict[str, Any]:
        if plain:
            return {}
        return {"every": rng.choice([0, 0, 2, 5]), "at_end": rng.random() < 0.5, "stopping_criterion": criteria}

    sweep = Sweep(
        oracle.controller,
        rng,
        trials=trials,
        options=options,
        on_start=oracle.announce,
        on_result=oracle.watch,
        failures=0.0 if plain else rng.choice([0.0, 0.02]),
    )
    sweep.run()
    return oracle


def all_of(stopper: Any) -> list[Any]:
    return stopper._stoppers if isinstance(stopper, CombinedStopper) else [stopper]


def a_stopper(rng: random.Random) -> Any:
    most = rng.randint(1, 40)
    return rng.choice(
        [
            NoopStopper,
            lambda: MaximumIterationStopper(most),
            lambda: CombinedStopper(TimeoutStopper(1e9), MaximumIterationStopper(most)),
            lambda: CombinedStopper(FunctionStopper(lambda _, result: result[METRIC] == most % 10), NoopStopper()),
        ]
    )()


def some_criteria(rng: random.Random) -> dict[str, float]:
    known = {"training_iteration": rng.choice([rng.randint(1, 50), rng.uniform(1, 50)])}
    return rng.choice([{}, {}, known, {**known, METRIC: 9.0}])


def asha_books(scheduler: Any, trial: Trial) -> object:
    rungs = [[trial.trial_id in recorded for _, recorded in bracket._rungs] for bracket in scheduler._brackets]
    return rungs, scheduler._num_stopped


def hyperband_books(scheduler: Any, trial: Trial) -> object:
    bracket, _ = scheduler._trial_info[trial]
    return bracket._cumul_r, bracket._halves, frozenset(bracket._live_trials)


def synchronous_books(scheduler: Any, trial: Trial) -> object:
    return scheduler.next_rung(trial)


def population_books(scheduler: Any, trial: Trial) -> object:
    state = scheduler._trial_state[trial]
    counts = scheduler._num_checkpoints, scheduler._num_perturbations
    return state.last_train_time, state.last_perturbation_time, state.last_score, counts


def median_books(scheduler: Any, trial: Trial) -> object:
    return trial in scheduler._stopped_trials, scheduler._last_pause.get(trial)


SEEDS = st.integers(0, 2**32 - 1)
PLAIN = st.booleans()


@given(
    seed=SEEDS,
    plain=PLAIN,
    grace=st.integers(1, 8) | st.floats(0.5, 8),
    factor=st.integers(2, 4) | st.floats(1.1, 4),
    more=st.integers(0, 50) | st.floats(0, 50),
    brackets=st.integers(1, 4),
    stop_last=st.booleans(),
)
def test_asha_never_decides_unannounced(
    seed: int, plain: bool, grace: float, factor: float, more: float, brackets: int, stop_last: bool
) -> None:
    scheduler = ASHAScheduler(
        **TIMED,
        grace_period=grace,
        max_t=grace + more,
        reduction_factor=factor,
        brackets=brackets,
        stop_last_trials=stop_last,
    )
    run(scheduler, seed, books=asha_books, plain=plain)


@given(
    seed=SEEDS,
    plain=PLAIN,
    max_t=st.integers(1, 40),
    factor=st.integers(2, 4),
    stop_last=st.booleans(),
    kind=st.sampled_from([HyperBandScheduler, HyperBandForBOHB]),
    trials=st.integers(1, 30),
)
def test_hyperband_never_decides_unannounced(
    seed: int, plain: bool, max_t: int, factor: int, stop_last: bool, kind: Any, trials: int
) -> None:
    scheduler = kind(**TIMED, max_t=max_t, reduction_factor=factor, stop_last_trials=stop_last)
    run(scheduler, seed, books=hyperband_books, plain=plain, trials=trials)


@given(
    seed=SEEDS,
    plain=PLAIN,
    grace=st.integers(1, 8) | st.floats(0.5, 8),
    more=st.integers(0, 50) | st.floats(0, 50),
    factor=st.integers(2, 4) | st.floats(1.5, 4),
    bracket_size=st.none() | st.integers(1, 12),
    trials=st.integers(1, 30),
)
def test_successive_halving_never_decides_unannounced(
    seed: int, plain: bool, grace: float, more: float, factor: float, bracket_size: int | None, trials: int
) -> None:
    scheduler = SuccessiveHalvingScheduler(
        **TIMED, grace_period=grace, max_t=grace + more, reduction_factor=factor, bracket_size=bracket_size
    )
    run(scheduler, seed, books=synchronous_books, plain=plain, trials=trials)


@given(seed=SEEDS, plain=PLAIN, max_t=st.integers(1, 40), factor=st.integers(2, 4), at_once=st.integers(1, 3))
def test_bohb_in_lock_step_never_decides_unannounced(
    seed: int, plain: bool, max_t: int, factor: int, at_once: int
) -> None:
    scheduler = SyncBOHB(**TIMED, max_t=max_t, reduction_factor=factor, brackets_at_once=at_once)
    run(scheduler, seed, books=synchronous_books, plain=plain, trials=30)


@pytest.mark.slow
@given(
    seed=SEEDS,
    plain=PLAIN,
    interval=st.integers(1, 15) | st.floats(0.1, 15),
    burn_in=st.integers(0, 20) | st.floats(0, 20),
    synch=st.booleans(),
    quantile=st.floats(0, 0.5),
)
def test_population_based_training_never_decides_unannounced(
    seed: int, plain: bool, interval: float, burn_in: float, synch: bool, quantile: float
) -> None:
    scheduler = PopulationBasedTraining(
        **TIMED,
        perturbation_interval=interval,
        burn_in_period=burn_in,
        synch=synch,
        quantile_fraction=quantile,
        hyperparam_mutations={"a": [0.1, 0.2, 0.3]},
        log_config=False,
    )
    run(scheduler, seed, books=population_books, plain=plain)


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=SEEDS, interval=st.integers(8, 15), synch=st.booleans())
def test_pb2_never_decides_unannounced(seed: int, interval: int, synch: bool) -> None:
    pytest.importorskip("sklearn")
    from ray.tune.schedulers.pb2 import PB2

    scheduler = PB2(
        **TIMED, perturbation_interval=interval, hyperparam_bounds={"a": [0, 1]}, log_config=False, synch=synch
    )
    oracle = run(scheduler, seed, books=population_books, plain=True, trials=4)
    assert oracle.foreseen > 0 and oracle.decisions > 0


@pytest.mark.slow
@given(
    seed=SEEDS,
    plain=PLAIN,
    grace=st.integers(0, 20) | st.floats(0, 20),
    samples=st.integers(1, 4),
    time_slice=st.integers(0, 5),
    hard_stop=st.booleans(),
)
def test_median_stopping_never_decides_unannounced(
    seed: int, plain: bool, grace: float, samples: int, time_slice: int, hard_stop: bool
) -> None:
    scheduler = MedianStoppingRule(
        **TIMED, grace_period=grace, min_samples_required=samples, min_time_slice=time_slice, hard_stop=hard_stop
    )
    run(scheduler, seed, books=median_books, exact=False, plain=plain)


@given(seed=SEEDS, plain=PLAIN, steps=st.lists(st.integers(1, 40), max_size=5))
def test_a_replayed_policy_never_changes_unannounced(
    tmp_path_factory: pytest.TempPathFactory, seed: int, plain: bool, steps: list[int]
) -> None:
    scheduler = replay(tmp_path_factory.mktemp("policy"), sorted(steps))
    run(scheduler, seed, books=lambda replaying, _: replaying._num_perturbations, plain=plain, trials=1)


@given(seed=SEEDS)
def test_fifo_stops_only_where_announced(seed: int) -> None:
    run(FIFOScheduler(), seed, books=lambda *_: None)


@pytest.mark.slow
@given(seed=SEEDS)
def test_an_unknown_scheduler_never_decides_unannounced(seed: int) -> None:
    run(Fickle(**TIMED, grace_period=10), seed, books=asha_books, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "books"),
    [
        (lambda: ASHAScheduler(**TIMED, grace_period=4, max_t=40, brackets=2), asha_books),
        (lambda: HyperBandScheduler(**TIMED, max_t=27), hyperband_books),
        (lambda: HyperBandForBOHB(**TIMED, max_t=27), hyperband_books),
        (lambda: SuccessiveHalvingScheduler(**TIMED, grace_period=3, max_t=27, bracket_size=9), synchronous_books),
        (lambda: SyncBOHB(**TIMED, max_t=32, grace_period=2, reduction_factor=2), synchronous_books),
        (a_population, population_books),
        (lambda: a_population(synch=True), population_books),
    ],
)
def test_the_oracle_is_asked_about_many_decisions_far_ahead(scheduler: Any, books: Any) -> None:
    oracle = run(scheduler(), 1, books=books, plain=True, trials=20)
    assert oracle.decisions >= 20
    assert oracle.foreseen >= 10
