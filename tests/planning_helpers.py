"""Small instances and snapshots of running trials for the tests of planners and re-planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from brute_force import Group, Job, Member, outcome
from hypothesis import strategies as st

from fluid.measure.runtime_model import width_limit
from fluid.planners.arrangement import Arrangement, Running, WidthChange
from fluid.planners.bounds import NarrowestWidths
from fluid.planners.instance import Instance
from fluid.planners.planner import Plan
from fluid.planners.portfolio import PLANNERS
from fluid.planners.rollout import Rollout
from fluid.resources import Cluster, Device

#: Relative tolerance of comparisons between two ways to work out one number.
CLOSE = 1e-9


def fixed_width_lower_bound(instance: Instance) -> float:
    """T*, seconds: bounds schedules in which every trial keeps one width w and takes ``h_i(w)``, at speed 1."""
    return NarrowestWidths(instance, np.floor).fixed_width_bound()


@dataclass(frozen=True)
class Case:
    """What an instance is built from, one entry per trial; speeds one per device."""

    heights: tuple[float, ...]
    speeds: tuple[float, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    c: tuple[int, ...]
    d: tuple[int, ...]
    priority: tuple[float, ...]
    epsilon: float = 0.0

    @property
    def instance(self) -> Instance:
        """The instance of this case."""
        devices = [Device(index, kind="gpu", speed=speed) for index, speed in enumerate(self.speeds)]
        return Instance.build(
            self.heights,
            Cluster.of(devices),
            alpha=self.alpha,
            beta=self.beta,
            c=self.c,
            d=self.d,
            epsilon=self.epsilon,
            priority=self.priority,
        )

    def scaled(self, factor: float) -> Case:
        """The same with every runtime and epsilon times ``factor``."""
        return replace(self, heights=tuple(factor * h for h in self.heights), epsilon=factor * self.epsilon)

    def permuted(self, order: Sequence[int]) -> Case:
        """The same with the trials submitted in another order."""
        columns = ("heights", "alpha", "beta", "c", "d", "priority")
        return replace(self, **{name: tuple(getattr(self, name)[row] for row in order) for name in columns})


#: Runtimes and overheads of few digits, so that different trials tie often.
heights = st.integers(1, 120).map(lambda quarters: quarters / 4)
overheads = st.one_of(st.just(1.0), st.integers(0, 18).map(lambda twentieths: 1.0 + twentieths / 20))
epsilons = st.sampled_from([0.0, 0.1, 1.0, 7.5])
planner_names = st.sampled_from(sorted(PLANNERS))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    most_trials: int = 10,
    most_devices: int = 8,
    alike: bool = False,
    ideal: bool = False,
    speeds: Sequence[float] = (1.0,),
    eps: st.SearchStrategy[float] = epsilons,
    distinct: bool = False,
    priorities: bool = False,
) -> Case:
    """Cases of trials that differ in everything, unless ``alike``; ``ideal`` ones have no overheads."""
    n = draw(st.integers(1, most_devices))
    k = draw(st.integers(1, most_trials))

    def column(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        if alike or draw(st.booleans()):
            return (draw(values),) * k
        return tuple(draw(st.lists(values, min_size=k, max_size=k)))

    overhead = st.just(1.0) if ideal else overheads
    return Case(
        heights=tuple(draw(st.lists(heights, min_size=k, max_size=k, unique=distinct))),
        speeds=tuple(draw(st.lists(st.sampled_from(speeds), min_size=n, max_size=n))),
        alpha=column(overhead),
        beta=column(overhead),
        c=column(st.integers(1, 5)),
        d=column(st.integers(n, 9) if ideal else st.integers(1, 9)),
        priority=column(st.sampled_from([0.0, 1.0, 2.0]) if priorities else st.just(1.0)),
        epsilon=draw(eps),
    )


#: Devices that differ by up to eight times.
UNEQUAL = (0.5, 1.0, 2.0, 4.0)


def plan(name: str, instance: Instance) -> Plan:
    """The plan of the planner of that name."""
    return Plan(name, instance, PLANNERS[name]().arrange(instance))


def makespan(name: str, instance: Instance) -> float:
    """The predicted makespan of the planner of that name; every trial must have ended."""
    made = plan(name, instance)
    assert len(made.schedule.finished) == len(instance), f"{name} leaves trials unfinished"
    return made.makespan


def jobs(instance: Instance, arrangement: Arrangement) -> list[Job]:
    """The trials for :func:`brute_force.simulate`, in the order of the arrangement."""
    model = instance.model
    return [
        Job(
            float(instance.heights[row]),
            float(arrangement.widths[row]),
            float(model.alpha[row]),
            float(model.beta[row]),
            float(instance.priority[row]),
        )
        for row in arrangement.order
    ]


@dataclass(frozen=True)
class Scene:
    """Running trials and idle devices. Rows are numbered through the groups, from 10 up in steps of 3."""

    groups: tuple[Group, ...]
    free: int
    epsilon: float = 0.0

    @property
    def n(self) -> int:
        """All devices."""
        return sum(group.devices for group in self.groups) + self.free

    @property
    def running(self) -> Running:
        """The snapshot a re-planner sees."""
        first_device = np.cumsum([0, *(group.devices for group in self.groups)])
        flat = [(index, group, member) for index, group in enumerate(self.groups) for member in group.members]
        return Running(
            rows=np.arange(len(flat)) * 3 + 10,
            remaining=np.array([member.remaining for _, _, member in flat], dtype=np.float64),
            widths=np.array([group.width for _, group, _ in flat], dtype=np.float64),
            residents=np.array([len(group.members) for _, group, _ in flat], dtype=np.int64),
            device=np.array([first_device[index] for index, _, _ in flat], dtype=np.int64),
            speed=np.array([group.speed for _, group, _ in flat], dtype=np.float64),
            alpha=np.array([member.alpha for _, _, member in flat], dtype=np.float64),
            beta=np.array([member.beta for _, _, member in flat], dtype=np.float64),
            c=np.array([member.c for _, _, member in flat], dtype=np.int64),
            d=np.array([member.d for _, _, member in flat], dtype=np.int64),
            free=self.free,
            n=self.n,
            epsilon=self.epsilon,
        )

    def orders(self, resizes: Sequence[WidthChange]) -> list[tuple[Group, list[int | None]]]:
        """What resizes to whole widths tell each group; each row once, each width another one and at most d."""
        told = dict(resizes)
        assert len(told) == len(resizes), "one order a trial"
        found: list[tuple[Group, list[int | None]]] = []
        row = 10
        for group in self.groups:
            orders: list[int | None] = []
            for member in group.members:
                width = told.pop(row, None)
                assert width is None or (width == int(width) != group.width and 1 <= width <= member.d)
                orders.append(None if width is None else int(width))
                row += 3
            found.append((group, orders))
        assert not told, "unknown rows"
        return found

    def after(self, resizes: Sequence[WidthChange]) -> tuple[float, int]:
        """When the last trial ends once the resizes are made, and how many of the idle devices they take."""
        ends, taken = zip(*(outcome(group, told, self.epsilon) for group, told in self.orders(resizes)), strict=True)
        return max(ends), sum(taken)


@st.composite
def scenes(
    draw: st.DrawFn,
    *,
    most: int = 3,
    pack: bool = True,
    mixed: bool = False,
    widths: Sequence[int] = (1,),
    speeds: Sequence[float] = (1.0,),
    eps: Sequence[float] = (0.0, 0.5, 5.0),
    most_free: int = 5,
) -> Scene:
    """Scenes of up to ``most`` groups. Sharers have one alpha unless ``mixed``."""

    def member(alpha: float) -> Member:
        beta = draw(st.sampled_from([1.0, 1.05, 1.1, 1.25, 1.5]))
        limit = width_limit(beta, n=8, d_max=draw(st.integers(1, 8)))
        return Member(draw(st.integers(1, 80)) / 4, alpha, beta, 4, limit)

    groups = []
    alphas = st.sampled_from([1.0, 1.05, 1.1, 1.25, 1.5])
    for _ in range(draw(st.integers(1, most))):
        speed, alpha = draw(st.sampled_from(speeds)), draw(alphas)
        if pack and draw(st.booleans()):
            sharers = tuple(member(draw(alphas) if mixed else alpha) for _ in range(draw(st.integers(1, 3))))
            groups.append(Group(sharers, 0.25, speed))
        else:
            alone = member(alpha)
            groups.append(Group((alone,), float(min(alone.d, draw(st.sampled_from(widths)))), speed))
    return Scene(tuple(groups), draw(st.integers(0, most_free)), draw(st.sampled_from(eps)))


def started(instance: Instance, arrangement: Arrangement) -> Rollout:
    """A rollout with the arrangement's trials submitted and dispatched, not re-planned."""
    rollout = Rollout(instance.cluster, instance.epsilon)
    rollout.submit(instance, arrangement)
    rollout.dispatch()
    return rollout
