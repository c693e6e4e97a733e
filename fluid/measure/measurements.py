"""Measurements of one profile key on one device model: seconds per iteration by co-residency and width, and memory."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.measure.json_input import NonNegative, NonNegativeInteger
from fluid.measure.runtime_model import FusedRates, packing_limit_from_seconds
from fluid.resources import MemoryNeed

#: If a wide iteration takes this many times as long as one alone, a single observation suffices: further ones would
#: cost more than they could gain.
HOPELESS = 1.5
#: Observations after which a bucket needs no more measuring: their median outvotes two outliers.
MIN_OBSERVATIONS = 5
#: Drifting observations in a row that restart a bucket; fewer than MIN_OBSERVATIONS, so that it is measured again.
DRIFT_STREAK = 4
#: Earlier observations needed to detect a drift; the median of fewer follows quickly enough by itself.
DRIFT_BASELINE = 2 * DRIFT_STREAK
#: Deviations up to this share of the estimate are timer noise.
DRIFT_FLOOR = 0.1

#: (co-residents on the device, devices); at least one of them is 1.
BucketId = tuple[int, int]
#: (co-residents on the device: processes, each with a fused pack; rows of the pack, at least 2).
FusedId = tuple[int, int]
Overhead = Literal["alpha", "beta"]
ALONE: BucketId = (1, 1)
#: Stands for the device model where a profile does not tell models apart: the first model that is observed takes the
#: measurements over.
ANY_MODEL = ""


@dataclass(slots=True)
class Bucket:
    """Seconds per iteration seen at one co-residency or width.

    Drift rule: the newest observations that all drifted to one side are the streak, the earlier ones the baseline.
    Let M be the baseline's median and D its absolute deviations from M, with the largest eighth lowered to the next
    largest, so that a few stragglers hide nothing. If the baseline has at least ``DRIFT_BASELINE`` observations, x
    drifts if ``|x - M| > max(mean(D) + std(D), DRIFT_FLOOR * M)``. An observation that does not drift, or drifts to
    the other side, ends the streak. ``DRIFT_STREAK`` in a row restart the bucket, which then holds only them.
    """

    #: Newest observations, oldest first, the streak included; at most the profile's window.
    seconds: list[float] = field(default_factory=list)
    #: Length of the streak, negative if it is below the estimate; less than DRIFT_STREAK in size.
    streak: int = 0
    #: Times the bucket was restarted.
    restarts: int = 0
    #: The estimate, once it was asked for; ``None`` after each observation.
    _estimate: float | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def estimate(self) -> float:
        """The low median, in seconds: of two observations the faster, as the first may include a warm-up."""
        if self._estimate is None:
            self._estimate = statistics.median_low(self.seconds)
        return self._estimate

    @property
    def measured(self) -> bool:
        """Whether the estimate is reliable. After a restart it is: its observations agree."""
        return len(self.seconds) >= MIN_OBSERVATIONS or self.restarts > 0

    def to_json(self) -> dict[str, Any]:
        """What profiles save of it."""
        return {"seconds": list(self.seconds), "streak": self.streak, "restarts": self.restarts}

    def add(self, seconds: float, window: int) -> bool:
        """Adds one observation; returns whether the bucket restarts."""
        side = self._side(seconds)
        self._estimate = None
        self.streak = self.streak + side if self.streak * side > 0 else side
        self.seconds = [*self.seconds, seconds][-window:]
        if abs(self.streak) < DRIFT_STREAK:
            return False
        self.seconds, self.streak, self.restarts = self.seconds[-DRIFT_STREAK:], 0, self.restarts + 1
        return True

    def scale(self, ratio: float) -> None:
        """Multiplies all that was observed."""
        self.seconds = [each * ratio for each in self.seconds]
        self._estimate = None

    def _side(self, seconds: float) -> int:
        """1 or -1 if the observation drifts above or below the baseline, else 0."""
        baseline = self.seconds[: len(self.seconds) - abs(self.streak)]
        if len(baseline) < DRIFT_BASELINE:
            return 0
        middle = statistics.median_low(baseline)
        deviations = sorted(abs(value - middle) for value in baseline)
        cut = len(deviations) // 8
        deviations[-cut:] = [deviations[-cut - 1]] * cut
        mean = sum(deviations) / len(deviations)
        std = math.sqrt(sum((value - mean) * (value - mean) for value in deviations) / len(deviations))
        if abs(seconds - middle) <= max(mean + std, DRIFT_FLOOR * middle):
            return 0
        return 1 if seconds > middle else -1


@dataclass(slots=True)
class KeyProfile:
    """The measurements of one profile key on one device model."""

    buckets: dict[BucketId, Bucket] = field(default_factory=dict)
    #: Of packs of fused trials: seconds of an iteration of all their rows together.
    fused: dict[FusedId, Bucket] = field(default_factory=dict)
    memory: MemoryNeed | None = None
    #: Of a row of a fused pack, and of how many rows that pack was.
    row_memory: MemoryNeed | None = None
    row_memory_of: int = 1
    #: Newest shares of an iteration, alone on a device, in which the device was busy, oldest first.
    busy: list[float] = field(default_factory=list)
    #: Fitted overheads, computed on demand and cleared by each observation.
    fitted: dict[Overhead, float] = field(default_factory=dict)
    #: Of fused packs, computed on demand and cleared by each observation.
    rates: FusedRates | None = None

    @property
    def alone(self) -> float | None:
        """Seconds per iteration alone on one device; ``None`` until it was measured."""
        bucket = self.buckets.get(ALONE)
        return bucket.estimate if bucket is not None and bucket.measured else None

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of an iteration's seconds, alone on a device; 0 until it was measured."""
        bucket = self.buckets.get(ALONE)
        known = bucket is not None and bucket.measured
        return log_spread([math.log(each) for each in bucket.seconds if each > 0.0]) if known and bucket else 0.0

    def forget_fits(self) -> None:
        """Drops what was computed from the observations, as there are further ones."""
        self.fitted.clear()
        self.rates = None

    def follow_alone(self, ratio: float) -> None:
        """Changes what was measured of shared devices, widths and packs as much as iterations alone have drifted.

        Overheads are factors: they are as before if trials of another pace have come. Where they are not, the buckets
        drift in their turn.
        """
        for ids, bucket in self.buckets.items():
            if ids != ALONE:
                bucket.scale(ratio)
        for bucket in self.fused.values():
            bucket.scale(ratio)

    def line(self, overhead: Overhead) -> dict[int, Bucket]:
        """Measured buckets by co-residents (alpha) or width (beta), ascending; (1, 1) is in both."""
        axis = 0 if overhead == "alpha" else 1
        known = sorted((ids, bucket) for ids, bucket in self.buckets.items() if bucket.measured or self._hopeless(ids))
        return {ids[axis]: bucket for ids, bucket in known if ids[1 - axis] == 1}

    def _hopeless(self, ids: BucketId) -> bool:
        alone = self.buckets.get(ALONE)
        if alone is None or not alone.measured:
            return False
        seconds = self.buckets[ids].seconds
        return ids[1] > 1 and bool(seconds) and min(seconds) > HOPELESS * alone.estimate

    def learns_memory(self, need: MemoryNeed, rows: int = 1) -> bool:
        """Learns what a trial, or each of the rows of a pack, was seen to need; returns whether that is more, or new.

        Raises each part to its maximum. What the rows of a pack need is a measurement of its own: there are no such
        peaks as of one trial after the other, and a part that does not depend on their number. So a larger pack tells
        what a row of it, or of a yet larger one, needs; a smaller one counts only if it took more in all.
        """
        known, of = (self.memory, 1) if rows == 1 else (self.row_memory, self.row_memory_of)
        if known is not None and rows == of and known.covers(need):
            return False
        if rows == 1:
            self.memory = MemoryNeed.most(*filter(None, (known, need)))
            return True
        if known is None or rows > of or (rows < of and rows * need.own_peak_bytes > of * known.own_peak_bytes):
            self.row_memory, self.row_memory_of = need, rows
            return True
        if rows == of:
            self.row_memory = MemoryNeed.most(known, need)
        return rows == of


