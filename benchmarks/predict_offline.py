"""The offline part of predict.py: random trials of a measured grid, predicted before their first iteration."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from fluid import MemoryNeed
from fluid.measure.cohorts.tree import CohortTree, ConfigTexts, Prediction

#: Memory of a device, in terms of the largest need of a trial: as 80 GB hold a few large trials, or many small ones.
DEVICE_SIZE = 4.0


class Drawn(NamedTuple):
    """A trial of a random search.

    Attributes:
        name: its id.
        config: the texts of its config.
        seconds: per iteration, as measured.
        need: its memory, as measured.
    """

    name: str
    config: ConfigTexts
    seconds: float
    need: MemoryNeed


class Guess(NamedTuple):
    """A trial that was predicted.

    Attributes:
        trial: with what was measured of it.
        seconds: predicted.
        typical_bytes: predicted.
        reserved: bytes reserved.
        cohort: in words.
    """

    trial: Drawn
    seconds: float
    typical_bytes: float
    reserved: float
    cohort: str


def in_tensors(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows with the bytes of PyTorch's tensors as their memory: a GPU's lane measures little else."""
    return [{**row, "persistent_bytes": 0.0, "ephemeral_bytes": float(row["counted_bytes"])} for row in rows]


def draw(rows: Sequence[dict[str, Any]], count: int, seed: int) -> list[Drawn]:
    """Returns random trials of a grid.

    Each config has three fields that say nothing about time and memory besides: ``lr``, ``dropout`` and ``seed``. Of a
    config that was measured several times, each trial has one of these measurements.

    Args:
        rows: of the grid, see ``predict_workload.measure``.
        count: how many trials.
        seed: of the choice.
    """
    rng, grid = random.Random(seed), list[list[dict[str, Any]]]()
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(str(row["config"]), []).append(row)
    grid = list(found.values())
    drawn = []
    for number in range(count):
        row = rng.choice(rng.choice(grid))
        config = {
            **row["config"],
            "lr": 10 ** rng.uniform(-5, -1),
            "dropout": rng.uniform(0, 0.5),
            "seed": rng.randrange(10**6),
        }
        texts = tuple(sorted((name, str(value)) for name, value in config.items()))
        need = MemoryNeed(row["persistent_bytes"], row["ephemeral_bytes"])
        drawn.append(Drawn(f"t{number}", texts, statistics.median(row["seconds"]), need))
    return drawn


def by_medians(trials: Sequence[Drawn], after: int, *, frozen: bool) -> list[Guess]:
    """Predicts the same trials as :func:`by_cohorts`, by the medians and largest needs of cohorts."""
    with patch("fluid.measure.cohorts.tree.fit_trend", return_value=None):
        return by_cohorts(trials, after, frozen=frozen)[0]


def by_cohorts(trials: Sequence[Drawn], after: int, *, frozen: bool) -> tuple[list[Guess], CohortTree]:
    """Predicts the trials that follow the first ``after`` ones, by the cohorts of those before.

    Args:
        trials: in order.
        after: how many are learned first.
        frozen: whether nothing is learned after these; otherwise each trial is learned once it was predicted.
    """
    tree, guesses = CohortTree(), []
    for number, trial in enumerate(trials):
        if number >= after:
            guesses.append(_guess(trial, tree.predict(trial.config)))
        if number < after or not frozen:
            tree.learn(trial.name, trial.config, seconds=trial.seconds, need=trial.need)
    return guesses, tree


def _guess(trial: Drawn, said: Prediction) -> Guess:
    nan = float("nan")
    return Guess(
        trial,
        nan if said.seconds is None else said.seconds,
        nan if said.typical_bytes is None else said.typical_bytes,
        0.0 if said.need is None else said.need.peak_bytes,
        said.cohort,
    )


