"""The shape of a search algorithm: how far its trials run, and which of them continue (docs/theory.md, section 12)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of

#: How trials are chosen that continue; see :class:`SearchShape`.
SHAPES = ("full", "asha", "stopping", "halving")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchShape:
    """What a forecast knows of a search algorithm: how many of its trials run how far. Scores are left to chance.

    Example:
        >>> from fluid import Search, SearchShape
        >>> shape = SearchShape(algorithm="asha", rungs=(1, 3, 9), eta=3, concurrency=8)
        >>> Search("loss", "min", trials=64, extends=True, shape=shape).shape.rungs
        (1, 3, 9)

    Args:
        algorithm: ``"full"``: each trial runs to the last rung. ``"asha"``: each arrival at a rung may promote one of
            the best 1/eta that came there, also one that waits. ``"stopping"``: the arrival itself continues if it is
            among the best 1/eta of those that came there, else it is stopped. ``"halving"``: a rung of a bracket is
            decided when all its trials are there.
        rungs: iterations at which trials are compared, ascending; the last one is the most that a trial runs.
        eta: one in so many continues; 3 by default. Brackets say it by their sizes.
        first: of ``"stopping"``, how many arrivals at a rung continue in any case, as there is nothing to compare them
            with; 1 by default.
        slack: of ``"stopping"``, by how many trials more than 1/eta of the arrivals continue at a rung, as the share is
            rounded; 0 by default.
        brackets: of ``"halving"``, the number of trials at each rung of each bracket, in the order in which they start;
            a bracket with fewer rungs has the last ones. None by default, for a single bracket of all trials.
        concurrency: most trials under way; 0 for one on each device; ``None``, the default, if all begin at once.
        one_by_one: whether a bracket begins when the one before has ended; ``False`` by default: side by side.
        replaces: of ``"full"``, whether a trial that ends before the last rung is followed by one that goes on in its
            place (population based training); ``False`` by default.

    Raises:
        InvalidFieldError: a field cannot be used; the message names the field and the value.
    """

    algorithm: str
    rungs: tuple[int, ...]
    eta: int = 3
    first: int = 1
    slack: float = 0.0
    brackets: tuple[tuple[int, ...], ...] = ()
    concurrency: int | None = None
    one_by_one: bool = False
    replaces: bool = False

    def __post_init__(self) -> None:
        require_one_of("algorithm", self.algorithm, SHAPES)
        rungs = _whole_numbers("rungs", self.rungs)
        if not rungs or any(later <= earlier for earlier, later in pairwise(rungs)):
            raise InvalidFieldError("rungs", self.rungs, "must be at least one number of iterations, ascending")
        object.__setattr__(self, "rungs", rungs)
        object.__setattr__(self, "eta", require_integer("eta", self.eta, at_least=2))
        object.__setattr__(self, "first", require_integer("first", self.first, at_least=0))
        object.__setattr__(self, "slack", require_number("slack", self.slack, at_least=-1e9))
        brackets = tuple(_whole_numbers("brackets", sizes) for sizes in self.brackets)
        if any(not 0 < len(sizes) <= len(rungs) for sizes in brackets):
            raise InvalidFieldError("brackets", self.brackets, f"each must have one to {len(rungs)} rungs")
        object.__setattr__(self, "brackets", brackets)
        if self.concurrency is not None:
            require_integer("concurrency", self.concurrency, at_least=0)

    @property
    def trials(self) -> int | None:
        """Number of trials of all brackets; ``None`` if it has none."""
        return sum(sizes[0] for sizes in self.brackets) if self.brackets else None

    def brackets_of(self, trials: int) -> tuple[tuple[int, ...], ...]:
        """The brackets of so many trials: its own, and where it has none, one in which 1/eta continue at each rung."""
        sizes = tuple(max(1, trials // self.eta**step) for step in range(len(self.rungs)))
        return self.brackets or (sizes,)


class Rung(NamedTuple):
    """A rung, as a search algorithm tells it where a trial has come there: who is compared, and how many go on.

    Example:
        >>> from fluid.search_shape import Rung
        >>> Rung(iterations=3, size=9, places=3).parents
        0

    Attributes:
        iterations: that its trials have done; a trial that goes on comes to a rung of more.
        size: trials that come there in all, as far as is known now; ``None`` for no limit.
        places: how many of them go on; one in so many where it ``promotes_at_once``, or where the size has no limit. 0
            if none does.
        promotes_at_once: whether a trial goes on as soon as it is among the best so far (ASHA), not when all came.
        parents: how many of the best others go on from (PBT), in place of their own states.
        bracket: number of the bracket: trials of different ones are not compared.
    """

    iterations: int = 0
    size: int | None = None
    places: int = 0
    promotes_at_once: bool = False
    parents: int = 0
    bracket: int = 0


def _whole_numbers(name: str, values: Iterable[object]) -> tuple[int, ...]:
    return tuple(require_integer(name, value, at_least=1) for value in values)
