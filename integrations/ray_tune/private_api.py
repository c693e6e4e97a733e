"""Every private name of Ray Tune that Fluid uses, in one place.

They were read in the sources of the releases in :data:`SUPPORTED`. :func:`check` looks for each before the first trial
runs, so that a release that moved one is refused with a clear error instead of failing in the middle of a sweep.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
import ray.tune.utils
from pyarrow import fs as pyarrow_fs
from ray._private import auto_init_hook
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.state import state as ray_state
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.train._internal import session as session_module
from ray.train._internal.checkpoint_manager import _TrainingResult as TrainingResult
from ray.tune.execution.class_cache import DEFAULT_ENV_VARS, ENV_VARS_TO_PROPAGATE
from ray.tune.experiment import Trial
from ray.tune.experiment.trial import _get_trainable_kwargs as arguments_of
from ray.tune.registry import _ParameterRegistry as ParameterRegistry
from ray.tune.result import (
    DONE,
    RESULT_DUPLICATE,
    SHOULD_CHECKPOINT,
    STDERR_FILE,
    STDOUT_FILE,
    TIME_THIS_ITER_S,
    TRAINING_ITERATION,
    TRIAL_INFO,
)
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
)
from ray.tune.stopper import FunctionStopper, MaximumIterationStopper, NoopStopper, TimeoutStopper
from ray.tune.trainable import Trainable
from ray.tune.trainable.function_trainable import FunctionTrainable

from fluid.directions import known_mode
from fluid.errors import FluidError
from fluid.trialgroup import Search

__all__ = [
    "DEFAULT_ENV_VARS",
    "DONE",
    "ENV_VARS_TO_PROPAGATE",
    "RESULT_DUPLICATE",
    "SHOULD_CHECKPOINT",
    "STDERR_FILE",
    "STDOUT_FILE",
    "SUPPORTED",
    "TIME_THIS_ITER_S",
    "TRAINER_MODULE",
    "TRAINING_ITERATION",
    "TRIAL_INFO",
    "Checkpoint",
    "FunctionTrainable",
    "ParameterRegistry",
    "RayActorManager",
    "SweepDates",
    "TrackedActor",
    "Trainable",
    "TrainingResult",
    "Trial",
    "UnsupportedRayError",
    "arguments_of",
    "before_state_is_written",
    "check",
    "check_train",
    "cluster_may_grow",
    "connect_to_cluster",
    "controller_of",
    "donated_path",
    "environment_of_job",
    "give_session_path",
    "is_endless",
    "labels_of",
    "make_quietly",
    "newest_checkpoint_index",
    "requested_for_sweep",
    "saves_when_asked",
    "search_of",
    "session_module",
    "session_path_of",
    "threads_are_of_ray",
    "waits_for_saves",
    "watches_every_result",
]

try:
    from ray.tune import Checkpoint
except ImportError:  # Before Ray 2.43.
    from ray.train import Checkpoint

#: First and last release of Ray whose sources were read.
SUPPORTED = ("2.9", "2.60")

#: Names by owner, as found on an instance.
CONTROLLER = (
    "_actor_manager",
    "_callbacks",
    "_fail_fast",
    "_has_errored",
    "_mark_trial_to_checkpoint",
    "_max_pending_trials",
    "_reuse_actors",
    "_schedule_trial_save",
    "_stopper",
    "_wrapped",
    "get_live_trials",
    "get_trials",
    "search_alg",
    "stop_trial",
    "update_max_pending_trials",
)
MANAGER = (
    "_actor_task_events",
    "_failed_actor_ids",
    "_live_actors_to_ray_actors_resources",
    "_pending_actors_to_attrs",
    "_resource_manager",
    "add_actor",
    "cleanup",
    "clear_actor_task_futures",
    "get_actor_resources",
    "get_live_actors_resources",
    "is_actor_failed",
    "is_actor_started",
    "next",
    "num_live_actors",
    "num_pending_actors",
    "num_total_actors",
    "remove_actor",
    "schedule_actor_task",
    "schedule_actor_tasks",
)
TRACKED_ACTOR = ("_on_error", "_on_start", "_on_stop", "actor_id")
TRIAL = ("checkpoint_at_end", "checkpoint_freq", "get_trainable_cls", "is_finished", "latest_checkpoint_result")
#: Names from which the next decision is read, by scheduler.
SCHEDULERS: dict[type, tuple[str, ...]] = {
    AsyncHyperBandScheduler: ("_max_t", "_stop_last_trials", "_time_attr", "_trial_info"),
    HyperBandScheduler: ("_hyperbands", "_process_bracket", "_time_attr", "_trial_info"),
    MedianStoppingRule: ("_grace_period", "_stopped_trials", "_time_attr"),
    PopulationBasedTraining: (
        "_burn_in_period",
        "_perturbation_interval",
        "_synch",
        "_time_attr",
        "_trial_state",
    ),
    PopulationBasedTrainingReplay: ("_next_policy",),
}
ASHA_BRACKET = ("_rungs", "_stop_last_trials")
HYPERBAND_BRACKET = (
    "_cumul_r",
    "_halves",
    "_live_trials",
    "cur_iter_done",
    "current_trials",
    "filled",
    "finished",
    "stop_last_trials",
    "trials_to_unpause",
)
POPULATION_MEMBER = ("last_checkpoint", "last_perturbation_time", "last_train_time")
TRAINABLE = (
    "_close_logfiles",
    "_episodes_total",
    "_iteration",
    "_iterations_since_restore",
    "_last_result",
    "_open_logfiles",
    "_restored",
    "_storage",
    "_time_since_restore",
    "_time_total",
    "_timesteps_since_restore",
    "_timesteps_total",
)
#: The module of Ray Train's trainers, which has these names, and the names of what they start.
TRAINER_MODULE = "ray.train.v2.api.data_parallel_trainer"
TRAINERS = ("DataParallelTrainer", "TrainController")
TRAINER = ("_initialize_and_run_controller", "fit")
WORKER_GROUP = ("_create_placement_group", "_create_workers", "_get_worker_runtime_env")
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")


class UnsupportedRayError(FluidError):
    """This release of Ray lacks something that Fluid needs."""

    def __init__(self, owner: str, missing: list[str]) -> None:
        first, last = SUPPORTED
        super().__init__(
            f"ray {ray.__version__} has no {owner}.{', '.join(missing)}: Fluid runs under Ray Tune {first} to {last}"
        )


def require(owner: str, value: object, names: tuple[str, ...]) -> None:
    """Checks that an object has all of these attributes.

    Raises:
        UnsupportedRayError: it lacks some of them.
    """
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        raise UnsupportedRayError(owner, missing)


def controller_of(wrapped: Any) -> Any:
    """Returns the controller behind the wrapper that schedulers are given.

    Raises:
        UnsupportedRayError: the wrapper has none.
    """
    controller = vars(wrapped).get("_tune_controller")
    if controller is None:
        raise UnsupportedRayError("TrialRunnerWrapper", ["_tune_controller"])
    return controller


def check(controller: Any, scheduler: Any) -> None:
    """Checks that a controller and its scheduler have every name that Fluid uses.

    Raises:
        UnsupportedRayError: one is missing.
    """
    require("TuneController", controller, CONTROLLER)
    require("RayActorManager", controller._actor_manager, MANAGER)
    require("TrackedActor", TrackedActor(0), TRACKED_ACTOR)
    require("Trial", Trial, TRIAL)
    for kind, names in SCHEDULERS.items():
        if isinstance(scheduler, kind):
            require(kind.__name__, scheduler, names)


def check_train(module: Any) -> None:
    """Checks that Ray Train's module of trainers has every name that Fluid uses.

    Raises:
        UnsupportedRayError: one is missing.
    """
    require(TRAINER_MODULE, module, TRAINERS)
    require("DataParallelTrainer", module.DataParallelTrainer, TRAINER)
    require("TrainController", module.TrainController, ("worker_group_cls",))
    require("WorkerGroup", module.TrainController.worker_group_cls, WORKER_GROUP)


def connect_to_cluster() -> None:
    """Connects a lane to the driver's cluster, as the first use of Ray would."""
    auto_init_hook.auto_init_ray()


