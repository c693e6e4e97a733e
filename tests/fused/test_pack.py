"""A trial in a pack against the same trial alone."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from fused.trainables import (  # noqa: E402
    Classifier,
    Convolutions,
    Light,
    OwnTensors,
    Single,
    SingleConvolutions,
    Steps,
    Streamed,
    Tied,
    difference,
    images,
    made,
    values,
)
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fluid.errors import FluidError, InvalidFieldError  # noqa: E402
from fluid.fused import FusedPack, FusedTrainable, FusionError, TensorData  # noqa: E402


def halving(step: int) -> float:
    return 0.5 ** (step // 3)


#: Rows that differ in every value that may differ, by kind of optimizer.
ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "sgd": ("sgd", [{"lr": 0.1}, {"lr": 0.02}]),
    "sgd with all": (
        "sgd",
        [
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "clip_norm": 0.3},
            {"lr": 0.05},
            {"lr": 0.05, "momentum": 0.5, "schedule": halving},
            {"lr": 0.2, "dampening": 0.4, "clip_norm": 100.0},
        ],
    ),
    "nesterov": (
        "sgd",
        [
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"lr": 0.03, "momentum": 0.5, "nesterov": True, "clip_norm": 0.1},
        ],
    ),
    "adam": (
        "adam",
        [
            {"lr": 0.01},
            {"lr": 0.003, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.1},
            {"lr": 0.02, "clip_norm": 0.2, "schedule": halving},
        ],
    ),
    "adamw": (
        "adamw",
        [
            {"lr": 0.01},
            {"lr": 0.003, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.5, "schedule": halving},
            {"lr": 0.02, "clip_norm": 0.2, "weight_decay": 0.0},
        ],
    ),
}


def configs(rows: str, **further: Any) -> list[dict[str, Any]]:
    kind, each = ROWS[rows]
    return [
        {"kind": kind, "optimizer": optimizer, "seed": number, "p": 0.1 + 0.2 * number, "q": 0.5 * (number % 2)}
        | further
        for number, optimizer in enumerate(each)
    ]


def assert_equal(
    cls: type[FusedTrainable], each: list[dict[str, Any]], iterations: int = 3, within: float = 1e-9
) -> None:
    """Trains trials both ways, at least 10 steps, and compares their results, parameters, buffers and states."""
    pack, alone = FusedPack.of(cls, each), [made(cls, config) for config in each]
    for _ in range(iterations):
        fused, single = pack.step(), [trial.step() for trial in alone]
        for ours, theirs in zip(fused, single, strict=True):
            assert ours == pytest.approx(theirs, rel=within)
    for trial, row in zip(alone, pack.trials, strict=True):
        assert trial._fused.steps == row._fused.steps >= 9 and trial.iteration == row.iteration
        assert difference(trial, row) < within
        assert trial.torch_optimizer.state_dict()["param_groups"] == row.torch_optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cls", [Classifier, Convolutions])
def test_every_row_equals_its_trial_alone(cls: type[FusedTrainable], rows: str) -> None:
    assert_equal(cls, configs(rows), within=1e-9 if ROWS[rows][0] == "sgd" else 1e-6)


@pytest.mark.parametrize("cls", [Single, SingleConvolutions])
@pytest.mark.parametrize("rows", ["sgd", "nesterov"])
def test_in_single_precision_too(cls: type[FusedTrainable], rows: str) -> None:
    assert_equal(cls, configs(rows), within=1e-5)


@pytest.mark.parametrize("cls", [Steps, Streamed, OwnTensors, Tied])
def test_other_data_iterations_and_models(cls: type[FusedTrainable]) -> None:
    within = 1e-5 if cls is Tied else 1e-9  # It has parameters in float32.
    assert_equal(cls, configs("sgd with all"), 4, within)


def test_batches_of_a_class_derived_from_tensor_data_are_its_own() -> None:
    class Shifted(TensorData):
        def train_batches(self, epoch: int, start: int) -> Any:
            return ((x + 1.0, y) for x, y in super(type(self), self).train_batches(epoch, start))

    class Augmented(Classifier):
        def data(self, config: dict[str, Any], seed: int) -> TensorData:
            x, y = images()
            return Shifted([x.double(), y], [x.double(), y], batch_size=16, seed=seed)

    assert_equal(Augmented, configs("sgd"))


def test_a_buffer_holds_what_differs_in_the_loss() -> None:
    each = [{"weight": weight} for weight in (1.0, 3.0)]
    assert_equal(Tied, each, within=1e-5)
    light, heavy = (made(Tied, config).step()["loss"] for config in each)
    assert light != heavy


def test_dropout_differs_between_seeds_and_iterations_and_matters() -> None:
    one, other, none = ({"seed": 1, "p": 0.5}, {"seed": 2, "p": 0.5}, {"seed": 1, "p": 0.0, "q": 0.0})
    losses = [made(Convolutions, config).step()["loss"] for config in (one, other, none, one)]
    assert losses[0] == losses[3] and len(set(losses)) == 3


class OperationCount(TorchDispatchMode):
    """Counts PyTorch's operations."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_masks_take_as_many_operations_for_any_rows() -> None:
    class Plain(Light):
        def build(self, config: dict[str, Any]) -> Any:
            model = super().build(config)
            return model if config["dropout"] else model[:3].append(model[4])

    def operations(rows: int, dropout: bool) -> int:
        pack = FusedPack.of(Plain, [{"p": 0.1, "dropout": dropout, "lr": 0.1, "seed": seed} for seed in range(rows)])
        pack.step()
        with OperationCount() as count:
            pack.step()
        return count.calls

    added = [operations(rows, True) - operations(rows, False) for rows in (2, 40)]
    assert 0 < added[0] == added[1]


