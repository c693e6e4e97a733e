"""Process groups of torch.distributed and of shared memory, between threads that they take for processes."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, meet, together  # noqa: E402

from fluid.elastic.group import GenerationBrokenError, own_address_towards, split_address  # noqa: E402
from fluid.elastic.make_group import make_group  # noqa: E402
from fluid.elastic.torch_group import TorchGroup  # noqa: E402
from fluid.errors import InvalidFieldError  # noqa: E402


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
    rendezvous = group.open_rendezvous("127.0.0.1", 1, 2)
    group.abort(1)
    with pytest.raises(GenerationBrokenError, match="generation 1 was aborted"):
        group.configure(rendezvous, 1, 0, 2)
    meet([group, other], 2)
    group.abort(1)  # Too late: it does not touch the next one.
    assert together([group, other], summed) == [3.0] * 2


def test_an_abort_while_the_members_meet() -> None:
    group = TorchGroup("cpu", "gloo")
    rendezvous = group.open_rendezvous("127.0.0.1", 1, 2)
    threading.Timer(0.05, group.abort, [1]).start()  # Before or while it waits; the answer is the same.
    with pytest.raises(GenerationBrokenError, match="aborted"):
        group.configure(rendezvous, 1, 0, 2)


def test_nobody_at_the_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.elastic.torch_group._CONNECT_S", 0.5)
    group = TorchGroup("cpu", "gloo")
    rendezvous = group.open_rendezvous("127.0.0.1", 1, 2)
    group.shutdown()
    with pytest.raises(GenerationBrokenError, match="was not formed"):
        TorchGroup("cpu", "gloo").configure(rendezvous, 1, 1, 2)


def test_addresses() -> None:
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert own_address_towards("127.0.0.1", 80) == "127.0.0.1"
    for wrong in ("", "10.0.0.1", "10.0.0.1:x", ":80"):
        with pytest.raises(InvalidFieldError, match="meeting"):
            split_address(wrong)
    with pytest.raises(InvalidFieldError, match="backend"):
        make_group("carrier pigeons", "cpu")
