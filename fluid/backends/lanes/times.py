"""Times and places of lanes' events: a lane knows its machine's clock only, and not the machine's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from fluid.engine.events import Event, IterationDone, TrialForked, TrialSaved, TrialSetBack


def located(event: Event, at: float, host: str) -> Event:
    """Returns an event of a lane as the engine is told of it.

    Args:
        event: as the lane sent it.
        at: when, on the driver's clock, seconds.
        host: name of the lane's machine.
    """
    changes: dict[str, Any] = {}
    if at != event.at:
        changes["at"] = at
        if isinstance(event, IterationDone) and event.run is not None:
            later = at - event.at
            changes["run"] = event.run._replace(at=tuple(each + later for each in event.run.at))
    if isinstance(event, (TrialSaved, TrialForked, TrialSetBack)) and event.checkpoint is not None:
        changes["checkpoint"] = replace(event.checkpoint, host=host)
    return structs.replace(event, **changes) if changes else event


def not_before(events: Sequence[Event], earliest: float) -> list[Event]:
    """Returns events, which are in order of time, with times before ``earliest`` set to that; in runs, too."""
    return [_not_before(event, earliest) for event in events]


def _not_before(event: Event, earliest: float) -> Event:
    if isinstance(event, IterationDone) and event.run is not None and event.run.at[0] < earliest:
        # The iteration before the run may have been set to it, too: the iterations of a trial stay in order.
        run = event.run._replace(at=tuple([max(at, earliest) for at in event.run.at]))
        return structs.replace(event, at=max(event.at, earliest), run=run)
    return event if event.at >= earliest else structs.replace(event, at=earliest)
