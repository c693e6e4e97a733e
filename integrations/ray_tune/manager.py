"""The actor manager of Tune's controller on Fluid: same interface, with lanes in place of Ray actors.

The controller keeps making all decisions; lanes answer what it requests of its actors.
"""

from __future__ import annotations

import os
import platform
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import ray

from fluid._clock import wall_seconds
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.controller.bridge import ControllerBridge
from fluid.integrations.ray_tune.controller.tune_trial import Task, TuneTrial, notify
from fluid.integrations.ray_tune.errors import as_task_error
from fluid.integrations.ray_tune.logs.loggers import flush_loggers, save_logs
from fluid.integrations.ray_tune.private_api import TRIAL_INFO, RayActorManager, TrackedActor, Trial
from fluid.integrations.ray_tune.resources.offer import require_in_cluster
from fluid.integrations.ray_tune.resources.requests import refusal, stays_with_ray
from fluid.integrations.ray_tune.virtual_time import is_rehearsed

# -- actor handle --------------------------------------------------------------------------------
#
# The actor handle that Tune's controller holds for a trial that runs in a lane, where there is no actor of Ray.


class _LocalMethod:
    """Answers ``handle.method.remote()`` in the driver, at once."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.remote = answer


class LocalActorHandle:
    """Answers the two calls that Tune makes to an actor before its first result.

    Args:
        trial_id: Tune's.
        config: the trial's.
    """

    def __init__(self, trial_id: str, config: Any) -> None:
        self._trial_id = trial_id
        self._config = config
        self.get_auto_filled_metrics = _LocalMethod(self._metrics)
        self.get_current_ip_pid = _LocalMethod(lambda: (ray.util.get_node_ip_address(), os.getpid()))

    def _metrics(self, debug_metrics_only: bool = False) -> dict[str, Any]:
        seconds = wall_seconds()
        return {
            "trial_id": self._trial_id,
            # One copy for all trials of a second: Tune keeps what is returned for every trial.
            "date": sys.intern(datetime.fromtimestamp(seconds).strftime("%Y-%m-%d_%H-%M-%S")),
            "timestamp": int(seconds),
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": ray.util.get_node_ip_address(),
            "config": self._config,
        }


# -- manager -------------------------------------------------------------------------------------


#: Longest that a turn waits for events of the engine, in seconds, while Ray actors have to be polled too.
_SHARED_WAIT_S = 0.01


class FluidActorManager(RayActorManager):  # type: ignore[misc]
    """Drives Tune's trials on Fluid's lanes.

    A trial that requests several bundles of resources is a distributed program of its own and stays with Ray. Where the
    session has its devices from Ray, they go back to Ray for as long as there are such trials.

    Args:
        resource_manager: Tune's, for trials that stay with Ray.
        controller: Tune's; ``None`` where Ray resets the manager.
        options: of the :class:`ControllerBridge`: ``executor``, ``scheduler``, ``concurrency``, ``mode`` and
            ``isolation``.
    """

    def __init__(self, resource_manager: Any, controller: Any = None, **options: Any) -> None:
        super().__init__(resource_manager)
        if controller is not None:
            self._executor: FluidExecutor = options["executor"]
            self._is_rehearsed = is_rehearsed(self._executor)
            self._bridge = ControllerBridge(
                controller=controller, on_started=self._on_trial_started, on_died=self._on_trial_died, **options
            )
            self._trials: dict[str, Trial] = {}
            #: Whether the session's devices are back with Ray, for trials that stay with it.
            self._lends = False

    def register(self, trial: Trial) -> None:
        """Registers a trial that the controller knows, before it is added as an actor."""
        self._trials[trial.trial_id] = trial

    # -- actors --------------------------------------------------------------------------------------------

    def add_actor(
        self,
        cls: Any,
        kwargs: dict[str, Any],
        resource_request: Any,
        *,
        on_start: Callable[[TrackedActor], None] | None = None,
        on_stop: Callable[[TrackedActor], None] | None = None,
        on_error: Callable[[TrackedActor, Exception], None] | None = None,
    ) -> TrackedActor:
        """Adds a trial; ``on_start`` is called once it runs.

        Raises:
            InvalidFieldError: it would run on Ray, for real, in a rehearsal; or Ray can never give what it requests.
        """
        callbacks: dict[str, Any] = {"on_start": on_start, "on_stop": on_stop, "on_error": on_error}
        if stays_with_ray(resource_request):
            if self._is_rehearsed:
                reason = "are several bundles, whose trials run on Ray and cannot be rehearsed: request one bundle"
                raise refusal(resource_request.required_resources, reason)
            require_in_cluster(resource_request)
            self._lends = self._executor.session.lend_devices()
            return super().add_actor(cls, kwargs, resource_request, **callbacks)
        actor = TrackedActor(uuid.uuid4().int, **callbacks)
        self._bridge.add(actor, self._trials[kwargs["config"][TRIAL_INFO].trial_id], kwargs)
        return actor

    def remove_actor(self, tracked_actor: TrackedActor, kill: bool = False, stop_future: Any = None) -> bool:
        """Removes a trial; ``on_stop`` is called if it had started."""
        if tracked_actor not in self._bridge:
            if tracked_actor.actor_id in self._failed_actor_ids:
                return False
            return bool(super().remove_actor(tracked_actor, kill=kill, stop_future=stop_future))
        if not self._bridge.remove(tracked_actor):
            return False
        del self._live_actors_to_ray_actors_resources[tracked_actor]

        def stopped() -> None:
            if tracked_actor._on_stop:
                tracked_actor._on_stop(tracked_actor)

        self._bridge.call_back(stopped)
        return True

    def schedule_actor_task(
        self,
        tracked_actor: TrackedActor,
        method_name: str,
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        on_result: Callable[[TrackedActor, Any], None] | None = None,
        on_error: Callable[[TrackedActor, Exception], None] | None = None,
        _return_future: bool = False,
    ) -> Any:
        """Requests something of a trial; one of the callbacks is called with the answer."""
        if tracked_actor not in self._bridge:
            return super().schedule_actor_task(
                tracked_actor, method_name, args, kwargs, on_result, on_error, _return_future
            )
        task = Task(on_result, on_error)
        if method_name in ("train", "train_buffered"):
            return self._bridge.train(tracked_actor, task)
        if method_name == "save":
            return self._bridge.save(tracked_actor, task)
        if method_name == "restore":
            return self._bridge.restore(tracked_actor, task, (args or ())[0])
        if method_name == "stop":
            return None  # ``remove_actor`` stops it.
        return self._call(tracked_actor, task, method_name, (args or (), dict(kwargs or {})))

    def _call(self, actor: TrackedActor, task: Task, method: str, arguments: Any) -> Any:
        """Calls a method and returns a reference to its result, which the controller resolves."""
        try:
            value = self._bridge.call(actor, method, arguments)
        except Exception as error:
            reference = ray.put(None)
            raised = as_task_error(error, self._bridge.trial(actor), method)
            self._actor_task_events.track_future(reference, lambda _: notify(task.on_error, actor, raised))
            return reference
        reference = ray.put(value)
        self._actor_task_events.track_future(reference, lambda result: notify(task.on_result, actor, result))
        return reference

    def clear_actor_task_futures(self, tracked_actor: TrackedActor) -> None:
        """Forgets what was requested of a trial."""
        if tracked_actor in self._bridge:
            self._bridge.clear(tracked_actor)
        else:
            super().clear_actor_task_futures(tracked_actor)

    def next(self, timeout: float | None = None) -> bool:
        """Calls the controller back with what there is, or waits up to ``timeout`` seconds for an event."""
        if not self._has_ray_work:
            if self._lends and self._executor.session.unfinished:
                self._reclaim()
            return self._bridge.turn(timeout)
        handed = self._bridge.turn(min(_SHARED_WAIT_S, timeout or _SHARED_WAIT_S))
        return bool(super().next(timeout=_SHARED_WAIT_S)) or handed

    def cleanup(self) -> None:
        """Stops every trial."""
        for tune_trial in self._bridge.live:
            self._live_actors_to_ray_actors_resources.pop(tune_trial.actor, None)
        self._bridge.close()
        super().cleanup()
        self._reclaim()

    def _reclaim(self) -> None:
        """Takes the devices again that Ray had for trials that stay with it; none is left."""
        if self._lends:
            self._lends = False
            with suppress(FluidError):  # The executor is closed.
                self._executor.session.reclaim_devices()

    # -- what the controller asks about its actors ---------------------------------------------------------

    @property
    def _has_ray_work(self) -> bool:
        """Whether there are Ray actors, or calls whose results have not been processed."""
        return bool(
            self._pending_actors_to_attrs
            or len(self._live_actors_to_ray_actors_resources) > self._bridge.number_live
            or self._live_actors_to_kill
            or self._actor_task_events.num_futures
        )

    @property
    def pending_actors(self) -> list[TrackedActor]:
        """Actors that have not started."""
        return [*super().pending_actors, *self._bridge.waiting]

    @property
    def num_pending_actors(self) -> int:
        """How many actors have not started."""
        return len(self._pending_actors_to_attrs) + self._bridge.number_waiting

    @property
    def num_live_actors(self) -> int:
        """How many actors have started."""
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_actor_tasks(self) -> int:
        """How many answers the controller waits for."""
        return int(super().num_actor_tasks) + self._bridge.number_live

    def get_live_actors_resources(self) -> dict[str, float]:
        """The sum of what the running trials requested."""
        total: Counter[str] = Counter()
        if self._is_rehearsed:  # Those that run are none of this cluster's: Tune would look again how many it has.
            return {}
        for actor, (_, acquired) in self._live_actors_to_ray_actors_resources.items():
            request = (
                acquired.resource_request if acquired is not None else self._bridge.trial(actor).placement_group_factory
            )
            total.update(request.required_resources)
        return dict(total)

    def get_actor_resources(self, tracked_actor: TrackedActor) -> Any:
        """The resources of a Ray actor; ``None`` for a trial on Fluid."""
        return None if tracked_actor in self._bridge else super().get_actor_resources(tracked_actor)

    def _on_trial_started(self, tune_trial: TuneTrial) -> None:
        if tune_trial.trial.checkpoint is not None:
            flush_loggers(self._executor)
            save_logs(tune_trial.trial)
        handle = LocalActorHandle(tune_trial.trial.trial_id, tune_trial.trial.config)
        self._live_actors_to_ray_actors_resources[tune_trial.actor] = (handle, None)

    def _on_trial_died(self, tune_trial: TuneTrial) -> None:
        self._failed_actor_ids.add(tune_trial.actor.actor_id)
        self._live_actors_to_ray_actors_resources.pop(tune_trial.actor, None)
