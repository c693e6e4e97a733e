"""A scenario to simulate: a workload on a cluster, with errors and device changes, deterministic by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from fluid.engine.events import GroupDeadline
from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of, require_text
from fluid.measure.json_input import (
    AtLeastOne,
    NonNegative,
    NonNegativeInteger,
    cluster_from_json,
    rates_from_json,
    read_json_object,
    read_record,
)
from fluid.measure.runtime_model import DEFAULT_MAX_FUSED, DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, FusedRates
from fluid.policies.owners.deadlines import deadline_of, weight_of
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES
from fluid.resources import Cluster, Device, Requires

DISTRIBUTIONS = ("constant", "lognormal", "uniform", "bimodal")
#: More trials or iterations than this are refused as a typing error.
_MOST = 1_000_000
#: More devices than this would take minutes, in silence.
MOST_SIMULATED = 100_000
ALGORITHMS = ("random", "successive_halving", "hyperband", "syncbohb", "asha", "pbt")


@dataclass(frozen=True)
class Runtimes:
    """The distribution of the trials' seconds per iteration at width 1 on a device of speed 1.

    Args:
        distribution: ``"constant"``; ``"lognormal"`` with the mean of the logarithm such that the median is
            ``seconds_per_iteration``; ``"uniform"`` on ``(1 +- sigma)``; ``"bimodal"``: one trial in four takes
            ``1 + 4 sigma`` times as long.
        seconds_per_iteration: the median.
        sigma: the spread.
    """

    distribution: str = "lognormal"
    seconds_per_iteration: float = 1.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        require_one_of("distribution", self.distribution, DISTRIBUTIONS)
        if require_number("seconds_per_iteration", self.seconds_per_iteration, at_least=0.0) == 0.0:
            raise InvalidFieldError("seconds_per_iteration", self.seconds_per_iteration, "must be above 0")
        require_number("sigma", self.sigma, at_least=0.0)
        if self.distribution == "uniform" and self.sigma >= 1.0:
            raise InvalidFieldError("sigma", self.sigma, "must be below 1 for the uniform distribution")

    def draw(self, rng: np.random.Generator) -> float:
        """Draws one trial's seconds per iteration; every distribution takes one number from ``rng``."""
        quantile = rng.random()
        if self.distribution == "lognormal":
            factor = float(np.exp(self.sigma * _normal_quantile(quantile)))
        elif self.distribution == "uniform":
            factor = 1.0 + self.sigma * (2.0 * quantile - 1.0)
        elif self.distribution == "bimodal":
            factor = 1.0 + 4.0 * self.sigma if quantile < 0.25 else 1.0
        else:
            factor = 1.0
        return self.seconds_per_iteration * factor


@dataclass(frozen=True)
class Workload:
    """A search algorithm's shape: which trials it submits when, with which budgets.

    Args:
        algorithm: one of :data:`ALGORITHMS`.
        trials: trials of a random search, at the first rung of Successive Halving, in all for ASHA, or the
            population of PBT. Hyperband and SyncBOHB derive theirs from ``max_iterations`` and ``eta``.
        max_iterations: R, the budget of a trial that is never stopped.
        eta: the reduction factor: one of ``eta`` trials is promoted to the next rung.
        concurrency: trials ASHA keeps running; 0 for one per device.
        interval: iterations between two decisions of PBT.
    """

    algorithm: str = "random"
    trials: int = 27
    max_iterations: int = 27
    eta: int = 3
    concurrency: int = 0
    interval: int = 5

    def __post_init__(self) -> None:
        require_one_of("algorithm", self.algorithm, ALGORITHMS)
        least = {"trials": 1, "max_iterations": 1, "eta": 2, "concurrency": 0, "interval": 1}
        for name, at_least in least.items():  # whole floats become ints, for range()
            value = require_integer(name, getattr(self, name), at_least=at_least, at_most=_MOST)
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class ArrivingWorkload(Workload):
    """One of several workloads of a scenario.

    Args:
        at: when it arrives, seconds since the start.
        name: for display; by default its place among the workloads, from 1.
        owner: workloads of one owner are scheduled as one; by default each is its own.
        priority: of its groups.
        preempt: whether its groups pause running trials of groups of a lower priority.
        requires: what its trials require of a device.
        runtimes: the distribution of its trials' seconds per iteration; by default the scenario's.
        deadline: when it is to have ended: seconds from its arrival, text such as ``"2h"``, or steps of times and
            costs, as for :meth:`fluid.FluidExecutor.submit_trialgroup`; its trials run on after it. ``None`` for none.
        weight: how much it counts that it is late, or, without a deadline, that it waits.
    """

    at: float = 0.0
    name: str = ""
    owner: str | None = None
    priority: float = 1.0
    preempt: bool = False
    requires: Requires | None = None
    runtimes: Runtimes | None = None
    deadline: Any = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.due
        weight_of(self.weight)
        require_number("at", self.at, at_least=0.0)
        require_number("priority", self.priority, at_least=-math.inf)
        if self.owner is not None:
            require_text("owner", self.owner)

    @property
    def due(self) -> GroupDeadline | None:
        """Its deadline; ``None`` for none."""
        return deadline_of(self.deadline)

    def can_run_on(self, devices: Iterable[Device]) -> bool:
        """Whether one of these devices has what its trials require."""
        return any(self.requires is None or self.requires.met_by(device) for device in devices)


