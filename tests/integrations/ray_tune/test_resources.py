"""Sweeps whose trials request resources: what they are given, and what is refused."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.tune")
import ray.tune
from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler

from fluid import Device, FluidExecutor, InvalidFieldError, tune
from fluid.integrations.ray_tune import FluidScheduler

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, Sweep, sweep, write_state

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

Run = Callable[..., Sweep]
GRID = {"x": tune.grid_search([1.0, 2.0])}
LENGTH = {"training_iteration": 4}


@pytest.fixture
def run(executor: FluidExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a sweep on two cores, or on another executor; Tune's loggers write nothing."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

    def run(trainable: Any, on: FluidExecutor | None = None, **options: Any) -> Sweep:
        return sweep(trainable, tmp_path / "sweep", on or executor, {"config": GRID, "stop": LENGTH, **options})

    return run


class Shows(Climber):
    """Reports what it was given."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.at_setup = self.trial_resources.required_resources

    def step(self) -> dict[str, Any]:
        return {
            **super().step(),
            "resources": self.trial_resources.required_resources,
            "at_setup": self.at_setup,
            "threads": os.environ["OMP_NUM_THREADS"],
        }


def show(config: dict[str, Any]) -> None:
    """The same as a function, for four iterations."""
    resources = ray.tune.get_context().get_trial_resources().required_resources
    steps, folder = 0, Path(config["folder"])
    if (checkpoint := ray.tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            steps = int((Path(saved) / "steps").read_text())
    for step in range(steps + 1, 5):
        saved = folder / f"{ray.tune.get_context().get_trial_id()}-{step}"
        saved.mkdir()
        (saved / "steps").write_text(str(step))
        ray.tune.report(
            {"steps": step, "resources": resources, "threads": os.environ["OMP_NUM_THREADS"]},
            checkpoint=ray.tune.Checkpoint.from_directory(str(saved)),
        )


class Defaults(Shows):
    """Requests by its config."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": config["x"]}])


def show_too(config: dict[str, Any]) -> None:
    """The same; requests are kept with a function."""
    show(config)


def by_config(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    return tune.PlacementGroupFactory([{"CPU": config["x"]}])


def grows(tune_controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> tune.PlacementGroupFactory:
    """One CPU for two iterations, then two."""
    return tune.PlacementGroupFactory([{"CPU": 1 + (result["training_iteration"] >= 2)}])


def column(sweep: Sweep, name: str) -> list[list[Any]]:
    return [[row[name] for row in trial.rows] for trial in sweep.trials]


# --- What a trial is given


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainable",
    [tune.with_resources(Shows, by_config), tune.with_resources(show_too, by_config), Defaults],
    ids=["class", "function", "default request"],
)
def test_a_trial_sees_what_it_requested_and_has_as_many_threads(run: Run, trainable: Any, tmp_path: Path) -> None:
    done = run(trainable, config={**GRID, "folder": str(tmp_path)})
    assert done.statuses == ["TERMINATED"] * 2
    assert column(done, "resources") == [[{"CPU": 1.0}] * 4, [{"CPU": 2.0}] * 4]
    assert column(done, "threads") == [["1"] * 4, ["2"] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [Shows, show], ids=["class", "function"])
def test_a_changed_request_takes_effect_when_the_trial_goes_on(run: Run, trainable: Any, tmp_path: Path) -> None:
    changing = ResourceChangingScheduler(FIFOScheduler(), grows)
    done = run(trainable, config={**GRID, "folder": str(tmp_path)}, scheduler=changing)
    assert done.statuses == ["TERMINATED"] * 2
    assert column(done, "steps") == [[1, 2, 3, 4]] * 2
    assert column(done, "resources") == [[{"CPU": 1.0}] * 2 + [{"CPU": 2.0}] * 2] * 2
    assert column(done, "threads") == [["1", "1", "2", "2"]] * 2
    if trainable is Shows:
        assert column(done, "at_setup") == column(done, "resources")


class Counts(tune.Trainable):
    """Reports how many trials were in an iteration at the same time as this one."""

    def step(self) -> dict[str, Any]:
        mark = Path(self.config["folder"]) / f"in-{self.trial_id}"
        mark.touch()
        most = 0
        for _ in range(10):
            most = max(most, len(list(mark.parent.glob("in-*"))))
            time.sleep(0.005)
        mark.unlink()
        return {"together": most}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        write_state(checkpoint_dir, 0, 0.0)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        pass


def together(sweep: Sweep) -> int:
    assert sweep.statuses == ["TERMINATED"] * len(sweep.trials)
    return int(max(map(max, column(sweep, "together"))))


class Lingers(tune.Trainable):
    """Counts those that are between the begin of their set-up and the end of their clean-up."""

    def setup(self, config: dict[str, Any]) -> None:
        self.mark = Path(config["folder"]) / f"in-{self.trial_id}"
        self.mark.touch()

    def step(self) -> dict[str, Any]:
        return {"together": len(list(self.mark.parent.glob("in-*"))), "done": self.iteration == 1}

    def cleanup(self) -> None:
        time.sleep(0.3)
        self.mark.unlink()


class Weighs(Counts):
    """Counts for as many trials as it has CPUs."""

    def step(self) -> dict[str, Any]:
        further = Path(self.config["folder"]) / f"in-{self.trial_id}-further"
        if self.config["x"] > 1.0:
            further.touch()
        try:
            return super().step()
        finally:
            further.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(("request_", "most"), [({"cpu": 2}, 1), ({"cpu": 1, "seat": 1}, 1), ({"cpu": 1}, 2)])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_as_many_trials_run_at_once_as_ray_has_what_they_request(
    run: Run, cluster: str, tmp_path: Path, request_: dict[str, float], most: int, backend: str
) -> None:
    options: dict[str, Any] = {"config": {"folder": str(tmp_path)}, "num_samples": 5}
    with FluidExecutor(backend=backend, devices=2, packing="auto", run_dir=tmp_path / "run", verbose=0) as two:
        assert together(run(Counts, two, **options, resources_per_trial=request_)) <= most
        assert together(run(tune.with_resources(Counts, request_), two, name="b", **options)) <= most


@pytest.mark.slow
def test_a_trial_has_what_it_requested_until_it_is_cleaned_up(run: Run, tmp_path: Path) -> None:
    config = {"folder": str(tmp_path)}
    assert together(run(Lingers, config=config, num_samples=4, resources_per_trial={"cpu": 2})) == 1


def test_requests_that_change_are_counted_as_they_are(run: Run, tmp_path: Path) -> None:
    """Two trials of one CPU, or one of two."""
    config = {"folder": str(tmp_path), "x": tune.grid_search([1.0, 2.0, 1.0, 2.0, 1.0, 1.0])}
    done = run(tune.with_resources(Weighs, by_config), config=config)
    assert together(done) <= 2


def test_a_concurrency_that_is_given_comes_before_requests(run: Run, executor: FluidExecutor, tmp_path: Path) -> None:
    options: dict[str, Any] = {"config": {"folder": str(tmp_path)}, "num_samples": 6, "stop": {"training_iteration": 8}}
    free = FluidScheduler(concurrency=2)
    assert together(run(Counts, scheduler=free, resources_per_trial={"cpu": 2}, **options)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most"), [(0.5, 2), (0.3, 3), (0.9, 1)])
def test_a_share_bounds_the_trials_on_a_device(run: Run, cluster: str, tmp_path: Path, share: float, most: int) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as one:
        done = run(Counts, one, config={"folder": str(tmp_path)}, num_samples=6, resources_per_trial={"cpu": share})
    assert done.statuses == ["TERMINATED"] * 6
    assert max(map(max, column(done, "together"))) <= most


@pytest.mark.slow
def test_a_custom_resource_is_a_tag_of_devices(run: Run, cluster: str, tmp_path: Path) -> None:
    devices = [Device(0), Device(1, tags=("licence",))]
    with FluidExecutor(backend="local", devices=devices, run_dir=tmp_path / "run", verbose=0) as two:
        wanted = {"cpu": 1, "licence": 1}
        done = run(Shows, two, config={"x": 1.0}, num_samples=6, resources_per_trial=wanted)
        results = (two.run_dir / "results.jsonl").read_text().splitlines()
    assert done.statuses == ["TERMINATED"] * 6
    assert {device for result in results for device in json.loads(result)["devices"]} == {1}


# --- GPUs


class Sees(Counts):
    """Reports the GPUs that it sees, too."""

    def step(self) -> dict[str, Any]:
        return {**super().step(), "visible": os.environ["CUDA_VISIBLE_DEVICES"].split(",")}


@pytest.mark.gpu
@pytest.mark.parametrize(("share", "most"), [(0.5, 2), (0.9, 1)])
def test_a_share_bounds_the_trials_on_a_gpu(run: Run, cluster: str, tmp_path: Path, share: float, most: int) -> None:
    gpu = [Device(0, kind="gpu")]
    with FluidExecutor(backend="local", devices=gpu, run_dir=tmp_path / "run", verbose=0) as one:
        done = run(Sees, one, config={"folder": str(tmp_path)}, num_samples=6, resources_per_trial={"gpu": share})
    assert done.statuses == ["TERMINATED"] * 6
    assert max(map(max, column(done, "together"))) <= most
    assert {len(visible) for rows in column(done, "visible") for visible in rows} == {1}


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_trial_that_requests_two_gpus_sees_both_and_has_them_for_itself(
    run: Run, cluster: str, tmp_path: Path
) -> None:
    gpus = [Device(index, kind="gpu") for index in range(2)]
    with FluidExecutor(backend="local", devices=gpus, run_dir=tmp_path / "run", verbose=0) as two:
        done = run(Sees, two, config={"folder": str(tmp_path)}, num_samples=3, resources_per_trial={"gpu": 2})
    assert done.statuses == ["TERMINATED"] * 3
    assert column(done, "together") == [[1] * 4] * 3
    assert {len(set(visible)) for rows in column(done, "visible") for visible in rows} == {2}


# --- What is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"cpu": 99}, r"resources=\{'CPU': 99\.0\}: no node has so much of CPU; one has \d+ at most"),
        ({"cpu": 1, "gpu": 1}, r"resources=\{.*'GPU': 1\.0\}: .*fits on no device: .*there are 2 x cpu"),
        ({"gpu": 2}, r"resources=\{'GPU': 2\.0\}: .*fits on no device: .*there are 2 x cpu"),
        ({"gpu": 1.5}, "GPU must be a whole number"),
        ({"cpu": 1, "licence": 1}, "no node has licence"),
        ({"cpu": 1, "accelerator_type:A100": 0.001}, "no node has accelerator_type:A100"),
        ({"cpu": 1, "memory": 2.0**60}, "no node has so much memory; one has .* GiB at most"),
    ],
)
def test_what_can_never_run_is_refused_with_what_there_is(
    run: Run, request_: dict[str, float], reason: str, executor: FluidExecutor
) -> None:
    with pytest.raises(InvalidFieldError, match=reason):
        run(Climber, resources_per_trial=request_)
    with pytest.raises(InvalidFieldError, match=reason):
        tune.Tuner(tune.with_resources(Climber, request_), param_space={"x": 1.0}, executor=executor).fit()
    assert run(Climber).statuses == ["TERMINATED"] * 2
