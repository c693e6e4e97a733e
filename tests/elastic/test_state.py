"""Snapshots of a state, and handing them to others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402

from fluid.elastic.groups.torch_group import TorchGroup  # noqa: E402
from fluid.elastic.state import Snapshot, allocate, broadcast, fits_on_gpu  # noqa: E402

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "tensors": [(torch.rand(3, 5, generator=generator) * 9).to(dtype) for dtype in TYPES],
        "odd": (torch.ones(()), torch.empty(0, 4), torch.arange(12).view(3, 4).t(), torch.nn.Parameter(torch.ones(2))),
        "sparse": torch.eye(3).to_sparse(),
        5: OrderedDict(a=1, b=[None, "text", {2.5}]),
    }


def same(ours: Any, others: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        if ours.layout != torch.strided:
            return bool(torch.equal(ours.to_dense(), others.to_dense()))
        return ours.dtype == others.dtype and torch.equal(ours, others)
    if isinstance(ours, dict):
        return (
            type(ours) is type(others) and ours.keys() == others.keys() and all(same(ours[k], others[k]) for k in ours)
        )
    if isinstance(ours, (list, tuple)):
        return type(ours) is type(others) and all(same(a, b) for a, b in zip(ours, others, strict=True))
    return bool(ours == others)


def test_what_is_taken_comes_back() -> None:
    assert same(Snapshot.take(state()).state(), state())
    assert same(Snapshot.take({}).state(), {})


def test_neither_side_can_change_the_copy() -> None:
    live = state()
    snapshot = Snapshot.take(live)
    live["tensors"][0].zero_()
    snapshot.state()["tensors"][0].fill_(5)
    assert same(snapshot.state(), state())


def test_memory_is_taken_again_if_it_fits() -> None:
    first = Snapshot.take(state())
    second = Snapshot.take(state(), first)
    assert second.memory["cpu"] is first.memory["cpu"]
    assert same(second.state(), state())
    third = Snapshot.take({"more": torch.ones(10_000)}, second)
    assert third.memory["cpu"] is not second.memory["cpu"] and third.state()["more"].sum() == 10_000


def test_versions_of_modules_are_kept() -> None:
    taken = Snapshot.take(torch.nn.BatchNorm1d(3).state_dict()).state()
    assert taken._metadata[""] == {"version": 2}


@pytest.mark.parametrize("chunk", [100, 2**20])
def test_handing_over(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.state._CHUNK", chunk)

    def hand(group: Any) -> bool:
        mine = Snapshot.take(state()) if group.rank == 0 else None
        return same(broadcast(group, mine).state(), state())

    assert together(make_groups(3), hand) == [True] * 3


class Gpu:
    """What PyTorch says of a GPU with 80 GB, and a CUDA runtime that notes what it locks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = refuses
        self.facts = {"free": 60, "reserved": 20, "allocated": 10, "limit": 1.0}
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.cudart", lambda: self)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (self.facts["free"] * 10**9, 80 * 10**9))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda: self.facts["reserved"] * 10**9)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda: self.facts["allocated"] * 10**9)
        monkeypatch.setattr("fluid.elastic.state._HAS_LIMIT", True)
        monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda: self.facts["limit"], raising=False)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.locked[address] = size
        return 1 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_a_snapshot_stays_on_a_gpu_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    assert fits_on_gpu(17 * 10**9) and not fits_on_gpu(18 * 10**9)  # A quarter of 60 + 20 - 10.
    gpu.facts["limit"] = 0.375  # Of 80: 10 more than what is reserved.
    assert fits_on_gpu(5 * 10**9) and not fits_on_gpu(6 * 10**9)


@pytest.mark.parametrize("refuses", [False, True])
def test_host_memory_is_locked_to_the_byte_and_unlocked_with_the_snapshot(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, refuses)
    gpu.facts["free"] = gpu.facts["reserved"] = gpu.facts["allocated"] = 0
    memory = allocate("cuda", 5000)
    assert memory.shape == (5000,) and memory.fill_(7).sum() == 35_000
    assert gpu.locked == ({} if refuses else {memory.data_ptr(): 5000})
    del memory
    assert gpu.locked == {}
    assert len(allocate("cuda", 0)) == 0 and gpu.locked == {}


def test_the_sender_does_not_copy_its_own_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every tensor counts as being on another device than the group's.
    monkeypatch.setattr(TorchGroup, "_is_where_needed", lambda self, tensor: False)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())

    def version(group: Any) -> tuple[int, list[float]]:
        tensor = torch.full((4,), group.rank + 1.0)
        before = tensor._version
        group.broadcast(tensor)
        return tensor._version - before, tensor.tolist()

    assert together(make_groups(2), version) == [(0, [1.0] * 4), (1, [1.0] * 4)]


@pytest.mark.gpu
def test_tensors_of_a_gpu_go_from_device_to_device() -> None:
    live = {"cpu": torch.ones(3), "gpu": [torch.rand(1000, device="cuda"), torch.arange(5, device="cuda")]}
    expected = [tensor.clone() for tensor in live["gpu"]]
    snapshot = Snapshot.take(live)
    assert snapshot.memory["cuda"].is_cuda and not snapshot.memory["cpu"].is_cuda
    for tensor in live["gpu"]:
        tensor.zero_()  # Queued after the copy.
    restored = snapshot.state()
    assert all(torch.equal(ours, other) for ours, other in zip(restored["gpu"], expected, strict=True))
    assert torch.equal(restored["cpu"], torch.ones(3))
    restored["gpu"][0].zero_()
    assert torch.equal(snapshot.state()["gpu"][0], expected[0])


@pytest.mark.gpu
def test_a_snapshot_in_host_memory_where_the_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.state.fits_on_gpu", lambda size: False)
    live = torch.rand(1_000_003, device="cuda")
    expected = live.clone()
    snapshot = Snapshot.take({"live": live})
    live.zero_()
    memory = snapshot.memory["cuda"]
    assert not memory.is_cuda and memory.is_pinned()
    assert torch.equal(snapshot.state()["live"], expected)
    again = Snapshot.take({"live": live}, snapshot)
    assert again.memory["cuda"] is memory and not again.state()["live"].any()
