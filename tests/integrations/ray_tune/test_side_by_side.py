"""Sweeps of several threads on one executor: each gets its own results, and none disturbs another."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray.tune
from waiting import eventually

from fluid import Device, FluidExecutor, InvalidFieldError, Trial, TrialGroup, tune

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

PATIENCE = 120.0


class Adds(tune.Trainable):
    """Adds ``x`` per iteration; raises at ``fails_at``."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.n, self.total = 0, 0.0

    def step(self) -> dict[str, Any]:
        time.sleep(self.config.get("seconds", 0.01))
        self.n += 1
        if self.n == self.config.get("fails_at"):
            raise RuntimeError("went wrong on purpose")
        self.total += self.config["x"]
        return {"total": self.total}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "state").write_text(f"{self.n} {self.total}", encoding="utf-8")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        n, total = Path(checkpoint_dir, "state").read_text(encoding="utf-8").split()
        self.n, self.total = int(n), float(total)


def sweep(executor: FluidExecutor, folder: Path, name: str, xs: list[float], **config: Any) -> Any:
    return tune.run(
        Adds,
        config={"x": tune.grid_search(xs), **config},
        stop={"training_iteration": 4},
        executor=executor,
        storage_path=str(folder / "tune"),
        name=name,
        verbose=0,
    )


def totals(analysis: Any) -> list[float]:
    return sorted(trial.last_result["total"] for trial in analysis.trials)


def devices(*gigabytes: float) -> list[Device]:
    return [Device(index, kind="cpu", memory_bytes=size * 1e9) for index, size in enumerate(gigabytes)]


def test_two_sweeps_and_a_group_share_an_executor(cluster: str, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Any:
        for _ in range(4):
            yield {"y": config["x"]}

    with (
        FluidExecutor("local", devices(8, 2), run_dir=tmp_path / "run", verbose=0) as executor,
        ThreadPoolExecutor() as threads,
    ):
        first = threads.submit(sweep, executor, tmp_path, "first", [1.0, 2.0, 3.0])
        second = threads.submit(sweep, executor, tmp_path, "second", [10.0, 20.0])
        group = executor.submit_trialgroup(TrialGroup([Trial(train, {"x": 7}, budget=4)], name="native"))
        assert [result.metrics["y"] for result in group.results()] == [7, 7, 7, 7]
        assert totals(first.result(PATIENCE)) == [4.0, 8.0, 12.0]
        assert totals(second.result(PATIENCE)) == [40.0, 80.0]
        assert {handle.name for handle in executor.handles} == {"first", "second", "native"}
        assert not executor.closed
    # Tune's own files are complete, too: the loggers of one sweep are not those of the other.
    for name, trials in (("first", 3), ("second", 2)):
        files = sorted((tmp_path / "tune" / name).glob("*/progress.csv"))
        assert [len(file.read_text(encoding="utf-8").splitlines()) for file in files] == [5] * trials


def test_the_executor_is_closed_by_the_sweep_that_ends_last(cluster: str, tmp_path: Path) -> None:
    executor = FluidExecutor("local", devices(8, 8), run_dir=tmp_path / "run", verbose=0)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(sweep, executor, tmp_path, "slow", [1.0], seconds=1.0)
        eventually(lambda: len(executor.handles) == 1)
        assert totals(sweep(executor, tmp_path, "quick", [5.0])) == [20.0]
        assert not slow.done() and not executor.closed
        assert totals(slow.result(PATIENCE)) == [4.0]
    assert executor.closed


def test_a_sweep_that_fails_does_not_disturb_the_other(cluster: str, tmp_path: Path) -> None:
    executor = FluidExecutor("local", devices(8, 8), run_dir=tmp_path / "run", verbose=0, max_failures=0)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(sweep, executor, tmp_path, "slow", [1.0, 2.0], seconds=0.6)
        eventually(lambda: len(executor.handles) == 1)
        with pytest.raises(ray.tune.error.TuneError):
            sweep(executor, tmp_path, "fails", [5.0], fails_at=2)
        assert not slow.done()
        assert totals(slow.result(PATIENCE)) == [4.0, 8.0]
    assert executor.closed


def test_different_trainables_of_one_name_are_refused_while_one_runs(cluster: str, tmp_path: Path) -> None:
    others = tune.with_resources(Adds, {"cpu": 1})
    with (
        FluidExecutor("local", devices(8, 8), run_dir=tmp_path / "run", verbose=0) as executor,
        ThreadPoolExecutor() as threads,
    ):
        slow = threads.submit(sweep, executor, tmp_path, "slow", [1.0], seconds=0.5)
        eventually(lambda: len(executor.handles) == 1)
        rest: dict[str, Any] = {"config": {"x": 2.0}, "stop": {"training_iteration": 2}, "executor": executor}
        rest |= {"storage_path": str(tmp_path / "tune"), "verbose": 0}
        with pytest.raises(InvalidFieldError, match="register_trainable\\('Adds-2', trainable\\)"):
            tune.run(others, **rest)
        tune.register_trainable("Adds-2", others)
        assert totals(tune.run("Adds-2", **rest)) == [4.0]
        assert totals(slow.result(PATIENCE)) == [4.0]
        assert totals(tune.run(others, **rest)) == [4.0]


#: Neither thread is the main one, and no Ray runs: Tune would start two, which end with the thread that started them.
FROM_THREADS = """
import sys, threading, time
from fluid import FluidExecutor, tune
def train(config):
    for step in range(config["steps"]):
        time.sleep(0.1)
        tune.report({"step": step + 1})
def sweep(steps):
    analysis = tune.run(train, config={"steps": steps}, executor=executor, storage_path=sys.argv[1], verbose=0)
    print("ended", steps, [trial.last_result["step"] for trial in analysis.trials], flush=True)
if __name__ == "__main__":
    with FluidExecutor("local", 2, verbose=0) as executor:
        threads = [threading.Thread(target=sweep, args=(steps,)) for steps in (2, 30)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
"""


def test_ray_is_started_once_and_outlives_the_thread_that_needed_it_first(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "runs"))
    (tmp_path / "driver.py").write_text(FROM_THREADS, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "tune")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, text=True, check=True)
    assert [line for line in ended.stdout.splitlines() if line.startswith("ended")] == ["ended 2 [2]", "ended 30 [30]"]