def cluster_may_grow() -> bool:
    """Whether the cluster says how far its autoscaler may make it grow."""
    ask = getattr(ray_state, "get_max_resources_from_cluster_config", None)
    return ask is not None and bool(ask())


class SweepDates:
    """In place of Ray's ``date_str``: a date and time to the second, which no other sweep of the process is given.

    Ray names a sweep without a name after it, and keeps the files of any sweep in a folder of that name until they are
    in storage. Two sweeps of Ray's actors never begin within a second; two on warm lanes do. The first date of a second
    is as Ray's own, and those after it have a number: ``2026-01-31_12-00-00``, ``2026-01-31_12-00-00-2``.

    Args:
        date: Ray's function.
    """

    def __init__(self, date: Callable[[], str]) -> None:
        self._date = date
        self._lock = threading.Lock()
        self._latest = ""
        self._number = 0

    def __call__(self) -> str:
        with self._lock:
            latest = max(self._date(), self._latest)  # A clock that is put back gives no date again.
            self._number = self._number + 1 if latest == self._latest else 1
            self._latest = latest
            return latest if self._number == 1 else f"{latest}-{self._number}"

    @classmethod
    def put_in_place(cls) -> None:
        """Has Ray date sweeps by one of these, in this process from now on."""
        if not isinstance(ray.tune.utils.date_str, cls):
            ray.tune.utils.date_str = cls(ray.tune.utils.date_str)


