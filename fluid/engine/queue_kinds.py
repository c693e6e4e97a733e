"""Queued trials by kinds, so that planning a long queue again costs what its kinds cost, not what its trials do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

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


def _plans_as(trial: TrialRecord) -> Hashable:
    """Equal for trials that are alike to planners: only one that has run has a pace, and a state, of its own."""
    if trial.pace.seconds is not None or trial.residence.lane is not None:
        return trial.row
    spec, progress, limits = trial.spec, trial.progress, trial.limits
    left = progress.budget - progress.done
    caps = limits.packing_cap, limits.width_cap, trial.constraint
    return spec.profile_key, left, spec.priority, spec.max_width, spec.memory, caps
