"""Members on one machine that talk through memory they share: between threads, and between processes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import Controller, make_groups, meet, together  # noqa: E402

from fluid.elastic.groups import torch_group as torch_connection  # noqa: E402
from fluid.elastic.groups.generation import GenerationBrokenError  # noqa: E402
from fluid.elastic.groups.host_group import CHUNK, HostGroup, SharedMemory, host_token  # noqa: E402
from fluid.elastic.groups.rendezvous import Rendezvous  # noqa: E402
from fluid.elastic.groups.torch_group import TorchGroup  # noqa: E402
from fluid.elastic.messages import LOOPBACK  # noqa: E402

pytestmark = pytest.mark.skipif(not host_token(), reason="members share no memory on this machine")


def make(size: int, check: Callable[[], None] = lambda: None, timeout: float = 60.0) -> list[HostGroup]:
    memory, where = SharedMemory.create(size)
    memories = [memory, *(SharedMemory.open(where, size) for _ in range(size - 1))]
    for one in memories:
        one.forget_descriptor()
    return [HostGroup(one, rank, size, check, timeout) for rank, one in enumerate(memories)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_sums_are_the_same_bits_everywhere(size: int, dtype: Any) -> None:
    step = CHUNK // torch.empty(0, dtype=dtype).element_size()
    for length in (1, 7, 1000, step, 2 * step + 3):
        parts = [
            (100 * torch.randn(length, generator=torch.Generator().manual_seed(rank))).to(dtype) for rank in range(size)
        ]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        groups = make(size)
        mine = [part.clone().view(1, -1) for part in parts]
        together(groups, lambda group, groups=groups, mine=mine: group.all_reduce(mine[groups.index(group)]))
        assert all(torch.equal(tensor, expected.view(1, -1)) for tensor in mine)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_faster_nobody_reads_what_is_written_later(size: int, seed: int) -> None:
    """Operations of all kinds in an order that is drawn, each member with pauses of its own."""
    plan = random.Random(seed)
    operations = [
        (plan.choice(["all_reduce", "broadcast", "barrier"]), plan.choice([1, 300, 600_000])) for _ in range(60)
    ]

    def run(group: HostGroup) -> list[float]:
        rank, pauses, seen = groups.index(group), random.Random(f"{seed} {size} {groups.index(group)}"), []
        for number, (name, length) in enumerate(operations):
            if pauses.random() < 0.3:
                time.sleep(0.003 * pauses.random())
            tensor = torch.full((length,), float(number * 10 + rank))
            if name == "barrier":
                group.barrier()
                continue
            getattr(group, name)(tensor)
            assert tensor.min() == tensor.max(), (number, name)
            seen.append(float(tensor[0]))
        return seen

    groups = make(size)
    ranks = size * (size - 1) / 2
    sums = {"all_reduce": lambda number: number * 10.0 * size + ranks, "broadcast": lambda number: number * 10.0}
    expected = [sums[name](number) for number, (name, _) in enumerate(operations) if name != "barrier"]
    assert together(groups, run) == [expected] * size


def test_who_waits_for_a_member_that_left_raises() -> None:
    groups = make(3)
    assert together(groups, lambda group: group.barrier()) == [None] * 3
    broken = together(groups, lambda group: group.close() if group is groups[1] else group.barrier())
    assert [type(error) for error in broken] == [GenerationBrokenError, type(None), GenerationBrokenError]
    assert "rank 1 has left" in str(broken[0])


def test_a_last_operation_is_over_for_all_though_some_leave_at_once() -> None:
    for _ in range(50):
        groups = make(2)

        def last(group: HostGroup) -> float:
            tensor = torch.ones(1)
            group.all_reduce(tensor)
            group.close()
            return float(tensor)

        assert together(groups, last) == [2.0, 2.0]


def test_who_waits_in_vain_raises() -> None:
    with pytest.raises(GenerationBrokenError, match=r"rank 1 did not answer within 0\.05 s"):
        make(2, timeout=0.05)[0].barrier()

    def aborted() -> None:
        raise GenerationBrokenError("aborted")

    with pytest.raises(GenerationBrokenError, match="aborted"):
        make(2, check=aborted)[0].barrier()


# -- as the members of a trial ------------------------------------------------------------------------------------


def total(group: TorchGroup) -> float:
    tensor = torch.full((10,), group.rank + 1.0)
    group.all_reduce(tensor)
    return float(tensor[0])


def shares(group: TorchGroup) -> bool:
    return group._current.on_host is not None


def test_members_on_one_machine_share_memory_and_leave_none_behind() -> None:
    groups = make_groups(3, backend="auto")
    before = len(os.listdir("/proc/self/fd"))
    for generation in range(2, 8):
        meet(groups, generation)
        assert all(map(shares, groups)) and together(groups, total) == [6.0] * 3
    assert len(os.listdir("/proc/self/fd")) <= before + 30, "each store has its sockets for a while"


@pytest.mark.parametrize("problem", ["two machines", "unknown machines", "no memory", "out of reach"])
def test_members_that_cannot_share_memory_use_gloo(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("on purpose")

    if problem == "two machines":
        tokens = iter(["here", "there"])
        monkeypatch.setattr(torch_connection, "host_token", lambda: next(tokens))
    elif problem == "unknown machines":
        monkeypatch.setattr(torch_connection, "host_token", lambda: "")
    else:
        monkeypatch.setattr(SharedMemory, "create" if problem == "no memory" else "open", fail)
    groups = make_groups(2, backend="auto")
    if problem == "out of reach":  # It may be by chance at first.
        assert [type(result) for result in meet(groups, 2)] == [GenerationBrokenError] * 2
        meet(groups, 3)
    assert not any(map(shares, groups))
    assert together(groups, total) == [3.0] * 2


def test_an_abort_ends_the_waiting() -> None:
    groups = make_groups(2, backend="auto")

    def abort_or_wait(group: TorchGroup) -> float | None:
        if group.rank == 0:
            return total(group)
        time.sleep(0.1)
        groups[0].abort(1)
        return None

    broken, _ = together(groups, abort_or_wait)
    assert isinstance(broken, GenerationBrokenError) and groups[0].broken


def pass_on(connection: Any, take: Callable[[Any], None]) -> None:
    """Calls a function with all that comes over a connection, in a thread."""

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                take(connection.recv())

    threading.Thread(target=read, daemon=True).start()


def _process(rank: int, size: int, connection: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    group = TorchGroup("cpu", "auto")
    rendezvous = Rendezvous(1, LOOPBACK, connection.send)
    pass_on(connection, rendezvous.receive)
    group.configure(rendezvous, rank, size)
    sums = []
    for number in range(300):
        tensor = torch.full((1 + 997 * (number % 7),), float(number + rank))
        group.all_reduce(tensor)
        sums.append(float(tensor.min()) if tensor.min() == tensor.max() else None)
    answers.put((rank, shares(group), sums))
    group.shutdown()


@pytest.mark.slow
def test_between_processes() -> None:
    context = get_context("spawn")
    answers = context.Queue()
    controller = Controller(generation=1)
    members = []
    for rank in range(3):
        ours, theirs = context.Pipe()
        controller.send[rank] = ours.send
        members.append(context.Process(target=_process, args=(rank, 3, theirs, answers)))
        members[-1].start()
        pass_on(ours, partial(controller.receive, rank))
    found = sorted(answers.get(timeout=60) for _ in range(3))
    for member in members:
        member.join()
    assert found == [(rank, True, [3.0 * number + 3.0 for number in range(300)]) for rank in range(3)]