def session_path_of(storage: Any) -> str | None:
    """Returns the folder of a sweep's files on a machine; ``None`` in releases that keep them with the results."""
    ask = getattr(storage, "_get_session_path", None)
    return None if ask is None else str(ask())


def give_session_path(storage: Any, path: str) -> None:
    """Sets the folder of the sweep's files in a lane, where a storage context cannot ask Ray for it."""
    storage._get_session_path = partial(str, path)


def trial_folder_of(storage: Any) -> str:
    """Returns the trial's folder on this machine, which Tune brings to its storage from the driver's."""
    in_ray_2_9 = "trial_local_path"
    return str(getattr(storage, "trial_driver_staging_path", None) or getattr(storage, in_ray_2_9))


def newest_checkpoint_index(storage: Any) -> int:
    """Returns the highest number of the trial's checkpoints in storage, or the context's own if that is higher."""
    folder = pyarrow_fs.FileSelector(storage.trial_fs_path, allow_not_found=True)
    names = (_CHECKPOINT.fullmatch(info.base_name) for info in storage.storage_filesystem.get_file_info(folder))
    return max([int(storage.current_checkpoint_index), *(int(found[1]) for found in names if found)])


def before_state_is_written(controller: Any, prepare: Callable[[], None]) -> bool:
    """Has a function called before the controller writes the experiment's state; returns whether it can be.

    The state names the checkpoints from which a restored sweep goes on.
    """
    manager = getattr(controller, "_checkpoint_manager", None)
    name = next((name for name in ("sync_up_experiment_state", "checkpoint") if hasattr(manager, name)), None)
    if name is None:
        return False
    write = getattr(manager, name)

    def write_prepared(save_fn: Callable[[], None], *args: Any, **options: Any) -> Any:
        def save() -> None:
            prepare()
            save_fn()

        return write(save, *args, **options)

    setattr(manager, name, write_prepared)
    return True


def donated_path(member: Any) -> str | None:
    """Returns the path of the checkpoint from which others go on in an exploit of a population's member, if any.

    It may be older than the member's newest: Tune also saves trials as it pauses them.
    """
    donated = member.last_checkpoint
    if hasattr(donated, "resolve"):  # A reference to the result of ``save``.
        result = donated.resolve()
        donated = None if result is None else result.checkpoint
    return None if donated is None else str(donated.path)


