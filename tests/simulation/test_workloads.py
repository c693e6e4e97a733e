"""Tests of fluid.simulation.workloads, the shapes of search algorithms that the simulated backend runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.forecasting.scenario import ALGORITHMS, Workload
from fluid.search.algorithms import make_scheduler
from fluid.search.rungs import hyperband_shapes, rungs_of
from fluid.simulation.workloads import Algorithm, GroupRequest, RunRequest, Scores, make_algorithm

LOCK_STEP = ("random", "successive_halving", "hyperband", "syncbohb", "pbt")


def scores(seed: int = 0) -> Scores:
    return Scores(np.random.default_rng(seed))


@dataclass
class Play:
    """Runs an algorithm: trials end in a random order, several at one instant, some stopped early."""

    algorithm: Algorithm
    seed: int = 0
    early_stop: float = 0.0
    groups: list[GroupRequest] = field(default_factory=list)
    running: dict[int, RunRequest] = field(default_factory=dict)
    #: trial -> iterations of each of its asks that ended, in order.
    done: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    stopped: set[int] = field(default_factory=set)
    most_running: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.take(self.algorithm.start())
        while self.running:
            count = int(rng.integers(1, len(self.running) + 1))
            chosen = sorted(rng.choice(sorted(self.running), size=count, replace=False).tolist())
            reports = [(trial, bool(rng.random() < self.early_stop)) for trial in chosen]
            for trial, early in reports:
                self.done[trial].append(self.running.pop(trial).iterations)
                self.stopped |= {trial} if early else set()
            self.take(self.algorithm.ended(reports))

    def take(self, groups: list[GroupRequest]) -> None:
        self.groups += groups
        for group in groups:
            assert group.requests, "a group is never empty"
            for request in group.requests:
                assert request.iterations >= 1
                assert request.trial not in self.running, "a trial is not asked for while it runs"
                self.running[request.trial] = request
        self.most_running = max(self.most_running, len(self.running))

    @property
    def totals(self) -> dict[int, int]:
        """trial -> iterations it ran in all."""
        return {trial: sum(iterations) for trial, iterations in self.done.items()}

    def rungs(self) -> dict[str, list[tuple[int, int]]]:
        """bracket -> (trials, iterations each has run by the end) of its rungs, in order."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        reached: dict[int, int] = defaultdict(int)
        for group in self.groups:
            for request in group.requests:
                reached[request.trial] += request.iterations
            targets = {reached[request.trial] for request in group.requests}
            assert len(targets) == 1, "all trials of a rung reach the same budget"
            found[group.name.rpartition(" rung ")[0]].append((len(group.requests), targets.pop()))
        return found


def play(algorithm: str, *, seed: int = 0, early_stop: float = 0.0, devices: int = 8, **fields: int) -> Play:
    """Plays the algorithm of that name."""
    return Play(make_algorithm(Workload(algorithm, **fields), scores(), devices), seed, early_stop)  # type: ignore[arg-type]


# --- Scores


def test_a_score_does_not_depend_on_who_is_asked_first() -> None:
    one, other = scores(), scores()
    assert one[5] == other[5]
    forward, backward = [one[trial] for trial in range(10)], [other[trial] for trial in reversed(range(10))]
    assert forward == backward[::-1]
    assert len(set(forward)) == 10
    assert forward != [scores(1)[trial] for trial in range(10)]


# --- Random search


def test_random_search_asks_once_for_everything() -> None:
    algorithm = make_algorithm(Workload("random", trials=5, max_iterations=9), scores(), 8)
    (group,) = algorithm.start()
    assert group.requests == tuple(RunRequest(trial, 9) for trial in range(5))
    assert group.stage == 0
    assert algorithm.ended([(0, False), (1, True)]) == []


# --- Successive Halving

