"""The schedulers, against brute force and against Optuna's decisions."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.search.brackets import Brackets
from fluid.search.rungs import brackets_for, halving_shape, hyperband_shapes, rungs_of
from fluid.search.schedulers import AsynchronousHalving, FullBudget, RungScheduler, StoppingHalving


class Workers:
    """Runs a scheduler on a number of workers: which of the trials under way ends next is drawn at random.

    Attributes:
        reached: iterations that each trial has run.
        promotions: (trial, rung) in order.
        ended: trials that were ended by the scheduler, in order.
    """

    def __init__(self, scheduler: RungScheduler, score: dict[int, float] | None = None, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.score = defaultdict(float) if score is None else score
        self.random = random.Random(seed)
        self.under_way: dict[int, int] = {}
        self.reached: dict[int, int] = {}
        self.promotions: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def run(self, workers: int, fails: float = 0.0, worst: bool = False) -> None:
        exhausted = False
        while True:
            while not exhausted and len(self.under_way) < workers:
                fresh = self.scheduler.start()
                exhausted = fresh is None
                if fresh is not None:
                    assert fresh.trial not in self.reached
                    self.under_way[fresh.trial] = fresh.budget
            if not self.under_way:
                return
            self.step(fails, worst)

    def step(self, fails: float, worst: bool) -> None:
        trial = self.random.choice(sorted(self.under_way))
        budget = self.under_way.pop(trial)
        if self.random.random() < fails:
            decision = self.scheduler.ended(trial, is_worst=worst)
        else:
            self.reached[trial] = budget
            decision = self.scheduler.reached(trial, self.score[trial])
        for promotion in decision.promoted:
            assert promotion.trial not in self.under_way
            assert promotion.trial not in self.ended
            assert promotion.budget > self.reached[promotion.trial]
            self.under_way[promotion.trial] = promotion.budget
            self.promotions.append((promotion.trial, promotion.budget))
        assert not set(decision.ended) & set(self.ended)
        assert not set(decision.ended) & set(self.under_way)
        self.ended += decision.ended


class PaperAsha:
    """Algorithm 2 of Li et al. (2020): ``get_job`` looks for a trial to promote from the top rung down."""

    def __init__(self, rungs: tuple[int, ...], eta: int, samples: int) -> None:
        self.rungs, self.eta, self.samples = rungs, eta, samples
        self.results: list[dict[int, float]] = [{} for _ in rungs]
        self.promoted: list[set[int]] = [set() for _ in rungs]
        self.started = 0

    def get_job(self) -> tuple[int, int] | None:
        for k in range(len(self.rungs) - 2, -1, -1):
            ranked = sorted(self.results[k], key=lambda trial: (self.results[k][trial], trial))
            candidates = ranked[: len(ranked) // self.eta]
            promotable = [trial for trial in candidates if trial not in self.promoted[k]]
            if promotable:
                self.promoted[k].add(promotable[0])
                return promotable[0], k + 1
        if self.started < self.samples:
            self.started += 1
            return self.started - 1, 0
        return None


@pytest.mark.parametrize("eta", [2, 3, 4])
@pytest.mark.parametrize("seed", range(10))
def test_asha_promotes_what_the_paper_promotes(seed: int, eta: int) -> None:
    """One worker: each arrival is followed by the paper's next job."""
    rungs, samples = rungs_of(eta**3, eta, 1), 120
    draw = random.Random(seed)
    scores = [draw.choice([draw.random(), 0.5, math.inf]) for _ in range(samples)]
    paper, asha = PaperAsha(rungs, eta, samples), AsynchronousHalving(rungs=rungs, eta=eta, samples=samples)
    queue: list[tuple[int, int]] = []
    promotions = 0
    while (job := paper.get_job()) is not None:
        if queue:
            assert queue.pop() == job
            promotions += 1
        else:
            fresh = asha.start()
            assert fresh is not None
            assert (fresh.trial, fresh.budget) == (job[0], rungs[0])
        trial, rung = job
        score = scores[trial] + draw.choice([0.0, 0.1])
        paper.results[rung][trial] = score
        decision = asha.reached(trial, score)
        assert len(decision.promoted) <= 1
        queue += [(each.trial, rungs.index(each.budget)) for each in decision.promoted]
    assert promotions > samples // (eta + 1)


