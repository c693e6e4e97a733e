"""What ``fluid plan`` reads: devices and trials, whose figures are given, or were measured by an earlier session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fluid.devices.models import Speeds, at_speeds, speeds_of_all
from fluid.errors import InvalidFieldError
from fluid.measure.json_input import Count, NonNegative, rates_from_json, read_record
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import (
    DEFAULT_MAX_FUSED,
    DEFAULT_MAX_PACKING,
    DEFAULT_MAX_WIDTH,
    FusedRates,
    packing_limit,
)
from fluid.resources import MOST_DEVICES, Cluster, MemoryNeed

# -- measured keys -------------------------------------------------------------------------------
#
# Measured keys: what a profile says of profile keys on the devices of a plan, which may be of several models.


class MeasuredKeys:
    """The figures by which trials of some profile keys are planned.

    On devices of several models, each key is planned by its figures on the model on which most of its trials can be
    packed. Seconds are those on a device of speed 1: of the model of the cluster's first device, or, where the user
    gave devices a speed, as measured.

    Args:
        profile: what was measured.
        cluster: the devices.
        keys: the profile keys.
        c: most processes on one device.
        max_fused: most rows of a fused pack.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, keys: Iterable[str], c: int, max_fused: int = DEFAULT_MAX_FUSED
    ) -> None:
        self._profile = profile
        self._cluster = cluster
        self._c = c
        self._max_fused = max_fused
        models = list(dict.fromkeys(device.model for device in cluster.devices))
        is_unlike = len(models) > 1 and all(device.speed == 1.0 for device in cluster.devices)
        #: Of each key; empty where the devices' own speeds hold.
        self._speeds: dict[str, Speeds] = {key: profile.speeds(key, models) for key in keys} if is_unlike else {}
        self._model = {key: self._to_plan(key, models) for key in keys}
        self._fused = {key: self._fused_of(key, model) for key, model in self._model.items()}
        paces = {key: self._measured_seconds(key) for key in keys}
        known = [seconds for seconds in paces.values() if seconds is not None]
        usual = float(np.median(known)) if known else 1.0
        #: Seconds per iteration of each key at speed 1; an unmeasured key has the median of the others, or 1 s.
        self.seconds = {key: usual if seconds is None else seconds for key, seconds in paces.items()}

    def alpha(self, key: str) -> float:
        """The packing overhead of a key."""
        return self._profile.alpha(key, self._model[key])

    def beta(self, key: str) -> float:
        """The scaling overhead of a key."""
        return self._profile.beta(key, self._model[key])

    def packing(self, key: str) -> int:
        """c of a key: processes, or rows if its trials are planned as rows of fused packs."""
        return self._packing(key, self._model[key])

    def fused(self, key: str) -> FusedRates | None:
        """Rates of fused packs of a key; ``None`` if none was measured, or processes get more done."""
        return self._fused[key]

    def memory(self, key: str) -> MemoryNeed | None:
        """Device memory of a key's trials; ``None`` if unknown."""
        return self._profile.memory(key, self._model[key])

    def cluster(self, work: Mapping[str, float]) -> Cluster:
        """The devices, at the speeds that were measured for these keys (:func:`speeds_of_all`).

        Args:
            work: seconds of work at speed 1 by profile key, above 0.
        """
        return at_speeds(self._cluster, speeds_of_all(work, self._speeds)) if self._speeds else self._cluster

    def _to_plan(self, key: str, models: list[str | None]) -> str | None:
        """The model by whose figures a key is planned; if it was measured on none of these, ``None`` stands for any."""
        known = [model for model in models if self._profile.seconds_per_iteration(key, model) is not None]
        return max(known, key=lambda model: self._packing(key, model), default=None)

    def _packing(self, key: str, model: str | None) -> int:
        rates = self._fused_of(key, model)
        if rates is not None:
            return rates.limit(self._max_fused, self._profile.threshold)
        return self._profile.packing_limit(key, self._c, model)

    def _fused_of(self, key: str, model: str | None) -> FusedRates | None:
        """The rates on a model, if packs of rows that pay do more there than as many processes as were measured."""
        rates, profile = self._profile.fused_rates(key, model), self._profile
        rows = 1 if rates is None else rates.limit(self._max_fused, profile.threshold)
        if rates is None or rows == 1:
            return None
        processes = profile.packing_limit(key, max(1, min(self._c, profile.measured_packing(key, model))), model)
        beside = processes / profile.alpha(key, model) ** (processes - 1)
        return rates if rows / rates.stretch(rows) >= beside else None

    def _measured_seconds(self, key: str) -> float | None:
        model = self._model[key]
        seconds = self._profile.seconds_per_iteration(key, model)
        return seconds if seconds is None or key not in self._speeds else seconds * self._speeds[key].get(model, 1.0)


# -- instance input ------------------------------------------------------------------------------


#: Most seconds in a file, more than 30,000 years. Sums of larger ones would overflow.
LONGEST_S = 1e12
#: Seconds in a file.
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
#: A runtime's overhead factor in a file.
Overhead = Annotated[float, Meta(ge=1.0, le=1e6)]
#: Seconds of an iteration of a fused pack, relative to one of a trial alone, in a file.
Stretch = Annotated[float, Meta(ge=0.0, le=1e6)]
#: Stands for the profile key of trials that name none: they have the usual speeds.
_NO_KEY = ""


@dataclass(frozen=True)
class InstanceInput:
    """An instance: the JSON file that ``fluid plan`` reads. Required are ``devices`` and ``trials``.

    * ``devices``: a number of identical GPUs, or a list of objects with the fields of ``Device``, of which ``index`` is
      the position in the list and ``kind`` ``"gpu"`` unless they say otherwise
    * ``trials``: at least one, with the fields below
    * ``alpha`` (1): packing overhead, at least 1: each further trial on a device makes those on it take ``alpha`` times
      as long
    * ``beta`` (1): scaling overhead, at least 1: on ``w`` devices a trial takes ``beta^(w-1) / w`` of its runtime
    * ``c`` (4): most trials that share one device; lowered if ``alpha`` makes sharing useless
    * ``d`` (8): most devices for one trial; lowered to the number of devices, and if ``beta`` makes more of them
      useless
    * ``fused``: of trials that can be fused: seconds of an iteration of a pack, relative to one of a trial alone, by
      rows, such as ``{"2": 1.1, "4": 1.4}``. They stand in for ``alpha``, and ``c``, by default 64, then bounds the
      rows. Rows are doubled as long as it pays; more rows than are listed never do
    * ``epsilon`` (0, or as the profile measured): seconds that one resize of a running trial takes, in which it makes
      no progress
    """

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
    """One of its trials.

    * ``runtime_s``: seconds alone on one device of speed 1, above 0. With ``--profile``, ``profile_key`` and ``budget``
      may be given in its place: runtime, ``alpha``, ``beta``, ``c``, ``fused`` and memory are then those that were
      measured, where the trial does not give them
    * ``id`` (``trial-00000`` and so on): a unique name
    * ``alpha``, ``beta``, ``c``, ``d``, ``fused`` (the instance's): for this trial alone
    * ``max_width`` (``d``): most devices for this trial; 1 if it cannot use several
    * ``priority`` (1): trials of a higher priority start first
    * ``persistent_bytes``, ``ephemeral_bytes`` (unknown): device memory held between iterations, and further memory
      needed at the peak of one
    """

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
