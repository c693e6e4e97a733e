"""What a simulation returns: times and counts of the whole, of its groups and of its workloads."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from fluid.planners.rollout import Segment
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY
from fluid.resources import Cluster


@dataclass(frozen=True)
class GroupResult:
    """One TrialGroup's times, in seconds since the start."""

    name: str
    submitted: float
    finished: float
    trials: int


@dataclass(frozen=True)
class WorkloadResult:
    """One workload's times, in seconds since the start.

    Attributes:
        name: for display.
        owner: its owner.
        arrived: when its first group was submitted.
        finished: when its last trial ended.
        trials: trials requested, each counted once.
        deadline: by when it was to have ended, from its arrival, of steps the first; ``None`` for no deadline.
    """

    name: str
    owner: str
    arrived: float
    finished: float
    trials: int
    deadline: float | None = None

    @property
    def completion(self) -> float:
        """Seconds from its arrival to its end."""
        return self.finished - self.arrived

    @property
    def met(self) -> bool | None:
        """Whether it met its deadline; ``None`` if it has none."""
        return None if self.deadline is None else self.completion <= self.deadline * (1.0 + 1e-9)


@dataclass(frozen=True)
class SimulationResult:
    """A simulation's times and counts.

    Attributes:
        planner: its name.
        n: devices at the start.
        makespan: seconds from the first start to the last finish.
        busy_device_seconds: device-seconds in which at least one trial held the device.
        utilisation: their share of the available device-seconds.
        lower_bound: seconds; no schedule of the same work is shorter.
        device_hours: available device-hours, used or not: what is paid for.
        resizes: number of resizes of running trials.
        trials: trials requested, each counted once.
        stopped: trials the algorithm stopped early.
        groups: in order of submission.
        segments: which trial held which devices when, if recorded.
        trial_ids: a name for each row of the segments.
        cluster: the devices at the start.
        device_changes: (seconds, device, whether it was added), in order.
        peak_rows: most trials that took a step together; ``None`` if the scenario's trials cannot be fused.
        group_policy: which workload's trials started first.
        workloads: in the scenario's order.
    """

    planner: str
    n: int
    makespan: float
    busy_device_seconds: float
    utilisation: float
    lower_bound: float
    device_hours: float
    resizes: int
    trials: int
    stopped: int
    groups: tuple[GroupResult, ...]
    segments: tuple[Segment, ...]
    trial_ids: tuple[str, ...]
    cluster: Cluster
    device_changes: tuple[tuple[float, int, bool], ...]
    peak_rows: int | None = None
    group_policy: str = DEFAULT_GROUP_POLICY
    workloads: tuple[WorkloadResult, ...] = ()

    @property
    def label(self) -> str:
        """What it differs in from other runs of its scenario."""
        return f"{self.planner} {self.group_policy}" if len(self.workloads) > 1 else self.planner

    @property
    def mean_completion(self) -> float:
        """Seconds that a workload takes from its arrival to its end, on average."""
        return fmean(workload.completion for workload in self.workloads)

    @property
    def mean_completions(self) -> dict[str, float]:
        """The same by owner, in order of their first workload."""
        owners = dict.fromkeys(workload.owner for workload in self.workloads)
        return {
            owner: fmean(workload.completion for workload in self.workloads if workload.owner == owner)
            for owner in owners
        }
