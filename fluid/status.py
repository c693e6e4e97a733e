"""How a session stands, as data: what the live view shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluid.engine.state import EngineState


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One TrialGroup.

    Attributes:
        name: the group's name.
        trials: number of trials by state.
        iterations_done, iterations: of all its trials; what stopped and failed trials left out is not counted.
        eta: predicted seconds until all its trials have ended; ``None`` where nothing is known.
    """

    name: str
    trials: dict[str, int]
    iterations_done: int
    iterations: int
    eta: float | None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: who runs there, each with the width it has."""

    device_id: int
    kind: str
    host: str
    residents: tuple[tuple[str, float], ...]
    lanes: int


@dataclass(frozen=True, slots=True)
class Status:
    """A session at one moment.

    Attributes:
        at: seconds since the session began.
        groups: those submitted, in order.
        devices: by index.
        alpha, packing: measured packing overhead and c by profile key.
    """

    at: float
    groups: tuple[GroupStatus, ...]
    devices: tuple[DeviceStatus, ...]
    alpha: dict[str, float]
    packing: dict[str, int]


def status_of(state: EngineState, names: dict[str, str], at: float) -> Status:
    """Reads a status off the engine.

    Args:
        state: the engine.
        names: the groups' names by id.
        at: seconds since the session began.
    """
    groups = []
    for group_id, group in state.groups.items():
        trials = [state.trials[trial_id] for trial_id in group.trial_ids]
        counts = Counter(trial.state.value for trial in trials)
        live = [trial for trial in trials if trial.state.value not in ("STOPPED", "FAILED")]
        done = sum(min(trial.done, trial.budget) for trial in live)
        total = sum(trial.budget for trial in live)
        groups.append(GroupStatus(names.get(group_id, group_id), dict(counts), done, total, eta_of(state, group_id)))
    occupancy, by_row = state.scheduling.occupancy, state.scheduling.records
    devices = []
    for device in state.scheduling.devices:
        rows = [row for row in occupancy.residents[device.index] if row in by_row]
        residents = tuple((by_row[row].trial_id, by_row[row].width) for row in rows)
        lanes = len(state.lanes.on(device.index))
        devices.append(DeviceStatus(device.index, device.kind, device.host, residents, lanes))
    keys = state.profile.keys()
    return Status(
        at,
        tuple(groups),
        tuple(devices),
        {key: state.profile.alpha(key) for key in keys},
        {key: state.profile.measured_packing(key) for key in keys},
    )


def eta_of(state: EngineState, group_id: str) -> float | None:
    """Predicted seconds until a group has ended: the longer of its longest trial and its share of all the work."""
    scheduling = state.scheduling
    trials = [state.trials[trial_id] for trial_id in state.groups[group_id].trial_ids]
    unended = [trial for trial in trials if not trial.state.ended]
    if not unended:
        return 0.0
    if not scheduling.n or not any(scheduling.is_measured(trial) for trial in unended):
        return None
    longest = max(scheduling.seconds_left(trial) for trial in unended)
    return max(longest, sum(scheduling.height(trial) for trial in unended) / scheduling.n)
