"""Run folders of whole sweeps, such as tests of the page look at: learning curves, early stops and failures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluid.engine.events import Failure
from fluid.trialgroup import Search, Trial

_TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 10, in train\nValueError: loss is nan'


def config_of(random: random.Random) -> dict[str, Any]:
    """A config of 12 hyperparameters: of several scales, categories, nested ones, and one that never differs."""
    return {
        "lr": 10 ** random.uniform(-5, -1),
        "batch_size": random.choice([16, 32, 64, 128, 256]),
        "optimizer": random.choice(["adam", "sgd", "rmsprop"]),
        "weight_decay": 10 ** random.uniform(-6, -2),
        "net": {"depth": random.randint(1, 8), "width": random.choice([64, 128, 256, 512])},
        "dropout_1": random.uniform(0, 0.6),
        "dropout_2": random.uniform(0, 0.6),
        "momentum": random.uniform(0.5, 0.99),
        "augment": random.choice([True, False]),
        "warmup": random.randint(0, 2000),
        "data_folder": "/data/" + "a_folder_with_a_long_name/" * 4,
    }


def write_sweep(
    session: Callable[..., Any],
    name: str,
    trials: int,
    *,
    iterations: int = 27,
    devices: int = 4,
    seed: int = 0,
    failed: int = 1,
) -> Path:
    """Writes the run folder of a sweep that stops most trials after 1, 3 or 9 iterations.

    Args:
        session: the fixture of that name.
        name: of the folder.
        trials, iterations, devices: how many.
        seed: of the configs and the metrics.
        failed: the last so many trials fail after an iteration, with the least loss of all.
    """
    rng = random.Random(seed)
    kinds = [{"index": index, "kind": "cpu", "host": "localhost"} for index in range(devices)]
    clock = {"at": 4998.0, "time": "2026-01-31 12:34:56"}
    made = session({}, name=name, devices=kinds, planner="portfolio", clock=clock)
    configs = {f"trial-{number:05d}": config_of(rng) for number in range(trials)}
    submitted = [Trial(print, c, budget=iterations, trial_id=i, profile_key="net") for i, c in configs.items()]
    made.submit("sweep", submitted, Search("loss", "min", trials), at=-1.0)
    free, rows, ends = [0.0] * devices, [], {}
    for number, (trial_id, config) in enumerate(configs.items()):
        device = free.index(min(free))
        offset = abs(math.log10(config["lr"]) + 2.7) * 0.25 + config["dropout_1"] * 0.3 + rng.gauss(0, 0.04)
        fails = number >= trials - failed
        last = 1 if fails else iterations if rng.random() < 0.25 else min(iterations, rng.choice([1, 3, 9]))
        for iteration in range(1, last + 1):
            start = free[device]
            free[device] += rng.uniform(0.8, 1.2)
            loss = 0.08 + max(0.0, offset) + 2.2 * math.exp(-iteration * 0.35) + rng.gauss(0, 0.01)
            metrics = {"loss": -1.0 if fails else loss, "accuracy": 1.0 / (1.0 + loss)}
            rows.append((trial_id, iteration, start, free[device], 1.0, (device,), metrics))
        ends[trial_id] = last, "FAILED" if fails else "DONE" if last == iterations else "STOPPED"
    made.results(*sorted(rows, key=lambda row: row[3]))
    for trial_id, (last, state) in ends.items():
        if state != "FAILED":
            made.stop(trial_id, state)
        failure = Failure("error", "ValueError: loss is nan", _TRACEBACK) if state == "FAILED" else None
        made.end(trial_id, state, last, failure)
    return Path(made.close())
