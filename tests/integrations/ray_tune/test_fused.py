"""Trials that are fused under Ray Tune: they train in one step, and Tune sees each as ever."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining  # noqa: E402

from fluid import FluidExecutor, tune  # noqa: E402
from fluid.elastic import as_tune_trainable  # noqa: E402
from fluid.fused import SGD, FusedTrainable, TensorData  # noqa: E402
from fluid.integrations.ray_tune.controller.decisions import Concurrency  # noqa: E402
from fluid.trainables.trainable import is_fusible  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Slope(FusedTrainable):
    """A line through noise, which the trials fit at rates of their own."""

    iteration_batches = 4

    def build(self, config: dict[str, Any]) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def optimizer(self, config: dict[str, Any]) -> Any:
        return SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, 8, generator=generator)
        return TensorData([x, x.sum(1, keepdim=True)], batch_size=64, seed=seed)


def run(packing: str, folder: Path, scheduler: Any, rates: list[float], iterations: int) -> tuple[Any, Counter[int]]:
    """Runs a sweep; returns Tune's analysis, and how many iterations trials did in packs of so many rows."""
    with FluidExecutor(backend="local", devices=1, packing=packing, run_dir=folder / "run") as executor:
        analysis = tune.run(
            as_tune_trainable(Slope),
            config={"lr": tune.grid_search(rates), "seed": 3},
            scheduler=scheduler,
            metric="loss",
            mode="min",
            executor=executor,
            stop={"training_iteration": iterations},
            storage_path=str(folder / "ray"),
            verbose=0,
        )
    results = [json.loads(line) for line in (folder / "run" / "results.jsonl").read_text().splitlines()]
    return analysis, Counter(result.get("rows", 1) for result in results)


def loss_alone(rate: float, iterations: int) -> float:
    """The loss of a trial's last iteration, in this process, without Fluid or Tune."""
    trial = Slope()
    trial.setup({"lr": rate, "seed": 3})
    return [float(trial.step()["loss"]) for _ in range(iterations)][-1]


RATES = [0.001 * 1.2**step for step in range(16)]


def test_trials_of_a_sweep_are_fused_and_get_the_results_that_they_get_alone(cluster: str, tmp_path: Path) -> None:
    fused, rows = run("fused", tmp_path, None, RATES, 6)
    assert max(rows) > 8
    for trial in fused.trials:
        assert trial.last_result["training_iteration"] == 6
        assert trial.last_result["loss"] == pytest.approx(loss_alone(trial.config["lr"], 6), rel=1e-4)
        assert trial.last_result["time_this_iter_s"] > 0.0, "that of the step"


def test_without_fusing_no_row_shares_a_step(cluster: str, tmp_path: Path) -> None:
    _, rows = run("off", tmp_path, None, RATES[:4], 3)
    assert set(rows) == {1}


def test_asha_stops_rows_of_a_pack(cluster: str, tmp_path: Path) -> None:
    asha = ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)
    analysis, rows = run("fused", tmp_path, asha, RATES, 9)
    assert max(rows) > 8
    lengths = [trial.last_result["training_iteration"] for trial in analysis.trials]
    assert len(lengths) == 16
    assert min(lengths) < 9
    assert max(lengths) == 9


def test_a_population_exchanges_checkpoints_between_rows(cluster: str, tmp_path: Path) -> None:
    population = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"lr": tune.loguniform(1e-3, 1e-1)},
    )
    analysis, rows = run("fused", tmp_path, population, RATES[:8], 20)
    assert max(rows) > 4
    assert all(trial.last_result["training_iteration"] == 20 for trial in analysis.trials)
    assert population._num_perturbations, "trials went on from others' checkpoints"


def test_more_trials_are_under_way_where_they_can_be_fused() -> None:
    own = Concurrency(4)
    assert own.limit(2, fusible=False) == 4
    assert own.limit(2, fusible=True) == 32
    own.note(16)
    own.note(2)
    assert own.limit(2, fusible=True) == 96
    assert own.limit(2, fusible=False) == 4
    assert Concurrency(4, is_given=True).limit(2, fusible=True) == 4
    assert Concurrency(None).limit(2, fusible=True) is None


def test_the_class_for_tune_says_that_it_can_be_fused() -> None:
    assert is_fusible(Slope)
    assert is_fusible(as_tune_trainable(Slope))
