"""Cases about checkpoints: when they are made, of which iteration, which are kept, and what is in them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ray.tune
from parity_case import Side, case
from tune_sweeps import ReusableClimber, climb

from fluid import tune
from fluid.tune import CheckpointConfig

GRID = {"x": tune.grid_search([1.0, 2.0])}
LENGTH = {"training_iteration": 5}
REUSING = {"reuse_actors": True, "max_concurrent_trials": 1}


@case("run.checkpoint_config", "CheckpointConfig.checkpoint_frequency")
def checkpoints_at_times(side: Side) -> None:
    keeping = CheckpointConfig(checkpoint_frequency=2)
    side.run(ReusableClimber, config=GRID, stop=LENGTH, checkpoint_config=keeping, stock=REUSING)
    assert [trial["latest checkpoint"] for trial in side.trials()] == ["checkpoint_000001"] * 2


@case("CheckpointConfig.checkpoint_at_end", "CheckpointConfig.checkpoint_frequency", "CheckpointConfig.num_to_keep")
def the_newest_checkpoints(side: Side) -> None:
    keeping = CheckpointConfig(checkpoint_frequency=2, num_to_keep=2, checkpoint_at_end=True)
    side.run(ReusableClimber, config=GRID, stop=LENGTH, checkpoint_config=keeping, stock=REUSING)
    side.run(
        ReusableClimber,
        name="ends",
        config={"x": 1.0, "ends_at": 4},
        checkpoint_config=CheckpointConfig(checkpoint_at_end=True),
    )
    assert side.trials()[0]["checkpoints"] == [("checkpoint_000000", 4)]


@case(
    "CheckpointConfig.checkpoint_score_attribute",
    "CheckpointConfig.checkpoint_score_order",
    "CheckpointConfig.num_to_keep",
)
def the_best_checkpoints(side: Side) -> None:
    for name, attribute, order in (("least", "score", "min"), ("most", "steps", "max"), ("missing", "other", "max")):
        keeping = CheckpointConfig(
            checkpoint_frequency=1, num_to_keep=2, checkpoint_score_attribute=attribute, checkpoint_score_order=order
        )
        side.run(ReusableClimber, name=name, config={"x": 1.0}, stop=LENGTH, checkpoint_config=keeping)


@case("run.keep_checkpoints_num", "run.checkpoint_score_attr", "run.checkpoint_freq", "run.checkpoint_at_end")
def checkpoints_by_the_old_arguments(side: Side) -> None:
    side.run(
        ReusableClimber,
        config={"x": 1.0},
        stop={"training_iteration": 4},
        keep_checkpoints_num=1,
        checkpoint_score_attr="min-score",
        checkpoint_freq=3,
        checkpoint_at_end=True,
    )


@case("report", "get_checkpoint", "CheckpointConfig.num_to_keep", telling=True)
def checkpoints_of_a_function(side: Side) -> None:
    config = {**GRID, "length": 7, "every": 2}
    side.run(climb, config=config, checkpoint_config=CheckpointConfig(num_to_keep=2), stock=REUSING)
    assert side.trials()[1]["checkpoints"][-1][1] == 6


def with_metadata(config: dict[str, Any]) -> None:
    """Reports checkpoints with metadata, files in folders, and none in between."""
    for number in range(3):
        with tempfile.TemporaryDirectory() as folder:
            (inner := Path(folder) / "inner").mkdir()
            (inner / "number").write_text(str(number))
            checkpoint = ray.tune.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({"number": number})
            tune.report({"score": -number}, checkpoint=checkpoint if number != 1 else None)


@case("report", "CheckpointConfig.checkpoint_score_attribute", "ExperimentAnalysis")
def checkpoints_with_metadata(side: Side) -> Any:
    keeping = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score", checkpoint_score_order="max")
    analysis = side.run(with_metadata, checkpoint_config=keeping, metric="score", mode="max")
    best = analysis.get_best_checkpoint(analysis.trials[0])
    last = analysis.get_last_checkpoint()
    return [best.path, best.get_metadata(), last.path, analysis.best_checkpoint.path]


@case("CheckpointConfig.checkpoint_frequency", "CheckpointConfig.checkpoint_at_end")
def a_function_that_is_asked_for_checkpoints(side: Side) -> None:
    for keeping in (CheckpointConfig(checkpoint_frequency=1), CheckpointConfig(checkpoint_at_end=True)):
        side.run(climb, config={"x": 1.0}, checkpoint_config=keeping, raises=True)


class Asking(ReusableClimber):
    """Asks for a checkpoint in two of its results."""

    def step(self) -> dict[str, Any]:
        result = super().step()
        return {**result, "should_checkpoint": True} if self.steps in self.config["asks"] else result


@case("should_checkpoint")
def checkpoints_asked_for_in_results(side: Side) -> None:
    side.run(Asking, config={"x": 1.0, "asks": [3, 6]}, stop={"training_iteration": 8})
    assert [at for _, at in side.trials()[0]["checkpoints"]] == [3, 6]


class AskingCallback(tune.Callback):
    """Asks for a checkpoint of one iteration."""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result["training_iteration"] == 3:
            result["should_checkpoint"] = True


@case("Callback.on_trial_result")
def checkpoints_asked_for_by_a_callback(side: Side) -> None:
    side.run(ReusableClimber, config={"x": 1.0}, stop={"training_iteration": 6}, callbacks=[AskingCallback()])
    assert [at for _, at in side.trials()[0]["checkpoints"]] == [3]


class Dictionary(ReusableClimber):
    """Returns its state from ``save_checkpoint`` in place of writing it."""

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any] | None:
        return {"steps": self.steps, "score": self.score}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.steps, self.score = checkpoint["steps"], checkpoint["score"]


@case("CheckpointConfig.checkpoint_frequency", "FailureConfig.max_failures")
def checkpoints_as_dictionaries(side: Side) -> None:
    side.run(
        Dictionary,
        config={"x": 1.0, "raises_at": [4], "folder": str(side.notes)},
        stop=LENGTH,
        max_failures=1,
        checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
    )
    assert side.iterations() == [[1, 2, 3, 3, 4, 5]]


class Hundred(tune.Trainable):
    """Done in exactly the iteration that its config says."""

    def step(self) -> dict[str, Any]:
        return {"done": self.iteration + 1 >= self.config["last"], "number": self.iteration}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "number").write_text(json.dumps(self.iteration))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True


@case("result.done")
def done_in_exactly_iteration_100(side: Side) -> None:
    config = {"last": tune.grid_search([100, 101])}
    side.run(Hundred, config=config, checkpoint_config=CheckpointConfig(checkpoint_at_end=True), stock=REUSING)
    assert [len(rows) for rows in side.rows()] == [100, 101]
