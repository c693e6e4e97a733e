"""FluidActorManager: takes the place of the object through which Tune's controller drives its actors.

The controller goes on deciding everything; what it asks of its actors is answered from Fluid's lanes.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray

from fluid.integrations.ray_tune.actor_handle import StandIn
from fluid.integrations.ray_tune.controller_bridge import ControllerBridge
from fluid.integrations.ray_tune.errors import as_task_error
from fluid.integrations.ray_tune.logs import save_logs
from fluid.integrations.ray_tune.private_api import TRIAL_INFO, RayActorManager, TrackedActor, Trial
from fluid.integrations.ray_tune.tune_trial import Task, TuneTrial, tell

#: How long a turn waits for Fluid's news, in seconds, where actors of Ray's own are to be looked after too.
_SHARED_WAIT_S = 0.01


class FluidActorManager(RayActorManager):  # type: ignore[misc]
    """Drives Tune's trials on Fluid's lanes.

    A trial that asks for several bundles of resources is a distributed program of its own and stays with Ray.

    Args:
        resource_manager: Tune's, for trials that stay with Ray.
        controller: Tune's; ``None`` where Ray sets the manager back to its beginning.
        options: of the handover: ``executor``, ``scheduler``, ``concurrency`` and ``mode``.
    """

    def __init__(self, resource_manager: Any, controller: Any = None, **options: Any) -> None:
        super().__init__(resource_manager)
        if controller is not None:
            self._bridge = ControllerBridge(
                controller=controller, on_started=self._note_start, on_died=self._note_failure, **options
            )
            self._trials: dict[str, Trial] = {}

    def announce(self, trial: Trial) -> None:
        """Says that the controller knows a trial."""
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
        """Takes in a trial; ``on_start`` is called once it runs."""
        callbacks: dict[str, Any] = {"on_start": on_start, "on_stop": on_stop, "on_error": on_error}
        if len(resource_request.bundles) > 1:
            return super().add_actor(cls, kwargs, resource_request, **callbacks)
        actor = TrackedActor(uuid.uuid4().int, **callbacks)
        self._bridge.add(actor, self._trials[kwargs["config"][TRIAL_INFO].trial_id], kwargs)
        return actor

    def remove_actor(self, tracked_actor: TrackedActor, kill: bool = False, stop_future: Any = None) -> bool:
        """Lets go of a trial; ``on_stop`` is called if it had started."""
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
        """Asks something of a trial; one of the callbacks is called with the answer."""
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
            return None  # removing it does that
        return self._call(tracked_actor, task, method_name, (args or (), dict(kwargs or {})))

    def _call(self, actor: TrackedActor, task: Task, method: str, arguments: Any) -> Any:
        """Calls a method that the controller waits for; it resolves the reference that is returned."""
        try:
            value = self._bridge.call(actor, method, arguments)
        except Exception as error:
            reference = ray.put(None)
            raised = as_task_error(error, method)
            self._actor_task_events.track_future(reference, lambda _: tell(task.on_error, actor, raised))
            return reference
        reference = ray.put(value)
        self._actor_task_events.track_future(reference, lambda result: tell(task.on_result, actor, result))
        return reference

    def clear_actor_task_futures(self, tracked_actor: TrackedActor) -> None:
        """Forgets what was asked of a trial."""
        if tracked_actor in self._bridge:
            self._bridge.clear(tracked_actor)
        else:
            super().clear_actor_task_futures(tracked_actor)

    def next(self, timeout: float | None = None) -> bool:
        """Calls back with what there is, or waits up to ``timeout`` seconds for something."""
        if not self._has_own:
            return self._bridge.turn(timeout)
        handed = self._bridge.turn(min(_SHARED_WAIT_S, timeout or _SHARED_WAIT_S))
        return bool(super().next(timeout=_SHARED_WAIT_S)) or handed

    def cleanup(self) -> None:
        """Lets go of every trial."""
        for hosted in self._bridge.live:
            self._live_actors_to_ray_actors_resources.pop(hosted.actor, None)
        self._bridge.close()
        super().cleanup()

    # -- what the controller asks about them ---------------------------------------------------------------

    @property
    def _has_own(self) -> bool:
        """Whether there are actors of Ray's own, or calls that wait to be taken note of."""
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
        """How many have not started."""
        return len(self._pending_actors_to_attrs) + self._bridge.number_waiting

    @property
    def num_live_actors(self) -> int:
        """How many have started."""
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_actor_tasks(self) -> int:
        """How many answers the controller waits for."""
        return int(super().num_actor_tasks) + self._bridge.number_live

    def get_live_actors_resources(self) -> dict[str, float]:
        """What the trials that run asked for, added up."""
        total: Counter[str] = Counter()
        for actor, (_, acquired) in self._live_actors_to_ray_actors_resources.items():
            request = (
                acquired.resource_request if acquired is not None else self._bridge.trial(actor).placement_group_factory
            )
            total.update(request.required_resources)
        return dict(total)

    def get_actor_resources(self, tracked_actor: TrackedActor) -> Any:
        """What Ray gave to an actor of its own; ``None`` for a trial of Fluid's."""
        return None if tracked_actor in self._bridge else super().get_actor_resources(tracked_actor)

    def _note_start(self, hosted: TuneTrial) -> None:
        save_logs(hosted.trial)
        self._live_actors_to_ray_actors_resources[hosted.actor] = (StandIn(hosted.trial.trial_id), None)

    def _note_failure(self, hosted: TuneTrial) -> None:
        self._failed_actor_ids.add(hosted.actor.actor_id)
        self._live_actors_to_ray_actors_resources.pop(hosted.actor, None)