def log_spread(logs: Sequence[float]) -> float:
    """Standard deviation of logarithms but for a few outliers: from their deciles, or, if that is more, their MAD.

    The median absolute deviation alone would see nothing of two kinds of trials of which one is rarer.
    """
    if len(logs) < 5:
        return statistics.stdev(logs) if len(logs) > 1 else 0.0
    deciles, middle = statistics.quantiles(logs, n=10, method="inclusive"), statistics.median(logs)
    return max((deciles[-1] - deciles[0]) / 2.5631, 1.4826 * statistics.median(abs(each - middle) for each in logs))


def begin_part(
    whole: KeyProfile,
    seconds: Sequence[float],
    need: MemoryNeed | None,
    speed: float,
    window: int,
    threshold: float,
) -> KeyProfile:
    """The measurements with which a part of a key's trials begins: its own alone, and the whole key's overheads.

    Packed and wide iterations that pay are those of the whole key, in the proportion in which the part's trials alone
    are slower. They count as measured until as many of the part's own have come. What did not pay may be due to unlike
    trials that met on a device: it is measured anew.

    Args:
        whole: of the key.
        seconds: per iteration, alone on a device of speed 1, of the part's trials; may be empty.
        need: the most memory that one of them was seen to need; ``None`` for the whole key's.
        speed: of the device model, for the key.
        window: newest observations to keep.
        threshold: marginal benefit above which one more co-resident pays (eq. 3.1).
    """
    part = KeyProfile(memory=need or whole.memory, busy=list(whole.busy))
    alone = whole.buckets.get(ALONE)
    if alone is None or not seconds:
        return part
    part.buckets[ALONE] = Bucket([each / speed for each in seconds][-window:])
    ratio = part.buckets[ALONE].estimate / alone.estimate
    packed = packing_limit_from_seconds(prefix(whole.line("alpha")), threshold=threshold)
    for (p, w), bucket in whole.buckets.items():
        pays = 1 < p <= packed or (w > 1 and bucket.estimate < alone.estimate)
        if pays and bucket.measured:
            part.buckets[p, w] = Bucket([bucket.estimate * ratio] * MIN_OBSERVATIONS)
    return part


