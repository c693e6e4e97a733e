"""What owners gain if a device that one uses goes to another (docs/theory.md, section 15).

An owner whose work is d seconds on one device, and that uses p devices, ends in about d / p seconds. Mean completion
falls if one owner's end comes earlier by more than the other's comes later: the exchange argument of the shortest
remaining processing time first (Schrage, A proof of the optimality of the SRPT discipline, 1968), for work that is
divided over several devices.
"""

from __future__ import annotations

from typing import NamedTuple


class OwnerEnd(NamedTuple):
    """What decides when an owner ends.

    Attributes:
        work: seconds of work left on one device.
        devices: how many it uses.
    """

    work: float
    devices: int


def waiting_gain(waiting: OwnerEnd, wait: float) -> float:
    """Seconds by which an owner ends earlier if it gets a device now rather than ``wait`` seconds later.

    It does ``wait`` seconds more of work on that device, which its other devices then need not do.
    """
    return wait / (waiting.devices + 1)


def pause_gain(waiting: OwnerEnd, running: OwnerEnd, wait: float, seconds: float, stall: float) -> float:
    """Seconds by which completions come earlier in all if a running trial is paused for a waiting one.

    The running trial's owner loses its ``seconds`` of work on the device, which its other devices do instead; or, if it
    has none or that is shorter, waits until the waiting owner has done its work there.

    Args:
        waiting: the owner of the trial that waits.
        running: the owner of the trial that is paused.
        wait: seconds until another device would be idle for the waiting trial.
        seconds: predicted seconds until the running trial would end.
        stall: seconds that pausing it and resuming it elsewhere takes.
    """
    until_back = waiting.work / (waiting.devices + 1)
    others = running.devices - 1
    loss = min(until_back, seconds / others) if others > 0 else until_back
    return waiting_gain(waiting, wait) - loss - stall / max(1, running.devices)
