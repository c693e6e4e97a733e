"""How far fused trials and the same alone drift apart over whole trainings: by rounding, which training amplifies."""

from __future__ import annotations

from typing import Any

import torch
from fusion_workload import OPTIMIZERS, TRAINED, Digits, configs, digits

from fluid.fused import FusedPack, FusedTrainable, TensorData

#: Epochs of 44 full batches.
EPOCHS = 30
#: Steps after which parameters are compared.
STEPS = (10, 100, 1000)
TRIALS = 8


class TenSteps(Digits):
    """Iterations of ten steps; the last batch of an epoch, which is smaller, is left out."""

    iteration_batches = 10

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        images, labels = digits()
        train, evaluation = (images[:TRAINED], labels[:TRAINED]), (images[TRAINED:], labels[TRAINED:])
        return TensorData(train, evaluation, batch_size=32, seed=seed, drop_last=True)


def difference(one: FusedTrainable, two: FusedTrainable) -> float:
    """Returns the norm of the difference of all parameters, relative to their norm."""
    ours, theirs = (
        torch.cat([value.detach().double().view(-1) for value in trial.model.parameters()]) for trial in (one, two)
    )
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


def equality(models: list[str]) -> dict[str, Any]:
    """Trains both ways with each optimizer; returns the largest difference of any trial by step, and in samples."""
    samples = len(digits()[0]) - TRAINED
    found: dict[str, Any] = {}
    for model in models:
        found[model] = {}
        for optimizer in OPTIMIZERS:
            each = configs(model, TRIALS, optimizer)
            pack, alone = FusedPack.of(TenSteps, each), [TenSteps() for _ in each]
            for trial, config in zip(alone, each, strict=True):
                trial.setup(config)
            drift: dict[int, float] = {}
            for iteration in range(1, EPOCHS * 44 // 10 + 1):
                fused, single = pack.step(), [trial.step() for trial in alone]
                if 10 * iteration in STEPS:
                    drift[10 * iteration] = max(map(difference, pack.trials, alone))
            other = [
                round(abs(ours["accuracy"] - theirs["accuracy"]) * samples)
                for ours, theirs in zip(fused, single, strict=True)
            ]
            found[model][optimizer] = {"relative_difference": drift, "samples": other}
            shown = ", ".join(f"{value:.1e} after {step}" for step, value in drift.items())
            print(f"{model}, {optimizer}: {shown} steps; of {samples} samples, other decisions: {other}", flush=True)
    return found
