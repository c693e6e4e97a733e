"""Cases about ``Tuner``, its configurations, and the ``ResultGrid`` and ``ExperimentAnalysis`` that come of a sweep."""

from __future__ import annotations

from typing import Any

import pyarrow.fs
from parity_case import Side, case
from parity_trainables import Reporter, Talker, artifacts
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator
from tune_sweeps import ReusableClimber, climb

from fluid import tune
from fluid.tune import CheckpointConfig, FailureConfig, RunConfig, TuneConfig

GRID = {"x": tune.grid_search([0.5, 2.0])}
LENGTH = {"training_iteration": 4}


def _result(result: Any) -> dict[str, Any]:
    """All that a Result tells."""
    return {
        "config": result.config,
        "metrics": {name: result.metrics[name] for name in ("score", "steps", "done", "training_iteration")},
        "keys": sorted(result.metrics),
        "error": repr(result.error),
        "checkpoint": result.checkpoint and result.checkpoint.path,
        "best": [(checkpoint.path, metrics["score"]) for checkpoint, metrics in result.best_checkpoints],
        "by": result.best_checkpoints and result.get_best_checkpoint("score", "min").path,
        "frame": [sorted(result.metrics_dataframe.columns), list(result.metrics_dataframe["score"])],
        "path": result.path,
        "filesystem": type(result.filesystem).__name__,
    }


@case(
    "Tuner.param_space",
    "Tuner.trainable",
    "TuneConfig.metric",
    "TuneConfig.mode",
    "RunConfig.name",
    "RunConfig.storage_path",
    "RunConfig.stop",
    "RunConfig.verbose",
    "RunConfig.callbacks",
    "RunConfig.checkpoint_config",
    "FailureConfig.max_failures",
    "CheckpointConfig.num_to_keep",
    "ResultGrid",
    "Result",
    telling=True,
)
def a_result_grid(side: Side) -> Any:
    grid = side.fit(
        ReusableClimber,
        param_space={
            "x": tune.grid_search([0.5, 2.0, 1.0]),
            "folder": str(side.notes),
            "raises_at": tune.sample_from(lambda config: [2] if config["x"] == 0.5 else []),
        },
        tune_config=TuneConfig(metric="score", mode="max", max_concurrent_trials=1, reuse_actors=True),
        run_config=RunConfig(
            name="sweep",
            storage_path=str(side.storage),
            stop=LENGTH,
            verbose=0,
            callbacks=[],
            failure_config=FailureConfig(max_failures=0),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=1, num_to_keep=2),
        ),
    )
    assert grid.num_errors == 1
    assert grid.num_terminated == 2
    frame = grid.get_dataframe(filter_metric="score", filter_mode="max")
    return [
        len(grid),
        [repr(error).splitlines()[:1] for error in grid.errors],
        grid.experiment_path,
        type(grid.filesystem).__name__,
        [_result(result) for result in grid if result.error is None],
        _result(grid.get_best_result()),
        _result(grid.get_best_result("score", "min", scope="all", filter_nan_and_inf=False)),
        sorted(frame.columns),
        sorted(frame["score"]),
    ]


@case(
    "TuneConfig.num_samples",
    "TuneConfig.search_alg",
    "TuneConfig.scheduler",
    "TuneConfig.max_concurrent_trials",
    "TuneConfig.reuse_actors",
    "TuneConfig.trial_name_creator",
    "TuneConfig.trial_dirname_creator",
    "RunConfig.progress_reporter",
    "RunConfig.log_to_file",
    "RunConfig.verbose",
)
def every_setting_of_a_tuner(side: Side) -> Any:
    reporter = Reporter()
    grid = side.fit(
        Talker,
        param_space={"x": tune.uniform(0.5, 1.5)},
        tune_config=TuneConfig(
            metric="score",
            mode="max",
            num_samples=2,
            search_alg=BasicVariantGenerator(random_state=3, max_concurrent=1),
            scheduler=ASHAScheduler(max_t=2),
            reuse_actors=True,
            trial_name_creator=lambda trial: f"named-{trial.trial_id}",
            trial_dirname_creator=lambda trial: f"folder-{trial.trial_id}",
        ),
        run_config=RunConfig(
            stop={"training_iteration": 3}, verbose=2, progress_reporter=reporter, log_to_file=("out.txt", "err.txt")
        ),
    )
    side.fit(
        climb,
        param_space={"x": 1.0},
        tune_config=TuneConfig(max_concurrent_trials=1, num_samples=2, reuse_actors=True),
        run_config=RunConfig(name="limited"),
    )
    return [reporter.told, len(grid)]


