"""The profile: measured seconds per iteration, overheads and memory of trials, and the cost of a resize.

Profiling uses the trials' own iterations (docs/theory.md, section 7; paper section 3.4.2.2). Measurements are kept per
profile key, device model and bucket: p trials on one device, one trial on w devices, or p fused packs of k rows each on
one device. Without data nothing is guessed: seconds and memory are ``None``, alpha = beta = 1, epsilon = 0, and the
limits are the ideal model's. The paper assumes that trials of one key are alike. Where they are not, they are parted
into cohorts by their configs, and each cohort has a key of its own (:mod:`fluid.measure.cohorts.tree`).
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any, TypeGuard

from fluid._logs import logger_of
from fluid.errors import InvalidFieldError, require_integer, require_number, require_text
from fluid.measure.cohorts.tree import CohortTree
from fluid.measure.json_input import NonNegative, parse_json, read_record, write_json
from fluid.measure.measurements import (
    ALONE,
    ANY_MODEL,
    DRIFT_BASELINE,
    DRIFT_STREAK,
    HOPELESS,
    MIN_OBSERVATIONS,
    Bucket,
    KeyProfile,
    Overhead,
    SavedBucket,
    SavedKey,
    begin_part,
    bucket_id,
    fused_id,
    key_to_json,
    keys_of,
    prefix,
    require_flag,
    require_key,
    require_share,
)
from fluid.measure.runtime_model import (
    DEFAULT_BENEFIT_THRESHOLD,
    FusedRates,
    marginal_benefit,
    packing_limit_from_seconds,
    rows_worth_fusing,
    width_limit,
)
from fluid.resources import TOLERANCE, MemoryNeed

# -- key table -----------------------------------------------------------------------------------
#
# The measurements of all profile keys, by device model.


@dataclass(slots=True)
class KeyTable:
    """Finds the measurements of a profile key on a device model.

    Attributes:
        by_key: by profile key, then by device model.
    """

    by_key: dict[str, dict[str | None, KeyProfile]] = field(default_factory=dict)

    def speeds(self, key: str, models: Sequence[str | None]) -> dict[str | None, float]:
        """Iterations per second of a key's trials on each of these device models, relative to the first of them.

        The ratio of the median seconds per iteration of trials alone on one device. A model on which the key has fewer
        than ``MIN_OBSERVATIONS`` of these has the median of the other keys' ratios, or else speed 1.
        """
        reference = models[0]
        seconds = {model: known.alone for model in models if (known := self.exact(key, model)).alone is not None}
        unit = seconds.get(reference)
        if unit is None and seconds:
            first = next(iter(seconds))
            unit = seconds[first] * self._usual_speed(first, reference)
        return {
            model: unit / seconds[model]
            if unit is not None and model in seconds
            else self._usual_speed(model, reference)
            for model in models
        }

    def exact(self, key: str, model: str | None) -> KeyProfile:
        """What was measured on that very model, or in a profile without models."""
        by_model = self.by_key.get(key, {})
        return by_model.get(model) or by_model.get(ANY_MODEL) or KeyProfile()

    def known(self, key: str, model: str | None) -> KeyProfile:
        """What was measured on a model; for ``None``, in a profile without models, or else on the key's first one."""
        by_model = self.by_key.get(key)
        if not by_model:
            return KeyProfile()
        known = by_model.get(model)
        if known is None and model is None:
            known = next(iter(by_model.values()))
        return known or self.exact(key, model)

    def own(self, key: str, model: str | None) -> KeyProfile:
        """Where observations of a key on a model are added."""
        if model is not None:
            require_text("model", model)
        by_model = self.by_key.setdefault(require_key("key", key), {})
        known = by_model.get(model)
        if known is None:
            known = by_model[model] = by_model.pop(ANY_MODEL) if ANY_MODEL in by_model else KeyProfile()
        return known

    def _usual_speed(self, model: str | None, reference: str | None) -> float:
        """The median over all keys of their speed on a model relative to another; 1 if no key has both measured."""
        if model == reference:
            return 1.0
        ratios = []
        for by_model in self.by_key.values():
            one, other = by_model.get(reference), by_model.get(model)
            if one is not None and other is not None and one.alone is not None and other.alone is not None:
                ratios.append(one.alone / other.alone)
        return statistics.median(ratios) if ratios else 1.0


