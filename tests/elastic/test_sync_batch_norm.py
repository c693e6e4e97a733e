"""Batch normalization over the global batch is that of one device that has it all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402

from fluid.elastic.averaging import average_gradients  # noqa: E402
from fluid.elastic.runtime import Runtime  # noqa: E402
from fluid.elastic.shard import Shard  # noqa: E402
from fluid.elastic.sync_batch_norm import SyncBatchNorm  # noqa: E402
from fluid.elastic.torch_group import TorchGroup  # noqa: E402


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
        average_gradients(group, model.parameters(), runtime.weight)
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