@dataclass(frozen=True)
class DeviceChange:
    """A device that is lost or gained while the workload runs.

    Args:
        at: seconds since the start.
        device: the device gained; ``None`` where one is lost.
        lost: index of the device lost; ``None`` where one is gained.
    """

    at: float
    device: Device | None = None
    lost: int | None = None

    def __post_init__(self) -> None:
        require_number("at", self.at, at_least=0.0)
        if (self.device is None) == (self.lost is None):
            raise InvalidFieldError("lost", self.lost, "a change either gains a device or loses one")


@dataclass(frozen=True)
class Scenario:
    """A simulation's input.

    Args:
        name: for display.
        cluster: the devices at the start.
        workload: the algorithm's shape, where there is one workload.
        workloads: several workloads, each with its own trials; empty for ``workload`` alone.
        group_policy, fairness: which of several workloads' trials start first: as for ``FluidExecutor``.
        runtimes: the distribution of seconds per iteration.
        alpha, beta, c, d: the runtime model, the same for all trials.
        epsilon: seconds one resize costs.
        start_s: seconds that each start of a trial costs: of its process, and to set it up or restore it there.
        fused: T(k)/T(1) of k fused trials; ``None`` for trials that cannot be fused. Those that can are alike, so
            their runtimes are constant and predicted exactly.
        max_fused: most trials fused on a device; 1 switches fusing off.
        runtime_error: sigma of the lognormal factor, of median 1, between true and predicted runtime.
        early_stop: share of the trials that the algorithm stops at a random moment of their budget.
        changes: devices lost and gained.
        seed: of all random numbers; every planner gets the same trials, runtimes and stops.
    """

    cluster: Cluster
    workload: Workload = Workload()
    runtimes: Runtimes = Runtimes()
    name: str = "scenario"
    alpha: float = 1.0
    beta: float = 1.0
    c: int = DEFAULT_MAX_PACKING
    d: int = DEFAULT_MAX_WIDTH
    epsilon: float = 0.0
    start_s: float = 0.0
    fused: FusedRates | None = None
    max_fused: int = DEFAULT_MAX_FUSED
    runtime_error: float = 0.0
    early_stop: float = 0.0
    changes: tuple[DeviceChange, ...] = ()
    seed: int = 0
    workloads: tuple[ArrivingWorkload, ...] = ()
    group_policy: str = DEFAULT_GROUP_POLICY
    fairness: float = 0.0

    def __post_init__(self) -> None:
        require_one_of("group_policy", self.group_policy, GROUP_POLICIES)
        require_number("fairness", self.fairness, at_least=0.0)
        require_number("alpha", self.alpha, at_least=1.0)
        require_number("beta", self.beta, at_least=1.0)
        for name, at_least in {"c": 1, "d": 1, "max_fused": 1, "seed": 0}.items():
            object.__setattr__(self, name, require_integer(name, getattr(self, name), at_least=at_least))
        require_number("epsilon", self.epsilon, at_least=0.0)
        require_number("start_s", self.start_s, at_least=0.0)
        if require_number("runtime_error", self.runtime_error, at_least=0.0) > 10.0:
            raise InvalidFieldError("runtime_error", self.runtime_error, "must be at most 10, a sigma of logarithms")
        if require_number("early_stop", self.early_stop, at_least=0.0) > 1.0:
            raise InvalidFieldError("early_stop", self.early_stop, "must be in [0, 1]")
        self._check_fused()
        self._check_workloads(self._check_changes())

    @property
    def arriving(self) -> tuple[ArrivingWorkload, ...]:
        """All workloads; a single one arrives at the start."""
        return self.workloads or (ArrivingWorkload(**asdict(self.workload)),)

    def with_devices(self, n: int) -> Scenario:
        """A copy with ``n`` alike devices, without losses and gains, which name devices."""
        return replace(self, cluster=Cluster.of(n), changes=())

    def with_group_policy(self, policy: str) -> Scenario:
        """A copy with another group policy."""
        return replace(self, group_policy=policy)

    def with_seed(self, seed: int) -> Scenario:
        """A copy with another seed."""
        return replace(self, seed=seed)

    @classmethod
    def load(cls, path: str | Path) -> Scenario:
        """Reads a scenario from a JSON file."""
        return cls.from_json(read_json_object(path))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scenario:
        """Makes a scenario from what ``fluid simulate`` reads (:class:`ScenarioInput`).

        Raises:
            InvalidFieldError: a field is missing, unknown or invalid; the message names its place and value.
        """
        if "trials" in data and not {"workload", "workloads"} & data.keys():
            raise InvalidFieldError(
                "trials", data["trials"], "is no field of a scenario; an instance is for fluid plan"
            )
        read = read_record(data, ScenarioInput, "scenario")
        cluster = cluster_from_json(read.devices)
        if len(cluster) > MOST_SIMULATED:
            raise InvalidFieldError("devices", len(cluster), f"must be at most {MOST_SIMULATED}")
        alike = {item.name: getattr(read, item.name) for item in fields(cls) if hasattr(read, item.name)}
        if read.workload is None:
            if not read.workloads:
                raise InvalidFieldError("workload", None, "is missing")
            del alike["workload"]
        elif read.workloads:
            raise InvalidFieldError("workloads", data["workloads"], "cannot be given beside workload")
        alike["workloads"] = tuple(read.workloads)
        alike["fused"] = rates_from_json(read.fused)
        return cls(cluster=cluster, changes=tuple(event.change(cluster) for event in read.events), **alike)

    def _check_fused(self) -> None:
        """Raises if trials that are to be fused differ in what fused trials have in common."""
        if self.fused is None:
            return
        if min(self.fused.stretches) < 1.0:
            raise InvalidFieldError(
                "fused", self.fused.stretches, "must be at least 1: a pack is no faster than a trial"
            )
        for runtimes in (self.runtimes, *(each.runtimes for each in self.workloads)):
            if runtimes is not None and runtimes.distribution != "constant":
                reason = "must be constant with fused, as trials of one shape take the same time"
                raise InvalidFieldError("distribution", runtimes.distribution, reason)
        if self.runtime_error:
            raise InvalidFieldError("runtime_error", self.runtime_error, "must be 0 with fused, as for distribution")

    def _check_changes(self) -> list[tuple[Device, ...]]:
        """Raises if a lost device is missing or the last one, or a gained one is present.

        Returns:
            The devices at the start and after each change.
        """
        present = {device.index: device for device in self.cluster.devices}
        phases = [tuple(present.values())]
        for change in sorted(self.changes, key=lambda change: change.at):
            if change.lost is not None:
                if change.lost not in present:
                    raise InvalidFieldError("remove_device", change.lost, f"is no device at {change.at:g} s")
                del present[change.lost]
                if not present:
                    raise InvalidFieldError("remove_device", change.lost, "would leave no device")
            elif change.device is not None:
                if change.device.index in present:
                    raise InvalidFieldError(
                        "add_device", change.device.index, f"is already a device at {change.at:g} s"
                    )
                present[change.device.index] = change.device
            phases.append(tuple(present.values()))
        return phases

    def _check_workloads(self, phases: list[tuple[Device, ...]]) -> None:
        """Raises if two workloads have one name, or if trials would fail, or wait for ever, for want of a device.

        Args:
            phases: the devices at the start and after each change.
        """
        names = [workload.name or str(place) for place, workload in enumerate(self.workloads, start=1)]
        for index, workload in enumerate(self.workloads):
            if names[index] in names[:index]:
                raise InvalidFieldError(f"workloads[{index}].name", names[index], "is the name of an earlier one")
            wanted = workload.requires
            waits = wanted is not None and wanted.wait
            if not all(map(workload.can_run_on, phases[-1:] if waits else phases)):
                when = "in the end" if waits else "at all times; trials that may wait for one say wait"
                raise InvalidFieldError(f"workloads[{index}].requires", str(wanted), f"must be met by a device {when}")


