"""The strip packing instance I = {A, M} a planner solves (paper appendix B.1.1): k trials, n devices.

A planner sees arrays, one entry per trial, and never a trainable.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fluid.errors import InvalidFieldError, require_integer, require_number
from fluid.planning.profile import Profile
from fluid.planning.runtime_model import (
    DEFAULT_BENEFIT_THRESHOLD,
    DEFAULT_MAX_PACKING,
    DEFAULT_MAX_WIDTH,
    FloatArray,
    RuntimeModel,
)
from fluid.resources import MOST_DEVICES, Cluster, Device, MemoryNeed
from fluid.trialgroup import TrialGroup


@dataclass(frozen=True)
class Instance:
    """What a planner solves. Build one with :meth:`build`, :meth:`from_group` or :meth:`from_json`.

    Attributes:
        trial_ids: (k,) unique names.
        heights: (k,) h_i(1), predicted seconds at width 1 on a device of speed 1.
        model: overheads and limits of the k trials.
        cluster: the n devices.
        epsilon: seconds one resize costs.
        priority: (k,) a higher priority starts first.
        needs: (k,) device memory, ``None`` for a trial whose need is unknown.
    """

    trial_ids: tuple[str, ...]
    heights: FloatArray
    model: RuntimeModel
    cluster: Cluster
    epsilon: float
    priority: FloatArray
    needs: tuple[MemoryNeed | None, ...]

    def __len__(self) -> int:
        """k, the number of trials."""
        return len(self.trial_ids)

    @property
    def n(self) -> int:
        """The number of devices."""
        return len(self.cluster)

    @classmethod
    def build(
        cls,
        heights: ArrayLike,
        cluster: Cluster | int,
        *,
        alpha: ArrayLike = 1.0,
        beta: ArrayLike = 1.0,
        c: ArrayLike = DEFAULT_MAX_PACKING,
        d: ArrayLike = DEFAULT_MAX_WIDTH,
        epsilon: float = 0.0,
        threshold: float = DEFAULT_BENEFIT_THRESHOLD,
        trial_ids: Sequence[str] | None = None,
        priority: ArrayLike = 1.0,
        needs: Sequence[MemoryNeed | None] | None = None,
    ) -> Instance:
        """Makes an instance from runtimes at width 1, in seconds.

        ``alpha``, ``beta``, ``c``, ``d`` and ``priority`` are one number or one per trial; ``c`` and ``d`` are
        upper bounds (:meth:`RuntimeModel.build`).

        Raises:
            InvalidFieldError: a value cannot be used; the message names the field and the value.
        """
        runtimes = np.atleast_1d(_numbers("runtime_s", heights)).copy()
        if runtimes.ndim != 1 or not len(runtimes):
            raise InvalidFieldError("trials", heights, "a plan needs at least one trial")
        wrong = ~(np.isfinite(runtimes) & (runtimes > 0.0))
        if wrong.any():
            raise InvalidFieldError("runtime_s", float(runtimes[wrong][0]), "must be a finite number above 0")
        machines = cluster if isinstance(cluster, Cluster) else Cluster.of(cluster)
        k = len(runtimes)
        ids = tuple(trial_ids) if trial_ids is not None else tuple(f"trial-{row:05d}" for row in range(k))
        if len(set(ids)) < len(ids):
            raise InvalidFieldError("id", next(i for i in ids if ids.count(i) > 1), "two trials have this id")
        priorities = np.atleast_1d(_numbers("priority", priority))
        if not np.isfinite(priorities).all():
            raise InvalidFieldError("priority", float(priorities[~np.isfinite(priorities)][0]), "must be finite")
        per_trial = {"trial_ids": ids, "needs": needs, "priority": priorities if len(priorities) != 1 else None}
        for field, values in per_trial.items():
            if values is not None and len(values) != k:
                raise InvalidFieldError(field, values, f"must be one for each of the {k} trials")
        instance = cls(
            trial_ids=ids,
            heights=runtimes,
            model=RuntimeModel.build(k, n=len(machines), alpha=alpha, beta=beta, c=c, d=d, threshold=threshold),
            cluster=machines,
            epsilon=require_number("epsilon", epsilon, at_least=0.0),
            priority=np.broadcast_to(priorities, (k,)),
            needs=tuple(needs) if needs is not None else (None,) * k,
        )
        instance._fit_memory()
        return instance

    @classmethod
    def from_group(
        cls,
        group: TrialGroup,
        cluster: Cluster,
        profile: Profile | None = None,
        *,
        c: int = DEFAULT_MAX_PACKING,
        d: int = DEFAULT_MAX_WIDTH,
    ) -> Instance:
        """Makes the instance of a group's active trials: ``h_i(1) = budget x seconds per iteration``.

        A profile key nobody has measured counts with the median pace of the measured ones, or 1 s where there
        is none: widths depend on the ratios of runtimes only, and the engine plans again once it has measured.
        """
        trials = group.active
        if not trials:
            raise InvalidFieldError("group", group.name, "has no active trial to plan")
        known = profile or Profile()
        # One look per key, not per trial: groups are large and keys are few.
        keys = {trial.key: None for trial in trials}
        pace = {key: known.seconds_per_iteration(key) for key in keys}
        measured = [seconds for seconds in pace.values() if seconds is not None]
        default = float(np.median(measured)) if measured else 1.0
        alpha = {key: known.alpha(key) for key in keys}
        beta = {key: known.beta(key) for key in keys}
        packing = {key: known.packing_limit(key, c) for key in keys}
        memory = {key: known.memory(key) for key in keys}
        return cls.build(
            [trial.budget * (default if (s := pace[trial.key]) is None else s) for trial in trials],
            cluster,
            alpha=[alpha[trial.key] for trial in trials],
            beta=[beta[trial.key] for trial in trials],
            c=[packing[trial.key] for trial in trials],
            d=[min(d, trial.max_width or d) for trial in trials],
            epsilon=known.epsilon,
            threshold=-math.inf,  # c above is measured already; alpha must not lower it a second time
            trial_ids=[trial.id for trial in trials],
            priority=[trial.priority for trial in trials],
            needs=[trial.memory or memory[trial.key] for trial in trials],
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Instance:
        """Makes an instance from what ``fluid plan`` reads (see ``docs/cli.md``).

        ``alpha``, ``beta``, ``c`` and ``d`` may stand at the top and on a trial, where they count for it alone.
        """
        refuse_unknown("instance", data, _INSTANCE_FIELDS)
        for field in ("devices", "trials"):
            if field not in data:
                raise InvalidFieldError(field, None, "is missing from the instance")
        trials = data["trials"]
        if not isinstance(trials, Sequence) or isinstance(trials, str) or not trials:
            raise InvalidFieldError("trials", trials, "must be a list of at least one trial")
        for trial in trials:
            if not isinstance(trial, Mapping):
                raise InvalidFieldError("trials", trial, "each trial must be an object with id and runtime_s")
            refuse_unknown("trial", trial, _TRIAL_FIELDS)
            if "runtime_s" not in trial:
                raise InvalidFieldError("runtime_s", None, f"is missing from the trial {trial.get('id')!r}")
            require_number("runtime_s", trial["runtime_s"], at_least=0.0)

        def column(field: str, default: float) -> list[float]:
            top = data.get(field, default)
            return [require_number(field, trial.get(field, top), at_least=1.0) for trial in trials]

        widest = [require_integer("d", own, at_least=1) for own in column("d", DEFAULT_MAX_WIDTH)]
        for row, trial in enumerate(trials):
            own = require_integer("max_width", trial.get("max_width", widest[row]), at_least=1)
            widest[row] = min(widest[row], own)
        return cls.build(
            [trial["runtime_s"] for trial in trials],
            cluster_from_json(data["devices"]),
            alpha=column("alpha", 1.0),
            beta=column("beta", 1.0),
            c=[require_integer("c", c, at_least=1) for c in column("c", DEFAULT_MAX_PACKING)],
            d=widest,
            epsilon=require_number("epsilon", data.get("epsilon", 0.0), at_least=0.0),
            trial_ids=[str(trial.get("id", f"trial-{row:05d}")) for row, trial in enumerate(trials)],
            priority=[require_number("priority", trial.get("priority", 1.0), at_least=0.0) for trial in trials],
            needs=[_memory_from_json(trial) for trial in trials],
        )

    @classmethod
    def load(cls, path: str | Path) -> Instance:
        """Reads an instance from a JSON file."""
        return cls.from_json(read_json_object(path))

    def _fit_memory(self) -> None:
        """Refuses a trial that fits on no device, and lets none span more devices than it fits on."""
        rooms = sorted(self.cluster.usable_bytes(device) for device in self.cluster.devices)
        for row, need in enumerate(self.needs):
            if need is None:
                continue
            fitting = len(rooms) - bisect_left(rooms, need.peak_bytes)
            if not fitting:
                raise InvalidFieldError(
                    "memory",
                    need,
                    f"trial {self.trial_ids[row]!r} needs {need.peak_bytes:.0f} bytes at its peak and the device "
                    f"with the most has {rooms[-1]:.0f} usable",
                )
            self.model.d[row] = min(self.model.d[row], fitting)


_INSTANCE_FIELDS = {"devices", "c", "d", "alpha", "beta", "epsilon", "trials"}
_TRIAL_FIELDS = {
    *("id", "runtime_s", "alpha", "beta", "c", "d", "priority", "max_width"),
    *("persistent_bytes", "ephemeral_bytes"),
}
_DEVICE_FIELDS = {"index", "host", "kind", "speed", "memory_bytes"}


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object from a file; an error names the file and, for bad JSON, the place in it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidFieldError("path", str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("path", str(path), f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidFieldError("path", str(path), "must hold one JSON object")
    return data


def cluster_from_json(devices: object) -> Cluster:
    """Makes a cluster from a count, or from a list of objects with the fields of :class:`Device`."""
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        made = []
        for position, device in enumerate(devices):
            if not isinstance(device, Mapping):
                raise InvalidFieldError("devices", device, "each device must be an object")
            refuse_unknown("device", device, _DEVICE_FIELDS)
            made.append(Device(**{"index": position, "kind": "gpu", **device}))
        return Cluster(tuple(made))
    return Cluster.of(require_integer("devices", devices, at_least=1, at_most=MOST_DEVICES))


def _numbers(field: str, values: ArrayLike) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(field, values, "must be numbers") from error


def _memory_from_json(trial: Mapping[str, Any]) -> MemoryNeed | None:
    given = {field: trial[field] for field in ("persistent_bytes", "ephemeral_bytes") if field in trial}
    return MemoryNeed(**given) if given else None


def refuse_unknown(what: str, data: Mapping[str, Any], known: set[str]) -> None:
    for field in data:
        if field not in known:
            raise InvalidFieldError(field, data[field], f"is no field of an {what}; known: {', '.join(sorted(known))}")
