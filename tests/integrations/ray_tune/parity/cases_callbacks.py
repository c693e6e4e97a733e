"""Cases about callbacks. Every case records every call of a callback; these are about what a callback can do."""

from __future__ import annotations

from typing import Any

from parity_case import Side, case
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback
from tune_sweeps import Climber, ReusableClimber

from fluid import tune
from fluid.tune import CheckpointConfig

LENGTH = {"training_iteration": 4}


@case(
    "Callback.setup",
    "Callback.on_step_begin",
    "Callback.on_step_end",
    "Callback.on_trial_start",
    "Callback.on_trial_result",
    "Callback.on_trial_save",
    "Callback.on_checkpoint",
    "Callback.on_trial_restore",
    "Callback.on_trial_recover",
    "Callback.on_trial_error",
    "Callback.on_trial_complete",
    "Callback.on_experiment_end",
    telling=True,
)
def every_call(side: Side) -> None:
    config = {"x": tune.grid_search([0.5, 2.0]), "folder": str(side.notes)}
    config["raises_at"] = tune.sample_from(lambda config: [3] if config["x"] == 0.5 else [2, 3])
    side.run(
        Climber,
        config=config,
        stop=LENGTH,
        checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
        max_failures=1,
        raise_on_failed_trial=False,
    )
    called = {what.split()[0] for trial in side.trials() for what, _ in trial["hooks"]}
    # Tune 2.60 never calls on_trial_restore.
    assert called >= {"start", "result", "save", "checkpoint", "recover", "error", "complete"}
    assert side.seen[-1]["callbacks"][-1] == "end"


class Adding(LoggerCallback):
    """Changes the results and writes them to a file of its own."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log_trial_start(self, trial: Any) -> None:
        self.logged.append(["start", trial.experiment_tag])

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        result["added"] = result["score"] + 1
        self.logged.append(result["training_iteration"])

    def log_trial_save(self, trial: Any) -> None:
        self.logged.append("save")

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self.logged.append(["end", failed])


@case("run.callbacks", "LoggerCallback")
def loggers_of_the_users_own(side: Side) -> Any:
    logger = Adding()
    side.run(
        ReusableClimber,
        config={"x": 1.0},
        stop=LENGTH,
        callbacks=[logger, CSVLoggerCallback(), JsonLoggerCallback()],
        checkpoint_config=CheckpointConfig(checkpoint_at_end=True),
    )
    return logger.logged


class Remembering(tune.Callback):
    """Counts the results of a sweep, and goes on counting when the sweep is restored."""

    def __init__(self) -> None:
        self.count = 0
        self.restored: Any = None

    def on_trial_result(self, result: dict[str, Any], **info: Any) -> None:
        self.count += 1

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.restored = state["count"]
        self.count = self.restored


@case("Callback.get_state", "Callback.set_state", "run.resume")
def callbacks_with_a_state(side: Side) -> Any:
    counts = []
    for resume in (None, "AUTO+ERRORED"):
        callback = Remembering()
        side.run(
            ReusableClimber,
            config={"x": 1.0, "raises_at": [3], "folder": str(side.notes)},
            stop=LENGTH,
            callbacks=[callback],
            resume=resume,
            raise_on_failed_trial=False,
        )
        counts.append([callback.restored, callback.count])
    return counts


class Watching(tune.Callback):
    """Looks at the trials while they run, as users' callbacks do."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_trial_result(self, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        last = dict(trial.last_result)
        self.seen.append(
            [
                trial.status,
                last.get("training_iteration"),
                sorted(set(result) - set(last)),
                trial.metric_analysis.get("score", {}).get("max"),
                trial.trainable_name,
                trial.evaluated_params,
                [other.trial_id == trial.trial_id for other in trials],
                trial.is_finished(),
                trial.has_reported_at_least_once,
                bool(trial.get_ray_actor_ip()),
            ]
        )

    def on_trial_complete(self, trial: Any, **info: Any) -> None:
        self.seen.append(["complete", trial.status, trial.last_result["done"], trial.is_finished()])


@case("Callback.on_trial_result", "Callback.on_trial_complete", "Trial")
def what_a_callback_sees_of_a_trial(side: Side) -> Any:
    callback = Watching()
    side.run(
        ReusableClimber,
        config={"x": tune.grid_search([0.5, 2.0])},
        stop=LENGTH,
        callbacks=[callback],
        max_concurrent_trials=1,
        stock={"reuse_actors": True},
    )
    return callback.seen