def labels_of(request: Any) -> dict[str, str]:
    """Returns the labels that the node of a request's only bundle must have; in older releases there are none."""
    selectors = request._bound.arguments.get("bundle_label_selector") or [{}]
    return dict(selectors[0])


def requested_for_sweep(trial: Trial) -> bool:
    """Whether the sweep of a trial was given its resources, as ``resources_per_trial``."""
    return trial._default_placement_group_factory is not None


def environment_of_job() -> dict[str, str]:
    """Returns the environment variables that the job's runtime environment gives to all of its processes."""
    return dict(ray.get_runtime_context().runtime_env.env_vars())


def threads_are_of_ray() -> bool:
    """Whether Ray, and not the user, has set this driver's OMP_NUM_THREADS: it does so in workers, and so in jobs."""
    return ray.get_runtime_context().worker.mode == ray.WORKER_MODE or RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ


def saves_when_asked(trainable: Any) -> bool:
    """Whether the trials of a trainable make a checkpoint when Tune asks for one; functions report their own."""
    return not issubclass(trainable, FunctionTrainable) and trainable.save_checkpoint is not Trainable.save_checkpoint


def make_quietly(trainable: Any, arguments: Mapping[str, Any]) -> Any:
    """Makes a trainable in a lane without connecting to Ray's cluster, which takes a second.

    ``Trainable.__init__`` asks for this machine's address with a function that connects to Ray first. The user's
    ``setup`` and steps run as usual: if they use Ray, the lane connects.
    """
    made = trainable.__new__(trainable)
    wanted = auto_init_hook.enable_auto_connect

    def let_connect() -> None:
        made.__dict__.pop("setup", None)
        auto_init_hook.enable_auto_connect = wanted

    def setup(config: dict[str, Any]) -> None:
        let_connect()
        made.setup(config)

    made.setup = setup
    auto_init_hook.enable_auto_connect = False
    try:
        made.__init__(**arguments)
    finally:
        let_connect()
    return made


def is_endless(search: Any) -> bool:
    """Whether a search has no last trial: with ``num_samples=-1`` Tune counts on ``sys.maxsize`` samples or more."""
    return bool(search.total_samples >= sys.maxsize)


def search_of(controller: Any, scheduler: Any, mode: str | None) -> Search:
    """Returns what a sweep optimizes, and how many trials it has left to run.

    Args:
        controller: Tune's.
        scheduler: the user's.
        mode: the mode that Tune passed to the scheduler; ``None`` if the scheduler was made with one, or has none.
    """
    said = mode or getattr(scheduler, "_mode", None)
    mode = said if said in ("min", "max") else known_mode(scheduler.metric) if scheduler.metric else None
    total = 0 if is_endless(controller.search_alg) else controller.search_alg.total_samples
    left = total - sum(trial.is_finished() for trial in controller.get_trials()) if total else 0
    return Search(
        metric=None if mode is None else scheduler.metric,  # Neither Tune nor the user has said its mode.
        mode=mode,
        trials=int(left) if 0 < left < math.inf else None,
        extends=True,
    )


def seconds_left_of(controller: Any) -> float | None:
    """Returns the seconds that ``time_budget_s`` leaves a sweep; ``None`` if it sets no limit."""
    stoppers = getattr(controller._stopper, "_stoppers", (controller._stopper,))
    budgets = [stopper._budget for stopper in stoppers if isinstance(stopper, TimeoutStopper)]
    return max(0.0, min(budgets)) if budgets else None


def waits_for_saves(scheduler: Any) -> bool:
    """Whether a scheduler may wait for a checkpoint while it decides; those listed here and Fluid's never do."""
    known = (AsyncHyperBandScheduler, FIFOScheduler, HyperBandForBOHB, HyperBandScheduler, MedianStoppingRule)
    return bool(getattr(scheduler, "waits_for_saves", type(scheduler) not in known))


def watches_every_result(controller: Any) -> bool:
    """Whether one result may end the experiment, so that the controller must be given one result per step."""
    harmless = (FunctionStopper, MaximumIterationStopper, NoopStopper, TimeoutStopper)
    return type(controller._stopper) not in harmless
