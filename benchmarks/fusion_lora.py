"""Measures packs of LoRA trials on one frozen transformer against the same trials one by one, in one process and run.

    python benchmarks/fusion_lora.py [--rows 1,4,16,64] [--runs 5] [--widths 32,128] [--cuda] [--json FILE]

A trial classifies scikit-learn's digits, 8 tokens of 8 numbers each, with adapters of ranks 5 to 8 beside queries and
values of a transformer of two blocks, and a head of its own. An iteration is 10 batches of 32, each trial in its own
order, with AdamW and a learning rate of its own. The base has random values: how fast it is does not depend on them. On
CPUs one thread computes, as in a lane. One by one, up to 4 trials train an iteration each after a first one, as
LoraTrainables and as loops of PyTorch that are written by hand, with adapters that are not padded; the time is that
for one of them. In turns with that, packs do the same. All figures are medians.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from pathlib import Path
from typing import Any

import torch
from fusion import ALONE, digits, seconds_of
from measuring import machine, write_json
from torch import nn

from fluid.fused import AdamW, FusedPack, LoraSpec, LoraTrainable, TensorData

_BATCHES = 10


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        parts = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key, value = parts
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Encoder(nn.Module):
    """Two blocks over the 8 rows of an image, and the classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(images.unflatten(-1, (8, 8)))).mean(1))


class Adapters(LoraTrainable):
    """Adapters of an :class:`Encoder`."""

    base_fields = ("width",)
    iteration_batches = _BATCHES

    def base(self, config: dict[str, Any]) -> nn.Module:
        return Encoder(config["width"])

    def lora(self, config: dict[str, Any]) -> LoraSpec:
        return LoraSpec(
            rank=config["rank"],
            alpha=config["alpha"],
            target_modules=["query", "value"],
            modules_to_save=["head"],
            pad_to=config.get("pad_to"),
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def optimizer(self, config: dict[str, Any]) -> AdamW:
        return AdamW(lr=config["lr"])

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        return TensorData(digits(), batch_size=32, seed=seed, drop_last=True)


class Plain:
    """The same training as a loop of PyTorch written by hand."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.trial = made(config | {"pad_to": config["rank"]})
        self.model = self.trial.model
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=config["lr"])
        device = next(self.model.parameters()).device
        self.images, self.labels = (tensor.to(device) for tensor in digits())

    def step(self) -> float:
        total = torch.zeros((), device=self.images.device)
        order = torch.randperm(len(self.images), device=self.images.device)[: 32 * _BATCHES]
        for picked in order.split(32):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.images[picked]), self.labels[picked])
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        return total.item() / _BATCHES


def made(config: dict[str, Any]) -> Adapters:
    trial = Adapters()
    trial.setup(config)
    return trial


def configs(width: int, trials: int) -> list[dict[str, Any]]:
    return [
        {"width": width, "rank": 5 + number % 4, "alpha": 8 + number, "lr": 0.001 * 1.03**number, "seed": number}
        for number in range(trials)
    ]


def measure(width: int, rows: int, runs: int) -> dict[str, float]:
    """Measures a pack of so many rows and trials one by one, in turns."""
    pack = FusedPack.of(Adapters, configs(width, rows))
    some = configs(width, min(ALONE, rows))
    alone, plain = [made(config) for config in some], [Plain(config) for config in some]
    for each in (*alone, *plain, pack):
        each.step()
    fused, single, loop = [], [], []
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
    }


def main() -> None:
    """Measures all widths with all numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--widths", default="32,128")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cuda", action="store_true", help="on the GPU, and an error without one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cuda is not torch.cuda.is_available():
        parser.error("give --cuda where PyTorch sees a GPU, and only there; CUDA_VISIBLE_DEVICES= hides it")
    if not options.cuda:
        torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if options.cuda else "one CPU thread"
    facts = {**machine(), "device": device, "torch": torch.__version__}
    figures: dict[str, dict[str, Any]] = {}
    told = {"machine": facts, "date": str(datetime.date.today()), "runs": options.runs, "models": figures}
    for width in map(int, options.widths.split(",")):
        for rows in map(int, options.rows.split(",")):
            found = figures.setdefault(f"LoRA, width {width}", {})[str(rows)] = measure(width, rows, options.runs)
            write_json(options.json, told)
            print(
                f"LoRA, width {width:4}, k = {rows:3}: alone {found['alone_iterations_per_s']:6.1f}, by hand "
                f"{found['plain_iterations_per_s']:6.1f}, fused {found['fused_iterations_per_s']:6.1f} iterations/s: "
                f"{found['ratio']:5.2f}x, {found['ratio_to_plain']:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
