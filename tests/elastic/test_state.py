"""Snapshots of a state, and handing them to others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402

from fluid.elastic.state import Snapshot, broadcast  # noqa: E402

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
    assert second.memory is first.memory
    assert same(second.state(), state())
    third = Snapshot.take({"more": torch.ones(10_000)}, second)
    assert third.memory is not second.memory and third.state()["more"].sum() == 10_000


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
