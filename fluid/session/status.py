"""The status of a session, as data: what the live view shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluid.trialgroup import Search, TrialState

if TYPE_CHECKING:
    from fluid.engine.records import GroupRecord
    from fluid.engine.state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """One TrialGroup.

    Attributes:
        name: the group's name.
        trials: number of trials by state, or by the outcome that the submitter gave; forgotten ones are included.
        iterations_done, iterations: done and in all, over all trials; iterations that stopped and failed trials did not
            run are left out.
        eta: predicted seconds until all its trials have ended; ``None`` if no trial was measured.
        expected: how many trials there will be; ``None`` unless a search algorithm has said so.
    """

    name: str
    trials: dict[str, int]
    iterations_done: int
    iterations: int
    eta: float | None
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device: the trials that run there, each with its width, and the number of its lanes."""

    device_id: int
    kind: str
    host: str
    residents: tuple[tuple[str, float], ...]
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a session at one moment.

    Attributes:
        at: seconds since the session began.
        groups: in order of submission.
        devices: by index.
        alpha, packing: measured packing overhead and c by profile key.
    """

    at: float
    groups: tuple[GroupStatus, ...]
    devices: tuple[DeviceStatus, ...]
    alpha: dict[str, float]
    packing: dict[str, int]


def status_of(state: EngineState, groups: Mapping[str, tuple[str, Search | None]], at: float) -> Status:
    """Reads a status off the engine.

    Args:
        state: the engine.
        groups: name and search of each group, by id.
        at: seconds since the session began.
    """
    occupancy, by_row = state.occupancy, state.trials.by_row
    devices = []
    for device in occupancy.devices:
        rows = [row for row in occupancy.residents[device.index] if row in by_row]
        devices.append(
            DeviceStatus(
                device_id=device.index,
                kind=device.kind,
                host=device.host,
                residents=tuple((by_row[row].trial_id, by_row[row].placement.width) for row in rows),
                lanes=len(state.lanes.on(device.index)),
            )
        )
    keys = state.profile.keys()
    return Status(
        at=at,
        groups=tuple(
            _group_status(state, group, *groups.get(group_id, (group_id, None)))
            for group_id, group in state.groups.items()
        ),
        devices=tuple(devices),
        alpha={key: state.profile.alpha(key) for key in keys},
        packing={key: state.profile.measured_packing(key) for key in keys},
    )


def _group_status(state: EngineState, group: GroupRecord, name: str, search: Search | None) -> GroupStatus:
    counts, done, total = Counter(group.past), group.past_iterations, group.past_iterations
    for trial in map(state.trials.__getitem__, group.trial_ids):
        stands = trial.state.value
        if trial.state.ended and trial.outcome is not None:
            stands = trial.outcome
        elif trial.state is TrialState.DONE and search is not None:
            stands = "PAUSED"  # Until its search algorithm has decided.
        if not (trial.state.ended and trial.outcome == "PAUSED"):  # It comes back as another trial.
            counts[stands] += 1
        done += min(trial.progress.done, trial.progress.budget)
        stopped = trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED
        total += trial.progress.done if stopped else trial.progress.budget
    return GroupStatus(
        name=name,
        trials=dict(counts),
        iterations_done=done,
        iterations=total,
        # What is left of a search's trials so far says little: others will follow.
        eta=None if search is not None else eta_of(state, group.group_id),
        expected=None if search is None else search.trials,
    )


def eta_of(state: EngineState, group_id: str) -> float | None:
    """Predicted seconds until a group has ended: its longest trial or its work over all devices, if that is more."""
    estimates = state.estimates
    trials = [state.trials[trial_id] for trial_id in state.groups[group_id].trial_ids]
    unended = [trial for trial in trials if not trial.state.ended]
    if not unended:
        return 0.0
    if not state.occupancy or not any(estimates.is_measured(trial) for trial in unended):
        return None
    longest = max(estimates.seconds_left(trial) for trial in unended)
    return max(longest, sum(estimates.height(trial) for trial in unended) / len(state.occupancy))
