"""Studies of small networks on made-up data, as Optuna's examples have them for PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

optuna = pytest.importorskip("optuna")
torch = pytest.importorskip("torch", reason="needs PyTorch: make examples")

from same_study import assert_same  # noqa: E402
from torch import nn  # noqa: E402


def data() -> tuple[Any, Any]:
    """Points of three classes."""
    torch.set_num_threads(1)  # Sums in another order differ in their last digits.
    torch.manual_seed(0)
    points = torch.randn(96, 8)
    return points, points[:, :3].argmax(dim=1)


def network_of(trial: Any) -> Any:
    layers: list[Any] = []
    width = 8
    for layer in range(trial.suggest_int("layers", 1, 3)):
        units = trial.suggest_int(f"units_{layer}", 4, 32)
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(trial.suggest_float(f"dropout_{layer}", 0.0, 0.5))]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, 3))


def optimizer_of(trial: Any, model: Any) -> Any:
    kind = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    return getattr(torch.optim, kind)(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))


def train_epoch(model: Any, optimizer: Any, points: Any, classes: Any) -> float:
    """Returns the share of the held-out points that are classified rightly."""
    model.train()
    for begin in range(0, 64, 16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points[begin : begin + 16]), classes[begin : begin + 16]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(points[64:]).argmax(dim=1) == classes[64:]).float().mean())


def maximizing() -> Any:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=5), pruner=pruner)


def test_a_network_that_is_pruned() -> None:
    def objective(trial: Any) -> float:
        points, classes = data()
        model = network_of(trial)
        optimizer = optimizer_of(trial, model)
        accuracy = 0.0
        for epoch in range(5):
            accuracy = train_epoch(model, optimizer, points, classes)
            trial.report(accuracy, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return accuracy

    assert "PRUNED" in {trial.state.name for trial in assert_same(maximizing, objective, 12).trials}


def test_accuracy_and_size() -> None:
    def objective(trial: Any) -> tuple[int, float]:
        points, classes = data()
        model = network_of(trial)
        optimizer = optimizer_of(trial, model)
        for _ in range(2):
            train_epoch(model, optimizer, points, classes)
        return sum(weight.numel() for weight in model.parameters()), train_epoch(model, optimizer, points, classes)

    def make() -> Any:
        sampler = optuna.samplers.NSGAIISampler(seed=5, population_size=4)
        return optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)

    assert_same(make, objective, 10)


def test_checkpoints_of_the_objectives_own(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        points, classes = data()
        model = network_of(trial)
        optimizer = optimizer_of(trial, model)
        path = tmp_path / f"{trial.number}.pt"
        accuracy = 0.0
        for epoch in range(3):
            accuracy = train_epoch(model, optimizer, points, classes)
            torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            trial.report(accuracy, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        assert torch.load(path)["epoch"] == 2
        return accuracy

    assert_same(maximizing, objective, 6)
