"""Batch normalization over the global batch is that of one device that has it all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402

from fluid.elastic import sync_batch_norm  # noqa: E402
from fluid.elastic.gradients import GradientAverager  # noqa: E402
from fluid.elastic.groups.torch_group import TorchGroup  # noqa: E402
from fluid.elastic.loader import Shard  # noqa: E402
from fluid.elastic.runtime import Runtime  # noqa: E402
from fluid.elastic.sync_batch_norm import SyncBatchNorm  # noqa: E402


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 2),
        torch.nn.BatchNorm1d(3, momentum=None),
        torch.nn.Tanh(),
        torch.nn.Conv1d(3, 3, 2),
        torch.nn.BatchNorm1d(3),
    ).double()


def per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def sum_channels(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1).sum(1)


class Kernels:
    """What the kernels of CUDA return, for CPUs."""

    @staticmethod
    def batch_norm_stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        values = x.transpose(0, 1).flatten(1)
        return values.mean(1), (values.var(1, correction=0) + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(x: Any, scale: Any, shift: Any, mean: Any, factor: Any, eps: float) -> torch.Tensor:
        normal = (x - per_channel(mean, x)) * per_channel(factor, x)
        return normal if scale is None else normal * per_channel(scale, x) + per_channel(shift, x)

    @staticmethod
    def batch_norm_backward_reduce(
        gradient: Any, x: Any, mean: Any, factor: Any, scale: Any, *needs: bool
    ) -> tuple[torch.Tensor, ...]:
        of_shift = sum_channels(gradient)
        products = sum_channels(gradient * (x - per_channel(mean, x)))
        return of_shift, products, products * factor, of_shift

    @staticmethod
    def batch_norm_backward_elemt(
        gradient: Any, x: Any, mean: Any, factor: Any, scale: Any, first: Any, second: Any, count: Any
    ) -> torch.Tensor:
        assert count.dtype == torch.int32
        total = count.sum()
        slopes = per_channel(second * factor.square() / total, x)
        of_normal = gradient - per_channel(first / total, x) - (x - per_channel(mean, x)) * slopes
        return of_normal * per_channel(factor if scale is None else factor * scale, x)


@contextmanager
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_batch_norm, "_has_kernels", lambda x: True)
        for name in vars(Kernels):
            if name.startswith("batch_norm"):
                patch.setattr(torch, name, getattr(Kernels, name))
        yield


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("samples", [2, 3, 7])
@pytest.mark.parametrize("size", [2, 3])
def test_outputs_gradients_and_running_statistics(samples: int, size: int, kernels: bool) -> None:
    # With 2 samples on 3 devices, one of them has none of its own.
    x = torch.randn(samples, 2, 5, generator=torch.Generator().manual_seed(1)).double()
    goal = torch.randn(samples, 3, 3, generator=torch.Generator().manual_seed(2)).double()
    expected = network()
    outputs = expected(x)
    (outputs - goal).square().mean().backward()
    # Made here: the seed is the process's, not a thread's.
    models = [network() for _ in range(size)]

    def train(group: TorchGroup) -> object:
        runtime = Runtime()
        runtime.group = group
        model = SyncBatchNorm.convert(models[group.rank], runtime)
        shard = Shard.of(samples, group.rank, size)
        runtime.begin_batch(shard)
        output = model(shard.take(x))
        (output - shard.take(goal)).square().mean().backward()
        GradientAverager(group, model.parameters(), lambda: runtime.weight).average()
        return model, output[: shard.count].detach()

    with stand_ins() if kernels else nullcontext():
        results = together(make_groups(size), train)
    assert torch.allclose(torch.cat([output for _, output in results]), outputs)
    for model, _ in results:
        for ours, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(ours.grad, other.grad, atol=1e-12)
        for ours, other in zip(model.buffers(), expected.buffers(), strict=True):
            assert torch.allclose(ours, other)
        assert torch.allclose(model.eval()(x), expected.eval()(x))
        expected.train()


class Counting:
    """The weight of one rank, and its group, whose exchanges are counted."""

    def __init__(self, group: TorchGroup) -> None:
        self.group, self.weight, self.sums = group, 0.5, 0
        all_reduce = group.all_reduce

        def count(tensor: torch.Tensor) -> None:
            self.sums += 1
            all_reduce(tensor)

        group.all_reduce = count  # type: ignore[method-assign]


def test_one_exchange_in_each_direction_and_nothing_kept_in_more_than_the_inputs_precision() -> None:
    x = torch.randn(2, 6, 3, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5
    layers = [torch.nn.BatchNorm2d(3, affine=False) for _ in range(3)]
    expected = layers[2](x.flatten(0, 1).reshape(12, 3, 4, 1))

    def train(group: TorchGroup) -> object:
        members = Counting(group)
        layer = SyncBatchNorm.convert(layers[group.rank], members)
        mine = x[group.rank].unsqueeze(-1).bfloat16().requires_grad_()
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda one: one):
            output = layer(mine)
        assert members.sums == 1
        output.float().square().sum().backward()
        large = [tensor.dtype for tensor in kept if tensor.numel() >= mine.numel()]
        return output, members.sums, large, mine.grad.dtype

    results = together(make_groups(2), train)
    for output, sums, large, dtype in results:
        assert output.dtype == dtype == torch.bfloat16 and sums == 2 and large == [torch.bfloat16]
    assert torch.allclose(torch.cat([result[0] for result in results]).float(), expected, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_kernels_of_a_gpu_give_what_the_formulas_give(layout: str, dtype: torch.dtype) -> None:
    """With parts of 3, 2 and 0 samples, and values far from zero."""
    x = (torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(1)) * 2 + 30).to(dtype)
    goal = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    parts = [(0, 3, 3 / 5), (3, 5, 2 / 5), (4, 5, 0.0)]

    def trained(device: str) -> list[Any]:
        layers = [torch.nn.BatchNorm2d(3, eps=0.1).to(device) for _ in parts]

        def train(group: TorchGroup) -> Any:
            members = Counting(group)
            begin, end, members.weight = parts[group.rank]
            layer = SyncBatchNorm.convert(layers[group.rank], members)
            mine = x[begin:end].to(device).requires_grad_()
            torch.nn.init.constant_(layer.weight, 1.5)
            output = layer(mine)
            (output - goal[begin:end].to(device)).square().mean().backward()
            own = [layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
            return [one.detach().double().cpu() for one in (output, mine.grad, *own)], output.dtype

        return together(make_groups(3), train)

    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float64: 1e-9}[dtype]
    for (ours, kind), (expected, _) in zip(trained("cuda"), trained("cpu"), strict=True):
        assert kind == dtype
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_a_gpu_holds_no_copy_of_activations_in_single_precision() -> None:
    x = torch.randn(64, 32, 64, 64, device="cuda", dtype=torch.bfloat16)
    layers = [torch.nn.BatchNorm2d(32).cuda() for _ in range(2)]

    def train(group: TorchGroup) -> None:
        layer = SyncBatchNorm.convert(layers[group.rank], Counting(group))
        layer(x.detach().requires_grad_()).sum().backward()

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert together(make_groups(2), train) == [None, None]
    torch.cuda.synchronize()
    # Of each of the two: the output, its gradient and that of the input, and no more.
    assert torch.cuda.max_memory_allocated() - before < 2 * 3.5 * x.numel() * x.element_size()


def test_its_gradient_cannot_be_differentiated() -> None:
    def twice(group: TorchGroup) -> str:
        layer = SyncBatchNorm.convert(torch.nn.BatchNorm1d(2), Counting(group))
        x = torch.randn(4, 2, requires_grad=True)
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        try:
            first.sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("once_differentiable" in said for said in together(make_groups(2), twice))
