"""What a user wants of a session beside its results: an end by a deadline, within a budget."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import ClassVar

from fluid.errors import InvalidFieldError, parse_duration, require_number
from fluid.given_fields import GivenFields
from fluid.user_calls import user_class


@user_class
@dataclass(frozen=True)
class Goals(GivenFields):
    """When all is to have ended, and for how much money: an argument of :class:`fluid.FluidExecutor`.

    Example:
        >>> from fluid import FluidExecutor, Goals
        >>> goals = Goals("2h", budget_usd=40.0, price_per_device_hour=2.5)
        >>> with FluidExecutor("local", 1, goals=goals, verbose=0) as executor:
        ...     executor.status().goal.budget_usd
        40.0

    Args:
        deadline: when all is to have ended: seconds from the beginning of the session, or text such as ``"2h"`` or
            ``"1h 30m"``. The session holds as few devices as meet it with 90 %, and says so at once if none do. What
            cannot end by then is saved in time, and the session ends (``docs/deadlines.md``). ``None``, the default,
            for no deadline.
        budget_usd: most US dollars to spend on devices; the session ends like at its deadline when they are spent.
            It needs ``price_per_device_hour``. ``None``, the default, for no limit.
        price_per_device_hour: US dollars for an hour of one device, 0 for devices that cost nothing; reports then show
            costs. ``None``, the default, if unknown.

    Attributes:
        odds: with which the deadline is to be met.

    Raises:
        InvalidFieldError: a value cannot be used.
    """

    deadline: float | str | None = None
    _: KW_ONLY
    budget_usd: float | None = None
    price_per_device_hour: float | None = None
    odds: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        _ = self.deadline_s
        if self.budget_usd is not None:
            if require_number("budget_usd", self.budget_usd, at_least=0.0) == 0.0:
                raise InvalidFieldError("budget_usd", self.budget_usd, "must be above 0")
            if not self.price_per_device_hour:
                raise InvalidFieldError("budget_usd", self.budget_usd, "needs price_per_device_hour above 0")
        if self.price_per_device_hour is not None:
            require_number("price_per_device_hour", self.price_per_device_hour, at_least=0.0)

    @cached_property
    def deadline_s(self) -> float | None:
        """Seconds from the beginning of the session, or of the sweep that set it; ``None`` for no deadline."""
        return None if self.deadline is None else parse_duration("deadline", self.deadline)

    def cost(self, device_seconds: float) -> float | None:
        """US dollars for so many device-seconds; ``None`` if the price is unknown."""
        return None if self.price_per_device_hour is None else self.price_per_device_hour * device_seconds / 3600.0


#: No deadline, no budget, and no price.
NO_GOALS = Goals()


def format_duration(seconds: float) -> str:
    """Seconds as text of at most two units: ``"1 h 30 min"``, ``"45 s"``, ``"0.5 s"``."""
    if seconds < 10.0:
        return f"{seconds:.2g} s"
    left, parts = round(seconds), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])
