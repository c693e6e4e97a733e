"""fluid.run with facades of SMAC as its searcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult

pytestmark = pytest.mark.frameworks("smac")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, max_failures=0, verbose=0) as made:
        yield made


class Train:
    """Counts its iterations, so that one that began anew would be found."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.count = config, 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        if self.config["x"] > self.config.get("limit", 1.0):
            raise MemoryError("too much")
        return {"loss": self.config["x"] + 1.0 / self.count, "gain": -self.config["x"], "count": self.count}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count.json").write_text(json.dumps(self.count))

    def load_checkpoint(self, folder: str) -> None:
        self.count = json.loads(Path(folder, "count.json").read_text())

    def cleanup(self) -> None:
        pass


def scenario(folder: Path, **options: Any) -> Any:
    from ConfigSpace import ConfigurationSpace
    from smac import Scenario

    space = ConfigurationSpace({"x": (0.0, 1.0), "kind": ["a", "b"]}, seed=0)
    settings = {"deterministic": True, "n_trials": 8, "output_directory": folder, "seed": 0, **options}
    return Scenario(space, **settings)


def random_forest(folder: Path, **options: Any) -> Any:
    from smac import HyperparameterOptimizationFacade

    return HyperparameterOptimizationFacade(scenario(folder, **options), logging_level=False, overwrite=True)


def run(facade: Any, executor: FluidExecutor, space: Any = None, **options: Any) -> SweepResult:
    from fluid.integrations.smac import SMACSearcher

    arguments = {"metric": "loss", "budget": 9, "algorithm": "full", **options}
    return fluid.run(Train, space, searcher=SMACSearcher(facade), executor=executor, **arguments)


def costs(facade: Any) -> dict[tuple[Any, ...], Any]:
    history = facade.runhistory
    return {(history.get_config(key.config_id)["x"], key.budget): one for key, one in history.items()}


@pytest.mark.parametrize(("metric", "sign"), [("loss", 1.0), ("gain", -1.0)])
def test_smac_knows_all_and_the_best(metric: str, sign: float, executor: FluidExecutor, tmp_path: Path) -> None:
    facade = random_forest(tmp_path)
    result = run(facade, executor, metric=metric, mode="min" if metric == "loss" else "max")
    assert len(result.trials) == facade.runhistory.finished == 8
    assert {key[0]: one.cost for key, one in costs(facade).items()} == {
        trial.config["x"]: sign * trial.metrics[metric] for trial in result.trials
    }
    assert all(one.time > 0.0 for one in costs(facade).values())
    assert facade.intensifier.get_incumbent()["x"] == result.best.config["x"]
    assert {type(value) for trial in result.trials for value in trial.config.values()} == {float, str}


def test_smac_suggests_while_asha_stops(executor: FluidExecutor, tmp_path: Path) -> None:
    facade = random_forest(tmp_path, n_trials=12)
    result = run(facade, executor, algorithm="asha")
    assert facade.runhistory.finished == len(result.trials) == 12
    assert {trial.iteration for trial in result.trials} > {9}


def test_what_fails_gets_the_worst_cost(executor: FluidExecutor, tmp_path: Path) -> None:
    from smac.runhistory import StatusType

    facade = random_forest(tmp_path)
    result = run(facade, executor, {"limit": 0.5}, max_concurrent=1)
    found = costs(facade)
    failed = [trial for trial in result.trials if trial.state == "FAILED"]
    assert 0 < len(failed) < len(found) == 8
    finite = [one.cost for one in found.values() if one.status == StatusType.SUCCESS]
    for trial in failed:
        one = found[trial.config["x"], None]
        assert one.status == StatusType.MEMORYOUT
        assert one.cost in finite


def test_a_crash_cost_is_told_as_it_is(executor: FluidExecutor, tmp_path: Path) -> None:
    facade = random_forest(tmp_path, crash_cost=50.0, n_trials=4)
    with pytest.raises(fluid.SweepFailedError):
        run(facade, executor, {"limit": -1.0})
    assert [one.cost for one in costs(facade).values()] == [50.0] * 4


def test_budgets_of_smac_extend_trials(executor: FluidExecutor, tmp_path: Path) -> None:
    from smac import MultiFidelityFacade

    settings = scenario(tmp_path, min_budget=1, max_budget=9, n_trials=16)
    facade = MultiFidelityFacade(settings, logging_level=False, overwrite=True)
    result = run(facade, executor, max_concurrent=1)
    lengths = Counter(trial.iteration for trial in result.trials)
    assert set(lengths) == {1, 3, 9}
    assert facade.runhistory.finished == 16 > len(result.trials), "promoted configs continue"
    for trial in result.trials:
        assert [one.metrics["count"] for one in trial.results] == list(range(1, trial.iteration + 1))
    for (x, budget), one in costs(facade).items():
        assert one.cost == pytest.approx(x + 1.0 / budget)


def test_seeds_of_smac_are_in_the_configs(executor: FluidExecutor, tmp_path: Path) -> None:
    facade = random_forest(tmp_path, deterministic=False, n_trials=8)
    result = run(facade, executor, budget=1, max_concurrent=1)
    seeds = Counter((trial.config["x"], trial.config["seed"]) for trial in result.trials)
    assert set(seeds.values()) == {1}
    assert len({x for x, _ in seeds}) < 8, "the best config is tried with several seeds"


def test_several_objectives(executor: FluidExecutor, tmp_path: Path) -> None:
    facade = random_forest(tmp_path, objectives=["loss", "gain"], n_trials=4)
    run(facade, executor, metric=("loss", "gain"), mode=("min", "max"))
    assert {len(one.cost) for one in costs(facade).values()} == {2}


def test_what_does_not_fit_is_refused(executor: FluidExecutor, tmp_path: Path) -> None:
    from ConfigSpace import ConfigurationSpace
    from smac import HyperparameterOptimizationFacade, MultiFidelityFacade, Scenario

    from fluid.integrations.smac import SMACSearcher

    with pytest.raises(InvalidFieldError, match="objectives"):
        run(random_forest(tmp_path), executor, metric=("loss", "gain"), mode=("min", "max"))
    with pytest.raises(InvalidFieldError, match="facade"):
        SMACSearcher(Path())
    settings = Scenario(ConfigurationSpace({"seed": (0, 9)}), output_directory=tmp_path)
    with pytest.raises(InvalidFieldError, match="another name"):
        SMACSearcher(HyperparameterOptimizationFacade(settings, logging_level=False, overwrite=True))
    settings = scenario(tmp_path / "budgets", min_budget=1, max_budget=9)
    facade = MultiFidelityFacade(settings, logging_level=False, overwrite=True)
    with pytest.raises(InvalidFieldError, match="use algorithm='full'"):
        run(facade, executor, algorithm="asha")


@pytest.mark.frameworks("smac", "sklearn")
@pytest.mark.parametrize("searcher", ["own", "smac"])
def test_the_example_finds_a_good_network(searcher: str, tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "frameworks" / "ask_tell.py"
    command = [sys.executable, str(script), "--searcher", searcher, "--samples", "12", "--devices", "2"]
    environment = {**os.environ, "FLUID_RUNS": str(tmp_path), "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300.0, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"best: accuracy (\S+) with", done.stdout)
    assert found is not None
    assert float(found[1]) > 0.8
