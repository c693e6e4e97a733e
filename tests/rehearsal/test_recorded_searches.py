"""Recorded sessions of other libraries' searches, rehearsed once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.rehearsal import RehearsalPlan, Replayable, ReplayedIteration, recorded, rehearsing


class Parabola:
    """The loss is least at 2."""

    def replay(self, config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        loss = (config["x"] - 2.0) ** 2
        return [ReplayedIteration({"loss": loss + 1.0 / i}, 10.0 + config["x"]) for i in iterations]


def train(config: dict[str, Any]) -> Any:
    yield {}


def with_hpbandster(executor: fluid.FluidExecutor) -> None:
    pytest.importorskip("hpbandster")
    config_space = pytest.importorskip("ConfigSpace")
    from fluid.integrations.hpbandster import run

    space = config_space.ConfigurationSpace({"x": (0.0, 4.0)})
    run("BOHB", space, train, max_budget=9, executor=executor, seed=1)


def with_optuna(executor: fluid.FluidExecutor) -> None:
    optuna = pytest.importorskip("optuna")
    from fluid.integrations.optuna import optimize

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.SuccessiveHalvingPruner()
    )
    space = {"x": optuna.distributions.FloatDistribution(0.0, 4.0)}
    optimize(study, train, n_trials=20, space=space, metric="loss", budget=9)


def rehearse(search: Callable[[fluid.FluidExecutor], None], source: Replayable, folder: Path) -> list[Any]:
    plan = RehearsalPlan(source=source, devices=4)
    with rehearsing(plan), fluid.FluidExecutor(run_dir=folder, verbose=0) as executor:
        search(executor)
    return [
        (trial.config, trial.iteration, [(result.metrics, result.seconds) for result in trial.results])
        for trial in fluid.load(folder).trials
    ]


@pytest.mark.parametrize("search", [with_hpbandster, with_optuna], ids=["hpbandster", "optuna"])
def test_a_search_decides_as_it_did(search: Callable[[fluid.FluidExecutor], None], tmp_path: Path) -> None:
    first = rehearse(search, Parabola(), tmp_path / "first")
    source = recorded(tmp_path / "first")
    second = rehearse(search, source, tmp_path / "second")
    assert [each[:2] for each in second] == [each[:2] for each in first]
    for (_, _, was), (_, _, now) in zip(first, second, strict=True):
        assert [metrics for metrics, _ in now] == [metrics for metrics, _ in was]
        assert [seconds for _, seconds in now] == pytest.approx([seconds for _, seconds in was])
    assert len({iteration for _, iteration, _ in first}) > 1
    assert (source.metric, source.mode) == ("loss", "min")
    assert any(line == f"{len(first)} of {len(first)} configs were run before" for line in source.describe())


def test_a_trial_of_another_library_is_replayed_as_it_is_shown(tmp_path: Path) -> None:
    """As those of Ray Tune: with wrapped configs and results, and in two parts, as it was restored."""

    class Wrapped:
        def replay(self, config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
            inner, before = config["inner"], config["before"]
            played = Parabola().replay(inner, range(iterations.start + before, iterations.stop + before))
            own = {"training_iteration": 1, "pid": 7, "time_total_s": 9.0, "date": "today"}
            return [one._replace(metrics={"result": {**one.metrics, **own}, "saved": None}) for one in played]

    parts = [
        fluid.Trial(
            train,
            {"inner": {"x": x}, "before": before},
            budget=3,
            shown=fluid.Shown(f"tune {x}", {"x": x}, iterations=before, metrics="result"),
        )
        for x in (1.0, 3.5)
        for before in (0, 3)
    ]
    rehearse(lambda executor: executor.submit_trialgroup(fluid.TrialGroup(parts)).wait(), Wrapped(), tmp_path / "run")
    source = recorded(tmp_path / "run", metric="loss")
    assert source.max_iterations == 6
    played, truth = source.replay({"x": 3.5}, range(1, 7)), Parabola().replay({"x": 3.5}, range(1, 7))
    assert [one.metrics for one in played] == [one.metrics for one in truth]
    assert [one.seconds for one in played] == pytest.approx([one.seconds for one in truth])
