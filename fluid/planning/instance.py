"""The planning instance I = {A, M} (paper appendix B.1.1): k trials and n devices, as arrays."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fluid.errors import InvalidFieldError, require_number
from fluid.planning.completion import at_equal_odds
from fluid.planning.constraints import Constraint
from fluid.planning.fused_rates import DEFAULT_MAX_FUSED, FusedRates
from fluid.planning.instance_input import InstanceInput, TrialInput, add_measured
from fluid.planning.json_input import cluster_from_json, read_json_object, read_record
from fluid.planning.measured_keys import MeasuredKeys
from fluid.planning.profile import Profile
from fluid.planning.runtime_model import (
    DEFAULT_BENEFIT_THRESHOLD,
    DEFAULT_MAX_PACKING,
    DEFAULT_MAX_WIDTH,
    FloatArray,
    RuntimeModel,
)
from fluid.resources import Cluster, MemoryNeed
from fluid.trialgroup import TrialGroup


@dataclass(frozen=True)
class Instance:
    """A planner's input: k trials and n devices. Made by :meth:`build`, :meth:`from_group` or :meth:`from_json`.

    Example:
        >>> from fluid import Instance, StaticFluid
        >>> instance = Instance.build([40.0, 10.0, 10.0], 2, alpha=1.1, c=2)
        >>> len(instance), instance.n, instance.heights.tolist()
        (3, 2, [40.0, 10.0, 10.0])
        >>> StaticFluid().arrange(instance).widths.tolist()
        [1.0, 0.5, 0.5]

    Attributes:
        trial_ids: (k,) unique names.
        heights: (k,) h_i(1), predicted seconds at width 1 on a device of speed 1.
        model: overheads and limits of the k trials.
        cluster: the n devices.
        epsilon: seconds one resize costs.
        priority: (k,) a higher priority starts first.
        needs: (k,) device memory, ``None`` for a trial whose need is unknown.
        constraints: (k,) what trials ask of their devices, ``None`` for a trial that asks for nothing; ``None`` if none
            asks for anything.
        sigma: (k,) standard deviation of the logarithm of the true over the predicted runtime, which is its median;
            ``None`` if all are certain.
    """

    trial_ids: tuple[str, ...]
    heights: FloatArray
    model: RuntimeModel
    cluster: Cluster
    epsilon: float
    priority: FloatArray
    needs: tuple[MemoryNeed | None, ...]
    constraints: tuple[Constraint | None, ...] | None = None
    sigma: FloatArray | None = None

    def __len__(self) -> int:
        """k, the number of trials."""
        return len(self.trial_ids)

    @property
    def n(self) -> int:
        """The number of devices."""
        return len(self.cluster)

    @property
    def late_heights(self) -> FloatArray:
        """(k,) by which trials queue: the heights, or, if uncertain, what each trial exceeds with the same odds."""
        return at_equal_odds(self.heights, self.sigma)

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
        fused: Sequence[FusedRates | None] | None = None,
        epsilon: float = 0.0,
        threshold: float = DEFAULT_BENEFIT_THRESHOLD,
        trial_ids: Sequence[str] | None = None,
        priority: ArrayLike = 1.0,
        needs: Sequence[MemoryNeed | None] | None = None,
        sigma: ArrayLike = 0.0,
    ) -> Instance:
        """Makes an instance from runtimes at width 1, in seconds.

        ``alpha``, ``beta``, ``c``, ``d``, ``priority`` and ``sigma`` are one number for all trials or one per trial;
        ``c`` and ``d`` are upper bounds (:meth:`RuntimeModel.build`). ``fused`` has an entry per trial: the rates of
        those whose co-residents are rows of one fused pack.

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
        spread = np.atleast_1d(_numbers("sigma", sigma))
        if not (np.isfinite(spread) & (spread >= 0.0)).all():
            raise InvalidFieldError("sigma", spread.tolist(), "must be finite numbers of at least 0")
        per_trial = {
            "trial_ids": ids,
            "needs": needs,
            "priority": priorities if len(priorities) != 1 else None,
            "sigma": spread if len(spread) != 1 else None,
        }
        for field, values in per_trial.items():
            if values is not None and len(values) != k:
                raise InvalidFieldError(field, values, f"must be one for each of the {k} trials")
        instance = cls(
            trial_ids=ids,
            heights=runtimes,
            model=RuntimeModel.build(
                k, n=len(machines), alpha=alpha, beta=beta, c=c, d=d, fused=fused, threshold=threshold
            ),
            cluster=machines,
            epsilon=require_number("epsilon", epsilon, at_least=0.0),
            priority=np.broadcast_to(priorities, (k,)),
            needs=tuple(needs) if needs is not None else (None,) * k,
            sigma=np.broadcast_to(spread, (k,)) if spread.any() else None,
        )
        instance._fit_memory()
        return instance

    def take(self, rows: Sequence[int], trial_ids: Sequence[str]) -> Instance:
        """Returns the instance of trials that are as these rows, under ids of their own; a row may occur often."""
        index = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            trial_ids=tuple(trial_ids),
            heights=self.heights[index],
            model=self.model.take(index),
            priority=self.priority[index],
            needs=tuple([self.needs[row] for row in rows]),
            constraints=None if self.constraints is None else tuple([self.constraints[row] for row in rows]),
            sigma=None if self.sigma is None else self.sigma[index],
        )

    @classmethod
    def from_group(
        cls,
        group: TrialGroup,
        cluster: Cluster,
        profile: Profile | None = None,
        *,
        c: int = DEFAULT_MAX_PACKING,
        d: int = DEFAULT_MAX_WIDTH,
        max_fused: int = DEFAULT_MAX_FUSED,
    ) -> Instance:
        """Makes the instance of a group's active trials: ``h_i(1) = budget x seconds per iteration``.

        Trials of a key of which fused packs were measured, and do more than processes, are planned as rows of packs, of
        up to ``max_fused``; ``c`` bounds the others.

        A profile key without measurements gets the median pace of the measured keys, or 1 s if there is none: widths
        depend only on ratios of runtimes, and the engine plans again once it has measured. Devices of several models,
        of which none was given a speed, get those that were measured for the group's keys
        (:func:`fluid.planning.device_models.speeds_of_all`).
        """
        trials = group.active
        if not trials:
            raise InvalidFieldError("group", group.name, "has no active trial to plan")
        known = profile or Profile()
        # One query per key, not per trial: groups are large and keys are few.
        keys = {trial.key: None for trial in trials}
        measured = MeasuredKeys(known, cluster, keys, c, max_fused)
        alpha = {key: measured.alpha(key) for key in keys}
        beta = {key: measured.beta(key) for key in keys}
        packing = {key: measured.packing(key) for key in keys}
        fused = {key: measured.fused(key) for key in keys}
        memory = {key: measured.memory(key) for key in keys}
        heights = [trial.budget * measured.seconds[trial.key] for trial in trials]
        work = dict.fromkeys(keys, 0.0)
        for trial, height in zip(trials, heights, strict=True):
            work[trial.key] += height
        made = cls.build(
            heights,
            measured.cluster(work),
            alpha=[alpha[trial.key] for trial in trials],
            beta=[beta[trial.key] for trial in trials],
            c=[packing[trial.key] for trial in trials],
            d=[min(d, trial.max_width or d) for trial in trials],
            fused=[fused[trial.key] for trial in trials],
            epsilon=known.epsilon,
            threshold=-math.inf,  # c is measured; alpha must not lower it again
            trial_ids=[trial.id for trial in trials],
            priority=[trial.priority for trial in trials],
            needs=[trial.memory or memory[trial.key] for trial in trials],
        )
        constraints = tuple(Constraint.of(trial.requires, trial.devices, False) for trial in trials)
        return made if not any(constraints) else made._constrained(constraints)

    def _constrained(self, constraints: tuple[Constraint | None, ...]) -> Instance:
        """This instance with what trials ask of their devices, and c and d lowered to that."""
        for row, constraint in enumerate(constraints):
            if constraint is None:
                continue
            problem = constraint.problem(self.cluster.devices)
            if problem is not None:
                field, value, reason = problem
                raise InvalidFieldError(field, value, f"trial {self.trial_ids[row]!r} fits on no device: {reason}")
            requires = constraint.requires
            eligible = sum(requires is None or requires.met_by(device) for device in self.cluster.devices)
            self.model.d[row] = min(self.model.d[row], eligible)
            self.model.c[row] = min(self.model.c[row], constraint.most_residents or self.model.c[row])
        return replace(self, constraints=constraints)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], profile: Profile | None = None) -> Instance:
        """Makes an instance from what ``fluid plan`` reads (see ``docs/cli.md``).

        ``alpha``, ``beta``, ``c``, ``d`` and ``fused`` at the top are for all trials; a trial may have its own, or name
        a profile key whose figures were measured.

        Args:
            data: the decoded JSON.
            profile: measurements; ``None`` for none.

        Raises:
            InvalidFieldError: a field is missing, unknown or invalid; the message names its place and value.
        """
        if "workload" in data and "trials" not in data:
            reason = "is no field of an instance; a scenario is for fluid simulate"
            raise InvalidFieldError("workload", data["workload"], reason)
        top = read_record(data, InstanceInput, "instance")
        for_all = {field: data[field] for field in ("alpha", "beta", "c", "d", "fused") if field in data}
        measured = add_measured(top.trials, for_all, cluster_from_json(top.devices), profile)
        trials = read_record(measured.trials, list[TrialInput], "trials", place="trials")
        threshold = DEFAULT_BENEFIT_THRESHOLD if profile is None else profile.threshold
        limits = zip(trials, measured.packing, strict=True)
        return cls.build(
            [trial.runtime_s for trial in trials],
            measured.cluster,
            alpha=[trial.alpha for trial in trials],
            beta=[trial.beta for trial in trials],
            c=[trial.packing(c, threshold) for trial, c in limits],
            d=[min(trial.d, trial.max_width) for trial in trials],
            fused=[trial.rates for trial in trials],
            epsilon=top.epsilon if "epsilon" in data or profile is None else profile.epsilon,
            threshold=-math.inf,  # Where c was measured, alpha must not lower it again; elsewhere it has.
            trial_ids=[f"trial-{row:05d}" if trial.id is None else str(trial.id) for row, trial in enumerate(trials)],
            priority=[trial.priority for trial in trials],
            needs=[trial.need for trial in trials],
        )

    @classmethod
    def load(cls, path: str | Path) -> Instance:
        """Reads an instance from a JSON file."""
        return cls.from_json(read_json_object(path))

    def _fit_memory(self) -> None:
        """Raises if a trial fits on no device, and lowers d to the number of devices that a trial fits on."""
        if not any(self.needs):
            return
        rooms = self.cluster.rooms
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


def _numbers(field: str, values: ArrayLike) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(field, values, "must be numbers") from error
