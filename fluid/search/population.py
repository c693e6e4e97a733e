"""Population based training (Jaderberg et al., 2017): a pure state machine with random numbers of its own.

A population of members trains side by side. Each time that a member is ready, its score is compared with the latest
scores of the others: one of the worst gives up, and goes on from the state of one of the best (*exploit*), with a
config near that one's (*explore*). Who exploits whom, and the random numbers that this takes, are those of Ray Tune's
``PopulationBasedTraining``, but for what is wrong there (:class:`Population`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.search.conversion import TuneRange
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.search.rungs import Exploit, RungBudget, RungDecision
from fluid.search.space import ConditionalSpace, Space
from fluid.search_shape import Rung
from fluid.user_calls import user_class

#: Iterations between two times that a member is ready, as a share of the budget.
_READY = 10
#: Sets these random numbers apart from those of the configs that members begin with.
_STREAM = 1
#: Stands for a value that a config does not have.
_ABSENT = object()


@user_class
@dataclass(frozen=True, kw_only=True)
class PBT:
    """How :func:`fluid.run` does population based training: ``algorithm="pbt"`` means ``PBT()``.

    Example:
        >>> from fluid.search import PBT
        >>> PBT(ready=4, perturb=(1.5, 0.5)).quantile
        0.25

    Args:
        ready: iterations after which a member is compared with the others, each time; ``None``, the default, for a
            tenth of the budget.
        quantile: the share of the members that are the best, and of those that are the worst; up to 0.5, and 0 for no
            exploits. 0.25 by default.
        resample: with what probability a value is drawn anew; 0.25 by default. Else a number is multiplied by one of
            ``perturb``, and a choice gives way to the one before or behind it in its list.
        perturb: the factors, each as likely as the others; 1.2 and 0.8 by default.
        synchronous: whether members wait for all others each time, so that they are compared after as many iterations,
            and exploits do not depend on which is the first to come. ``False`` by default: none ever waits.

    Raises:
        InvalidFieldError: a field cannot be used; the message names the field and the value.
    """

    ready: int | None = None
    quantile: float = 0.25
    resample: float = 0.25
    perturb: Sequence[float] = (1.2, 0.8)
    synchronous: bool = False

    def __post_init__(self) -> None:
        if self.ready is not None:
            object.__setattr__(self, "ready", require_integer("ready", self.ready, at_least=1))
        for name, most in (("quantile", 0.5), ("resample", 1.0)):
            number = require_number(name, getattr(self, name), at_least=0.0)
            if number > most:
                raise InvalidFieldError(name, getattr(self, name), f"must be at most {most:g}, as a share")
            object.__setattr__(self, name, number)
        if not isinstance(self.perturb, (tuple, list)) or not self.perturb:
            raise InvalidFieldError("perturb", self.perturb, "must be at least one factor, such as (1.2, 0.8)")
        factors = tuple(require_number("perturb", factor, at_least=0.0) for factor in self.perturb)
        if 0.0 in factors:
            raise InvalidFieldError("perturb", self.perturb, "must be factors greater than 0")
        object.__setattr__(self, "perturb", factors)
        if not isinstance(self.synchronous, bool):
            raise InvalidFieldError("synchronous", self.synchronous, "must be True or False")

    def interval(self, budget: int) -> int:
        """Iterations between two times that a member is ready, in a sweep of such a budget."""
        return max(1, budget // _READY) if self.ready is None else self.ready


@dataclass(slots=True)
class _Member:
    """A member of the population.

    Attributes:
        target: iterations after which it is ready, or ends.
        score: when it was ready last; ``None`` before.
        is_over: whether it has ended: it is neither compared nor exploited any more.
        waits: whether it waits for others to be ready.
    """

    target: int
    score: float | None = None
    is_over: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """How a member stands.

    Attributes:
        config: its hyperparameters.
        iteration: iterations that it has reported.
        state: iterations done by the state from which another member would start; ``None`` if there is none yet.
    """

    config: Mapping[str, Any]
    iteration: int
    state: int | None


@dataclass
class Explorer:
    """Makes configs near another one.

    A number that was multiplied stays within its distribution, and on its steps, of which it takes at least one; a
    choice takes the one before or behind it in its list, if there is one.

    Attributes:
        space: what the values are from.
        resample, perturb: as of :class:`PBT`.
        rng: gives the random numbers.
    """

    space: Space
    resample: float
    perturb: Sequence[float]
    rng: np.random.Generator

    def explore(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a config near this one; values that it does not have, as a condition did not hold, are drawn."""
        known = self.space.values_in(config)
        values = {name: self._explore(domain, known.get(name, _ABSENT)) for name, domain in self.space.domains.items()}
        return self.space.config(values)

    def _explore(self, domain: Domain, value: Any) -> Any:
        if value is _ABSENT or self.rng.random() < self.resample:
            return domain.sample(self.rng)
        if isinstance(domain, Choice):
            index = domain.find(value)
            if index is None:  # A copy of what has no equal.
                return domain.sample(self.rng)
            return domain.at(min(max(index + self.pick((-1, 1)), 0), domain.size - 1))
        return _times(domain.values if isinstance(domain, TuneRange) else domain, value, self.pick(self.perturb))

    def pick(self, values: Sequence[Any]) -> Any:
        """Returns one of some values, each as likely as the others."""
        return values[int(self.rng.integers(len(values)))]


