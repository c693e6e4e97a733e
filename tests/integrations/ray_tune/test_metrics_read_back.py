"""Under Ray Tune, too, what a trial reports is what callbacks and the results of the sweep have, as it was then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray.tune
from metric_values import by_yield, difference, expected, json_difference, made, reported, write, wrong

from fluid import tune

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Stepping(ray.tune.Trainable):  # type: ignore[misc]
    """Reports the values in a file."""

    def setup(self, config: dict[str, Any]) -> None:
        self._reported = reported(config["path"])

    def step(self) -> dict[str, Any]:
        return next(self._reported)

    def save_checkpoint(self, folder: str) -> None:
        pass

    def load_checkpoint(self, folder: str) -> None:
        raise NotImplementedError("no trial goes on elsewhere")


def reporting(config: dict[str, Any]) -> None:
    """The same, as a function."""
    for metrics in reported(config["path"]):
        tune.report(metrics)


def has_text_keys(value: Any) -> bool:
    """Whether Tune can write a value to the experiment's state, which it does every now and then."""
    try:
        json.dumps(value, default=repr)
    except TypeError:
        return False
    return True


class Reading(tune.Callback):  # type: ignore[misc]
    """Compares each result when it is told of it."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self.heard: dict[str, list[int]] = {}
        self.wrong: list[str] = []

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        number = result["training_iteration"]
        self.heard.setdefault(trial.trial_id, []).append(number)
        wanted = expected(number, self._values[number - 1])
        if found := difference({name: result.get(name) for name in wanted}, wanted):
            self.wrong.append(f"{trial.trial_id} {number}: {found}")


@pytest.mark.parametrize("trainable", [Stepping, reporting, by_yield])
def test_metrics_are_read_back(trainable: Any, executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # They write what JSON can hold, or raise.
    values = [[value] for value in made() if has_text_keys(value)]  # Tune compares the numbers that are in no list.
    callback = Reading(values)
    written = executor.run_dir / "results.jsonl"
    before = written.stat().st_size if written.is_file() else 0
    tuner = tune.Tuner(
        trainable,
        param_space={"path": write(values, tmp_path / "values.pkl"), "x": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            callbacks=[callback],
            stop={"training_iteration": len(values)},
            verbose=0,
        ),
        executor=executor,
    )
    grid = tuner.fit()
    assert not grid.errors
    assert list(callback.heard.values()) == [list(range(1, len(values) + 1))] * 2
    assert not callback.wrong, (len(callback.wrong), callback.wrong[:3])
    last = expected(len(values), values[-1])
    for result in (*grid, grid.get_best_result()):
        assert difference({name: result.metrics[name] for name in last}, last) == ""
    lines = [json.loads(line) for line in written.read_bytes()[before:].splitlines()]
    assert len(lines) == 2 * len(values)
    for trial_id in {line["trial"] for line in lines}:
        metrics = {line["iteration"]: line["metrics"] for line in lines if line["trial"] == trial_id}
        metrics = {number: one.get("result", one) for number, one in metrics.items()}
        own = {number: {name: one[name] for name in last} for number, one in metrics.items()}
        assert not (found := wrong(own, values, json_difference)), (len(found), found[:3])
