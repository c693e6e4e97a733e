"""Cases about going on: ``resume`` and ``restore`` of ``tune.run``, and ``Tuner.restore``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray.tune
from parity_case import Side, await_uploads, case
from ray.tune.search import BasicVariantGenerator
from tune_sweeps import ReusableClimber, climb

from fluid import tune
from fluid.tune import CheckpointConfig, FailureConfig, ResumeConfig, RunConfig, TuneConfig

LENGTH = {"training_iteration": 4}
OFTEN = CheckpointConfig(checkpoint_frequency=1)
IN_TURN = {"reuse_actors": True, "max_concurrent_trials": 1}


def _config(side: Side, **more: Any) -> dict[str, Any]:
    """Two trials, of which the first raises in its third iteration, once."""
    raises = tune.sample_from(lambda config: [3] if config["x"] == 1.0 else [])
    return {"x": tune.grid_search([1.0, 2.0]), "folder": str(side.notes), "raises_at": raises, **more}


@case("run.resume", telling=True)
def errors_are_resumed(side: Side) -> None:
    for resume in (None, "AUTO+ERRORED"):
        await_uploads()
        side.run(
            ReusableClimber,
            config=_config(side),
            stop=LENGTH,
            checkpoint_config=OFTEN,
            resume=resume,
            raise_on_failed_trial=False,
            **IN_TURN,
        )
    assert side.iterations(0) == [[1, 2], [1, 2, 3, 4]]
    assert side.iterations(1) == [[3, 4], []]


@case("run.resume")
def errors_are_restarted(side: Side) -> None:
    for resume in (None, "AUTO+RESTART_ERRORED_ONLY", True):
        await_uploads()
        side.run(
            climb,
            config=_config(side, every=1),
            resume=resume,
            raise_on_failed_trial=False,
            **IN_TURN,
        )


@case("run.resume")
def nothing_to_resume(side: Side) -> None:
    side.run(climb, name="auto", config={"x": 1.0, "length": 1}, resume="AUTO")
    side.run(climb, name="false", config={"x": 1.0, "length": 1}, resume=False)


@case("run.resume_config", "ResumeConfig")
def what_is_resumed(side: Side) -> None:
    kinds = ResumeConfig.ResumeType
    for number, config in enumerate(
        (None, ResumeConfig(finished=kinds.RESTART, errored=kinds.SKIP), ResumeConfig(finished=kinds.RESUME))
    ):
        await_uploads()
        side.run(
            ReusableClimber,
            config={"x": 1.0},
            stop={"training_iteration": 2 + number},
            checkpoint_config=CheckpointConfig(checkpoint_at_end=True),
            resume_config=config,
        )


class Ends(tune.Callback):
    """Ends a sweep by an error in the driver, as a crash does, at the third result of the second trial, once."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / "ended"

    def on_trial_result(self, trial: Any, result: dict[str, Any], **info: Any) -> None:
        ends = trial.trial_id.endswith("_00001") and result["training_iteration"] == 3
        if ends and not self._note.exists():
            self._note.touch()
            raise RuntimeError("the driver ends here")


@case("run.resume")
def a_sweep_whose_driver_failed(side: Side) -> None:
    for resume, callbacks in ((None, [Ends(side.notes)]), (True, [])):
        await_uploads()
        side.run(
            ReusableClimber,
            config={"x": tune.grid_search([1.0, 2.0, 3.0])},
            stop=LENGTH,
            checkpoint_config=OFTEN,
            resume=resume,
            callbacks=callbacks,
            raises=True,
            **IN_TURN,
        )


@case("run.restore")
def a_trial_that_begins_with_a_checkpoint(side: Side) -> None:
    folder = side.notes / "begin"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps([2, 10.0]))
    side.run(ReusableClimber, config={"x": 1.0}, stop={"score": 12.0}, restore=str(folder))
    side.run(climb, name="function", config={"x": 1.0}, restore=str(folder))
    assert [row["score"] for row in side.rows(0)[0]] == [11.0, 12.0]


