"""The seven ways to search, as Ray Tune has them."""

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
#: Values of a hyperparameter that a grid has.
_VALUES = 3
#: Rounds of population based training: its trials are compared that many times, less one.
_ROUNDS = 3
#: Trials per device under way while BOHB's model learns: with more, fewer results are known to each suggestion.
_PER_DEVICE = 2


class Method(NamedTuple):
    """A search, as ``tune.TuneConfig`` and ``tune.RunConfig`` take it.

    Attributes:
        space: of hyperparameters.
        samples: how many configurations are asked for, of each point of a grid.
        search: gives the configurations.
        scheduler: decides who goes on; ``None`` if all do.
        stop: when a trial ends if the scheduler says nothing.
    """

    space: Mapping[str, Any]
    samples: int
    search: Searcher | SearchAlgorithm
    scheduler: TrialScheduler | None = None
    stop: Mapping[str, int] | None = None


class Wanted(NamedTuple):
    """What a search is made of.

    Attributes:
        workload: what is tuned.
        scale: how large it is.
        samples: how many configurations to try; ``None`` for what the algorithm needs at this scale.
        seed: of the configurations.
        devices: how many trials can run at once.
    """

    workload: Workload
    scale: Scale
    samples: int | None
    seed: int
    devices: int

    @property
    def ends(self) -> dict[str, int]:
        """The end of a trial that nobody stops."""
        return {"training_iteration": self.scale.max_t}


def method(algorithm: str, wanted: Wanted) -> Method:
    """Makes the search anew: searchers and schedulers change as they are used.

    Raises:
        MissingDependencyError: what BOHB's model needs is not installed.
    """
    return ALGORITHMS[algorithm](wanted)


def _grid(wanted: Wanted) -> Method:
    points = grid(wanted.workload.space, wanted.samples or wanted.scale.samples)
    space = {name: tune.grid_search(values) for name, values in points.items()}
    return Method(space, 1, BasicVariantGenerator(), stop=wanted.ends)


def _random(wanted: Wanted) -> Method:
    return _drawn(wanted, wanted.samples or wanted.scale.samples, stop=wanted.ends)


def _asha(wanted: Wanted) -> Method:
    scheduler = ASHAScheduler(**_TIMED, max_t=wanted.scale.max_t, grace_period=1, reduction_factor=ETA)
    # Most trials are stopped early, so that more of them are tried in the same time.
    return _drawn(wanted, wanted.samples or ETA * wanted.scale.samples, scheduler)


def _hyperband(wanted: Wanted) -> Method:
    scheduler = HyperBandScheduler(**_TIMED, max_t=wanted.scale.max_t, reduction_factor=ETA)
    return _drawn(wanted, wanted.samples or band(wanted.scale.max_t), scheduler)


def _bohb(wanted: Wanted) -> Method:
    scheduler = HyperBandForBOHB(**_TIMED, max_t=wanted.scale.max_t, reduction_factor=ETA)
    # Its own limit, and no ConcurrencyLimiter, for which trials that are paused count.
    search = _model(wanted, max_concurrent=_PER_DEVICE * wanted.devices)
    return Method(wanted.workload.space, wanted.samples or band(wanted.scale.max_t), search, scheduler)


def _syncbohb(wanted: Wanted) -> Method:
    scheduler = tune.SyncBOHB(**_TIMED, max_t=wanted.scale.max_t, reduction_factor=ETA)
    samples = wanted.samples or scheduler.configurations()
    return Method(wanted.workload.space, samples, _model(wanted), scheduler)


def _pbt(wanted: Wanted) -> Method:
    space, names = wanted.workload.space, wanted.workload.changing

    def within(config: dict[str, Any]) -> dict[str, Any]:
        bounds = {name: (space[name].lower, space[name].upper) for name in names}
        return {**config, **{name: min(max(config[name], low), high) for name, (low, high) in bounds.items()}}

    scheduler = PopulationBasedTraining(
        **_TIMED,
        perturbation_interval=max(1, wanted.scale.max_t // _ROUNDS),
        hyperparam_mutations={name: space[name] for name in names},
        custom_explore_fn=within,
    )
    return _drawn(wanted, wanted.samples or wanted.scale.population, scheduler, wanted.ends)


#: The algorithms by name.
ALGORITHMS: Mapping[str, Callable[[Wanted], Method]] = {
    "random": _random,
    "grid": _grid,
    "asha": _asha,
    "hyperband": _hyperband,
    "bohb": _bohb,
    "syncbohb": _syncbohb,
    "pbt": _pbt,
}


def _drawn(
    wanted: Wanted, samples: int, scheduler: TrialScheduler | None = None, stop: Mapping[str, int] | None = None
) -> Method:
    """Configurations that follow from the seed alone."""
    search = BasicVariantGenerator(random_state=wanted.seed)
    return Method(wanted.workload.space, samples, search, scheduler, stop)


def _model(wanted: Wanted, **options: Any) -> TuneBOHB:
    missing = [name for name in ("ConfigSpace", "hpbandster") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"BOHB needs {' and '.join(missing)}: pip install ConfigSpace hpbandster")
    return TuneBOHB(seed=wanted.seed, **options)


def band(max_t: int) -> int:
    """How many trials fill one bracket of each kind of Hyperband."""
    kinds = round(math.log(max_t, ETA)) + 1
    return sum(math.ceil(kinds / (halvings + 1) * ETA**halvings) for halvings in range(kinds))


def grid(space: Mapping[str, Domain], most: int) -> dict[str, list[Any]]:
    """Values of each hyperparameter: three of the first ones, as far as the grid stays within ``most`` points.

    The others have one value, in the middle of their range.

    Raises:
        InvalidFieldError: a domain is none of a continuous, an integer or a categorical one.
    """
    chosen: dict[str, list[Any]] = {}
    points = 1
    for name, domain in space.items():
        values = _spread(name, domain, max(1, min(_VALUES, most // points)))
        points *= len(values)
        chosen[name] = values
    return chosen


def _spread(name: str, domain: Domain, count: int) -> list[Any]:
    """Values that stand for equal parts of a domain."""
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
    raise InvalidFieldError(f"space[{name!r}]", domain, "is no domain that a grid can be made of")
