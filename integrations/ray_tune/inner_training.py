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
from fluid.integrations.ray_tune.inner_controller import GROUP, InnerPlacement, controller_class
from fluid.integrations.ray_tune.private_api import TRAINER_MODULE, check_train, cluster_may_grow, connect_to_cluster
from fluid.trainables.driver_link import driver_link
from fluid.trainables.trial_code import current_trial, trial_of_thread

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
