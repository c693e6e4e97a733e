"""Cases about what goes wrong: how often a trial is tried again, from where, and which error the user gets."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from parity_case import Side, case
from ray.tune.schedulers import FIFOScheduler
from tune_sweeps import Climber, ReusableClimber, climb

from fluid import tune
from fluid.tune import CheckpointConfig

LENGTH = {"training_iteration": 6}
PAIR = {"x": tune.grid_search([1.0, 2.0]), "length": 6}
REUSING = {"reuse_actors": True, "max_concurrent_trials": 1}


def failing(side: Side, at: list[int], **more: Any) -> dict[str, Any]:
    """A config with which the first of two trials raises once in each of these iterations."""
    (folder := side.notes / str(len(side.seen))).mkdir()
    return {
        **PAIR,
        "folder": str(folder),
        "raises_at": tune.sample_from(lambda config: at if config["x"] == 1.0 else []),
        **more,
    }


@case("run.max_failures")
def a_class_that_raises_twice(side: Side) -> None:
    keeping = CheckpointConfig(checkpoint_frequency=2)
    side.run(Climber, config=failing(side, [3, 4]), stop=LENGTH, max_failures=2, checkpoint_config=keeping)
    assert side.iterations()[0] == [1, 2, 3, 3, 4, 5, 6]
    assert [trial["failures"] for trial in side.trials()] == [2, 0]


@case("run.max_failures")
def a_function_that_raises_twice(side: Side) -> None:
    side.run(climb, config=failing(side, [3, 4], every=2), max_failures=-1)
    side.run(climb, config=failing(side, [2]), max_failures=1, name="without checkpoints")
    assert side.iterations()[0] == [1, 1, 2, 3, 4, 5, 6]


@case("run.max_failures", "run.raise_on_failed_trial")
def one_failure_too_many(side: Side) -> None:
    side.run(Climber, config=failing(side, [2, 3]), stop=LENGTH, max_failures=1, raises=True)
    side.run(climb, config=failing(side, [2]), name="second", raise_on_failed_trial=False)
    assert [trial["status"] for trial in side.trials()] == ["ERROR", "TERMINATED"]


@case("run.fail_fast")
def the_first_failure_ends_the_sweep(side: Side) -> None:
    config = {"x": tune.grid_search([1.0, 2.0, 3.0]), "raises_at": [2], "folder": str(side.notes)}
    side.run(
        ReusableClimber,
        config=config,
        stop=LENGTH,
        fail_fast=True,
        raise_on_failed_trial=False,
        max_concurrent_trials=1,
    )


@case("run.fail_fast")
def the_first_failure_is_raised(side: Side) -> None:
    config = {"x": 1.0, "raises_at": [2], "folder": str(side.notes)}
    side.run(ReusableClimber, config=config, stop=LENGTH, fail_fast="raise", raises=True)
    (side.notes / next(path.name for path in side.notes.iterdir())).unlink()
    side.run(climb, config=config, name="function", fail_fast="raise", raises=True)


class OwnError(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, first: int, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Failing(tune.Trainable):
    """Fails where its config says."""

    def setup(self, config: dict[str, Any]) -> None:
        self._fail("setup")

    def step(self) -> dict[str, Any]:
        self._fail("step")
        return {"score": self.iteration, "done": self.iteration >= 2}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._fail("save")
        (Path(checkpoint_dir) / "state").write_text(str(self.iteration))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self._fail("load")

    def cleanup(self) -> None:
        self._fail("cleanup")

    def _fail(self, where: str) -> None:
        if where != self.config["where"] and not (where == "step" and self.config["where"] == "load"):
            return
        if self.config["how"] == "own":
            raise OwnError(3, where)
        if self.config["how"] == "exit":
            sys.exit(3)
        if self.iteration >= 1 or where != "step" or self.config["where"] == "step":
            raise ValueError(f"went wrong in {where}")


@case("errors in methods")
def errors_in_each_method(side: Side) -> None:
    for where in ("setup", "step", "save", "cleanup"):
        side.run(
            Failing,
            name=where,
            config={"where": where, "how": "plain"},
            raise_on_failed_trial=False,
            checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
        )


@case("errors in methods")
def errors_in_loading(side: Side) -> None:
    side.run(
        Failing,
        config={"where": "load", "how": "plain"},
        raise_on_failed_trial=False,
        max_failures=2,
        checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
    )


@case("errors in methods")
def errors_of_other_kinds(side: Side) -> None:
    for how, says in (("own", "OwnError: 3 and step"), ("exit", "")):
        side.run(Failing, name=how, config={"where": "step", "how": how}, raise_on_failed_trial=False)
        (trial,) = side.trials()
        text = "\n".join(trial["files"]["error.txt"])
        assert says in text
        # Ray adds what it could not unpickle, or of which actor; Fluid which process has ended.
        side.seen[-1] = {"status": trial["status"], "hooks": trial["hooks"], "failures": trial["failures"]}


def wrong(config: dict[str, Any]) -> Any:
    """Returns or reports what Tune does not take."""
    if config["what"] == "returns":
        return {"score": 3}
    if config["what"] == "returns a number":
        return 4
    if config["what"] == "reports no dictionary":
        tune.report(3)
    if config["what"] == "reports without the metric":
        tune.report({"other": 3})
    if config["what"] == "stops iterating":
        raise StopIteration
    return None


@case("report", "run.metric", "errors in methods")
def what_a_function_may_do(side: Side) -> None:
    kinds = ["returns", "returns a number", "reports no dictionary", "stops iterating", "nothing"]
    side.run(wrong, config={"what": tune.grid_search(kinds)}, raise_on_failed_trial=False, stock=REUSING)
    side.run(
        wrong, name="metric", config={"what": "reports without the metric"}, metric="score", mode="max", raises=True
    )
    side.seen[-1]["raised"] = [line.partition("Result: ")[0] for line in side.seen[-1]["raised"]]


def dies(config: dict[str, Any]) -> None:
    """Its process is killed in the second iteration, the first time."""
    for number in range(3):
        note = Path(config["folder"]) / "died"
        if number == 1 and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        tune.report({"score": number})


@case("run.max_failures", "on purpose: a death of a process")
def a_process_that_dies(side: Side) -> list[Any]:
    side.run(dies, config={"folder": str(side.notes)}, max_failures=1)
    (trial,) = side.trials()
    assert trial["failures"] == (1 if side.is_stock else 0)
    seen = trial["status"], trial["results"][-1]["score"]
    side.seen.clear()
    return list(seen)


class Objecting(tune.Callback):
    """Raises at the second result."""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result["training_iteration"] == 2:
            raise KeyError("a callback objects")


class ObjectingScheduler(FIFOScheduler):
    """Raises at the second result."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if result["training_iteration"] == 2:
            raise KeyError("a scheduler objects")
        return str(super().on_trial_result(tune_controller, trial, result))


def object_to_second(trial_id: str, result: dict[str, Any]) -> bool:
    """A stop criterion that raises at the second result."""
    if result["training_iteration"] == 2:
        raise KeyError("a stopper objects")
    return False


@case("run.callbacks", "run.scheduler", "run.stop", "errors of the driver")
def errors_of_the_drivers_parts(side: Side) -> None:
    config = {"x": 1.0}
    side.run(ReusableClimber, config=config, callbacks=[Objecting()], stop=LENGTH, raises=True)
    side.run(ReusableClimber, name="scheduler", config=config, scheduler=ObjectingScheduler(), stop=LENGTH, raises=True)
    side.run(ReusableClimber, name="stopper", config=config, stop=object_to_second, raises=True)
