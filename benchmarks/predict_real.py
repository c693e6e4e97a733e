"""The real part of predict.py: one sweep on this machine's cores, whose memory bounds how trials share them.

Trials are the convolutional networks of ``predict_workload.py``. After each step a trial waits as for its input, longer
the wider it is, so that trials which share a core gain time, and their memory decides how many do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
from predict_workload import BATCHES, OPTIMIZERS, Net

from fluid import Device, FluidExecutor, Profile, Trial, TrialGroup, TrialListener

#: Memory of a device.
ROOM = 300e6
#: Widths of the trials, and seconds that an iteration of the widest waits.
WIDTHS, LONGEST_WAIT_S = (16, 32, 64, 128), 1.0
SAMPLES, BUDGET = 512, 4


class Waiting(Net):
    """A trial that waits for its input."""

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the model."""
        super().setup({**config, "net": "cnn", "samples": SAMPLES})
        self._wait_s = LONGEST_WAIT_S * int(config["width"]) / WIDTHS[-1]

    def step(self) -> dict[str, float]:
        """Trains, and waits."""
        time.sleep(self._wait_s)
        return super().step()


class Starts(TrialListener):
    """Counts starts, failures, and the trials that ran at once."""

    def __init__(self) -> None:
        self.starts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.widths: dict[str, list[float]] = {}
        self.seconds: dict[str, list[float]] = {}

    def on_start(self, trial_id: str) -> None:
        """Counts a start."""
        self.starts[trial_id] += 1

    def on_result(self, result: Any) -> None:
        """Notes how an iteration ran."""
        self.widths.setdefault(result.trial_id, []).append(result.width)
        self.seconds.setdefault(result.trial_id, []).append(result.seconds)

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        """Notes a failure."""
        if failure is not None:
            self.failures.append(f"{trial_id}: {failure.message}")


def draw_trials(count: int, data: str | None, seed: int, name: str) -> list[Trial]:
    """Returns the trials of a random search."""
    rng, trials = random.Random(seed), []
    for number in range(count):
        config = {
            "batch_size": rng.choice(BATCHES),
            "width": rng.choice(WIDTHS),
            "optimizer": rng.choice(OPTIMIZERS),
            "lr": 10 ** rng.uniform(-5, -2),
            "dropout": rng.uniform(0, 0.5),
            "seed": rng.randrange(10**6),
            "data": data,
        }
        trials.append(Trial(Waiting, config, budget=BUDGET, trial_id=f"{name}-{number}"))
    return trials


def run_sweep(first: int, second: int, data: str | None, *, cohorts: bool, seed: int = 0) -> dict[str, Any]:
    """Runs two groups of trials; the second is predicted before it is submitted.

    Args:
        first: trials of the first group.
        second: trials of the second.
        data: folder with ``mnist-10k.npz``; ``None`` for random images.
        cohorts: whether the profile keeps cohorts.
        seed: of the trials.
    """
    devices = [Device(index, memory_bytes=ROOM) for index in range(2)]
    heard = [Starts(), Starts()]
    spans: list[float] = []
    before: dict[str, Any] = {}
    groups = [draw_trials(first, data, seed, "first"), draw_trials(second, data, seed + 1, "second")]
    with FluidExecutor("local", devices, profile=Profile(cohorts=cohorts), verbose=0) as executor:
        for trials, listener in zip(groups, heard, strict=True):
            if trials is groups[1]:
                before = {trial.id: predict(executor.profile, trial) for trial in trials}
            begun = time.perf_counter()
            handle = executor.submit_trialgroup(TrialGroup(trials), listener)
            handle.wait()
            spans.append(time.perf_counter() - begun)
        measured = measured_of(executor.profile)
        words = [
            f"{each.conditions or 'all'}: {each.trials} trials"
            for tree in _trees(executor.profile)
            for each in tree.cohorts
        ]
    found: dict[str, Any] = {
        "seconds": spans,
        "trials": first + second,
        "failed": [failure for one in heard for failure in one.failures],
        "started_again": sum(count - 1 for one in heard for count in one.starts.values()),
        "mean_packing": [statistics.mean(1 / width for each in one.widths.values() for width in each) for one in heard],
        "cohorts": words,
    }
    if cohorts:
        found |= match({name: said for name, said in before.items() if name in measured}, measured)
    return found


def _trees(profile: Profile) -> list[Any]:
    return list(profile.cohorts.values())


def predict(profile: Profile, trial: Trial) -> Any:
    """What the profile's cohorts expect of a trial."""
    from fluid.policies.fusing.groups import text_of

    texts = tuple(sorted((name, text_of(value)) for name, value in trial.config.items()))
    trees = _trees(profile)
    return trees[0].predict(texts) if trees else None


def measured_of(profile: Profile) -> dict[str, Any]:
    """The seconds per iteration and the bytes that the profile's cohorts have learned, by trial."""
    samples = [sample for tree in _trees(profile) for sample in tree.to_json()["trials"]]
    return {sample["id"]: sample for sample in samples}


def match(said: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Compares what was predicted of trials with what was measured of them later."""
    seconds, sizes, small = list[float](), list[float](), list[bool]()
    for name, one in said.items():
        sample = measured[name]
        if one.seconds and sample["seconds"]:
            seconds.append(abs(one.seconds / sample["seconds"] - 1))
        if one.typical_bytes and sample["bytes"]:
            sizes.append(abs(one.typical_bytes / sum(sample["bytes"]) - 1))
            small.append(one.need.peak_bytes < sum(sample["bytes"]))
    return {
        "predicted": len(seconds),
        "seconds_error": float(np.median(seconds)) if seconds else None,
        "bytes_error": float(np.median(sizes)) if sizes else None,
        "too_small": float(np.mean(small)) if small else None,
    }
