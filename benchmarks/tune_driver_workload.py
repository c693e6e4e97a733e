"""The sweeps of tune_driver.py: an empty trainable, a scheduler to be asked each time, and a manager of no delay."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from ray import tune
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.tune.schedulers import FIFOScheduler, TrialScheduler


class Empty(tune.Trainable):  # type: ignore[misc]
    """Does nothing."""

    def setup(self, config: dict[str, Any]) -> None:
        """Nothing to set up."""

    def step(self) -> dict[str, float]:
        return {"score": 1.0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing to save."""

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing to load."""


class AsksEachTime(FIFOScheduler):  # type: ignore[misc]
    """A scheduler that Fluid does not know: it must be asked after each iteration."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return str(TrialScheduler.CONTINUE)


class Arrivals(tune.Callback):  # type: ignore[misc]
    """When results arrive: seconds, and seconds of the driver's CPU time."""

    def __init__(self) -> None:
        self.results, self.first, self.first_cpu, self.last, self.last_cpu = 0, 0.0, 0.0, 0.0, 0.0

    def on_trial_result(self, **_: Any) -> None:
        self.last, self.last_cpu = time.perf_counter(), time.process_time()
        if not self.results:
            self.first, self.first_cpu = self.last, self.last_cpu
        self.results += 1


class AtOnce(TrialScheduler):  # type: ignore[misc]
    """Delegates to a scheduler, and puts an :class:`InstantManager` in place of the controller's manager."""

    def __init__(self, base: TrialScheduler) -> None:
        self._base, self._is_placed = base, False

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if not self._is_placed:
            self._is_placed = True
            controller = tune_controller.__dict__.get("_tune_controller", tune_controller)
            controller._actor_manager = InstantManager(controller._actor_manager._resource_manager)
            controller._reuse_actors = False
        self._base.on_trial_add(tune_controller, trial)

    def __getattribute__(self, name: str) -> Any:
        if name in ("on_trial_add", "__class__", "__dict__") or name.startswith("_"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_base"), name)


class InstantManager(RayActorManager):  # type: ignore[misc]
    """Answers each request of the controller in its next turn, without any actor."""

    def __init__(self, resource_manager: Any) -> None:
        super().__init__(resource_manager)
        self._calls: deque[Callable[[], None]] = deque()
        self._live: dict[TrackedActor, dict[str, Any]] = {}

    def add_actor(self, cls: Any, kwargs: dict[str, Any], resource_request: Any, **callbacks: Any) -> TrackedActor:
        actor = TrackedActor(uuid.uuid4().int, **callbacks)
        self._live[actor] = {"score": 1.0, "training_iteration": 0, "time_this_iter_s": 0.0, "time_total_s": 0.0}
        self._live[actor] |= {"done": False, "config": {}, "pid": 1, "hostname": "here", "node_ip": "127.0.0.1"}
        self._live_actors_to_ray_actors_resources[actor] = (None, None)
        self._calls.append(lambda: callbacks["on_start"](actor))
        return actor

    def remove_actor(self, tracked_actor: TrackedActor, kill: bool = False, stop_future: Any = None) -> bool:
        del self._live[tracked_actor], self._live_actors_to_ray_actors_resources[tracked_actor]
        self._calls.append(lambda: tracked_actor._on_stop(tracked_actor))
        return True

    def schedule_actor_task(
        self, tracked_actor: TrackedActor, method_name: str, *_: Any, on_result: Any = None, **__: Any
    ) -> Any:
        if method_name != "train":
            return None
        state = self._live[tracked_actor]
        state["training_iteration"] += 1
        result = {**state, "date": time.strftime("%Y-%m-%d_%H-%M-%S"), "timestamp": int(time.time())}
        self._calls.append(lambda: on_result(tracked_actor, result) if tracked_actor in self._live else None)
        return None

    def clear_actor_task_futures(self, tracked_actor: TrackedActor) -> None:
        """There is none."""

    def next(self, timeout: float | None = None) -> bool:
        handed = bool(self._calls)
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        return handed

    def cleanup(self) -> None:
        self._live.clear()
        self._live_actors_to_ray_actors_resources.clear()

    def get_live_actors_resources(self) -> dict[str, float]:
        return {"CPU": float(len(self._live))}

    @property
    def num_pending_actors(self) -> int:
        return 0

    @property
    def num_actor_tasks(self) -> int:
        return len(self._live)