def by_one_key(trials: Sequence[Drawn], after: int, *, frozen: bool) -> list[Guess]:
    """Predicts the same trials as those of one profile key: by the median of those before, and their most memory."""
    guesses = []
    for number in range(after, len(trials)):
        known = trials[: after if frozen else number]
        seconds = statistics.median(trial.seconds for trial in known)
        typical = statistics.median(trial.need.peak_bytes for trial in known)
        most = max(trial.need.persistent_bytes for trial in known) + max(trial.need.ephemeral_bytes for trial in known)
        guesses.append(Guess(trials[number], seconds, typical, most, ""))
    return guesses


def figures(guesses: Sequence[Guess], room: float) -> dict[str, float]:
    """Returns how good predictions are.

    Args:
        guesses: the predictions.
        room: bytes of a device.
    """
    real = [guess.trial for guess in guesses]
    seconds = np.array([abs(guess.seconds / guess.trial.seconds - 1) for guess in guesses])
    typical = np.array([abs(guess.typical_bytes / guess.trial.need.peak_bytes - 1) for guess in guesses])
    needs = [trial.need.peak_bytes for trial in real]
    reserved = [min(guess.reserved, room) for guess in guesses]  # A trial whose need is above a device's is alone.
    bins = pack(reserved, room)
    over = sum(sum(needs[index] for index in each) > room for each in bins)
    return {
        "seconds_error": float(np.median(seconds)),
        "seconds_error_p90": float(np.quantile(seconds, 0.9)),
        "bytes_error": float(np.median(typical)),
        "bytes_error_p90": float(np.quantile(typical, 0.9)),
        "too_small": float(np.mean([need > held for need, held in zip(needs, reserved, strict=True)])),
        "reserved_over_needed": sum(reserved) / sum(needs),
        "density": len(pack(needs, room)) / len(bins),
        "devices_overfull": over,
        "devices": len(bins),
    }


def pack(sizes: Sequence[float], room: float) -> list[list[int]]:
    """Returns the trials on each device, filled first fit in order of the trials, as the engine admits them."""
    left, bins = list[float](), list[list[int]]()
    for index, size in enumerate(sizes):
        place = next((place for place, free in enumerate(left) if size <= free), None)
        if place is None:
            left.append(room)
            bins.append([])
            place = len(left) - 1
        left[place] -= size
        bins[place].append(index)
    return bins


def predict_grid(
    rows: Sequence[dict[str, Any]], *, seeds: int, trials: int, after: int
) -> tuple[dict[str, dict[str, float]], dict[str, list[Guess]], list[str]]:
    """Predicts trials of a grid.

    Returns:
        Mean figures over the seeds by predictor; the predictions of the first seed by predictor; the cohorts, in words,
        after its last trial.
    """
    room = DEVICE_SIZE * max(row["persistent_bytes"] + row["ephemeral_bytes"] for row in rows)
    found: dict[str, list[dict[str, float]]] = {}
    first: dict[str, list[Guess]] = {}
    words: list[str] = []
    for seed in range(seeds):
        drawn = draw(rows, trials, seed)
        learning, tree = by_cohorts(drawn, after, frozen=False)
        guesses = {
            "cohorts": by_cohorts(drawn, after, frozen=True)[0],
            "cohorts, learning on": learning,
            "without trends": by_medians(drawn, after, frozen=True),
            "without trends, learning on": by_medians(drawn, after, frozen=False),
            "one key": by_one_key(drawn, after, frozen=True),
            "one key, learning on": by_one_key(drawn, after, frozen=False),
        }
        for name, each in guesses.items():
            found.setdefault(name, []).append(figures(each, room))
        if not seed:
            first = guesses
            words = [describe(cohort) for cohort in tree.cohorts]
    mean = {name: {key: float(np.mean([one[key] for one in each])) for key in each[0]} for name, each in found.items()}
    return mean, first, words


def describe(cohort: Any) -> str:
    """Returns a cohort in words."""
    seconds = "-" if cohort.seconds is None else f"{cohort.seconds:.3g} s"
    peak = "-" if cohort.peak_bytes is None else f"{cohort.peak_bytes / 1e6:.1f} MB"
    return f"{cohort.conditions or 'all'}: {cohort.trials} trials, {seconds}, {peak}"
