"""The plan of iterations that trials have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import PrefixEndedError
from fluid.search import make_sampler, make_space, schedule
from fluid.search.prefixes import Fork, Member, PrefixPlan, plan_prefixes
from fluid.search.schedules import Schedule, schedules_in


def distinct(members: Sequence[Member]) -> int:
    """How many beginnings of trials there are, one iteration and more long."""
    found = set()
    for member in members:
        values: tuple[Any, ...] = (member.key, tuple(sorted(map(repr, schedules_in(member.config)))))
        for iteration in range(member.budget):
            values = (*values, tuple(repr(one.at(iteration)) for one in _in_order(member)))
            found.add(values)
    return len(found)


def _in_order(member: Member) -> list[Any]:
    return [one for _, one in sorted(schedules_in(member.config).items(), key=lambda one: repr(one[0]))]


def require_right(plan: PrefixPlan, members: Sequence[Member]) -> None:
    for number, run in enumerate(plan.runs):
        assert run.number == number
        assert run.begin == (0 if run.parent is None else plan.runs[run.parent].until)
        assert run.parent is None or run.parent < number
        assert run.begin < run.until
        below = [*run.members, *(one.number for one in plan.runs if one.parent == number)]
        assert len(below) >= 2
        assert list(run.members) == [place for place, fork in enumerate(plan.forks) if fork.run == number]
    for member, fork in zip(members, plan.forks, strict=True):
        assert fork.at <= member.budget
        known = None if fork.run is None else plan.runs[fork.run]
        assert fork.at == (0 if known is None else known.until)
        while known is not None:
            for path, shared in schedules_in(known.config).items():
                mine = schedules_in(member.config)[path]
                assert all(repr(shared.at(place)) == repr(mine.at(place)) for place in range(known.until))
                with pytest.raises(PrefixEndedError):
                    shared.at(known.until)
            known = None if known.parent is None else plan.runs[known.parent]


def test_a_grid_of_48_schedules_runs_a_third_of_its_iterations() -> None:
    space = make_space({"lr": schedule({0: 0.1, 10: [1, 2, 3], 20: [1, 2, 3, 4], 30: [1, 2, 3, 4]})})
    grid = make_sampler("grid", space)
    members = [Member("train", suggestion.config, 40) for suggestion in iter(grid.ask, None)]
    plan = plan_prefixes(members)
    assert len(members) == 48
    assert plan.iterations(members) == distinct(members) == 640
    assert len(plan.runs) == 1 + 3 + 12
    assert {fork.at for fork in plan.forks} == {30}
    require_right(plan, members)


def members_strategy() -> st.SearchStrategy[list[Member]]:
    values = st.sampled_from([0.1, 0.2, 1, True, math.inf, "a", None, (1, 2)])
    steps = st.dictionaries(st.integers(1, 8), values, max_size=3).flatmap(
        lambda later: values.map(lambda first: schedule({0: 0.5, **_plain({1: first, **later})}))
    )
    numbers = st.sampled_from([0.0, 0.5, 1.0])
    lines = st.builds(
        lambda first, later: schedule({0: first, **later}, between="linear"),
        numbers,
        st.dictionaries(st.integers(1, 8), numbers, max_size=3),
    )
    functions = st.builds(lambda at, low: schedule(_fall, at=at, low=low), st.integers(0, 8), numbers)
    schedules = st.one_of(steps, lines, functions)
    configs = st.one_of(
        st.fixed_dictionaries({"lr": schedules}),
        st.fixed_dictionaries({"lr": schedules, "nested": st.fixed_dictionaries({"wd": steps})}),
        st.just({"layers": 3}),
    )
    return st.lists(st.builds(Member, st.sampled_from("ab"), configs, st.integers(1, 10)), max_size=14)


def _plain(values: dict[int, Any]) -> dict[int, Any]:
    # A tuple is no value of a schedule's dict; an element of a list of one is.
    return {start: 0.25 if isinstance(value, tuple) else value for start, value in values.items()}


def _fall(iteration: int, at: int, low: float) -> float:
    return 0.5 if iteration < at else low


@given(members_strategy())
def test_as_many_iterations_are_run_as_there_are_distinct_beginnings(members: list[Member]) -> None:
    plan = plan_prefixes(members)
    assert plan.iterations(members) == distinct(members)
    require_right(plan, members)


def test_equal_schedules_fork_at_the_smaller_budget() -> None:
    members = [Member("a", {"lr": schedule({0: 1, 50: 2})}, budget) for budget in (10, 30, 20, 30)]
    plan = plan_prefixes(members)
    assert plan.forks == (Fork(0, 10), Fork(2, 30), Fork(1, 20), Fork(2, 30))
    assert [(run.parent, run.until, run.members) for run in plan.runs] == [
        (None, 10, (0,)),
        (0, 20, (2,)),
        (1, 30, (1, 3)),
    ]


def test_what_is_no_schedule_must_be_alike() -> None:
    rate = schedule(1)
    members = [
        Member("a", {"lr": rate}, 5),
        Member("b", {"lr": rate}, 5),
        Member("a", {"wd": rate}, 5),
        Member("a", {"lr": rate, "wd": rate}, 5),
        Member("a", {"wd": rate, "lr": rate}, 5),
        Member("a", {"lr": [rate]}, 5),
    ]
    assert [fork.run for fork in plan_prefixes(members).forks] == [None, None, None, 0, 0, None]


def test_values_of_other_types_are_other_values() -> None:
    values = [1, 1.0, True, np.float64(1.0), np.float32(1.0), -0.0, 0.0, "1"]
    members = [Member("a", {"lr": schedule(value)}, 5) for value in values for _ in range(2)]
    assert [fork.run for fork in plan_prefixes(members).forks] == [place for place in range(len(values)) for _ in "12"]


def test_the_schedules_of_a_run_have_its_name() -> None:
    members = [Member("a", {"lr": schedule(1)}, 5)] * 2
    run = plan_prefixes(members, "train-shared-{}".format).runs[0]
    assert run.config["lr"] == schedule(1).until(5)
    assert vars(run.config["lr"])["_run"] == "train-shared-0"


def test_the_run_of_a_config_of_a_class_of_the_users_is_of_that_class() -> None:
    class Named(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    members = [Member("a", {"part": Named(lr=schedule({0: 1, 3: last}), other=2)}, 5) for last in (1, 2)]
    known = plan_prefixes(members).runs[0].config["part"]
    assert type(known) is Named
    assert known.lr == schedule(1).until(3)
    assert members[0].config["part"].lr.at(4) == 1


# -- functions -----------------------------------------------------------------------------------


def fails(iteration: int, at: int, error: type[BaseException]) -> float:
    if iteration >= at:
        raise error("of the user")
    return 0.1


@pytest.mark.parametrize("error", [ValueError, SystemExit, PrefixEndedError])
def test_a_function_that_raises_ends_sharing_there(error: type[BaseException]) -> None:
    members = [Member("a", {"lr": schedule(fails, at=3, error=error)}, 10) for _ in range(3)]
    plan = plan_prefixes(members)
    assert plan.forks == (Fork(0, 3),) * 3
    assert plan_prefixes([Member("a", {"lr": schedule(fails, at=0, error=error)}, 9)] * 2).runs == ()


def test_a_function_that_gives_other_values_ends_sharing_there() -> None:
    calls = []

    def counts(iteration: int) -> int:
        calls.append(iteration)
        return 0 if iteration < 4 else len(calls)

    plan = plan_prefixes([Member("a", {"lr": schedule(counts)}, 10) for _ in range(3)])
    assert plan.forks == (Fork(0, 4),) * 3


def test_a_function_is_asked_no_more_than_it_takes() -> None:
    calls = []

    def told(iteration: int, low: float) -> float:
        calls.append((iteration, low))
        return low if iteration >= 3 else 1.0

    plan = plan_prefixes([Member("a", {"lr": schedule(told, low=low)}, 100) for low in (0.1, 0.2, 0.2)])
    assert plan.forks[0] == Fork(0, 3)
    assert max(iteration for iteration, low in calls if low == 0.1) == 3
    calls.clear()
    plan_prefixes([Member("a", {"lr": schedule(told, low=low)}, 1000) for low in (0.1, 0.2, 0.3)])
    assert sorted(calls) == sorted((iteration, low) for low in (0.1, 0.2, 0.3) for iteration in range(4) for _ in "12")


# -- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "starts",
    [
        lambda place: {0: 0.1, 1 + place: 0.2},
        lambda place: {0: 0.1, 10_000 - place: 0.2},
        lambda place: {0: 0.1, 10: place % 10, 10**8: place // 10 % 10, 2 * 10**8: place // 100},
        lambda place: {0: float(place), 10: 0.1},
    ],
)
def test_ten_thousand_trials_are_not_compared_each_with_each(starts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Member("a", {"lr": schedule(starts(place))}, 10**9) for place in range(10_000)]
    compared, span = [0], Schedule.span

    def counted(self: Schedule, iteration: int) -> Any:
        compared[0] += 1
        return span(self, iteration)

    monkeypatch.setattr(Schedule, "span", counted)
    plan = plan_prefixes(members)
    assert compared[0] < 100 * len(members)
    assert len(plan.forks) == len(members)
    assert plan.iterations(members) <= sum(member.budget for member in members)
