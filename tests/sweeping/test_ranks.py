"""Native sweeps tell the engine how trials rank at their rungs."""

from __future__ import annotations

from typing import Any

import pytest
from sweep_trainables import curve

import fluid
from fluid import FluidExecutor, TrialGroupHandle
from fluid.search import uniform
from fluid.search_shape import Rung

Told = list[tuple[str, Rung, float]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the sweep tells; the engine hears it, too."""
    heard: Told = []
    rank = TrialGroupHandle.rank

    def listen(handle: TrialGroupHandle, trial_id: str, rung: Rung, score: float) -> None:
        heard.append((trial_id, rung, score))
        rank(handle, trial_id, rung, score)

    monkeypatch.setattr(TrialGroupHandle, "rank", listen)
    return heard


def sweep(executor: FluidExecutor, algorithm: str, **options: Any) -> fluid.SweepResult:
    arguments = {"metric": "loss", "mode": "min", "budget": 9, "samples": 9, "seed": 3, **options}
    return fluid.run(curve, {"x": uniform(0.0, 1.0)}, algorithm=algorithm, executor=executor, **arguments)


def test_successive_halving_tells_every_rung_and_score(executor: FluidExecutor, told: Told) -> None:
    result = sweep(executor, "sha")
    rungs = [rung for _, rung, _ in told]
    assert rungs.count(Rung(1, 9, 3)) == 9 and rungs.count(Rung(3, 3, 1)) == 3 and rungs.count(Rung(9, 1, 0)) == 1
    x = {trial.trial_id: trial.config["x"] for trial in result.trials}
    assert all(score == pytest.approx(x[trial] + 1.0 / rung.iterations) for trial, rung, score in told)


def test_less_is_better_whatever_the_mode(executor: FluidExecutor, told: Told) -> None:
    result = sweep(executor, "sha", metric="gain", mode="max", samples=3)
    x = {trial.trial_id: trial.config["x"] for trial in result.trials}
    assert told and all(score == pytest.approx(x[trial]) for trial, _, score in told)


def test_brackets_are_told_apart_and_asha_promotes_at_once(executor: FluidExecutor, told: Told) -> None:
    sweep(executor, "hyperband", samples=None)
    assert {rung.bracket for _, rung, _ in told} == {0, 1, 2}
    told.clear()
    sweep(executor, "asha")
    assert {(rung.iterations, rung.size, rung.places) for _, rung, _ in told} >= {(1, 9, 3), (3, 3, 3)}
    assert all(rung.promotes_at_once for _, rung, _ in told)
