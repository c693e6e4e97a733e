"""The rule by which cohorts are parted and merged, and the guard against chance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.measure.cohorts.nodes import (
    LOWERED,
    MIN_TRIALS,
    OVERLAP,
    SPREAD_FLOOR,
    CohortNode,
    CohortSample,
    NameSets,
    Split,
    Threshold,
    best_split,
    chance,
    features_of,
    overlap,
    spread,
)
from fluid.measure.cohorts.tree import CohortTree
from fluid.resources import MemoryNeed

UNKNOWN = np.array([])


def split_of(configs: list[dict[str, Any]], seconds: list[float], sizes: list[float] | None = None) -> Split | None:
    texts = [{name: str(value) for name, value in config.items()} for config in configs]
    logs = np.log(seconds)
    return best_split(features_of(texts), [logs, np.full(len(logs), math.nan) if sizes is None else np.log(sizes)])


def test_the_spread_is_the_mean_distance_from_the_median() -> None:
    assert spread(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 3)
    assert spread(np.array([])) == 0.0


def test_an_outlier_is_lowered_to_mean_plus_deviation() -> None:
    distances = np.array([0.0, 0.0, 0.0, 0.0, 10.0])
    cut = distances.mean() + distances.std()
    assert spread(distances) == pytest.approx(cut / 5)


@pytest.mark.parametrize("large", [4, 5])
def test_a_side_needs_five_trials(large: int) -> None:
    configs = [{"size": 1}] * 40 + [{"size": 2}] * large
    found = split_of(configs, [1.0] * 40 + [100.0] * large)
    assert found is None or large >= MIN_TRIALS
    # Five of 45 lower the spread by enough, and are no chance.
    assert (found == Threshold("size", 1.0)) == (large >= MIN_TRIALS)


def test_a_split_that_lowers_the_spread_by_too_little_is_none() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 1.0, 200)
    sizes = [number % 2 for number in range(200)]
    for step, parts in ((0.8, False), (4.0, True)):
        logs = noise + step * np.array(sizes)
        after = (spread(logs[::2]) + spread(logs[1::2])) / 2
        assert (after <= LOWERED * spread(logs)) is parts
        found = split_of([{"size": size} for size in sizes], list(np.exp(logs)))
        assert (found is not None) is parts


def test_a_small_spread_is_not_parted() -> None:
    factor = math.exp(SPREAD_FLOOR)
    configs = [{"size": number % 2} for number in range(60)]
    assert split_of(configs, [1.0 if number % 2 else factor**1.9 for number in range(60)]) is None
    assert split_of(configs, [1.0 if number % 2 else factor**2.1 for number in range(60)]) == Threshold("size", 0.0)


def test_bytes_alone_part_trials_too_and_unknown_values_count_for_neither_side() -> None:
    configs = [{"opt": ("sgd", "adam", "lamb")[number % 3], "lr": number / 7} for number in range(60)]
    sizes = [1e9 if number % 3 == 0 else 3e9 for number in range(60)]
    found = split_of(configs, [1.0] * 60, sizes)
    assert isinstance(found, NameSets)
    assert set(found.sides) == {frozenset({"sgd"}), frozenset({"adam", "lamb"})}
    assert found.side({"opt": "rmsprop"}) is None and found.side({}) is None
    some = [{} if number % 4 == 0 else config for number, config in enumerate(configs)]
    assert isinstance(split_of(some, [1.0] * 60, sizes), NameSets)


def test_the_split_that_lowers_seconds_and_bytes_most_together_is_chosen() -> None:
    rng = np.random.default_rng(1)
    cells = [cell for cell in itertools.product((0, 1), (0, 1)) for _ in range(15)]
    configs = [{"a": a, "b": b, "lr": rng.uniform()} for a, b in cells]
    # "a" makes 20 times the seconds; "b" 4 times the seconds and 16 times the bytes.
    seconds, sizes = [20.0**a * 4.0**b for a, b in cells], [16.0**b for a, b in cells]
    assert split_of(configs, seconds) == Threshold("a", 0.0)
    assert split_of(configs, seconds, sizes) == Threshold("b", 0.0)


@settings(deadline=None, max_examples=49)
@given(st.integers(1, 7), st.integers(1, 7))
def test_odds_of_chance_are_counted(n: int, m: int) -> None:
    """Of all ways to choose n of n + m ranks, those that win as few pairs."""
    one, other = np.arange(n, dtype=float), np.arange(n, n + m, dtype=float)
    assert chance(one, other) == pytest.approx(min(1.0, 2.0 / math.comb(n + m, n)))
    mixed = np.random.default_rng(n * m).permutation(n + m).astype(float)
    wins = [sum(a > b for a in chosen for b in set(range(n + m)) - set(chosen)) for chosen in
            itertools.combinations(range(n + m), n)]  # fmt: skip
    seen = sum(a > b for a in mixed[:n] for b in mixed[n:])
    least = min(seen, n * m - seen)
    assert chance(mixed[:n], mixed[n:]) == pytest.approx(min(1.0, 2.0 * sum(w <= least for w in wins) / len(wins)))


def test_the_odds_of_many_trials_go_on_from_those_that_are_counted() -> None:
    # Of 60 trials they are counted, of 61 approximated. One more trial in the middle changes little.
    for n, m in ((20, 40), (30, 30)):
        one, other = np.linspace(0.0, 1.0, n), np.linspace(0.3, 1.3, m)
        counted, approximated = chance(one, other), chance(np.append(one, 0.65), other)
        assert 1e-5 < counted < 0.05
        assert 0.5 < approximated / counted < 2.0


def test_siblings_merge_when_their_spreads_overlap() -> None:
    rng = np.random.default_rng(2)
    one, noise = rng.normal(0.0, 0.3, 40), rng.normal(0.0, 0.3, 40)
    limit = OVERLAP * 2 * spread(one)
    assert overlap(one, noise + 0.5 * limit)
    assert not overlap(one, noise + 2.5 * limit)
    assert overlap(one, UNKNOWN)


def node_of(distance: float, trials: int = 40) -> CohortNode:
    """A node of two children whose trials' seconds differ by a factor."""
    rng, node = np.random.default_rng(3), CohortNode()
    node.part(Threshold("size", 1.0))
    for number in range(trials):
        values = {"size": str(1 + number % 2)}
        seconds = float(np.exp(rng.normal(0.0, 0.3) + distance * (number % 2)))
        node.put(str(number), CohortSample(tuple(values.items()), values, seconds))
    return node


