"""What was measured about trials: seconds per iteration, overheads, memory and the cost of a resize.

Everything is learnt from iterations that are useful work anyway (SPEC section 9; paper section 3.4.2.2), per
profile key and bucket: p trials on one device, or one trial on w devices. Without data nothing is guessed:
seconds and memory are ``None``; alpha = beta = 1, epsilon = 0 and the limits are the ideal model's, and
:meth:`Profile.measured_packing` says how far packing was tried. Trials of one key are taken to be alike, as
the paper does: a space whose shapes differ needs a key per shape.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
import os
import statistics
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.resources import MemoryNeed
from fluid.runtime_model import (
    DEFAULT_BENEFIT_THRESHOLD,
    TOLERANCE,
    marginal_benefit,
    packing_limit_from_seconds,
    width_limit,
)

_log = logging.getLogger(__name__)

#: Version of what :meth:`Profile.to_json` writes.
FORMAT = 1
#: Newest observations a bucket keeps; odd, so that its median is an observation in the middle.
DEFAULT_WINDOW = 31
#: Observations after which a bucket needs no more measuring: their median outvotes two outliers.
MIN_OBSERVATIONS = 5
#: Drifting observations in a row that restart a bucket; below MIN_OBSERVATIONS, so that it is measured again.
DRIFT_STREAK = 4
#: Earlier observations needed to see a drift; the median of fewer follows quickly enough by itself.
DRIFT_BASELINE = 2 * DRIFT_STREAK
#: Deviations up to this share of the estimate are timer noise.
DRIFT_FLOOR = 0.1
#: Keeps a clamped overhead inside its half-open interval, by more than TOLERANCE.
_INSIDE = 1.0 - 1e-6

#: (co-residents on the device, devices); at least one of them is 1.
_BucketId = tuple[int, int]
_Overhead = Literal["alpha", "beta"]
_ALONE: _BucketId = (1, 1)


@dataclass(slots=True)
class _Bucket:
    """Seconds per iteration seen at one co-residency or width.

    Drift rule: the newest observations that all drifted to one side are the streak, those before them the
    baseline. Let M be the baseline's median and D its absolute deviations from M, the largest eighth of them
    cut to the next largest, so that a few stragglers hide nothing. If the baseline has ``DRIFT_BASELINE`` or
    more, an observation x drifts where ``|x - M| > max(mean(D) + std(D), DRIFT_FLOOR * M)``. One that does
    not, or to the other side, ends the streak. ``DRIFT_STREAK`` in a row restart the bucket: it then knows
    them alone.
    """

    #: Newest observations, oldest first, the streak included; at most the profile's window.
    seconds: list[float] = field(default_factory=list)
    #: Length of the streak, negative where it is below the estimate; its size is less than DRIFT_STREAK.
    streak: int = 0
    #: Times the bucket drifted and was started again.
    restarts: int = 0

    @property
    def estimate(self) -> float:
        """The low median, in seconds: with two observations the faster, as the first may hold a warm-up."""
        return statistics.median_low(self.seconds)

    @property
    def measured(self) -> bool:
        """Whether the estimate can be relied on. A restart leaves one that can: its observations agree."""
        return len(self.seconds) >= MIN_OBSERVATIONS or self.restarts > 0

    def add(self, seconds: float, window: int) -> bool:
        """Takes one observation; returns whether the bucket restarts."""
        side = self._side(seconds)
        self.streak = self.streak + side if self.streak * side > 0 else side
        self.seconds = [*self.seconds, seconds][-window:]
        if abs(self.streak) < DRIFT_STREAK:
            return False
        self.seconds, self.streak, self.restarts = self.seconds[-DRIFT_STREAK:], 0, self.restarts + 1
        return True

    def _side(self, seconds: float) -> int:
        """1 or -1 where the observation drifts above or below the baseline, else 0."""
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
class _KeyProfile:
    """All that is known about one profile key."""

    buckets: dict[_BucketId, _Bucket] = field(default_factory=dict)
    memory: MemoryNeed | None = None
    #: Fitted overheads, computed on demand and dropped with each observation.
    fitted: dict[_Overhead, float] = field(default_factory=dict)

    def line(self, overhead: _Overhead) -> dict[int, _Bucket]:
        """Measured buckets by co-residents (alpha) or width (beta), ascending; the lone one is in both."""
        axis = 0 if overhead == "alpha" else 1
        measured = sorted((ids, bucket) for ids, bucket in self.buckets.items() if bucket.measured)
        return {ids[axis]: bucket for ids, bucket in measured if ids[1 - axis] == 1}

    def grow_memory(self, need: MemoryNeed) -> None:
        """Keeps the maximum of each part: an average would admit a trial that does not fit."""
        seen = self.memory or MemoryNeed()
        persistent = max(seen.persistent_bytes, need.persistent_bytes)
        self.memory = MemoryNeed(persistent, max(seen.ephemeral_bytes, need.ephemeral_bytes))


class Profile:
    """Learns how fast trials run alone, packed and wide, and what they need (SPEC section 9).

    It only knows what it is told: no clock, no threads, no randomness. A key never seen is no error.

    Args:
        window: newest observations kept per bucket, at least 12; estimates are medians over it.
        threshold: O_th in [0, 1), the marginal benefit that packing one more trial must exceed.

    Raises:
        InvalidFieldError: here as in every method, a value cannot be used; names the field and the value.
    """

    def __init__(self, *, window: int = DEFAULT_WINDOW, threshold: float = DEFAULT_BENEFIT_THRESHOLD) -> None:
        # A window too small to hold a baseline beside a streak would never see a drift.
        self.window = require_integer("window", window, at_least=DRIFT_BASELINE + DRIFT_STREAK)
        self.threshold = require_number("threshold", threshold, at_least=0.0)
        if self.threshold >= 1.0:
            raise InvalidFieldError("threshold", threshold, "must be below 1")
        self._keys: dict[str, _KeyProfile] = {}
        self._resizes = _Bucket()
        self._warned: set[tuple[str, _Overhead]] = set()

    def observe(
        self,
        key: str,
        seconds: float,
        *,
        co_residents: int = 1,
        width: int = 1,
        iterations: int = 1,
        memory: MemoryNeed | None = None,
    ) -> None:
        """Takes a report of finished iterations: one observation. A refused call teaches nothing.

        Args:
            key: the trial's profile key.
            seconds: wall time of these iterations together, above 0.
            co_residents: p, trials on the device, this one included; above 1 only at width 1.
            width: devices the trial ran on; above 1 only without co-residents.
            iterations: how many iterations took ``seconds``.
            memory: the trial's peak memory in bytes, where it was measured.
        """
        ids = _bucket_id(co_residents, width)
        count = require_integer("iterations", iterations, at_least=1)
        each = require_number("seconds", seconds, at_least=0.0) / count
        if each == 0.0:
            raise InvalidFieldError("seconds", seconds, "must be above 0")
        if memory is not None and not isinstance(memory, MemoryNeed):
            raise InvalidFieldError("memory", memory, "must be a MemoryNeed or None")
        known = self._keys.setdefault(_named("key", key), _KeyProfile())
        if memory is not None:
            known.grow_memory(memory)
        known.fitted.clear()
        if known.buckets.setdefault(ids, _Bucket()).add(each, self.window):
            _log.info("profile %r drifted at co_residents=%d, width=%d: measuring again", key, *ids)

    def observe_resize(self, seconds: float) -> None:
        """Takes the measured cost of one resize, in seconds; 0 is allowed."""
        self._resizes.add(require_number("seconds", seconds, at_least=0.0), self.window)

    @property
    def epsilon(self) -> float:
        """Median cost of a resize, in seconds; 0.0 until one was measured."""
        return self._resizes.estimate if self._resizes.seconds else 0.0

    def keys(self) -> list[str]:
        """The profile keys seen, in the order of their first observation."""
        return list(self._keys)

    def memory(self, key: str) -> MemoryNeed | None:
        """The maximum seen of each part, in bytes; ``None`` until some was reported."""
        return self._known(key).memory

    def needs_measuring(self, key: str, *, co_residents: int = 1, width: int = 1) -> bool:
        """Whether a bucket holds under ``MIN_OBSERVATIONS``: at first, and after a drift restarted it."""
        bucket = self._known(key).buckets.get(_bucket_id(co_residents, width), _Bucket())
        return len(bucket.seconds) < MIN_OBSERVATIONS

    def seconds_per_iteration(self, key: str) -> float | None:
        """Seconds per iteration at width 1, alone on the device; ``None`` for a key never seen.

        Where only packed or wide iterations were measured, eq. 3.2 takes theirs back to width 1. Buckets with
        too few observations count only where there are no others.
        """
        buckets = self._known(key).buckets
        for usable in ({ids: bucket for ids, bucket in buckets.items() if bucket.measured}, buckets):
            if _ALONE in usable:
                return usable[_ALONE].estimate
            if usable:
                alpha, beta = math.log(self.alpha(key)), math.log(self.beta(key))
                logs = {
                    (p, w): math.log(bucket.estimate * w) - (p - 1) * alpha - (w - 1) * beta
                    for (p, w), bucket in usable.items()
                }
                return _exp(_weighted_median((logs[ids], len(usable[ids].seconds)) for ids in usable))
        return None

    def alpha(self, key: str) -> float:
        """Packing overhead per extra co-resident, in [1, c/(c-1)) for the c measured; 1.0 until measured.

        Fitted to all measured buckets, at least two, as a weighted median of slopes (Theil-Sen), so that no
        one of many decides it. A value outside the interval is clamped, which is logged once per key.
        """
        return self._overhead(key, "alpha")

    def beta(self, key: str) -> float:
        """Scaling overhead per extra device, in [1, d/(d-1)); 1.0 until measured; fitted as :meth:`alpha`.

        d is the last of the measured widths 1, 2, ... that are each faster than the one before.
        """
        # SPEC section 3, like the paper, prints [1, (d+1)/d). But d is the largest w with beta < w/(w-1), and
        # the SPEC's own case 6 has beta = 1.3 with d = 4: d/(d-1) is the bound that agrees with both.
        return self._overhead(key, "beta")

    def measured_packing(self, key: str) -> int:
        """The largest p for which each of 1..p co-residents was measured; 0 where not even one alone was."""
        return len(_prefix(self._known(key).line("alpha")))

    def marginal_benefits(self, key: str) -> dict[int, float]:
        """O^p (eq. 3.1) by p, where p and p - 1 were measured; medians stand for the paper's means."""
        seconds = {p: bucket.estimate for p, bucket in self._known(key).line("alpha").items()}
        return {p: marginal_benefit(p, seconds[p], seconds[p - 1]) for p in seconds if p - 1 in seconds}

    def packing_limit(self, key: str, c_max: int) -> int:
        """c, the most co-residents worth having on a device.

        Up to :meth:`measured_packing` the measured O^p decide, whatever alpha; beyond it each further trial
        is taken to cost the fitted alpha, which without data is the ideal 1.
        """
        c_max = require_integer("c_max", c_max, at_least=1)
        seconds = _prefix(self._known(key).line("alpha"))[:c_max]
        c = packing_limit_from_seconds(seconds, threshold=self.threshold)
        if c < len(seconds):
            return c
        alpha = self.alpha(key)
        while c < c_max and marginal_benefit(c + 1, alpha, 1.0) > self.threshold + TOLERANCE:
            c += 1
        return c

    def width_limit(self, key: str, *, n: int, d_max: int) -> int:
        """d, the most of ``n`` devices a trial may span: ``min(d_max, n, max{w : beta < w/(w-1)})``."""
        return width_limit(self.beta(key), n=n, d_max=d_max)

    def to_json(self) -> dict[str, object]:
        """All that was learnt, in plain dicts, lists, strings and numbers."""
        return {
            "format": FORMAT,
            "window": self.window,
            "threshold": self.threshold,
            "resizes": asdict(self._resizes),
            "keys": {
                key: {
                    "memory": None if known.memory is None else asdict(known.memory),
                    "buckets": [
                        {"co_residents": p, "width": w, **asdict(bucket)} for (p, w), bucket in known.buckets.items()
                    ],
                }
                for key, known in self._keys.items()
            },
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Makes the profile that :meth:`to_json` described: same estimates, and it goes on learning alike."""
        version = _member("", data, "format")
        if version != FORMAT:
            raise InvalidFieldError("format", version, f"is unknown; this Fluid reads format {FORMAT}")
        profile = cls(window=_member("", data, "window"), threshold=_member("", data, "threshold"))
        profile._resizes = _bucket_from_json("resizes", _member("", data, "resizes"), profile.window)
        for key, content in _mapping("keys", _member("", data, "keys")).items():
            name = _named("keys", key)
            profile._keys[name] = _key_from_json(f"keys[{name!r}]", content, profile.window)
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file. Whoever reads it finds the old content or the new, never a part."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads what :meth:`save` wrote; an error in the content names the file too."""
        name = os.fspath(path)
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except InvalidFieldError as error:
            raise InvalidFieldError(error.field, error.value, f"{error.reason} (in {name})") from error
        except (ValueError, RecursionError) as error:
            raise InvalidFieldError("path", name, f"is not a JSON file: {error}") from error

    def _known(self, key: str) -> _KeyProfile:
        return self._keys.get(key) or _KeyProfile()

    def _overhead(self, key: str, name: _Overhead) -> float:
        known = self._known(key)
        if name not in known.fitted:
            line = known.line(name)
            value = 1.0 if len(line) < 2 else _exp(_slope(line, shared=name == "beta"))
            known.fitted[name] = self._clamped(key, name, value, _prefix(line))
        return known.fitted[name]

    def _clamped(self, key: str, name: _Overhead, value: float, seconds: Sequence[float]) -> float:
        """``value`` brought into [1, m/(m-1)), where m is the measured c or d."""
        if name == "alpha":
            limit = packing_limit_from_seconds(seconds, threshold=self.threshold)
        else:
            faster = [wider < narrower for narrower, wider in itertools.pairwise(seconds)]
            limit = 1 + len(list(itertools.takewhile(bool, faster)))
        bound = limit / (limit - 1) if limit > 1 else math.inf
        if 1.0 <= value < bound:
            return value
        clamped = max(1.0, min(value, bound * _INSIDE))
        if (key, name) not in self._warned:
            self._warned.add((key, name))
            message = "profile %r: measured %s=%.6g lies outside [1, %.6g); %.6g is used"
            _log.warning(message, key, name, value, bound, clamped)
        return clamped


def _bucket_id(co_residents: object, width: object, where: str = "") -> _BucketId:
    p = require_integer(f"{where}co_residents", co_residents, at_least=1)
    w = require_integer(f"{where}width", width, at_least=1)
    if p > 1 and w > 1:
        raise InvalidFieldError(f"{where}width", width, f"cannot be wide and packed, with co_residents={p}")
    return p, w


def _named(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidFieldError(name, value, "must be a non-empty string")
    return value


def _prefix(line: Mapping[int, _Bucket]) -> list[float]:
    """The estimates at 1, 2, ... up to the first gap."""
    return [line[step].estimate for step in itertools.takewhile(line.__contains__, itertools.count(1))]


def _slope(line: Mapping[int, _Bucket], *, shared: bool) -> float:
    """log alpha, or log beta where the devices share the work (eq. 3.2), from two buckets or more."""
    logs = {step: math.log(bucket.estimate * (step if shared else 1)) for step, bucket in line.items()}
    slopes = []
    for a, b in itertools.combinations(line, 2):
        # The further apart two buckets are and the better observed, the surer is their slope.
        noise = math.sqrt(1 / len(line[a].seconds) + 1 / len(line[b].seconds))
        slopes.append(((logs[b] - logs[a]) / (b - a), (b - a) / noise))
    return _weighted_median(slopes)


def _weighted_median(weighted: Iterable[tuple[float, float]]) -> float:
    """The smallest value such that it and those below it have at least half of the weight."""
    ordered = sorted(weighted)
    sums = list(itertools.accumulate(weight for _, weight in ordered))
    return ordered[bisect.bisect_left(sums, 0.5 * sums[-1] * (1.0 - TOLERANCE))][0]


def _exp(exponent: float) -> float:
    """exp, but an absurd measurement ends in an absurd number and not in an OverflowError."""
    return math.exp(min(max(exponent, -700.0), 700.0))


def _mapping(where: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(where or "profile", value, "must be a JSON object")
    return value


def _member(where: str, data: object, name: str) -> Any:
    """``data[name]``, where ``where`` is the place of ``data`` in the profile, for the error."""
    if name not in _mapping(where, data):
        raise InvalidFieldError(f"{where}.{name}".lstrip("."), None, "is missing")
    return _mapping(where, data)[name]


def _bucket_from_json(where: str, data: object, window: int) -> _Bucket:
    values = _member(where, data, "seconds")
    if not isinstance(values, list) or len(values) > window:
        raise InvalidFieldError(f"{where}.seconds", values, f"must be a list of at most {window} numbers")
    seconds = [require_number(f"{where}.seconds", value, at_least=0.0) for value in values]
    longest = min(DRIFT_STREAK - 1, len(seconds))
    streak = require_integer(f"{where}.streak", _member(where, data, "streak"), at_least=-longest)
    if streak > longest:
        raise InvalidFieldError(f"{where}.streak", streak, f"must be at most {longest}")
    restarts = require_integer(f"{where}.restarts", _member(where, data, "restarts"), at_least=0)
    return _Bucket(seconds, streak, restarts)


def _key_from_json(where: str, data: object, window: int) -> _KeyProfile:
    known = _KeyProfile()
    memory, spot = _member(where, data, "memory"), f"{where}.memory"
    if memory is not None:
        parts = [_member(spot, memory, part) for part in ("persistent_bytes", "ephemeral_bytes")]
        known.memory = MemoryNeed(*parts)
    buckets = _member(where, data, "buckets")
    if not isinstance(buckets, list):
        raise InvalidFieldError(f"{where}.buckets", buckets, "must be a list")
    for index, entry in enumerate(buckets):
        spot = f"{where}.buckets[{index}]"
        ids = _bucket_id(_member(spot, entry, "co_residents"), _member(spot, entry, "width"), f"{spot}.")
        bucket = _bucket_from_json(spot, entry, window)
        if not bucket.seconds or min(bucket.seconds) == 0.0:
            raise InvalidFieldError(f"{spot}.seconds", bucket.seconds, "must hold numbers above 0")
        if ids in known.buckets:
            raise InvalidFieldError(spot, ids, "occurs twice")
        known.buckets[ids] = bucket
    return known
