"""Under Ray Tune a trial finds its process as one that ran no other trial, unless its sweep has ``reuse_actors``."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

pytest.importorskip("ray")
from ray.tune.schedulers import HyperBandScheduler, PopulationBasedTraining

from fluid import FluidExecutor, tune
from fluid.engine import tuning
from fluid.integrations.ray_tune.controller import bridge as controller_bridge

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
import tune_leftovers
from tune_sweeps import Climber, Sweep, sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GRID = tune.grid_search([1, 2, 3, 4])
LENGTH = {"training_iteration": 3}


def run(function: Any, folder: Path, executor: FluidExecutor, *, x: Any = GRID, **options: Any) -> Sweep:
    """Runs four trials of a function, each of which is to end without an error."""
    config = {"x": x, "folder": str(folder), **options.pop("config", {})}
    ended = sweep(function, folder / "sweep", executor, {"config": config, **options})
    assert ended.statuses == ["TERMINATED"] * len(ended.trials), [trial.error_file for trial in ended.analysis.trials]
    return ended


def last(ended: Sweep, name: str) -> list[Any]:
    """The last value of a metric, by trial."""
    return [trial.rows[-1][name] for trial in ended.trials]


def reported(ended: Sweep, *names: str) -> list[list[tuple[Any, ...]]]:
    return [[tuple(row[name] for name in names) for row in trial.rows] for trial in ended.trials]


# -- what a trial leaves behind ------------------------------------------------------------------------------


def test_flags_of_a_trial_are_not_those_of_the_next_one(executor: Any, tmp_path: Path) -> None:
    ended = run(tune_leftovers.set_flags, tmp_path, executor)
    assert last(ended, "variable") == [None] * 4
    assert last(ended, "dtype") == ["torch.float32"] * 4
    assert last(ended, "seen") == [1] * 4
    assert len(set(last(ended, "process"))) == 4


def test_each_trial_logs_to_its_own_file(executor: Any, tmp_path: Path) -> None:
    run(tune_leftovers.log_to_own_file, tmp_path, executor)
    written = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    assert written == {str(x): f"trial {x}\n" for x in (1, 2, 3, 4)}


def test_what_a_trial_has_under_way_is_done_as_its_process_ends(executor: Any, tmp_path: Path) -> None:
    run(tune_leftovers.leave_work, tmp_path, executor)
    notes = [tmp_path / f"{x}.txt" for x in (1, 2, 3, 4)]
    eventually(lambda: [path.exists() and path.read_text() for path in notes] == ["task\nexit function\n"] * 4)


def test_each_trial_does_what_a_process_can_do_once(executor: Any, tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    assert last(run(tune_leftovers.start_once, tmp_path, executor), "ranks") == [1] * 4


def test_each_trial_has_a_run_of_its_own(executor: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    ended = run(tune_leftovers.start_run, tmp_path, executor)
    assert last(ended, "read") == [1, 2, 3, 4]
    assert len(set(last(ended, "run"))) == 4


def test_memory_that_trials_leave_does_not_add_up(executor: Any, tmp_path: Path) -> None:
    ended = run(tune_leftovers.leak, tmp_path, executor, x=tune.grid_search(list(range(8))))
    assert last(ended, "held") == [1] * 8
    before = last(ended, "before")
    assert max(before) - min(before) < tune_leftovers.LEAK_BYTES / 2


# -- code of a trial that has ended --------------------------------------------------------------------------


@pytest.mark.parametrize("function", [tune_leftovers.report_through_errors, tune_leftovers.report_from_a_thread])
def test_code_of_a_stopped_trial_reports_to_no_other(executor: Any, tmp_path: Path, function: Any) -> None:
    ended = run(function, tmp_path, executor, x=tune.grid_search([1, 2, 3, 4, 5, 6]), stop=LENGTH)
    if function is tune_leftovers.report_through_errors:
        assert reported(ended, "x", "n") == [[(x, 1), (x, 2), (x, 3)] for x in range(1, 7)]
    else:  # Its thread may report first.
        assert [{x for (x,) in rows} for rows in reported(ended, "x")] == [{x} for x in range(1, 7)]
        assert [len(trial.rows) for trial in ended.trials] == [3] * 6


def test_code_of_a_sweep_that_has_ended_reports_to_no_later_one(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_bridge, "_CLEANUP_S", 0.1)
    monkeypatch.setattr(tuning, "CLEAN_UP_S", 0.5)

    class OnceItWaits(tune.Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return (tmp_path / "waits").exists()

    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "fluid", verbose=0) as executor:
        one, two = tmp_path / "one", tmp_path / "two"
        config = {"folder": str(tmp_path)}
        sweep(tune_leftovers.overrun, one, executor, {"config": {**config, "who": "first"}, "stop": OnceItWaits()})
        ended = sweep(tune_leftovers.overrun, two, executor, {"config": {**config, "who": "second"}})
    assert reported(ended, "who") == [[("second",)] * 40]
    assert not (tmp_path / "first").exists()


# -- what a trial holds until it is cleaned up ----------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path_factory.mktemp("one"), verbose=0) as made:
        yield made


def test_each_trial_gets_a_lock_that_trials_hold_while_they_train(one_device: Any, tmp_path: Path) -> None:
    config = {"lock": str(tmp_path / "lock")}
    ended = run(tune_leftovers.lock, tmp_path, one_device, config=config, stop={"training_iteration": 2})
    assert last(ended, "got") == [True] * 4


def test_trials_in_turn_get_a_port_that_they_hold_while_they_train(one_device: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = run(tune_leftovers.listen, tmp_path, one_device, config={"port": port}, stop={"training_iteration": 2})
    assert last(ended, "n") == [1] * 4


# -- which trials have a process of their own -----------------------------------------------------------------


def processes(ended: Sweep) -> list[set[int]]:
    return [{row["process"] for row in trial.rows} for trial in ended.trials]


def test_a_sweep_that_reuses_actors_shares_processes(one_device: Any, tmp_path: Path) -> None:
    ended = run(tune_leftovers.count, tmp_path, one_device, reuse_actors=True)
    assert sorted(last(ended, "seen")) == [1, 2, 3, 4]
    assert len(set(last(ended, "process"))) == 1
    options = tune.TuneConfig(reuse_actors=True)
    tuner = tune.Tuner(
        Climber,
        param_space={"x": GRID, "ends_at": 2},
        tune_config=options,
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tuner")),
        executor=one_device,
    )
    assert len({result.metrics["process"] for result in tuner.fit()}) == 1
    assert len(set().union(*processes(run(Climber, tmp_path / "two", one_device, config={"ends_at": 2})))) == 4


@pytest.mark.parametrize(
    ("options", "reuse", "number"),
    [
        ({"isolation": "trial"}, True, 4),
        ({"isolation": "lane"}, False, 1),
        ({"packing": "lane"}, False, 1),
        ({"rounds": True}, False, 1),
    ],
)
def test_what_the_executor_is_asked_for_comes_before_what_the_sweep_is(
    cluster: str, tmp_path: Path, options: dict[str, Any], reuse: bool, number: int
) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "fluid", verbose=0, **options) as executor:
        ended = run(Climber, tmp_path, executor, config={"ends_at": 2}, reuse_actors=reuse)
    assert len(set().union(*processes(ended))) == number


def test_a_trial_that_exploits_another_one_goes_on_in_a_new_process(one_device: Any, tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        metric="score",
        mode="max",
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"x": [0.5, 1.0, 2.0, 4.0]},
    )
    options = {"stop": {"training_iteration": 8}, "scheduler": scheduler, "reuse_actors": False}
    x = tune.grid_search([0.5, 1.0, 2.0, 4.0])
    ended = run(tune_leftovers.Counted, tmp_path, one_device, x=x, **options)
    assert scheduler._num_perturbations > 0
    assert any(len(found) > 1 for found in processes(ended))
    assert {row["set_ups"] for trial in ended.trials for row in trial.rows} == {1}
    assert sum(map(len, processes(ended))) == len(set().union(*processes(ended)))


def test_a_paused_trial_goes_on_in_its_process(one_device: Any, tmp_path: Path) -> None:
    scheduler = HyperBandScheduler("training_iteration", "score", "max", max_t=9)
    ended = run(Climber, tmp_path, one_device, x=tune.grid_search(list(range(9))), scheduler=scheduler)
    found = processes(ended)
    assert any(len(trial.rows) > 1 for trial in ended.trials)
    assert all(len(one) == 1 for one in found)
    assert len(set().union(*found)) == len(ended.trials)
