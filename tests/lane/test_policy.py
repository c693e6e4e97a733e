"""Who runs next in a lane: each policy does what it says, whatever the work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.lane.policy import DEFAULT_POLICY, POLICIES, ResidentWork, choose, joining_service

#: (seconds per iteration, iterations) of residents. Whole seconds, so that sums are exact.
JOBS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=6)
RESIDENTS = st.lists(
    st.builds(ResidentWork, st.none(), st.none() | st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=8
).map(lambda works: [work._replace(key=number) for number, work in enumerate(works)])
NAMES = st.sampled_from(sorted(POLICIES))


def run(policy: str, jobs: Sequence[tuple[int, int]], slack: float = 0.0, *, until: float = float("inf")) -> Run:
    """Runs a lane: every iteration the policy is asked, knowing all exactly."""
    lane = Run(jobs)
    while lane.left and lane.now < until:
        works = [
            ResidentWork(key, float(seconds * lane.left[key]), lane.served[key]) for key, seconds in lane.pace.items()
        ]
        lane.advance(choose(policy, works, current=lane.current, slack=slack).key)
    return lane


class Run:
    """A lane's clock and what each resident had of it."""

    def __init__(self, jobs: Sequence[tuple[int, int]]) -> None:
        self.pace = {key: seconds for key, (seconds, _) in enumerate(jobs)}
        self.left = {key: iterations for key, (_, iterations) in enumerate(jobs)}
        self.served = dict.fromkeys(self.left, 0.0)
        self.done: dict[int, float] = {}
        self.now, self.switches, self.current = 0.0, 0, None
        #: Seconds that everyone who was not done had been served, after each iteration.
        self.spreads: list[float] = []

    def advance(self, key: object) -> None:
        assert isinstance(key, int)
        self.switches += key != self.current
        self.current = key  # type: ignore[assignment]
        self.now += self.pace[key]
        self.served[key] += self.pace[key]
        waiting = [self.served[other] for other in self.left]
        self.spreads.append(max(waiting) - min(waiting))
        self.left[key] -= 1
        if not self.left[key]:
            self.done[key] = self.now
            del self.left[key], self.pace[key]


# --- Worked examples

THREE = [ResidentWork("a", 5.0, 3.0), ResidentWork("b", 9.0, 4.0), ResidentWork("c", 2.0, 1.0)]


@pytest.mark.parametrize(("policy", "chosen"), [("longest_first", "b"), ("srtf", "c"), ("fair", "c")])
def test_each_chooses_its_own(policy: str, chosen: str) -> None:
    assert choose(policy, THREE).key == chosen


def test_the_default_is_for_the_makespan() -> None:
    assert DEFAULT_POLICY == "longest_first"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_of_equals_the_first_to_come_runs(policy: str) -> None:
    assert choose(policy, [ResidentWork("z", 5.0), ResidentWork("a", 5.0)]).key == "z"
    stays = choose(policy, [ResidentWork("z", 5.0), ResidentWork("a", 5.0)], current="a").key
    assert stays == ("z" if policy == "rounds" else "a"), "it is there already, and only rounds never stay"


def test_in_rounds_the_one_runs_whose_latest_turn_is_longest_ago() -> None:
    works = [ResidentWork("a", 5.0, turn=3), ResidentWork("b", 5.0, turn=1), ResidentWork("c", None, turn=2)]
    assert choose("rounds", works, current="a", slack=100.0).key == "b"
    assert choose("rounds", [*works, ResidentWork("new", None)], current="b").key == "new"


@pytest.mark.parametrize("policy", ["longest_first", "srtf"])
def test_one_that_nothing_is_known_about_runs_first(policy: str) -> None:
    assert choose(policy, [ResidentWork("a", 0.0), ResidentWork("b", None), ResidentWork("c", 1e9)]).key == "b"


def test_fairness_needs_no_prediction() -> None:
    assert choose("fair", [ResidentWork("a", 1.0, 2.0), ResidentWork("b", None, 3.0)]).key == "a"


