"""No prefix twice: which iterations of trials are one run, until the schedules of their configs differ.

Trials that agree on everything but schedules form a tree: they are one run as long as the schedules agree, then fork.
Pure; but it asks functions of the user for values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fluid.search.schedules import Schedule, schedules_in, with_schedules
from fluid.user_values import is_same_value

#: Types whose values are the same if they are equal; of floats, signs and NaN count besides.
_PLAIN = frozenset({int, str, bool, bytes, type(None)})

#: Knuth's multiplicative hash of 32 bits.
_MULTIPLIER = 2654435761


class Member(NamedTuple):
    """A trial that may share its first iterations.

    Attributes:
        key: of all that must be alike besides the schedules of the config: the rest of the config, the trainable, the
            seed.
        config: its hyperparameters.
        budget: iterations that it runs; at least 1.
    """

    key: Hashable
    config: Mapping[str, Any]
    budget: int


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Iterations that several trials have in common.

    Attributes:
        number: its place among the runs of the plan; a parent's is lower.
        parent: number of the run from whose end it starts; ``None`` if it starts from nothing.
        begin: iterations done by then, 0 without a parent.
        until: iterations done as it ends.
        config: the hyperparameters, with schedules that know as many iterations.
        members: places of the trials that start from its end, in order; those of its children are not among them.
    """

    number: int
    parent: int | None
    begin: int
    until: int
    config: Mapping[str, Any]
    members: tuple[int, ...]