@case("RunConfig.sync_config", "RunConfig.storage_filesystem", "RunConfig.storage_path")
def where_a_tuner_stores(side: Side) -> Any:
    side.storage.mkdir()
    filesystem = pyarrow.fs.SubTreeFileSystem(str(side.storage), pyarrow.fs.LocalFileSystem())
    grid = side.fit(
        artifacts,
        param_space={"x": 1.0},
        run_config=RunConfig(
            storage_path="inner",
            storage_filesystem=filesystem,
            sync_config=tune.SyncConfig(sync_artifacts=True, sync_artifacts_on_checkpoint=False),
        ),
    )
    stored = sorted(path.relative_to(side.storage) for path in side.storage.rglob("artifact-*"))
    assert len(stored) == 2
    return [grid[0].path, type(grid.filesystem).__name__, [path.name for path in stored]]


@case("FailureConfig.fail_fast", "FailureConfig.max_failures", "RunConfig.failure_config", "ResultGrid")
def failures_of_a_tuner(side: Side) -> Any:
    config = {"x": 1.0, "raises_at": [2], "folder": str(side.notes), "length": 3}
    one = TuneConfig(max_concurrent_trials=1, num_samples=2, reuse_actors=True)
    grids = [
        side.fit(
            climb,
            param_space=config,
            tune_config=one,
            run_config=RunConfig(name=name, failure_config=FailureConfig(**failure)),
        )
        for name, failure in (("fast", {"fail_fast": True}), ("once", {"max_failures": 1}))
    ]
    side.fit(
        climb,
        param_space=config,
        run_config=RunConfig(name="raise", failure_config=FailureConfig(fail_fast="raise")),
        raises=True,
    )
    return [(grid.num_errors, grid.num_terminated, [type(e).__name__ for e in grid.errors]) for grid in grids]


@case("TuneConfig.time_budget_s")
def a_tuner_with_a_time_budget(side: Side) -> Any:
    grid = side.fit(
        ReusableClimber,
        param_space={"x": 1.0, "seconds": 0.02},
        tune_config=TuneConfig(time_budget_s=1.0),
    )
    side.seen.clear()
    return [len(grid), grid.num_errors, grid.num_terminated]


@case("RunConfig.local_dir", "TuneConfig.chdir_to_trial_dir", "TuneConfig.mode", "FailureConfig.fail_fast")
def settings_that_are_refused(side: Side) -> Any:
    raised = []
    side.used |= {"RunConfig.local_dir", "TuneConfig.chdir_to_trial_dir", "TuneConfig.mode"}
    for make in (
        lambda: RunConfig(local_dir="x"),
        lambda: TuneConfig(chdir_to_trial_dir=True),
        lambda: FailureConfig(fail_fast="never"),
        lambda: FailureConfig(fail_fast=True, max_failures=1),
        lambda: CheckpointConfig(num_to_keep=-1),
        lambda: CheckpointConfig(checkpoint_score_order="most"),
        lambda: side.fit(climb, tune_config=TuneConfig(mode="most")),
        lambda: side.fit(climb, param_space=3),
        lambda: side.fit("no such trainable"),
        lambda: side.fit(3),
    ):
        try:
            make()
            raised.append(None)
        except (Exception, DeprecationWarning) as error:
            raised.append([type(error).__name__, str(error)])
    return raised


@case("ExperimentAnalysis", "run.metric", "run.mode")
def an_analysis(side: Side) -> Any:
    analysis = side.run(
        ReusableClimber,
        config=GRID,
        stop=LENGTH,
        metric="score",
        mode="max",
        checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
        stock={"reuse_actors": True, "max_concurrent_trials": 1},
    )
    best = analysis.best_trial
    return {
        "config": [analysis.best_config, analysis.get_best_config("score", "min")],
        "result": [analysis.best_result["score"], analysis.best_result_df.shape],
        "trial": [best.experiment_tag, analysis.get_best_trial("score", "min", scope="avg").experiment_tag],
        "checkpoints": [
            analysis.best_checkpoint.path,
            analysis.get_best_checkpoint(best, "score", "min").path,
            analysis.get_last_checkpoint(best).path,
        ],
        "frames": [
            sorted(analysis.dataframe("score", "max").columns),
            sorted(list(frame["score"]) for frame in analysis.trial_dataframes.values()),
            sorted(analysis.results_df["score"]),
            sorted(analysis.best_dataframe["score"]),
        ],
        "configs": sorted(config["x"] for config in analysis.get_all_configs().values()),
        "results": sorted(result["score"] for result in analysis.results.values()),
        "path": analysis.experiment_path,
    }
