"""Hangs that users reported of Ray Tune, each as a sweep under Fluid. The numbers are those of ray-project/ray.

A sweep that hangs ends when its time budget runs out, with trials that lack iterations.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray.tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    PopulationBasedTraining,
    ResourceChangingScheduler,
    TrialScheduler,
)

from fluid import FluidExecutor, tune
from fluid.engine import tuning

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, Sweep, climb, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Seconds after which a sweep gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 60.0
SCORE = {"metric": "score", "mode": "max"}


class Order(tune.Callback):
    """Records the results in the order in which they come: number of the trial, and iteration."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.heard.append((int(trial.trial_id.rpartition("_")[2]), result["training_iteration"]))


@pytest.fixture
def run(executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sweep]:
    """Runs a sweep on two devices, unless another executor is given; Tune's loggers write nothing."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

    def run(trainable: Any, on: FluidExecutor | None = None, **options: Any) -> Sweep:
        return sweep(trainable, tmp_path / "sweep", on or executor, {"time_budget_s": PATIENCE, **options})

    return run


def train_with_loader(config: dict[str, Any]) -> None:
    """Trains on a dataset that is prepared under a lock and loaded by a further process."""
    import torch
    from filelock import FileLock

    path = Path(config["folder"]) / "data.pt"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            torch.save(torch.arange(8.0), path)
    data = torch.load(path)
    model = torch.nn.Linear(1, 1)
    for _ in range(4):
        batches = torch.utils.data.DataLoader(data[:, None], batch_size=4, num_workers=1)
        seen = sum(model(batch).shape[0] for batch in batches)
        ray.tune.report({"score": config["x"], "seen": seen})


def test_28197_the_last_trial_of_asha_reports_though_its_data_loader_forks(
    run: Callable[..., Sweep], tmp_path: Path
) -> None:
    """#28197: ten trials of an MNIST example; nine ended, the last was RUNNING without a result, all CPUs idle."""
    pytest.importorskip("torch")
    asha = ASHAScheduler(**SCORE, time_attr="training_iteration", max_t=4, grace_period=1, reduction_factor=2)
    config = {"x": tune.grid_search([1, 4, 2, 9, 3, 8, 5, 7, 6, 10]), "folder": str(tmp_path)}
    done = run(train_with_loader, config=config, scheduler=asha)
    assert done.statuses == ["TERMINATED"] * 10
    assert all(trial.iterations == list(range(1, len(trial.rows) + 1)) for trial in done.trials)
    assert all(row["seen"] == 8 for trial in done.trials for row in trial.rows)
    assert done.trials[-1].iterations == [1, 2, 3, 4]


def test_23858_all_of_200_samples_run(run: Callable[..., Sweep]) -> None:
    """#23858: of 200 samples, 8 had ended and 4 were RUNNING without a result; 30 were PENDING for ever."""
    done = run(climb, config={"x": tune.uniform(0.0, 1.0), "length": 1}, num_samples=200)
    assert done.statuses == ["TERMINATED"] * 200
    assert all(trial.rows[0]["steps"] == 1 for trial in done.trials)


class Hangs(Climber):
    """Number ``victim`` hangs in its second iteration, ``hangs`` times, in C code that keeps the interpreter's lock."""

    def step(self) -> dict[str, Any]:
        if self.steps == 1 and self.trial_id.endswith(f"_{self.config['victim']:05d}"):
            notes = Path(self.config["folder"])
            times = len(list(notes.iterdir()))
            if times < self.config["hangs"]:
                (notes / str(times)).touch()
                re.match("(a+)+$", "a" * 60 + "b")
        return dict(super().step())


