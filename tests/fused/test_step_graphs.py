"""Packs whose steps are captured, by a stand-in for CUDA graphs that runs on CPUs: the same operations, recorded."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import (  # noqa: E402
    Classifier,
    Convolutions,
    OwnTensors,
    Single,
    Streamed,
    Tied,
    difference,
    made,
    values,
)
from torch import nn  # noqa: E402

from fluid.fused import FusedPack, FusionError  # noqa: E402
from fluid.fused.recording import Recording, RowProgram  # noqa: E402
from fluid.fused.step_graphs import size_for  # noqa: E402

Work = Callable[[], None]
#: Of rows with even seeds, and of those with odd ones.
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, {"lr": 0.05, "schedule": lambda step: 0.9**step}],
    "adam": [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.003, "clip_norm": 0.2}],
    "adamw": [{"lr": 0.01, "schedule": lambda step: 0.9**step}, {"lr": 0.02, "betas": (0.8, 0.99)}],
}


class Captures:
    """Stands for a GPU's. A replay runs no Python code of the step, but repeats its operations on the same tensors.

    Attributes:
        pools: how many were made.
        fails: whether a capture does, by number.
        error: raised then.
    """

    def __init__(self) -> None:
        self.pools = 0
        #: How often each capture was replayed.
        self.replays: list[int] = []
        self.fails: Callable[[int], bool] = lambda number: False
        self.error: Exception = RuntimeError("operation not permitted\nwhen stream is capturing")

    def new(self) -> Callable[[Work], Work]:
        self.pools += 1
        return self.capture

    def capture(self, work: Work) -> Work:
        for _ in range(3):
            work()
        number = len(self.replays)
        self.replays.append(0)
        if self.fails(number):
            raise self.error
        program = RowProgram(Recording.of(work, [], rows=1))

        def replay() -> None:
            self.replays[number] += 1
            program(1, [])

        return replay


class Again(Captures):
    """Its replays call the step again."""

    def capture(self, work: Work) -> Work:
        super().capture(work)
        return work


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return use(Captures(), monkeypatch)


def use(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> Captures:
    monkeypatch.setattr("fluid.fused.pack.capture_on", lambda device: captures.new)
    return captures


def eager(cls: Any, configs: list[dict[str, Any]]) -> FusedPack:
    """A pack without graphs."""
    pack = FusedPack.of(cls, configs)
    pack._graphs = None
    return pack


def configs(kind: str, rows: int = 3) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "optimizer": OPTIMIZERS[kind][seed % 2], "seed": seed, "p": 0.1 * seed} for seed in range(rows)
    ]


def assert_equal(pack: FusedPack, other: FusedPack, allowed: float = 1e-10) -> None:
    assert len(pack) == len(other)
    for one, two in zip(pack.trials, other.trials, strict=True):
        assert difference(one, two) <= allowed


def step_both(pack: FusedPack, other: FusedPack, iterations: int = 1) -> None:
    for _ in range(iterations):
        for ours, theirs in zip(pack.step(), other.step(), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("stand_in", [Captures, Again])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("cls", [Convolutions, Streamed])
def test_captured_packs_equal_others(
    cls: Any, kind: str, stand_in: type[Captures], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = use(stand_in(), monkeypatch)
    pack, other = FusedPack.of(cls, configs(kind)), eager(cls, configs(kind))
    step_both(pack, other, 3)
    assert_equal(pack, other)
    assert pack._size == 3
    # The last batch of an epoch of Convolutions is smaller.
    assert len(captures.replays) == (2 if cls is Convolutions else 1) and captures.pools == 1
    if stand_in is Captures:
        assert captures.replays == ([9, 3] if cls is Convolutions else [12])


@pytest.mark.parametrize("cls", [Tied, OwnTensors, Single])
def test_other_models_and_data(cls: Any, captures: Captures) -> None:
    several = [{"optimizer": {"lr": 0.1, "clip_norm": 0.5}, "seed": seed, "weight": 1.0 + seed} for seed in range(5)]
    pack, other = FusedPack.of(cls, several), eager(cls, several)
    step_both(pack, other) if cls is not Single else (pack.step(), other.step())
    assert_equal(pack, other, 1e-5 if cls is not OwnTensors else 1e-10)
    assert len(captures.replays) == 2


def test_rows_come_and_go_within_a_size_without_another_capture(captures: Captures) -> None:
    pack, other = FusedPack.of(Convolutions, configs("adamw", 8)), eager(Convolutions, configs("adamw", 8))
    step_both(pack, other)
    assert len(captures.replays) == 2 and pack.traced >= 2
    traced = pack.traced
    for pack_of in (pack, other):
        pack_of.leave([1, 7])
    step_both(pack, other)
    new = configs("adamw", 10)[8:]
    for pack_of in (pack, other):
        pack_of.join([made(Convolutions, new[0])])
    step_both(pack, other, 2)
    assert len(captures.replays) == 2 and pack.traced == traced
    for pack_of in (pack, other):
        pack_of.join([made(Convolutions, config) for config in (new[1], *configs("adamw", 2))])
    step_both(pack, other)
    assert (len(pack), pack._size) == (10, 12)
    assert len(captures.replays) == 4 and captures.pools == 2 and pack.traced > traced
    assert_equal(pack, other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_dead_rows_do_what_the_last_row_does(kind: str, captures: Captures) -> None:
    pack = FusedPack.of(Convolutions, configs(kind, 8))
    pack.step()
    with torch.no_grad():
        next(pack.trials[7].model.parameters()).fill_(math.nan)
    pack.leave([3, 7])
    for _ in range(2):
        pack.remember()
        pack.step()
        assert len(pack) == 6 and pack._size == 8
        pack.restore()
        pack.step()
        for tensor in (*pack._model.tensors(), *pack._optimizer.tensors()):
            assert all(torch.equal(tensor[5], tensor[dead]) for dead in (6, 7))


def test_far_fewer_rows_get_smaller_graphs(captures: Captures) -> None:
    pack, other = FusedPack.of(Classifier, configs("sgd", 8)), eager(Classifier, configs("sgd", 8))
    sizes = []
    for leaving in ([0, 1, 2, 3], [0], []):
        step_both(pack, other)
        sizes.append(pack._size)
        for pack_of in (pack, other):
            pack_of.leave(leaving)
    assert sizes == [8, 4, 4]
    assert_equal(pack, other)


def test_sizes_have_at_most_half_as_many_dead_rows_and_do_not_flicker() -> None:
    sizes = sorted({size_for(rows) for rows in range(1, 200)})
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for rows in range(1, 200):
        size = size_for(rows)
        assert rows <= size <= 1.5 * rows
        larger = [*sizes, 384][sizes.index(size) + 1]
        for present in (0, *sizes, 384):
            assert size_for(rows, present) == (larger if present == larger else size)
        # One that leaves and comes back.
        assert size_for(rows, size_for(rows - 1, size)) == size
    assert size_for(0, present=4) == 0


def test_a_hyperparameter_that_no_row_had_is_captured(captures: Captures) -> None:
    pack, other = FusedPack.of(Classifier, [{}] * 3), eager(Classifier, [{}] * 3)
    step_both(pack, other)
    with_more = {"optimizer": {"lr": 0.1, "momentum": 0.9, "clip_norm": 0.1, "weight_decay": 0.1}, "seed": 3}
    for pack_of in (pack, other):
        pack_of.join([made(Classifier, with_more)])
    step_both(pack, other, 2)
    assert_equal(pack, other)
    assert len(captures.replays) == 4


@pytest.mark.parametrize("row", [0, 2])
def test_a_row_that_is_not_finite_changes_no_other(row: int, captures: Captures) -> None:
    several = configs("sgd")
    pack, other = FusedPack.of(Convolutions, several), eager(Convolutions, several)
    with torch.no_grad():
        next(pack.trials[row].model.parameters()).fill_(math.nan)
    for _ in range(2):
        pack.step()
        other.step()
    for number, (one, two) in enumerate(zip(pack.trials, other.trials, strict=True)):
        assert (difference(one, two) <= 1e-10) == (number != row)


def test_nothing_of_a_capture_is_seen_in_trials_that_leave(captures: Captures) -> None:
    pack, other = FusedPack.of(Convolutions, configs("adam")), eager(Convolutions, configs("adam"))
    step_both(pack, other)
    (left,), (expected,) = pack.leave([2]), other.leave([2])
    before = values(left)
    step_both(pack, other)
    assert all(torch.equal(value, before[name]) for name, value in values(left).items())
    assert left.step() == pytest.approx(expected.step(), rel=1e-9)


def test_an_iteration_that_failed_can_be_repeated(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, other = FusedPack.of(Convolutions, configs("adam")), eager(Convolutions, configs("adam"))
    step_both(pack, other)
    pack.remember()
    with monkeypatch.context() as patched:
        patched.setattr(FusedPack, "_evaluate", lambda pack: {}[0])
        with pytest.raises(KeyError):
            pack.step()
    pack.restore()
    step_both(pack, other)
    assert_equal(pack, other)


# -- steps that cannot be captured --------------------------------------------------------------------------------


def test_what_cannot_be_captured_runs_without_a_graph(captures: Captures, caplog: pytest.LogCaptureFixture) -> None:
    captures.fails = lambda number: True
    pack, other = FusedPack.of(Classifier, configs("adam")), eager(Classifier, configs("adam"))
    with caplog.at_level(logging.WARNING, "fluid.fused"):
        step_both(pack, other, 3)
    assert_equal(pack, other)
    # One for each shape of batch; then these train as if there were no graphs.
    expected = "run without a graph: they cannot be captured: RuntimeError: operation not permitted"
    assert [expected in message and "\n" not in message for message in caplog.messages] == [True, True]
    assert captures.replays == [0, 0]
    assert pack._graphs is not None and pack._graphs.size == 0


def test_other_steps_are_replayed_where_one_cannot_be_captured(
    captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    captures.fails = lambda number: number in (1, 3)
    pack, other = FusedPack.of(Convolutions, configs("sgd", 4)), eager(Convolutions, configs("sgd", 4))
    step_both(pack, other, 2)
    for joining in (1, 2):
        for pack_of in (pack, other):
            pack_of.join([made(Convolutions, config) for config in configs("sgd", joining)])
        step_both(pack, other, 2)
    assert_equal(pack, other)
    # The second shape of batch is tried again with another size, but not within a size, and logged once.
    assert captures.replays == [6, 0, 6, 0, 6, 2] and len(caplog.messages) == 1
    assert pack._graphs is not None and pack._graphs.size == 8, "seven rows, and a dead one"


def test_a_loss_that_cannot_run_for_rows_at_once_is_no_failed_capture(
    captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    class Branching(Classifier):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            loss = super().loss(model, batch)
            return loss if loss > 0 else -loss

    with pytest.raises(FusionError, match=r"^loss\(\) cannot run for several trials at once"):
        FusedPack.of(Branching, [{}, {}]).step()
    assert not caplog.messages


def test_out_of_memory_in_a_capture_leaves_the_graphs_to_fewer_rows(captures: Captures) -> None:
    captures.error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    captures.fails = lambda number: number == 0
    pack, other = FusedPack.of(Classifier, configs("sgd", 4)), eager(Classifier, configs("sgd", 4))
    pack.remember()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        pack.step()
    pack.restore()
    for pack_of in (pack, other):
        pack_of.leave([2, 3])
    step_both(pack, other, 2)
    assert_equal(pack, other)
    assert captures.replays == [0, 6, 2]
    for pack_of in (pack, other):  # Later, there is memory for more.
        pack_of.join([made(Classifier, config) for config in configs("sgd", 2)])
    step_both(pack, other)
    assert_equal(pack, other)
    assert captures.replays == [0, 6, 2, 3, 1]


# -- memory -------------------------------------------------------------------------------------------------------


class Wide(Single):
    """A model of 360,000 bytes."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 1800), nn.Linear(1800, 13))


