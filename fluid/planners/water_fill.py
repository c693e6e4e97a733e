"""Re-planner R, a water-filling: idle devices go to the trials that end last (docs/theory.md, section 6).

For a finish time T each trial needs the narrowest width that meets T. R finds the smallest T that the idle devices
allow, as an order statistic: list, for every trial and every further device, the finish time below which the trial
needs that device; with F idle devices, T is the (F+1)-th largest entry.

Where runtimes are uncertain, these are finish times that the trials exceed with the same odds, and what is chosen
makes the expected last end earliest (section 14, and :mod:`fluid.planners.uncertain`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fluid.measure.runtime_model import FloatArray, IntArray, RuntimeModel
from fluid.planners.arrangement import Running, WidthChange
from fluid.planners.bounds import distinct_kinds
from fluid.planners.instance import Instance
from fluid.planners.shares import make_room
from fluid.planners.uncertain import UncertainEnds, as_certain
from fluid.resources import TOLERANCE

#: Trials that end early shrink only if the last finish moves below this share of it: their resizes cost epsilon each.
_SHRINK_GAIN = 0.99
#: Tables with more entries than this are first restricted to useful widths; smaller ones are faster built whole.
_LARGE_TABLE = 4096
#: Steps towards the narrowest useful widths; a width that has not converged by then keeps its limit d.
_FIXED_POINT_STEPS = 8


class WaterFill:
    """R: widens the trials that end last, so that the last one ends as early as possible.

    Devices that cannot improve the last finish widen the longest trials that they can speed up, which releases devices
    earlier. Other trials keep their widths.
    """

    moves_only_devices = True

    def replan(self, running: Running) -> list[WidthChange]:
        """Returns narrowing changes first, then widening ones, each by descending remaining work."""
        if not len(running):
            return []
        if running.sigma is None:
            finish, held = _predicted_finish(running)
            *_, best = _better_and_better(running, finish, held)
            devices = _spend(running, finish, held, best.devices, last=lambda: finish)
        else:
            ends = UncertainEnds(running, _predicted_finish(running)[0])
            running = as_certain(running)
            finish, held = _predicted_finish(running)
            chosen = ends.best([filling.devices for filling in _better_and_better(running, finish, held)], held)
            devices = _spend(running, finish, held, chosen, last=lambda: ends.odds_last(chosen, held))
        changed = np.flatnonzero(devices != held).tolist()
        changed.sort(key=lambda i: (devices[i] > held[i], -running.remaining[i]))
        return [WidthChange(int(running.rows[i]), float(devices[i])) for i in changed]

    def make_room(self, running: Running, waiting: FloatArray) -> list[WidthChange]:
        """Returns :func:`fluid.planners.shares.make_room`."""
        return make_room(running, waiting)


@dataclass(frozen=True)
class _Filling:
    """Devices for each trial, and the finish time that they allow."""

    #: When the last trial ends, seconds from now.
    finish: float
    #: (m,) devices each trial holds alone; 0 for one that stays packed.
    devices: IntArray


def _better_and_better(running: Running, finish: FloatArray, held: IntArray) -> Iterator[_Filling]:
    """What the trials hold, then, where the last one ends sooner so: idle devices assigned, and others taken back."""
    best = _Filling(float(finish.max()), held)
    yield best
    if running.free:
        filled = _fill(running, finish, held, base=held, budget=running.free)
        if filled.finish < best.finish * (1.0 - TOLERANCE):
            best = filled
            yield best
    shrinkable = np.where(running.widths >= 2.0, 1, held)
    if (shrinkable < held).any():
        spare = int((held - shrinkable).sum())
        other = _fill(running, finish, held, base=shrinkable, budget=running.free + spare)
        if other.finish < _SHRINK_GAIN * best.finish:
            yield other


def _predicted_finish(running: Running) -> tuple[FloatArray, IntArray]:
    """(m,) seconds until each trial ends if nothing is resized, and the devices that it owns.

    Of the trials on a device, R would move the longest away first. So each one's finish is as if only the trials no
    longer than itself shared the device, until they end in turn; the shortest one owns the device.
    """
    wide = running.beta ** np.maximum(running.widths - 1.0, 0.0) / np.maximum(running.widths, 1.0)
    finish = running.remaining * wide / running.speed
    held = np.maximum(running.widths, 1.0).round().astype(np.int64)
    shared = np.flatnonzero(running.residents > 1)
    if not len(shared):
        return finish, held
    shared = shared[np.lexsort((running.remaining[shared], running.device[shared]))]
    device = running.device[shared]
    begins = np.ones(len(shared), dtype=bool)
    begins[1:] = device[1:] != device[:-1]
    first = np.flatnonzero(begins)
    rank = np.arange(len(shared)) - first[np.cumsum(begins) - 1]
    held[shared[rank > 0]] = 0
    remaining, alpha = running.remaining[shared], running.alpha[shared]
    fused = None if running.fused is None else running.fused.take(shared)
    # finish of rank r = sum over l <= r of (remaining_l - remaining_(l-1)) * stretch with the residents left then
    ends = np.zeros(len(shared))
    processes = np.arange(len(shared)) if fused is None else np.flatnonzero(~fused.fuses)
    for lag in range(int(rank[processes].max(initial=-1)) + 1):
        at = processes[rank[processes] >= lag]
        before = np.where(rank[at] > lag, remaining[at - np.minimum(lag + 1, rank[at])], 0.0)
        ends[at] += (remaining[at - lag] - before) * alpha[at] ** lag
    if fused is not None:
        # The same for many residents: row d of `steps` has the differences of device d, and column r of the upper
        # triangular matrix the stretches with r + 1, r, ..., 1 residents left.
        number, most = np.cumsum(begins) - 1, int(rank.max()) + 1
        steps, lags = np.zeros((len(first), most)), np.subtract.outer(np.arange(most), np.arange(most))
        steps[number, rank] = np.diff(remaining, prepend=0.0)
        steps[:, 0] = remaining[first]
        for rates, rows in fused.parts():
            ends[rows] = (steps @ np.triu(rates.table(most)[np.abs(lags)]))[number[rows], rank[rows]]
    finish[shared] = ends / running.speed[shared]
    return finish, held


def _fill(running: Running, finish: FloatArray, held: IntArray, *, base: IntArray, budget: int) -> _Filling:
    """Assigns ``budget`` devices beyond ``base`` so that the last trial ends as early as possible.

    Args:
        running: the trials.
        finish: (m,) seconds until each ends at its present width.
        held: (m,) devices each owns.
        base: (m,) devices each keeps in any case; at most ``held``.
        budget: devices to assign beyond those.
    """
    seconds = running.remaining / running.speed
    lowest = np.maximum(base, 1)
    most = np.maximum(np.minimum(running.d, base + budget), lowest)
    if int(most.sum()) > _LARGE_TABLE:
        within = float(seconds[held > 0].sum()) / max(1, int(base.sum()) + budget) - running.epsilon
        most = np.minimum(most, np.maximum(_widths_to_end_within(running, seconds, within), np.maximum(held, lowest)))
    # Ragged table, one run of entries a trial: its widths from lowest to most, and its finish time at each.
    length = most - lowest + 1
    starts = np.cumsum(length) - length
    owner = np.repeat(np.arange(len(running)), length)
    width = np.arange(int(length.sum())) - starts[owner] + lowest[owner]
    ends = seconds[owner] * running.beta[owner] ** (width - 1.0) / width + running.epsilon
    # The present width costs no resize, so a wider one must beat the present finish time.
    best = np.where(width >= held[owner], np.minimum(ends, finish[owner]), ends)
    shared = held == 0
    floor = float(best[starts + length - 1].max())
    inner = np.ones(len(best), dtype=bool)
    inner[starts + length - 1] = False
    # A packed trial needs a first device of its own below its present finish time.
    steps = np.concatenate([best[inner], finish[shared]])
    if len(steps) > budget:
        reach = max(floor, float(np.partition(steps, len(steps) - 1 - budget)[len(steps) - 1 - budget]))
    else:
        reach = floor
    limit = reach * (1.0 + TOLERANCE)
    needs_more = np.bincount(owner, weights=inner & (best > limit), minlength=len(running)).astype(np.int64)
    devices = np.where(shared, np.where(finish > limit, 1, 0), lowest) + needs_more
    return _Filling(reach, devices)


def _widths_to_end_within(running: Running, seconds: FloatArray, within: float) -> IntArray:
    """(m,) upper bounds, nearly tight, on the narrowest widths at which the trials end within ``within`` seconds.

    ``within`` is the work of the trials that own a device, spread evenly over all devices: no schedule ends earlier, so
    no trial needs to be wider. Packed trials do not count, as packing may get more than 1 out of a device.
    """
    if within <= 0.0:
        return running.d
    width = np.ones(len(running))
    for _ in range(_FIXED_POINT_STEPS):
        wider = np.minimum(np.ceil(seconds * running.beta ** (width - 1.0) / within), running.d)
        settled = wider <= width
        width = np.maximum(width, wider)
    return np.where(settled, width, running.d).astype(np.int64)


def _spend(
    running: Running, finish: FloatArray, held: IntArray, devices: IntArray, last: Callable[[], FloatArray]
) -> IntArray:
    """Assigns the remaining idle devices, first to the trials with the greatest ``last()``; returns (m,) devices."""
    left = running.free - int((devices - held).sum())
    candidates = np.flatnonzero(devices < running.d)
    if left <= 0 or not len(candidates):
        return devices
    # Plain lists: a departure leaves a handful of devices, for which indexing arrays is too slow.
    by_finish = candidates[np.lexsort((devices[candidates] > 0, -finish[candidates], -last()[candidates]))].tolist()
    device, packed = running.device.tolist(), Counter(running.device[devices == 0].tolist())
    seconds, beta = (running.remaining / running.speed).tolist(), running.beta.tolist()
    limit, has, had, finish_now = running.d.tolist(), devices.tolist(), held.tolist(), finish.tolist()
    epsilon = running.epsilon

    def end(i: int, width: int) -> float:
        if width == had[i]:
            return float(finish_now[i])
        return float(epsilon + seconds[i] * beta[i] ** (width - 1) / width)

    while left > 0 and by_finish:
        widened = []
        for i in by_finish:
            if has[i] and packed[device[i]]:
                continue  # it owns the device, and can widen from there, only once the others have left
            present = end(i, has[i]) * (1.0 - TOLERANCE)
            for width in range(has[i] + 1, min(limit[i], has[i] + left) + 1):
                if end(i, width) < present:
                    left -= width - has[i]
                    packed[device[i]] -= not has[i]
                    has[i] = width
                    widened.append(i)
                    break
            if left <= 0:
                break
        by_finish = widened
    return np.array(has, dtype=np.int64)


# -- concentrate ---------------------------------------------------------------------------------
#
# A re-planner for groups of about as many trials as devices: pack most of them, and run the others very wide.
#
# At such sizes one device per trial is often a poor plan: if packing costs little, most trials lose little by sharing a
# device, and the devices so released end the others early. Efficient widths are corners of the lower envelope of width
# against rate (:func:`fluid.planners.bounds.envelope`): the narrowest width, and the whole width with the greatest gain
# in rate per further device. Widths in between are not used.


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
