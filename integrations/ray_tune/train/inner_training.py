"""Ray Train within a trial: the workers of ``TorchTrainer(...).fit()`` run on the devices of the trial.

Ray Train's controller asks Ray for its workers' resources. Where Fluid has the devices from Ray, Ray has none left to
give: the workers are then started in the placement groups of the trial's own devices. A trial that holds too few asks
its driver for more, and is started anew with them. With the local backend, Ray has its CPUs for the workers; there the
trial only holds as many devices, so that no other trial computes on them.

All of it runs in a lane, which makes ``fit`` do this when Ray Train is imported there.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any, NamedTuple

import ray
from ray.experimental import internal_kv
from ray.util.placement_group import remove_placement_group

from fluid.backends.ray.nodes import Bundle, bundles_of_lane
from fluid.errors import FluidError, InvalidFieldError
from fluid.integrations.ray_tune.private_api import TRAINER_MODULE, check_train, cluster_may_grow, connect_to_cluster
from fluid.trainables.driver_link import driver_link
from fluid.trainables.trial_code import current_trial, trial_of_thread

# -- inner controller ----------------------------------------------------------------------------
#
# The controller of Ray Train within a trial: it starts its workers on the trial's devices.
#
# Ray Train's controller runs in an actor of its own, which may be on a machine that finds Fluid's code later than Ray
# needs it. So these classes are defined in functions: they are pickled by value, and use nothing but Ray.


#: See :class:`InnerPlacement`.
GROUP = ":group"


class InnerPlacement(NamedTuple):
    """Where the workers of a run of Ray Train are started.

    Attributes:
        key: where the controller leaves a handle to itself, in Ray's internal key-value store, and, with
            :data:`GROUP` appended, the placement group that it has asked Ray for.
        bundles: the pickled placement group and the bundle of each worker, by rank as Ray Train counts before it
            sorts; empty if Ray Train asks Ray for them.
        share: what a worker takes of its bundle. Next to nothing: workers that end and those that follow them may
            overlap, and Fluid sees to it that the devices are the trial's.
        threads: CPU threads of a worker.
    """

    key: str
    bundles: tuple[tuple[bytes, int], ...]
    share: dict[str, float]
    threads: int


def controller_class(base: Any) -> Any:
    """Returns a subclass of Ray Train's controller whose last callback is an :class:`InnerPlacement` as a dict."""

    def asking_group_class(base: Any, key: str) -> Any:
        import pickle

        from ray.experimental import internal_kv
        from ray.util.placement_group import PlacementGroup

        class AskingWorkerGroup(base):  # type: ignore[misc]
            def _create_placement_group(self, *args: Any, **options: Any) -> Any:
                handle = super()._create_placement_group(*args, **options)
                group = PlacementGroup(handle.placement_group.id)
                internal_kv._internal_kv_put(key, pickle.dumps(group))
                return handle

        return AskingWorkerGroup

    def placed_group_class(base: Any, placement: dict[str, Any]) -> Any:
        import pickle
        import sys

        module: Any = sys.modules[base.__module__]
        strategy = module.PlacementGroupSchedulingStrategy
        groups = {content: pickle.loads(content) for content, _ in placement["bundles"]}

        class Given:
            """Stands for the placement group that Ray Train would ask for."""

            placement_group = None

            def wait(self, timeout_seconds: float = 30) -> bool:
                return True

            def shutdown(self) -> None:
                """Does nothing: the devices are Fluid's."""

        def place(placement_group: Any, placement_group_bundle_index: int) -> Any:
            content, bundle = placement["bundles"][placement_group_bundle_index]
            return strategy(groups[content], placement_group_bundle_index=bundle)

        class PlacedWorkerGroup(base):  # type: ignore[misc]
            def _create_placement_group(self, *args: Any, **options: Any) -> Any:
                return Given()

            def _create_workers(self, count: int, group: Any, resources: Any, *args: Any, **options: Any) -> Any:
                module.PlacementGroupSchedulingStrategy = place
                try:
                    return super()._create_workers(count, group, placement["share"], *args, **options)
                finally:
                    module.PlacementGroupSchedulingStrategy = strategy

            @staticmethod
            def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
                environment = base._get_worker_runtime_env(custom_runtime_env)
                environment["env_vars"].setdefault("OMP_NUM_THREADS", str(placement["threads"]))
                return environment

        return PlacedWorkerGroup

    group_suffix = GROUP  # Of the closure, as these classes are pickled.

    class FluidTrainController(base):  # type: ignore[misc]
        def __init__(self, *args: Any, callbacks: Any, **options: Any) -> None:
            import ray
            from ray.experimental import internal_kv

            *callbacks, placement = callbacks
            handle = ray.cloudpickle.dumps(ray.get_runtime_context().current_actor)
            internal_kv._internal_kv_put(placement["key"], handle)
            # Where a controller dies, its lane removes the placement group, or is gone, too, and Ray does.
            callbacks = [one for one in callbacks if type(one).__name__ != "PlacementGroupCleanerCallback"]
            if placement["bundles"]:
                self.worker_group_cls: Any = placed_group_class(base.worker_group_cls, placement)
            else:
                self.worker_group_cls = asking_group_class(base.worker_group_cls, placement["key"] + group_suffix)
            super().__init__(*args, callbacks=callbacks, **options)

    return FluidTrainController


