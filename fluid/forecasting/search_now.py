"""A search in the middle of its run, as a forecast needs it: its live trials, those that have ended, those to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fluid.forecasting.scenario import Workload
from fluid.search.algorithms import make_scheduler, shape_for
from fluid.search.rungs import hyperband_shapes, rungs_of
from fluid.search.schedulers import RungScheduler
from fluid.search_shape import SearchShape


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


#: What :func:`fluid.run` calls the algorithms of scenarios, where that differs. A population is a search without rungs.
_NAMES = {"successive_halving": "sha", "syncbohb": "hyperband", "pbt": "random"}


def scheduler_of(workload: Workload) -> RungScheduler:
    """The scheduler of a scenario's algorithm: that of :func:`fluid.run`."""
    return make_scheduler(**_arguments(workload))


def shape_of(workload: Workload) -> SearchShape:
    """The shape of a scenario's algorithm."""
    shape = shape_for(**_arguments(workload))
    concurrency = workload.concurrency if workload.algorithm == "asha" else None
    return replace(shape, concurrency=concurrency, one_by_one=workload.algorithm == "syncbohb")


def _arguments(workload: Workload) -> dict[str, Any]:
    name = _NAMES.get(workload.algorithm, workload.algorithm)
    rungs = rungs_of(workload.max_iterations, workload.eta, 1)
    samples = workload.trials
    if name == "hyperband":
        samples = sum(shape.sizes[0] for shape in hyperband_shapes(rungs, workload.eta))
    return {"algorithm": name, "rungs": rungs, "eta": workload.eta, "samples": samples}
