"""Which resident a lane runs next, where several have work left. Pure: the lane asks between two iterations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from fluid.errors import InvalidFieldError, require_number, require_one_of


class ResidentWork(NamedTuple):
    """A resident with iterations left to run.

    Attributes:
        key: names it.
        remaining: predicted seconds until it is done; ``None`` while nothing is known about it.
        service: seconds it was run for in this lane, on top of what :func:`joining_service` gave it.
    """

    key: Hashable
    remaining: float | None
    service: float = 0.0


def choose(
    policy: str, residents: Sequence[ResidentWork], *, current: Hashable = None, slack: float = 0.0
) -> ResidentWork:
    """Returns the resident to run for the next iteration.

    ``"longest_first"``: the one with the longest work left. What is left at any time is then as even and as small in
    its longest part as it can be, so that, once other devices have room, nothing long is left to run alone at the end.
    ``"srtf"``: the one with the shortest work left, which makes the mean time until a trial is done the least there
    is. ``"fair"``: the one that was served least, so that all advance by equal seconds.

    A resident that nothing is known about comes first under ``pack`` and ``srtf``: one iteration tells.

    Args:
        policy: one of :data:`POLICIES`.
        residents: at least one, in the order in which they came, which decides between equals.
        current: key of the one that ran last. It runs on unless another one is ahead by more than ``slack``.
        slack: seconds; 0 switches as often as the policy says. A switch costs the lane something, and under ``pack``
            and ``fair`` near equals would take turns after every iteration.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """
    rank = POLICIES[require_one_of("policy", policy, POLICIES)]
    if not residents:
        raise InvalidFieldError("residents", residents, "needs at least one with work left")
    slack = require_number("slack", slack, at_least=0.0)
    ranks = [rank(_checked(work)) for work in residents]
    best = min(ranks)
    for work, its_rank in zip(residents, ranks, strict=True):
        if work.key == current and its_rank <= best + slack:
            return work
    return residents[ranks.index(best)]


def joining_service(others: Iterable[ResidentWork]) -> float:
    """Returns the service that one who joins these is taken to have had, seconds: as much as the least served.

    With none at all it would run alone until it had caught up with those that have been there for hours.
    """
    return min((work.service for work in others), default=0.0)


def _longest_first(work: ResidentWork) -> float:
    return -float("inf") if work.remaining is None else -work.remaining


def _shortest_first(work: ResidentWork) -> float:
    return -float("inf") if work.remaining is None else work.remaining


def _least_served_first(work: ResidentWork) -> float:
    return work.service


#: Each gives a resident a rank in seconds; the lowest runs.
POLICIES: dict[str, Callable[[ResidentWork], float]] = {
    "longest_first": _longest_first,
    "srtf": _shortest_first,
    "fair": _least_served_first,
}
DEFAULT_POLICY = "longest_first"


def _checked(work: ResidentWork) -> ResidentWork:
    if work.remaining is not None:
        require_number("remaining", work.remaining, at_least=0.0)
    require_number("service", work.service, at_least=0.0)
    return work