# -- inner training ------------------------------------------------------------------------------


#: Seconds for the workers of a trial that was stopped to end, before the lane goes on.
_END_S = 5.0
_LOOK_AGAIN_S = 0.05
#: Of a device, what Ray needs to tell a worker which GPU it has.
_GPU_SHARE = 0.001
_ROUNDING = 1e-6
#: What a worker may ask for beside its device. Fluid does not reserve it.
_UNCOUNTED = {"CPU", "GPU", "memory"}


class DevicesWanted(NamedTuple):
    """A trial's request to its driver before a run of Ray Train; the answer is whether it has to be started anew.

    Attributes:
        kind: ``"gpu"`` or ``"cpu"``.
        devices: how many the run needs.
        of_ray: whether the session has its devices from Ray.
        what: what needs them, to be read in an error.
    """

    kind: str
    devices: int
    of_ray: bool
    what: str


class WorkerNeed(NamedTuple):
    """What the workers of a run need.

    Attributes:
        workers: how many there are.
        each: devices of the session's kind for each; a fraction if they share one.
    """

    workers: int
    each: float

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.place(self.workers - 1) + self.whole if self.workers and self.each else 0

    @property
    def whole(self) -> int:
        """Whole devices of each worker."""
        return max(1, math.ceil(self.each - _ROUNDING))

    def place(self, worker: int) -> int:
        """Returns the first device of a worker."""
        if self.each >= 1.0:
            return worker * self.whole
        return worker // max(1, int(1.0 / self.each + _ROUNDING))


class InnerTraining:
    """The runs of Ray Train within one trial.

    Args:
        devices: how many devices the trial holds.

    Attributes:
        wants_devices: whether the trial has ended because it is to be started anew with more devices.
    """

    def __init__(self, devices: int) -> None:
        self.wants_devices = False
        self._devices = devices
        self._ended = False
        #: Keys of the runs under way, each with an event that is set when it is over.
        self._runs: dict[str, threading.Event] = {}

    def attach(self) -> None:
        """Makes these the runs of the trial whose code the calling thread runs."""
        if (code := trial_of_thread()) is not None:
            code.attached[_TRAINING] = self

    def fit(self, trainer: Any, original: Callable[[Any], Any]) -> Any:
        """Runs ``fit`` of a trainer in the trial.

        Raises:
            InvalidFieldError: its workers ask for something that the trial's devices cannot give.
            FluidError: there are too few devices.
        """
        key = f"fluid:{uuid.uuid4().hex}"
        trainer.__dict__[_PLACEMENT] = self._placement(trainer, key)._asdict()
        over = self._runs[key] = threading.Event()
        try:
            with _signals_kept():
                return original(trainer)
        except Exception:
            if self._ended:
                raise SystemExit(0) from None  # Its controller was killed, as the trial has been stopped.
            raise
        finally:
            trainer.__dict__.pop(_PLACEMENT, None)
            _forget(key)
            del self._runs[key]
            over.set()

    def end(self) -> None:
        """Ends the runs that are under way, as the trial leaves the lane; waits a few seconds for them."""
        self._ended = True
        runs = list(self._runs.items())
        for key, over in runs:
            threading.Thread(target=_kill, args=(key, over), name="fluid-inner-end", daemon=True).start()
        for _, over in runs:
            over.wait(_END_S)

    def _placement(self, trainer: Any, key: str) -> InnerPlacement:
        """Where the workers of a run go; ends the trial if it has to be started anew with more devices."""
        connect_to_cluster()
        scaling = trainer.scaling_config
        kind = "gpu" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"
        each = float(scaling._resources_per_worker_not_none.get(kind.upper(), 0.0))
        need = WorkerNeed(scaling.max_workers, each)
        bundles = bundles_of_lane()
        elsewhere = InnerPlacement(key, (), {}, need.whole)
        if need.devices == 0:  # Fluid holds nothing of what the workers ask for.
            _require_in_cluster(scaling)
            return elsewhere
        if bundles:
            _require_simple(scaling, kind)
        elif kind == "gpu":
            raise FluidError(
                f"{_name(trainer)} needs {need.devices} GPUs: with the local backend, Ray would give its workers GPUs "
                'on which other trials run; use FluidExecutor(backend="ray")'
            )
        if need.devices > self._devices:
            if driver_link().ask(DevicesWanted(kind, need.devices, bool(bundles), _name(trainer))):
                self.wants_devices = True
                raise SystemExit(0)
            bundles = ()  # Ray has them beside those that Fluid holds.
        if not bundles:
            _require_in_cluster(scaling)
            return elsewhere
        share = {"GPU": _GPU_SHARE} if kind == "gpu" else {}
        return InnerPlacement(key, tuple(_places(need, bundles)), share, _threads(scaling))


