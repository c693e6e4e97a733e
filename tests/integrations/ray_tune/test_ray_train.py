"""Ray Train within trials: as with Ray Tune alone, on the devices of the trial, and never a wait for ever."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import eventually

from fluid.resources import Device

pytest.importorskip("ray")
import ray
import ray.train
from ray._raylet import PlacementGroupID
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.util.placement_group import PlacementGroup

from fluid import FluidExecutor, tune
from fluid.integrations.ray_tune.train.inner_training import DevicesWanted, WorkerNeed
from fluid.integrations.ray_tune.train.needs import InnerNeeds

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def six_cpus(two_nodes: Any) -> Iterator[str]:
    """The address of a cluster of two nodes, with four and two CPUs, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
        ray.init(two_nodes.address, log_to_driver=False, logging_level="ERROR")
        yield two_nodes.address
        ray.shutdown()


def trainable(folder: Path) -> Callable[[dict[str, Any]], None]:
    """A function that trains with Ray Train, whose workers do as its config says."""

    def loop(config: dict[str, Any]) -> None:
        context = ray.train.get_context()
        for epoch in range(1, config.get("epochs", 2) + 1):
            if epoch == config.get("fails_at"):
                raise ValueError(f"worker {context.get_world_rank()} has failed")
            with tempfile.TemporaryDirectory() as kept:
                Path(kept, "epoch").write_text(str(epoch))
                checkpoint = Checkpoint.from_directory(kept) if context.get_world_rank() == 0 else None
                metrics = {"loss": config["x"] / epoch, "workers": context.get_world_size(), "worker": os.getpid()}
                ray.train.report(metrics, checkpoint=checkpoint)

    def train(config: dict[str, Any]) -> None:
        if "before" in config:
            tune.report({"loss": -1.0})
        name = f"{tune.get_context().get_trial_id()}-{os.getpid()}"
        run = RunConfig(name=name, storage_path=str(folder / "inner"), callbacks=[TuneReportCallback()])
        scaling = ScalingConfig(**config.get("scaling", {"num_workers": 2}))
        DataParallelTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=run).fit()

    return train


