"""Which events of a backend the engine is given together, and when it is to hear next."""

from __future__ import annotations

import itertools

from fluid.engine.events import DeviceAdded, DeviceDraining, Event

#: Events of a backend that the engine may refuse.
_CHECKED = frozenset({DeviceAdded, DeviceDraining})


def apart(events: list[Event]) -> list[list[Event]]:
    """Splits events where devices come or drain: the engine checks those against what earlier calls have changed."""
    if _CHECKED.isdisjoint(map(type, events)):
        return [events]
    kinds = itertools.groupby(events, key=lambda event: type(event) if type(event) in _CHECKED else None)
    return [list(together) for _, together in kinds]


def earlier(first: float | None, second: float | None) -> float | None:
    """The earlier of two times, or the shorter of two waits; ``None`` sets no limit."""
    return second if first is None else first if second is None else min(first, second)
