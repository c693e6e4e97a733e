"""The sweeps of ray_tune.py: trainables and the options of ``tune.run``, the same for every system."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from overhead_workload import burn
from ray import tune
from ray.tune.logger import LoggerCallback
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator

if (_EXAMPLES := str(Path(__file__).resolve().parents[1] / "examples")) not in sys.path:
    sys.path.append(_EXAMPLES)

#: Reported with every result: the seconds of CPU time that the trial's own work took.
WORK = "work_s"
_SCORE = {"metric": "score", "mode": "max"}
_TIMED = {"time_attr": "training_iteration"}


class Burner(tune.Trainable):  # type: ignore[misc]
    """Uses CPU time and improves at its own rate. It can be saved, and reused for another trial."""

    def setup(self, config: dict[str, Any]) -> None:
        if config.get("import_torch"):
            import torch

            assert torch.__version__
        self.score = 0.0

    def step(self) -> dict[str, float]:
        begun = time.thread_time()
        burn(self.config["milliseconds"])
        self.score += self.config["x"]
        return {"score": self.score, WORK: time.thread_time() - begun}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "score.json").write_text(json.dumps(self.score))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.score = json.loads((Path(checkpoint_dir) / "score.json").read_text())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


class Tally(LoggerCallback):  # type: ignore[misc]
    """Adds up the results that Tune receives; Tune's logs lose some where trials are paused."""

    def __init__(self) -> None:
        self.results, self.work, self.best = 0, 0.0, float("-inf")

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.results += 1
        self.work += result[WORK]
        self.best = max(self.best, result["score"])


def digits_trial() -> type:
    """The network of ``examples/sweep.py`` on the digits, reusable as well."""
    from models.images import ImageTrial

    class DigitsTrial(ImageTrial):
        def step(self) -> dict[str, float]:
            begun = time.thread_time()
            metrics = super().step()
            return {**metrics, "score": metrics["accuracy"], WORK: time.thread_time() - begun}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.setup(new_config)
            return True

    return DigitsTrial


def _burners(trials: int, milliseconds: float, **more: Any) -> dict[str, Any]:
    # The order is shuffled, so that the best trials are neither first nor last.
    rates = [1.0 + (7 * i) % trials for i in range(trials)]
    return {"x": tune.grid_search(rates), "milliseconds": milliseconds, **more}


def _busy(trials: int) -> dict[str, Any]:
    return {"config": _burners(trials, 10.0, import_torch=True), "stop": {"training_iteration": 10}}


def _empty(trials: int) -> dict[str, Any]:
    return {"config": _burners(trials, 0.0), "stop": {"training_iteration": 1}}


def _stream(trials: int) -> dict[str, Any]:
    return {"config": _burners(trials, 0.0), "stop": {"training_iteration": 250}}


def _hyperband(trials: int) -> dict[str, Any]:
    return {"config": _burners(trials, 20.0), "scheduler": HyperBandScheduler(**_TIMED, **_SCORE, max_t=27)}


def _pbt(trials: int) -> dict[str, Any]:
    scheduler = PopulationBasedTraining(
        **_TIMED, **_SCORE, perturbation_interval=5, hyperparam_mutations={"x": tune.uniform(1.0, 8.0)}
    )
    return {"config": _burners(trials, 20.0), "scheduler": scheduler, "stop": {"training_iteration": 40}}


def _digits(trials: int) -> dict[str, Any]:
    space = {
        "lr": tune.loguniform(1e-3, 0.5),
        "momentum": tune.uniform(0.0, 0.95),
        "weight_decay": tune.loguniform(1e-6, 1e-2),
        "batch_size": tune.choice([16, 32, 64, 128]),
        "channels": tune.choice([8, 16, 32]),
        "dropout": tune.uniform(0.0, 0.5),
        "seed": 0,
        "data": None,
    }
    return {
        "config": space,
        "num_samples": trials,
        "search_alg": BasicVariantGenerator(random_state=0),
        "scheduler": ASHAScheduler(**_TIMED, **_SCORE, max_t=27, grace_period=1, reduction_factor=3),
    }


class Workload(NamedTuple):
    """A sweep.

    Attributes:
        title: for people.
        trials: number of trials.
        options: of ``tune.run``, for a number of trials.
        trainable: makes the trainable.
        fewer: number of trials that are run under plain Ray, which takes over a second to start each; the figures are
            scaled to all trials. ``None`` to run all.
    """

    title: str
    trials: int
    options: Callable[[int], dict[str, Any]]
    trainable: Callable[[], type] = lambda: Burner
    fewer: int | None = None


WORKLOADS = {
    "busy": Workload("32 trials of 10 iterations of 10 ms, import torch", 32, _busy),
    "empty": Workload("256 trials of one empty iteration", 256, _empty, fewer=32),
    "stream": Workload("8 trials of 250 empty iterations", 8, _stream),
    "hyperband": Workload("HyperBand, 27 trials, up to 27 iterations of 20 ms", 27, _hyperband),
    "pbt": Workload("PBT, 8 trials of 40 iterations of 20 ms, perturbed every 5", 8, _pbt),
    "digits": Workload("ASHA, 32 networks on digits, up to 27 epochs", 32, _digits, digits_trial),
}
