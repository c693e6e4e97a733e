"""Tune's trials on Fluid's engine: submitted as far as Tune's next decision, extended, parked, brought back, let go.

All of it happens in the controller's thread, in its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from fluid._clock import MonotonicClock
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.budgets import Budgets
from fluid.integrations.ray_tune.decisions import had_run_its_course
from fluid.integrations.ray_tune.elastic_lane_trial import lane_trial_for
from fluid.integrations.ray_tune.lane_trial import JOB, RESULT, Job, LaneTrial
from fluid.integrations.ray_tune.private_api import (
    TrackedActor,
    Trial,
    arguments_of,
    asks_for_resources,
    goal_of,
    session_path_of,
)
from fluid.integrations.ray_tune.serialization import ShippedTrainable, Surroundings, pack
from fluid.integrations.ray_tune.tune_trial import Stage, TuneTrial, path_of
from fluid.session.handle import TrialGroupHandle
from fluid.session.results import TrialListener
from fluid.trialgroup import Shown, TrialGroup
from fluid.trialgroup import Trial as FluidTrial

#: Longest that trials added one per turn are gathered, in seconds, to be planned together.
_GATHERING_S = 0.02


class TrialSubmission:
    """The trials of one sweep, which are one TrialGroup.

    Args:
        executor: runs them.
        controller: Tune's.
        scheduler: the user's, which the controller asks.
        concurrency: most trials under way at once; ``None`` for as many as the controller adds.
        mode: whether the sweep's metric is to get small or large, if Tune was told.
        listener: told by Fluid of what trials do.

    Attributes:
        broken: whether the executor is gone.
    """

    def __init__(
        self,
        executor: FluidExecutor,
        controller: Any,
        scheduler: Any,
        concurrency: int | None,
        mode: str | None,
        listener: TrialListener,
    ) -> None:
        self.broken = False
        self._executor = executor
        self._controller = controller
        self._scheduler = scheduler
        self._concurrency = concurrency
        self._mode = mode
        self._listener = listener
        self._budgets = Budgets(controller, scheduler)
        self._clock = MonotonicClock()
        self._surroundings = Surroundings.here()
        self._classes: dict[type, type[LaneTrial]] = {}
        self._incarnations: dict[str, int] = {}
        #: Of the sweep's group, once there is a trial.
        self._handle: TrialGroupHandle | None = None
        self._by_id: dict[str, TuneTrial] = {}
        #: Added, and not submitted yet.
        self._new: deque[TuneTrial] = deque()
        self._added = 0
        self._gathering_since = 0.0
        self._under_way = 0
        #: Removed, and not parked or stopped yet: the controller sets the trial's status only after it has removed it.
        self._removed: list[TuneTrial] = []
        #: Paused trials whose instance is kept, by Tune's id.
        self._parked: dict[str, TuneTrial] = {}
        #: Trials that were told to stop, by their id in Fluid, to be forgotten when they have.
        self._leaving: dict[str, TrialGroupHandle] = {}

    def find(self, trial_id: str) -> TuneTrial | None:
        """The trial of that id in Fluid; ``None`` if it was let go."""
        return self._by_id.get(trial_id)

    # -- submitting ----------------------------------------------------------------------------------------

    def add(self, actor: TrackedActor, trial: Trial, arguments: Mapping[str, Any]) -> TuneTrial:
        """Takes in a trial that the controller wants to run."""
        kept = self._parked.pop(trial.trial_id, None)
        if kept is not None and kept.can_go_on_as(trial):
            hosted = kept
            hosted.actor, hosted.stage = actor, Stage.NEW
            hosted.going_on_from = path_of(trial.latest_checkpoint_result)
        else:
            if kept is not None:
                self._drop(kept)
            hosted = self._fresh(actor, trial)
        hosted.arguments = arguments
        if not self._new:
            self._gathering_since = self._clock.now()
        self._new.append(hosted)
        self._added += 1
        return hosted

    def gather(self) -> bool:
        """Submits what was added, once the controller adds no more; returns whether it may still."""
        added, self._added = self._added, 0
        if not self._new:
            return False
        if added and self._clock.now() - self._gathering_since < _GATHERING_S:
            return True
        self._submit()
        return False

    def _fresh(self, actor: TrackedActor, trial: Trial) -> TuneTrial:
        number = self._incarnations.get(trial.trial_id, 0)
        self._incarnations[trial.trial_id] = number + 1
        trial_id = f"{trial.trial_id}.{number}" if number else trial.trial_id
        hosted = TuneTrial(actor, trial, trial_id, config=trial.config)
        hosted.go_on_from(trial.latest_checkpoint_result)
        return hosted

    def _submit(self) -> None:
        """Submits what was added, as far as there is room."""
        batch: list[TuneTrial] = []
        while self._new and (self._concurrency is None or self._under_way + len(batch) < self._concurrency):
            hosted = self._new.popleft()
            if hosted.stage is Stage.NEW:
                batch.append(hosted)
        for hosted in batch:
            hosted.stage, hosted.placed = Stage.WAITING, True
            self._under_way += 1
        fresh = [hosted for hosted in batch if not (hosted.submitted and self._resume(hosted))]
        if fresh:
            self._submit_fresh(fresh)

    def _resume(self, hosted: TuneTrial) -> bool:
        """Lets a parked trial go on where it is; returns whether it could."""
        try:
            self.extend(hosted, resumed=True)
        except InvalidFieldError:  # it could not be saved, and had to make room for others
            self._forget(hosted, "PAUSED")
            again = self._fresh(hosted.actor, hosted.trial)
            hosted.begin_again(again.trial_id, hosted.trial.latest_checkpoint_result)
            return False
        return True

    def _submit_fresh(self, fresh: list[TuneTrial]) -> None:
        trials = []
        for hosted in fresh:
            trials.append(self._trial_of(hosted))
            self._by_id[hosted.trial_id] = hosted
            hosted.arguments = None
        if self._handle is None:
            name = fresh[0].trial.storage.experiment_dir_name
            goal = goal_of(self._controller, self._scheduler, self._mode)
            group = TrialGroup(trials, name=name, search=goal)
            self._handle = self._executor.submit_trialgroup(group, listener=self._listener)
        else:
            self._handle.add(*trials)
        for hosted in fresh:
            hosted.handle = self._handle

    def _trial_of(self, hosted: TuneTrial) -> FluidTrial:
        """What is submitted, with a budget up to the next decision."""
        grant = self._budgets.grant(hosted.trial, hosted.iteration)
        hosted.take(grant)
        job = Job(hosted.arguments, grant.saves, session_path_of(hosted.arguments["storage"]), hosted.restore_from)
        return FluidTrial(
            self._lane_trial(hosted.trial),
            {JOB: pack(job)},
            budget=grant.iterations,
            trial_id=hosted.trial_id,
            retry_errors=False,
            max_width=1 if asks_for_resources(hosted.trial) else None,
            shown=Shown(hosted.trial.trial_id, hosted.trial.config, hosted.first, RESULT),
            follow_up_iterations=grant.follow_up_iterations,
        )

    def _lane_trial(self, trial: Trial) -> type[LaneTrial]:
        trainable = trial.get_trainable_cls()
        if trainable not in self._classes:
            self._classes[trainable] = lane_trial_for(trainable, ShippedTrainable(trainable, self._surroundings))
        return self._classes[trainable]

    # -- going on ------------------------------------------------------------------------------------------

    def extend(self, hosted: TuneTrial, resumed: bool = False) -> None:
        """Lets a trial go on to the next decision."""
        grant = self._budgets.grant(hosted.trial, hosted.iteration + len(hosted.results))
        if resumed:
            hosted.handle.call(hosted.trial_id, "go_on", grant.saves)
        elif grant.saves != hosted.saves:
            hosted.handle.call(hosted.trial_id, "plan", grant.saves)
        hosted.take(grant)
        hosted.handle.extend(hosted.trial_id, grant.iterations, follow_up_iterations=grant.follow_up_iterations)

    def host_again(self, hosted: TuneTrial, checkpoint: Any) -> None:
        """Begins anew from a checkpoint that the trial was given after it had been added."""
        self._forget(hosted, "PAUSED")
        hosted.discard_results()
        hosted.begin_again(self._fresh(hosted.actor, hosted.trial).trial_id, checkpoint)
        hosted.arguments = arguments_of(hosted.trial)
        self._submit_fresh([hosted])

    def note_end(self, trial_id: str, failure: Failure | None) -> TuneTrial | None:
        """Takes note that a trial runs no further for now; returns it if the controller may wait for it."""
        hosted = self._by_id.get(trial_id)
        if hosted is None:
            self._forget_ended(trial_id)
        if hosted is None or hosted.stage is Stage.REMOVED:
            return None
        hosted.ended, hosted.failure = True, failure
        if hosted.exhausted:
            self._budgets.ended_by_itself(hosted.trial, hosted.first + hosted.received)
        elif failure is None and hosted.open_ended:
            self.extend(hosted)
        return hosted

    # -- letting go ----------------------------------------------------------------------------------------

    def remove(self, hosted: TuneTrial) -> None:
        """Lets go of a trial, once its status says how."""
        hosted.stage = Stage.REMOVED
        self._removed.append(hosted)

    def settle_removed(self) -> None:
        """Parks trials that were paused, and stops those that were not."""
        removed, self._removed = self._removed, []
        for hosted in removed:
            self._free_place(hosted)
            if hosted.trial.status == Trial.PAUSED and hosted.can_be_kept():
                self._parked[hosted.trial.trial_id] = hosted
            else:
                self._drop(hosted)
        for trial_id in [key for key, kept in self._parked.items() if kept.trial.is_finished()]:
            self._drop(self._parked.pop(trial_id))

    def close(self, others: Iterable[TuneTrial]) -> None:
        """Lets go of every trial, and of others that were not removed."""
        for hosted in [*others, *self._parked.values(), *self._removed]:
            self._drop(hosted)
        self._parked.clear()
        self._removed.clear()
        self._new.clear()

    def _free_place(self, hosted: TuneTrial) -> None:
        if hosted.placed:
            hosted.placed = False
            self._under_way -= 1
            if self._new and self._concurrency is not None:
                self._submit()

    def _drop(self, hosted: TuneTrial) -> None:
        hosted.discard_results()
        hosted.discard_offered()
        hosted.stage = Stage.GONE
        self._forget(hosted, self._outcome(hosted))

    def _outcome(self, hosted: TuneTrial) -> str | None:
        """What Tune says of a trial, in Fluid's words; ``None`` if it was broken off."""
        trial = hosted.trial
        if trial.status == Trial.TERMINATED:
            at_end = (
                hosted.exhausted
                or hosted.finished
                or had_run_its_course(self._controller, self._scheduler, trial, hosted.iteration)
            )
            return "DONE" if at_end else "STOPPED"
        if trial.status == Trial.ERROR:
            return "FAILED"
        return "PAUSED" if trial.status in (Trial.PAUSED, Trial.PENDING) else None

    def _forget(self, hosted: TuneTrial, outcome: str | None) -> None:
        self._by_id.pop(hosted.trial_id, None)
        if hosted.submitted and not self.broken:
            self._leaving[hosted.trial_id] = hosted.handle
            hosted.handle.stop(hosted.trial_id, outcome)
            if hosted.ended:
                self._forget_ended(hosted.trial_id)
        hosted.handle = None

    def _forget_ended(self, trial_id: str) -> None:
        handle = self._leaving.pop(trial_id, None)
        if handle is not None:
            handle.forget(trial_id)
