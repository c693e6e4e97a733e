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
from fluid.engine.fusing_estimates import FusingEstimate
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates, stretch_of
from fluid.resources import MemoryNeed


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
