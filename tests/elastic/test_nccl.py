"""Groups and members on NCCL, with a stand-in whose operations return when they are queued."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.fake_nccl import FakeNccl, install  # noqa: E402
from elastic.groups import Controller, make_groups, meet, together  # noqa: E402
from elastic.test_trainable import join  # noqa: E402
from elastic.trainables import OnDevice  # noqa: E402

from fluid.elastic import ElasticRun, ElasticTrainable  # noqa: E402
from fluid.elastic.groups import torch_group  # noqa: E402
from fluid.elastic.groups.generation import GenerationBrokenError, GenerationGuard  # noqa: E402
from fluid.elastic.groups.nccl import connect, shut_down, wait_for_gpu  # noqa: E402
from fluid.elastic.groups.torch_group import TorchGroup, _Store  # noqa: E402
from fluid.elastic.members.member import ElasticMember, Iteration  # noqa: E402
from fluid.gpu.mps_control import PIPE_VARIABLE  # noqa: E402


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    return install(monkeypatch)


class Vector(ElasticTrainable):
    """Adds ones of every device to a vector, and returns without waiting for the sum."""

    def build(self, config: dict[str, Any]) -> None:
        self.total, self.part = torch.zeros(100), torch.zeros(100)
        self.queued: Any = lambda: None

    def train_iteration(self) -> Mapping[str, Any]:
        self.total = self.extra_state()
        self.part = torch.ones(100)
        self._elastic.group.all_reduce(self.part)
        self.queued()
        return {}

    def extra_state(self) -> Any:
        return self.total + self.part

    def load_extra_state(self, state: Any) -> None:
        self.total, self.part = state, torch.zeros(100)


def members() -> list[ElasticMember]:
    made = []
    for group in make_groups(2, backend="nccl"):
        trainable = Vector()
        trainable.setup({})
        made.append(ElasticMember(trainable, group))
    join(made)
    return made


def iterate(member: ElasticMember) -> Iteration:
    return member.iterate(lambda: True)


def test_operations_and_generations(nccl: type[FakeNccl]) -> None:
    groups = make_groups(3, backend="nccl")

    def summed(group: Any) -> float:
        small, large = torch.full((3,), group.rank + 1.0), torch.full((100,), group.rank + 1.0)
        group.all_reduce(large)
        group.all_reduce(small)
        group.confirm()
        return float(small[0] + large[99])

    assert together(groups, summed) == [12.0] * 3
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    first = list(nccl.alive)
    meet(groups[:2], 2)
    for group in groups[:2]:
        group.disconnect(1)
    assert together(groups[:2], summed) == [6.0] * 2
    for thread in threading.enumerate():
        if thread.name == "fluid-elastic-close":
            thread.join()
    assert [group.ended for group in first if group.rank < 2] == ["shut down"] * 2


def test_clients_of_different_mps_servers_do_not_open_memory_of_each_other(
    nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE"):
        monkeypatch.setenv(name, "")  # So that the end of the test deletes it.
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_CUMEM_HOST_ENABLE", "1")
    monkeypatch.setenv(PIPE_VARIABLE, "/tmp/of-all")
    make_groups(2, backend="nccl")
    assert "NCCL_P2P_DISABLE" not in os.environ
    monkeypatch.setattr(torch_group, "_mps_server", lambda: f"/tmp/{threading.get_ident()}")
    make_groups(2, generation=2, backend="nccl")
    assert os.environ["NCCL_P2P_DISABLE"] == "1" and os.environ["NCCL_CUMEM_ENABLE"] == "0"
    assert os.environ["NCCL_CUMEM_HOST_ENABLE"] == "1", "the user's own"


def test_the_store_serves_the_process_group_until_it_is_gone(nccl: type[FakeNccl]) -> None:
    """NCCL uses it for communicators of new pairs, and its watchdog when an operation fails."""
    groups = make_groups(2, backend="nccl")
    gc.collect()
    first, second = nccl.alive
    first.store.set("key", bytes(range(256)))
    assert second.store.clone().get("key") == bytes(range(256))
    found = []

    def shut_down() -> None:
        gc.collect()
        found.append(second.store.get("key"))

    second.shutdown = shut_down  # type: ignore[method-assign]
    for group in groups:
        group.shutdown()
    for thread in threading.enumerate():
        if thread.name == "fluid-elastic-close":
            thread.join()
    assert found == [bytes(range(256))]


def test_an_iteration_whose_sum_was_aborted_is_not_taken_for_a_finished_one(nccl: type[FakeNccl]) -> None:
    ours = members()
    assert [str(done) for done in together(ours, iterate)] == [str(Iteration(1, {}, True, False))] * 2
    for process_group in nccl.alive:
        process_group.free.clear()  # The GPUs are busy: no result of the next iteration comes before the abort.
    queued = threading.Barrier(3)

    def abort() -> None:
        queued.wait()
        for member in ours:
            member.abort(2)

    for member in ours:
        member.trainable.queued = queued.wait  # type: ignore[attr-defined]
    aborting = threading.Thread(target=abort)
    aborting.start()
    results = together(ours, iterate)
    aborting.join()
    assert [type(result) for result in results] == [GenerationBrokenError] * 2
    assert [member.iteration for member in ours] == [1, 1]
    assert [member.trainable.total.tolist() for member in ours] == [[2.0] * 100] * 2  # type: ignore[attr-defined]


def test_a_member_that_dies_while_the_others_connect(nccl: type[FakeNccl]) -> None:
    hang = threading.Event()
    nccl.on_connect[0] = hang.wait

    groups = [TorchGroup("cpu", "nccl") for _ in range(2)]
    controller = Controller(1)

    def configure(group: TorchGroup) -> None:
        rank = groups.index(group)
        group.configure(controller.rendezvous(rank), rank, 2)
        groups[0].abort(1)  # As the controller does when this one has died.

    assert [type(result) for result in together(groups, configure)] == [GenerationBrokenError, type(None)]
    hang.set()
    nccl.on_connect.clear()
    meet(groups, 2)
    ones = [torch.ones(3) for _ in groups]
    together(groups, lambda group: group.all_reduce(ones[group.rank]))
    assert [one.tolist() for one in ones] == [[2.0] * 3] * 2


def test_communicators_are_made_while_another_width_trains(nccl: type[FakeNccl]) -> None:
    groups = [*make_groups(2, backend="nccl"), TorchGroup("cpu", "nccl")]
    first = list(nccl.alive)
    controller, connecting = Controller(2), threading.Barrier(4)
    for rank in range(3):
        nccl.on_connect[rank] = lambda: (connecting.wait(), connecting.wait())
    ahead = threading.Thread(
        target=together,
        args=(groups, lambda group: group.connect(controller.rendezvous(groups.index(group)), groups.index(group), 3)),
    )
    ahead.start()
    connecting.wait()  # All are in ncclCommInitRank.
    tensors = [torch.ones(100) for _ in groups]
    together(groups[:2], lambda group: (group.all_reduce(tensors[group.rank]), group.confirm()))
    assert [tensor[0].item() for tensor in tensors] == [2.0, 2.0, 1.0]
    connecting.wait()
    ahead.join()
    nccl.on_connect.clear()
    made = len(nccl.alive)
    store = Controller(3)
    together(groups, lambda group: group.configure(store.rendezvous(groups.index(group)), groups.index(group), 3, 2))
    assert len(nccl.alive) == made == 5, "no communicator is made in the pause"
    assert not any(communicator.ended for communicator in first)
    assert together(groups, lambda group: group.barrier()) == [None] * 3


def test_a_communicator_that_was_given_up_is_ended_when_it_is_made(nccl: type[FakeNccl]) -> None:
    hang = threading.Event()
    nccl.on_connect[0] = hang.wait
    groups = [TorchGroup("cpu", "nccl") for _ in range(2)]
    controller = Controller(1)
    ahead = threading.Thread(
        target=together,
        args=(groups, lambda group: group.connect(controller.rendezvous(groups.index(group)), groups.index(group), 2)),
    )
    ahead.start()
    while len(nccl.alive) < 2:
        pass
    for group in groups:
        group.disconnect(1)
    ahead.join()
    hang.set()
    for thread in threading.enumerate():
        if thread.name.startswith("fluid-elastic"):
            thread.join()
    assert nccl.alive == []


@pytest.mark.gpu
@pytest.mark.parametrize("abort", [False, True])
def test_communicators_of_the_real_nccl(abort: bool) -> None:
    for generation in (1, 2):
        guard = GenerationGuard()
        guard.start(generation)
        store = _Store(Controller(generation).rendezvous(0))
        process_group = connect(store, 0, 1, timedelta(seconds=60), torch.device("cuda"), guard)
        numbers = torch.arange(1000.0, device="cuda")
        process_group.allreduce([numbers]).wait()
        wait_for_gpu()
        assert torch.equal(numbers.cpu(), torch.arange(1000.0))
        if abort:
            process_group.abort()
        holder = [process_group]
        shut_down(holder)
        assert holder == []


@pytest.mark.gpu
def test_two_members_on_one_gpu_exchange_through_the_host() -> None:
    groups = [TorchGroup("cuda") for _ in range(2)]
    assert meet(groups, 1) == [None, None]

    def summed(group: TorchGroup) -> tuple[str, list[float], list[float]]:
        tensor, other = (torch.full((3,), group.rank + 1.0, device="cuda") for _ in range(2))
        group.all_reduce(tensor)
        group.broadcast(other)
        return tensor.device.type, tensor.tolist(), other.tolist()

    assert together(groups, summed) == [("cuda", [3.0] * 3, [1.0] * 3)] * 2
    assert not any(group.can_overlap(torch.ones(1, device="cuda")) for group in groups)


def check_training(gpus: tuple[str, ...]) -> None:
    with ElasticRun(OnDevice, {}, 1, gpus=gpus) as run:
        expected = [result.metrics["loss"] for result in run.run(5)]
    with ElasticRun(OnDevice, {}, 1, gpus=gpus) as run:
        results = run.run(1)
        run.resize(2)
        results += run.run(2)
        os.kill(run.pids[0], signal.SIGKILL)
        results += run.run(2)
    assert [result.width for result in results][:2] == [1, 2] and results[-1].width == 1
    assert [result.metrics["loss"] for result in results] == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
def test_two_processes_train_on_one_gpu() -> None:
    check_training(("0",))


@pytest.mark.gpu(2)
def test_two_processes_train_on_two_gpus() -> None:
    check_training(("0", "1"))