def _places(need: WorkerNeed, bundles: Sequence[Bundle]) -> Iterator[tuple[bytes, int]]:
    for worker in range(need.workers):
        bundle = bundles[need.place(worker)]
        yield bundle.group, bundle.number


def _threads(scaling: Any) -> int:
    return max(1, int(scaling.num_cpus_per_worker))


def _name(trainer: Any) -> str:
    scaling = trainer.scaling_config
    each = scaling._resources_per_worker_not_none
    return f"{type(trainer).__name__} with {scaling.num_workers} workers of {each}"


def _require_simple(scaling: Any, kind: str) -> None:
    """Checks that workers ask for nothing that devices of the session cannot give.

    Raises:
        InvalidFieldError: they do.
    """
    each = scaling._resources_per_worker_not_none
    problem = "is not supported in a trial whose devices Fluid has from Ray"
    if scaling.elasticity_enabled:
        raise InvalidFieldError("num_workers", scaling.num_workers, f"{problem}: give a number")
    if kind == "gpu" and each["GPU"] > 1:
        raise InvalidFieldError("resources_per_worker", each, f"{problem}: at most one GPU per worker")
    if extra := sorted(each.keys() - _UNCOUNTED):
        raise InvalidFieldError("resources_per_worker", each, f"{problem}: {', '.join(extra)}")
    if scaling.label_selector is not None:
        raise InvalidFieldError("label_selector", scaling.label_selector, problem)
    if scaling.placement_strategy == "STRICT_SPREAD":
        raise InvalidFieldError("placement_strategy", scaling.placement_strategy, problem)


def _require_in_cluster(scaling: Any) -> None:
    """Checks that Ray's cluster has what the workers ask for, as Ray would wait for it for ever.

    Raises:
        FluidError: it has not, and nothing says that it may grow.
    """
    if scaling.elasticity_enabled or cluster_may_grow():  # Ray Train itself checks how far it may.
        return
    there = ray.cluster_resources()
    for name, each in scaling._resources_per_worker_not_none.items():
        if (total := each * scaling.num_workers) > there.get(name, 0.0) + _ROUNDING:
            raise FluidError(
                f"the {scaling.num_workers} workers of Ray Train need {total:g} {name} in all, and the Ray cluster has "
                f"{there.get(name, 0.0):g}"
            )


def _kill(key: str, over: threading.Event) -> None:
    """Kills the controller of a run, once it has started, and with it its workers."""
    while not over.wait(_LOOK_AGAIN_S):
        handle = internal_kv._internal_kv_get(key)
        if handle is not None:
            ray.kill(ray.cloudpickle.loads(handle))
            return


def _forget(key: str) -> None:
    """Removes what the controller of a run that is over has left."""
    if not ray.is_initialized():
        return
    group = internal_kv._internal_kv_get(key + GROUP)
    if group is not None:
        remove_placement_group(pickle.loads(group))  # One that is gone is passed over.
    internal_kv._internal_kv_del(key)
    internal_kv._internal_kv_del(key + GROUP)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Puts the handler of SIGINT back, which Ray Train replaces in a main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


# -- what the lane makes of Ray Train ------------------------------------------------------------------------

#: Attribute of a trainer whose ``fit`` runs.
_PLACEMENT = "_fluid_placement"
#: What the code of a trial has attached.
_TRAINING = "ray train"


def install() -> None:
    """Makes ``fit`` of Ray Train's trainers run in the trial, from when Ray Train is imported in this process."""
    if TRAINER_MODULE in sys.modules:
        _adapt(sys.modules[TRAINER_MODULE])
    elif not any(isinstance(finder, _TrainFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TrainFinder())


class _TrainFinder(MetaPathFinder):
    """Adapts the module of Ray Train's trainers right after it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != TRAINER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _adapt(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _adapt(module: Any) -> None:
    trainer = module.DataParallelTrainer
    if getattr(trainer.fit, "is_fluid", False):
        return
    check_train(module)
    fit, run = trainer.fit, trainer._initialize_and_run_controller
    module.TrainController = controller_class(module.TrainController)

    def fit_in_trial(self: Any) -> Any:
        code = current_trial()
        training = None if code is None else code.attached.get(_TRAINING)
        if training is None or self.running_in_local_mode:
            return fit(self)
        return training.fit(self, fit)

    def run_controller(self: Any, *, callbacks: Any, **options: Any) -> Any:
        placement = self.__dict__.get(_PLACEMENT)
        return run(self, callbacks=[*callbacks, placement], **options)

    fit_in_trial.is_fluid = True  # type: ignore[attr-defined]
    trainer.fit, trainer._initialize_and_run_controller = fit_in_trial, run_controller