def test_slack_keeps_the_current_one() -> None:
    works = [ResidentWork("a", 10.0, 5.0), ResidentWork("b", 12.0, 4.0)]
    assert choose("longest_first", works, current="a").key == "b"
    assert choose("longest_first", works, current="a", slack=2.0).key == "a"
    assert choose("longest_first", works, current="a", slack=1.9).key == "b"
    assert choose("fair", works, current="a", slack=1.0).key == "a"
    assert choose("longest_first", works, current="gone", slack=9.0).key == "b"


def test_slack_saves_switches() -> None:
    jobs = [(1, 20), (1, 20)]
    assert run("longest_first", jobs).switches == 21, "each runs two iterations in turn"
    assert run("longest_first", jobs, slack=5.0).switches == 5


def test_one_that_joins_is_no_worse_off_and_no_better() -> None:
    assert joining_service([]) == 0.0
    assert joining_service([ResidentWork("a", 1.0, 30.0), ResidentWork("b", 1.0, 20.0)]) == 20.0


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("policy", lambda: choose("best", THREE)),
        ("residents", lambda: choose("longest_first", [])),
        ("slack", lambda: choose("longest_first", THREE, slack=-1.0)),
        ("remaining", lambda: choose("longest_first", [ResidentWork("a", -1.0)])),
        ("remaining", lambda: choose("fair", [ResidentWork("a", float("nan"))])),
        ("service", lambda: choose("longest_first", [ResidentWork("a", 1.0, -1.0)])),
    ],
)
def test_bad_input_is_refused(field: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(InvalidFieldError) as caught:
        call()
    assert caught.value.field == field


# --- What always holds


@given(NAMES, RESIDENTS, st.data())
def test_the_choice_is_one_of_them_and_none_is_ahead_by_more_than_the_slack(
    policy: str, residents: list[ResidentWork], data: st.DataObject
) -> None:
    slack = data.draw(st.floats(0, 1e3))
    current = data.draw(st.none() | st.sampled_from([work.key for work in residents]))
    chosen = choose(policy, residents, current=current, slack=slack)
    assert chosen in residents
    ranks = {work.key: POLICIES[policy](work) for work in residents}
    assert ranks[chosen.key] <= min(ranks.values()) + slack
    if chosen.key != current:
        assert ranks[chosen.key] == min(ranks.values()), "a switch is to the best"


@given(NAMES, JOBS, st.sampled_from([0.0, 3.0]))
def test_a_lane_never_idles_and_ends_when_the_work_is_done(
    policy: str, jobs: list[tuple[int, int]], slack: float
) -> None:
    lane = run(policy, jobs, slack)
    assert lane.now == sum(seconds * iterations for seconds, iterations in jobs)
    assert len(lane.done) == len(jobs)


@given(JOBS)
def test_shortest_first_has_the_least_mean_time(jobs: list[tuple[int, int]]) -> None:
    """Against every order of running them one after another; taking turns can only be worse."""
    lengths = [seconds * iterations for seconds, iterations in jobs]
    best = min(sum(itertools.accumulate(order)) for order in itertools.permutations(lengths))
    assert sum(run("srtf", jobs).done.values()) == best


@given(JOBS)
def test_fair_residents_are_never_further_apart_than_an_iteration(jobs: list[tuple[int, int]]) -> None:
    assert max(run("fair", jobs).spreads) <= max(seconds for seconds, _ in jobs)


@given(JOBS, st.data())
def test_longest_first_leaves_the_least_to_do_alone(jobs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Stopped at any time, the longest that is left is no longer than under the others, but for one iteration."""
    total = sum(seconds * iterations for seconds, iterations in jobs)
    until = data.draw(st.integers(0, total))
    slowest = max(seconds for seconds, _ in jobs)

    def longest(policy: str) -> float:
        lane = run(policy, jobs, until=until)
        return max((lane.pace[key] * iterations for key, iterations in lane.left.items()), default=0)

    for other in ("srtf", "fair"):
        assert longest("longest_first") <= longest(other) + slowest
