"""A re-planner for groups of about as many trials as devices: pack most of them, and run the others very wide.

At such sizes one device per trial is often a poor plan: if packing costs little, most trials lose little by sharing a
device, and the devices so released end the others early. Efficient widths are corners of the lower envelope of width
against rate (:func:`fluid.planning.bounds.envelope`): the narrowest width, and the whole width with the greatest gain
in rate per further device. Widths in between are not used.
"""

from __future__ import annotations

import numpy as np

from fluid.planners.uncertain_ends import as_certain
from fluid.planners.water_fill import WaterFill
from fluid.planning.arrangement import Running, WidthChange
from fluid.planning.instance import Instance
from fluid.planning.narrowest_widths import distinct_kinds
from fluid.planning.runtime_model import TOLERANCE, FloatArray, RuntimeModel


def efficient_widths(model: RuntimeModel) -> FloatArray:
    """(k,) the whole width that gains the most rate per device beyond the narrowest width, 1/c.

    It is the next corner of the envelope after 1/c; of equal gains, the widest.
    """
    best = np.ones(len(model))
    for kind in distinct_kinds(model, np.ceil):
        width = np.arange(1.0, kind.d + 1.0)
        rate, narrowest, rate_there = width / kind.beta ** (width - 1.0), 0.0, 0.0
        if kind.c > 1:
            narrowest = 1.0 / kind.c
            rate_there = kind.alpha ** (1.0 - kind.c) if kind.fused is None else 1.0 / kind.fused.stretch(kind.c)
        gain = (rate - rate_there) / (width - narrowest)
        best[kind.rows] = width[np.flatnonzero(gain >= gain.max() - TOLERANCE)[-1]]
    return best


def concentrated_widths(instance: Instance) -> FloatArray:
    """(k,) the efficient width for as many of the longest trials as fit, and 1/c for the rest."""
    model = instance.model
    widths = 1.0 / model.c
    wide = efficient_widths(model)
    longest = np.argsort(-instance.heights, kind="stable")
    # Devices for the shorter trials, packed, for each number of wide trials.
    packed_after = np.ceil(len(widths) - np.arange(1, len(widths) + 1)) / int(model.c.min())
    fits = np.cumsum(wide[longest]) + np.ceil(packed_after) <= instance.n
    count = len(fits) if fits.all() else int(np.argmin(fits))
    widths[longest[:count]] = wide[longest[:count]]
    return widths


class Concentrate:
    """Widens the longest packed trials to their efficient width as devices become idle; R once none is packed."""

    moves_only_devices = True

    def __init__(self) -> None:
        self._water_fill = WaterFill()

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns widening changes by descending remaining work, or R's if none is worth it."""
        shared = np.flatnonzero(running.residents > 1)
        if not len(shared):
            return self._water_fill.replan(running)
        columns = (running.alpha[shared], running.beta[shared], running.c[shared], running.d[shared])
        model = RuntimeModel(*columns, None if running.fused is None else running.fused.take(shared))
        wide = efficient_widths(model)
        residents: dict[int, int] = {}
        for device in running.device[shared].tolist():
            residents[device] = residents.get(device, 0) + 1
        free = running.free
        resizes: list[WidthChange] = []
        late = as_certain(running)
        for j in np.argsort(-late.remaining[shared], kind="stable").tolist():
            i = int(shared[j])
            device = int(running.device[i])
            own = 1 if residents[device] == 1 else 0
            width = min(wide[j], free + own)
            if width < 1 + own or not _sooner(late, i, float(width), residents[device]):
                break
            resizes.append(WidthChange(int(running.rows[i]), float(width)))
            free -= int(width) - own
            residents[device] -= 1
        return resizes or self._water_fill.replan(running)

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns R's changes."""
        return self._water_fill.make_room(running, waiting)


def _sooner(running: Running, i: int, width: float, residents: int) -> bool:
    """Whether the trial ends sooner at that width, with epsilon, than with its present co-residents."""
    work = float(running.remaining[i] / running.speed[i])
    moved = running.epsilon + work * float(running.beta[i]) ** (width - 1.0) / width
    fused = None if running.fused is None else running.fused[i]
    shared = float(running.alpha[i]) ** (residents - 1.0) if fused is None else fused.stretch(residents)
    return bool(moved < work * shared)
