"""Simulated stores of checkpoints, and the benchmark of what leaves host memory: never more restores from disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fluid.engine.commands import CheckpointValue
from fluid.errors import InvalidFieldError
from fluid.testing.stores import InMemory, SimulatedStores, least_recently_used

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def held(trial_id: str, used: int, returns: float = 0.5) -> InMemory:
    return InMemory(trial_id, 10.0, CheckpointValue(returns), 1.0, used)


def test_the_least_recently_used_leave_until_there_is_room() -> None:
    there = [held("new", 3, 0.0), held("old", 1, 1.0), held("middle", 2)]
    assert least_recently_used(there, 11.0) == ["old", "middle"]
    assert least_recently_used(there, 0.0) == []


def test_a_bad_size_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="memory_bytes"):
        SimulatedStores(memory_bytes=-1.0, checkpoint_bytes=1.0)


@pytest.mark.parametrize("algorithm", ["sha", "asha", "pbt"])
def test_by_value_fewer_are_restored_from_disk_than_by_last_use(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = __import__("checkpoint_values")
    for seed in range(2):
        by_value, by_use = (module.run(module.Case(algorithm, 0.2, seed, policy)) for policy in ("value", "lru"))
        if algorithm != "asha":  # whose promotions depend on the seconds of restores
            assert by_value["memory"] + by_value["disk"] == by_use["memory"] + by_use["disk"] > 0
        assert by_value["disk"] < by_use["disk"]
    sys.modules.pop("checkpoint_values")