def _fit(side: Side, trainable: Any = ReusableClimber, **more: Any) -> None:
    side.fit(
        trainable,
        param_space=_config(side, **more),
        tune_config=TuneConfig(metric="score", mode="max", max_concurrent_trials=1, reuse_actors=True),
        run_config=RunConfig(
            stop=LENGTH, checkpoint_config=OFTEN if trainable is ReusableClimber else CheckpointConfig()
        ),
    )


@case("Tuner.restore.path", "Tuner.restore.trainable", "Tuner.restore.resume_errored")
def a_tuner_that_resumes_errors(side: Side) -> Any:
    _fit(side)
    grid = side.restore(ReusableClimber, resume_errored=True)
    assert side.iterations(1) == [[3, 4], []]
    assert grid.num_errors == 0
    return [sorted(result.metrics["score"] for result in grid), grid.get_best_result().config["x"]]


@case("Tuner.restore.restart_errored", "Tuner.restore.param_space", "Tuner.restore.resume_unfinished")
def a_tuner_that_restarts_errors(side: Side) -> Any:
    _fit(side, climb, every=1)
    grid = side.restore(climb, restart_errored=True, resume_unfinished=False, param_space=_config(side, every=1))
    return grid.num_errors


@case("Tuner.restore._resume_config", "ResumeConfig")
def a_tuner_that_resumes_the_unfinished(side: Side) -> Any:
    side.fit(
        ReusableClimber,
        param_space={"x": tune.grid_search([1.0, 2.0, 3.0])},
        tune_config=TuneConfig(search_alg=BasicVariantGenerator(max_concurrent=1), reuse_actors=True),
        run_config=RunConfig(stop=LENGTH, callbacks=[Ends(side.notes)], checkpoint_config=OFTEN),
        raises=True,
    )
    first = side.restore(ReusableClimber)
    second = side.restore(ReusableClimber, _resume_config=ResumeConfig(unfinished=ResumeConfig.ResumeType.SKIP))
    return [grid and [result.metrics.get("score") for result in grid] for grid in (first, second)]


@case("Tuner.restore.storage_filesystem", "Tuner.can_restore", "Tuner.get_results", "Tuner.restore.path")
def what_can_be_restored(side: Side) -> Any:
    tuner_class = ray.tune.Tuner if side.is_stock else tune.Tuner
    _fit(side)
    await_uploads()
    path = str(side.storage / f"{side.prefix}-sweep")
    import pyarrow.fs

    restored = tuner_class.restore(path, ReusableClimber, storage_filesystem=pyarrow.fs.LocalFileSystem())
    side.used.add("Tuner.restore.storage_filesystem")
    results = restored.get_results()
    raised = []
    for wrong, trainable in ((str(side.notes), ReusableClimber), (path, climb), ("no/such", climb)):
        try:
            tuner_class.restore(wrong, trainable)
            raised.append(None)
        except Exception as error:
            raised.append([type(error).__name__, str(error).splitlines()[0]])
    return [
        tuner_class.can_restore(path),
        tuner_class.can_restore(str(side.notes)),
        [result.metrics["score"] for result in results],
        results.num_errors,
        raised,
    ]


@case("Tuner.restore", "on purpose: nothing; sweeps cross over in both directions", telling=True)
def from_one_side_to_the_other(side: Side) -> Any:
    """A sweep begun here and restored on the other side gives the same as one that stays here."""
    _fit(side)
    await_uploads()
    path = str(side.storage / f"{side.prefix}-sweep")
    if side.is_stock:
        grid = tune.Tuner.restore(path, ReusableClimber, executor=side.executor, resume_errored=True).fit()
    else:
        grid = tune.Tuner.restore(path, ReusableClimber, resume_errored=True).fit()
    return [[result.metrics["score"], result.metrics["iterations_since_restore"]] for result in grid]


@case("FailureConfig.max_failures", "Tuner.restore.resume_errored")
def failures_after_a_restore(side: Side) -> Any:
    side.fit(
        climb,
        param_space={"x": 1.0, "folder": str(side.notes), "raises_at": [2, 3], "every": 1},
        run_config=RunConfig(failure_config=FailureConfig(max_failures=0)),
    )
    for _ in range(2):
        grid = side.restore(climb, resume_errored=True)
    return [grid.num_errors, sorted(path.name for path in Path(grid[0].path).iterdir() if "error" in path.name)]