@pytest.mark.parametrize("seed", range(5))
def test_asha_promotes_an_arrival_as_optunas_pruner_lets_it_go_on(seed: int) -> None:
    """Optuna asks at the arrival alone, so a trial that others let in later is not compared."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    eta = 3
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=eta))
    asha = AsynchronousHalving(rungs=(1, 3), eta=eta, samples=None)
    draw = random.Random(seed)
    both = set()
    for number in range(60):
        value = draw.random()
        trial = study.ask()
        trial.report(value, 1)
        prune = trial.should_prune()
        study.tell(trial, state=optuna.trial.TrialState.PRUNED if prune else None, values=None if prune else value)
        assert asha.start() is not None
        promoted = number in [each.trial for each in asha.reached(number, value).promoted]
        if number >= eta - 1:  # Of fewer, Optuna lets the best go on.
            assert promoted == (not prune)
            both.add(promoted)
    assert both == {True, False}


@given(
    samples=st.integers(1, 60),
    workers=st.integers(1, 12),
    eta=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    fails=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    worst=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_asha_ends_every_trial(samples: int, workers: int, eta: int, seed: int, fails: float, worst: bool) -> None:
    draw = random.Random(seed)
    rungs = rungs_of(eta**3, eta, 1)
    run = Workers(
        AsynchronousHalving(rungs=rungs, eta=eta, samples=samples),
        {trial: draw.choice([draw.random(), math.inf]) for trial in range(samples)},
        seed,
    )
    run.run(workers, fails, worst)
    if not fails:
        assert sorted(run.ended) == list(range(samples))
        assert max(run.reached.values()) == rungs[-1], "one trial gets the whole budget"
        assert set(run.reached) == set(range(samples))
    for rung, above in pairwise(rungs):
        arrived = sum(budget >= rung for budget in run.reached.values())
        beyond = sum(budget == above for _, budget in run.promotions)
        assert beyond <= max(1, samples if worst else arrived)


def test_asha_drops_what_can_no_longer_be_promoted() -> None:
    asha = AsynchronousHalving(rungs=(1, 3, 9), eta=3, samples=9)
    for _ in range(9):
        asha.start()
    ended: list[int] = []
    for trial, score in enumerate((0.1, 0.2, 0.3, 0.4)):
        ended += asha.reached(trial, score).ended
    assert ended == [3], "of 9, three can be promoted, and three are better"


def test_without_a_limit_asha_starts_and_promotes_for_ever_and_drops_nothing() -> None:
    asha = AsynchronousHalving(rungs=(1, 3), eta=3, samples=None)
    draw = random.Random(0)
    for trial in range(300):
        assert asha.start() is not None
        assert not asha.reached(trial, draw.random()).ended


def test_a_worst_trial_counts_as_an_arrival() -> None:
    counted, lost = (AsynchronousHalving(rungs=(1, 3), eta=2, samples=4) for _ in range(2))
    for asha in (counted, lost):
        for _ in range(4):
            asha.start()
        asha.reached(0, 0.5)
    assert [each.trial for each in counted.ended(1, is_worst=True).promoted] == [0]
    assert lost.ended(1).promoted == ()


@given(
    samples=st.integers(1, 100),
    workers=st.integers(1, 200),
    seed=st.integers(0, 10**6),
    hyperband=st.booleans(),
    fails=st.sampled_from([0.0, 0.2, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_brackets_end_every_trial(samples: int, workers: int, seed: int, hyperband: bool, fails: float) -> None:
    rungs = rungs_of(27, 3, 1)
    shapes = brackets_for(samples, rungs, 3) if hyperband else (halving_shape(samples, rungs, 3),)
    draw = random.Random(seed)
    run = Workers(Brackets(shapes), {trial: draw.random() for trial in range(samples)}, seed)
    run.run(workers, fails)
    if not fails:
        assert sorted(run.ended) == list(range(samples))
        finished = sum(shape.sizes[-1] for shape in shapes)
        assert sum(budget == 27 for budget in run.reached.values()) == finished


@pytest.mark.parametrize("seed", range(20))
def test_halving_keeps_the_best_whatever_the_order(seed: int) -> None:
    scores = {trial: float(score) for trial, score in enumerate(random.Random(seed).sample(range(27), 27))}
    run = Workers(Brackets([halving_shape(27, (1, 3, 9, 27), 3)]), scores, seed)
    run.run(workers=5)
    ranked = sorted(scores, key=scores.__getitem__)
    assert {trial for trial, budget in run.promotions if budget == 3} == set(ranked[:9])
    assert {trial for trial, budget in run.promotions if budget == 9} == set(ranked[:3])
    assert [trial for trial, budget in run.promotions if budget == 27] == ranked[:1]


def test_brackets_of_hyperband_are_decided_by_themselves() -> None:
    shapes = hyperband_shapes((1, 3, 9), 3)
    assert [shape.sizes for shape in shapes] == [(9, 3, 1), (5, 1), (3,)]
    scheduler = Brackets(shapes)
    starts = [scheduler.start() for _ in range(18)]
    assert starts.pop() is None
    budgets = [(start.budget, start.follow_up_iterations) for start in starts if start is not None]
    assert budgets == [(1, 8)] * 9 + [(3, 6)] * 5 + [(9, 0)] * 3
    for trial in range(9, 13):
        assert scheduler.reached(trial, trial).promoted == ()
    assert [each.trial for each in scheduler.reached(13, 13).promoted] == [9]


def test_those_behind_a_trial_that_ended_move_up() -> None:
    scheduler = Brackets([halving_shape(9, (1, 3), 3)])
    for _ in range(9):
        scheduler.start()
    for trial in range(6):
        scheduler.ended(trial)
    scheduler.reached(6, 0.3)
    scheduler.reached(7, 0.2)
    decision = scheduler.reached(8, 0.1)
    assert [each.trial for each in decision.promoted] == [8, 7, 6]
    assert decision.ended == ()


def test_full_budget() -> None:
    endless = FullBudget(budget=5, samples=None)
    assert [endless.start().budget for _ in range(100)] == [5] * 100  # type: ignore[union-attr]
    assert endless.reached(3, 0.1).ended == (3,)


# -- trials that are tried again ---------------------------------------------------------------------------------


def test_a_trial_that_is_tried_again_comes_to_the_rung_that_it_was_on_its_way_to() -> None:
    scheduler = AsynchronousHalving(rungs=(1, 3), eta=2, samples=3)
    for _ in range(3):
        scheduler.start()
    assert scheduler.reached(0, 0.5).promoted == ()
    assert [each.trial for each in scheduler.reached(1, 0.2).promoted] == [1]
    scheduler.ended(2)
    scheduler.ended(1)
    scheduler.retried(1)
    scheduler.retried(2)
    assert scheduler.rung_of(1).iterations == 3 and scheduler.rung_of(2).iterations == 1
    assert scheduler.reached(1, 0.1).ended[0] == 1


@pytest.mark.parametrize("is_worst", [False, True])
def test_asha_that_stops_trials_takes_one_up_again(is_worst: bool) -> None:
    scheduler = StoppingHalving(rungs=(1, 3), eta=2)
    scheduler.start()
    scheduler.reached(0, 0.5)
    scheduler.ended(0, is_worst=is_worst)
    scheduler.retried(0)
    assert scheduler.rung_of(0).iterations == 3 and scheduler.reached(0, 0.1).ended == (0,)


def test_a_rung_that_was_decided_without_a_trial_stays_decided() -> None:
    scheduler = Brackets([halving_shape(3, (1, 3), 3)])
    for _ in range(3):
        scheduler.start()
    scheduler.reached(0, 0.5)
    scheduler.ended(2)
    scheduler.retried(2)  # The rung waits for it again.
    assert scheduler.reached(1, 0.7).promoted == ()
    scheduler.ended(2)
    assert scheduler.rung_of(0).iterations == 3, "trial 0 was promoted"
    scheduler.retried(2)
    assert scheduler.reached(2, 0.1).ended == (2,) and scheduler.rung_of(0).iterations == 3
    assert scheduler.reached(0, 0.2).ended == (0,)
