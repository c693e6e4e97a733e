"""Cases about arguments of ``tune.run``: what is run, under which names, with which configs, and what is written."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import ray.tune
from parity_case import Side, case
from parity_trainables import Reporter, Talker, Values, artifacts, context, talk, values
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from tune_sweeps import Climber, ReusableClimber, climb

from fluid import tune

GRID = {"x": tune.grid_search([0.5, 2.0])}
LENGTH = {"training_iteration": 3}
#: Stock Tune with one process for all trials, where that makes no difference: starting one takes most of the time.
REUSING = {"reuse_actors": True, "max_concurrent_trials": 1}


@case("run.run_or_experiment", "run.config", "run.stop", "run.storage_path", "run.callbacks", telling=True)
def a_class(side: Side) -> None:
    side.run(Climber, config=GRID, stop=LENGTH, storage_path=str(side.storage), callbacks=[])
    assert [[row["score"] for row in rows] for rows in side.rows()] == [[0.5, 1.0, 1.5], [2.0, 4.0, 6.0]]


@case(
    "run.name",
    "run.metric",
    "run.mode",
    "run.num_samples",
    "run.resources_per_trial",
    "TuneContext",
    "run.trial_name_creator",
    "run.trial_dirname_creator",
    telling=True,
)
def a_registered_function_in_its_context(side: Side) -> Any:
    tune.register_trainable("parity-context", context)
    analysis = side.run(
        "parity-context",
        name="sweep",
        metric="score",
        mode="max",
        config={"x": tune.uniform(0.0, 1.0), "twice": tune.sample_from(lambda config: 2 * config["x"])},
        num_samples=2,
        resources_per_trial={"cpu": 1},
        trial_name_creator=lambda trial: f"trial-{trial.trial_id}",
        trial_dirname_creator=lambda trial: f"folder-{trial.trial_id}",
    )
    return analysis.best_config, side.plain(analysis.best_result["folder"])


@case("run.run_or_experiment", "Experiment")
def two_experiments(side: Side) -> None:
    experiments = [
        tune.Experiment(
            f"{side.prefix}-{name}",
            run=trainable,
            config={"x": 1.0},
            stop={"training_iteration": length},
            storage_path=str(side.storage),
        )
        for name, trainable, length in (("sweep", climb, 2), ("other", ReusableClimber, 1))
    ]
    side.run(experiments)
    assert side.iterations() == [[1, 2], [1]]


@case("run.log_to_file")
def streams_in_files(side: Side) -> None:
    side.run(Talker, config=GRID, stop=LENGTH, log_to_file=True)


@case("run.log_to_file")
def streams_in_one_file(side: Side) -> None:
    side.run(talk, config={"x": 1.0}, log_to_file="all.txt")
    side.run(talk, config={"x": 1.0}, name="second", log_to_file=("out.txt", "err.txt"))


@case("report")
def values_of_all_kinds(side: Side) -> None:
    side.run(Values, config={}, stop={"training_iteration": 2}, stock=REUSING)
    side.run(values, name="second", config={"nested": {"a": [1, {"b": 2.0}], "t": (1, 2)}, "none": None})


@case("report")
def a_value_that_a_logger_refuses(side: Side) -> None:
    side.run(climb, config={"x": 10**30}, stop=LENGTH, raises=True)


@case("run.config", "with_parameters", "with_resources")
def configs_of_all_kinds(side: Side) -> None:
    space = {
        "x": tune.choice([1.0]),
        "function": tune.grid_search([len, Reporter]),
        "grid": {"in": {"depth": tune.grid_search([1, 2])}},
        "derived": tune.sample_from(lambda spec: spec["grid"]["in"]["depth"] + 1),
        "lambda": lambda: 3,
        "normal": tune.randn(0, 1),
        "steps": tune.qrandint(2, 10, 2),
    }
    table = list(range(100))

    def train(config: dict[str, Any], table: Any) -> None:
        tune.report({"score": config["derived"] + config["lambda"]() + len(table), "kind": type(config["function"])})

    parameters = tune.with_resources(tune.with_parameters(train, table=table), {"cpu": 1})
    side.run(parameters, config=space, stock=REUSING)


class Summed(ReusableClimber):
    """Begins with the sum of a parameter."""

    def setup(self, config: dict[str, Any], table: Any) -> None:
        super().setup(config)
        self.score = float(table.sum())


@case("with_parameters", "with_resources")
def a_class_with_parameters(side: Side) -> None:
    trainable = tune.with_resources(tune.with_parameters(Summed, table=np.arange(200_000.0)), {"cpu": 1})
    side.run(trainable, config={"x": 1.0}, stop=LENGTH)


@case("run.config")
def a_config_that_cannot_be_pickled(side: Side) -> None:
    side.run(climb, config={"x": 1.0, "lock": threading.Lock()}, raises=True)


@case("run.search_alg", "run.max_concurrent_trials")
def searchers(side: Side) -> None:
    searcher = BasicVariantGenerator(points_to_evaluate=[{"x": 0.25}], constant_grid_search=True, random_state=3)
    space = {"x": tune.uniform(0, 1), "y": tune.grid_search([1, 2])}
    side.run(
        ReusableClimber,
        config=space,
        num_samples=2,
        search_alg=searcher,
        stop={"training_iteration": 1},
        stock={"reuse_actors": True},
        max_concurrent_trials=1,
    )
    side.run(ReusableClimber, name="second", config={"x": tune.uniform(0, 1)}, search_alg="random", stop=LENGTH)


@case("run.search_alg", "run.max_concurrent_trials", "run.metric", "run.mode")
def optuna_with_points(side: Side) -> None:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=1)
    side.run(
        ReusableClimber,
        config={"x": tune.uniform(0.5, 1.5)},
        num_samples=4,
        search_alg=OptunaSearch(sampler=sampler, points_to_evaluate=[{"x": 0.75}]),
        metric="score",
        mode="max",
        max_concurrent_trials=1,
        stop={"training_iteration": 2},
        stock={"reuse_actors": True},
    )


@case("run.search_alg")
def optuna_by_name_with_a_limiter(side: Side) -> None:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    searcher = OptunaSearch(metric="score", mode="max", sampler=optuna.samplers.RandomSampler(seed=3))
    side.run(
        ReusableClimber,
        config={"x": tune.uniform(0.5, 1.5)},
        num_samples=3,
        search_alg=ConcurrencyLimiter(searcher, max_concurrent=2),
        stop={"training_iteration": 2},
        stock={"reuse_actors": True},
    )


@case("run.time_budget_s")
def a_time_budget(side: Side) -> list[str]:
    side.run(Climber, config={**GRID, "seconds": 0.02}, time_budget_s=1.5)
    _only_statuses(side)
    side.run(
        Climber,
        config={**GRID, "seconds": 0.02},
        time_budget_s=datetime.timedelta(seconds=1.5),
        name="second",
        stock=REUSING,
    )
    return _only_statuses(side)


@case("run.num_samples", "run.time_budget_s")
def samples_without_end(side: Side) -> list[str]:
    side.run(
        ReusableClimber,
        config={"x": 1.0, "ends_at": 2},
        num_samples=-1,
        time_budget_s=2,
        stock={"reuse_actors": True},
    )
    assert len(side.trials()) > 2
    return _only_statuses(side)


def _only_statuses(side: Side) -> list[str]:
    """Leaves nothing of the last sweep to compare but how its trials ended: how far they got depends on the clock."""
    trials = side.trials()
    assert all(rows == list(range(1, len(rows) + 1)) for rows in side.iterations())
    side.seen[-1] = {"raised": side.seen[-1]["raised"], "files": sorted(map(len, side.seen[-1]["files"]))}
    return sorted({trial["status"] for trial in trials})


@case("run.verbose", "run.progress_reporter")
def a_progress_reporter(side: Side) -> Any:
    reporter = Reporter()
    side.run(ReusableClimber, config=GRID, stop=LENGTH, verbose=1, progress_reporter=reporter, stock=REUSING)
    return reporter.told


@case("run.sync_config")
def artifacts_and_working_directory(side: Side) -> None:
    side.run(artifacts, config={"x": 1.0}, sync_config=tune.SyncConfig(sync_artifacts=True))


@case("RAY_CHDIR_TO_TRIAL_DIR")
def the_drivers_working_directory(side: Side) -> Any:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
        side.run(artifacts, config={"stays": True})
    return [row["cwd"] == str(Path.cwd()) for row in side.rows()[0]]


@case("run.storage_filesystem")
def a_file_system_of_its_own(side: Side) -> None:
    root = side.storage
    root.mkdir()
    filesystem = pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
    side.run(
        ReusableClimber,
        storage_path="inner",
        storage_filesystem=filesystem,
        config={"x": 1.0},
        stop=LENGTH,
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
    )


@case("run.export_formats")
def exported_models(side: Side) -> Any:
    config = {**GRID, "folder": str(side.notes)}
    side.run(ReusableClimber, config=config, stop=LENGTH, export_formats=["model"], stock=REUSING)
    return sorted(path.read_text() for path in side.notes.iterdir())


@case("run.reuse_actors", "run.max_concurrent_trials")
def reused_actors(side: Side) -> None:
    side.run(ReusableClimber, config=GRID, stop=LENGTH, reuse_actors=True, max_concurrent_trials=1)


@case("run.resources_per_trial")
def several_bundles(side: Side) -> None:
    request = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}])
    side.run(climb, config={"x": 1.0}, resources_per_trial=request)


@case(
    "run.raise_on_failed_trial",
    "run.fail_fast",
    "run.local_dir",
    "run.chdir_to_trial_dir",
    "run.mode",
    "run.metric",
    "run.scheduler",
    "run.search_alg",
    "run.resume",
    "run.time_budget_s",
    telling=True,
)
def arguments_that_are_refused(side: Side) -> None:
    wrongs: list[dict[str, Any]] = [
        {"mode": "most"},
        {"config": 3},
        {"local_dir": "x"},
        {"chdir_to_trial_dir": True},
        {"fail_fast": True, "max_failures": 1},
        {"scheduler": "no such"},
        {"search_alg": "no such"},
        {"scheduler": tune.create_scheduler("async_hyperband", metric="a", mode="min"), "metric": "b", "mode": "min"},
        {"search_alg": _Limited(), "max_concurrent_trials": 2},
        {"stop": 3},
        {"resume": "NEVER"},
        {"resume": "AUTO+NONSENSE"},
        {"time_budget_s": "x"},
        {"restore": "no/such/folder"},
        {"callbacks": [3]},
        {"storage_path": "s3x://no"},
        {"no_such": 1},
        {"num_samples": 0},
    ]
    for number, wrong in enumerate(wrongs):
        options = {"name": str(number), "config": {"length": 1, "x": 1.0}, "raise_on_failed_trial": True}
        side.run(climb, raises=True, **{**options, **wrong})


class _Limited(ConcurrencyLimiter):
    def __init__(self) -> None:
        super().__init__(ray.tune.search.Searcher(), 1)
