"""Measured keys: what a profile says of profile keys on the devices of a plan, which may be of several models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fluid.planning.device_models import Speeds, at_speeds, speeds_of_all
from fluid.planning.fused_rates import DEFAULT_MAX_FUSED, FusedRates
from fluid.planning.profile import Profile
from fluid.resources import Cluster, MemoryNeed


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
