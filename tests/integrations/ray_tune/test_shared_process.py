"""Trials of Ray Tune that share a process by wish: what one reports is its own, also when its code goes on."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import fluid
from fluid import FluidExecutor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.slow]


class Watch(tune.Callback):
    def __init__(self) -> None:
        self.seen: dict[Any, list[Any]] = defaultdict(list)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        self.seen[trial.config["x"]].append({name: result[name] for name in ("x", "n", "pid", "id")})


def sweep(
    executor: FluidExecutor, tmp_path: Path, function: Any, xs: list[int], **options: Any
) -> dict[Any, list[Any]]:
    watch = Watch()
    fluid.tune.run(
        function,
        config={"x": tune.grid_search(xs)},
        executor=executor,
        callbacks=[watch],
        storage_path=str(tmp_path),
        name=f"sweep-{xs[0]}",
        verbose=0,
        stop={"training_iteration": 3},
    )
    return watch.seen


def catch_all(config: dict[str, Any]) -> None:
    n = 0
    while True:
        n += 1
        try:
            trial_id = tune.get_context().get_trial_id()
            tune.report({"n": n, "x": config["x"], "pid": os.getpid(), "id": trial_id})
        except BaseException:
            threading.Event().wait(0.005)


def with_helper(config: dict[str, Any]) -> None:
    """A helper thread reports, and ends it when it is refused."""
    refused = threading.Event()

    def report() -> None:
        try:
            while True:
                tune.report({"n": 0, "x": config["x"], "pid": os.getpid(), "id": tune.get_context().get_trial_id()})
        finally:
            refused.set()

    threading.Thread(target=report, daemon=True).start()
    refused.wait()


def test_code_that_goes_on_reports_to_no_other_trial_and_no_later_sweep(tmp_path: Path) -> None:
    with FluidExecutor("local", 1, verbose=0, isolation="lane", run_dir=tmp_path / "run") as executor:
        found = sweep(executor, tmp_path, catch_all, [1, 2, 3])
        found |= sweep(executor, tmp_path, with_helper, [4, 5])
        found |= sweep(executor, tmp_path, catch_all, [6])
    for x, results in found.items():
        assert [result["n"] for result in results] == ([0, 0, 0] if x in (4, 5) else [1, 2, 3])
        assert {result["x"] for result in results} == {x}
        assert len({result["id"] for result in results}) == 1
    processes = {x: {result["pid"] for result in results} for x, results in found.items()}
    assert not (processes[1] | processes[2] | processes[3]) & (processes[4] | processes[5] | processes[6])
