"""The algorithms of :func:`fluid.run` by name: how many trials, and how many at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fluid.errors import InvalidFieldError, require_integer, require_one_of
from fluid.search import BOHB, PBT, Searcher
from fluid.search.algorithms import HYPERBANDS, SYNCHRONOUS
from fluid.search.rungs import hyperband_shapes

#: Those that compare trials at rungs.
HALVING = ("asha", "bohb", "hyperband", "sha")
ALGORITHMS = (*HALVING, "random", "grid", "tpe", "pbt")
#: Those whose configs follow from results.
LEARNING = ("bohb", "tpe")
#: The options that say more of an algorithm than its name does; the name stands for the defaults.
OPTIONS: Mapping[str, type[BOHB] | type[PBT]] = {"bohb": BOHB, "pbt": PBT}
#: Those in which no trial waits at a rung, so that a searcher is told of each.
WITH_SEARCHER = ("asha", "full")
#: What other libraries call them.
_PEERS = {
    **dict.fromkeys(("bayesian", "bayes", "bayesopt", "bayesian_optimization", "gp", "optuna", "hyperopt"), "tpe"),
    **dict.fromkeys(("random_search", "randomsearch", "randomized"), "random"),
    **dict.fromkeys(("grid_search", "gridsearch"), "grid"),
    **dict.fromkeys(("asynchyperband", "async_hyperband", "ashascheduler"), "asha"),
    **dict.fromkeys(("tunebohb", "hyperbandforbohb", "syncbohb", "hpbandster"), "bohb"),
    **dict.fromkeys(("successive_halving", "halving", "synchronous_halving"), "sha"),
    **dict.fromkeys(("population_based_training", "populationbasedtraining", "population"), "pbt"),
}
#: Trials of a sweep that nothing else limits.
DEFAULT_SAMPLES = 64
#: Members of a population, which is never without limit.
DEFAULT_MEMBERS = 16


def named(algorithm: object) -> object:
    """Returns the name of an algorithm that is given by its options; else what was given."""
    return next((name for name, kind in OPTIONS.items() if isinstance(algorithm, kind)), algorithm)


def require_algorithm(name: object, known: Collection[str]) -> str:
    """Returns the name of an algorithm, which may be in capitals, or be given by its options.

    Raises:
        InvalidFieldError: there is none of this name.
    """
    name = named(name)
    plain = name.strip().lower() if isinstance(name, str) else ""
    if plain in known:
        return plain
    if (meant := _PEERS.get(plain)) in known:
        reason = f"must be one of {', '.join(sorted(known))}; did you mean {meant!r}?"
        raise InvalidFieldError("algorithm", name, reason)
    return require_one_of("algorithm", name, known)


def options_of(given: object, algorithm: str) -> BOHB | PBT | None:
    """Returns the options of an algorithm: those that were given, or the defaults; ``None`` if it has none."""
    if (kind := OPTIONS.get(algorithm)) is None:
        return None
    return given if isinstance(given, kind) else kind()


def samples_of(
    algorithm: str, samples: int | None, searcher: Searcher, *, is_limited: bool, rungs: tuple[int, ...], eta: int
) -> int | None:
    """Returns the number of trials; ``None`` for no limit.

    Args:
        algorithm: its name.
        samples: as the user gave it.
        searcher: of the configs; that of a grid has only so many.
        is_limited: whether time or a stop rule ends the sweep.
        rungs: the rungs.
        eta: one in so many trials continues at each rung.
    """
    given = None if samples is None else require_integer("samples", samples, at_least=1)
    if searcher.size is not None:
        return searcher.size if given is None else min(given, searcher.size)
    if given is None and algorithm in HYPERBANDS and len(rungs) > 1:  # With one, a round would be a single trial.
        return sum(shape.sizes[0] for shape in hyperband_shapes(rungs, eta))
    if given is None and algorithm == "pbt":
        return DEFAULT_MEMBERS
    if given is None and (algorithm in ("sha", *HYPERBANDS) or not is_limited):
        return DEFAULT_SAMPLES
    return given


def require_concurrency(algorithm: str, max_concurrent: int | None) -> int | None:
    """Returns the most trials under way at once, as the user gave it.

    Raises:
        InvalidFieldError: it is below 1, or the algorithm starts trials together, as those of a rung.
    """
    if max_concurrent is None:
        return None
    if algorithm in SYNCHRONOUS:
        raise InvalidFieldError("max_concurrent", max_concurrent, f"{algorithm!r} starts the trials of a rung together")
    if algorithm == "pbt":
        reason = "'pbt' starts its members together, and has them advance evenly: give fewer samples"
        raise InvalidFieldError("max_concurrent", max_concurrent, reason)
    return require_integer("max_concurrent", max_concurrent, at_least=1)
