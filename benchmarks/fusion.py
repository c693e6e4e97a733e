"""Measures fused trials against the same trials one by one, in iterations per second, in one process and one run.

    python benchmarks/fusion.py [--quick] [--rows 1,8,64] [--runs 5] [--cuda] [--json FILE]

An iteration is an epoch of scikit-learn's digits, 1,437 images in batches of 32, each trial in its own order, with
momentum and a learning rate of its own, and an evaluation on the other 360. On CPUs, one thread computes, as in a lane.
One by one, up to 4 trials train an iteration each after a first one, as FusedTrainables and as loops of PyTorch that
are written by hand, and the time is that for one of them. In turns with that, packs of k trials do the same. All
figures are medians, but for what it costs to trace a pack.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import machine
from torch import nn

from fluid.fused import SGD, FusedPack, FusedTrainable, TensorData

#: The most trials that train one by one in a run: their time is proportional to their number.
ALONE = 4


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


class Block(nn.Module):
    """A transformer block over the 8 rows of an image, and the classes."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.classes = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images.unflatten(-1, (8, 8))) + self.place
        parts = self.attend(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.second(x))
        return self.classes(x.mean(1))


def perceptron(*widths: int) -> nn.Module:
    sizes = (64, *widths)
    layers = [part for ends in itertools.pairwise(sizes) for part in (nn.Linear(*ends), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP, width 32": lambda: perceptron(32),
    "MLP, width 64": lambda: perceptron(64),
    "MLP, width 256": lambda: perceptron(256),
    "MLP, two layers of width 256": lambda: perceptron(256, 256),
    "CNN, 8 and 16 channels": convolutions,
    "transformer block, width 32": lambda: Block(32),
}


class Digits(FusedTrainable):
    """One of the models on the digits."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return MODELS[config["model"]]()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        images, labels = digits()
        train, evaluation = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])
        return TensorData(train, evaluation, batch_size=32, seed=seed)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(-1) == labels).float().mean()}


class Plain:
    """The same training as a loop of PyTorch written by hand."""

    def __init__(self, config: dict[str, Any]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = MODELS[config["model"]]().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"], momentum=0.9)
        self.images, self.labels = (tensor.to(device) for tensor in digits())

    def step(self) -> tuple[float, float]:
        images, labels, total = self.images, self.labels, torch.zeros((), device=self.images.device)
        for picked in torch.randperm(1437, device=images.device).split(32):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(images[picked]), labels[picked])
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(picked)
        with torch.no_grad():
            accuracy = (self.model(images[1437:]).argmax(-1) == labels[1437:]).float().mean()
        return total.item() / 1437, accuracy.item()


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns how long a call takes, with what it has queued on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def configs(model: str, trials: int) -> list[dict[str, Any]]:
    return [{"model": model, "lr": 0.01 * 1.03**number, "seed": number} for number in range(trials)]


def measure(model: str, rows: int, runs: int) -> dict[str, float]:
    """Measures a pack of so many rows and trials one by one, in turns."""
    pack = FusedPack.of(Digits, configs(model, rows))
    alone, plain = [], []
    for config in configs(model, min(ALONE, rows)):
        trial = Digits()
        trial.setup(config)
        alone.append(trial)
        plain.append(Plain(config))
    for each in (*alone, *plain):
        each.step()
    first = seconds_of(pack.step)
    fused: list[float] = []
    single: list[float] = []
    loop: list[float] = []
    for _ in range(runs):
        single += [seconds_of(trial.step) for trial in alone]
        loop += [seconds_of(trial.step) for trial in plain]
        fused.append(seconds_of(pack.step))
    alone_s, plain_s, fused_s = statistics.median(single), statistics.median(loop), statistics.median(fused) / rows
    return {
        "alone_iterations_per_s": 1.0 / alone_s,
        "plain_iterations_per_s": 1.0 / plain_s,
        "fused_iterations_per_s": 1.0 / fused_s,
        "ratio": alone_s / fused_s,
        "ratio_to_plain": plain_s / fused_s,
        "trace_s": max(0.0, first - statistics.median(fused)),
    }


def main() -> None:
    """Runs all models with all numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1, 8 and 64 rows, 3 runs")
    parser.add_argument("--rows", default="", help="numbers of rows, by default 1,2,4,...,64; to 256, say, on a GPU")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--models", default="", help="the beginnings of models' names, divided by semicolons")
    parser.add_argument("--cuda", action="store_true", help="on the GPU, and an error without one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cuda and not torch.cuda.is_available():
        parser.error("--cuda: PyTorch sees no GPU")
    if not options.cuda and torch.cuda.is_available():
        parser.error("PyTorch sees a GPU and would train on it: give --cuda, or set CUDA_VISIBLE_DEVICES= for the CPU")
    if not options.cuda:
        torch.set_num_threads(1)
    default = "1,8,64" if options.quick else "1,2,4,8,16,32,64"
    rows = [int(number) for number in (options.rows or default).split(",")]
    runs = options.runs or (3 if options.quick else 5)
    wanted = tuple(options.models.split(";"))
    figures: dict[str, dict[str, Any]] = {}
    for model in (name for name in MODELS if name.startswith(wanted)):
        figures[model] = {}
        for count in rows:
            found = figures[model][str(count)] = measure(model, count, runs)
            print(
                f"{model:30} k = {count:3}: alone {found['alone_iterations_per_s']:6.1f}, by hand "
                f"{found['plain_iterations_per_s']:6.1f}, fused {found['fused_iterations_per_s']:7.1f} iterations/s: "
                f"{found['ratio']:5.2f}x, {found['ratio_to_plain']:5.2f}x   "
                f"traced in {found['trace_s']:.2f} s"
            )
    if options.json:
        device = torch.cuda.get_device_name() if options.cuda else "one CPU thread"
        facts = {**machine(), "device": device, "torch": torch.__version__}
        told = {"machine": facts, "date": str(datetime.date.today()), "runs": runs, "models": figures}
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