def test_rows_train_in_blocks_that_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.fused.pack._BLOCK_BYTES", 1)
    monkeypatch.setattr("fluid.fused.pack._LEAST_ROWS", 2)
    each = [config | {"seed": seed} for seed in range(5) for config in configs("sgd with all")[:1]]
    pack = FusedPack.of(Convolutions, each)
    assert [block.stop - block.start for block in pack._blocks] == [1, 2, 2]
    assert_equal(Convolutions, each)


# -- leaving and joining -----------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.data(), st.sampled_from(["sgd with all", "adam"]))
def test_trials_leave_and_join_at_any_time(data: st.DataObject, rows: str) -> None:
    each = configs(rows)
    number = 0

    def pair() -> tuple[Any, Any]:
        nonlocal number
        config = each[number % len(each)] | {"seed": number, "p": 0.3}
        number += 1
        return made(Light, config), made(Light, config)

    inside = [pair() for _ in range(data.draw(st.integers(1, 3)))]
    outside: list[tuple[Any, Any]] = []
    pack = FusedPack([fused for fused, _ in inside])
    for _ in range(data.draw(st.integers(2, 5))):
        for _ in range(data.draw(st.integers(0, 2))):
            pack.step()
            for _, alone in inside:
                alone.step()
        for fused, alone in outside:
            assert fused.step()["loss"] == pytest.approx(alone.step()["loss"], rel=1e-6)
        leaving = data.draw(st.lists(st.sampled_from(range(len(inside))), unique=True)) if inside else []
        assert pack.leave(leaving) == [inside[row][0] for row in leaving]
        outside += [inside[row] for row in leaving]
        inside = [both for row, both in enumerate(inside) if row not in leaving]
        joining = [outside.pop() for _ in range(data.draw(st.integers(0, len(outside))))]
        joining += [pair() for _ in range(data.draw(st.integers(0, 3 - min(3, len(inside) + len(joining)))))]
        pack.join(fused for fused, _ in joining)
        inside += joining
        assert pack.trials == tuple(fused for fused, _ in inside)
    for fused, alone in inside + outside:
        assert difference(alone, fused) < 1e-6


def test_a_trial_that_left_shares_no_memory_with_the_pack() -> None:
    pack = FusedPack.of(Classifier, configs("adam"))
    pack.step()
    (left,) = pack.leave([1])
    before = [values(trial) for trial in pack.trials]
    left.step()
    after = [values(trial) for trial in pack.trials]
    assert all(torch.equal(ours[name], now[name]) for ours, now in zip(before, after, strict=True) for name in ours)
    kept = values(left)
    pack.step()
    assert all(torch.equal(kept[name], tensor) for name, tensor in values(left).items())


def test_all_may_leave_and_others_join() -> None:
    pack = FusedPack.of(Classifier, configs("sgd"))
    trials = pack.leave([1, 0])
    assert len(pack) == 0 and pack.step() == []
    pack.join(trials)
    assert len(pack.step()) == 2


def test_wrong_rows_and_trials_are_refused() -> None:
    pack = FusedPack.of(Classifier, configs("sgd"))
    with pytest.raises(InvalidFieldError, match="rows=2"):
        pack.leave([0, 2])
    with pytest.raises(InvalidFieldError, match="twice"):
        pack.leave([0, 0])
    with pytest.raises(InvalidFieldError, match="in a pack already"):
        pack.join([pack.trials[0]])
    new = made(Classifier, {})
    with pytest.raises(InvalidFieldError, match="in a pack already"):
        pack.join([new, new])
    with pytest.raises(InvalidFieldError, match="set up"):
        FusedPack([Classifier()])
    with pytest.raises(InvalidFieldError, match="at least one"):
        FusedPack([])
    with pytest.raises(FusionError, match="differ in their optimizer: SGD; Adam"):
        pack.join([made(Classifier, {"kind": "adam"})])
    assert len(pack.step()) == 2


