"""Cohorts: trials of one profile key are parted by their configs where their seconds or bytes differ.

A cohort is a profile key of its own, "Net [batch_size > 96]": overheads, packing and widening are measured for it, and
are those of the whole key until then. What a trial takes is predicted from its config before its first iteration
(:mod:`fluid.measure.cohorts.tree`).

What it gains (``benchmarks/predict.py``): makespans of 1.00 to 1.11 of those with known runtimes, without it 1.03 to
1.17, in simulation; no real sweep has shown a gain yet.
"""

from __future__ import annotations

import math
from functools import lru_cache

from msgspec import structs

from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.measuring import Measuring
from fluid.engine.events import IterationDone
from fluid.engine.placing.allocations import Allocations
from fluid.engine.policy import Policy
from fluid.engine.records import TrialRecord
from fluid.measure.cohorts.tree import CohortTree, Prediction
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed

#: Trials are predicted anew once something was learnt from one in so many of them: each prediction takes some tens of
#: microseconds.
TRIALS_PREDICTED = 20
#: Predictions are rounded to steps of this share: planners see most trials of a long queue as alike.
PREDICTION_STEP = 0.05
#: A prediction from all trials of a key is used if its logarithm differs by so much from what is known of the key.
WORTH_PREDICTING = 0.2
#: So many trials must have been learnt from for that: of a few, often only the first iteration is known.
LEAST_TO_PREDICT = 8


