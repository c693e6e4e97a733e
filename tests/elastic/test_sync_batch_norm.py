"""Batch normalization over the global batch is that of one device that has it all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402

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


@pytest.mark.parametrize("samples", [2, 3, 7])
@pytest.mark.parametrize("size", [2, 3])
def test_outputs_gradients_and_running_statistics(samples: int, size: int) -> None:
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
