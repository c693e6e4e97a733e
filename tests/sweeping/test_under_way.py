"""How many trials of a sweep are under way at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor
from fluid.search import loguniform, make_sampler, make_space, randint, uniform
from fluid.search.algorithms import make_scheduler
from fluid.search.searchers import SamplerSearcher
from fluid.search.stop_rules import StopRules
from fluid.sweeping.plan import SweepPlan
from fluid.sweeping.under_way import UnderWay

torch = pytest.importorskip("torch")

from fluid.fused import SGD, FusedTrainable, TensorData  # noqa: E402


class Line(FusedTrainable):
    """Learns a product of two layers; an iteration has 100 steps."""

    def build(self, config: dict[str, Any]) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=config["momentum"])

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1_600, 8, generator=generator)
        return TensorData([x, x.sum(1, keepdim=True).sin()], batch_size=16, seed=seed)


SPACE = {"lr": loguniform(1e-3, 0.3), "momentum": uniform(0.0, 0.9), "seed": randint(0, 1_000_000)}


def _plan(algorithm: str, under_way: int | None = None) -> SweepPlan:
    return SweepPlan(
        trainable=Line,
        name="lines",
        algorithm=algorithm,
        searcher=SamplerSearcher(make_sampler("random", make_space(SPACE), seed=0)),
        learns=False,
        constants={},
        scheduler=make_scheduler(algorithm, rungs=(1, 3, 9), eta=3, samples=100),
        rules=StopRules(None, {"loss": True}),
        goals=(),
        samples=100,
        budget=9,
        under_way=under_way,
        time_budget_s=None,
        oom_is_worst=False,
        trial_options={},
        callbacks=(),
    )


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    folder = tmp_path_factory.mktemp("fused")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0) as made:
        yield made


@pytest.mark.slow
def test_asha_has_as_many_trials_under_way_as_packs_take(packing: FluidExecutor) -> None:
    result = fluid.run(
        Line, SPACE, metric="loss", mode="min", samples=96, budget=9, algorithm="asha", seed=1, executor=packing
    )
    assert sorted({trial.iteration for trial in result.trials}) == [1, 3, 9]
    assert len(result.trials) == 96
    rows = [step.rows for trial in result.trials for step in trial.results]
    assert max(rows) > 5, "more than could be under way on a device if none were fused"


def test_the_room_grows_with_the_rows_of_packs(packing: FluidExecutor) -> None:
    under_way = UnderWay(_plan("asha"))
    under_way.begin(packing)
    assert under_way.has_room(31)
    assert not under_way.has_room(32)
    assert not under_way.note(1)
    assert under_way.note(8)
    assert under_way.has_room(47)
    assert not under_way.has_room(48)
    assert not under_way.note(4)
    assert not under_way.has_room(48), "a smaller pack takes no room away"


def test_synchronous_sweeps_have_all_under_way_and_limits_of_the_user_are_kept(packing: FluidExecutor) -> None:
    halving = UnderWay(_plan("sha"))
    halving.begin(packing)
    assert halving.has_room(99)
    limited = UnderWay(_plan("asha", under_way=3))
    limited.begin(packing)
    assert not limited.note(64)
    assert not limited.has_room(3)


def test_in_rounds_all_trials_are_under_way_unless_the_user_or_a_searcher_limits_them() -> None:
    with FluidExecutor("simulated", rounds=True, verbose=0) as in_rounds:
        for plan, has_room in ((_plan("asha"), True), (_plan("asha", under_way=3), False)):
            under_way = UnderWay(plan)
            under_way.begin(in_rounds)
            assert under_way.has_room(99) is has_room
            assert not under_way.note(64)
        learning = UnderWay(replace(_plan("asha"), learns=True))
        learning.begin(in_rounds)
        assert not learning.has_room(2)
