"""Steps in which the host does not wait for what a GPU still computes, so that it can queue the next ones.

On the CPU the reads are found by what is called; on a GPU PyTorch tells of every wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402
from elastic.test_trainable import join  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fluid.elastic import ElasticTrainable  # noqa: E402
from fluid.elastic.gradients import GradientAverager, Overlap  # noqa: E402
from fluid.elastic.loader import ElasticLoader  # noqa: E402
from fluid.elastic.members.member import ElasticMember  # noqa: E402
from fluid.elastic.runtime import Runtime, SingleProcessGroup  # noqa: E402
from fluid.elastic.sync_batch_norm import SyncBatchNorm  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: Operators that wait for a tensor's values if it is on a GPU. The last makes a tensor from numbers of the host.
WAITING_OPERATORS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "lift_fresh"}
#: Functions that read a tensor of the CPU without an operator.
READING_FUNCTIONS = {"tolist", "numpy", "cpu", "__array__"}


class Operators(TorchDispatchMode):
    """Notes the operators that make the host wait, also in hooks of the backward pass."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING_OPERATORS:
            self._found.append(name)
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes the functions that read tensors of the CPU without an operator."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in READING_FUNCTIONS:
            self._found.append(function.__name__)
        return function(*args, **(kwargs or {}))


@contextmanager
def host_waits(device: str) -> Iterator[list[str]]:
    """Yields the list of calls that make the host wait; on a GPU the first one raises instead."""
    if device == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield []
        finally:
            torch.cuda.set_sync_debug_mode(before)
    else:
        found: list[str] = []
        with Operators(found), Functions(found):
            yield found


class Twins(SingleProcessGroup):
    """Two ranks that hold the same, in one process; a sum is queued where its tensor is."""

    size = 2

    def can_overlap(self, tensor: torch.Tensor) -> bool:
        return True

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        self.all_reduce(tensor)
        return lambda: None


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_overlap(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(device)
    overlap = Overlap()
    averager = GradientAverager(Twins(), list(model.parameters()), lambda: 0.5, overlap)
    x = torch.linspace(-1, 1, 6, device=device).view(2, 3)

    def step(between: Callable[[], Any] = lambda: None) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        between()
        averager.average()

    for _ in range(3):
        step()
    assert averager.overlaps and overlap.is_used
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    with host_waits(device) as waits:
        for _ in range(3):
            step()
    assert waits == [] and not overlap.has_failed()
    assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), expected, strict=True))
    with host_waits(device) as waits:
        step(lambda: model[0].bias.grad.data.mul_(0.5))
        step()
    assert waits == [] and overlap.has_failed(), "a change is found, though only later"


@pytest.mark.parametrize("device", DEVICES)
def test_a_bucket_without_some_of_its_gradients_is_packed(device: str) -> None:
    parameters = [torch.zeros(2, requires_grad=True, device=device) for _ in range(3)]
    parameters[0].grad = torch.ones(2, device=device)
    averager = GradientAverager(Twins(), parameters, lambda: 0.5)
    (bucket,) = averager._buckets
    with host_waits(device) as waits:
        flat = bucket.pack(0.5)
    assert waits == [] and flat.tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_tensors(device: str) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(9, device=device), torch.arange(9) * 2)
    loader = ElasticLoader(Runtime(), dataset, 2, seed=1)
    with host_waits(device) as waits:
        batches = list(loader)
    assert waits == []
    assert sorted(int(one) for first, _ in batches for one in first) == list(range(9))
    assert all(torch.equal(first.cpu() * 2, second) for first, second in batches)
    assert all(first.device.type == device and second.device.type == "cpu" for first, second in batches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_batch_normalization(device: str, momentum: float | None) -> None:
    runtime = Runtime()
    runtime.group = Twins()  # The table of the ranks' statistics is doubled, too: only the waits count here.
    layer = SyncBatchNorm.convert(torch.nn.BatchNorm1d(3, momentum=momentum), runtime).to(device)
    x = torch.linspace(-1, 1, 12, device=device).view(4, 3).requires_grad_()
    layer(x).sum().backward()
    with host_waits(device) as waits:
        layer(x).sum().backward()
    assert waits == []


class Epoch(ElasticTrainable):
    """Trains on as many batches as it is told."""

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = self.make_loader(torch.utils.data.TensorDataset(torch.ones(4 * config["batches"], 3)), 4)

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        loss = self.model(batch[0]).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}


def waits_of_an_iteration(batches: int) -> list[list[str]]:
    """What made the host of each of two ranks wait in an iteration in which gradients were sent early."""
    members = []
    for group in make_groups(2):
        trainable = Epoch()
        trainable.setup({"batches": batches})
        members.append(ElasticMember(trainable, group))
    join(members)

    def iterate(member: ElasticMember) -> list[str]:
        member.iterate(lambda: True)
        assert member.trainable._elastic.overlap.is_used
        with host_waits("cpu") as waits:
            member.iterate(lambda: True)
        return waits

    return together(members, iterate)


def test_an_iteration_waits_as_often_with_many_batches_as_with_few() -> None:
    few, many = waits_of_an_iteration(4), waits_of_an_iteration(12)
    assert few == many and "_local_scalar_dense" in few[0], "the result is read"