def _times(domain: Domain | None, value: Any, factor: float) -> Any:
    """A number times a factor, within its distribution; ``None`` stands for all numbers."""
    if isinstance(domain, FloatRange) and domain.size is None:
        return min(max(value * factor, float(domain.low)), domain.greatest)
    if not isinstance(domain, (FloatRange, IntRange)):
        return value * factor
    target = value * factor
    index = domain.index(value)
    moved = domain.index(round(target) if isinstance(domain, IntRange) else target)
    if moved == index:  # The factor is too small for a step, or the value 0.
        up = target > value or (target == value and factor > 1.0)
        moved += (1 if up else -1) if factor != 1.0 else 0
    assert domain.size is not None
    return domain.at(min(max(moved, 0), domain.size - 1))


@dataclass
class Population:
    """Decides which members of a population go on, and which exploit another.

    It decides as Ray Tune's ``PopulationBasedTraining`` does with the same scores and random numbers, but for these:

    * A member whose score is NaN or infinite exploits another one. There it trains on, as it counts for nothing.
    * Values stay within the space, and on its steps, of which they take at least one. There ``uniform(0, 1)`` comes to
      1.2, and a whole number of 1 or 2 stays what it is; a number that is first given as a whole one, such as 1 for
      ``uniform(0, 2)``, stays whole. A ``tune.choice`` is a list of choices; there it is multiplied.
    * A member may exploit each of the best from the state that it has now. There only one whose state was saved when it
      was ready itself, as it was among the best then, too; else the exploit is left out.
    * If one for which synchronous members wait ends or fails, these go on. There they wait for ever.

    Attributes:
        options: what the user has said.
        budget: iterations of a member in all.
        samples: number of members.
        explorer: makes configs near another one, with the same random numbers.
        standing: how a member stands, if another one, the second, starts from its state; set before the first decision.
    """

    options: PBT
    budget: int
    samples: int
    explorer: Explorer
    standing: Callable[[int, int], Standing] = field(init=False)

    def __post_init__(self) -> None:
        self._members: list[_Member] = []
        #: Iterations between two times that a member is ready.
        self.interval = self.options.interval(self.budget)
        #: When members are to be ready next, if they wait for each other.
        self._next = self.interval

    def start(self) -> RungBudget | None:
        if len(self._members) >= self.samples:
            return None
        self._members.append(_Member(0))
        return self._send(len(self._members) - 1, self._next if self.options.synchronous else self.interval)

    def rung_of(self, trial: int) -> Rung:
        compared = sum(not member.is_over for member in self._members)
        best = self._quantile(compared)
        # Without waiting, each is compared with the latest scores of the others, whenever they were reported.
        iterations = self._members[trial].target if self.options.synchronous else 0
        return Rung(iterations, compared, compared - best, parents=best)

    def reached(self, trial: int, score: float) -> RungDecision:
        member = self._members[trial]
        member.score = score
        if member.target >= self.budget:
            member.is_over = True
            decided = self._decide_together()
            return RungDecision(decided.promoted, (trial,), decided.forked)
        if self.options.synchronous:
            member.waits = True
            return self._decide_together()
        worst, best = self._quantiles()
        exploit = self._exploit(trial, best) if trial in worst else None
        if exploit is not None:
            return RungDecision(forked=(exploit,))
        return RungDecision((self._send(trial, self.standing(trial, trial).iteration + self.interval),))

    def keeps(self, trial: int) -> RungBudget:
        """What a member runs that was to exploit one that has ended meanwhile: it goes on from its own state."""
        ready = self.standing(trial, trial).iteration + self.interval
        return self._send(trial, self._next if self.options.synchronous else ready)

    def ended(self, trial: int, *, is_worst: bool = False) -> RungDecision:
        self._members[trial].is_over = True
        return self._decide_together()

    def retried(self, trial: int) -> None:
        self._members[trial].is_over = False

    def _decide_together(self) -> RungDecision:
        """What follows for synchronous members once all are ready."""
        waiting = [number for number, member in enumerate(self._members) if member.waits and not member.is_over]
        is_under_way = any(not (member.waits or member.is_over) for member in self._members)
        if not waiting or is_under_way or len(self._members) < self.samples:
            return RungDecision()
        worst, best = self._quantiles()
        self._next = max(self._next, *(self.standing(number, number).iteration for number in waiting)) + self.interval
        exploits = [found for number in worst if (found := self._exploit(number, best)) is not None]
        given_up = {exploit.trial for exploit in exploits}
        promoted = [self._send(number, self._next) for number in waiting if number not in given_up]
        return RungDecision(tuple(promoted), forked=tuple(exploits))

    def _quantiles(self) -> tuple[list[int], list[int]]:
        """The worst members, the worst first, and the best ones: by their latest scores, of equal ones the later."""
        scored = [
            (-member.score, number)
            for number, member in enumerate(self._members)
            if member.score is not None and not member.is_over
        ]
        lost = [number for score, number in scored if not math.isfinite(score)]
        ranked = [number for _, number in sorted(one for one in scored if math.isfinite(one[0]))]
        size = self._quantile(len(ranked))
        best = ranked[len(ranked) - size :]
        return [*lost, *ranked[:size]], best or (ranked if lost and self.options.quantile else [])

    def _quantile(self, members: int) -> int:
        """How many of so many members are the best, and the worst."""
        return min(math.ceil(members * self.options.quantile), members // 2)

    def _exploit(self, trial: int, best: Sequence[int]) -> Exploit | None:
        """Has a member go on from one of the best; ``None`` if it keeps its own state."""
        if not best:
            return None
        parent = self.explorer.pick(best)
        standing = self.standing(parent, trial)
        if standing.state is None or standing.state >= self.budget:
            return None
        config = self.explorer.explore(standing.config)
        ready = self._next if self.options.synchronous else standing.state + self.interval
        sent = self._send(trial, ready)
        at = standing.state if self.options.synchronous else None
        return Exploit(trial, parent, at, config, sent.budget, sent.follow_up_iterations)

    def _send(self, trial: int, ready: int) -> RungBudget:
        member = self._members[trial]
        member.target, member.waits = min(ready, self.budget), False
        return RungBudget(trial, member.target, self.budget - member.target)


def make_population(
    options: PBT, space: Space | ConditionalSpace | None, *, budget: int, samples: int, seed: int | None
) -> Population:
    """Makes what decides in a sweep.

    Args:
        options: of the algorithm.
        space: what configs are drawn from; ``None`` where a searcher suggests them.
        budget: iterations of a member in all.
        samples: number of members.
        seed: of the random numbers; ``None`` for other ones every time.

    Raises:
        InvalidFieldError: the space does not tell which values are near each other.
    """
    if not isinstance(space, Space):
        reason = "must be a dict of names and values for 'pbt', which changes the values of a config one by one"
        raise InvalidFieldError("space", space, reason)
    if not space.domains:
        reason = "must have values to choose for 'pbt', which changes those of the best: uniform(0, 1), or a list"
        raise InvalidFieldError("space", dict(space.constants), reason)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_STREAM,)))
    return Population(options, budget, samples, Explorer(space, options.resample, options.perturb, rng))