class Cohorts(Policy):
    """Learns from trials what others will take, and keeps each trial under its cohort's profile key.

    Trials that can be fused keep theirs, which says their shape; they are predicted all the same.

    Args:
        profile: has the trees of all profile keys.
        estimates: are told which key a cohort is of.
        allocations: are brought up to date with the estimates.
        measuring: is told of cohorts that are new, so that the queue is planned again.
    """

    def __init__(self, profile: Profile, estimates: Estimates, allocations: Allocations, measuring: Measuring) -> None:
        self._profile = profile
        self._estimates = estimates
        self._allocations = allocations
        self._measuring = measuring
        #: submitted profile key -> row -> trial, of those that have not ended, or that had not when it was last looked.
        self._trials: dict[str, dict[int, TrialRecord]] = {}
        #: row -> the profile key with which it was submitted, of those that have another now, or may get one.
        self._submitted: dict[int, str] = {}
        #: submitted profile key -> trials learnt from since trials were last predicted, of keys whose tree has changed.
        self._due: dict[str, int] = {}

    def submitted(self, trial: TrialRecord) -> None:
        """Predicts a new trial; to be called before it gets a fusion group."""
        if (key := self._submitted_key(trial)) is None:
            return
        if trial.spec.fusible:
            self._submitted[trial.row] = key
        self._trials.setdefault(key, {})[trial.row] = trial
        tree = self._profile.cohorts.get(key)
        if tree is not None:
            self._predict(trial, key, tree)

    def _submitted_key(self, trial: TrialRecord) -> str | None:
        """The profile key with which a trial was submitted; ``None`` if nothing is learnt from it."""
        if not self._profile.finds_cohorts or not trial.spec.config:
            return None
        return self._submitted.get(trial.row, trial.spec.profile_key)

    def forgotten(self, trial: TrialRecord) -> None:
        """Drops a trial that was forgotten."""
        key = self._submitted_key(trial)
        self._submitted.pop(trial.row, None)
        if key is not None:
            self._trials[key].pop(trial.row, None)

    def extended(self, trial: TrialRecord) -> None:
        """Takes it that a trial goes on after its end."""
        key = self._submitted_key(trial)
        if key is not None:
            self._trials[key][trial.row] = trial

    def iterated(self, trial: TrialRecord, event: IterationDone, observed: int) -> None:
        """Learns from an iteration, or a run of several, after the profile has.

        A trial may run no more than one iteration, which is not observed as it may load or compile something. If it did
        not start colder than others like it, and alone on its device, it is better than nothing.

        Args:
            trial: the trial.
            event: its iterations.
            observed: iterations from which the trial's pace follows, 0 or all.
        """
        key = self._submitted_key(trial)
        if key is None:
            return
        # What a row of a pack needs says nothing of its config: all rows of a pack are alike.
        pace, seconds, memory = trial.pace, event.typical_seconds, event.memory if event.rows == 1 else None
        if pace.observed.bit_length() > (pace.observed - observed).bit_length():  # the first, second, fourth, ...
            known = pace.seconds
        elif not observed and pace.observed == 0 and not trial.starts_cold and self._is_alone(trial):
            known = seconds * self._estimates.speed_held(trial)
        else:
            known = None
        grown = memory is not None and pace.grow_need(memory)
        if grown:
            self._allocations.update_need(trial)
        if known is None and not grown:
            return
        tree = self._profile.cohorts.setdefault(key, CohortTree())
        if tree.learn(trial.trial_id, trial.spec.config, seconds=known or None, need=pace.need if grown else None):
            self._due.setdefault(key, 0)
        if key in self._due:
            self._due[key] += 1

    def _is_alone(self, trial: TrialRecord) -> bool:
        is_narrow = len(trial.placement.lanes) == 1 and trial.placement.move is None
        return is_narrow and not trial.spec.gang and self._estimates.co_residents(trial) == 1

    @property
    def wants_planning(self) -> bool:
        """Whether trials are to be predicted anew."""
        for key, learnt in self._due.items():  # noqa: SIM110  Asked at every event.
            if learnt * TRIALS_PREDICTED >= len(self._trials[key]):
                return True
        return False

    def plan_anew(self) -> bool:
        """Predicts anew the trials of keys of which enough was learnt for their number; returns whether that matters.

        It does if a trial has another cohort now, or another prediction.
        """
        matters = False
        for key, learnt in list(self._due.items()):
            trials = self._trials[key]
            if learnt * TRIALS_PREDICTED < len(trials):
                continue
            del self._due[key]
            tree = self._profile.cohorts[key]
            left = self._trials[key] = {row: trial for row, trial in trials.items() if not trial.state.ended}
            changed = [trial for trial in left.values() if self._predict(trial, key, tree)]
            for estimate in {id(each): each for each in map(self._estimates.of_key, changed)}.values():
                self._measuring.estimate_changed(estimate)
            matters |= bool(changed)
        return matters

    def _predict(self, trial: TrialRecord, key: str, tree: CohortTree) -> bool:
        """Predicts a trial; returns whether that has changed, or its cohort has."""
        prediction, pace = tree.predict(trial.spec.config), trial.pace
        before = trial.spec.profile_key, pace.predicted, pace.predicted_need
        pace.predict(self._seconds(key, tree, prediction), prediction.sigma, self._need(key, prediction))
        is_fused = trial.spec.fusible and trial.spec.devices is None and self._estimates.fuses
        name = f"{key} [{prediction.cohort}]" if prediction.cohort else key
        if name != trial.spec.profile_key and not is_fused:
            if name != key:
                self._begin(name, key, tree, prediction.cohort)
            self._submitted[trial.row] = key
            trial.spec = structs.replace(trial.spec, profile_key=name)
        if before == (trial.spec.profile_key, pace.predicted, pace.predicted_need):
            return False
        self._allocations.rekey(trial)
        return True

    def _begin(self, name: str, key: str, tree: CohortTree, cohort: str) -> None:
        """Lets a cohort's measurements begin with those of its trials, and its key's overheads."""
        if self._estimates.mark_cohort(name, key):
            speeds = self._estimates.speeds_of(key)
            self._profile.part(key, name, tree.seconds_of(cohort), tree.need_of(cohort), speeds)

    def _seconds(self, key: str, tree: CohortTree, prediction: Prediction) -> float | None:
        """The predicted seconds, in steps, as planners should see most trials as alike; ``None`` for the key's."""
        seconds = prediction.seconds
        if seconds is None or seconds <= 0.0:
            return None
        if not prediction.cohort:
            usual = self._estimates.pace_of_key(key)
            is_known = usual is not None and len(tree) < LEAST_TO_PREDICT
            if is_known or (usual is not None and abs(math.log(seconds / usual)) < WORTH_PREDICTING):
                return None
        return _seconds_after(round(math.log(seconds) / math.log1p(PREDICTION_STEP)))

    def _need(self, key: str, prediction: Prediction) -> MemoryNeed | None:
        """The predicted need, rounded up in steps; ``None`` where the key's serves."""
        need, step = prediction.need, math.log1p(PREDICTION_STEP)
        if need is None or need.peak_bytes <= 0.0:
            return None
        if not prediction.cohort:
            known = self._estimates.most_need_of(key)
            if known is None or need.peak_bytes <= math.exp(WORTH_PREDICTING) * known.peak_bytes:
                return None
        parts = [
            math.exp(math.ceil(math.log(each) / step) * step) if each > 0.0 else 0.0
            for each in (need.persistent_bytes, need.ephemeral_bytes)
        ]
        return MemoryNeed(*parts)


@lru_cache(1024)
def _seconds_after(steps: int) -> float:
    """The seconds that so many steps stand for; one object for all trials of which these are predicted."""
    return math.exp(steps * math.log1p(PREDICTION_STEP))
