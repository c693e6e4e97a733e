"""Copies the stacks that a lane has written to the log of the trial that runs there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from fluid._clock import MonotonicClock
from fluid._private_files import make_folder, open_private
from fluid.lane.output import lane_stacks, trial_log

#: Seconds for a lane to write its stacks, between two looks at them, and without more after which they are complete.
_PATIENCE_S = 5.0
_LOOK_S = 0.05
_QUIET_S = 0.1


def request_stacks(run_folder: str, lane_id: int, trial_id: str, send_signal: Callable[[], None]) -> threading.Thread:
    """Has a lane write its stacks, and copies them to a trial's log, in a thread that may wait.

    Args:
        run_folder: folder of the run.
        lane_id: the lane.
        trial_id: the trial.
        send_signal: makes the lane write, at once or soon.
    """
    written = _size(lane_stacks(run_folder, lane_id))
    send_signal()
    copying = threading.Thread(target=_copy, args=(run_folder, lane_id, trial_id, written), daemon=True)
    copying.start()
    return copying


def _copy(run_folder: str, lane_id: int, trial_id: str, start: int) -> None:
    source, target = lane_stacks(run_folder, lane_id), trial_log(run_folder, trial_id)
    clock, pause = MonotonicClock(), threading.Event()
    deadline, size, grown_at = clock.now() + _PATIENCE_S, start, clock.now()
    while clock.now() < deadline and (size == start or clock.now() < grown_at + _QUIET_S):
        pause.wait(_LOOK_S)
        if (now := _size(source)) != size:
            size, grown_at = now, clock.now()
    with suppress(OSError):  # The folder of a session that has ended may be gone.
        with open(source, "rb") as file:
            file.seek(start)
            stacks = file.read(size - start)
        make_folder(os.path.dirname(target))
        with open_private(target, "ab") as file:
            file.write(b"\nFluid: no result for long; the stacks of lane %d:\n" % lane_id + stacks)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
