"""What a run cost: device time held, dollars, and how it stood to its deadline and its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluid.display.format import count, device_time, dollars, duration, percent
from fluid.errors import require_number
from fluid.results.run_files import amount_in, price_in
from fluid.sizing.goals import Goals


@dataclass(frozen=True)
class Paid:
    """What of a run is to be paid for.

    Attributes:
        held: device-seconds for which devices were held: each from its arrival to its loss, or to the end of the
            session.
        busy: device-seconds in which iterations ran.
        took: seconds from the beginning of the session to the end of the last iteration, or, of a session that runs,
            to its last news; ``None`` if unknown.
        price: US dollars for a device-hour; ``None`` if unknown.
    """

    held: float = 0.0
    busy: float = 0.0
    took: float | None = None
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of a run.

    Attributes:
        paid: the devices, and their price.
        budget_usd: most dollars that were to be spent; ``None`` if there was no limit.
        device_s: device-seconds that this is for, of the session that was opened last; ``None`` for all.
        deadline_s: seconds from the beginning of the session by which it was to end; ``None`` if there was none.
        unended: trials that have not ended.
        is_running: whether the session runs.
    """

    paid: Paid
    budget_usd: float | None = None
    device_s: float | None = None
    deadline_s: float | None = None
    unended: int = 0
    is_running: bool = False

    @property
    def usd(self) -> float | None:
        """US dollars for the devices held; ``None`` if the price is unknown."""
        return self.usd_of(self.paid.held)

    def usd_of(self, device_seconds: float) -> float | None:
        """US dollars for so many device-seconds; ``None`` if the price is unknown."""
        return Goals(price_per_device_hour=self.paid.price).cost(device_seconds)

    @property
    def slack_s(self) -> float | None:
        """Seconds by which the run ended before its deadline; negative if after; ``None`` if either is unknown."""
        if self.deadline_s is None or self.paid.took is None:
            return None
        return self.deadline_s - self.paid.took

    @property
    def met(self) -> bool | None:
        """Whether the deadline was met; ``None`` while that is open, or if there is none."""
        slack = self.slack_s
        if slack is None or (self.is_running and self.unended and slack >= 0.0):
            return None
        return slack >= 0.0 and not self.unended

    @property
    def busy_share(self) -> float:
        """The share of the device time held in which iterations ran."""
        return min(1.0, self.paid.busy / self.paid.held) if self.paid.held > 0.0 else 0.0

    @property
    def texts(self) -> list[str]:
        """The costs in words: those of the devices, the deadline and the budget, as far as there are any."""
        usd, found = self.usd, []
        if self.paid.held:
            price = "" if usd is None else f", {dollars(usd)} at {dollars(self.paid.price or 0.0)} an hour"
            found.append(f"{device_time(self.paid.held)}{price}; {percent(self.busy_share)} of it ran iterations")
        if self.deadline_s is not None:
            found.append(f"deadline {duration(self.deadline_s)}: {self._deadline_text()}")
        if self.budget_usd is not None and usd is not None:
            spent = usd if self.device_s is None else self.usd_of(self.device_s)
            left = self.budget_usd - (spent or 0.0)
            text = f"{dollars(left)} left" if left >= 0.0 else f"exceeded by {dollars(-left)}"
            found.append(f"budget {dollars(self.budget_usd)}: {text}")
        return found

    def _deadline_text(self) -> str:
        slack = self.slack_s
        if slack is None:
            return "the journal does not tell whether it was met"
        if self.is_running and self.unended:
            return f"{duration(slack)} left" if slack >= 0.0 else f"passed {duration(-slack)} ago"
        if self.unended:
            return f"not met, {count(self.unended, 'trial')} had not ended"
        return f"met with {duration(slack)} to spare" if slack >= 0.0 else f"missed by {duration(-slack)}"

    def as_json(self) -> dict[str, Any]:
        """The costs, in the output of ``fluid report --json`` as ``costs``; what is unknown or not given is ``null``.

        * ``device_seconds_held``, each device from its arrival to its loss or to the end of the session, and
          ``device_seconds_busy``, those of them in which iterations ran
        * ``price_per_device_hour``, ``cost_usd``, ``budget_usd``
        * ``deadline_s``, ``deadline_met`` (``null`` while open) and ``deadline_slack_s``, seconds to spare, negative if
          it was missed
        """
        return {
            "device_seconds_held": self.paid.held,
            "device_seconds_busy": self.paid.busy,
            "price_per_device_hour": self.paid.price,
            "cost_usd": self.usd,
            "budget_usd": self.budget_usd,
            "deadline_s": self.deadline_s,
            "deadline_met": self.met,
            "deadline_slack_s": self.slack_s,
        }


def price_of(session: Mapping[str, Any], price: object = None) -> float | None:
    """US dollars for a device-hour: the one given, else the session's own; ``None`` if neither is known.

    Raises:
        InvalidFieldError: the price given is no number of at least 0.
    """
    if price is not None:
        return require_number("price", price, at_least=0.0)
    return price_in(session)


def goals_in(session: Mapping[str, Any]) -> dict[str, float | None]:
    """The deadline and the budget of a session, and what it has spent of this, as fields of :class:`Costs`."""
    return {name: amount_in(session, name) for name in ("deadline_s", "budget_usd", "device_s")}
