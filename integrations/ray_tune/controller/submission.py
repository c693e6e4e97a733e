"""Submits Tune's trials to the engine up to Tune's next decision, extends them, keeps paused ones, stops the others.

All of it runs in the controller's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from fluid.engine.events import Failure
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.inbox import EventInbox
from fluid.integrations.ray_tune.controller.decisions import Budgets, Concurrency, had_run_its_course
from fluid.integrations.ray_tune.controller.interruption import interruption_of
from fluid.integrations.ray_tune.controller.memory_checkpoints import MemoryCheckpoints
from fluid.integrations.ray_tune.controller.tune_trial import ActorStage, TuneTrial, checkpoint_path
from fluid.integrations.ray_tune.lane.elastic_lane_trial import lane_trial_for
from fluid.integrations.ray_tune.lane.lane_trial import RESULT, SPEC, LaneTrial, LaneTrialSpec
from fluid.integrations.ray_tune.private_api import (
    TRAINING_ITERATION,
    FunctionTrainable,
    TrackedActor,
    Trial,
    arguments_of,
    search_of,
    seconds_left_of,
    session_path_of,
)
from fluid.integrations.ray_tune.resources.offer import ResourceRequests
from fluid.integrations.ray_tune.resources.requests import refusal
from fluid.integrations.ray_tune.schedulers.ranks import rung_score_of
from fluid.integrations.ray_tune.schedulers.shapes import shape_of
from fluid.integrations.ray_tune.serialization import ActorEnvironment, ShippedTrainable, pickle_arguments
from fluid.integrations.ray_tune.train.inner_training import DevicesWanted
from fluid.integrations.ray_tune.train.needs import InnerNeeds
from fluid.integrations.ray_tune.virtual_time import clock_of, epoch_of
from fluid.results.run_files import TRIALS, JsonLines
from fluid.session.handle import TrialGroupHandle
from fluid.trainables.trainable import is_elastic, is_fusible
from fluid.trialgroup import Search, Shown, Submission, TrialGroup, TrialState
from fluid.trialgroup import Trial as FluidTrial

# -- trial ids -----------------------------------------------------------------------------------
#
# Ids of Tune's trials in Fluid: Tune's own, with a number from the second submission of a trial on.
#
# A session takes each id once. A sweep that is restored in the executor in which it was begun has the trials of
# before.


class TrialIds:
    """Makes ids that no trial of an executor has had; shared by all sweeps of the executor.

    Args:
        executor: its run folder says which ids sessions before have taken.
    """

    _of_executor: ClassVar[WeakKeyDictionary[FluidExecutor, TrialIds]] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, executor: FluidExecutor) -> None:
        entries = (line.entry for line in JsonLines(executor.run_dir / TRIALS).there())
        self._taken = frozenset(str(entry["trial"]) for entry in entries if "trial" in entry)
        #: Number of ids made for each of Tune's trials.
        self._made: dict[str, int] = {}

    @classmethod
    def of(cls, executor: FluidExecutor) -> TrialIds:
        """Returns the ids of an executor."""
        with cls._lock:
            if executor not in cls._of_executor:
                cls._of_executor[executor] = cls(executor)
            return cls._of_executor[executor]

    def new(self, trial_id: str) -> str:
        """Returns an id for a further submission of one of Tune's trials."""
        while True:
            with self._lock:
                number = self._made.get(trial_id, 0)
                self._made[trial_id] = number + 1
            made = f"{trial_id}.{number}" if number else str(trial_id)
            if made not in self._taken:
                return made


# -- sweep search --------------------------------------------------------------------------------
#
# What reports, forecasts, the live view and the stores of checkpoints are told of a sweep of Tune.