# -- overhead fit --------------------------------------------------------------------------------
#
# Fits of overheads: what the seconds measured at several co-residencies, or widths, say together.


def slope(line: Mapping[int, Bucket], *, shared: bool) -> float:
    """log alpha, or log beta if the devices share the work (eq. 3.2), from at least two buckets."""
    logs = {step: math.log(bucket.estimate * (step if shared else 1)) for step, bucket in line.items()}
    slopes = []
    for a, b in itertools.combinations(line, 2):
        # A slope is the more certain the further apart its two buckets are, and the more observations they have.
        noise = math.sqrt(1 / len(line[a].seconds) + 1 / len(line[b].seconds))
        slopes.append(((logs[b] - logs[a]) / (b - a), (b - a) / noise))
    return weighted_median(slopes)


def weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The smallest value such that the values up to it have at least half of the weight."""
    ordered = sorted(weighted)
    sums = list(itertools.accumulate(weight for _, weight in ordered))
    return ordered[bisect.bisect_left(sums, 0.5 * sums[-1] * (1.0 - TOLERANCE))][0]


def bounded_exp(exponent: float) -> float:
    """exp without OverflowError: an absurd measurement gives an absurd number."""
    return math.exp(min(max(exponent, -700.0), 700.0))


# -- restore seconds -----------------------------------------------------------------------------
#
# How long trials take to be restored from their checkpoints, by where those are; pure.


#: Newest restores of a profile key from one source whose median counts.
NEWEST = 31


class RestoreSeconds:
    """Seconds that reading and loading checkpoints took, by profile key and source: medians of the newest.

    Example:
        >>> from fluid.measure.profile import RestoreSeconds
        >>> restores = RestoreSeconds()
        >>> for seconds in (0.2, 0.1, 0.9):
        ...     restores.observe("resnet", "memory", seconds)
        >>> restores.of("resnet")
        {'memory': 0.2}
    """

    def __init__(self) -> None:
        self._by_key: dict[str, dict[str, deque[float]]] = {}

    def observe(self, key: str, source: str, seconds: float) -> None:
        """Adds a restore of a trial of a profile key from a source: ``"memory"``, ``"disk"`` or another."""
        by_source = self._by_key.setdefault(key, {})
        by_source.setdefault(source, deque(maxlen=NEWEST)).append(require_number("seconds", seconds, at_least=0.0))

    def of(self, key: str) -> dict[str, float]:
        """The median seconds by source, of those that were measured."""
        return {source: median_low(seconds) for source, seconds in self._by_key.get(key, {}).items()}

    def to_json(self) -> dict[str, dict[str, list[float]]]:
        """What was measured, as JSON."""
        return {
            key: {source: list(seconds) for source, seconds in by_source.items()}
            for key, by_source in self._by_key.items()
        }

    @classmethod
    def of_saved(cls, saved: Mapping[str, Mapping[str, Iterable[float]]]) -> RestoreSeconds:
        """Makes what :meth:`to_json` was called of."""
        found = cls()
        for key, by_source in saved.items():
            for source, seconds in by_source.items():
                for each in seconds:
                    found.observe(key, source, each)
        return found


# -- fused measurements --------------------------------------------------------------------------
#
# What the measured seconds of fused packs say: how much a row more costs, and how many rows pay.


#: Observations after which the seconds of a pack count as measured. Fewer than of other buckets: while rows are
#: doubled, all trials of the pack wait for them, and doubling errs by a factor of two at most.
MIN_FUSED_OBSERVATIONS = 3


def fused_rates(known: KeyProfile) -> FusedRates | None:
    """T(k)/T(1) of packs alone on a device; ``None`` until a trial alone and a pack of two or more were measured."""
    seconds = _seconds(known)
    if 1 not in seconds or len(seconds) < 2:
        return None
    return FusedRates(tuple(seconds), tuple(each / seconds[1] for each in seconds.values()))


def fused_measured(known: KeyProfile) -> int:
    """The largest power of two such that 1, 2, 4, ... rows up to it were measured; 0 if a trial alone was not."""
    seconds, rows = _seconds(known), 1
    while rows in seconds:
        rows *= 2
    return rows // 2


def fused_limit(known: KeyProfile, most: int, threshold: float) -> int:
    """:func:`rows_worth_fusing`, by what was measured."""
    return rows_worth_fusing(_seconds(known), most, threshold)


def fused_packs(known: KeyProfile, rows: int) -> list[float]:
    """Measured seconds of an iteration with 1, 2, ... packs of so many rows on a device, up to the first gap."""
    buckets = (known.fused.get((processes, rows)) for processes in itertools.count(1))
    return [bucket.estimate for bucket in itertools.takewhile(is_measured, buckets) if bucket is not None]


def _seconds(known: KeyProfile) -> dict[int, float]:
    """Measured seconds of an iteration by rows, ascending, of a trial alone (1) and of packs alone on a device.

    One step suffices of rows that take far longer than so many trials one by one.
    """
    packs = {rows: bucket for (processes, rows), bucket in known.fused.items() if processes == 1}
    alone = known.buckets.get(ALONE)
    if is_measured(alone):
        packs[1] = alone
        hopeless = HOPELESS * alone.estimate
    else:
        hopeless = math.inf
    found = {rows: packs[rows] for rows in sorted(packs)}
    return {
        rows: bucket.estimate
        for rows, bucket in found.items()
        if is_measured(bucket) or min(bucket.seconds) > rows * hopeless
    }


def is_measured(bucket: Bucket | None) -> TypeGuard[Bucket]:
    """Whether the seconds in a bucket are reliable enough to judge by while rows are doubled."""
    if bucket is None:
        return False
    return len(bucket.seconds) >= MIN_FUSED_OBSERVATIONS or bucket.measured


# -- profile -------------------------------------------------------------------------------------


_log = logger_of(__name__)

#: Version of what :meth:`Profile.to_json` writes.
FORMAT = 6
_WITHOUT_ROW_MEMORY = 5
_WITHOUT_COHORTS = 4  # Nor did the version before that find cohorts.
_WITHOUT_FUSED = 3  # Nor did the version before that measure fused packs.
_WITHOUT_MODELS = 2  # Nor did the version before that tell device models apart.
#: Newest observations a bucket keeps; odd, so that its median is an observation in the middle.
DEFAULT_WINDOW = 31
#: Keeps a clamped overhead inside its half-open interval by more than TOLERANCE.
_INSIDE = 1.0 - 1e-6


@dataclass(frozen=True)
class _SavedProfile:
    """What :meth:`Profile.to_json` writes. Older formats lack what has a default."""

    format: int
    window: int
    threshold: float
    resizes: SavedBucket
    keys: dict[str, list[SavedKey]]
    finds_cohorts: bool = True
    restores: dict[str, dict[str, list[NonNegative]]] = field(default_factory=dict)
    cohorts: dict[str, Any] = field(default_factory=dict)


def _with_models(data: Any) -> Any:
    """A profile that does not tell device models apart, as one that does: the first one observed takes all over."""
    keys = data.get("keys")
    if not isinstance(keys, Mapping):
        return data
    known = {key: [{"model": ANY_MODEL, **of} if isinstance(of, Mapping) else of] for key, of in keys.items()}
    return {**data, "keys": known}


class Profile:
    """Learns the speed of trials alone, packed and wide, and their memory (docs/theory.md, section 7).

    Pure: no clock, no threads, no randomness. An unknown key is not an error. A method that takes a key also takes a
    device model, such as ``"NVIDIA H200"``. ``None`` means devices of unknown model, or else the key's first model.

    Example:
        >>> from fluid import Profile
        >>> profile = Profile()
        >>> for _ in range(5):
        ...     profile.observe("resnet", seconds=2.0)
        ...     profile.observe("resnet", seconds=2.2, co_residents=2)
        >>> profile.seconds_per_iteration("resnet"), round(profile.alpha("resnet"), 3)
        (2.0, 1.1)
        >>> profile.packing_limit("resnet", c_max=2), profile.epsilon
        (2, 0.0)

    Args:
        window: newest observations kept per bucket, at least 12; estimates are medians over it.
        threshold: O_th in [0, 1), the marginal benefit that packing one more trial must exceed.
        cohorts: whether the engine parts the trials of a key into cohorts where they differ; ``True`` by default.

    Attributes:
        cohorts, restores: what is known of each profile key's trials by their configs; and of restores, by source.

    Raises:
        InvalidFieldError: also from every method, if a value is invalid; names the field and the value.
    """

    def __init__(
        self, *, window: int = DEFAULT_WINDOW, threshold: float = DEFAULT_BENEFIT_THRESHOLD, cohorts: bool = True
    ) -> None:
        self.window = require_integer("window", window, at_least=DRIFT_BASELINE + DRIFT_STREAK)
        self.threshold = require_number("threshold", threshold, at_least=0.0)
        if self.threshold >= 1.0:
            raise InvalidFieldError("threshold", threshold, "must be below 1")
        self.finds_cohorts = require_flag("cohorts", cohorts)
        self.cohorts: dict[str, CohortTree] = {}
        self.restores = RestoreSeconds()
        self._keys = KeyTable()
        self._resizes = Bucket()
        self._logged: set[tuple[str, str | None, Overhead]] = set()

    def observe(
        self,
        key: str,
        seconds: float,
        *,
        model: str | None = None,
        co_residents: int = 1,
        width: int = 1,
        rows: int = 1,
        iterations: int = 1,
        memory: MemoryNeed | None = None,
        busy: float | None = None,
    ) -> None:
        """Adds one observation: iterations that have finished. A call that raises adds nothing.

        Args:
            key: the trial's profile key.
            seconds: wall time of these iterations together, above 0.
            model: the device's model; of several unlike devices, that of the slowest. ``None`` if unknown.
            co_residents: p, trials on the device, this one included; above 1 only at width 1. With ``rows`` above 1,
                the processes on the device, each with a pack of so many rows.
            width: devices the trial ran on; above 1 only without co-residents.
            rows: k, trials of the one fused pack that is observed, not each of them; 1 for a trial by itself.
            iterations: how many iterations took ``seconds``.
            memory: the peak memory of one trial, or row, in bytes, if measured.
            busy: share of ``seconds`` in which it kept its device busy, if measured; used of a trial alone.
        """
        is_fused = require_integer("rows", rows, at_least=1) > 1
        ids = fused_id(co_residents, rows, width) if is_fused else bucket_id(co_residents, width)
        count = require_integer("iterations", iterations, at_least=1)
        each = require_number("seconds", seconds, at_least=0.0) / count
        if each == 0.0:
            raise InvalidFieldError("seconds", seconds, "must be above 0")
        share = None if busy is None else require_share("busy", busy)
        if memory is not None:
            self.observe_memory(key, memory, model=model, rows=rows)
        known = self._keys.own(key, model)
        known.forget_fits()
        if share is not None and ids == ALONE and not is_fused:
            known.busy = [*known.busy, share][-self.window :]
        bucket = (known.fused if is_fused else known.buckets).setdefault(ids, Bucket())
        before = bucket.estimate if bucket.seconds else each
        if bucket.add(each, self.window):
            message = "profile %r, model %s, drifted at co_residents=%d, width=%d, rows=%d: measuring again"
            _log.info(message, key, model, co_residents, width, rows)
            if ids == ALONE and not is_fused:
                known.follow_alone(bucket.estimate / before)

    def observe_memory(self, key: str, memory: MemoryNeed, *, model: str | None = None, rows: int = 1) -> bool:
        """Adds the peak memory of a trial on a device of that model, in bytes, without its seconds.

        Args:
            key: the trial's profile key.
            memory: what it needs, or each of the rows of a fused pack.
            model: the device's.
            rows: of the pack; 1 for a trial with tensors of its own.

        Returns:
            Whether that changes what is known.
        """
        if not isinstance(memory, MemoryNeed):
            raise InvalidFieldError("memory", memory, "must be a MemoryNeed")
        return self._keys.own(key, model).learns_memory(memory, require_integer("rows", rows, at_least=1))

    def observe_resize(self, seconds: float) -> None:
        """Adds the measured cost of one resize, in seconds; 0 is allowed."""
        self._resizes.add(require_number("seconds", seconds, at_least=0.0), self.window)

    def part(
        self,
        key: str,
        cohort: str,
        seconds: Sequence[float],
        need: MemoryNeed | None,
        speeds: Mapping[str | None, float],
    ) -> None:
        """Lets a part of a key's trials have a key of its own, unless it has been measured before.

        Args:
            key: the key of all of them.
            cohort: the key of the part.
            seconds: per iteration, alone on a device of speed 1, of the part's trials; may be empty.
            need: the most memory that one of them was seen to need; ``None`` for the whole key's.
            speeds: of the device models, for the key; 1 for one that is missing.
        """
        known = {
            model: begin_part(whole, seconds, need, speeds.get(model, 1.0), self.window, self.threshold)
            for model, whole in self._keys.by_key.get(key, {}).items()
        }
        self._keys.by_key.setdefault(require_key("cohort", cohort), known)

    @property
    def epsilon(self) -> float:
        """Median cost of a resize, in seconds; 0.0 until one is measured."""
        return self._resizes.estimate if self._resizes.seconds else 0.0

    def keys(self) -> list[str]:
        """The profile keys seen, in the order of their first observation."""
        return list(self._keys.by_key)

    def models(self, key: str) -> list[str | None]:
        """The device models that a key was measured on, in the order of their first observation."""
        return [None if model == ANY_MODEL else model for model in self._keys.by_key.get(key, ())]

    def speeds(self, key: str, models: Sequence[str | None]) -> dict[str | None, float]:
        """Iterations per second of a key's trials on each of these device models, relative to the first of them.

        The ratio of the median seconds per iteration of trials alone on one device. A model on which the key has fewer
        than ``MIN_OBSERVATIONS`` of these has the median of the other keys' ratios, or else speed 1.
        """
        return self._keys.speeds(key, models)

    def memory(self, key: str, model: str | None = None) -> MemoryNeed | None:
        """What a trial with tensors of its own needs: the maximum of each part, in bytes; ``None`` until reported."""
        return self._keys.known(key, model).memory

    def row_memory(self, key: str, model: str | None = None) -> MemoryNeed | None:
        """What each row of a fused pack needs, in bytes; ``None`` until reported.

        The persistent bytes are those of a pack of one, with what rows share: k rows need ``shared_bytes`` once, and
        ``own_peak_bytes`` k times.
        """
        return self._keys.known(key, model).row_memory

    def busy(self, key: str, model: str | None = None) -> float | None:
        """Share of an iteration, alone on one device, in which the trial keeps it busy; ``None`` until measured."""
        shares = self._keys.known(key, model).busy
        return statistics.median(shares) if shares else None

    def spread(self, key: str, model: str | None = None) -> float:
        """Standard deviation of the logarithm of an iteration's seconds, alone on a device; 0 until it was measured."""
        return self._keys.known(key, model).spread

    def needs_measuring(self, key: str, model: str | None = None, *, co_residents: int = 1, width: int = 1) -> bool:
        """Whether a bucket holds under ``MIN_OBSERVATIONS``: at first, and after a drift restarted it."""
        bucket = self._keys.known(key, model).buckets.get(bucket_id(co_residents, width), Bucket())
        return len(bucket.seconds) < MIN_OBSERVATIONS

    def seconds_per_iteration(self, key: str, model: str | None = None) -> float | None:
        """Seconds per iteration at width 1, alone on the device; ``None`` for an unknown key.

        If only packed or wide iterations were measured, eq. 3.2 converts them to width 1. Buckets with too few
        observations are used only if there are no others. If only fused packs were measured, the smallest says how
        long an iteration takes: like co-residents without a measured alpha, its rows are taken to cost no time.
        """
        known = self._keys.known(key, model)
        buckets = known.buckets
        for usable in ({ids: bucket for ids, bucket in buckets.items() if bucket.measured}, buckets):
            if ALONE in usable:
                return usable[ALONE].estimate
            if usable:
                alpha, beta = math.log(self.alpha(key, model)), math.log(self.beta(key, model))
                logs = {
                    (p, w): math.log(bucket.estimate * w) - (p - 1) * alpha - (w - 1) * beta
                    for (p, w), bucket in usable.items()
                }
                return bounded_exp(weighted_median((logs[ids], len(usable[ids].seconds)) for ids in usable))
        return known.fused[min(known.fused)].estimate if known.fused else None

    def only_fused(self, key: str, model: str | None = None) -> bool:
        """Whether only fused packs were measured: how long a trial alone takes is unknown."""
        return bool((known := self._keys.known(key, model)).fused) and not known.buckets

    def fused_rates(self, key: str, model: str | None = None) -> FusedRates | None:
        """T(k)/T(1) of packs alone on a device; ``None`` until a trial alone and a pack were measured."""
        known = self._keys.known(key, model)
        known.rates = known.rates or fused_rates(known)
        return known.rates

    def fused_measured(self, key: str, model: str | None = None) -> int:
        """The largest power of two such that packs of 1, 2, 4, ... rows up to it were measured; 0 if 1 was not."""
        return fused_measured(self._keys.known(key, model))

    def fused_limit(self, key: str, most: int, model: str | None = None) -> int:
        """The largest power of two of rows, up to ``most``, worth fusing on a device (:func:`fused_limit`)."""
        return fused_limit(self._keys.known(key, model), require_integer("most", most, at_least=1), self.threshold)

    def fused_packs(self, key: str, rows: int, model: str | None = None) -> list[float]:
        """Measured seconds of an iteration with 1, 2, ... packs of so many rows on a device."""
        return fused_packs(self._keys.known(key, model), rows)

    def alpha(self, key: str, model: str | None = None) -> float:
        """Packing overhead per extra co-resident, in [1, c/(c-1)) for the c measured; 1.0 until measured.

        The weighted median of the slopes between measured buckets (Theil-Sen). A value outside the interval is clamped.
        """
        return self._overhead(key, model, "alpha")

    def beta(self, key: str, model: str | None = None) -> float:
        """Scaling overhead per extra device, in [1, d/(d-1)); 1.0 until measured; fitted as :meth:`alpha`.

        d is the last of the measured widths 1, 2, ... of which each is faster than the one before.
        """
        # The paper prints [1, (d+1)/d), which its own definition of d contradicts (docs/theory.md, section 2).
        return self._overhead(key, model, "beta")

    def measured_packing(self, key: str, model: str | None = None) -> int:
        """The largest p such that each of 1..p co-residents was measured; 0 if 1 was not."""
        return len(prefix(self._keys.known(key, model).line("alpha")))

    def marginal_benefits(self, key: str, model: str | None = None) -> dict[int, float]:
        """O^p (eq. 3.1) by p, if p and p - 1 were measured; from medians in place of the paper's means."""
        seconds = {p: bucket.estimate for p, bucket in self._keys.known(key, model).line("alpha").items()}
        return {p: marginal_benefit(p, seconds[p], seconds[p - 1]) for p in seconds if p - 1 in seconds}

    def packing_limit(self, key: str, c_max: int, model: str | None = None) -> int:
        """c, the most co-residents worth packing on a device.

        Up to :meth:`measured_packing` the measured O^p decide. Beyond it, each further trial is assumed to cost the
        fitted alpha (1 without data), and p trials that each keep the device busy for a share u of an iteration alone
        take at least p u of it.
        """
        c_max = require_integer("c_max", c_max, at_least=1)
        seconds = prefix(self._keys.known(key, model).line("alpha"))[:c_max]
        c = packing_limit_from_seconds(seconds, threshold=self.threshold)
        if c < len(seconds):
            return c
        alpha, busy = self.alpha(key, model), self.busy(key, model)
        least = (seconds[0] if seconds else 1.0) * (busy or 0.0)
        latest = seconds[c - 1] if seconds else 1.0
        while c < c_max:
            following = max(alpha * latest, (c + 1) * least)
            if marginal_benefit(c + 1, following, latest) <= self.threshold + TOLERANCE:
                break
            c, latest = c + 1, following
        return c

    def width_limit(self, key: str, model: str | None = None, *, n: int, d_max: int) -> int:
        """d, the most of ``n`` devices a trial may span: ``min(d_max, n, max{w : beta < w/(w-1)})``."""
        return width_limit(self.beta(key, model), n=n, d_max=d_max)

    def to_json(self) -> dict[str, object]:
        """The measurements, as JSON."""
        return {
            "format": FORMAT,
            "window": self.window,
            "threshold": self.threshold,
            "resizes": self._resizes.to_json(),
            "finds_cohorts": self.finds_cohorts,
            "restores": self.restores.to_json(),
            "cohorts": {key: tree.to_json() for key, tree in self.cohorts.items()},
            "keys": {
                key: [{"model": model, **key_to_json(known)} for model, known in by_model.items()]
                for key, by_model in self._keys.by_key.items()
            },
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Makes the profile that :meth:`to_json` wrote, with the same estimates and the same drift state."""
        if isinstance(data, Mapping):  # The checksum is left where another program has written the file anew.
            data = {name: value for name, value in data.items() if name != "crc"}
        version = data.get("format", FORMAT) if isinstance(data, Mapping) else FORMAT
        if version not in (FORMAT, _WITHOUT_ROW_MEMORY, _WITHOUT_COHORTS, _WITHOUT_FUSED, _WITHOUT_MODELS):
            reason = f"is unknown; this Fluid reads formats {_WITHOUT_MODELS} to {FORMAT}"
            raise InvalidFieldError("format", version, reason)
        if version == _WITHOUT_MODELS:
            data = _with_models(data)
        saved = read_record(data, _SavedProfile, "profile", others=True)
        profile = cls(window=saved.window, threshold=saved.threshold, cohorts=saved.finds_cohorts)
        profile._resizes = saved.resizes.bucket("resizes", profile.window)
        profile.cohorts = {
            require_key("cohorts", key): CohortTree.from_json(f"cohorts[{key!r}]", tree)
            for key, tree in saved.cohorts.items()
        }
        profile.restores = RestoreSeconds.of_saved(saved.restores)
        profile._keys.by_key = keys_of(saved.keys, profile.window)
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file atomically: a reader finds the old content or the new, never a part."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a file that :meth:`save` wrote; errors name the file too."""
        name = os.fspath(path)
        try:
            return cls.from_json(parse_json(Path(path).read_bytes()))
        except InvalidFieldError as error:
            raise InvalidFieldError(error.field, error.value, f"{error.reason} (in {name})") from error
        except (ValueError, RecursionError) as error:
            raise InvalidFieldError("path", name, f"is not a JSON file: {error}") from error

    def _overhead(self, key: str, model: str | None, name: Overhead) -> float:
        known = self._keys.known(key, model)
        if name not in known.fitted:
            line = known.line(name)
            value = 1.0 if len(line) < 2 else bounded_exp(slope(line, shared=name == "beta"))
            known.fitted[name] = self._clamped(key, model, name, value, prefix(line))
        return known.fitted[name]

    def _clamped(self, key: str, model: str | None, name: Overhead, value: float, seconds: Sequence[float]) -> float:
        """``value`` clamped to [1, m/(m-1)), where m is the measured c or d."""
        if name == "alpha":
            limit = packing_limit_from_seconds(seconds, threshold=self.threshold)
        else:
            faster = [wider < narrower for narrower, wider in itertools.pairwise(seconds)]
            limit = 1 + len(list(itertools.takewhile(bool, faster)))
        bound = limit / (limit - 1) if limit > 1 else math.inf
        if 1.0 <= value < bound:
            return value
        clamped = max(1.0, min(value, bound * _INSIDE))
        if (key, model, name) not in self._logged:
            self._logged.add((key, model, name))
            message = "profile %r, model %s: measured %s=%.6g lies outside [1, %.6g); %.6g is used"
            _log.info(message, key, model, name, value, bound, clamped)
        return clamped
