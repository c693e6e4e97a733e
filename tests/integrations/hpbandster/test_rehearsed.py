"""HpBandSter's optimizers rehearsed: their decisions, with trials that are replayed on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hpbandster")

from fluid import FluidExecutor
from fluid.errors import InvalidFieldError
from fluid.integrations.hpbandster import run
from fluid.integrations.hpbandster.optimizers import BY_NAME, Worker
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing

BUDGETS: dict[str, Any] = {"min_budget": 1, "max_budget": 9, "n_iterations": 3}


def loss_after(config: Mapping[str, Any], steps: int) -> float:
    return float(9.0 * (1.0 - config["lr"] / 2.0) ** (2 * steps))


class Descent:
    """A trainable that can only be replayed; a high learning rate takes longer."""

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return [ReplayedIteration({"loss": loss_after(config, i)}, 60.0 + 10.0 * config["lr"]) for i in iterations]


class PlainWorker(Worker):  # type: ignore[misc]
    """A worker that cannot be replayed."""

    def compute(self, **options: Any) -> dict[str, Any]:
        raise AssertionError("it is not to run")


class ReplayedWorker(PlainWorker):
    """One that can."""

    @staticmethod
    def replay(config: Mapping[str, Any], budget: float) -> ReplayedIteration:
        return ReplayedIteration({"loss": loss_after(config, int(budget)), "info": {"at": budget}}, 100.0 * budget)


def train(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    raise AssertionError("it is not to run")
    yield {}


def rehearse(optimizer: str, space: Any, trainable: Any = Descent, devices: int = 4, **options: Any) -> Any:
    """Runs an optimizer; returns its result, and the virtual seconds that it took."""
    with FluidExecutor(backend="simulated", devices=devices, max_width=1, packing="off", verbose=0) as executor:
        result = run(optimizer, space, trainable, executor=executor, seed=5, **{**BUDGETS, **options})
        return result, executor.session.clock.now()


def history(result: Any) -> list[Any]:
    """All that a result has; its times are since the run began."""
    return [
        (
            one.config_id,
            one.budget,
            one.loss,
            one.info,
            one.time_stamps,
        )
        for one in result.get_all_runs()
    ]


@pytest.mark.parametrize("trainable", [Descent, ReplayedWorker], ids=["trainable", "worker"])
@pytest.mark.parametrize("optimizer", list(BY_NAME))
def test_the_same_seed_gives_the_same_run(optimizer: str, trainable: Any, space: Any) -> None:
    (first, took), (second, again) = (rehearse(optimizer, space, trainable) for _ in range(2))
    assert history(first) == history(second)
    assert took == again > 0.0
    assert first.get_incumbent_id() == second.get_incumbent_id()
    assert {one.budget for one in first.get_all_runs()} == ({9.0} if optimizer == "RandomSearch" else {1.0, 3.0, 9.0})


def test_jobs_are_timed_by_the_virtual_clock(space: Any) -> None:
    result, took = rehearse("HyperBand", space, ReplayedWorker, devices=1)
    runs = result.get_all_runs()
    for one in runs:
        stamps = one.time_stamps
        assert stamps["submitted"] <= stamps["started"] <= stamps["finished"]
    # One device: the seconds of all jobs follow one another.
    assert took == pytest.approx(sum(100.0 * one.budget for one in runs))
    assert max(one.time_stamps["finished"] for one in runs) == pytest.approx(took)


def test_a_result_logger_has_virtual_times(space: Any, tmp_path: Path) -> None:
    from hpbandster.core.result import json_result_logger, logged_results_to_HBS_result

    logger = json_result_logger(directory=str(tmp_path), overwrite=True)
    result, took = rehearse("HyperBand", space, result_logger=logger)
    lines = [json.loads(line) for line in (tmp_path / "results.json").read_text().splitlines()]
    stamps = [line[2] for line in lines]
    assert max(each["finished"] for each in stamps) - min(each["submitted"] for each in stamps) == pytest.approx(took)
    read = logged_results_to_HBS_result(str(tmp_path))
    assert len(read.get_all_runs()) == len(result.get_all_runs())


def test_what_cannot_be_replayed_is_refused_at_the_call(space: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"worker that cannot be rehearsed.*replay\(config, budget\)"):
        rehearse("HyperBand", space, PlainWorker)
    with pytest.raises(InvalidFieldError, match=r"cannot be rehearsed.*replay\(config, iterations\)"):
        rehearse("HyperBand", space, train)
    with rehearsing(RehearsalPlan(source=Descent(), folder=tmp_path)):
        (of_worker, took), (of_trainable, less) = (
            rehearse("HyperBand", space, trainable, devices=1) for trainable in (PlainWorker, train)
        )
    assert [one.loss for one in of_worker.get_all_runs()] == [one.loss for one in of_trainable.get_all_runs()]
    assert took > less  # A worker begins anew at each budget.
