"""How much longer Ray Tune takes to rehearse a sweep than over an executor that answers at once.

``python benchmarks/rehearsal_speed_tune.py`` runs ASHA with 256 trials of up to 52 iterations on 32 devices: rehearsed
by Fluid, and by Tune's own controller with actors that answer at once from the same replay. Ray runs already in both.
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import json
import os
import pstats
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")

import numpy as np
import ray
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.air.execution._internal.tracked_actor import TrackedActor
from ray.tune.schedulers import ASHAScheduler

from fluid import FluidExecutor, tune
from fluid.integrations.ray_tune.lane.lane_trial import RESULT, CheckpointSchedule, LaneTrialSpec
from fluid.integrations.ray_tune.lane.rehearsed_trial import RehearsedTrial
from fluid.integrations.ray_tune.manager import LocalActorHandle
from fluid.integrations.ray_tune.private_api import TRIAL_INFO
from fluid.rehearsal import ReplayedIteration

TRIALS, ITERATIONS, DEVICES = 256, 52, 32
#: Seconds of an iteration, on the average.
SECONDS = 30.0


class Curve(tune.Trainable):  # type: ignore[misc]
    """A trial whose loss falls towards a floor; no code of it runs."""

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        """What a trial of a config does."""
        lr, decay = config["lr"], config["decay"]
        seconds = SECONDS * (0.5 + config["size"])
        return [
            ReplayedIteration({"loss": abs(lr - 0.3) + decay / i, "epoch": i}, seconds)
            for i in iterations
            if i <= ITERATIONS
        ]


class AnsweringManager(RayActorManager):  # type: ignore[misc]
    """In place of Tune's actors: answers in order of the replayed times, with no time between."""

    def __init__(self, resource_manager: Any) -> None:
        super().__init__(resource_manager)
        self._now, self._number = 0.0, count()
        self._waiting: list[tuple[TrackedActor, Any]] = []
        self._courses: dict[TrackedActor, tuple[RehearsedTrial, Any, int]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def add_actor(self, cls: Any, kwargs: Any, resource_request: Any, **callbacks: Any) -> TrackedActor:
        actor = TrackedActor(uuid.uuid4().int, **callbacks)
        info = kwargs["config"][TRIAL_INFO]
        spec = LaneTrialSpec(arguments=kwargs, checkpoints=CheckpointSchedule(), epoch=0.0)
        self._courses[actor] = RehearsedTrial(Curve, spec, is_function=False), info, 0
        self._waiting.append((actor, kwargs["config"]))
        return actor

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._number), event))

    def next(self, timeout: float | None = None) -> bool:
        while self._waiting and len(self._live_actors_to_ray_actors_resources) < DEVICES:
            actor, config = self._waiting.pop(0)
            handle = LocalActorHandle(self._courses[actor][1].trial_id, config)
            self._live_actors_to_ray_actors_resources[actor] = handle, None
            actor._on_start(actor)
        if not self._events:
            return False
        self._now, _, event = heapq.heappop(self._events)
        event()
        return True

    def schedule_actor_task(
        self,
        tracked_actor: TrackedActor,
        method_name: str,
        args: Any = None,
        kwargs: Any = None,
        on_result: Any = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        actor = tracked_actor
        if method_name == "train":
            course, info, done = self._courses[actor]
            self._courses[actor] = course, info, done + 1
            course.prepare(range(done + 1, done + 2))
            played = course.play(done + 1)
            at = self._now + played.seconds

            def answer() -> None:
                if actor in self._courses:
                    on_result(actor, played.reported(played.seconds, at)[RESULT])

            self._at(at, answer)

    def remove_actor(self, tracked_actor: TrackedActor, *_: Any, **__: Any) -> bool:
        actor = tracked_actor
        self._courses.pop(actor, None)
        if self._live_actors_to_ray_actors_resources.pop(actor, None) is not None:
            self._at(self._now, lambda: actor._on_stop(actor))
            return True
        return False

    def clear_actor_task_futures(self, tracked_actor: TrackedActor) -> None:
        """Nothing is under way."""

    @property
    def num_pending_actors(self) -> int:
        return len(self._waiting)

    @property
    def num_live_actors(self) -> int:
        return len(self._live_actors_to_ray_actors_resources)

    @property
    def num_actor_tasks(self) -> int:
        return len(self._events)

    def get_live_actors_resources(self) -> dict[str, float]:
        return {"CPU": float(self.num_live_actors)}

    def get_actor_resources(self, tracked_actor: TrackedActor) -> Any:
        return None


class Answered(ASHAScheduler):
    """ASHA that puts the answering manager in place."""

    _taken = False

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if not self._taken:
            self._taken = True
            controller = tune_controller._tune_controller
            controller._reuse_actors = False
            controller.update_max_pending_trials(TRIALS)
            controller._actor_manager = AnsweringManager(controller._actor_manager._resource_manager)
        super().on_trial_add(tune_controller, trial)


def sweep(scheduler: Any, executor: FluidExecutor | None, folder: Path) -> tuple[float, Any]:
    """Runs the sweep; returns its wall seconds, and Tune's analysis."""
    random.seed(3)
    np.random.seed(3)
    begun = time.perf_counter()
    analysis = tune.run(
        Curve,
        config={"lr": tune.uniform(0.0, 1.0), "decay": tune.uniform(0.1, 1.0), "size": tune.uniform(0.0, 1.0)},
        num_samples=TRIALS,
        metric="loss",
        mode="min",
        scheduler=scheduler,
        storage_path=str(folder),
        verbose=0,
        executor=executor,
    )
    return time.perf_counter() - begun, analysis


def main() -> None:
    """Measures both, as often as asked, and prints the medians as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loggers", action="store_true", help="with Tune's own loggers: CSV, JSON and TensorBoard")
    parser.add_argument("--profile", action="store_true", help="profile a rehearsal instead")
    arguments = parser.parse_args()
    if not arguments.loggers:
        os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    options = {"max_t": ITERATIONS, "grace_period": 1, "reduction_factor": 3}
    ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    walls: dict[str, list[float]] = {"rehearsed": [], "answered": []}
    virtual, results = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats + 1):
            run_dir = Path(folder) / f"fluid-{repeat}"
            with FluidExecutor(backend="simulated", devices=DEVICES, run_dir=run_dir, verbose=0) as executor:
                profile = cProfile.Profile()
                if arguments.profile and repeat:
                    profile.enable()
                wall, analysis = sweep(ASHAScheduler(**options), executor, Path(folder) / f"a{repeat}")
                profile.disable()
                if arguments.profile and repeat:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(30)
                virtual = executor.session.clock.now()
            rehearsed = wall
            results = sum(trial.last_result["training_iteration"] for trial in analysis.trials)
            wall, analysis = sweep(Answered(**options), None, Path(folder) / f"b{repeat}")
            answered = sum(trial.last_result["training_iteration"] for trial in analysis.trials)
            if repeat:  # The first one warms up.
                walls["rehearsed"].append(rehearsed)
                walls["answered"].append(wall)
    medians = {name: sorted(each)[len(each) // 2] for name, each in walls.items()}
    shown = {
        "trials": TRIALS,
        "results": results,
        "results_answered": answered,
        "virtual_h": round(virtual / 3600.0, 2),
        **{f"{name}_s": round(wall, 2) for name, wall in medians.items()},
        "ratio_per_result": round(medians["rehearsed"] / results / (medians["answered"] / answered), 2),
        "times_wall_speed": round(virtual / medians["rehearsed"]),
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