@dataclass(frozen=True)
class EventInput:
    """A device lost or gained. The trials on a lost one are queued again and lose their current iteration.

    * ``at``: seconds since the start
    * ``remove_device``: index of the lost device; or
    * ``add_device``: index of the gained device, which is as it was, or like the first one of the cluster; or an object
      with the fields of ``Device``
    """

    at: NonNegative
    remove_device: NonNegativeInteger | None = None
    #: The device's number, or an object with its fields.
    add_device: Any = None

    def __post_init__(self) -> None:
        if (self.remove_device is None) == (self.add_device is None):
            raise InvalidFieldError("", asdict(self), "each event has at and one of remove_device and add_device")

    def change(self, cluster: Cluster) -> DeviceChange:
        """Makes the change of ``cluster``; a device gained by its number alone is as it was, or like the first one."""
        if self.remove_device is not None:
            return DeviceChange(self.at, lost=self.remove_device)
        if isinstance(self.add_device, Mapping):
            gained = {"kind": "gpu", **self.add_device}
            return DeviceChange(self.at, device=read_record(gained, Device, "add_device", place="add_device"))
        index = require_integer("add_device", self.add_device, at_least=0)
        known = {device.index: device for device in cluster.devices}
        return DeviceChange(self.at, device=known.get(index, replace(cluster.devices[0], index=index)))


