"""What ``fluid plan`` reads: devices and trials, whose figures are given, or were measured by an earlier session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fluid.errors import InvalidFieldError
from fluid.planning.fused_rates import DEFAULT_MAX_FUSED, FusedRates
from fluid.planning.json_input import Count, NonNegative, Range, rates_from_json, read_record
from fluid.planning.measured_keys import MeasuredKeys
from fluid.planning.profile import Profile
from fluid.planning.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, packing_limit
from fluid.resources import MOST_DEVICES, Cluster, MemoryNeed

#: Most seconds in a file, more than 30,000 years. Sums of larger ones would overflow.
LONGEST_S = 1e12
#: Seconds in a file.
Seconds = Annotated[float, Range(0.0, LONGEST_S)]
#: A runtime's overhead factor in a file.
Overhead = Annotated[float, Range(1.0, 1e6)]
#: Seconds of an iteration of a fused pack, relative to one of a trial alone, in a file.
Stretch = Annotated[float, Range(0.0, 1e6)]
#: Stands for the profile key of trials that name none: they have the usual speeds.
_NO_KEY = ""


@dataclass(frozen=True)
class InstanceInput:
    """An instance."""

    devices: Any
    trials: list[dict[str, Any]]
    alpha: Overhead = 1.0
    beta: Overhead = 1.0
    c: Count = DEFAULT_MAX_PACKING
    d: Count = DEFAULT_MAX_WIDTH
    fused: dict[str, Stretch] = field(default_factory=dict)
    epsilon: Seconds = 0.0


@dataclass(frozen=True)
class TrialInput:
    """One of its trials."""

    runtime_s: Seconds
    id: Any = None
    alpha: Overhead = 1.0
    beta: Overhead = 1.0
    #: ``None`` for the default, which is another one for fused packs.
    c: Count | None = None
    d: Count = DEFAULT_MAX_WIDTH
    fused: dict[str, Stretch] = field(default_factory=dict)
    max_width: Count = MOST_DEVICES
    priority: NonNegative = 1.0
    persistent_bytes: NonNegative = 0.0
    ephemeral_bytes: NonNegative = 0.0

    #: Its rates as a row of fused packs; ``None`` if it is none.
    rates: FusedRates | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", rates_from_json(self.fused))

    def packing(self, measured: int | None, threshold: float) -> int:
        """Returns the most trials that pay on a device.

        Args:
            measured: processes that were found to pay; ``None`` if the trial's own alpha is to decide.
            threshold: O_th, by which rows of fused packs are judged.
        """
        if self.rates is not None:
            return self.rates.limit(self.c or DEFAULT_MAX_FUSED, threshold)
        most = self.c or DEFAULT_MAX_PACKING
        return packing_limit(self.alpha, c_max=most) if measured is None else min(most, measured)

    @property
    def need(self) -> MemoryNeed | None:
        """Its device memory; ``None`` if unknown."""
        known = self.persistent_bytes or self.ephemeral_bytes
        return MemoryNeed(self.persistent_bytes, self.ephemeral_bytes) if known else None


@dataclass(frozen=True)
class _Keyed:
    """What a trial says in place of its runtime."""

    profile_key: str
    budget: Count


@dataclass(frozen=True)
class MeasuredTrials:
    """What an earlier session has measured of an instance.

    Attributes:
        trials: the trials' fields, with those that were measured.
        packing: c of each trial, as measured; ``None`` for a trial that names no profile key, or has its own rates.
        cluster: the devices, at the speeds that were measured for the trials.
    """

    trials: list[dict[str, Any]]
    packing: list[int | None]
    cluster: Cluster


def add_measured(
    trials: Sequence[dict[str, Any]], for_all: dict[str, Any], cluster: Cluster, profile: Profile | None
) -> MeasuredTrials:
    """Completes trials by what was measured of their profile keys; what a trial says itself holds.

    Args:
        trials: their fields, as read.
        for_all: fields that hold for all of them, unless measured.
        cluster: the devices.
        profile: the measurements; ``None`` for none.

    Raises:
        InvalidFieldError: a trial names a profile key that was not measured, or both a key and a runtime.
    """
    keyed = {
        row: _keyed(row, trial, profile)
        for row, trial in enumerate(trials)
        if "profile_key" in trial or "budget" in trial
    }
    known = profile or Profile()
    keys = dict.fromkeys([*(each.profile_key for each in keyed.values()), *[_NO_KEY][: len(trials) - len(keyed)]])
    measured = MeasuredKeys(known, cluster, keys, MOST_DEVICES)
    work = dict.fromkeys(keys, 0.0)
    complete: list[dict[str, Any]] = []
    packing: list[int | None] = []
    for row, trial in enumerate(trials):
        each = keyed.get(row)
        if each is None:
            complete.append(for_all | trial)
            packing.append(None)
            seconds = trial.get("runtime_s")
            if isinstance(seconds, (int, float)) and 0.0 < seconds <= LONGEST_S:  # else refused when it is read
                work[_NO_KEY] += seconds
            continue
        key = each.profile_key
        own = {name: value for name, value in trial.items() if name not in ("profile_key", "budget")}
        runtime = each.budget * measured.seconds[key]
        figures: dict[str, Any] = {"runtime_s": runtime, "alpha": measured.alpha(key), "beta": measured.beta(key)}
        rates = measured.fused(key)
        if rates is not None:
            figures["fused"] = dict(zip(map(str, rates.rows), rates.stretches, strict=True))
        need = measured.memory(key)
        if need is not None:
            figures |= {"persistent_bytes": need.persistent_bytes, "ephemeral_bytes": need.ephemeral_bytes}
        complete.append(for_all | figures | own)
        packing.append(None if "fused" in own else measured.packing(key))
        work[key] += runtime
    used = {key: seconds for key, seconds in work.items() if seconds > 0.0}
    return MeasuredTrials(complete, packing, measured.cluster(used) if used else cluster)


def _keyed(row: int, trial: dict[str, Any], profile: Profile | None) -> _Keyed:
    place = f"trials[{row}]"
    names = {name: trial[name] for name in ("profile_key", "budget") if name in trial}
    keyed = read_record(names, _Keyed, "trials", place=place)
    if profile is None:
        raise InvalidFieldError(
            f"{place}.profile_key", keyed.profile_key, "can be used with a profile only (--profile)"
        )
    if profile.seconds_per_iteration(keyed.profile_key) is None:
        known = ", ".join(map(repr, profile.keys())) or "none"
        raise InvalidFieldError(f"{place}.profile_key", keyed.profile_key, f"was not measured; measured keys: {known}")
    if "runtime_s" in trial:
        reason = "cannot be given along with profile_key, whose seconds were measured"
        raise InvalidFieldError(f"{place}.runtime_s", trial["runtime_s"], reason)
    return keyed
