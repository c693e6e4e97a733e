"""The controller of Ray Train within a trial: it starts its workers on the trial's devices.

Ray Train's controller runs in an actor of its own, which may be on a machine that finds Fluid's code later than Ray
needs it. So these classes are defined in functions: they are pickled by value, and use nothing but Ray.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
