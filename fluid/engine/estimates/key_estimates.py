"""Key estimates: a profile key's figures on one device model as planning uses them, and how far packing and widening
were tried.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from fluid.engine import tuning
from fluid.engine.events import IterationDone
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates, marginal_benefit, packing_limit_from_seconds, stretch_of
from fluid.resources import MemoryNeed

# -- fusing estimates ----------------------------------------------------------------------------
#
# Fusing estimates: how many trials of a profile key one device trains in one step, and how far that was tried.


@dataclass(slots=True)
class FusingEstimate:
    """What is known of fusing the trials of a key on one device model.

    First, a trial runs alone. Then the rows double, 2, 4, 8 and so on, while the latest doubling was measured to pay
    (:meth:`fluid.measure.profile.Profile.fused_limit`), and the work left repays trying a further one. Once that has
    ended, further packs of so many rows run beside the first, in processes of their own, while each was measured to pay
    as a co-resident does (eq. 3.1).

    Attributes:
        most: rows that are never exceeded: 1 for trials that cannot be fused.
        most_packs: packs on a device that are never exceeded.
        insists: whether to fuse as many as that without measuring whether it pays.
        rows: trials to fuse in one process; 1 for none.
        packs: processes on a device, each with a pack of so many rows.
        is_over: whether it is known that none are to be fused, so that processes may be packed.
        rates: T(k)/T(1) of one pack, as measured; ``None`` until then.
        measured: the same of all trials on a device, in one pack or several.
        expected: the same, with what is expected of rows that are being tried.
        preparations: seconds that the latest first steps of a size took longer than later ones, as they compile. Those
            of the first pack are left out: it is checked and recorded, which serves all sizes.
        observed: (packs, rows) -> steps seen.
        busy: shares of the latest steps of one pack of ``rows`` in which it kept the device busy, where measured.
    """

    most: int = 1
    most_packs: int = 1
    insists: bool = False
    rows: int = 1
    packs: int = 1
    is_over: bool = True
    rates: FusedRates | None = None
    measured: FusedRates | None = None
    expected: FusedRates | None = None
    preparations: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    observed: dict[tuple[int, int], int] = field(default_factory=dict)
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))

    @property
    def gain(self) -> float:
        """Iterations per second of a device, relative to a trial alone, as far as measured; 1 until then."""
        if self.measured is None:
            return 1.0
        total = min(self.total, self.measured.rows[-1])
        return min(total, self.measured.gain(total))  # Above that, T(1) was measured while something else was loading.

    @property
    def total(self) -> int:
        """Trials on a device."""
        return self.rows * self.packs

    @property
    def is_settled(self) -> bool:
        """Whether no further doubling of the rows is tried."""
        return self.rates is not None and self.rows > 1 and self.rows <= self.rates.rows[-1]

    @property
    def worth_trying(self) -> float:
        """Seconds of work left per device that repay twice as many rows."""
        cost = median_low(self.preparations) if self.preparations else 0.0
        return max(tuning.WORTH_FUSING_S, tuning.WORTH_FUSING_PREPARATIONS * cost)

    def begin(self, most: int, most_packs: int, *, insists: bool) -> None:
        """Lets trials be fused, as the first one has come that can be."""
        self.most = most
        self.insists = insists and most > 1
        self.is_over = most <= 1
        self.most_packs = 1 if insists else most_packs
        self.rows = most if self.insists else 1

    def limit(self, rows: int) -> None:
        """Records that a lane can fuse no more than so many trials."""
        self.most = max(1, min(self.most, rows))
        self.rows = min(self.rows, self.most)
        self.is_over = self.is_over or self.most <= 1

    def worth_observing(self, packs: int, rows: int) -> bool:
        """Counts a step; returns whether the profile is to learn from it."""
        seen = self.observed.get((packs, rows), 0)
        self.observed[packs, rows] = seen + 1
        return seen < tuning.OBSERVE_ALL or seen % tuning.OBSERVE_EVERY == 0

    def prepared(self, seconds: float, rows: int, pace: float | None) -> None:
        """Records that the first step of so many rows took so many seconds, with trials of this pace alone."""
        if self.rates is None:
            return
        usual = 0.0 if pace is None else pace * self.rates.stretch(rows)
        self.preparations.append(max(0.0, seconds - usual))

    def update(self, profile: Profile, key: str, model: str | None, *, work: float, trying_packs_pays: bool) -> None:
        """Copies the figures from the profile, and decides on the rows and packs.

        Args:
            profile: what was measured.
            key, model: of which.
            work: seconds of work left per device, which may repay trying twice as many rows.
            trying_packs_pays: whether it repays trying one more pack, for which a lane is started.
        """
        if self.most <= 1:
            self.rows, self.packs, self.is_over = 1, 1, True
            return
        before = self.rows
        self.rates = profile.fused_rates(key, model)
        if self.insists:
            self.rows = self.most
        else:
            measured = profile.fused_measured(key, model)
            limit = profile.fused_limit(key, self.most, model)
            tries = work >= self.worth_trying or self.rows > measured  # a doubling that has begun is completed
            self.rows = max(1, min(limit, self.most, measured * (2 if tries else 1)))
            self.is_over = limit <= 1
        if self.rows != before:
            self.busy.clear()
        seconds = profile.fused_packs(key, self.rows, model) if self.is_settled else []
        self.packs = self._packs(seconds, profile.threshold, trying_packs_pays) if seconds else 1
        self.measured = self._measured(seconds)
        self.expected = _extended(self.measured, self.total)

    def _packs(self, seconds: list[float], threshold: float, trying_pays: bool) -> int:
        """The packs of ``rows`` to have on a device, by the measured seconds of an iteration with 1, 2, ... of them."""
        packs = packing_limit_from_seconds(seconds[: self.most_packs], threshold=threshold)
        if packs < len(seconds) or packs >= self.most_packs:
            return packs
        if self.packs > packs:
            return packs + 1  # a trial of one more that has begun is completed
        if not trying_pays or not self.busy:
            return packs
        # So many packs keep the device busy for at least so long.
        least = (packs + 1) * seconds[0] * median_low(self.busy)
        pays = marginal_benefit(packs + 1, max(seconds[-1], least), seconds[-1]) > threshold
        return packs + 1 if pays else packs

    def _measured(self, seconds: list[float]) -> FusedRates | None:
        if self.rates is None or not seconds:
            return self.rates
        alone = seconds[0] / self.rates.stretch(self.rows)
        known = zip(self.rates.rows, self.rates.stretches, strict=True)
        table = {rows: stretch for rows, stretch in known if rows <= self.rows}
        return FusedRates.of(table | {packs * self.rows: each / alone for packs, each in enumerate(seconds, 1)})


def _extended(rates: FusedRates | None, rows: int) -> FusedRates | None:
    """The rates with those of rows that were not measured, each doubling of which is expected to gain like the last."""
    if rates is None or rows <= rates.rows[-1]:
        return rates
    last = rates.rows[-1]
    growth = min(2.0, max(1.0, rates.stretch(last) / rates.stretch(max(1, last // 2))))
    stretch = rates.stretch(last) * growth ** math.log2(rows / last)
    return FusedRates((*rates.rows, rows), (*rates.stretches, stretch))


# -- key estimates -------------------------------------------------------------------------------


@dataclass(slots=True)
class KeyEstimate:
    """A copy of what the profile says about one key on one device model, taken when the profile learnt something.

    Attributes:
        model: the device model; ``None`` if unknown.
        scaling_model: the device model on which beta, ``width`` and ``tried`` were measured; the same for all models.
        speed: of the device model, for this key.
        pace: seconds per iteration at width 1 and speed 1; ``None`` until measured on this model.
        is_rough: whether the pace is that of a trial which was not measured alone on a device of this model.
        processes: trials on one device that run at the same time, in a lane each unless they are fused. Rises from 1 by
            one after each that was measured to pay.
        turns: most trials on one device that take turns in its lanes; 1 if each has a lane of its own.
        takes_turns: whether they do: not before it is known how many lanes pay, as trials stay in the lane they are in.
        is_trying: whether so many processes are being tried, and were not measured yet.
        packing: c, the packing limit: trials on one device, which have a lane each, are fused, or take turns.
        width: d, the width limit. Doubles from 1 after each measured width while beta allows.
        tried: the widest measured width.
        fusing: how far its trials are fused.
        memory: device memory; ``None`` until measured, unless that of the key of which this one was parted is known.
        row_memory: the same of a row of a fused pack.
        inherited: that one.
        starts: seconds of its trials' latest starts, afresh or from a checkpoint.
        set_ups: the same without reading and loading the checkpoint, of those where that was measured.
        restores: median seconds of that, by source.
        warm_ups: seconds that its trials' latest starts in unused lanes took in all: the lane's start, set-up, and what
            the first iteration took longer than the second.
        saves: seconds of its trials' latest saves.
        latest: seconds of its trials' latest iterations, whatever ran beside them.
        longest: seconds of the longest one.
        repeats: whether one of its trials has done a second iteration: its iterations are parts of trials, and alike.
            Those of trials that run one each are whole jobs, of which one tells nothing of another.
        observed: (co-residents, width) -> iterations seen.
        busy_known: whether it was measured how busy a trial alone keeps a device, or an earlier session has measured
            this key.
        seconds_alone: seconds of iterations alone on a device.
        observed_trials: co-residents -> rows of the first trials observed at that packing in this session, on devices
            that a trial of this key shares: at most ``tuning.LEAST_OBSERVED`` of them.
        unobserved: trials that came to devices which ``processes`` trials share, since the last one was observed there.
        failed_tries: times that trying one more co-resident was given up, as no iteration could be observed.
        rests_at: the measured packing at which that was given up last; 0 if it never was.
        retry_at: what ``observed`` has to be at that packing before one more is tried again.
    """

    key: str
    max_packing: int
    max_width: int
    model: str | None = None
    scaling_model: str | None = None
    speed: float = 1.0
    pace: float | None = None
    is_rough: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    processes: int = 1
    turns: int = 1
    takes_turns: bool = False
    is_trying: bool = False
    packing: int = 1
    width: int = 1
    tried: int = 1
    fusing: FusingEstimate = field(default_factory=FusingEstimate)
    memory: MemoryNeed | None = None
    row_memory: MemoryNeed | None = None
    inherited: MemoryNeed | None = None
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    set_ups: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    restores: dict[str, float] = field(default_factory=dict)
    warm_ups: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_ITERATIONS))
    longest: float = 0.0
    repeats: bool = False
    observed: dict[tuple[int, int], int] = field(default_factory=dict)
    busy_known: bool = False
    seconds_alone: float = 0.0
    observed_trials: dict[int, set[int]] = field(default_factory=dict)
    unobserved: int = 0
    failed_tries: int = 0
    rests_at: int = 0
    retry_at: int = 0

    def inherit(self, whole: KeyEstimate) -> None:
        """Begins with the times of the key of which this one is a part."""
        for name in ("starts", "set_ups", "warm_ups", "saves", "latest"):
            getattr(self, name).extend(getattr(whole, name))
        self.restores = whole.restores
        self.longest, self.repeats, self.inherited = whole.longest, whole.repeats, whole.memory
        self.busy_known, self.seconds_alone = whole.busy_known, whole.seconds_alone

    def begin_turns(self, most: int, *, is_bounded: bool) -> None:
        """Lets so many trials take turns on a device; where memory is bounded, once a first one was measured."""
        if most > 1:
            self.turns, self.max_packing = most, min(self.max_packing, most)
            self.takes_turns = self.max_packing == 1 and self.fusing.is_over and not is_bounded
            self.packing = most if self.takes_turns else self.packing

    def interruption(self, *, near: bool = True) -> float:
        """Seconds to save a trial and to resume it elsewhere; a save that was never measured counts as a start.

        Args:
            near: whether it is resumed on its host, from memory. Where a restore from there was not measured, the
                latest starts tell how long it takes.
        """
        source = "memory" if near else "host"
        start = median_low(self.starts) if self.starts else 0.0
        if self.set_ups and source in self.restores:
            start = median_low(self.set_ups) + self.restores[source]
        return start + (median_low(self.saves) if self.saves else start)

    @property
    def warm_up(self) -> float:
        """Seconds that a start in an unused lane takes in all; 0 if none was measured."""
        return median_low(self.warm_ups) if self.warm_ups else 0.0

    @property
    def worth_trying(self) -> float:
        """Seconds of work left per device that repay trying one more co-resident, which is started for it."""
        return max(tuning.WORTH_TRYING_S, tuning.WORTH_TRYING_STARTS * self.warm_up)

    def add_iterations(self, done: IterationDone) -> None:
        """Records how long an iteration took, or a run of several."""
        self.latest.append(done.typical_seconds)
        self.repeats |= done.iteration > 1
        longest = done.seconds if done.run is None else max(done.run.seconds)
        if longest > self.longest:
            self.longest = longest

    def is_usual(self, seconds: float) -> bool:
        """Whether an iteration took about as long as others before it, and so hardly loaded or compiled anything."""
        return len(self.latest) > tuning.LEAST_OBSERVED and seconds <= tuning.USUAL * median_low(self.latest)

    def worth_observing(self, co_residents: int, width: int, count: int = 1) -> bool:
        """Counts an iteration, or so many at once; returns whether the profile is to learn from it, or from them."""
        seen = self.observed.get((co_residents, width), 0)
        self.observed[co_residents, width] = seen + count
        return seen < tuning.OBSERVE_ALL or -seen % tuning.OBSERVE_EVERY < count

    @property
    def known_alone(self) -> bool:
        """Whether the trials ran alone for long enough to tell how busy they keep a device, if its lanes measure it."""
        return self.busy_known or self.seconds_alone >= tuning.LEAST_ALONE_S

    def is_tried(self, co_residents: int, width: int) -> bool:
        """Whether so many trials on a device, or a trial on so many devices, were measured."""
        return width <= self.tried and not (self.is_trying and co_residents >= self.processes)

    def add_observed(self, co_residents: int, row: int) -> None:
        """Records that a trial was observed on a device that so many share, a trial of this key among them."""
        if co_residents >= self.processes:
            self.unobserved = 0
        rows = self.observed_trials.setdefault(co_residents, set())
        if len(rows) < tuning.LEAST_OBSERVED:
            rows.add(row)

    def add_arrival(self, profile: Profile, devices: int) -> bool:
        """Counts a trial that comes to a device which ``processes`` trials share then, one of this key among them.

        Args:
            profile: what was measured.
            devices: how many there are.

        Returns:
            Whether trying so many is given up for now: too many trials came without one that could be observed.
        """
        measured = profile.measured_packing(self.key, self.model)
        if self.processes <= max(1, measured):
            return False
        self.unobserved += 1
        if self.unobserved < tuning.MOST_UNOBSERVED * devices:
            return False
        self.rests_at = measured
        self.retry_at = self.observed.get((measured, 1), 0) + tuning.OBSERVED_TO_RETRY * 2**self.failed_tries
        self.unobserved, self.failed_tries = 0, self.failed_tries + 1
        return True

    def update(self, profile: Profile, *, work: float = math.inf) -> bool:
        """Copies the figures from the profile; returns whether c or d changed.

        Args:
            profile: what was measured.
            work: seconds of work left per device, which may repay trying one more co-resident, or more fused rows.
        """
        self.update_memory(profile)
        self.restores = profile.restores.of(self.key) or self.restores
        seconds = profile.seconds_per_iteration(self.key, self.model)
        if seconds is None:
            return False
        self.pace, self.is_rough = seconds * self.speed, False
        self.alpha, self.beta = profile.alpha(self.key, self.model), profile.beta(self.key, self.scaling_model)
        before = self.packing, self.width, self.fusing.rows
        trying_pays = work >= self.worth_trying
        self.fusing.update(profile, self.key, self.model, work=work, trying_packs_pays=trying_pays)
        if self.fusing.is_over:
            self.processes = self._processes(profile, seconds, trying_pays)
            self.packing = self.turns if self.takes_turns else self.processes
        else:
            self.processes = self.packing = self.fusing.total
        self.width = self._width(profile)
        return before != (self.packing, self.width, self.fusing.rows)

    def stretch(self, width: float) -> float:
        """h(w)/h(1): by a table where trials share lanes (docs/theory.md, section 10), else by eq. 3.2."""
        return stretch_of(self.alpha, self.beta, width, self.fused)

    @property
    def fused(self) -> FusedRates | None:
        """Rates of its trials, in place of alpha, if they are fused or take turns."""
        if self.fusing.rows > 1:
            return self.fusing.expected
        return turn_rates(self.alpha, self.processes) if self.takes_turns else None

    def update_memory(self, profile: Profile) -> None:
        """Copies the memory from the profile."""
        self.memory = profile.memory(self.key, self.model) or self.inherited
        self.row_memory = profile.row_memory(self.key, self.model)

    def _processes(self, profile: Profile, seconds: float, trying_pays: bool) -> int:
        if seconds < tuning.TOO_SHORT_TO_PACK_S:
            self.takes_turns = self.turns > 1
            return 1
        limit = profile.packing_limit(self.key, self.max_packing, self.model)
        measured = profile.measured_packing(self.key, self.model)
        tries = trying_pays or self.processes > measured  # a trial of packing that has begun is completed
        awaits_alone = measured == 1 and not self.known_alone
        will_try = trying_pays and awaits_alone
        if awaits_alone:
            tries = self.processes > 1
        if measured == self.rests_at and self.observed.get((measured, 1), 0) < self.retry_at:
            tries = False
        is_known = self.max_packing == 1 or limit <= measured or not (tries or will_try)
        self.takes_turns |= self.turns > 1 and is_known
        processes = max(1, min(limit, measured + tries))
        if processes > self.processes and self._was_of_one_trial(processes - 1):
            processes = self.processes
        self.is_trying = processes > max(1, measured) and not self.takes_turns
        return processes

    def _was_of_one_trial(self, co_residents: int) -> bool:
        """Whether only one of the trials that shared a device in this session has been observed to do so."""
        rows = self.observed_trials.get(co_residents)
        return rows is not None and len(rows) < tuning.LEAST_OBSERVED

    def _width(self, profile: Profile) -> int:
        limit = profile.width_limit(self.key, self.scaling_model, n=self.max_width, d_max=self.max_width)
        width = self.tried = 1
        while not profile.needs_measuring(self.key, self.scaling_model, width=width):
            self.tried = min(width, limit)
            if width >= limit:
                break
            width *= 2
        return min(width, limit)


@functools.lru_cache(maxsize=256)
def turn_rates(alpha: float, processes: int) -> FusedRates:
    """T(k)/T(1) for k trials of one device that take turns in so many lanes.

    Up to one trial per lane, they are co-residents, by alpha. Beyond, T grows in proportion to the trials.
    """
    return FusedRates.of({count: alpha ** (count - 1) for count in range(1, processes + 1)})