TEXTBOOK = {
    27: [(27, 1), (9, 3), (3, 9), (1, 27)],
    81: [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
}


@pytest.mark.parametrize("most", [27, 81])
def test_the_rungs_of_successive_halving(most: int) -> None:
    played = play("successive_halving", trials=most, max_iterations=most, eta=3)
    assert played.rungs() == {"bracket 0": TEXTBOOK[most]}
    assert [group.stage for group in played.groups] == list(range(len(TEXTBOOK[most])))


@pytest.mark.parametrize(
    ("trials", "most", "eta", "rungs"),
    [
        (100, 27, 3, [(100, 1), (33, 3), (11, 9), (3, 27)]),
        (10, 27, 3, [(10, 1), (3, 3), (1, 9), (1, 27)]),
        (16, 16, 2, [(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)]),
        (10, 50, 3, [(10, 2), (3, 6), (1, 17), (1, 50)]),
        (27, 50, 3, [(27, 2), (9, 6), (3, 17), (1, 50)]),
        (7, 1, 3, [(7, 1)]),
        (1, 27, 3, [(1, 1), (1, 3), (1, 9), (1, 27)]),
        (2, 27, 3, [(2, 1), (1, 3), (1, 9), (1, 27)]),
    ],
)
def test_rungs_of_other_shapes_end_with_the_whole_budget(
    trials: int, most: int, eta: int, rungs: list[tuple[int, int]]
) -> None:
    played = play("successive_halving", trials=trials, max_iterations=most, eta=eta)
    assert played.rungs() == {"bracket 0": rungs}


@given(seed=st.integers(0, 999))
def test_who_survives_does_not_depend_on_who_ends_first(seed: int) -> None:
    played = play("successive_halving", seed=seed, trials=27, max_iterations=27)
    assert played.groups == play("successive_halving", trials=27, max_iterations=27).groups


def test_the_best_of_a_rung_go_on() -> None:
    drawn = scores()
    best = sorted(range(27), key=lambda trial: -drawn[trial])
    groups = play("successive_halving", trials=27, max_iterations=27).groups
    for group, keep in zip(groups[1:], (9, 3, 1), strict=True):
        assert {request.trial for request in group.requests} == set(best[:keep])


def test_who_was_stopped_does_not_go_on() -> None:
    drawn, best = scores(), 0
    algorithm = make_algorithm(Workload("successive_halving", trials=9, max_iterations=9), drawn, 8)
    (rung,) = algorithm.start()
    ranked = sorted((request.trial for request in rung.requests), key=lambda trial: -drawn[trial])
    best, rest = ranked[0], ranked[1:]
    assert algorithm.ended([(trial, False) for trial in rest]) == [], "the rung waits for its last trial"
    (rung,) = algorithm.ended([(best, True)])
    assert {request.trial for request in rung.requests} == set(ranked[1:4])
    assert algorithm.ended([(trial, True) for trial in ranked[1:4]]) == [], "no trial is left"


# --- Hyperband and SyncBOHB

#: Algorithm 1 of the Hyperband paper: n = ceil((s_max + 1) eta^s / (s + 1)) and r = R eta^-s, then halving.
BRACKETS = {
    27: [TEXTBOOK[27], [(12, 3), (4, 9), (1, 27)], [(6, 9), (2, 27)], [(4, 27)]],
    81: [
        TEXTBOOK[81],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ],
}


@pytest.mark.parametrize("most", [27, 81])
@pytest.mark.parametrize("algorithm", ["hyperband", "syncbohb"])
def test_the_brackets_of_hyperband(algorithm: str, most: int) -> None:
    played = play(algorithm, max_iterations=most, eta=3)
    assert played.rungs() == {f"bracket {index}": rungs for index, rungs in enumerate(BRACKETS[most])}
    first_rungs = [rungs[0][0] for rungs in BRACKETS[most]]
    assert len(played.totals) == sum(first_rungs), "no trial is in two brackets"


def test_a_budget_that_is_no_power_of_eta_is_used_whole() -> None:
    rungs = play("hyperband", max_iterations=50, eta=3).rungs()
    assert rungs["bracket 0"] == [(27, 2), (9, 6), (3, 17), (1, 50)]
    assert [bracket[-1][1] for bracket in rungs.values()] == [50, 50, 50, 50]
    assert play("hyperband", max_iterations=2, eta=3).rungs() == {"bracket 0": [(1, 2)]}


def test_the_brackets_of_hyperband_run_side_by_side() -> None:
    algorithm = make_algorithm(Workload("hyperband", max_iterations=27), scores(), 8)
    groups = algorithm.start()
    assert [len(group.requests) for group in groups] == [27, 12, 6, 4]
    assert [group.bracket for group in groups] == [0, 1, 2, 3]
    last = groups[3]
    assert algorithm.ended([(request.trial, False) for request in last.requests]) == []
    (rung,) = algorithm.ended([(request.trial, False) for request in groups[2].requests])
    assert (len(rung.requests), rung.bracket, rung.stage) == (2, 2, 1), "no bracket waits for another"


def test_syncbohb_starts_a_bracket_when_the_one_before_has_finished() -> None:
    groups = play("syncbohb", max_iterations=27).groups
    assert [group.name.split(" rung ")[0] for group in groups] == [
        f"bracket {index}" for index, rungs in enumerate(BRACKETS[27]) for _ in rungs
    ]
    assert [group.stage for group in groups] == list(range(len(groups))), "each stage waits for the one before"
    assert {group.bracket for group in groups} == {0}
    assert play("syncbohb", max_iterations=27).most_running == 27


@pytest.mark.parametrize("algorithm", ["hyperband", "syncbohb"])
def test_brackets_of_which_all_trials_are_stopped_are_over(algorithm: str) -> None:
    played = play(algorithm, early_stop=1.0, max_iterations=27)
    assert {name: len(rungs) for name, rungs in played.rungs().items()} == {f"bracket {i}": 1 for i in range(4)}


# --- ASHA


@pytest.mark.parametrize(("concurrency", "expected"), [(0, 8), (1, 1), (5, 5), (40, 30)])
def test_asha_keeps_that_many_trials_running(concurrency: int, expected: int) -> None:
    played = play("asha", trials=30, max_iterations=27, concurrency=concurrency, devices=8)
    assert played.most_running == expected
    assert len(played.groups[0].requests) == expected
    assert len(played.done) == 30


@given(
    seed=st.integers(0, 999),
    trials=st.integers(1, 60),
    most=st.sampled_from([1, 3, 9, 20, 27]),
    eta=st.integers(2, 4),
    concurrency=st.integers(1, 20),
    early_stop=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_asha_runs_every_trial_to_some_rung(
    seed: int, trials: int, most: int, eta: int, concurrency: int, early_stop: float
) -> None:
    played = play(
        "asha",
        seed=seed,
        early_stop=early_stop,
        trials=trials,
        max_iterations=most,
        eta=eta,
        concurrency=concurrency,
    )
    assert played.most_running == min(trials, concurrency)
    assert sorted(played.done) == list(range(trials))
    rungs = rungs_of(most, eta, 1)
    assert set(played.totals.values()) <= set(rungs)
    assert early_stop < 1.0 or set(played.totals.values()) == {rungs[0]}


@dataclass
class Given(Scores):
    """Scores that are given."""

    values: list[float]

    def __getitem__(self, trial: int) -> float:
        return self.values[trial]


@pytest.mark.parametrize(
    ("name", "of_run"), [("asha", "asha"), ("successive_halving", "sha"), ("hyperband", "hyperband")]
)
@given(data=st.data(), most=st.integers(1, 100), eta=st.integers(2, 4), trials=st.integers(1, 30))
def test_a_simulated_search_promotes_whom_the_scheduler_of_a_run_promotes(
    name: str, of_run: str, data: st.DataObject, most: int, eta: int, trials: int
) -> None:
    rungs = rungs_of(most, eta, 1)
    if name == "hyperband":
        trials = sum(shape.sizes[0] for shape in hyperband_shapes(rungs, eta))
    values = data.draw(st.lists(st.floats(0.0, 1.0), min_size=trials, max_size=trials))
    scheduler = make_scheduler(of_run, rungs=rungs, eta=eta, samples=trials)
    workload = Workload(name, trials=trials, max_iterations=most, eta=eta, concurrency=trials)
    algorithm = make_algorithm(workload, Given(values), 1)
    reached = {each.trial: each.budget for each in iter(scheduler.start, None)}
    running = {request.trial for group in algorithm.start() for request in group.requests}
    done: dict[int, int] = dict.fromkeys(running, 0)
    assert running == reached.keys()
    while running:
        trial = data.draw(st.sampled_from(sorted(running)))
        running.remove(trial)
        done[trial] = reached[trial]
        promoted = {each.trial: each.budget for each in scheduler.reached(trial, -values[trial]).promoted}
        requests = [request for group in algorithm.ended([(trial, False)]) for request in group.requests]
        assert {request.trial: done[request.trial] + request.iterations for request in requests} == promoted
        reached.update(promoted)
        running |= promoted.keys()
    assert max(done.values()) == most


def test_asha_waits_with_the_promotion_until_it_has_whom_to_compare() -> None:
    drawn = scores()
    algorithm = make_algorithm(Workload("asha", trials=9, max_iterations=9, concurrency=3), drawn, 8)
    algorithm.start()
    first, second, third = sorted(range(3), key=lambda trial: drawn[trial])
    (group,) = algorithm.ended([(third, False)])
    assert group.requests == (RunRequest(3, 1, follow_up_iterations=8),), "a fresh trial takes its place"
    (group,) = algorithm.ended([(first, False)])
    assert group.requests == (RunRequest(4, 1, follow_up_iterations=8),)
    (group,) = algorithm.ended([(second, False)])
    assert group.requests == (RunRequest(third, 2, follow_up_iterations=6),), "the best one that waits goes on"
    assert group.stage is None


# --- Population based training


@pytest.mark.parametrize(("most", "interval"), [(27, 5), (27, 27), (5, 9), (1, 1), (20, 5)])
@pytest.mark.parametrize("early_stop", [0.0, 0.5, 1.0])
def test_every_member_of_a_population_runs_to_the_end(most: int, interval: int, early_stop: float) -> None:
    played = play("pbt", early_stop=early_stop, trials=6, max_iterations=most, interval=interval)
    assert played.totals == dict.fromkeys(range(6), most)
    whole, rest = divmod(most, interval)
    expected = [interval] * whole + [rest] * (rest > 0)
    assert all(iterations == expected for iterations in played.done.values())
    assert {group.stage for group in played.groups} == {None}


def test_members_that_end_at_one_instant_go_on_together() -> None:
    algorithm = make_algorithm(Workload("pbt", trials=4, max_iterations=8, interval=5), scores(), 2)
    (group,) = algorithm.start()
    assert group.requests == tuple(RunRequest(member, 5, follow_up_iterations=3) for member in range(4))
    (group,) = algorithm.ended([(0, False), (2, True)])
    assert group.requests == (RunRequest(0, 3), RunRequest(2, 3))
    assert algorithm.ended([(0, False)]) == []


# --- All of them


@given(
    algorithm=st.sampled_from(ALGORITHMS),
    seed=st.integers(0, 999),
    trials=st.integers(1, 40),
    most=st.integers(1, 40),
    eta=st.integers(2, 4),
    interval=st.integers(1, 50),
    concurrency=st.integers(0, 12),
    early_stop=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)
def test_every_algorithm_ends_and_stays_within_its_budget(
    algorithm: str,
    seed: int,
    trials: int,
    most: int,
    eta: int,
    interval: int,
    concurrency: int,
    early_stop: float,
) -> None:
    fields = {
        "trials": trials,
        "max_iterations": most,
        "eta": eta,
        "interval": interval,
        "concurrency": concurrency,
    }
    played = play(algorithm, seed=seed, early_stop=early_stop, **fields)
    assert max(played.totals.values()) <= most
    if algorithm not in ("hyperband", "syncbohb"):
        assert sorted(played.done) == list(range(trials))
    if not early_stop:
        assert max(played.totals.values()) == most, "a trial gets the whole budget"
    if not early_stop and algorithm in LOCK_STEP:
        again = play(algorithm, seed=seed + 1, **fields)
        assert again.totals == played.totals, "lock-step algorithms do not look at who ends first"
