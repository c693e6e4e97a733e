"""What `restore` brings back after an iteration that failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import Convolutions, images, made, values  # noqa: E402
from torch import nn  # noqa: E402

from fluid.errors import FluidError  # noqa: E402
from fluid.fused import FusedPack, TensorData  # noqa: E402

KINDS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.05, "schedule": lambda step: 0.9**step}, {"lr": 0.1}],
    "adamw": [{"lr": 0.01}, {"lr": 0.003, "schedule": lambda step: 0.9**step}, {"lr": 0.02, "clip_norm": 0.2}],
}


class Failing(TensorData):
    """Fails for the trial with seed 1 when told to: in its batches of training, or only after them."""

    fails_at: str | None = None

    def train_batches(self, epoch: int, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        for number, batch in enumerate(super().train_batches(epoch, start)):
            if self.seed == 1 and self.fails_at == "training" and number == 2:
                raise OSError("no such sample")
            yield batch

    def evaluation_batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        if self.seed == 1 and self.fails_at == "evaluation":
            raise OSError("no such sample")
        yield from super().evaluation_batches()


class OnFailing(Convolutions):
    """Trains on :class:`Failing`."""

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images()
        return Failing([x.double(), y], [x.double(), y], batch_size=16, seed=seed)


def configs(kind: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "optimizer": optimizer, "seed": seed} for seed, optimizer in enumerate(KINDS[kind])]


def state(trial: Any) -> dict[str, Any]:
    """All that a trial's later iterations, or its checkpoint, depend on."""
    progress = (trial.iteration, trial._fused.steps, trial._fused.position)
    groups = [group["lr"] for group in trial.torch_optimizer.param_groups]
    return {**values(trial), "progress": progress, "rates": groups}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


@pytest.mark.parametrize("fails_at", ["training", "evaluation"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_restore_undoes_an_iteration_that_failed(
    kind: str, before: int, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, undisturbed = FusedPack.of(OnFailing, configs(kind)), FusedPack.of(OnFailing, configs(kind))
    for _ in range(before):
        pack.step()
        undisturbed.step()
    pack.remember()
    expected = [state(trial) for trial in pack.trials]
    for _ in range(2):
        monkeypatch.setattr(Failing, "fails_at", fails_at)
        with pytest.raises(OSError, match="no such sample"):
            pack.step()
        monkeypatch.setattr(Failing, "fails_at", None)
        pack.restore()
        for trial, was in zip(pack.trials, expected, strict=True):
            assert_same(state(trial), was)
    for _ in range(2):
        assert pack.step() == undisturbed.step()
    for trial, other in zip(pack.trials, undisturbed.trials, strict=True):
        assert_same(state(trial), state(other))


def test_restore_undoes_whole_iterations_and_uses_its_memory_again() -> None:
    pack = FusedPack.of(Convolutions, configs("adamw"))
    pack.remember()
    copies = [copy.data_ptr() for copy in pack._snapshot._copies]
    pack.step()
    pack.remember()
    assert copies == [copy.data_ptr() for copy in pack._snapshot._copies]
    first = pack.step()
    pack.step()
    pack.restore()
    assert pack.step() == first


def test_a_trial_that_leaves_after_restore_goes_on_alone() -> None:
    pack, alone = FusedPack.of(Convolutions, configs("sgd")), made(Convolutions, configs("sgd")[0])
    pack.remember()
    pack.step()
    pack.restore()
    (left,) = pack.leave([0])
    assert left.step() == alone.step()
    assert_same(state(left), state(alone))


def test_there_is_nothing_to_restore_for_other_rows() -> None:
    pack = FusedPack.of(Convolutions, configs("sgd"))
    with pytest.raises(FluidError, match=r"needs a remember"):
        pack.restore()
    pack.remember()
    pack.leave([1])
    with pytest.raises(FluidError, match=r"needs a remember"):
        pack.restore()


def test_buffers_that_the_model_writes_to_come_back() -> None:
    pack = FusedPack.of(Convolutions, configs("sgd"))
    pack.remember()
    norms = [module for trial in pack.trials for module in trial.model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    pack.step()
    assert not any(torch.equal(norm.running_mean, was) for norm, was in zip(norms, before, strict=True))
    pack.restore()
    assert all(torch.equal(norm.running_mean, was) for norm, was in zip(norms, before, strict=True))
    assert [int(norm.num_batches_tracked) for norm in norms] == [0, 0, 0]
