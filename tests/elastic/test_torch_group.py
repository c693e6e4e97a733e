"""Process groups of torch.distributed and of shared memory, between threads that they take for processes."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import Controller, make_groups, meet, together  # noqa: E402

from fluid.elastic.groups.generation import GenerationBrokenError  # noqa: E402
from fluid.elastic.groups.group import interface_of  # noqa: E402
from fluid.elastic.groups.make import make_group  # noqa: E402
from fluid.elastic.groups.rendezvous import PROOF_BYTES, proofs_of  # noqa: E402
from fluid.elastic.groups.torch_group import TorchGroup, device_name  # noqa: E402
from fluid.errors import FluidError, InvalidFieldError  # noqa: E402


@pytest.fixture(params=["gloo", "auto"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def summed(group: TorchGroup) -> float:
    tensor = torch.full((1000,), float(group.rank + 1))
    group.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return float(tensor[0])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_operations(size: int, backend: str) -> None:
    groups = make_groups(size, backend=backend)
    assert [(group.rank, group.size) for group in groups] == [(rank, size) for rank in range(size)]
    assert together(groups, summed) == [size * (size + 1) / 2] * size

    def told(group: TorchGroup) -> list[int]:
        tensor = torch.tensor([group.rank + 5, 7])
        group.broadcast(tensor)
        group.barrier()
        return list(tensor.tolist())

    assert together(groups, told) == [[5, 7]] * size


def test_alone_nothing_happens() -> None:
    group = make_group("gloo", "cpu")
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    group.broadcast(tensor)
    group.barrier()
    group.shutdown()
    assert tensor.tolist() == [1.0] * 3 and group.size == 1 and not group.broken


def test_one_generation_after_the_other(backend: str) -> None:
    groups = make_groups(3, backend=backend)
    for generation, members in ((2, groups[:2]), (3, groups[1:]), (4, groups)):
        meet(members, generation)
        assert together(members, summed) == [len(members) * (len(members) + 1) / 2] * len(members)


def test_a_member_that_leaves_breaks_the_generation_of_all_that_wait(backend: str) -> None:
    # In a ring of 5, most are no neighbours of the one that leaves.
    groups = make_groups(5, backend=backend)
    broken = together(groups, lambda group: group.shutdown() if group is groups[3] else summed_or_left(group))
    assert [type(error) for error in broken if error is not None] == [GenerationBrokenError] * 4
    assert all(group.broken for group in groups if group is not groups[3])
    meet(groups, 2)
    assert together(groups, summed) == [15.0] * 5


def summed_or_left(group: TorchGroup) -> float:
    """As a member does: who finds the generation broken leaves it, which tells the others."""
    try:
        return summed(group)
    except GenerationBrokenError:
        group.shutdown()
        raise


def test_an_abort_wakes_those_who_wait(backend: str) -> None:
    groups = make_groups(3, backend=backend)
    waiting = threading.Event()

    def wait(group: TorchGroup) -> object:
        if group.rank == 2:  # It does not take part, as one that hangs.
            waiting.wait()
            for other in groups:
                other.abort(1)
            return None
        waiting.set()
        return summed(group)

    assert [type(result) for result in together(groups, wait)] == [GenerationBrokenError] * 2 + [type(None)]
    meet(groups, 2)
    assert together(groups, summed) == [6.0] * 3


def test_an_abort_that_comes_before_the_generation(backend: str) -> None:
    group, other = TorchGroup("cpu", backend), TorchGroup("cpu", backend)
    group.abort(1)
    with pytest.raises(GenerationBrokenError, match="generation 1 was aborted"):
        group.configure(Controller(1).rendezvous(0), 0, 2)
    meet([group, other], 2)
    group.abort(1)  # Too late: it does not touch the next one.
    assert together([group, other], summed) == [3.0] * 2


def test_an_abort_while_the_members_meet() -> None:
    group = TorchGroup("cpu", "gloo")
    threading.Timer(0.05, group.abort, [1]).start()  # Before or while it waits; the answer is the same.
    with pytest.raises(GenerationBrokenError, match="aborted"):
        group.configure(Controller(1).rendezvous(0), 0, 2)


def test_not_all_members_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.groups.torch_group._ARRIVE_S", 0.1)
    with pytest.raises(GenerationBrokenError, match=r"not all members of generation 1 arrived within 0\.1 s"):
        TorchGroup("cpu", "gloo").configure(Controller(1).rendezvous(1), 1, 2)


def test_a_process_that_does_not_know_the_secret_cannot_take_a_members_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.groups.torch_group.proofs_of", forged)
    groups = [TorchGroup("cpu", "gloo") for _ in range(3)]
    results = meet(groups, 1)
    assert all(isinstance(result, GenerationBrokenError) for result in results)
    assert any("does not belong to the generation" in str(result) for result in results)
    monkeypatch.undo()
    meet(groups, 2)
    assert together(groups, summed) == [6.0] * 3


def forged(secret: bytes, rank: int, size: int) -> bytes:
    """Rank 2 is not who it says, and guesses."""
    return proofs_of(bytes(PROOF_BYTES) if rank == 2 else secret, rank, size)


def test_interfaces() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.3") == "lo"
    with pytest.raises(FluidError, match=r"address='203\.0\.113\.9': no network interface"):
        interface_of("203.0.113.9")  # RFC 5737: an address for documentation.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # There may be no other network than the loopback one.
            probe.connect(("203.0.113.9", 9))  # Sends nothing.
        own = probe.getsockname()[0]
    assert own in ("0.0.0.0", "127.0.0.1") or interface_of(own) in dict(socket.if_nameindex()).values()


def test_unknown_process_groups() -> None:
    with pytest.raises(InvalidFieldError, match="backend"):
        make_group("carrier pigeons", "cpu")


def test_instances_of_one_gpu_do_not_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a GPU's"))
    names = []
    for visible in ("GPU-a", "MIG-a", "MIG-b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.append(device_name(torch.device("cuda")))
    assert names == ["a GPU's", "MIG", "MIG"]
