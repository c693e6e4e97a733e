"""Programs for any number of rows, made of two recordings, and shared by the packs of a process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import Classifier, Convolutions, Light, Streamed, Tied, images, made  # noqa: E402
from torch import nn  # noqa: E402

from fluid.fused import FusedPack, FusedTrainable, TensorData, programs, why_not_fused  # noqa: E402
from fluid.fused.recording import Recording, RowProgram  # noqa: E402


def for_any_rows(function: Any, *shape: int) -> RowProgram | None:
    one, two = (Recording.of(function, [torch.rand(rows, *shape)], rows) for rows in (2, 3))
    return RowProgram.for_any_rows(one, two)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The programs that are recorded: their names, and the only number of rows that they are for."""
    found: list[tuple[str, Any]] = []
    record = programs.RowPrograms._record

    def noted(self: Any, name: str, *arguments: Any) -> RowProgram:
        program = record(self, name, *arguments)
        found.append((name, program.rows))
        return program

    monkeypatch.setattr(programs.RowPrograms, "_record", noted)
    monkeypatch.setattr(programs, "_shared_programs", weakref.WeakKeyDictionary())
    return found


# -- recordings --------------------------------------------------------------------------------------------------


def test_a_program_for_any_rows_computes_what_the_function_does() -> None:
    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = torch.tensor([1.0, 2.0])
        weights[0] += 1.0  # It writes to a constant, which stays as it is from call to call.
        largest, places = (x.reshape(-1, 2) * weights).max(0)
        return {"largest": largest, "places": places, "sums": x.view(len(x) * 3, 2).sum(1)}

    program = for_any_rows(function, 3, 2)
    assert program is not None and program.rows is None
    for rows in (1, 2, 5, 64):
        x = torch.rand(rows, 3, 2)
        for _ in range(2):
            found, expected = program(rows, [x]), function(x)
            assert all(torch.equal(one, two) for one, two in zip(found, expected.values(), strict=True))


def test_operations_that_write_stay_in_their_order() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x.clone()
        x[:, 0].add_(1.0)
        unused = x.exp()  # Nothing needs it: it is no part of the program.
        del unused
        return before + x

    program = for_any_rows(function, 2)
    assert program is not None
    x, y = torch.ones(4, 2), torch.ones(4, 2)
    assert torch.equal(program(4, [x])[0], function(y))
    assert torch.equal(x, y) and x[0].tolist() == [2.0, 1.0]
    assert "exp" not in program._run.__self__.code


@pytest.mark.parametrize("function", [lambda x: x.narrow(0, 0, len(x) - 1), lambda x: x * (1.0 / len(x))])
def test_what_is_not_proportional_to_the_rows_is_for_one_number_of_rows(function: Any) -> None:
    assert for_any_rows(function, 4) is None
    program = RowProgram(Recording.of(function, [torch.rand(3, 4)], 3))
    x = torch.rand(3, 4)
    assert program.rows == 3 and torch.equal(program(3, [x])[0], function(x))


@pytest.mark.parametrize("function", [lambda x: x * x.sum().item(), lambda x: x[x > 0.5], lambda x: x.nonzero()])
def test_what_depends_on_the_numbers_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="depends on the numbers in a tensor"):
        Recording.of(function, [torch.rand(2, 3)], 2)


def test_numbers_of_constants_are_known() -> None:
    program = for_any_rows(lambda x: x * torch.tensor([4.0]).sqrt().item(), 2)
    assert program is not None
    assert program(1, [torch.ones(1, 2)])[0].tolist() == [[2.0, 2.0]]


# -- programs of packs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Classifier, Convolutions, Streamed, Tied])
def test_packs_of_all_sizes_share_their_programs(cls: type[FusedTrainable], recorded: list[Any]) -> None:
    each = [{"seed": seed} for seed in range(6)]
    assert why_not_fused(cls, each[0], each[1]) is None
    pack = FusedPack.of(cls, each[:2])
    pack.step()
    before = list(recorded)
    assert {rows for _, rows in before} == {None}
    pack.join(FusedPack.of(cls, each[2:]).leave(range(4)))
    pack.step()
    pack.leave([1, 2, 5])
    pack.step()
    pack.leave([0, 1])
    pack.step()
    FusedPack.of(cls, each[:5]).step()
    assert recorded == before


def test_parameters_of_two_types_may_alternate(recorded: list[Any]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(36, 5), nn.Linear(5, 5).double(), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x.flatten(1).float()).double()).float()).double()

    class Alternating(Light):
        def build(self, config: dict[str, Any]) -> nn.Module:
            return Both()

    config = {"seed": 3}
    (fused, _), alone = FusedPack.of(Alternating, [config, {"seed": 4}]).step(), made(Alternating, config).step()
    assert fused == pytest.approx(alone, rel=1e-5) and {rows for _, rows in recorded} == {None}


def test_other_models_have_other_programs(recorded: list[Any]) -> None:
    class Factor(Light):
        def build(self, config: dict[str, Any]) -> nn.Module:
            model = super().build(config)
            model.factor = config["factor"]
            return model

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * model.factor

    each = [{"p": 0.1, "optimizer": {"lr": 0.0}, "factor": factor} for factor in (1.0, 2.0)]
    losses = [FusedPack.of(Factor, [config]).step()[0]["loss"] for config in each]
    assert losses[1] == pytest.approx(2 * losses[0]) and len(recorded) == 2


@pytest.mark.slow
def test_a_pack_that_is_dropped_frees_its_tensors_and_its_class(recorded: list[Any]) -> None:
    class Own(Light):
        def data(self, config: dict[str, Any], seed: int) -> TensorData:
            x, y = images(20)
            return TensorData([x.double(), y], batch_size=10, seed=seed)

    pack = FusedPack.of(Own, [{"p": 0.1}, {"p": 0.2, "seed": 1}])
    pack.step()
    (matrix,) = pack._model.matrices.values()
    ends = [weakref.ref(matrix), weakref.ref(pack.trials[0]._fused.data.train[0]), weakref.ref(pack)]
    del pack, matrix
    gc.collect()
    assert [end() for end in ends] == [None] * 3
    assert len(programs._shared_programs) == 1
    cls = weakref.ref(Own)
    del Own
    gc.collect()
    assert cls() is None and len(programs._shared_programs) == 0


def test_there_is_an_upper_limit(recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST_SHARED", 2)
    for samples in (4, 5, 6, 6, 4):

        class Sized(TensorData):
            def train_batches(self, epoch: int, start: int, samples: int = samples) -> Any:
                return ((x[:samples], y[:samples]) for x, y in super().train_batches(epoch, start))

        pack = FusedPack.of(Light, [{"p": 0.1}])
        pack.trials[0]._fused.data.__class__ = Sized
        pack.step()
    assert len(recorded) == 4 and len(programs._shared_programs[Light]) == 2
