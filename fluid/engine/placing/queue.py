"""Queued trials by kinds, so that planning a long queue again costs what its kinds cost, not what its trials do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import gt

from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.records import TrialRecord


@dataclass(frozen=True, slots=True)
class PlannedTrials:
    """What was planned of trials, by their positions.

    Attributes:
        order: positions in starting order.
        widths: of a device, or in devices.
        heights: seconds of work left.
        kind_of: equal for trials that are alike to planners (:func:`kinds_of`).
    """

    order: list[int]
    widths: list[float]
    heights: list[float]
    kind_of: list[int]


def share_devices(plan: PlannedTrials, trials: Sequence[TrialRecord], estimates: Estimates) -> PlannedTrials:
    """The plan with devices shared by all trials that may take turns there, though no more gets done that way."""
    planned = zip(trials, plan.widths, strict=True)
    widths = [
        min(width, 1.0 / estimates.packing(trial)) if trial.takes_turns and width <= 1.0 else width
        for trial, width in planned
    ]
    return replace(plan, widths=widths)


class QueueKinds:
    """The trials of the queue as they were last planned all at once; those of a kind got one width.

    Attributes:
        trials: kind -> row -> trial, of those that still wait, in starting order; no empty kinds.
        order: the kinds in starting order; several times each where their trials alternate.
    """

    def __init__(self, trials: Sequence[TrialRecord], plan: PlannedTrials) -> None:
        self._kind_of: dict[int, int] = {}
        self.trials: dict[int, dict[int, TrialRecord]] = {}
        for position in plan.order:
            trial, kind = trials[position], plan.kind_of[position]
            self._kind_of[trial.row] = kind
            self.trials.setdefault(kind, {})[trial.row] = trial
        self.order = [kind for kind, _ in groupby(self._kind_of.values())]

    def remove(self, row: int) -> None:
        """Removes a trial that no longer waits."""
        kind = self._kind_of.pop(row)
        waiting = self.trials[kind]
        del waiting[row]
        if not waiting:
            del self.trials[kind]
        if not self._kind_of:
            self._kind_of.clear()  # An empty dict keeps the room that its members took.


def kinds_of(trials: Sequence[TrialRecord]) -> tuple[list[TrialRecord], list[int]]:
    """The first trial of each kind, and the kind of each trial: an index of these."""
    kinds: dict[Hashable, int] = {}
    first: list[TrialRecord] = []
    kind_of: list[int] = []
    for trial in trials:
        kind = kinds.setdefault(_plans_as(trial), len(first))
        if kind == len(first):
            first.append(trial)
        kind_of.append(kind)
    return first, kind_of


def in_line(trials: Sequence[TrialRecord], order: Sequence[int]) -> bool:
    """Whether trials in this order follow one another as they do now, among those of each owner and priority."""
    if not any(map(gt, order, order[1:])):
        return True
    latest: dict[Hashable, int] = {}
    for position in order:
        trial = trials[position]
        if latest.get(key := (trial.owner, trial.priority), -1) > position:
            return False
        latest[key] = position
    return len(latest) > 1


def placed_as(trial: TrialRecord, estimates: Estimates, occupancy: Occupancy) -> Hashable:
    """Equal for waiting trials that are alike to placement."""
    # They are while they have the same need, which is that of their key, also once it is measured. On the device
    # that keeps its state, a trial fits although others with the same need do not, measured or not yet.
    bounded, unlike = occupancy.memory.is_bounded, len(occupancy.models) > 1
    if trial.pinned or (trial.residence.device is not None and (bounded or estimates.need(trial) is not None)):
        return trial.row
    if trial.limits.avoids is not None:
        return trial.row
    need = trial.spec.memory or trial.pace.expected_need
    kind: Hashable = (need, trial.spec.profile_key) if unlike else need or (trial.spec.profile_key if bounded else None)
    if trial.sharing_group is not None:
        kind = (kind, trial.sharing_group)
    return kind if trial.constraint is None else (kind, trial.constraint)


def _plans_as(trial: TrialRecord) -> Hashable:
    """Equal for trials that are alike to planners: only one that has run has a pace, and a state, of its own."""
    if trial.pace.seconds is not None or trial.residence.lane is not None:
        return trial.row
    spec, progress, limits = trial.spec, trial.progress, trial.limits
    left = progress.budget - progress.done
    caps = limits.packing_cap, limits.width_cap, trial.constraint
    predicted = trial.pace.predicted, trial.pace.predicted_sigma, trial.pace.expected_need
    return spec.profile_key, left, trial.priority, trial.owner, spec.max_width, spec.memory, caps, predicted
