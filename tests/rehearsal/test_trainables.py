"""Which trainables can be rehearsed, and what is said of the others at the call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing


class Curve:
    """Replays its trials, and can do nothing else."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return [ReplayedIteration({"loss": self._factor * config["x"] / i}, seconds=60.0) for i in iterations]


class OnClass:
    """The same as a class."""

    replay = staticmethod(Curve(1.0).replay)


def train(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    yield {"loss": config["x"]}


def train_or_replay(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    yield {"loss": config["x"]}


train_or_replay.replay = Curve(1.0).replay  # type: ignore[attr-defined]


def rehearsed(trainable: Any) -> list[float]:
    with fluid.FluidExecutor(backend="simulated", devices=1, verbose=0) as executor:
        group = fluid.TrialGroup([fluid.Trial(trainable, {"x": 6.0}, budget=3)])
        handle = executor.submit_trialgroup(group)
        handle.wait()
        assert handle.makespan == 180.0
        return [result.metrics["loss"] for result in handle.results()]


@pytest.mark.parametrize("trainable", [Curve(1.0), OnClass, train_or_replay], ids=["object", "class", "function"])
def test_an_object_a_class_and_a_function_can_be_replayed(trainable: Any) -> None:
    assert rehearsed(trainable) == [6.0, 3.0, 2.0]


def test_what_cannot_be_replayed_is_refused_at_the_call() -> None:
    with fluid.FluidExecutor(backend="simulated", verbose=0) as executor:
        with pytest.raises(InvalidFieldError, match=r"cannot be rehearsed, as it has no replay\(config, iterations\)"):
            executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train, {"x": 1.0})]))
        executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(OnClass, {"x": 1.0})])).wait()  # It goes on.


def test_a_plans_source_replays_what_has_no_replay(tmp_path: Path) -> None:
    with rehearsing(RehearsalPlan(source=Curve(2.0), folder=tmp_path)):
        assert rehearsed(train) == [12.0, 6.0, 4.0]


def test_what_only_replays_does_not_run_for_real() -> None:
    with (
        fluid.FluidExecutor(backend="local", devices=1, verbose=0) as executor,
        pytest.raises(InvalidFieldError, match="can only be rehearsed"),
    ):
        executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(OnClass, {"x": 1.0})]))
