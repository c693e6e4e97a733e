"""Packs on a GPU, whose training steps are CUDA graphs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import Classifier, Convolutions, Single, difference, made  # noqa: E402
from torch import nn  # noqa: E402

from fluid.fused import SGD, FusedPack, FusedTrainable, TensorData, why_not_fused  # noqa: E402

pytestmark = pytest.mark.gpu

KINDS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.05, "schedule": lambda step: 0.9**step}],
    "adamw": [{"lr": 0.01}, {"lr": 0.02, "clip_norm": 0.2}],
}


def configs(kind: str, rows: int) -> list[dict[str, Any]]:
    return [{"kind": kind, "optimizer": KINDS[kind][seed % 2], "seed": seed} for seed in range(rows)]


def eager(cls: Any, several: list[dict[str, Any]]) -> FusedPack:
    pack = FusedPack.of(cls, several)
    pack._graphs = None
    return pack


def assert_equal(pack: FusedPack, other: FusedPack) -> None:
    for one, two in zip(pack.trials, other.trials, strict=True):
        assert one.device.type == "cuda" and difference(one, two) <= 1e-5


@pytest.mark.parametrize(("cls", "kind"), [(Single, "sgd"), (Convolutions, "sgd"), (Convolutions, "adamw")])
def test_graphs_equal_eager_packs_and_trials_alone(cls: Any, kind: str) -> None:
    pack, other = FusedPack.of(cls, configs(kind, 5)), eager(cls, configs(kind, 5))
    alone = [made(cls, config) for config in configs(kind, 5)]
    for _ in range(3):  # 12 steps
        results = pack.step()
        assert results == [pytest.approx(result, rel=1e-5) for result in other.step()]
        assert results == [pytest.approx(trial.step(), rel=1e-5) for trial in alone]
    assert_equal(pack, other)
    assert all(difference(one, two) <= 1e-5 for one, two in zip(pack.trials, alone, strict=True))
    assert pack._graphs is not None and (pack._graphs.size, pack._graphs.captured) == (6, 2)


def test_trials_leave_and_join() -> None:
    pack, other = FusedPack.of(Convolutions, configs("adamw", 4)), eager(Convolutions, configs("adamw", 4))
    for rows, captured in ((4, 2), (3, 2), (4, 2), (6, 4)):
        for each in (pack, other):
            if rows < len(each):
                each.leave([1])
            each.join([made(Convolutions, config) for config in configs("adamw", rows - len(each))])
            each.step()
        assert pack._graphs is not None and pack._graphs.captured == captured
        assert_equal(pack, other)


def test_what_cannot_be_captured_runs_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    class Waiting(Classifier):
        """Its loss copies to the host, which waits for the device."""

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            x, _ = batch
            return super().loss(model, batch) + x.sum().cpu().to(x.device) * 1e-3

    pack, other = FusedPack.of(Waiting, configs("sgd", 3)), eager(Waiting, configs("sgd", 3))
    with caplog.at_level(logging.WARNING, "fluid.fused"):
        for _ in range(2):
            pack.step()
            other.step()
    assert len(caplog.messages) == 2
    assert_equal(pack, other)
    after = FusedPack.of(Classifier, configs("sgd", 3))
    after.step()
    assert len(caplog.messages) == 2


def test_memory_is_returned_when_a_pack_goes() -> None:
    def train() -> tuple[int, int]:
        pack = FusedPack.of(Convolutions, configs("adamw", 6))
        pack.step()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def after() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    train()  # What libraries and recordings keep stays.
    before = after()
    allocated, _ = train()
    assert allocated > before[0]
    left = after()
    assert left[0] == before[0] and left[1] <= before[1]


def test_the_self_check_accepts_packs_on_a_gpu() -> None:
    assert why_not_fused(Single, {}) is None
    assert why_not_fused(Convolutions, {"kind": "adamw", "optimizer": {"lr": 0.01}}) is None


class Perceptron(Single):
    """An MLP of width 32 for 1,440 samples of 64 numbers, as scikit-learn's digits are."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.randn(1440, 64, generator=torch.Generator().manual_seed(0))
        return TensorData([x, x[:, :10].argmax(-1)], batch_size=32, seed=seed)

    evaluate = FusedTrainable.evaluate


@pytest.mark.slow
def test_64_perceptrons_are_10_times_as_fast_as_one_by_one() -> None:
    several = [{"lr": 0.01 + 0.001 * seed, "seed": seed} for seed in range(64)]
    pack, alone = FusedPack.of(Perceptron, several), [made(Perceptron, config) for config in several[:4]]

    def seconds(step: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    for step in (pack.step, *(trial.step for trial in alone)):
        step()
    one_by_one = min(seconds(trial.step) for trial in alone for _ in range(3))
    fused = min(seconds(pack.step) for _ in range(5))
    assert 64 * one_by_one >= 10 * fused