@dataclass(frozen=True)
class ScenarioInput:
    """A scenario: the JSON file that ``fluid simulate`` reads.

    Required are ``devices``, and ``workload`` or ``workloads``.

    * ``devices``: as of an instance
    * ``workload``: the search algorithm; ``workloads``: several, in place of it
    * ``group_policy`` (``irs``), ``fairness`` (0): which of several workloads' trials start first, as for
      ``FluidExecutor``
    * ``runtimes``: how long trials take
    * ``events``: devices that are lost or added
    * ``name``: a title; ``seed`` (0): of all random numbers
    * ``alpha``, ``beta``, ``c``, ``d``, ``epsilon``: as of an instance, for all trials
    * ``start_s`` (0): seconds that each start of a trial costs, of its process and of its set-up; a trial that waits
      for a decision of the search keeps its process
    * ``fused``: as of an instance, and at least 1, for all trials; ``distribution`` is then ``constant`` and
      ``runtime_error`` 0
    * ``max_fused`` (128): most trials fused on one device; 1 switches fusing off
    * ``runtime_error`` (0): sigma of the lognormal factor, of median 1, between true and predicted runtimes
    * ``early_stop`` (0): share of the trials that stop at a random point of their budget, 0 to 1
    """

    devices: Any
    workload: Workload | None = None
    workloads: list[ArrivingWorkload] = field(default_factory=list)
    group_policy: str = Scenario.group_policy
    fairness: float = Scenario.fairness
    runtimes: Runtimes = Scenario.runtimes
    events: list[EventInput] = field(default_factory=list)
    name: str = Scenario.name
    alpha: float = Scenario.alpha
    beta: float = Scenario.beta
    c: int = Scenario.c
    d: int = Scenario.d
    epsilon: float = Scenario.epsilon
    start_s: float = Scenario.start_s
    #: T(k)/T(1) by k.
    fused: dict[str, AtLeastOne] = field(default_factory=dict)
    max_fused: int = Scenario.max_fused
    runtime_error: float = Scenario.runtime_error
    early_stop: float = Scenario.early_stop
    seed: int = Scenario.seed


def _normal_quantile(quantile: float) -> float:
    return NormalDist().inv_cdf(min(max(quantile, 1e-12), 1.0 - 1e-12))