class Fork(NamedTuple):
    """From where a trial starts.

    Attributes:
        run: number of the run; ``None`` if it shares nothing.
        at: iterations done by then: 0 if it shares nothing, and its budget if nothing is left to run.
    """

    run: int | None
    at: int


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What is run once.

    Attributes:
        runs: the shared runs, parents first.
        forks: from where each trial starts, in the order in which they were given.
    """

    runs: tuple[PrefixRun, ...]
    forks: tuple[Fork, ...]

    def iterations(self, members: Sequence[Member]) -> int:
        """How many are run in all, by the shared runs and by the trials that the plan was made of."""
        alone = sum(member.budget - fork.at for member, fork in zip(members, self.forks, strict=True))
        return alone + sum(run.until - run.begin for run in self.runs)


def plan_prefixes(members: Iterable[Member], name_of: Callable[[int], str] = str) -> PrefixPlan:
    """Plans which iterations are run once.

    There is a run wherever at least two members agree for at least one iteration more than its parent, so as few
    iterations are run as there are distinct beginnings of trials. Two schedules agree until the first iteration at
    which their values are not surely the same; those of a function until it raises an error, or gives other values if
    it is asked twice. Members whose schedules agree throughout share the smaller budget. Configs without a schedule
    that have equal keys agree, too: leave trials out that are to repeat each other.

    Functions are asked for the iterations that are shared, and one more. All else takes as long as there are members
    and values in their schedules, however many iterations these hold for.

    Args:
        members: the trials.
        name_of: makes a run's id of its number, for the schedules of the run.

    Example:
        >>> from fluid.search import schedule
        >>> from fluid.search.prefixes import Member, plan_prefixes
        >>> rates = [schedule({0: 0.1, 10: rate}) for rate in (0.1, 0.01, 0.001)]
        >>> members = [Member("train", {"lr": rate}, 30) for rate in rates]
        >>> plan = plan_prefixes(members)
        >>> plan.runs[0].until, plan.forks, plan.iterations(members)
        (10, (Fork(run=0, at=10), Fork(run=0, at=10), Fork(run=0, at=10)), 70)
    """
    trials = list(members)
    tree = _Tree(trials)
    by_key = defaultdict[tuple[Hashable, Hashable], list[int]](list)
    courses = _Courses()
    tracks = []
    for number, member in enumerate(trials):
        found = dict(sorted(schedules_in(member.config).items(), key=lambda one: repr(one[0])))
        tracks.append([courses.of(each) for each in found.values()])
        by_key[member.key, tuple(found)].append(number)
    for group in by_key.values():
        tree.grow(group, tracks)
    return tree.plan(name_of, courses)


# -- agreement -----------------------------------------------------------------------------------


class _Course:
    """The values of a schedule, each asked for once, or twice of a function."""

    def __init__(self, schedule: Schedule, values: _Values) -> None:
        self.schedule = schedule
        self._values = values
        self.is_function = schedule.span(0) is None
        #: What the function gave, and what stands for it; ``None`` from where it cannot be relied on.
        self._given: list[Any] = []
        self._asked: list[Hashable] = []

    def key(self, iteration: int) -> Hashable:
        """What stands for the value there: equal keys, equal values."""
        if not self.is_function:
            return self._values.key(self.schedule.at(iteration))
        while len(self._asked) <= iteration:
            self._asked.append(self._ask(len(self._asked)))
        return self._asked[iteration]

    def until(self, iterations: int, run: str, place: tuple[Any, ...]) -> Schedule:
        """The schedule of a run."""
        given = replace(self.schedule, _function=self._given.__getitem__, _arguments=()) if self.is_function else None
        return (given or self.schedule).until(iterations, run, place)

    def _ask(self, iteration: int) -> Hashable:
        try:
            given = [self.schedule.at(iteration) for _ in range(2)]
            first, again = map(self._values.key, given)
        except (Exception, SystemExit, GeneratorExit):  # The user's function: each trial meets the error by itself.
            return None
        self._given.append(given[0])
        return first if first == again else None

    def agrees_until(self, other: _Course, begin: int, end: int) -> int:
        """The first iteration in a range at which two schedules that agree before it do not; else its end."""
        if self is other and not self.is_function:
            return end
        at = begin
        while at < end:
            mine, theirs = (None if one.is_function else one.schedule.span(at) for one in (self, other))
            if mine is not None and theirs is not None and len(mine.law) == len(theirs.law):
                is_line = len(mine.law) > 1
                if mine.law == theirs.law if is_line else self.key(at) == other.key(at):
                    at = min(stop for stop in (mine.stop, theirs.stop, end) if stop is not None)
                    continue
                if not is_line:
                    return at
            if (key := self.key(at)) is None or key != other.key(at):
                return at
            asked = zip(self._asked[at + 1 : end], other._asked[at + 1 : end], strict=False)  # Of functions.
            differ = (number for number, (one, another) in enumerate(asked, at + 1) if one is None or one != another)
            at = next(differ, min(max(at + 1, min(len(self._asked), len(other._asked))), end))
        return min(at, end)


class _Values:
    """Gives values keys, of which equal ones are surely of the same value."""

    def __init__(self) -> None:
        self._others: list[Any] = []

    def key(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is float:
            return (kind, value, math.copysign(1.0, value)) if value == value else (kind,)
        if kind in _PLAIN:
            return (kind, value)
        if isinstance(value, np.number):
            return (kind, value.tobytes())
        for number, other in enumerate(self._others):
            if is_same_value(other, value):
                return number
        self._others.append(value)
        return len(self._others) - 1


class _Courses:
    """One course for equal schedules."""

    def __init__(self) -> None:
        self._values = _Values()
        self._known: dict[Hashable, _Course] = {}

    def of(self, schedule: Schedule) -> _Course:
        if (key := (schedule, schedule.signs)) not in self._known:
            self._known[key] = _Course(schedule, self._values)
        return self._known[key]


# -- tree ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """The end of a run.

    Attributes:
        parent: place of the one before among the nodes; ``None`` for none.
        until: iterations done there.
        first: lowest place of a member below it.
        members: those that start from it.
    """

    parent: int | None
    until: int
    first: int
    members: list[int]


class _Tree:
    """The runs found so far, and where each member starts."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._nodes: list[_Node] = []
        self._starts: list[int | None] = [None] * len(members)

    def grow(self, group: list[int], tracks: Sequence[Sequence[_Course]]) -> None:
        """Adds members with equal keys, and schedules in the same places."""
        # Members that agree until an iteration, the node that stands for that or an earlier one, and the iteration.
        left: list[tuple[list[int], int | None, int]] = [(group, None, 0)]
        while left:
            alike, parent, begin = left.pop()
            # Any would do. One at random parts the others evenly, whatever their order; so does one by a hash.
            pivot = alike[(len(alike) * _MULTIPLIER % 2**32) * len(alike) >> 32]
            parting = defaultdict[int, list[int]](list)
            compared: dict[tuple[Hashable, ...], int] = {}
            for member in alike:
                if member == pivot:
                    continue
                end = min(self._members[pivot].budget, self._members[member].budget)
                if (way := (end, *tracks[member])) not in compared:
                    compared[way] = _agree_until(tracks[pivot], tracks[member], begin, end)
                parting[compared[way]].append(member)
            firsts, first = {}, pivot
            for until in sorted(parting, reverse=True):
                firsts[until] = first = min(first, *parting[until])
            for until in sorted(parting):
                # All that are left agree until here, two at least.
                if until > (0 if parent is None else self._nodes[parent].until):
                    self._nodes.append(_Node(parent, until, firsts[until], []))
                    parent = len(self._nodes) - 1
                parted = defaultdict[Hashable, list[int]](list)
                for member in parting[until]:
                    parted[self._turn(member, until, tracks)].append(member)
                left += [(members, parent, until) for members in parted.values()]
            self._starts[pivot] = parent

    def plan(self, name_of: Callable[[int], str], courses: _Courses) -> PrefixPlan:
        """What was found, in the order of the members."""
        for member, start in enumerate(self._starts):
            if start is not None:
                self._nodes[start].members.append(member)
        order = sorted(range(len(self._nodes)), key=lambda place: (self._nodes[place].first, self._nodes[place].until))
        numbers = {place: number for number, place in enumerate(order)}
        runs = []
        for number, node in enumerate(self._nodes[place] for place in order):
            parent, begin = (None, 0) if node.parent is None else (numbers[node.parent], self._nodes[node.parent].until)
            config = self._members[node.first].config
            places = iter(schedules_in(config))  # In the order in which they are replaced.
            known = with_schedules(config, partial(_known_until, courses, node.until, name_of(number), places))
            runs.append(PrefixRun(number, parent, begin, node.until, known, tuple(node.members)))
        forks = (
            Fork(None, 0) if start is None else Fork(numbers[start], self._nodes[start].until) for start in self._starts
        )
        return PrefixPlan(tuple(runs), tuple(forks))

    def _turn(self, member: int, iteration: int, tracks: Sequence[Sequence[_Course]]) -> Hashable:
        """What members have in common that run the same iteration next."""
        if self._members[member].budget <= iteration:
            return member
        keys = [course.key(iteration) for course in tracks[member]]
        return member if None in keys else tuple(keys)


def _agree_until(one: Sequence[_Course], other: Sequence[_Course], begin: int, end: int) -> int:
    """The first iteration in a range at which schedules that agree before it do not; else its end."""
    for mine, theirs in zip(one, other, strict=True):
        end = mine.agrees_until(theirs, begin, end)
    return end


def _known_until(
    courses: _Courses, iterations: int, run: str, places: Iterator[tuple[Any, ...]], schedule: Schedule
) -> Schedule:
    return courses.of(schedule).until(iterations, run, next(places))
