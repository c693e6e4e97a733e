"""The time axis of a run folder: one for all sessions that write there, also on other machines or after a reboot.

The first session writes what its monotonic clock shows. Each further one adds a shift to its own, so that times in the
files of a run compare as they are. ``session.json`` tells, in ``clock``, what the clocks showed as its last session
began: where the next one has the same clock, it adds the same shift; else it takes from the wall clocks how much later
it is. If a wall clock was set back, so that the next session would begin before the last entry of the files, it begins
right there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid._clock import ClockReading, local_time
from fluid.keeping import finite_number


def time_in_files(clock: object, now: ClockReading) -> float | None:
    """Returns the present time on the axis of a run's files; ``None`` if the files do not tell.

    Args:
        clock: ``clock`` in ``session.json``, as :func:`clock_facts` makes it; older versions of Fluid told less.
        now: the clock of this process.
    """
    known = clock if isinstance(clock, Mapping) else {}
    at, wall, shift = (finite_number(known.get(name)) for name in ("at", "wall", "shift"))
    if at is None or wall is None or shift is None:
        return None
    return now.at + shift if now.name and now.name == known.get("name") else at + now.wall - wall


def clock_facts(began: ClockReading, shift: float) -> dict[str, Any]:
    """What ``session.json`` says of a session's clock.

    Args:
        began: what the clock showed as the session began.
        shift: seconds that the session adds to what its clock shows, in all files.
    """
    return {
        "at": began.at + shift,
        "time": local_time(began.wall, "%Y-%m-%d %H:%M:%S"),
        "wall": began.wall,
        "name": began.name,
        "shift": shift,
    }
