"""Trainables with known results, sweeps of them with and without Fluid, and the outcomes of those."""

from __future__ import annotations

import csv
import json
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.tune
from ray.tune.logger import LoggerCallback
from ray.tune.utils.util import SafeFallbackEncoder

from fluid import FluidExecutor, tune

#: Columns with times and places, which differ between any two runs.
TIMES = frozenset(
    [
        "date",
        "hostname",
        "node_ip",
        "pid",
        "time_since_restore",
        "time_this_iter_s",
        "time_total_s",
        "timestamp",
        "trial_id",
    ]
)
#: Columns that also depend on the order of results, where a scheduler pauses all trials but the last one.
ORDER = frozenset(["checkpoint_dir_name", "experiment_tag", "iterations_since_restore", "should_checkpoint", "done"])
STATE = "state.json"
#: Longest that a trial waits for another, in seconds.
_PATIENCE = 20.0


class Climber(tune.Trainable):
    """Adds ``x`` per iteration and counts its steps: only a correctly restored state gives these results.

    Config: ``x``; ``seconds`` of an iteration; ``ends_at``, the iteration at which it says it is done; and failures,
    which happen once each:

    * ``raises_at``: iterations at which it raises, the first time that it reaches them;
    * ``dies_at``: the iteration at which its process is killed;
    * ``victim``: the number of the only trial with these failures, as PBT copies whole configs;
    * ``folder``: where it records its failures;
    * ``waits_for``: a file in the folder for which checkpoints from iteration ``waits_at`` on wait;
    * ``leaves``: a file in the folder that it writes when it ends or raises.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self.steps, self.score = 0, 0.0

    def step(self) -> dict[str, Any]:
        config = self.config
        if config.get("seconds"):
            time.sleep(config["seconds"])
        if self.steps + 1 in (config.get("raises_at") or ()) and self._first_time("raise"):
            self._leave()
            raise RuntimeError(f"iteration {self.steps + 1} went wrong")
        if self.steps + 1 == config.get("dies_at") and self._first_time("death"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        self.score += config["x"]
        done = self.steps == config.get("ends_at")
        if done:
            self._leave()
        return {"score": self.score, "steps": self.steps, "process": os.getpid(), "done": done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self.config.get("waits_for") and self.steps >= self.config["waits_at"]:
            _wait_for(Path(self.config["folder"]) / self.config["waits_for"])
        write_state(checkpoint_dir, self.steps, self.score)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.steps, self.score = read_state(checkpoint_dir)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return False

    def _export_model(self, export_formats: list[str], export_dir: str) -> dict[str, str]:
        path = Path(self.config["folder"]) / f"{self.trial_id}.json"
        path.write_text(json.dumps([self.steps, self.score]), encoding="utf-8")
        return {name: str(path) for name in export_formats}

    def _leave(self) -> None:
        if self.config.get("leaves"):
            (Path(self.config["folder"]) / self.config["leaves"]).touch()

    def _first_time(self, what: str) -> bool:
        victim = self.config.get("victim")
        if victim is not None and not self.trial_id.endswith(f"_{victim:05d}"):
            return False
        note = Path(self.config["folder"]) / f"{what}-{self.trial_id}-{self.steps + 1}"
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class ReusableClimber(Climber):
    """One that Tune alone can reuse for another trial, too."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


def climb(config: dict[str, Any]) -> None:
    """The same as a function, for ``length`` iterations, with a checkpoint every ``every`` of them."""
    steps, score = 0, 0.0
    if checkpoint := ray.tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            steps, score = read_state(folder)
    while steps < config.get("length", 4):
        if steps + 1 in (config.get("raises_at") or ()):
            note = Path(config["folder"]) / f"raise-{ray.tune.get_context().get_trial_id()}-{steps + 1}"
            if not note.exists():
                note.touch()
                raise RuntimeError(f"iteration {steps + 1} went wrong")
        steps, score = steps + 1, score + config["x"]
        metrics = {"score": score, "steps": steps}
        if steps % config.get("every", 10**9):
            ray.tune.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_state(folder, steps, score)
            ray.tune.report(metrics, checkpoint=ray.tune.Checkpoint.from_directory(folder))


def write_state(folder: str, steps: int, score: float) -> None:
    (Path(folder) / STATE).write_text(json.dumps([steps, score]), encoding="utf-8")


def read_state(folder: str | Path) -> tuple[int, float]:
    steps, score = json.loads((Path(folder) / STATE).read_text(encoding="utf-8"))
    return steps, score


