"""Learning rates of submodules, batch normalization over all devices, and metrics that follow from means."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402
from fused.trainables import Classifier, Convolutions, difference, made, values  # noqa: E402
from torch import nn  # noqa: E402

from fluid.errors import InvalidFieldError  # noqa: E402
from fluid.fused import SGD, Adam, AdamW, FusedPack, FusedTrainable, fusion_key, why_not_fused  # noqa: E402
from fluid.fused.optimizers import OptimizerSpec  # noqa: E402


class Parts(Classifier):
    """Two named parts; the one that is made first has the last rate."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(36, 6), "head": nn.Linear(6, 5)}).double()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model["head"](torch.tanh(model["body"](x.flatten(1)))), y)

    evaluate = FusedTrainable.evaluate


def halving(step: int) -> float:
    return 0.5 ** (step // 3)


OPTIMIZERS = {
    "sgd": [
        {"lr": {"head": 0.2, "": 0.01}, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": {"head": 0.05, "": 0.1}, "schedule": halving},
    ],
    "adam": [{"lr": {"head": 0.02, "body": 0.001}}, {"lr": {"head": 0.001, "body": 0.01}, "weight_decay": 0.1}],
    "adamw": [
        {"lr": {"head.weight": 0.02, "body": 0.001, "head": 0.1}, "weight_decay": 0.5},
        {"lr": {"head.weight": 0.01, "body": 0.03, "head": 0.2}, "schedule": halving},
    ],
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rates_of_submodules_are_the_same_in_a_pack(kind: str) -> None:
    configs = [{"kind": kind, "optimizer": optimizer, "seed": row} for row, optimizer in enumerate(OPTIMIZERS[kind])]
    pack, alone = FusedPack.of(Parts, configs), [made(Parts, config) for config in configs]
    for _ in range(4):
        fused, single = pack.step(), [trial.step() for trial in alone]
        assert fused == [pytest.approx(metrics, rel=1e-9) for metrics in single]
    for row, trial in zip(pack.trials, alone, strict=True):
        assert difference(trial, row) < 1e-9
        assert row.torch_optimizer.state_dict()["param_groups"] == trial.torch_optimizer.state_dict()["param_groups"]
    assert why_not_fused(Parts, *configs) is None


def test_a_rate_of_zero_keeps_a_submodule_as_it_is() -> None:
    pack = FusedPack.of(Parts, [{"optimizer": {"lr": {"body": 0.0, "head": rate}}} for rate in (0.1, 0.2)])
    before = [values(trial) for trial in pack.trials]
    pack.step()
    for old, trial in zip(before, pack.trials, strict=True):
        changed = {name for name, tensor in values(trial).items() if not torch.equal(tensor, old[name])}
        assert changed == {"head.weight", "head.bias"}


def test_a_parameter_has_the_rate_of_the_longest_name() -> None:
    spec = Adam(lr={"a": 1.0, "a.b": 2.0, "": 3.0})
    assert [spec.group_of(name) for name in ("a.weight", "a.b.weight", "a.bc", "ab.weight", "a.b")] == [0, 1, 0, 2, 1]


def test_a_restored_trial_keeps_its_own_rates(tmp_path: Any) -> None:
    donor, heir = (made(Parts, {"optimizer": {"lr": {"head": rate, "body": 2 * rate}}}) for rate in (0.1, 0.2))
    donor.step()
    donor.save_checkpoint(str(tmp_path))
    heir.load_checkpoint(str(tmp_path))
    assert [group["lr"] for group in heir.torch_optimizer.param_groups] == [0.2, 0.4]


@pytest.mark.parametrize("rates", [{}, {"head": -1.0}, {"head": "fast"}])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_rates_that_cannot_be_used_are_refused(kind: type[OptimizerSpec], rates: Any) -> None:
    with pytest.raises(InvalidFieldError, match="lr"):
        kind(lr=rates)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"head": 0.1}, "no rate for the parameter 'body.weight'"),
        ({"": 0.1, "tail": 0.1}, "no parameters to train in 'tail'"),
    ],
)
def test_rates_must_fit_the_model(rates: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidFieldError, match=said):
        made(Parts, {"optimizer": {"lr": rates}})


def test_trials_with_rates_of_other_submodules_are_not_fused() -> None:
    keys = [fusion_key(Parts, {"optimizer": {"lr": lr}}) for lr in ({"head": 0.1, "body": 0.2}, {"": 0.1}, 0.3)]
    assert keys[1] == keys[2]
    assert keys[0].difference(keys[1]) == (
        "the trials differ in their optimizer: learning rates of head, body; learning rates of the model"
    )


# -- metrics that follow from means ---------------------------------------------------------------------------------


class Perplexed(Classifier):
    """Reports what follows from the mean over all samples, which is not a mean over batches."""

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "perplexity": math.exp(means["val_loss"])}


def test_metrics_that_follow_from_means() -> None:
    (fused,), alone = FusedPack.of(Perplexed, [{}]).step(), made(Perplexed, {}).step()
    assert fused == pytest.approx(alone, rel=1e-9)
    assert alone["perplexity"] == math.exp(alone["val_loss"])


# -- batch normalization over all devices ---------------------------------------------------------------------------


class Synchronous(Convolutions):
    """Its batch normalization is over the global batch, at any width."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.sync_batch_norm(super().build({"p": 0.0, "q": 0.0}))


def test_batch_normalization_over_all_devices_can_be_fused() -> None:
    configs = [{"seed": seed} for seed in range(3)]
    assert why_not_fused(Synchronous, *configs[:2]) is None
    pack, alone = FusedPack.of(Synchronous, configs), [made(Synchronous, config) for config in configs]
    for _ in range(3):
        fused, single = pack.step(), [trial.step() for trial in alone]
        assert fused == [pytest.approx(metrics, rel=1e-9) for metrics in single]


def test_on_two_devices_it_trains_as_on_one() -> None:
    groups = make_groups(2)
    ranks = [made(Synchronous, {}) for _ in groups]
    for trial, group in zip(ranks, groups, strict=True):
        trial._elastic.group = group
    both, alone = together(ranks, lambda trial: trial.step()), made(Synchronous, {}).step()
    assert both[0] == both[1] == pytest.approx(alone, rel=1e-9)
    for trial in ranks:
        trial.cleanup()