def sweep_search(controller: Any, scheduler: Any, mode: str | None, under_way: int | None) -> Search:
    """Returns what a sweep optimizes, and its shape.

    Args:
        controller: Tune's.
        scheduler: the user's.
        mode: the mode that Tune passed to the scheduler; ``None`` if the scheduler was made with one, or has none.
        under_way: most trials under way at once; ``None`` for no limit.
    """
    search = search_of(controller, scheduler, mode)
    shape = shape_of(controller, scheduler, trials=search.trials, under_way=under_way)
    return replace(search, shape=shape, time_budget_s=seconds_left_of(controller))


def tell_rank(controller: Any, scheduler: Any, tune_trial: TuneTrial) -> None:
    """Tells the engine how a trial ranks at the rung that it has come to, if its scheduler compares it with others."""
    found = rung_score_of(controller, scheduler, tune_trial.trial)
    if found is not None and found != tune_trial.ranked:
        tune_trial.ranked = found
        tune_trial.handle.rank(tune_trial.trial_id, *found)


# -- outcomes ------------------------------------------------------------------------------------
#
# How a trial of Tune has ended, in Fluid's states.


def outcome_of(tune_trial: TuneTrial, executor: FluidExecutor, controller: Any, scheduler: Any) -> str | None:
    """Returns Fluid's state for Tune's status of a trial; ``None`` if an error has ended the sweep.

    Args:
        tune_trial: the trial.
        executor: runs it.
        controller: Tune's.
        scheduler: the user's.
    """
    trial = tune_trial.trial
    interruption = interruption_of(executor)
    if interruption is not None and trial.trial_id in interruption.cut_off:
        return TrialState.PAUSED.value  # It goes on in a restored sweep, though Tune has set TERMINATED.
    if trial.status == Trial.TERMINATED:
        at_end = (
            tune_trial.finished_early
            or tune_trial.reported_done
            or had_run_its_course(controller, scheduler, trial, tune_trial.iteration)
        )
        return TrialState.DONE.value if at_end else TrialState.STOPPED.value
    if trial.status == Trial.ERROR:
        return TrialState.FAILED.value
    return TrialState.PAUSED.value if trial.status in (Trial.PAUSED, Trial.PENDING) else None


# -- submission ----------------------------------------------------------------------------------


#: The fields of a trial that come from Tune's request.
_NEEDED = ("devices", "memory", "requires")
#: Longest that trials added one per turn are gathered, in seconds, to be planned together.
_GATHERING_S = 0.02


