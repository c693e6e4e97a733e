"""The registry of checkpoints that outlive the run."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fluid.keeping import KeepRule, WorstKept
from fluid.session.folder.keeper import KeptEntry, KeptRegistry

BEST = KeepRule("best", "g", "loss", "min", k=1)
LAST = KeepRule("last", "g")


def entry(trial_id: str, iteration: int, value: float | None = None, size: int = 10, place: int = 0) -> KeptEntry:
    path = f"{trial_id}/{iteration}"
    return KeptEntry(
        trial_id=trial_id, iteration=iteration, path=path, host="here", bytes=size, value=value, place=place
    )


def test_a_newer_checkpoint_replaces_that_of_its_trial() -> None:
    registry = KeptRegistry(None)
    first, second = entry("a", 1), entry("a", 2)
    assert registry.take(LAST, first).discarded == []
    assert registry.take(LAST, entry("b", 7)).discarded == []
    assert registry.take(LAST, second).discarded == [first]
    assert registry.of("g", "a") is second and registry.bytes == 20
    assert registry.bar(LAST) is None


def test_an_older_one_that_comes_late_is_discarded() -> None:
    registry = KeptRegistry(None)
    registry.take(LAST, entry("a", 5))
    late = entry("a", 4)
    assert registry.take(LAST, late).discarded == [late]


def test_one_that_is_told_twice_stays() -> None:
    registry = KeptRegistry(None)
    registry.take(LAST, entry("a", 5))
    assert registry.take(LAST, entry("a", 5)).discarded == []
    assert registry.bytes == 10


def test_the_quota_refuses_a_further_one_but_not_a_replacement() -> None:
    registry = KeptRegistry(20)
    registry.take(LAST, entry("a", 1))
    registry.take(LAST, entry("b", 1))
    assert registry.room == 0
    third = entry("c", 1)
    verdict = registry.take(LAST, third)
    assert verdict.refused and verdict.discarded == [third] and registry.of("g", "c") is None
    assert not registry.take(LAST, entry("a", 2)).refused
    larger = registry.take(LAST, entry("a", 3, size=11))
    assert larger.refused and registry.of("g", "a").iteration == 2, "the earlier one stays"
    assert not registry.take(LAST, entry("d", 1), fits=True).refused


def test_groups_are_compared_apart() -> None:
    registry = KeptRegistry(None)
    registry.take(BEST, entry("a", 1, 0.1))
    assert registry.take(BEST._replace(group="h"), entry("b", 1, 0.9)).discarded == []


@given(
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(-4, 4)), max_size=40),
)
def test_the_best_of_the_k_best_trials_stay(k: int, mode: str, saves: list[tuple[int, int]]) -> None:
    registry, rule = KeptRegistry(None), BEST._replace(mode=mode, k=k)
    sign = 1 if mode == "min" else -1
    there: list[KeptEntry] = []
    best: dict[str, float] = {}
    for iteration, (number, value) in enumerate(saves):
        bar, made = registry.bar(rule), entry(f"t{number}", iteration, float(value), place=number)
        told = rule._replace(place=number)
        if not rule.is_better(value, best.get(made.trial_id)) or not told.passes(value, bar):
            continue  # The lane would not have saved it.
        best[made.trial_id] = value
        there.append(made)
        for one in registry.take(rule, made).discarded:
            there.remove(one)
    every: dict[str, float] = {}
    for number, value in saves:
        every[f"t{number}"] = min(every.get(f"t{number}", float("inf")), sign * value)
    ranked = sorted(every, key=lambda trial_id: (every[trial_id], trial_id))
    assert sorted(one.trial_id for one in there) == sorted(ranked[:k]), "of equal ones, those submitted first"
    assert all(sign * one.value == every[one.trial_id] for one in there), "each of its best iteration"
    assert registry.bytes == 10 * len(there)


def test_a_failed_trial_makes_way_for_any_other() -> None:
    registry = KeptRegistry(None)
    best = entry("a", 1, 0.1)
    registry.take(BEST, best)
    assert registry.bar(BEST) == WorstKept(0.1, place=0)
    best.failed = True
    assert registry.bar(BEST) is None
    assert registry.take(BEST, entry("b", 1, 0.9)).discarded == [best]
    assert registry.bar(BEST) == WorstKept(0.9, place=0)