def require_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidFieldError(name, value, "must be True or False")
    return value


def require_key(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidFieldError(name, value, "must be a non-empty string")
    return value


def require_share(name: str, value: object) -> float:
    share = require_number(name, value, at_least=0.0)
    if share > 1.0:
        raise InvalidFieldError(name, value, "must be at most 1")
    return share


def bucket_id(co_residents: object, width: object, where: str = "") -> BucketId:
    p = require_integer(f"{where}co_residents", co_residents, at_least=1)
    w = require_integer(f"{where}width", width, at_least=1)
    if p > 1 and w > 1:
        raise InvalidFieldError(f"{where}width", width, f"cannot be wide and packed, with co_residents={p}")
    return p, w


def fused_id(co_residents: object, rows: object, width: object = 1, where: str = "") -> FusedId:
    k = require_integer(f"{where}rows", rows, at_least=2)
    if require_integer(f"{where}width", width, at_least=1) > 1:
        raise InvalidFieldError(f"{where}width", width, f"cannot be wide and fused, with rows={rows}")
    return require_integer(f"{where}co_residents", co_residents, at_least=1), k


def prefix(line: Mapping[int, Bucket]) -> list[float]:
    """The estimates at 1, 2, ... up to the first gap."""
    return [line[step].estimate for step in itertools.takewhile(line.__contains__, itertools.count(1))]


# -- saved measurements --------------------------------------------------------------------------
#
# What a profile saves of them. A record says what each value is by itself; the window, and values beside others, are
# checked as it is made into what it was saved of.


@dataclass(frozen=True)
class SavedBucket:
    """A :class:`Bucket`."""

    seconds: list[NonNegative]
    streak: int
    restarts: NonNegativeInteger

    def bucket(self, where: str, window: int) -> Bucket:
        """What was saved.

        Args:
            where: the place in the profile, for errors.
            window: of the profile.
        """
        _require_window(f"{where}.seconds", self.seconds, window)
        longest = min(DRIFT_STREAK - 1, len(self.seconds))
        if abs(self.streak) > longest:
            raise InvalidFieldError(f"{where}.streak", self.streak, f"must be from {-longest} to {longest}")
        return Bucket(self.seconds, self.streak, self.restarts)


@dataclass(frozen=True)
class _SavedShare(SavedBucket):
    """A bucket of trials that have a device together, or several devices."""

    co_residents: int
    width: int

    def ids(self, where: str) -> BucketId:
        return bucket_id(self.co_residents, self.width, where)


@dataclass(frozen=True)
class _SavedPack(SavedBucket):
    """A bucket of fused packs."""

    co_residents: int
    rows: int

    def ids(self, where: str) -> FusedId:
        return fused_id(self.co_residents, self.rows, where=where)


@dataclass(frozen=True)
class _SavedMemory:
    """A :class:`MemoryNeed`. Formats before the sixth have no shared bytes."""

    persistent_bytes: NonNegative
    ephemeral_bytes: NonNegative
    shared_bytes: NonNegative = 0.0

    def need(self) -> MemoryNeed:
        return MemoryNeed(self.persistent_bytes, self.ephemeral_bytes, self.shared_bytes)


@dataclass(frozen=True)
class _SavedRowMemory(_SavedMemory):
    """What each of so many rows of a pack needs."""

    rows: int = 2


@dataclass(frozen=True)
class SavedKey:
    """A :class:`KeyProfile`. Formats before the fourth have no fused packs, and before the sixth no memory of rows."""

    model: str | None
    memory: _SavedMemory | None
    busy: list[Annotated[float, Meta(ge=0.0, le=1.0)]]
    buckets: list[_SavedShare]
    fused: list[_SavedPack] = field(default_factory=list)
    row_memory: _SavedRowMemory | None = None

    def profile(self, where: str, window: int) -> KeyProfile:
        """What was saved; takes the same as :meth:`SavedBucket.bucket`."""
        _require_window(f"{where}.busy", self.busy, window)
        of_rows = self.row_memory
        return KeyProfile(
            _buckets(f"{where}.buckets", self.buckets, window),
            _buckets(f"{where}.fused", self.fused, window),
            None if self.memory is None else self.memory.need(),
            None if of_rows is None else of_rows.need(),
            1 if of_rows is None else require_integer(f"{where}.row_memory.rows", of_rows.rows, at_least=2),
            self.busy,
        )


def _require_window(where: str, values: Sequence[float], window: int) -> None:
    if len(values) > window:
        raise InvalidFieldError(where, values, f"must be a list of at most {window} numbers")


def _buckets(where: str, saved: Sequence[_SavedShare | _SavedPack], window: int) -> dict[tuple[int, int], Bucket]:
    buckets: dict[tuple[int, int], Bucket] = {}
    for index, each in enumerate(saved):
        spot = f"{where}[{index}]"
        ids, bucket = each.ids(f"{spot}."), each.bucket(spot, window)
        if not bucket.seconds or min(bucket.seconds) == 0.0:
            raise InvalidFieldError(f"{spot}.seconds", bucket.seconds, "must hold numbers above 0")
        if ids in buckets:
            raise InvalidFieldError(spot, ids, "occurs twice")
        buckets[ids] = bucket
    return buckets


def keys_of(saved: Mapping[str, Sequence[SavedKey]], window: int) -> dict[str, dict[str | None, KeyProfile]]:
    """The measurements of all profile keys, by device model.

    Args:
        saved: those of each key.
        window: of the profile.
    """
    keys: dict[str, dict[str | None, KeyProfile]] = {}
    for key, of_models in saved.items():
        where, by_model = f"keys[{require_key('keys', key)!r}]", keys.setdefault(key, {})
        for index, each in enumerate(of_models):
            if each.model in by_model:
                raise InvalidFieldError(f"{where}[{index}].model", each.model, "occurs twice")
            by_model[each.model] = each.profile(f"{where}[{index}]", window)
    return keys


def key_to_json(known: KeyProfile) -> dict[str, object]:
    return {
        "memory": None if known.memory is None else asdict(known.memory),
        "row_memory": None if known.row_memory is None else {**asdict(known.row_memory), "rows": known.row_memory_of},
        "busy": known.busy,
        "buckets": [{"co_residents": p, "width": w, **bucket.to_json()} for (p, w), bucket in known.buckets.items()],
        "fused": [{"co_residents": p, "rows": k, **bucket.to_json()} for (p, k), bucket in known.fused.items()],
    }
