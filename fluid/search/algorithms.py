"""Which scheduler runs an algorithm of that name: for :func:`fluid.run`, for simulations and for forecasts."""

from __future__ import annotations

from fluid.search.brackets import Brackets
from fluid.search.rungs import BracketShape, brackets_for, halving_shape
from fluid.search.schedulers import AsynchronousHalving, FullBudget, RungScheduler, StoppingHalving
from fluid.search_shape import SearchShape

#: Those whose trials wait at rungs until they are among the best.
_PROMOTING = ("asha", "tpe")
#: Those that start all trials of a rung together.
SYNCHRONOUS = ("hyperband", "sha")
#: Those with Hyperband's brackets.
HYPERBANDS = ("bohb", "hyperband")


def make_scheduler(
    algorithm: str,
    *,
    rungs: tuple[int, ...],
    eta: int,
    samples: int | None,
    is_told_once: bool = False,
    one_by_one: bool = False,
) -> RungScheduler:
    """Makes the scheduler of an algorithm.

    Args:
        algorithm: its name.
        rungs: iterations at which trials are compared; the last one is the budget.
        eta: one in so many trials continues at each rung.
        samples: number of trials; ``None`` for no limit.
        is_told_once: whether a searcher is told of each trial once, so that none must wait at a rung.
        one_by_one: of BOHB, whether a bracket begins when the one before has ended.
    """
    if algorithm == "asha" and is_told_once:
        return StoppingHalving(rungs=rungs, eta=eta)
    if algorithm in _PROMOTING and len(rungs) > 1:
        return AsynchronousHalving(rungs=rungs, eta=eta, samples=samples)
    if shapes := _brackets(algorithm, rungs, eta, samples):
        return Brackets(shapes, one_by_one=one_by_one)
    return FullBudget(budget=rungs[-1], samples=samples)


def shape_for(
    algorithm: str,
    *,
    rungs: tuple[int, ...],
    eta: int,
    samples: int | None,
    is_told_once: bool = False,
    one_by_one: bool = False,
) -> SearchShape:
    """Returns the shape of what :func:`make_scheduler` makes of the same arguments."""
    if algorithm == "asha" and is_told_once:
        slack = -0.5 * (eta - 1) / eta  # The share is rounded down.
        return SearchShape(algorithm="stopping", rungs=rungs, eta=eta, first=eta - 1, slack=slack)
    if algorithm in _PROMOTING and len(rungs) > 1:
        return SearchShape(algorithm="asha", rungs=rungs, eta=eta)
    if shapes := _brackets(algorithm, rungs, eta, samples):
        brackets = tuple(each.sizes for each in shapes)
        return SearchShape(algorithm="halving", rungs=rungs, eta=eta, brackets=brackets, one_by_one=one_by_one)
    return SearchShape(algorithm="full", rungs=rungs[-1:], replaces=algorithm == "pbt")


def _brackets(algorithm: str, rungs: tuple[int, ...], eta: int, samples: int | None) -> tuple[BracketShape, ...]:
    """The brackets of synchronous successive halving; none of another algorithm."""
    if algorithm == "sha":
        assert samples is not None
        return (halving_shape(samples, rungs, eta),)
    if algorithm in HYPERBANDS:
        assert samples is not None
        return brackets_for(samples, rungs, eta)
    return ()
