"""The status of a session, as data: what the live view shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fluid.engine.state import EngineState
from fluid.engine.view import GroupView
from fluid.trialgroup import Search, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """One TrialGroup.

    Attributes:
        name: the group's name.
        trials: number of trials by state, or by the outcome that the submitter gave; forgotten ones are included.
        iterations_done, iterations: done and in all, over all trials; iterations that stopped and failed trials did not
            run are left out.
        eta: predicted seconds until all its trials have ended; ``None`` if no trial was measured, or one hangs.
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
        asked: number of devices that were asked for and have not come.
        silent: trials that have given no result for far longer than usual, and for how many seconds, the longest first.
        alpha, packing: measured packing overhead and c by profile key.
    """

    at: float
    groups: tuple[GroupStatus, ...]
    devices: tuple[DeviceStatus, ...]
    alpha: dict[str, float]
    packing: dict[str, int]
    silent: tuple[tuple[str, float], ...] = ()
    asked: int = 0


def status_of(
    state: EngineState,
    groups: Mapping[str, tuple[str, Search | None]],
    at: float,
    *,
    began: float = 0.0,
    asked: int = 0,
) -> Status:
    """Reads a status off the engine.

    Args:
        state: the engine.
        groups: name and search of each group, by id.
        at: seconds since the session began.
        began: when that was, seconds on the clock of the events.
        asked: number of devices that were asked for and have not come.
    """
    now = began + at
    view, keys = state.view(), state.profile.keys()
    return Status(
        at=at,
        groups=tuple(
            _group_status(state, group, *groups.get(group.group_id, (group.group_id, None)), now)
            for group in view.groups
        ),
        devices=tuple(
            DeviceStatus(
                device_id=seen.device.index,
                kind=seen.device.kind,
                host=seen.device.host,
                residents=seen.residents,
                lanes=seen.lanes,
            )
            for seen in view.devices
        ),
        alpha={key: state.profile.alpha(key) for key in keys},
        packing={key: state.profile.measured_packing(key) for key in keys},
        asked=asked,
        silent=tuple(sorted(state.silent(now), key=lambda trial: -trial[1])),
    )


def _group_status(state: EngineState, group: GroupView, name: str, search: Search | None, now: float) -> GroupStatus:
    counts, done, total = Counter(group.past), group.past_iterations, group.past_iterations
    for trial in group.trials:
        shown = trial.state
        if trial.state.ended and trial.outcome is not None:
            shown = trial.outcome
        elif trial.state is TrialState.DONE and search is not None:
            shown = TrialState.PAUSED  # Until its search algorithm has decided.
        if not (trial.state.ended and trial.outcome is TrialState.PAUSED):  # It comes back as another trial.
            counts[shown.value] += 1
        done += min(trial.done, trial.budget)
        stopped = trial.state is TrialState.STOPPED or trial.state is TrialState.FAILED
        total += trial.done if stopped else trial.budget
    return GroupStatus(
        name=name,
        trials=dict(counts),
        iterations_done=done,
        iterations=total,
        # What is left of a search's trials so far says little: others will follow.
        eta=None if search is not None else state.seconds_left(group.group_id, now),
        expected=None if search is None else search.trials,
    )
