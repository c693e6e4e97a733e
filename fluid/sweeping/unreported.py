"""Warns of stop rules that no trial can meet, as far as the first results tell."""

from __future__ import annotations

import logging

from fluid.results.records import Result
from fluid.sweeping.plan import SweepPlan

#: The logger of the sweep's loop.
_log = logging.getLogger("fluid.sweeping.loop")


def warn_of_unreported(plan: SweepPlan, result: Result) -> None:
    """Warns of stop rules on metrics that no trial has reported.

    Args:
        plan: of the sweep.
        result: the latest result.
    """
    for name in plan.rules.unreported:
        known = ", ".join(map(repr, result.metrics)) or "nothing"
        _log.warning(
            "stop[%r] stops no trial of the sweep %r so far: the trials report no such metric, but %s",
            *(name, plan.name, known),
        )