def test_a_split_is_kept_though_it_would_not_be_made() -> None:
    """Hysteresis: between what parts trials and what merges them, cohorts stay as they are."""
    outcomes = []
    for distance in (0.1, 0.4, 2.0):
        node = node_of(distance)
        merged = node.merge()
        fresh = CohortNode(samples=dict(node.samples))
        rows = {trial_id: row for row, trial_id in enumerate(fresh.samples)}
        made = fresh.grow(features_of([sample.values for sample in fresh.samples.values()]), rows)
        outcomes.append((merged, made))
    assert outcomes == [(True, False), (False, False), (False, True)]


def test_what_was_parted_is_not_merged_at_once() -> None:
    """Whatever the noise: no cohorts that flap with each search."""
    for seed in range(60):
        rng, tree = np.random.default_rng(seed), CohortTree()
        partitions = []
        for number in range(150):
            size = int(rng.integers(2))
            seconds = float(np.exp(0.4 * rng.standard_normal() + (0.7 + 0.02 * seed) * size))
            tree.learn(str(number), (("size", str(size)),), seconds=seconds)
            partitions.append(tuple(each.conditions for each in tree.cohorts))
        changes = sum(one != other for one, other in itertools.pairwise(partitions[1:]))
        assert changes <= 3, (seed, changes)


def useless(rng: np.random.Generator) -> tuple[tuple[str, str], ...]:
    """Features that change nothing: 3 that differ in each trial, 12 that have few values."""
    config = [("lr", repr(10 ** rng.uniform(-5, -1))), ("seed", str(rng.integers(1e9))), ("wd", repr(rng.uniform()))]
    config += [(f"layers{number}", str(rng.integers(2, 8))) for number in range(4)]
    config += [(f"flag{number}", str(bool(rng.integers(2)))) for number in range(4)]
    config += [(f"name{number}", "abcd"[rng.integers(4)]) for number in range(4)]
    return tuple((name, str(text)) for name, text in config)


def noise_of(rng: np.random.Generator, shape: int) -> float:
    """Seconds that no feature explains: normal, of two modes, with stragglers, or of heavy tails."""
    normal = rng.standard_normal()
    if shape == 0:
        return float(np.exp(0.3 * normal))
    if shape == 1:
        return float(np.exp(0.05 * normal + 1.5 * (rng.uniform() < 0.4)))
    if shape == 2:
        return float(np.exp(0.1 * normal + 2.0 * (rng.uniform() < 0.1)))
    return float(np.exp(0.3 * rng.standard_t(2)))


@pytest.mark.slow
def test_noise_is_not_parted() -> None:
    """240 simulated keys of 120 trials with 15 features that do not matter: searched as they grow, few are parted."""
    parted: list[str] = []
    for seed in range(240):
        rng = np.random.default_rng(seed)
        configs = [dict(useless(rng)) for _ in range(120)]
        seconds = np.log([noise_of(rng, seed % 4) for _ in range(120)])
        count = 2 * MIN_TRIALS
        while count <= len(configs):
            found = best_split(features_of(configs[:count]), [seconds[:count], np.full(count, math.nan)])
            if found is not None:
                parted.append(found.feature)
                break
            count += 1 + int(0.3 * count)
    assert len(parted) <= 0.015 * 240, parted
    assert sum(name in ("lr", "seed", "wd") for name in parted) <= 1, parted


def test_the_same_trials_in_another_order_have_the_same_first_split() -> None:
    rng = np.random.default_rng(5)
    configs = [dict(useless(rng), size=str(rng.integers(6))) for _ in range(60)]
    logs = np.array([float(config["size"]) + 0.1 * rng.standard_normal() for config in configs])
    nothing = np.full(60, math.nan)
    first = best_split(features_of(configs), [logs, nothing])
    order = rng.permutation(60)
    assert first is not None
    assert first == best_split(features_of([configs[place] for place in order]), [logs[order], nothing])


def test_memory_of_zero_bytes_is_no_logarithm() -> None:
    tree = CohortTree()
    for number in range(20):
        tree.learn(str(number), (("size", str(number % 2)),), need=MemoryNeed())
    need = tree.predict((("size", "1"),)).need
    assert need == MemoryNeed()
