"""Means of gradients and metrics, over real groups."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402

from fluid.elastic.averaging import Means  # noqa: E402
from fluid.elastic.gradients import GradientAverager  # noqa: E402
from fluid.elastic.groups.torch_group import TorchGroup  # noqa: E402
from fluid.elastic.runtime import SingleProcessGroup  # noqa: E402
from fluid.errors import FluidError  # noqa: E402


def parameter(gradient: list[float] | None, **options: object) -> torch.Tensor:
    made = torch.zeros(2, requires_grad=True, **options)
    made.grad = None if gradient is None else torch.tensor(gradient, **options)
    return made


def averaged(groups: list[TorchGroup], gradients: list[list[list[float] | None]], weights: list[float]) -> list[list]:
    """The gradients that each rank has in the end."""

    def average(group: TorchGroup) -> list[list[float] | None]:
        parameters = [parameter(gradient) for gradient in gradients[group.rank]]
        GradientAverager(group, parameters, lambda: weights[group.rank]).average()
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    return together(groups, average)


def test_a_mean_by_weight() -> None:
    got = averaged(make_groups(2), [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], [0.25, 0.75])
    assert got == [[[4.0, 5.0], [6.0, 7.0]]] * 2


def test_a_missing_gradient_is_zero_if_anybody_has_one() -> None:
    got = averaged(make_groups(2), [[None, [3.0, 4.0], None], [[4.0, 8.0], [1.0, 2.0], None]], [0.5, 0.5])
    assert got == [[[2.0, 4.0], [2.0, 3.0], None]] * 2


def test_what_weighs_nothing_may_be_anything() -> None:
    got = averaged(make_groups(2), [[[math.nan, math.inf]], [[4.0, 8.0]]], [0.0, 1.0])
    assert got == [[[4.0, 8.0]]] * 2


def test_types_are_sent_apart() -> None:
    def average(group: TorchGroup) -> list[object]:
        value = float(group.rank)
        parameters = [parameter([value] * 2), parameter([value] * 2, dtype=torch.float64)]
        GradientAverager(group, parameters, lambda: 0.5).average()
        return [(p.grad.dtype, p.grad.tolist()) for p in parameters]

    assert together(make_groups(2), average) == [[(torch.float32, [0.5] * 2), (torch.float64, [0.5] * 2)]] * 2


def test_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.gradients._BUCKET", 10)
    gradients: list[list[list[float] | None]] = [[[float(rank), float(i)] for i in range(5)] for rank in range(2)]
    assert averaged(make_groups(2), gradients, [0.5, 0.5]) == [[[0.5, float(i)] for i in range(5)]] * 2


def test_sparse_gradients_are_refused() -> None:
    sparse = parameter(None)
    sparse.grad = torch.zeros(2).to_sparse()
    with pytest.raises(FluidError, match="sparse=False"):
        GradientAverager(SingleProcessGroup(), [sparse], lambda: 1.0).average()


def test_means_of_metrics() -> None:
    def result(group: TorchGroup) -> dict[str, float]:
        means = Means(group)
        means.add({"loss": torch.tensor(1.0 + group.rank), "hits": group.rank}, 10 + 20 * group.rank)
        means.add({"loss": torch.tensor([math.nan]), "hits": 5}, 0)
        return means.result()

    expected = {"loss": (1.0 * 10 + 2.0 * 30) / 40, "hits": 30 / 40}
    assert together(make_groups(2), result) == [expected] * 2


def test_no_mean_of_nothing() -> None:
    with pytest.raises(FluidError, match="no rank has added a sample"):
        Means(SingleProcessGroup()).result()


def test_a_model_that_is_left_on_the_cpu_beside_a_gpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.warns(UserWarning, match=r"in build\(\), move it with \.to\(self\.device\)"):
        GradientAverager(SingleProcessGroup(), [parameter(None)], lambda: 1.0)
