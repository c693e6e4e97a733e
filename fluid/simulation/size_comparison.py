"""Compares what a deadline costs on fixed numbers of devices, and on as many as the sizer decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from fluid.forecasting.scenario import Scenario
from fluid.planners.planner import Planner
from fluid.simulation.sized import HeldResult, Terms, first_sizing, simulate_fixed, simulate_sized
from fluid.sizing.goals import Goals
from fluid.sizing.sizer import Sizing


@dataclass(frozen=True)
class SizeFigures:
    """One way to hold devices, over runs with several seeds.

    Attributes:
        devices: the fixed number; ``None`` for as many as the sizer decides.
        preemptible: whether the provider takes devices back.
        runs: one for each seed.
        met: share of the runs that met the deadline, and the budget if there is one; ``None`` without either.
        median_s, late_s: seconds by which half, and nine of ten, of the runs have ended.
        device_hours: paid for, in the mean.
        cost_usd: in the mean; ``None`` if the price is unknown.
    """

    devices: int | None
    preemptible: bool
    runs: tuple[HeldResult, ...]
    met: float | None
    median_s: float
    late_s: float
    device_hours: float
    cost_usd: float | None


@dataclass(frozen=True)
class SizeComparison:
    """Fixed numbers of devices beside the sizer.

    Attributes:
        goals: deadline, budget and price of a device that stays.
        first: the sizer's decision before the first trial.
        fixed: in order of their numbers.
        sized: as the sizer decides; the first on devices that stay, a second on preemptible ones if they have a price.
    """

    goals: Goals
    first: Sizing
    fixed: tuple[SizeFigures, ...]
    sized: tuple[SizeFigures, ...]

    @property
    def cheapest(self) -> SizeFigures | None:
        """The cheapest fixed number that meets the goals with the odds asked for; ``None`` if none does."""
        enough = [each for each in self.fixed if each.met is not None and each.met >= self.goals.odds]
        return min(enough, key=lambda each: (each.device_hours, each.devices), default=None)


#: Runs one scenario on some terms.
_RunOnce = Callable[[Scenario, Terms], HeldResult]


def compare_sizes(
    scenario: Scenario,
    make: Callable[[], Planner],
    goals: Goals,
    terms: Terms,
    counts: Sequence[int],
    *,
    seeds: int,
    spot: float | None = None,
    track: Callable[[Sequence[tuple[str, int]]], Iterable[tuple[str, int]]] = iter,
) -> SizeComparison:
    """Runs a scenario with several seeds on each fixed number of devices, and as the sizer decides.

    Args:
        scenario: what to run; its own devices do not count.
        make: makes a planner for each run.
        goals: deadline, budget and price of a device that stays.
        terms: on which devices are to be had; those that stay are never taken back.
        counts: the fixed numbers.
        seeds: how many, from the scenario's on.
        spot: price of a preemptible device as a share of that of one that stays; ``None`` to leave them out.
        track: yields the runs, named, as they are begun.
    """
    stays = replace(terms, preempt_every_s=None)
    ways: dict[str, tuple[int | None, Terms, Goals, _RunOnce]] = {}
    for count in sorted(set(counts)):
        ways[f"{count} devices"] = count, stays, goals, _fixed(make, count)
    ways["sized"] = None, stays, goals, _sized(make, goals)
    if spot is not None:
        price = goals.price_per_device_hour
        cheaper = replace(goals, price_per_device_hour=None if price is None else spot * price)
        ways["sized, preemptible"] = None, terms, cheaper, _sized(make, cheaper)
    runs: dict[str, list[HeldResult]] = {name: [] for name in ways}
    for name, seed in track([(name, scenario.seed + index) for name in ways for index in range(seeds)]):
        runs[name].append(ways[name][3](scenario.with_seed(seed), ways[name][1]))
    figures = [
        _figures(devices, on.preempt_every_s is not None, runs[name], aims)
        for name, (devices, on, aims, _) in ways.items()
    ]
    fixed = tuple(each for each in figures if each.devices is not None)
    sized = tuple(each for each in figures if each.devices is None)
    return SizeComparison(goals, first_sizing(scenario, goals, stays), fixed, sized)


def _fixed(make: Callable[[], Planner], count: int) -> _RunOnce:
    return lambda scenario, terms: simulate_fixed(scenario, make(), count, terms)


def _sized(make: Callable[[], Planner], goals: Goals) -> _RunOnce:
    return lambda scenario, terms: simulate_sized(scenario, make(), goals, terms)


def _figures(devices: int | None, preemptible: bool, runs: list[HeldResult], goals: Goals) -> SizeFigures:
    ends = [run.simulation.makespan for run in runs]
    costs = [goals.cost(run.device_s) for run in runs]
    met = None
    if goals.deadline_s is not None or goals.budget_usd is not None:
        met = fmean(
            (goals.deadline_s is None or end <= goals.deadline_s)
            and (goals.budget_usd is None or cost is None or cost <= goals.budget_usd)
            for end, cost in zip(ends, costs, strict=True)
        )
    known = [cost for cost in costs if cost is not None]
    return SizeFigures(
        devices=devices,
        preemptible=preemptible,
        runs=tuple(runs),
        met=met,
        median_s=float(np.quantile(ends, 0.5)),
        late_s=float(np.quantile(ends, 0.9, method="higher")),
        device_hours=fmean(run.device_s for run in runs) / 3600.0,
        cost_usd=fmean(known) if known else None,
    )
