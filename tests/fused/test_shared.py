"""Parameters that are not trained: one tensor for all rows of a pack if they are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import Classifier, difference, made, values  # noqa: E402
from torch import nn  # noqa: E402

from fluid.fused import FusedPack  # noqa: E402


class Frozen(Classifier):
    """The first layer is not trained; it follows from ``features``, and is the same in all trials by default."""

    class Net(nn.Module):
        def __init__(self, features: int) -> None:
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(36, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)
            with torch.no_grad():
                self.first.weight.copy_(torch.randn(7, 36, generator=torch.Generator().manual_seed(features)) / 6)
                self.first.bias.zero_()
            self.first.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.norm(self.first(x.flatten(1)))))

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(config.get("features", 0)).double()


def of_seeds(*seeds: int, **further: Any) -> list[dict[str, Any]]:
    return [{"seed": seed, "optimizer": {"lr": 0.1, "momentum": 0.9}} | further for seed in seeds]


def pointers(pack: FusedPack, name: str) -> set[int]:
    return {trial.model.get_parameter(name).data_ptr() for trial in pack.trials}


def test_equal_parameters_that_are_not_trained_are_one_tensor() -> None:
    each = of_seeds(0, 1, 2)
    pack, alone = FusedPack.of(Frozen, each), [made(Frozen, config) for config in each]
    assert set(pack._model.shared) == {"first.weight", "first.bias"}
    assert len(pointers(pack, "first.weight")) == 1 and len(pointers(pack, "out.weight")) == 3
    for _ in range(3):
        expected = [pytest.approx(trial.step(), rel=1e-9) for trial in alone]
        assert pack.step() == expected
    assert all(difference(ours, theirs) < 1e-9 for ours, theirs in zip(alone, pack.trials, strict=True))


def test_a_trial_with_other_values_may_join_and_leave() -> None:
    each = of_seeds(0, 1)
    other = of_seeds(5, features=1)[0]
    pack, alone = FusedPack.of(Frozen, each), [made(Frozen, config) for config in (*each, other)]
    pack.step()
    for trial in alone[:2]:
        trial.step()
    pack.join([made(Frozen, other)])
    assert set(pack._model.shared) == {"first.bias"} and len(pointers(pack, "first.weight")) == 3
    for _ in range(2):
        assert pack.step() == [pytest.approx(trial.step(), rel=1e-9) for trial in alone]
    (left,) = pack.leave([0])
    pack.join([made(Frozen, of_seeds(7)[0])])
    assert left.step() == pytest.approx(alone[0].step(), rel=1e-9)
    assert pack.step()[:2] == [pytest.approx(trial.step(), rel=1e-9) for trial in alone[1:]]
    assert all(difference(*pair) < 1e-9 for pair in zip(alone, (left, *pack.trials), strict=False))


def test_an_empty_pack_shares_what_its_next_trials_have() -> None:
    pack = FusedPack.of(Frozen, of_seeds(0, 1))
    pack.leave([0, 1])
    pack.join([made(Frozen, config) for config in of_seeds(2, 3, features=4)])
    assert set(pack._model.shared) == {"first.weight", "first.bias"}
    expected = [made(Frozen, config).step() for config in of_seeds(2, 3, features=4)]
    assert pack.step() == [pytest.approx(result, rel=1e-9) for result in expected]


def test_a_checkpoint_loaded_into_a_trial_that_left_changes_no_other(tmp_path: Path) -> None:
    donor = made(Frozen, of_seeds(9, features=3)[0])
    donor.save_checkpoint(str(tmp_path))
    pack = FusedPack.of(Frozen, of_seeds(0, 1, 2))
    (left,) = pack.leave([0])
    before = [values(trial) for trial in pack.trials]
    left.load_checkpoint(str(tmp_path))
    assert torch.equal(left.model.first.weight, donor.model.first.weight)
    for was, trial in zip(before, pack.trials, strict=True):
        now = values(trial)
        assert all(torch.equal(was[name], now[name]) for name in was)


def test_memory_does_not_grow_with_the_rows() -> None:
    pack = FusedPack.of(Frozen, of_seeds(*range(8)))
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in pack._model.tensors()}
    of_first = sum(parameter.numel() * 8 for parameter in pack.trials[0].model.first.parameters())
    own = 8 * sum(parameter.numel() for parameter in pack.trials[0].model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in pack.trials[0].model.buffers())
    assert sum(held.values()) == 8 * (own + buffers)
    assert of_first > own
