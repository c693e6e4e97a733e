"""The algorithms of :func:`fluid.run` by name: how many trials, how many at once, and which scheduler decides."""

from __future__ import annotations

from fluid.errors import InvalidFieldError, require_integer
from fluid.search import Searcher
from fluid.search.rungs import brackets_for, halving_shape, hyperband_shapes
from fluid.search.schedulers import AsynchronousHalving, Brackets, FullBudget, RungScheduler, StoppingHalving
from fluid.search_shape import SearchShape

#: Those that compare trials at rungs.
HALVING = ("asha", "hyperband", "sha")
ALGORITHMS = (*HALVING, "random", "grid", "tpe")
#: Those in which no trial waits at a rung, so that a searcher is told of each.
WITH_SEARCHER = ("asha", "full")
#: Those that start all trials of a rung together.
_SYNCHRONOUS = ("hyperband", "sha")
#: Trials of a sweep that nothing else limits.
DEFAULT_SAMPLES = 64


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
    if given is None and algorithm == "hyperband":
        return sum(shape.sizes[0] for shape in hyperband_shapes(rungs, eta))
    if given is None and (algorithm == "sha" or not is_limited):
        return DEFAULT_SAMPLES
    return given


def make_scheduler(
    algorithm: str, *, rungs: tuple[int, ...], eta: int, samples: int | None, is_told_once: bool = False
) -> RungScheduler:
    """Makes the scheduler of an algorithm.

    Args:
        algorithm: its name.
        rungs: iterations at which trials are compared; the last one is the budget.
        eta: one in so many trials continues at each rung.
        samples: number of trials; ``None`` for no limit.
        is_told_once: whether a searcher is told of each trial once, so that none must wait at a rung.
    """
    if algorithm == "asha" and is_told_once:
        return StoppingHalving(rungs=rungs, eta=eta)
    if algorithm == "asha":
        return AsynchronousHalving(rungs=rungs, eta=eta, samples=samples)
    if algorithm in _SYNCHRONOUS:
        assert samples is not None
        if algorithm == "sha":
            return Brackets([halving_shape(samples, rungs, eta)])
        return Brackets(brackets_for(samples, rungs, eta))
    return FullBudget(budget=rungs[-1], samples=samples)


def shape_for(
    algorithm: str, *, rungs: tuple[int, ...], eta: int, samples: int | None, is_told_once: bool = False
) -> SearchShape:
    """Returns the shape of what :func:`make_scheduler` makes of the same arguments."""
    if algorithm == "asha" and is_told_once:
        slack = -0.5 * (eta - 1) / eta  # The share is rounded down.
        return SearchShape(algorithm="stopping", rungs=rungs, eta=eta, first=eta - 1, slack=slack)
    if algorithm == "asha":
        return SearchShape(algorithm="asha", rungs=rungs, eta=eta)
    if algorithm in _SYNCHRONOUS:
        assert samples is not None
        shapes = (halving_shape(samples, rungs, eta),) if algorithm == "sha" else brackets_for(samples, rungs, eta)
        return SearchShape(algorithm="halving", rungs=rungs, eta=eta, brackets=tuple(each.sizes for each in shapes))
    return SearchShape(algorithm="full", rungs=rungs[-1:])


def require_concurrency(algorithm: str, max_concurrent: int | None) -> int | None:
    """Returns the most trials under way at once, as the user gave it.

    Raises:
        InvalidFieldError: it is below 1, or the algorithm starts the trials of a rung together.
    """
    if max_concurrent is None:
        return None
    if algorithm in _SYNCHRONOUS:
        raise InvalidFieldError("max_concurrent", max_concurrent, f"{algorithm!r} starts the trials of a rung together")
    return require_integer("max_concurrent", max_concurrent, at_least=1)