class TrialSubmission:
    """The trials of one sweep, which form one TrialGroup.

    Args:
        executor: runs them.
        controller: Tune's.
        scheduler: the user's.
        concurrency: most trials under way at once; ``None`` for as many as the controller adds.
        mode: ``"min"`` or ``"max"`` of the sweep's metric; ``None`` if Tune was not told.
        isolation: of the trials, as for a trial of Fluid.
        listener: receives the group's events.
        memory: the checkpoints that lanes have written to host memory.

    Attributes:
        is_broken: whether the executor is closed.
    """

    def __init__(
        self,
        *,
        executor: FluidExecutor,
        controller: Any,
        scheduler: Any,
        concurrency: Concurrency,
        mode: str | None,
        isolation: str | None,
        listener: EventInbox,
        memory: MemoryCheckpoints,
    ) -> None:
        self.is_broken = False
        self._executor = executor
        self._controller = controller
        self._scheduler = scheduler
        self._concurrency = concurrency
        self._mode = mode
        self._isolation = isolation
        self._listener = listener
        self._memory = memory
        self._budgets = Budgets(controller, scheduler)
        self._inner_needs = InnerNeeds(executor)
        self._clock = clock_of(executor)
        self._epoch = epoch_of(executor)
        self._environment = ActorEnvironment.of_driver()
        self._requests = ResourceRequests(executor)
        #: Tune's classes by name; to be asked for one takes Tune a millisecond.
        self._trainables: dict[str, type] = {}
        self._lane_trials: dict[type, type[LaneTrial]] = {}
        self._ids = TrialIds.of(executor)
        #: Of the sweep's group, once there is a trial.
        self._handle: TrialGroupHandle | None = None
        self._by_id: dict[str, TuneTrial] = {}
        #: Added and not submitted yet.
        self._new: deque[TuneTrial] = deque()
        self._added = 0
        self._gathering_since = 0.0
        self._under_way = 0
        #: Dropped and not cleaned up yet, of those whose requests limit how many run at once.
        self._leaving: list[TuneTrial] = []
        #: Removed and not processed yet: the controller sets the trial's status only after it has removed it.
        self._removed: list[TuneTrial] = []
        #: Paused trials that stay resident, by Tune's id.
        self._paused: dict[str, TuneTrial] = {}
        #: Stopped trials that the engine has not ended yet, by their id in Fluid; they are forgotten when it has.
        self._stopping: dict[str, TrialGroupHandle] = {}

    def find(self, trial_id: str) -> TuneTrial | None:
        """Returns the trial of an id in Fluid; ``None`` if it was stopped."""
        return self._by_id.get(trial_id)

    # -- submitting ----------------------------------------------------------------------------------------

    def add(self, actor: TrackedActor, trial: Trial, arguments: Mapping[str, Any]) -> TuneTrial:
        """Adds a trial that the controller wants to run."""
        resident = self._paused.pop(trial.trial_id, None)
        if resident is not None and resident.can_resume(trial):
            tune_trial = resident
            tune_trial.actor, tune_trial.stage = actor, ActorStage.NEW
            tune_trial.start_path = checkpoint_path(trial.latest_checkpoint_result)
        else:
            if resident is not None:
                self._drop(resident)
            trial_id = self._ids.new(trial.trial_id)
            tune_trial = TuneTrial(
                actor=actor,
                trial=trial,
                trial_id=trial_id,
                config=trial.config,
                resources=trial.placement_group_factory,
            )
            tune_trial.start_from(trial.latest_checkpoint_result)
        tune_trial.arguments = arguments
        if not self._new:
            self._gathering_since = self._clock.now()
        self._new.append(tune_trial)
        self._added += 1
        return tune_trial

    def submit_gathered(self) -> bool:
        """Submits the added trials once the controller adds no more; returns whether it waits for that."""
        added, self._added = self._added, 0
        if not self._new:
            return False
        if added and self._clock.now() - self._gathering_since < _GATHERING_S:
            return True
        self._submit()
        return False

    def _submit(self) -> None:
        """Submits the added trials up to the limit on trials under way."""
        batch: list[TuneTrial] = []
        while self._new and self._has_room(batch):
            tune_trial = self._new.popleft()
            if tune_trial.stage is ActorStage.NEW:
                batch.append(tune_trial)
        for tune_trial in batch:
            tune_trial.stage, tune_trial.is_counted = ActorStage.STARTING, True
            self._under_way += 1
        fresh = [tune_trial for tune_trial in batch if not (tune_trial.is_submitted and self._resume(tune_trial))]
        if fresh:
            self._submit_fresh(fresh)

    def _has_room(self, batch: Sequence[TuneTrial]) -> bool:
        """Whether the next trial may be under way beside those that are, and those of a batch."""
        limit = self._limit()
        if limit is not None and self._under_way + len(batch) >= limit:
            return False
        if self._concurrency.is_given:  # Which the user means, whatever the trials request.
            return True
        others = chain((other for other in self._by_id.values() if other.is_counted), self._leaving, batch)
        return self._requests.has_room(self._new[0].trial, (other.trial for other in others))

    def _limit(self) -> int | None:
        """Most trials under way at once; ``None`` for no limit."""
        trial = self._new[0].trial
        most = self._concurrency.limit(self._executor.max_devices, fusible=is_fusible(self._lane_trial(trial)))
        limits = (most, self._inner_needs.most_at_once(trial))
        return min((limit for limit in limits if limit is not None), default=None)

    def _resume(self, tune_trial: TuneTrial) -> bool:
        """Extends a trial that was paused; returns whether it still could be."""
        try:
            self.extend(tune_trial, resumed=True)
        except InvalidFieldError:  # It was stopped or has failed meanwhile.
            self._stop(tune_trial, TrialState.PAUSED.value)
            tune_trial.reset(self._ids.new(tune_trial.trial.trial_id), tune_trial.trial.latest_checkpoint_result)
            return False
        return True

    def _submit_fresh(self, fresh: list[TuneTrial]) -> None:
        trials = []
        for tune_trial in fresh:
            trials.append(self._fluid_trial(tune_trial))
            self._by_id[tune_trial.trial_id] = tune_trial
            tune_trial.arguments = None
        try:
            self._hand_in(trials, fresh[0].trial.storage.experiment_dir_name)
        except InvalidFieldError as error:
            for trial, tune_trial in zip(trials, fresh, strict=True):
                if error.field in _NEEDED and getattr(trial, error.field) == error.value:
                    raise refusal(tune_trial.resources.required_resources, error.reason) from error
            raise
        for tune_trial in fresh:
            tune_trial.handle = self._handle

    def _hand_in(self, trials: list[FluidTrial], name: str) -> None:
        if self._handle is None:
            most = self._concurrency.limit(self._executor.max_devices, fusible=False)
            search = sweep_search(self._controller, self._scheduler, self._mode, most)
            group = TrialGroup(trials, name=name, search=search, submission=Submission())
            self._handle = self._executor.submit_trialgroup(group, listener=self._listener)
        else:
            self._handle.add(*trials)

    def _fluid_trial(self, tune_trial: TuneTrial) -> FluidTrial:
        """Returns the trial to submit, with a budget up to the next decision."""
        trial, arguments = tune_trial.trial, tune_trial.arguments
        lane_trial = self._lane_trial(trial)
        needs = self._requests.needs(trial, is_elastic=is_elastic(lane_trial))
        inner = tune_trial.needs_devices or self._inner_needs.devices_of(trial)
        if inner is not None and inner > (needs.devices or 1):
            needs = needs._replace(devices=inner)
        tune_trial.devices = max(1, int(needs.devices or 1))
        tune_trial.trains_within |= inner is not None
        grant = self._budgets.grant(trial, tune_trial.iteration + len(tune_trial.results))
        tune_trial.apply(grant._replace(iterations=tune_trial.repeats + grant.iterations))
        is_function = issubclass(lane_trial.shipped_trainable.trainable, FunctionTrainable)
        tune_trial.reports_checkpoints = is_function and self._epoch is None
        path = session_path_of(arguments["storage"])
        spec = LaneTrialSpec(
            arguments,
            grant.checkpoints,
            path,
            self._memory.find(tune_trial.restore_from),
            tune_trial.devices,
            self._epoch,
            self._memory.are_used,
            trial.stopping_criterion.get(TRAINING_ITERATION),
        )
        return FluidTrial(
            lane_trial,
            {SPEC: pickle_arguments(spec)},
            budget=tune_trial.budget,
            trial_id=tune_trial.trial_id,
            retry_errors=False,
            **needs._asdict(),
            shown=Shown(
                trial_id=trial.trial_id, config=trial.config, iterations=tune_trial.start_iteration, metrics=RESULT
            ),
            follow_up_iterations=grant.follow_up_iterations,
            isolation=self._isolation,
        )

    def _lane_trial(self, trial: Trial) -> type[LaneTrial]:
        trainable = self._trainables.get(trial.trainable_name)
        if trainable is None:
            trainable = self._trainables[trial.trainable_name] = trial.get_trainable_cls()
        if trainable not in self._lane_trials:
            self._lane_trials[trainable] = lane_trial_for(trainable, ShippedTrainable(trainable, self._environment))
        return self._lane_trials[trainable]

    # -- running -------------------------------------------------------------------------------------------

    def extend(self, tune_trial: TuneTrial, resumed: bool = False) -> None:
        """Extends a trial to the next decision."""
        grant = self._budgets.grant(tune_trial.trial, tune_trial.iteration + len(tune_trial.results))
        handle, trial_id = tune_trial.handle, tune_trial.trial_id
        if resumed:
            handle.call(trial_id, "resume", grant.checkpoints)
        elif grant.checkpoints != tune_trial.checkpoints:
            handle.call(trial_id, "set_checkpoints", grant.checkpoints)
        tune_trial.apply(grant)
        tell_rank(self._controller, self._scheduler, tune_trial)
        handle.extend(trial_id, grant.iterations, follow_up_iterations=grant.follow_up_iterations)

    def note_late_save(self, tune_trial: TuneTrial) -> None:
        """Notes that a trial is saved in a state beyond the last result that the controller was given."""
        self._budgets.note_late_save(tune_trial.trial)

    def resubmit(self, tune_trial: TuneTrial, checkpoint: Any) -> None:
        """Submits a trial anew, to start from a checkpoint that the controller chose after it had added the trial."""
        self._stop(tune_trial, TrialState.PAUSED.value)
        tune_trial.discard_results()
        tune_trial.reset(self._ids.new(tune_trial.trial.trial_id), checkpoint)
        tune_trial.arguments = arguments_of(tune_trial.trial)
        self._submit_fresh([tune_trial])

    def record_end(self, trial_id: str, failure: Failure | None) -> TuneTrial | None:
        """Records that the engine runs a trial no further for now; returns it if the controller may wait for it."""
        tune_trial = self._by_id.get(trial_id)
        if tune_trial is None:
            self._forget_stopped(trial_id)
        if tune_trial is None or tune_trial.stage is ActorStage.REMOVED:
            return None
        if tune_trial.starts_anew and failure is None:
            self._start_anew(tune_trial)
            return None
        tune_trial.is_idle, tune_trial.failure = True, failure
        if tune_trial.finished_early:
            self._budgets.record_length(tune_trial.trial, tune_trial.start_iteration + tune_trial.received)
        elif failure is None and tune_trial.open_ended:
            self.extend(tune_trial)
        return tune_trial

    # -- Ray Train within trials -----------------------------------------------------------------------------

    def answer(self, trial_id: str, wanted: DevicesWanted) -> bool:
        """Answers a trial that is about to run Ray Train: whether it has to end, to be started anew.

        Raises:
            FluidError: there are too few devices.
        """
        tune_trial = self._by_id.get(trial_id)
        if tune_trial is None:
            raise FluidError(f"trial {trial_id!r} has ended")
        tune_trial.trains_within = True
        devices = self._inner_needs.answer(tune_trial.trial, tune_trial.devices, wanted)
        if devices is not None:
            tune_trial.needs_devices, tune_trial.starts_anew = devices, True
            self._take_back(tune_trial)
        return tune_trial.starts_anew

    def _take_back(self, first: TuneTrial) -> None:
        """Makes trials that wait in the engine wait here, to be submitted with the devices of a trial like them."""
        waiting = [
            other
            for other in self._by_id.values()
            if other.stage is ActorStage.STARTING and other.trial.trainable_name == first.trial.trainable_name
        ]
        for other in waiting:
            self._stop(other, TrialState.PAUSED.value)
            other.start_anew(self._ids.new(other.trial.trial_id))
            other.arguments = arguments_of(other.trial)
            other.stage, other.is_counted = ActorStage.NEW, False
        self._under_way -= len(waiting)
        self._new.extendleft(reversed(waiting))

    def _start_anew(self, tune_trial: TuneTrial) -> None:
        """Submits a trial that has ended for want of devices with those that it needs."""
        tune_trial.is_idle = True
        self._stop(tune_trial, TrialState.PAUSED.value)
        tune_trial.start_anew(self._ids.new(tune_trial.trial.trial_id))
        tune_trial.arguments = arguments_of(tune_trial.trial)
        self._submit_fresh([tune_trial])

    # -- stopping ------------------------------------------------------------------------------------------

    def remove(self, tune_trial: TuneTrial) -> None:
        """Removes a trial; :meth:`process_removed` keeps or stops it once the controller has set its status."""
        tune_trial.stage = ActorStage.REMOVED
        self._removed.append(tune_trial)

    def process_removed(self) -> None:
        """Keeps removed trials that were paused resident, and stops the others."""
        removed, self._removed = self._removed, []
        for tune_trial in removed:
            stays = tune_trial.trial.status == Trial.PAUSED and tune_trial.can_stay_resident()
            handle = tune_trial.handle
            leaves = not stays and handle is not None and self._requests.limits(tune_trial.trial)
            if not leaves:
                self._uncount(tune_trial)
            if stays:
                tell_rank(self._controller, self._scheduler, tune_trial)
                self._paused[tune_trial.trial.trial_id] = tune_trial
            else:
                self._drop(tune_trial)
            if leaves:
                self._uncount_once_left(tune_trial, handle)
        for trial_id in [key for key, paused in self._paused.items() if paused.trial.is_finished()]:
            self._drop(self._paused.pop(trial_id))

    def close(self, others: Iterable[TuneTrial]) -> None:
        """Stops every trial, and the others given, which were not removed."""
        for tune_trial in [*others, *self._paused.values(), *self._removed]:
            self._drop(tune_trial)
        for gone in (self._paused, self._removed, self._new):
            gone.clear()

    def await_cleanup(self, timeout: float) -> tuple[str, ...]:
        """Waits up to ``timeout`` seconds for the clean-up of stopped trials; returns the ids of the others."""
        return () if self._handle is None or self.is_broken else self._handle.await_cleanup(timeout)

    def cut_off(self, trial_ids: Iterable[str]) -> None:
        """Ends stopped trials that are still in an iteration, by killing their processes: nothing takes the result."""
        for trial_id in trial_ids:
            if trial_id in self._stopping:
                self._stopping[trial_id].stop(trial_id, now=True)

    def _uncount_once_left(self, tune_trial: TuneTrial, handle: Any) -> None:
        """Counts a trial that was stopped until it is cleaned up: until then it has what it requested."""
        if self.is_broken:
            return

        def uncount() -> None:
            self._leaving.remove(tune_trial)
            self._uncount(tune_trial)

        self._leaving.append(tune_trial)
        handle.departure(tune_trial.trial_id).add_done_callback(lambda _: self._listener.post(uncount))

    def _uncount(self, tune_trial: TuneTrial) -> None:
        if tune_trial.is_counted:
            tune_trial.is_counted = False
            self._under_way -= 1
            if self._new and (self._limit() is not None or self._requests.limits(self._new[0].trial)):
                self._submit()

    def _drop(self, tune_trial: TuneTrial) -> None:
        tune_trial.discard_results()
        tune_trial.discard_unclaimed_save()
        tune_trial.stage = ActorStage.DROPPED
        self._stop(tune_trial, outcome_of(tune_trial, self._executor, self._controller, self._scheduler))

    def _stop(self, tune_trial: TuneTrial, outcome: str | None) -> None:
        self._by_id.pop(tune_trial.trial_id, None)
        if tune_trial.is_submitted and not self.is_broken:
            self._stopping[tune_trial.trial_id] = tune_trial.handle
            tune_trial.handle.stop(tune_trial.trial_id, outcome)
            if tune_trial.is_idle:
                self._forget_stopped(tune_trial.trial_id)
        tune_trial.handle = None

    def _forget_stopped(self, trial_id: str) -> None:
        handle = self._stopping.pop(trial_id, None)
        if handle is not None:
            handle.forget(trial_id)
