"""A search in the middle of its run, as a forecast needs it: its live trials, those that have ended, those to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluid.search.rungs import hyperband_shapes
from fluid.search_shape import SearchShape
from fluid.simulation.scenario import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTrial:
    """A trial that has not ended for good.

    Attributes:
        done: iterations that it has run.
        granted: iterations up to which it runs before its search decides again; at most ``done`` while it waits for
            that decision.
        runs: whether it holds a device; else it waits for one, or for a decision.
        seconds: median of its seconds per iteration, alone on a device; ``None`` to draw them as for one to come.
        sigma: standard deviation of the logarithm of the true seconds over these.
        elapsed: seconds since its iteration in flight began.
        bracket: number of its bracket, where its search has several.
    """

    done: int
    granted: int
    runs: bool
    seconds: float | None
    sigma: float = 0.0
    elapsed: float = 0.0
    bracket: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchNow:
    """A search as it stands.

    Attributes:
        shape: of its algorithm; ``None`` if unknown: then trials end as those before them did.
        live: its trials that have not ended, in the order in which they start.
        ended: number of trials that have ended, by the iterations that they have run.
        coming: number of trials that it will still submit.
        seconds: median seconds per iteration of these, alone on a device.
        sigma: standard deviation of the logarithm of their true seconds over these.
        observed: number of trials that ``seconds`` and ``sigma`` follow from; 0 if they are certain.
        most: iterations that no trial exceeds, of a search whose shape is unknown; 0 if that is unknown too.
        packing: trials that share a device.
        rate: iterations per second of a device that so many share, relative to a trial alone on it.
        max_width, beta: most devices of one trial, and the scaling overhead of each further one.
        start_s: seconds that a trial holds a device beside its iterations, each time that it starts or goes on.
        stops: number of trials that ended between two rungs: failed, stopped by a rule, or done by themselves.
        ends_in: seconds after which the search ends whatever is left; ``None`` for no limit.
    """

    shape: SearchShape | None
    live: tuple[LiveTrial, ...]
    ended: Mapping[int, int] = field(default_factory=dict)
    coming: int = 0
    seconds: float = 1.0
    sigma: float = 0.0
    observed: int = 0
    most: int = 0
    packing: int = 1
    rate: float = 1.0
    max_width: int = 1
    beta: float = 1.0
    start_s: float = 0.0
    stops: int = 0
    ends_in: float | None = None

    @classmethod
    def at_start(cls, workload: Workload, *, seconds: float, sigma: float = 0.0, packing: int = 1) -> SearchNow:
        """A search of a scenario before its first trial.

        Args:
            workload: the shape of its algorithm.
            seconds, sigma, packing: as the attributes.
        """
        shape = shape_of(workload)
        coming = shape.trials or workload.trials
        return cls(shape=shape, live=(), coming=coming, seconds=seconds, sigma=sigma, packing=packing)


def shape_of(workload: Workload) -> SearchShape:
    """The shape of a scenario's algorithm, as :mod:`fluid.simulation.workloads` runs it."""
    most, eta = workload.max_iterations, workload.eta
    if workload.algorithm == "asha":
        rungs = [1]
        while rungs[-1] < most:
            rungs.append(min(rungs[-1] * eta, most))
        slack = 0.5 * (eta - 1) / eta  # The share is rounded up.
        return SearchShape(
            algorithm="stopping", rungs=tuple(rungs), eta=eta, slack=slack, concurrency=workload.concurrency
        )
    if workload.algorithm not in ("successive_halving", "hyperband", "syncbohb"):
        return SearchShape(algorithm="full", rungs=(most,))
    steps, trials = 0, workload.trials if workload.algorithm == "successive_halving" else most
    while eta ** (steps + 1) <= min(trials, most):
        steps += 1
    rungs = [max(1, most // eta**step) for step in range(steps, -1, -1)]
    if workload.algorithm == "successive_halving":
        return SearchShape(algorithm="halving", rungs=tuple(rungs), eta=eta)
    brackets = tuple(shape.sizes for shape in hyperband_shapes(tuple(rungs), eta))
    one_by_one = workload.algorithm == "syncbohb"
    return SearchShape(algorithm="halving", rungs=tuple(rungs), eta=eta, brackets=brackets, one_by_one=one_by_one)