def _wait_for(path: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


# --- Sweeps and their outcomes


@dataclass(frozen=True)
class Left:
    """The outcome of a trial.

    Attributes:
        folder: the trial's.
        config: its last one.
        status: Tune's.
        failures: number of its failures.
        rows: the results that Tune received, or else those in its ``result.json``.
    """

    folder: Path
    config: Any
    status: str
    failures: int
    rows: list[dict[str, Any]]

    @classmethod
    def by(cls, trial: Any, rows: list[dict[str, Any]] | None = None) -> Left:
        left = cls(Path(trial.path), trial.config, trial.status, trial.num_failures, rows or [])
        return replace(left, rows=left.logged) if rows is None else left

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The lines of its ``result.json``.

        Tune may lose some where a trial is paused or fails: when it continues, an earlier upload replaces the log.
        """
        path = self.folder / "result.json"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def iterations(self) -> list[int]:
        """Iterations of the results, in the order in which they came."""
        return [row["training_iteration"] for row in self.rows]

    def without(self, columns: frozenset[str]) -> list[dict[str, Any]]:
        """Returns the results without these columns and the process id."""
        return [{name: row[name] for name in row if name not in columns | {"process"}} for row in self.rows]

    @property
    def checkpoints(self) -> dict[str, tuple[int, float]]:
        """The states in the existing checkpoints, by folder."""
        return {path.name: read_state(path) for path in sorted(self.folder.glob("checkpoint_*"))}

    @property
    def progress(self) -> list[dict[str, str]]:
        """The lines of its ``progress.csv``, without what differs between any two runs."""
        with (self.folder / "progress.csv").open(newline="") as file:
            return [{k: v for k, v in row.items() if k not in TIMES | {"process"}} for row in csv.DictReader(file)]


class Listener(LoggerCallback):
    """Keeps every result that Tune receives, as it is logged, by trial; as a logger, it lets trials run ahead."""

    def __init__(self) -> None:
        self.heard: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.heard[trial.trial_id].append(json.loads(json.dumps(result, cls=SafeFallbackEncoder)))


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended.

    Attributes:
        analysis: Tune's.
        trials: the outcome of each, in the order in which they were added.
    """

    analysis: Any
    trials: list[Left]

    @classmethod
    def of(cls, analysis: Any, listener: Listener) -> Sweep:
        # Tune moves failed trials to the end; each trial's tag starts with its original number.
        trials = sorted(analysis.trials, key=_number)
        return cls(analysis, [Left.by(trial, listener.heard[trial.trial_id]) for trial in trials])

    @property
    def configs(self) -> list[Any]:
        return [trial.config for trial in self.trials]

    @property
    def statuses(self) -> list[str]:
        return [trial.status for trial in self.trials]

    @property
    def best(self) -> int:
        """The best trial by ``score``."""
        return _number(self.analysis.get_best_trial("score", "max", scope="all"))

    def results(self, without: frozenset[str] = TIMES) -> list[list[dict[str, Any]]]:
        return [trial.without(without) for trial in self.trials]


def _number(trial: Any) -> int:
    number = str(trial.experiment_tag).partition("_")[0]
    return int(number) if number.isdigit() else 0


def sweep(trainable: Any, folder: Path, executor: FluidExecutor | None, options: Mapping[str, Any]) -> Sweep:
    """Runs a sweep in its own folder."""
    defaults = {"storage_path": str(folder), "name": "sweep", "verbose": 0, "raise_on_failed_trial": False}
    listener = Listener()
    callbacks = [*options.get("callbacks", []), listener]
    return Sweep.of(tune.run(trainable, executor=executor, **{**defaults, **options, "callbacks": callbacks}), listener)


#: Runs a sweep without and with Fluid; makes new options for each, as searchers and schedulers change.
Both = Callable[..., tuple[Sweep, Sweep]]


def await_uploads() -> None:
    """Waits until Tune has uploaded its state of a sweep, which cannot be restored from a half-written file."""
    for thread in threading.enumerate():
        if "entrypoint" in thread.name:  # The name of the thread of Tune's syncer.
            thread.join(90.0)


def assert_same(stock: Sweep, fluid: Sweep, without: frozenset[str] = TIMES) -> None:
    """Checks for the same configurations in the same order, results, ends and best trial."""
    assert fluid.configs == stock.configs
    assert fluid.results(without) == stock.results(without)
    assert fluid.statuses == stock.statuses
    assert fluid.best == stock.best
    assert any(trial.rows for trial in stock.trials)
