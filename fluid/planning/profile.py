"""The profile: measured seconds per iteration, overheads and memory of trials, and the cost of a resize.

Profiling uses the trials' own iterations (docs/theory.md, section 7; paper section 3.4.2.2). Measurements are kept per
profile key, device model and bucket: p trials on one device, one trial on w devices, or p fused packs of k rows each on
one device. Without data nothing is guessed: seconds and memory are ``None``, alpha = beta = 1, epsilon = 0, and the
limits are the ideal model's. The paper assumes that trials of one key are alike. Where they are not, they are parted
into cohorts by their configs, and each cohort has a key of its own (:mod:`fluid.planning.cohorts`).
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fluid._logs import logger_of
from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.planning.cohorts import CohortTree
from fluid.planning.fused_measurements import fused_limit, fused_measured, fused_packs, fused_rates
from fluid.planning.fused_rates import FusedRates
from fluid.planning.json_file import parse_json, write_json
from fluid.planning.key_table import KeyTable
from fluid.planning.measurements import (
    ALONE,
    ANY_MODEL,
    DRIFT_BASELINE,
    DRIFT_STREAK,
    MIN_OBSERVATIONS,
    Bucket,
    Overhead,
    begin_part,
    bucket_from_json,
    bucket_id,
    fused_id,
    key_to_json,
    keys_from_json,
    mapping,
    member,
    prefix,
    require_flag,
    require_key,
    require_share,
)
from fluid.planning.overhead_fit import bounded_exp, slope, weighted_median
from fluid.planning.restore_seconds import RestoreSeconds
from fluid.planning.runtime_model import (
    DEFAULT_BENEFIT_THRESHOLD,
    TOLERANCE,
    marginal_benefit,
    packing_limit_from_seconds,
    width_limit,
)
from fluid.resources import MemoryNeed

_log = logger_of(__name__)

#: Version of what :meth:`Profile.to_json` writes.
FORMAT = 5
#: The version before, without cohorts.
_WITHOUT_COHORTS = 4
_WITHOUT_FUSED = 3  # Nor did the version before that measure fused packs.
_WITHOUT_MODELS = 2  # Nor did the version before that tell device models apart.
#: Newest observations a bucket keeps; odd, so that its median is an observation in the middle.
DEFAULT_WINDOW = 31
#: Keeps a clamped overhead inside its half-open interval by more than TOLERANCE.
_INSIDE = 1.0 - 1e-6


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
            memory: the peak memory of one trial in bytes, if measured.
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
            self.observe_memory(key, memory, model=model)
        known = self._keys.own(key, model)
        known.forget_fits()
        if share is not None and ids == ALONE and not is_fused:
            known.busy = [*known.busy, share][-self.window :]
        if (known.fused if is_fused else known.buckets).setdefault(ids, Bucket()).add(each, self.window):
            message = "profile %r, model %s, drifted at co_residents=%d, width=%d, rows=%d: measuring again"
            _log.info(message, key, model, co_residents, width, rows)

    def observe_memory(self, key: str, memory: MemoryNeed, *, model: str | None = None) -> None:
        """Adds the peak memory of a trial on a device of that model, in bytes, without its seconds."""
        if not isinstance(memory, MemoryNeed):
            raise InvalidFieldError("memory", memory, "must be a MemoryNeed")
        self._keys.own(key, model).grow_memory(memory)

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
        """The maximum of each part, in bytes; ``None`` until some is reported."""
        return self._keys.known(key, model).memory

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
        version = member("", data, "format")
        if version not in (FORMAT, _WITHOUT_COHORTS, _WITHOUT_FUSED, _WITHOUT_MODELS):
            reason = f"is unknown; this Fluid reads formats {_WITHOUT_MODELS} to {FORMAT}"
            raise InvalidFieldError("format", version, reason)
        profile = cls(window=member("", data, "window"), threshold=member("", data, "threshold"))
        profile._resizes = bucket_from_json("resizes", member("", data, "resizes"), profile.window)
        if version == FORMAT:
            profile.finds_cohorts = require_flag("finds_cohorts", member("", data, "finds_cohorts"))
            trees = mapping("cohorts", member("", data, "cohorts"))
            profile.cohorts = {
                require_key("cohorts", key): CohortTree.from_json(f"cohorts[{key!r}]", tree)
                for key, tree in trees.items()
            }
        profile.restores = RestoreSeconds.from_json(mapping("", data).get("restores", {}))  # Older ones have none.
        without_models = version == _WITHOUT_MODELS  # The first model observed takes the measurements over.
        profile._keys.by_key = keys_from_json(member("", data, "keys"), profile.window, without_models=without_models)
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