@pytest.mark.parametrize(
    ("hangs", "max_failures", "status", "iterations"),
    [(1, 0, "TERMINATED", [1, 2, 3]), (9, 0, "ERROR", [1]), (2, 1, "TERMINATED", [1, 2, 3])],
    ids=["once", "always", "until Tune restarts it"],
)
def test_21418_a_trial_that_hangs_costs_itself_only(
    run: Callable[..., Sweep],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hangs: int,
    max_failures: int,
    status: str,
    iterations: list[int],
) -> None:
    """#21418: the process of the 16th trial hung on one machine; no error, and 17 trials PENDING for ever."""
    # Of the limit on iterations that nobody set: 60 s and 10 minutes otherwise.
    monkeypatch.setattr(tuning, "LEAST_DUMP_S", 1.0)
    monkeypatch.setattr(tuning, "LEAST_KILL_S", 2.0)
    (notes := tmp_path / "notes").mkdir()
    config = {"x": tune.grid_search([1.0] * 20), "folder": str(notes), "victim": 15, "hangs": hangs}
    frequent = tune.CheckpointConfig(checkpoint_frequency=1)
    options = {"stop": {"training_iteration": 3}, "max_failures": max_failures, "checkpoint_config": frequent}
    done = run(Hangs, config=config, **options)
    victim = done.trials.pop(15)
    assert [trial.status for trial in done.trials] == ["TERMINATED"] * 19
    assert [trial.iterations for trial in done.trials] == [[1, 2, 3]] * 19
    assert (victim.status, victim.iterations) == (status, iterations)
    assert victim.failures == (hangs > 1)
    if victim.failures:
        assert "its iteration gave no result for" in (victim.folder / "error.txt").read_text()


def test_18903_a_searcher_gets_every_result_though_they_come_faster_than_it_takes_them(
    run: Callable[..., Sweep],
) -> None:
    """#18903: with Optuna and thousands of results, the loop of Tune fell behind and the CPUs idled."""
    pytest.importorskip("optuna")
    from ray.tune.search.optuna import OptunaSearch

    done = run(
        climb,
        config={"x": tune.uniform(0.0, 1.0), "length": 50},
        num_samples=20,
        search_alg=OptunaSearch(**SCORE, seed=1),
        max_concurrent_trials=4,
    )
    assert done.statuses == ["TERMINATED"] * 20
    # Tune repeats the last result of a function when it ends.
    assert all([row["steps"] for row in trial.rows][:50] == list(range(1, 51)) for trial in done.trials)


def test_18332_trials_that_request_all_cpus_start_after_one_has_failed(
    run: Callable[..., Sweep], tmp_path: Path
) -> None:
    """#18332: one of ten trials was in ERROR, and eight stayed PENDING, each requesting all CPUs."""
    config = {"x": tune.grid_search(list(range(10))), "folder": str(tmp_path), "raises_at": [1], "victim": 0}
    done = run(Climber, config=config, resources_per_trial={"cpu": 2}, stop={"training_iteration": 2})
    assert done.statuses == ["ERROR", *["TERMINATED"] * 9]
    assert [trial.iterations for trial in done.trials] == [[], *[[1, 2]] * 9]


def test_24933_paused_trials_and_pending_ones_take_turns_on_one_device(
    run: Callable[..., Sweep], cluster: str, tmp_path: Path
) -> None:
    """#24933 and #24878: with room for one trial, pausing it lost the claim of the next, which stayed PENDING."""
    order = Order()
    pbt = PopulationBasedTraining(
        **SCORE, time_attr="training_iteration", perturbation_interval=1, hyperparam_mutations={"x": [1.0, 2.0]}
    )
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as one:
        config = {"x": tune.grid_search([1.0, 2.0, 1.5, 3.0])}
        done = run(Climber, one, config=config, scheduler=pbt, stop={"training_iteration": 4}, callbacks=[order])
    assert done.statuses == ["TERMINATED"] * 4
    assert [set(trial.iterations) for trial in done.trials] == [{1, 2, 3, 4}] * 4
    assert {trial for trial, _ in order.heard[:8]} == {0, 1, 2, 3}


