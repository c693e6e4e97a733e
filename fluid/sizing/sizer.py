"""The sizer: the fewest devices with which what is left ends by the deadline, with the odds asked for.

A sweep on a fixed number of devices pays for devices that wait at the end of a rung. RubberBand (Misra et al., EuroSys
2021) plans the number of devices of each stage in advance, from a profile. The sizer decides anew at every departure,
by a forecast of what is left, so that slow trials and early stops count as soon as they are seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.planners.instance import EndDistribution
from fluid.sizing.goals import Goals

#: When all that is left ends, on so many devices from now on; ``None`` while too little was measured to say.
EndOn = Callable[[int], EndDistribution | None]

#: Share of the time left that is kept as a margin against errors of the forecast.
_MARGIN = 0.05
#: Devices to measure with, while nothing is known.
_FIRST = 4
#: Share of the deadline after which, if still nothing was measured, the number of devices doubles, and doubles again.
_PATIENCE = 0.02
#: Ends that differ by no more than this share count as the same.
_ALIKE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How many devices to hold, and what that gives.

    Attributes:
        devices: to hold from now on.
        odds: that the deadline is met on them; ``None`` if unknown.
        meets: whether the deadline is met with the odds asked for; ``None`` if unknown.
        earliest_s: seconds from now by which the most devices end with the odds asked for, if they miss the deadline.
        is_missed: whether the most devices miss the deadline with the odds asked for. Between that and to meet it with
            these odds lies what is not known yet: runtimes of which few were measured.
        cost_usd: expected cost from now on; ``None`` if the price is unknown.
        within_budget: whether that fits what is left of the budget; ``None`` if unknown, or without a budget.
        money_ends_in_s: seconds from now after which the budget is spent on the devices held; ``None`` without one.
        interrupts: whether devices that run trials are to go to get down to that number, as the budget ends; else only
            idle ones are given back.
    """

    devices: int
    odds: float | None = None
    meets: bool | None = None
    earliest_s: float | None = None
    is_missed: bool = False
    cost_usd: float | None = None
    within_budget: bool | None = None
    money_ends_in_s: float | None = None
    interrupts: bool = False


class Sizer:
    """Decides how many devices to hold, again and again.

    Example:
        >>> from fluid.planners.instance import EndDistribution
        >>> from fluid.sizing.goals import Goals
        >>> from fluid.sizing.sizer import Sizer
        >>> sizer = Sizer(Goals(deadline=1000.0, price_per_device_hour=3.6), most=16, provision_s=0.0)
        >>> sizing = sizer.decide(0.0, 0, lambda devices: EndDistribution.certain(3600.0 / devices), useful=16)
        >>> sizing.devices, sizing.meets, round(sizing.cost_usd, 2)
        (4, True, 3.6)

    Args:
        goals: the deadline, the budget and the price.
        most: devices that can be had.
        least: devices to hold at any time.
        provision_s: seconds from asking for a device until it comes.

    Raises:
        InvalidFieldError: an argument is out of range.
    """

    def __init__(self, goals: Goals, most: int, least: int = 1, *, provision_s: float = 60.0) -> None:
        self._goals = goals
        self._most = require_integer("most", most, at_least=1)
        self._least = require_integer("least", least, at_least=1)
        if self._least > self._most:
            raise InvalidFieldError("least", least, f"must be at most {self._most}, the most devices")
        self._provision_s = require_number("provision_s", provision_s, at_least=0.0)

    def decide(
        self, now: float, held: int, end_on: EndOn, useful: int, *, asked: int = 0, spent_device_s: float = 0.0
    ) -> Sizing:
        """Decides how many devices to hold from now on.

        Args:
            now: seconds since the time from which the deadline counts.
            held: devices that are held.
            end_on: forecasts; called for about log2(most) numbers of devices.
            useful: devices that the trials that run or wait could use.
            asked: devices that were asked for and have not come.
            spent_device_s: device-seconds paid for so far.

        Returns:
            The decision: its number of devices includes those asked for.
        """
        rest = _Rest(self._goals, now, held, asked, spent_device_s, end_on, self._provision_s)
        holds, cap = rest.holds, min(self._most, max(self._least, useful))
        if rest.end(max(holds, self._least)) is None:
            return rest.sizing(self._unmeasured(now, holds, cap))
        wanted, earliest, meets = self._wanted(rest, held)
        affordable = rest.affordable(self._least, self._most)
        devices = max(self._least, min(wanted, cap, affordable))
        if holds > cap and affordable >= holds and rest.meets(holds) and not rest.meets(holds, later=self._provision_s):
            devices = holds  # Those that are idle would come back too late, if they were needed again.
        if meets and affordable < min(wanted, cap):
            meets = rest.meets(devices)
        return rest.sizing(
            devices,
            min(wanted, affordable),
            meets=meets,
            earliest_s=earliest,
            is_missed=earliest is not None and rest.misses(self._most),
            interrupts=affordable < held,
        )

    def _unmeasured(self, now: float, holds: int, cap: int) -> int:
        """A few devices to measure with; more of them as time passes without a measurement."""
        deadline = self._goals.deadline_s
        doubled = 0.0 if deadline is None else math.floor(min(now / (_PATIENCE * deadline), 30.0))
        return max(self._least, min(cap, max(holds, int(_FIRST * 2.0**doubled))))

    def _wanted(self, rest: _Rest, held: int) -> tuple[int, float | None, bool | None]:
        """Returns devices to hold if all are useful, the earliest end if the deadline is missed, whether it is met.

        Devices held that would not be needed are wanted still: trials that run there would have to be moved, and would
        cost the same elsewhere. They go when they fall idle.
        """
        if self._goals.deadline_s is None:
            return self._most, None, None
        holds = max(self._least, rest.holds)
        if holds >= self._most or rest.meets(holds):
            few, many = max(self._least, held), holds
        else:
            few, many = holds, self._most
        if rest.meets(many):
            return few if rest.meets(few) else _fewest(rest.meets, few, many), None, True
        earliest = rest.quantile(self._most)
        fewest = _fewest(lambda devices: rest.quantile(devices) <= earliest * (1.0 + _ALIKE), self._least, self._most)
        if earliest <= rest.left_s:
            return max(holds, fewest), None, True  # All that is missing is the margin.
        return max(holds, fewest), earliest, False


