"""The eight search algorithms, as Ray Tune's searchers and schedulers.

``random``, ``grid``, ``sha`` and ``syncbohb`` do not depend on which trial is faster: one seed gives the same
configurations and metrics with Fluid and without, as long as each trial stays on one device (``--max-width 1``), as
dropout draws other numbers on several.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ray.tune.schedulers import (
    ASHAScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher
from ray.tune.search.bohb import TuneBOHB
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform
from tuning.scales import Scale
from tuning.workload import Workload

from fluid import tune
from fluid.errors import InvalidFieldError, MissingDependencyError

ETA = 3
_TIMED = {"time_attr": "training_iteration"}
#: Most values of a hyperparameter in a grid.
_VALUES = 3
#: Rounds of population based training; its trials are compared between two rounds.
_ROUNDS = 3
#: Trials under way per device for BOHB: with more, each suggestion is based on fewer results.
_PER_DEVICE = 2


class Method(NamedTuple):
    """The arguments of ``tune.TuneConfig`` and ``tune.RunConfig`` for an algorithm.

    Attributes:
        space: the hyperparameters.
        samples: number of configurations; for a grid, of each point.
        search: suggests the configurations.
        scheduler: decides which trials continue; ``None`` if all do.
        stop: where a trial ends if the scheduler does not end it.
    """

    space: Mapping[str, Any]
    samples: int
    search: Searcher | SearchAlgorithm
    scheduler: TrialScheduler | None = None
    stop: Mapping[str, int] | None = None


class SearchRequest(NamedTuple):
    """What an algorithm is to search.

    Attributes:
        workload: what is tuned.
        scale: the size of the sweep.
        samples: number of configurations; ``None`` for the number that the algorithm needs at this scale.
        seed: of the configurations.
        devices: number of devices.
    """

    workload: Workload
    scale: Scale
    samples: int | None
    seed: int
    devices: int

    @property
    def ends(self) -> dict[str, int]:
        """The end of a trial that the scheduler does not stop."""
        return {"training_iteration": self.scale.max_t}


def method(algorithm: str, request: SearchRequest) -> Method:
    """Makes a new searcher and scheduler, as both change during a sweep.

    Raises:
        MissingDependencyError: a package that BOHB's model needs is not installed.
    """
    return ALGORITHMS[algorithm](request)


def _grid(request: SearchRequest) -> Method:
    points = grid(request.workload.space, request.samples or request.scale.samples)
    space = {name: tune.grid_search(values) for name, values in points.items()}
    return Method(space, 1, BasicVariantGenerator(), stop=request.ends)


def _random(request: SearchRequest) -> Method:
    return _seeded(request, request.samples or request.scale.samples, stop=request.ends)


def _asha(request: SearchRequest) -> Method:
    scheduler = ASHAScheduler(**_TIMED, max_t=request.scale.max_t, grace_period=1, reduction_factor=ETA)
    # Most trials are stopped early, so more of them fit into the same time.
    return _seeded(request, request.samples or ETA * request.scale.samples, scheduler)


def _sha(request: SearchRequest) -> Method:
    scheduler = tune.SuccessiveHalvingScheduler(**_TIMED, max_t=request.scale.max_t, reduction_factor=ETA)
    return _seeded(request, request.samples or ETA * request.scale.samples, scheduler)


def _hyperband(request: SearchRequest) -> Method:
    scheduler = HyperBandScheduler(**_TIMED, max_t=request.scale.max_t, reduction_factor=ETA)
    return _seeded(request, request.samples or band(request.scale.max_t), scheduler)


def _bohb(request: SearchRequest) -> Method:
    scheduler = HyperBandForBOHB(**_TIMED, max_t=request.scale.max_t, reduction_factor=ETA)
    # TuneBOHB's own limit: a ConcurrencyLimiter would count paused trials too.
    search = _model(request, max_concurrent=_PER_DEVICE * request.devices)
    return Method(request.workload.space, request.samples or band(request.scale.max_t), search, scheduler)


def _syncbohb(request: SearchRequest) -> Method:
    scheduler = tune.SyncBOHB(**_TIMED, max_t=request.scale.max_t, reduction_factor=ETA)
    samples = request.samples or scheduler.configurations()
    return Method(request.workload.space, samples, _model(request), scheduler)


def _pbt(request: SearchRequest) -> Method:
    space, names = request.workload.space, request.workload.changing

    def within(config: dict[str, Any]) -> dict[str, Any]:
        bounds = {name: (space[name].lower, space[name].upper) for name in names}
        return {**config, **{name: min(max(config[name], low), high) for name, (low, high) in bounds.items()}}

    scheduler = PopulationBasedTraining(
        **_TIMED,
        perturbation_interval=max(1, request.scale.max_t // _ROUNDS),
        hyperparam_mutations={name: space[name] for name in names},
        custom_explore_fn=within,
    )
    return _seeded(request, request.samples or request.scale.population, scheduler, request.ends)


#: The algorithms by name.
ALGORITHMS: Mapping[str, Callable[[SearchRequest], Method]] = {
    "random": _random,
    "grid": _grid,
    "asha": _asha,
    "sha": _sha,
    "hyperband": _hyperband,
    "bohb": _bohb,
    "syncbohb": _syncbohb,
    "pbt": _pbt,
}


def _seeded(
    request: SearchRequest, samples: int, scheduler: TrialScheduler | None = None, stop: Mapping[str, int] | None = None
) -> Method:
    """Returns a search over configurations that follow from the seed alone."""
    search = BasicVariantGenerator(random_state=request.seed)
    return Method(request.workload.space, samples, search, scheduler, stop)


def _model(request: SearchRequest, **options: Any) -> TuneBOHB:
    missing = [name for name in ("ConfigSpace", "hpbandster") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"BOHB needs {' and '.join(missing)}: pip install ConfigSpace hpbandster")
    return TuneBOHB(seed=request.seed, **options)


def band(max_t: int) -> int:
    """Returns how many trials fill one Hyperband bracket of each size."""
    kinds = round(math.log(max_t, ETA)) + 1
    return sum(math.ceil(kinds / (halvings + 1) * ETA**halvings) for halvings in range(kinds))


def grid(space: Mapping[str, Domain], most: int) -> dict[str, list[Any]]:
    """Returns the values of each hyperparameter: three of the first ones, within ``most`` points of the grid.

    The others have one value, in the middle of their range.

    Raises:
        InvalidFieldError: a domain is neither continuous nor integer nor categorical.
    """
    chosen: dict[str, list[Any]] = {}
    points = 1
    for name, domain in space.items():
        values = _spread(name, domain, max(1, min(_VALUES, most // points)))
        points *= len(values)
        chosen[name] = values
    return chosen


def _spread(name: str, domain: Domain, count: int) -> list[Any]:
    """Returns the midpoints of equal parts of a domain."""
    if isinstance(domain, Categorical):
        count = min(count, len(domain.categories))
    parts = [(2 * part + 1) / (2 * count) for part in range(count)]
    if isinstance(domain, Categorical):
        return [domain.categories[int(part * len(domain.categories))] for part in parts]
    if isinstance(domain, Integer):
        return sorted({int(domain.lower + part * (domain.upper - domain.lower)) for part in parts})
    if isinstance(domain, Float):
        if isinstance(domain.get_sampler(), LogUniform):
            return [domain.lower * (domain.upper / domain.lower) ** part for part in parts]
        return [domain.lower + part * (domain.upper - domain.lower) for part in parts]
    raise InvalidFieldError(f"space[{name!r}]", domain, "is not supported in a grid")