def one_cpu_or_two(tune_controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
    return tune.PlacementGroupFactory([{"CPU": 1 + result["training_iteration"] % 2}])


class Pauses(ResourceChangingScheduler):  # type: ignore[misc]
    """Counts the trials that are paused to change their resources."""

    number = 0

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = str(super().on_trial_result(tune_controller, trial, result))
        self.number += decision == TrialScheduler.PAUSE
        return decision


def test_30265_trials_whose_resources_change_all_go_on(run: Callable[..., Sweep]) -> None:
    """#30265: with ResourceChangingScheduler, two trials stayed PAUSED after an epoch, and 70 PENDING."""
    changing = Pauses(FIFOScheduler(), one_cpu_or_two)
    config = {"x": tune.uniform(0.0, 1.0)}
    done = run(Climber, config=config, num_samples=24, scheduler=changing, stop={"training_iteration": 3})
    assert done.statuses == ["TERMINATED"] * 24
    assert [trial.iterations for trial in done.trials] == [[1, 2, 3]] * 24
    assert changing.number >= 24


class Batches(tune.Trainable):
    """Counts time steps, of which each iteration does as many as its batch has."""

    def setup(self, config: dict[str, Any]) -> None:
        self.timesteps = 0

    def step(self) -> dict[str, Any]:
        self.timesteps += self.config["batch"]
        return {"score": self.config["x"] * self.timesteps, "timesteps_total": self.timesteps}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "timesteps").write_text(str(self.timesteps))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.timesteps = int((Path(checkpoint_dir) / "timesteps").read_text())


def bohb(run: Callable[..., Sweep], samples: int, config: dict[str, Any], **scheduler: Any) -> Sweep:
    pytest.importorskip("ConfigSpace")
    pytest.importorskip("hpbandster")
    from ray.tune.search.bohb import TuneBOHB

    return run(
        Batches,
        config={"x": tune.uniform(0.1, 1.0), **config},
        num_samples=samples,
        search_alg=TuneBOHB(**SCORE, seed=3),
        scheduler=HyperBandForBOHB(**SCORE, reduction_factor=2, **scheduler),
    )


def test_14500_a_bracket_of_bohb_goes_on_when_all_its_trials_pause(run: Callable[..., Sweep]) -> None:
    """#14500: all trials of BOHB paused, and the sweep ended with an error about paused trials."""
    done = bohb(run, 10, {"batch": 1}, time_attr="training_iteration", max_t=8)
    assert done.statuses == ["TERMINATED"] * 10
    assert max(trial.iterations[-1] for trial in done.trials) == 8
    assert len({trial.iterations[-1] for trial in done.trials}) > 1


def test_9245_a_bracket_of_bohb_goes_on_though_trials_overshoot_its_milestones(run: Callable[..., Sweep]) -> None:
    """#9245: with time steps as the time, iterations passed several milestones; 166 trials stayed PAUSED."""
    done = bohb(run, 10, {"batch": tune.choice([3, 5, 11])}, time_attr="timesteps_total", max_t=32)
    assert done.statuses == ["TERMINATED"] * 10
    assert max(trial.rows[-1]["timesteps_total"] for trial in done.trials) >= 32


class PausesFour(FIFOScheduler):  # type: ignore[misc]
    """Pauses the first four trials at their second iteration, and resumes them when no other trial is left."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[str] = set()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if result["training_iteration"] == 2 and len(self.paused) < 4 and trial.trial_id not in self.paused:
            self.paused.add(trial.trial_id)
            return str(TrialScheduler.PAUSE)
        return str(TrialScheduler.CONTINUE)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        by_status = defaultdict(list)
        for trial in tune_controller.get_trials():
            by_status[trial.status].append(trial)
        if by_status["PENDING"]:
            return by_status["PENDING"][0]
        return by_status["PAUSED"][0] if by_status["PAUSED"] and not by_status["RUNNING"] else None


def test_17720_paused_trials_leave_their_devices_to_others(run: Callable[..., Sweep]) -> None:
    """#17720: trials that a scheduler of one's own had paused kept their GPUs, and others could not start."""
    order = Order()
    config = {"x": tune.grid_search([1.0] * 6)}
    done = run(Climber, config=config, scheduler=PausesFour(), stop={"training_iteration": 5}, callbacks=[order])
    assert done.statuses == ["TERMINATED"] * 6
    assert [trial.iterations for trial in done.trials] == [[1, 2, 3, 4, 5]] * 6
    # The two trials that were not paused ended while the four others were.
    ends = [at for at, (_, iteration) in enumerate(order.heard) if iteration == 5]
    assert sum(iteration == 2 for _, iteration in itertools.islice(order.heard, ends[1])) == 6
    assert all(iteration >= 3 for _, iteration in order.heard[ends[1] + 1 :])
