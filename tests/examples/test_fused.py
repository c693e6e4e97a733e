"""The examples' networks in packs: those that can be fused equal themselves alone, the language model says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytest.importorskip("sklearn")
import torch
from models import gan
from models.tables import TABLES, Tabular
from models.trial import ENDED
from sweep_configs import WORKLOADS, config

from fluid.fused import FusedPack, FusedTrainable, fusion_key, why_not_fused

#: Ray raises warnings of its own.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

NAMES = ("cifar10", "dcgan", "digits", "breast_cancer", "wine")
#: By network, two trials of one shape, and what changes the shape.
ROWS: dict[str, list[dict[str, Any]]] = {
    "cifar10": [
        {"lr": 0.05, "momentum": 0.5, "dropout_1": 0.01, "dropout_2": 0.2, "seed": 1},
        {"lr": 0.01, "momentum": 0.9, "dropout_1": 0.1, "dropout_2": 0.05, "seed": 2},
        {"conv_2": 256},
    ],
    "dcgan": [
        {"netG_lr": 1e-4, "netD_lr": 5e-4, "seed": 1},
        {"netG_lr": 5e-4, "netD_lr": 1e-4, "seed": 2},
        {"fixed": {"shrink": 16}},
    ],
    "tables": [
        {"lr": 0.05, "weight_decay": 1e-2, "dropout": 0.5, "seed": 1},
        {"lr": 0.002, "weight_decay": 1e-6, "dropout": 0.0, "seed": 2},
        {"width": 64},
    ],
}


def trials(name: str, data: str, **changes: Any) -> tuple[type[FusedTrainable], list[dict[str, Any]]]:
    """The class, two configs that can be fused, and one that cannot."""
    if name in TABLES:
        base = {"data": name, "width": 32, "optimizer": "sgd", "lr": 0.01, "weight_decay": 0.0, "dropout": 0.1}
        return Tabular, [base | row | changes for row in ROWS["tables"]]
    each = [config(WORKLOADS[name], data, **row) for row in ROWS[name]]
    for one, row in zip(each, ROWS[name], strict=True):
        one["fixed"] = config(WORKLOADS[name], data)["fixed"] | row.get("fixed", {})
    return WORKLOADS[name].trainable, each


@pytest.mark.parametrize("name", NAMES)
def test_they_can_be_fused(name: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, (one, two, other) = trials(name, data)
    if name == "cifar10":  # In single precision, rounding decides which of equal values max pooling takes.
        in_double(cls, data, monkeypatch)
    assert why_not_fused(cls, one, two) is None
    key = fusion_key(cls, one)
    assert key == fusion_key(cls, two)
    assert key != fusion_key(cls, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_equals_its_trial_alone(name: str, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, configs = trials(name, data)
    in_double(cls, data, monkeypatch)
    pack, alone = FusedPack.of(cls, configs[:2]), []
    for each in configs[:2]:
        alone.append(cls())
        alone[-1].setup(each)
    for _ in range(2):
        for fused, trial in zip(pack.step(), alone, strict=True):
            expected = trial.step()
            for metrics in (fused, expected):
                metrics.pop(ENDED, None)
            assert fused == pytest.approx(expected, rel=1e-6)
    for row, trial in zip(pack.trials, alone, strict=True):
        ours, theirs = row.model.state_dict(), trial.model.state_dict()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=1e-6, atol=1e-9)


def in_double(cls: type[FusedTrainable], data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets trials compute in double precision, in which differences of rounding stay small over many steps."""

    def double(batch: Any) -> Any:
        return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)

    exact = copy.deepcopy(gan.load_classifier(gan.train_classifier(data), "cpu")).double()
    build, loss, evaluate = cls.build, cls.loss, cls.evaluate
    monkeypatch.setattr(cls, "build", lambda self, config: build(self, config).double())
    monkeypatch.setattr(cls, "loss", lambda self, model, batch: loss(self, model, double(batch)))
    monkeypatch.setattr(cls, "evaluate", lambda self, model, batch: evaluate(self, model, double(batch)))
    monkeypatch.setattr(gan, "load_classifier", lambda path, device: exact)
