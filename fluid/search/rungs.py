"""The rungs of successive halving: the iterations at which trials are compared, and how many are tried per bracket.

A *bracket* of Hyperband is one run of successive halving (Li et al., "Hyperband", JMLR 2018): n trials run r iterations
each, the best 1/eta of them run eta times as many, and so on up to the budget R. Brackets differ in r: a bracket with
more trials gives each of them less at first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RungBudget:
    """What a trial may run: up to a rung.

    Attributes:
        trial: its number, in the order in which trials are started, from 0.
        budget: iterations in all after which it waits for the next decision.
        follow_up_iterations: iterations that later rungs may add.
    """

    trial: int
    budget: int
    follow_up_iterations: int


@dataclass(frozen=True, slots=True)
class Exploit:
    """A trial that gives up for one that goes on from another's state, with another config.

    Attributes:
        trial: its number, which the new one takes over.
        parent: number of the one whose state it is.
        at: iterations done by that state; ``None`` for the newest one.
        config: the new one's.
        budget, follow_up_iterations: as of a :class:`RungBudget`.
    """

    trial: int
    parent: int
    at: int | None
    config: dict[str, Any]
    budget: int
    follow_up_iterations: int


@dataclass(frozen=True, slots=True)
class RungDecision:
    """What follows from a trial that has reached its rung or has ended.

    Attributes:
        promoted: trials that continue, each to its next rung.
        ended: trials that will never continue, so that their state can be dropped.
        forked: trials that give up for others' states.
    """

    promoted: tuple[RungBudget, ...] = ()
    ended: tuple[int, ...] = ()
    forked: tuple[Exploit, ...] = ()


@dataclass(frozen=True, slots=True)
class BracketShape:
    """A bracket of synchronous successive halving.

    Attributes:
        rungs: iterations at which its trials are compared, ascending; the last one is the budget.
        sizes: number of trials that run to each rung; at least 1.
    """

    rungs: tuple[int, ...]
    sizes: tuple[int, ...]


def rungs_of(budget: int, eta: int, min_budget: int) -> tuple[int, ...]:
    """Returns the rungs: ``budget / eta**k``, rounded to whole iterations, as far down as ``min_budget``.

    Example:
        >>> from fluid.search.rungs import rungs_of
        >>> rungs_of(27, 3, 1), rungs_of(100, 3, 1), rungs_of(27, 3, 2)
        ((1, 3, 9, 27), (1, 4, 11, 33, 100), (3, 9, 27))
    """
    steps = 0
    while min_budget * eta ** (steps + 1) <= budget:
        steps += 1
    return tuple((2 * budget + eta**step) // (2 * eta**step) for step in range(steps, -1, -1))


def halving_shape(samples: int, rungs: tuple[int, ...], eta: int) -> BracketShape:
    """Returns the bracket of plain successive halving: 1 in ``eta`` of the trials continues at each rung, at least one.

    Example:
        >>> from fluid.search.rungs import halving_shape
        >>> halving_shape(64, (1, 3, 9, 27), 3).sizes
        (64, 21, 7, 2)
    """
    return BracketShape(rungs, tuple(max(1, samples // eta**step) for step in range(len(rungs))))


def hyperband_shapes(rungs: tuple[int, ...], eta: int) -> tuple[BracketShape, ...]:
    """Returns the brackets of one round of Hyperband, the one with most trials first.

    With ``s`` further rungs after its first one, a bracket has ``ceil((s_max + 1) / (s + 1) * eta**s)`` trials.

    Example:
        >>> from fluid.search.rungs import hyperband_shapes, rungs_of
        >>> [shape.sizes for shape in hyperband_shapes(rungs_of(81, 3, 1), 3)]
        [(81, 27, 9, 3, 1), (34, 11, 3, 1), (15, 5, 1), (8, 2), (5,)]
    """
    return tuple(
        halving_shape(math.ceil(len(rungs) * eta**s / (s + 1)), rungs[len(rungs) - 1 - s :], eta)
        for s in range(len(rungs) - 1, -1, -1)
    )


def brackets_for(samples: int, rungs: tuple[int, ...], eta: int) -> tuple[BracketShape, ...]:
    """Returns the brackets that try exactly ``samples`` trials: whole rounds of Hyperband, and a smaller round.

    The smaller round keeps the brackets' proportions, so that also few samples are spread over all brackets.

    Example:
        >>> from fluid.search.rungs import brackets_for
        >>> [shape.sizes[0] for shape in brackets_for(49 + 16, (1, 3, 9, 27), 3)]
        [27, 12, 6, 4, 9, 4, 2, 1]
    """
    whole = hyperband_shapes(rungs, eta)
    total = sum(shape.sizes[0] for shape in whole)
    rounds, rest = divmod(samples, total)
    # Largest remainders; of equal ones the bracket with more trials.
    exact = [rest * shape.sizes[0] / total for shape in whole]
    counts = [math.floor(share) for share in exact]
    order = sorted(range(len(whole)), key=lambda number: (counts[number] - exact[number], number))
    for number in order[: rest - sum(counts)]:
        counts[number] += 1
    last = tuple(halving_shape(count, shape.rungs, eta) for count, shape in zip(counts, whole, strict=True) if count)
    return whole * rounds + last
