"""The scheduling policies of a lane: which of its residents with iterations left it runs next. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from fluid.errors import InvalidFieldError, require_number, require_one_of

#: The lane keeps running a trial unless another one is ahead by more seconds than this, because a switch takes time.
SWITCH_SLACK_S = 0.05
#: Weight of the newest iteration in the moving average of a trial's pace.
SMOOTHING = 0.5


class ResidentWork(NamedTuple):
    """A resident with iterations left to run.

    Attributes:
        key: identifies it.
        remaining: predicted seconds of work left; ``None`` before its first measured iteration.
        service: seconds it has run in this lane, plus what :func:`joining_service` gave it.
        turn: number of its latest iteration among those of all residents of the lane; 0 before the first.
    """

    key: Hashable
    remaining: float | None
    service: float = 0.0
    turn: int = 0


def choose(
    policy: str, residents: Sequence[ResidentWork], *, current: Hashable = None, slack: float = 0.0
) -> ResidentWork:
    """Returns the resident to run for the next iteration.

    ``"longest_first"``: the one with the most work left. This keeps the longest remaining work as short as possible,
    so that no long trial runs alone at the end. ``"srtf"``: the one with the least work left (shortest remaining time
    first), which minimizes the mean completion time. ``"fair"``: the one with the least service, so that all advance
    by equal seconds. ``"rounds"``: the one whose latest iteration is longest ago, so that all advance by one iteration
    each in turn.

    Under ``longest_first`` and ``srtf`` a resident whose pace is not measured yet comes first: one iteration
    measures it.

    Args:
        policy: one of :data:`POLICIES`.
        residents: at least one, in the order in which they came, which breaks ties.
        current: key of the one that ran last. It continues unless another one is ahead by more than ``slack``.
        slack: seconds; 0 switches whenever the policy says so. A switch takes time, and under ``longest_first`` and
            ``fair`` two nearly equal residents would alternate after every iteration. ``rounds`` has none.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """
    rank = POLICIES[require_one_of("policy", policy, POLICIES)]
    if not residents:
        raise InvalidFieldError("residents", residents, "needs at least one with work left")
    slack = require_number("slack", slack, at_least=0.0)
    ranks = [rank(_checked(work)) for work in residents]
    best = min(ranks)
    if policy == ROUNDS:
        return residents[ranks.index(best)]
    for work, its_rank in zip(residents, ranks, strict=True):
        if work.key == current and its_rank <= best + slack:
            return work
    return residents[ranks.index(best)]


def joining_service(others: Iterable[ResidentWork]) -> float:
    """Returns the service that a newcomer starts with, seconds: that of the least served of the others.

    From 0 it would run alone until it had caught up with residents that have run for hours.
    """
    return min((work.service for work in others), default=0.0)


def _longest_first(work: ResidentWork) -> float:
    return -float("inf") if work.remaining is None else -work.remaining


def _shortest_first(work: ResidentWork) -> float:
    return -float("inf") if work.remaining is None else work.remaining


def _least_served_first(work: ResidentWork) -> float:
    return work.service


def _longest_ago_first(work: ResidentWork) -> float:
    return float(work.turn)


ROUNDS = "rounds"
#: Each maps a resident to a rank, in seconds but for rounds; the lowest rank runs.
POLICIES: dict[str, Callable[[ResidentWork], float]] = {
    "longest_first": _longest_first,
    "srtf": _shortest_first,
    "fair": _least_served_first,
    ROUNDS: _longest_ago_first,
}
DEFAULT_POLICY = "longest_first"


def _checked(work: ResidentWork) -> ResidentWork:
    if work.remaining is not None:
        require_number("remaining", work.remaining, at_least=0.0)
    require_number("service", work.service, at_least=0.0)
    return work
