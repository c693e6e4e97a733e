"""DynamicFluid, the paper's re-planner (Algorithm 3.2; docs/theory.md, section 4).

The paper's listing assigns w where it means w'.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fluid.measure.runtime_model import FloatArray, packed_stretch, stretch_of
from fluid.planners.arrangement import Arrangement, Replanner, Running, WidthChange
from fluid.planners.instance import Instance
from fluid.planners.planner import Planner
from fluid.planners.shares import make_room, static_widths
from fluid.resources import TOLERANCE
from fluid.static_fluid import StaticFluid


class ReallocateByShare:
    """Gives running trials StaticFluid's widths for their remaining work, if that repays epsilon."""

    #: A trial that is alone on its device may join others.
    moves_only_devices = False

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns scale-downs first, then scale-ups by descending height, capped by the idle devices.

        A scale-up must end the trial sooner; a scale-down must take fewer device-seconds. A scale-down to 1/c needs
        an open slot on a packed device or must release a device; packed trials do not change slots.
        """
        targets = static_widths(running.remaining, running.c, running.d, running.n)
        heights = running.remaining * self._stretch_now(running)
        alone = running.residents == 1
        slots = _OpenSlots(running)
        free = running.free
        resizes: list[WidthChange] = []
        moving = np.flatnonzero(targets != running.widths)
        by_height = moving[np.argsort(-running.remaining[moving], kind="stable")].tolist()
        for i in by_height:
            width, target = float(running.widths[i]), float(targets[i])
            if not (target < width and width >= 1.0):
                continue
            target_height = self._height(running, i, target)
            if target * (target_height + running.epsilon) < width * heights[i] * (1.0 - TOLERANCE):
                if target < 1.0:
                    joined = slots.take(int(running.c[i]))
                    if not joined and width < 2.0:
                        continue
                    free += round(width) if joined else round(width) - 1
                else:
                    free += round(width - target)
                resizes.append(WidthChange(int(running.rows[i]), target))
        for i in by_height:
            width, target = float(running.widths[i]), float(targets[i])
            own = max(1, round(width)) if alone[i] and int(running.device[i]) not in slots.joined else 0
            target = min(target, float(own + free))
            if target <= width or target < 1.0:
                continue
            if self._height(running, i, target) + running.epsilon < heights[i] * (1.0 - TOLERANCE):
                free -= round(target) - own
                resizes.append(WidthChange(int(running.rows[i]), target))
        return resizes

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns :func:`fluid.planners.shares.make_room`."""
        return make_room(running, waiting)

    @staticmethod
    def _stretch_now(running: Running) -> FloatArray:
        """h(w)/h(1) at the actual co-residency and speed."""
        packed = packed_stretch(running.alpha, running.residents - 1.0, running.fused)
        wide = running.beta ** np.maximum(running.widths - 1.0, 0.0) / np.maximum(running.widths, 1.0)
        return np.where(running.widths < 1.0, packed, wide) / running.speed

    @staticmethod
    def _height(running: Running, i: int, width: float) -> float:
        fused = None if running.fused is None else running.fused[i]
        stretch = stretch_of(float(running.alpha[i]), float(running.beta[i]), width, fused)
        return float(running.remaining[i]) * stretch / float(running.speed[i])


class _OpenSlots:
    """Open slots on devices with packed trials."""

    def __init__(self, running: Running) -> None:
        #: Devices on which a slot was taken.
        self.joined: set[int] = set()
        #: (-speed, device) -> [most residents, residents]
        self._open: dict[tuple[float, int], list[int]] = {}
        for width, device, residents, speed in zip(
            *(column.tolist() for column in (running.widths, running.device, running.residents, running.speed)),
            strict=True,
        ):
            if width < 1.0:
                limit = min(round(1.0 / width), self._open.get((-speed, device), [10**9])[0])
                self._open[-speed, device] = [limit, residents]

    def take(self, c: int) -> bool:
        """Takes a slot on the most idle device that would hold at most ``c`` trials, as placement does."""
        for (speed, device), (limit, residents) in sorted(self._open.items(), key=lambda slot: (slot[1][1], slot[0])):
            if residents < min(limit, c):
                self._open[speed, device] = [min(limit, c), residents + 1]
                self.joined.add(device)
                return True
        return False


class DynamicFluid(Planner):
    """StaticFluid on arrival, then the paper's re-planner at each departure.

    Example:
        >>> from fluid import Cluster, DynamicFluid, Trial, TrialGroup
        >>> trials = [Trial(print, budget=budget, trial_id=name) for name, budget in zip("abcd", (30, 10, 4, 4))]
        >>> plan = DynamicFluid(c=2, d=4).plan(TrialGroup(trials), Cluster.of(4))
        >>> plan.makespan, plan.schedule.resizes
        (11.0, 2)
    """

    name = "dynamic"

    def arrange(self, instance: Instance) -> Arrangement:
        """Plans the instance as StaticFluid does, with the paper's re-planner."""
        return replace(StaticFluid().arrange(instance), replanner=self.replanner(), name=self.name)

    def replanner(self) -> Replanner:
        """Returns the paper's re-planner."""
        return ReallocateByShare()
