"""What is left of a session's deadline and budget for the session that goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluid._clock import wall_seconds
from fluid._logs import logger_of
from fluid.errors import InvalidFieldError
from fluid.results.folder_files import read_facts

_log = logger_of("fluid.session")


def goals_left(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the deadline, the budget and the price of a session that goes on, as options of an executor.

    The price stays. A deadline stays while it is still to come; one that has passed is dropped, as the trials are to
    go on. Of a budget there is what was not spent.

    Args:
        folder: the run folder.
        given: options that the user gives, which take the place of the session's.

    Raises:
        InvalidFieldError: all of the budget was spent, and the user gives none.
    """
    facts = read_facts(folder)
    price, budget, at = facts.get("price_per_device_hour"), facts.get("budget_usd"), facts.get("deadline_at")
    left: dict[str, Any] = {"price_per_device_hour": price}
    if at is not None and "deadline" not in given:
        seconds = at - wall_seconds()
        if seconds > 0.0:
            left["deadline"] = seconds
        else:
            _log.info("the deadline of the session in %s has passed; it goes on without one", folder)
    if budget is not None and "budget_usd" not in given:
        left["budget_usd"] = budget - (price or 0.0) * facts.get("device_s", 0.0) / 3600.0
        if left["budget_usd"] <= 0.0:
            reason = "is spent: give resume() a further budget_usd, or None for no limit"
            raise InvalidFieldError("budget_usd", budget, reason)
    return left
