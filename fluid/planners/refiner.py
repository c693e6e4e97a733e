"""The refiner of resizes: of the width changes that a re-plan wants, which to make (docs/theory.md, section 16).

A resize stops a trial for epsilon seconds, and may stop others: those that leave devices for it, and those beside it.
A re-planner looks at one instant; what it does at each may cost more pauses than the trials gain in all, where waiting
for the next departure would give them the same devices for one pause. So changes are taken as a set. Pure: no IO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluid.measure.runtime_model import TOLERANCE, FloatArray, stretch_of
from fluid.planners.arrangement import Arrangement, KeepWidths, Replanner, Running, WidthChange, start_order
from fluid.planners.instance import Instance
from fluid.planners.rollout import Rollout
from fluid.resources import Cluster, Device

# -- lookahead -----------------------------------------------------------------------------------
#
# Lookahead: when the trials that run and wait end if some width changes are made now, and a re-planner then goes on.
#
# By the rollout's model (:mod:`fluid.planners.rollout`). Pure.


class Ends(NamedTuple):
    """When trials end, seconds from now.

    Attributes:
        last: the last one; infinite if the rollout was given up.
        total: the sum over all trials.
    """

    last: float
    total: float

    def are_earlier(self, other: Ends) -> bool:
        """Whether the last end is earlier; or, if it is the same, the mean of all."""
        if abs(self.last - other.last) <= TOLERANCE * other.last:
            return self.total < other.total * (1.0 - TOLERANCE)
        return self.last < other.last


class Waiting(NamedTuple):
    """Trials that wait for devices.

    Attributes:
        instance: what they are.
        widths: (k,) the width that each is to get.
    """

    instance: Instance
    widths: FloatArray


def ends_after(
    running: Running,
    changes: Sequence[WidthChange],
    replanner: Replanner,
    waiting: Waiting | None = None,
    *,
    give_up_after: float = math.inf,
) -> Ends:
    """When trials end if these changes are made, and a re-planner goes on at each departure.

    Args:
        running: the trials that run; idle devices of unknown speed are taken to be as fast as those of the longest one.
        changes: of their widths, in order.
        replanner: asked to make room while trials wait, and for widths once none does.
        waiting: the trials that wait; ``None`` for none.
        give_up_after: seconds beyond which the rollout stops unfinished.
    """
    rollout = _resume(running)
    if waiting is not None:
        widths = waiting.widths
        order = start_order(widths, waiting.instance.late_heights, waiting.instance.priority)
        rollout.submit(waiting.instance, Arrangement(widths, order, KeepWidths(), replan_at_start=False, name=""))
    position = {row: i for i, row in enumerate(running.rows.tolist())}
    rollout.apply([WidthChange(position[row], width) for row, width in changes])
    if waiting is not None:
        rollout.dispatch()
    limit = give_up_after * (1.0 + TOLERANCE)
    while rollout.running:
        if rollout.next_end > limit:
            return Ends(math.inf, math.inf)
        rollout.advance(math.inf)
        if rollout.queued:
            rollout.dispatch()
        if rollout.queued and waiting is not None:
            left = np.array([waiting.instance.heights[row - len(running)] for row in rollout.waiting_rows])
            rollout.apply(replanner.make_room(rollout.snapshot(), left))
            rollout.dispatch()
        elif rollout.running:
            rollout.apply(replanner.replan(rollout.snapshot()))
    return Ends(rollout.now, math.fsum(rollout.finished.values()))


def _resume(running: Running) -> Rollout:
    """A rollout in which the trials of a snapshot hold as many devices, of the same speeds, with the same others."""
    speed, first = running.speed.tolist(), running.device.tolist()
    speeds: list[float] = []
    held: list[tuple[int, ...]] = []
    shared: dict[int, int] = {}
    for i, width in enumerate(running.widths.tolist()):
        if width < 1.0 and first[i] in shared:
            held.append((shared[first[i]],))
            continue
        held.append(tuple(range(len(speeds), len(speeds) + max(1, round(width)))))
        speeds += [speed[i]] * len(held[-1])
        if width < 1.0:
            shared[first[i]] = held[-1][0]
    idle = running.idle_speeds
    speeds += [speed[int(running.remaining.argmax())]] * running.free if idle is None else idle
    rollout = Rollout(Cluster(tuple(Device(index, speed=each) for index, each in enumerate(speeds))), running.epsilon)
    rollout.take_over(running, held)
    return rollout


# -- refiner -------------------------------------------------------------------------------------


#: Where a pause takes less than this share of the time until the last trial ends, nothing is rolled out: pauses decide
#: nothing then, and the re-planner has weighed each against its own gain.
LEAST_PAUSE = 0.005
#: Most running trials of which the ends are rolled out: a rollout takes milliseconds for each dozen of them.
MOST_ROLLED_OUT = 32
#: A gain below this share of the standard deviation of what it is a part of is noise (docs/theory.md, section 14).
_NOISE = 0.02


class Appraisal(NamedTuple):
    """What a width change is worth.

    Attributes:
        change: the width change.
        gain: predicted seconds by which the trial ends earlier, its own pause taken off; negative if it ends later.
        stall: predicted seconds that it and others stand still for it: epsilon for each trial.
        devices: devices that it takes from the idle ones; negative if it gives some back.
        noise: seconds below which the gain is none, as it is uncertain.
    """

    change: WidthChange
    gain: float
    stall: float
    devices: int
    noise: float = 0.0


@dataclass(frozen=True)
class Refinement:
    """A re-plan's width changes, refined.

    Attributes:
        kept: the changes to make, in order.
        rejected: those that the re-planner wanted and that do not pay.
    """

    kept: list[WidthChange]
    rejected: tuple[Appraisal, ...] = ()


def appraise(running: Running, changes: Sequence[WidthChange]) -> list[Appraisal]:
    """Says of each width change what it is predicted to gain, and whom it stops for how long.

    A change that opens a trial's own device to others (a width below 1 from one of at most 1) costs no pause.

    Args:
        running: the trials that run.
        changes: of them.
    """
    position = {row: i for i, row in enumerate(running.rows.tolist())}
    return [_appraise(running, position[change.row], change) for change in changes]


def _appraise(running: Running, i: int, change: WidthChange) -> Appraisal:
    old, new, residents = float(running.widths[i]), change.width, int(running.residents[i])
    fused = None if running.fused is None else running.fused[i]
    alpha, beta = float(running.alpha[i]), float(running.beta[i])
    present = 1.0 / residents if old < 1.0 else old
    seconds = float(running.remaining[i] / running.speed[i])
    now = seconds * stretch_of(alpha, beta, present, fused)
    stays = new < 1.0 and old <= 1.0
    pause = 0.0 if stays else running.epsilon
    moved = seconds * (1.0 if stays else stretch_of(alpha, beta, new, fused))
    beside = residents - 1 if old < 1.0 else 0
    owns = round(old) if old >= 1.0 else int(residents == 1)
    devices = 0 if stays else max(1, round(new)) - owns
    noise = 0.0 if running.sigma is None else _NOISE * float(running.sigma[i]) * now
    return Appraisal(change, now - moved - pause, pause * (1 + beside), devices, noise)


def greedy(running: Running, appraisals: Sequence[Appraisal]) -> set[int]:
    """The rows whose change gains more than it makes others stand still, taken in order of descending gain.

    A trial's own pause is in its gain. Others are its co-residents, of which each stands still once, however many
    leave its device; and the trials that give up devices for it, with what they lose by that, as far as they end after
    the last trial does now. What gives up devices that no kept change needs is not kept.

    Args:
        running: the trials that run.
        appraisals: of the wanted changes.
    """
    position = {row: i for i, row in enumerate(running.rows.tolist())}
    stopped: set[int] = set()  # Devices on which a kept change stops all trials already.
    givers = [each for each in appraisals if each.devices < 0]
    free, kept = running.free, set[int]()
    for each in sorted(appraisals, key=lambda one: -one.gain):
        if each.devices < 0:
            continue
        giving: list[Appraisal] = []
        left = free - each.devices
        for giver in givers:
            if left >= 0:
                break
            if giver.change.row not in kept:
                giving.append(giver)
                left -= giver.devices
        if left < 0:
            continue
        device = int(running.device[position[each.change.row]])
        others = 0.0 if device in stopped else max(0.0, each.stall - running.epsilon)
        if each.gain - each.noise > others + sum(giver.stall for giver in giving):
            kept |= {each.change.row, *(giver.change.row for giver in giving)}
            stopped.add(device)
            free = left
    return kept


class Refined:
    """A re-planner whose width changes are refined.

    Args:
        replanner: what wants the changes.

    Attributes:
        wanted_by: the same.
    """

    def __init__(self, replanner: Replanner) -> None:
        self.moves_only_devices = replanner.moves_only_devices
        self.wanted_by = replanner

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns the changes that pay."""
        return self.refine(running).kept

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns what the re-planner wants: of trials that wait, their heights do not tell what a device gains."""
        return self.wanted_by.make_room(running, waiting)

    def refine(self, running: Running) -> Refinement:
        """Chooses among all of the changes that the re-planner wants, those that :func:`greedy` keeps, and none.

        The choice after which the last trial is predicted to end first is made, or, of those that tie, all trials on
        average; then that which was named first. The prediction is a rollout in which the re-planner goes on unrefined.
        As the first choice is what happens without a refiner, the last trial is not predicted to end later than so.
        Where the rollout would take long, or runtimes are uncertain, it is what :func:`greedy` keeps.
        """
        changes = self.wanted_by.replan(running)
        if not changes or not _pauses_matter(running):
            return Refinement(changes)
        appraisals = appraise(running, changes)
        kept = greedy(running, appraisals)
        some = [change for change in changes if change.row in kept]
        if len(running) > MOST_ROLLED_OUT or running.sigma is not None:
            return _made(some, appraisals)
        return _made(self._best(running, changes, some, [], None), appraisals)

    def refine_room(self, running: Running, waiting: Waiting) -> Refinement:
        """Chooses whether trials pause to give devices to those that wait, in the same way.

        Trials that only open their own device to others do not pause, and do so in any case.

        Args:
            running: the trials that run.
            waiting: all trials that wait.
        """
        changes = self.wanted_by.make_room(running, waiting.instance.heights)
        few = len(running) + len(waiting.widths) <= MOST_ROLLED_OUT
        if not changes or not few or running.sigma is not None or not _pauses_matter(running):
            return Refinement(changes)
        appraisals = appraise(running, changes)
        free_of_pause = [each.change for each in appraisals if each.stall == 0.0]
        return _made(self._best(running, changes, free_of_pause, free_of_pause, waiting), appraisals)

    def _best(
        self,
        running: Running,
        changes: list[WidthChange],
        some: list[WidthChange],
        fewest: list[WidthChange],
        waiting: Waiting | None,
    ) -> list[WidthChange]:
        choices = [changes, *([some] if some != changes else []), *([fewest] if fewest not in (changes, some) else [])]
        chosen, best = changes, Ends(math.inf, math.inf)
        for choice in choices if len(choices) > 1 else ():
            ends = ends_after(running, choice, self.wanted_by, waiting, give_up_after=best.last)
            if math.isfinite(ends.last) and (math.isinf(best.last) or ends.are_earlier(best)):
                chosen, best = choice, ends
        return chosen


def _made(chosen: list[WidthChange], appraisals: Sequence[Appraisal]) -> Refinement:
    made = {change.row for change in chosen}
    return Refinement(chosen, tuple(each for each in appraisals if each.change.row not in made))


def _pauses_matter(running: Running) -> bool:
    return running.epsilon > 0.0 and running.epsilon >= LEAST_PAUSE * _last_end(running)


def _last_end(running: Running) -> float:
    """Seconds until the last trial ends, if each goes on at its present pace."""
    wide = running.beta ** np.maximum(running.widths - 1.0, 0.0) / np.maximum(running.widths, 1.0)
    return float((running.remaining * wide / running.speed).max(initial=0.0))
