"""Sweeps that tests record, in place of real ones: what a trial does is a formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fluid
from fluid.rehearsal import Overheads, RehearsalPlan, Replayable, ReplayedIteration, rehearsing
from fluid.search import choice, loguniform, randint

SPACE: dict[str, Any] = {
    "lr": loguniform(1e-5, 1e-1),
    "act": choice(["relu", "tanh", "gelu"]),
    "layers": randint(1, 6),
    "width": choice([32, 64, 128]),
    "fixed": 3,
}


class Formula:
    """Does what a small model might do; the loss of a trial falls."""

    def replay(self, config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        quality = abs(math.log10(config["lr"]) + 2.5) * 0.15 + 0.1 * (config["act"] == "tanh") + 0.02 * config["layers"]
        seconds = 20.0 * config["layers"] * config["width"] / 64
        return [
            ReplayedIteration(
                {
                    "loss": 0.1 + quality + 0.8 / i**0.7,
                    "deep": {"accuracy": 1.0 - quality - 0.5 / i},
                    "epoch": i - 1,
                    "tag": config["act"],
                },
                seconds,
                1e9 * config["layers"],
            )
            for i in iterations
        ]


def train(config: dict[str, Any]) -> Any:
    yield {}


train.replay = Formula().replay  # type: ignore[attr-defined]


def sweep(
    run_dir: Path,
    source: Replayable | None = None,
    *,
    algorithm: str = "asha",
    samples: int = 64,
    devices: int = 8,
    overheads: Overheads | None = None,
    **options: Any,
) -> Any:
    """Rehearses a sweep, and returns its result."""
    plan = RehearsalPlan(source=source or Formula(), **({} if overheads is None else {"overheads": overheads}))
    with rehearsing(plan), fluid.FluidExecutor(devices=devices, run_dir=run_dir, verbose=0, **options) as executor:
        return fluid.run(
            train,
            SPACE,
            metric="loss",
            mode="min",
            samples=samples,
            algorithm=algorithm,
            budget=27,
            seed=1,
            executor=executor,
        )


def told(run_dir: Path) -> list[tuple[str, int, list[tuple[Any, float]]]]:
    """What a run folder tells of its trials, exactly."""
    return [
        (trial.trial_id, trial.iteration, [(result.metrics, result.seconds) for result in trial.results])
        for trial in fluid.load(run_dir).trials
    ]