def sweep(folder: Path, executor: FluidExecutor | None, configs: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Runs a trial of each config; returns the trials."""
    folder.mkdir()
    analysis = tune.run(
        trainable(folder),
        config=tune.grid_search(configs),
        storage_path=str(folder),
        raise_on_failed_trial=False,
        verbose=0,
        executor=executor,
        **options,
    )
    return list(analysis.trials)


def outcome(trial: Any) -> tuple[Any, ...]:
    """What must be as with Ray Tune alone."""
    last = trial.last_result
    error = trial.get_error() and trial.get_error().splitlines()[-1]
    kept = Path(last["checkpoint_path"], "epoch").read_text() if "checkpoint_path" in last else None
    return trial.status, last.get("loss"), last.get("workers"), last.get("training_iteration"), kept, error


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# --- What runs need, and what cannot be


@pytest.mark.parametrize(
    ("workers", "each", "devices", "places"),
    [
        (2, 1.0, 2, [0, 1]),
        (3, 2.0, 6, [0, 2, 4]),
        (3, 1.5, 6, [0, 2, 4]),
        (5, 0.5, 3, [0, 0, 1, 1, 2]),
        (4, 0.3, 2, [0, 0, 0, 1]),
        (4, 0.0, 0, []),
        (0, 1.0, 0, []),
    ],
)
def test_devices_of_workers(workers: int, each: float, devices: int, places: list[int]) -> None:
    need = WorkerNeed(workers, each)
    assert need.devices == devices
    assert [need.place(worker) for worker in range(workers if devices else 0)] == places


def needs(*hosts: str) -> InnerNeeds:
    """Of a session with a device on each of these hosts."""
    executor: Any = SimpleNamespace(devices=[Device(index, host=host) for index, host in enumerate(hosts)])
    return InnerNeeds(executor)


def wanted(devices: int, of_ray: bool) -> DevicesWanted:
    return DevicesWanted("cpu", devices, of_ray, "Trainer")


def test_a_need_is_learned_from_the_first_trial() -> None:
    trial: Any = SimpleNamespace(trainable_name="train")
    known = needs("a", "a", "a", "b", "b")
    assert known.devices_of(trial) is None and known.most_at_once(trial) is None
    assert known.answer(trial, 1, wanted(1, of_ray=True)) is None
    assert known.answer(trial, 1, wanted(3, of_ray=True)) == 3
    assert known.answer(trial, 1, wanted(2, of_ray=True)) == 2
    assert known.devices_of(trial) == 2 and known.most_at_once(trial) == 2
    assert known.answer(trial, 2, wanted(2, of_ray=True)) is None
    # Where trials differ, those that need more find out themselves.
    assert known.answer(trial, 2, wanted(3, of_ray=True)) == 3
    assert known.devices_of(trial) == 2


@pytest.mark.slow
def test_ray_has_the_cpus_with_the_local_backend() -> None:
    trial: Any = SimpleNamespace(trainable_name="train")
    known = needs("", "")
    assert known.answer(trial, 1, wanted(8, of_ray=False)) == 2
    assert known.answer(trial, 2, wanted(8, of_ray=False)) is None


@pytest.mark.slow
def test_a_trainer_is_no_trainable() -> None:
    """As with Ray Tune alone."""
    trainer = DataParallelTrainer(print)
    with pytest.raises(Exception) as alone:
        ray.tune.Tuner(trainer)
    with (
        FluidExecutor(backend="local", devices=1, verbose=0) as executor,
        pytest.raises(type(alone.value)) as ours,
    ):
        tune.Tuner(trainer, executor=executor)
    assert str(ours.value) == str(alone.value)


# --- Sweeps

#: What may become of a run: it ends, fails, or is stopped after its fourth result.
CONFIGS = [{"x": 1.0}, {"x": 2.0, "fails_at": 2}, {"x": 4.0, "before": True}, {"x": 3.0, "epochs": 10_000}]
STOP = {"training_iteration": 4}


@pytest.fixture(scope="module")
def stock(six_cpus: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What becomes of the configs with Ray Tune alone, one after another."""
    folder = tmp_path_factory.mktemp("stock") / "sweep"
    outcomes = [outcome(trial) for trial in sweep(folder, None, CONFIGS, stop=STOP, max_concurrent_trials=1)]
    # Without Ray's dashboard, the placement group of a trial that was stopped stays.
    for name, group in ray.util.placement_group_table().items():
        if group["state"] != "REMOVED":
            ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
    return outcomes


@pytest.mark.long
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_it_is_as_with_ray_tune_alone(stock: list[Any], tmp_path: Path, backend: str) -> None:
    devices = 4 if backend == "local" else None
    with FluidExecutor(backend=backend, devices=devices, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = sweep(tmp_path / "sweep", executor, CONFIGS, stop=STOP)
        assert [outcome(trial) for trial in trials] == stock
        assert len({trial.last_result["pid"] for trial in trials}) == len(trials), "each has a process of its own"
        # Nothing is held when a sweep has ended.
        eventually(lambda: not any(is_alive(trial.last_result["worker"]) for trial in trials))
        left = 6.0 if backend == "local" else 0.0
        eventually(lambda: ray.available_resources().get("CPU", 0.0) == left)
    assert {state[0] for state in stock} == {"TERMINATED", "ERROR"}
    assert [state[3] for state in stock] == [2, 1, 3, 4]


@pytest.mark.slow
def test_what_cannot_be_is_said(six_cpus: str, tmp_path: Path) -> None:
    configs = [
        {"x": 1.0, "scaling": {"num_workers": 9}},
        {"x": 1.0, "scaling": {"num_workers": 2, "use_gpu": True}},
        {"x": 1.0, "scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 1, "special": 1}}},
        {"x": 1.0, "scaling": {"num_workers": (1, 2)}},
        {"x": 5.0, "scaling": {"num_workers": 1}},
    ]
    with FluidExecutor(backend="ray", run_dir=tmp_path / "run", verbose=0) as executor:
        *refused, last = sweep(tmp_path / "sweep", executor, configs)
    said = [trial.get_error() for trial in refused]
    assert "9 CPUs of one machine: Fluid has 6, of which the largest machine has 4" in said[0]
    assert "the 2 workers of Ray Train need 2 GPU in all, and the Ray cluster has 0" in said[1]
    assert "is not supported in a trial whose devices Fluid has from Ray: special" in said[2]
    assert "num_workers=(1, 2): is not supported" in said[3]
    assert outcome(last)[:3] == ("TERMINATED", 2.5, 1)


@pytest.mark.long
@pytest.mark.slow
def test_a_lane_that_dies_takes_its_workers_along(six_cpus: str, tmp_path: Path) -> None:
    inner = trainable(tmp_path)
    marker = tmp_path / "died"

    class Dies(tune.Callback):  # type: ignore[misc]
        """Kills the lane of the first trial at its second result."""

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
            if result["training_iteration"] == 2 and not marker.exists():
                marker.write_text(str(result["worker"]))
                os.kill(result["pid"], signal.SIGKILL)

    with FluidExecutor(backend="ray", run_dir=tmp_path / "run", verbose=0) as executor:
        analysis = tune.run(
            inner,
            config={"x": 1.0, "epochs": 10_000, "scaling": {"num_workers": 4}},
            stop=STOP,
            storage_path=str(tmp_path),
            max_failures=1,
            callbacks=[Dies()],
            verbose=0,
            executor=executor,
        )
    assert outcome(analysis.trials[0])[:4] == ("TERMINATED", 0.25, 4, 4)
    eventually(lambda: not is_alive(int(marker.read_text())))