class _Rest:
    """What is left at one moment, on each number of devices. Forecasts are asked for once per number."""

    def __init__(
        self,
        goals: Goals,
        now: float,
        held: int,
        asked: int,
        spent_device_s: float,
        end_on: EndOn,
        provision_s: float,
    ) -> None:
        self._goals = goals
        self._held = held
        self.holds = held + asked
        self._end_on = end_on
        self._ends: dict[int, EndDistribution | None] = {}
        self._provision_s = provision_s
        self.left_s = math.inf if goals.deadline_s is None else max(0.0, goals.deadline_s - now)
        spent = goals.cost(spent_device_s)
        self._left_usd = None if goals.budget_usd is None or spent is None else max(0.0, goals.budget_usd - spent)

    def end(self, devices: int) -> EndDistribution | None:
        """When what is left ends; devices that are not there yet come later."""
        if devices not in self._ends:
            end = self._end_on(devices)
            missing = max(0, devices - self._held)
            # Until the others come, those held do all the work: as much as all would do in this time less.
            late = self._provision_s * missing / devices
            self._ends[devices] = end if end is None or not late else end.later(late)
        return self._ends[devices]

    def quantile(self, devices: int) -> float:
        """Seconds by which what is left ends with the odds asked for."""
        end = self.end(devices)
        return math.inf if end is None else end.quantile(self._goals.odds)

    def odds(self, devices: int, *, later: float = 0.0) -> float | None:
        """Of meeting the deadline, less a margin that shrinks as it nears, and less these seconds."""
        end = self.end(devices)
        if end is None or self._goals.deadline_s is None:
            return None
        return end.odds_by(self.left_s * (1.0 - _MARGIN) - later)

    def meets(self, devices: int, *, later: float = 0.0) -> bool:
        """Whether the deadline is met with the odds asked for."""
        odds = self.odds(devices, later=later)
        return odds is not None and odds >= self._goals.odds

    def misses(self, devices: int) -> bool:
        """Whether the deadline is missed with the odds asked for."""
        end = self.end(devices)
        return end is not None and end.quantile(min(self._goals.odds, 1.0 - self._goals.odds)) > self.left_s

    def device_s(self, devices: int) -> float | None:
        """Expected device-seconds from now on: the work itself, if devices that fall idle are given back."""
        end, alone = self.end(devices), self.end(1)
        if end is None or alone is None:
            return None
        return min(devices * end.mean, max(alone.mean, end.mean))

    def cost(self, devices: int) -> float | None:
        """Expected cost from now on."""
        seconds = self.device_s(devices)
        return None if seconds is None else self._goals.cost(seconds)

    def affordable(self, least: int, most: int) -> int:
        """The most devices on which what is left is expected to cost no more than the budget has left."""
        if self._left_usd is None:
            return most
        left = self._left_usd
        if self._within(most, left):
            return most
        low, high = least, most  # affordable or the least; not affordable
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._within(middle, left) else (low, middle)
        return low

    def _within(self, devices: int, left_usd: float) -> bool:
        cost = self.cost(devices)
        return cost is not None and cost <= left_usd

    def sizing(
        self,
        devices: int,
        later: int | None = None,
        *,
        meets: bool | None = None,
        earliest_s: float | None = None,
        is_missed: bool = False,
        interrupts: bool = False,
    ) -> Sizing:
        """The decision for so many devices, and for so many later, when more are useful than now."""
        later = max(devices, later or 0)
        cost = None if self._goals.price_per_device_hour is None else self.cost(later)
        within = None if cost is None or self._left_usd is None else cost <= self._left_usd
        return Sizing(
            devices=devices,
            odds=self.odds(later),
            meets=meets,
            earliest_s=earliest_s,
            is_missed=is_missed,
            cost_usd=cost,
            within_budget=within,
            money_ends_in_s=self._money_ends_in(devices),
            interrupts=interrupts,
        )

    def _money_ends_in(self, devices: int) -> float | None:
        rate = self._goals.cost(float(max(devices, self._held)))  # US dollars per second
        return None if self._left_usd is None or not rate else self._left_usd / rate


def _fewest(enough: Callable[[int], bool], few: int, many: int) -> int:
    """The fewest devices that are enough, where ``many`` are, and ``few`` less one are not."""
    low, high = few - 1, many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