def test_a_trial_in_a_pack_neither_steps_nor_loads_by_itself(tmp_path: Path) -> None:
    pack = FusedPack.of(Classifier, configs("sgd"))
    pack.trials[0].save_checkpoint(str(tmp_path))
    with pytest.raises(FluidError, match="leave the pack"):
        pack.trials[0].step()
    with pytest.raises(FluidError, match="leave the pack"):
        pack.trials[0].load_checkpoint(str(tmp_path))


# -- checkpoints -------------------------------------------------------------------------------------------------


def load(folder: Path) -> Any:
    return torch.load(folder / "elastic.pt", weights_only=False)


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {name: leaf for key, part in state.items() for name, leaf in flat(part, f"{prefix}/{key}").items()}
    return {prefix: state}


@pytest.mark.parametrize("rows", ["sgd with all", "adamw"])
@pytest.mark.parametrize("iterations", [0, 2])
def test_a_row_writes_the_checkpoint_of_the_trial_alone(rows: str, iterations: int, tmp_path: Path) -> None:
    each = configs(rows)
    pack, alone = FusedPack.of(Convolutions, each), [made(Convolutions, config) for config in each]
    for _ in range(iterations):
        pack.step()
        for trial in alone:
            trial.step()
    for row, (fused, trial) in enumerate(zip(pack.trials, alone, strict=True)):
        folders = [tmp_path / f"{row}-{name}" for name in ("fused", "alone")]
        for folder, one in zip(folders, (fused, trial), strict=True):
            folder.mkdir()
            one.save_checkpoint(str(folder))
        ours, theirs = map(load, folders)
        assert ours["parts"]["model"]._metadata == theirs["parts"]["model"]._metadata
        found, expected = flat(ours), flat(theirs)
        assert list(found) == list(expected)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
                assert found[name].untyped_storage().nbytes() == value.untyped_storage().nbytes()
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)
            else:
                assert found[name] == value, name


@pytest.mark.parametrize("rows", ["sgd with all", "adam"])
def test_checkpoints_go_from_a_pack_to_trials_alone_and_back(rows: str, tmp_path: Path) -> None:
    each = configs(rows)
    undisturbed = [made(Steps, config) for config in each]
    pack = FusedPack.of(Steps, each)
    for turn in range(3):
        expected = [trial.step() for trial in undisturbed]
        assert [found == pytest.approx(wanted, rel=1e-6) for found, wanted in zip(pack.step(), expected, strict=True)]
        alone = []
        for row, trial in enumerate(pack.trials):
            folder = tmp_path / f"{turn}-{row}"
            folder.mkdir()
            trial.save_checkpoint(str(folder))
            alone.append(made(Steps, each[row]))
            alone[-1].load_checkpoint(str(folder))
        for trial, other in zip(undisturbed, alone, strict=True):
            assert other.step() == pytest.approx(trial.step(), rel=1e-6)
            assert difference(trial, other) < 1e-6
        pack = FusedPack(alone)


def test_momentum_begins_in_a_trial_restored_from_one_without(tmp_path: Path) -> None:
    donor = made(Classifier, {"optimizer": {"lr": 0.1}})
    donor.step()
    donor.save_checkpoint(str(tmp_path))
    config = {"optimizer": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}}
    alone, fused = (made(Classifier, config) for _ in range(2))
    for trial in (alone, fused):
        trial.load_checkpoint(str(tmp_path))
        assert trial.torch_optimizer.param_groups[0]["momentum"] == 0.9
    pack = FusedPack([fused, made(Classifier, config)])
    for _ in range(2):
        assert pack.step()[0] == pytest.approx(alone.step(), rel=1e-9)
    assert difference(alone, fused) < 1e-9


# -- isolation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["sgd with all", "adam"])
def test_a_row_that_is_not_finite_changes_no_other(rows: str) -> None:
    good = configs(rows)[0]
    bad = copy.deepcopy(good) | {"seed": 7}
    bad["optimizer"]["lr"] = 1e300
    pack = FusedPack.of(Convolutions, [good, bad, good | {"seed": 3}])
    alone = [made(Convolutions, good), made(Convolutions, good | {"seed": 3})]
    for _ in range(3):
        fused, single = pack.step(), [trial.step() for trial in alone]
        assert [fused[0], fused[2]] == [pytest.approx(result, rel=1e-6) for result in single]
    assert not np.isfinite(fused[1]["loss"])
    assert difference(alone[0], pack.trials[0]) < 1e-6


def test_the_global_generators_are_left_alone() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    pack = FusedPack.of(Convolutions, configs("sgd"))
    pack.step()
    pack.join([made(Convolutions, configs("sgd")[0])])
    pack.leave([0])[0].step()
    assert state() == before


def test_rows_share_equal_tensors() -> None:
    pack = FusedPack.of(Classifier, configs("sgd"))
    first, second = (trial._fused.data for trial in pack.trials)
    assert first.shares(second)
    own = FusedPack.of(OwnTensors, configs("sgd"))
    first, second = (trial._fused.data for trial in own.trials)
    assert not first.shares(second)