@pytest.mark.parametrize("rows", [5, 6])
def test_a_pack_holds_six_times_its_parameters(rows: int, captures: Captures) -> None:
    """Parameters, two states of Adam, and the copy of these three: none of it is there twice."""

    def tensors_held() -> dict[int, int]:
        wraps = torch._C._functorch.is_functorch_wrapped_tensor  # As frames of errors in other tests have them.
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not wraps(one)]
        alive = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
        return {storage.data_ptr(): storage.nbytes() for storage in alive}

    gc.collect()
    before = tensors_held().keys()
    pack = FusedPack.of(Wide, configs("adam", rows))
    for _ in range(2):
        pack.remember()
        pack.step()
    gc.collect()
    held = sum(size for place, size in tensors_held().items() if place not in before)
    parameters = pack._model.layout.row_bytes
    assert pack._size == 6 and len(captures.replays) == 2
    assert 3 * (6 + rows) * parameters <= held <= 3.1 * (6 + rows) * parameters


def test_graphs_go_with_the_rows(captures: Captures) -> None:
    pack = FusedPack.of(Classifier, configs("sgd", 4))
    pack.step()
    assert pack._graphs is not None
    static = weakref.ref(pack._graphs._rows)
    pack.leave([0, 1, 2, 3])
    gc.collect()
    assert static() is None and pack._size == 0
    pack.join([made(Classifier, {})])
    assert math.isfinite(pack.step()[0]["loss"])


def test_graphs_go_with_the_pack(captures: Captures) -> None:
    pack = FusedPack.of(Classifier, configs("sgd", 4))
    pack.step()
    assert pack._graphs is not None
    static = weakref.ref(pack._graphs._rows)
    del pack
    gc.collect()
    assert static() is None


def test_packs_on_a_cpu_have_no_graphs() -> None:
    assert FusedPack.of(Classifier, [{}])._graphs is None
