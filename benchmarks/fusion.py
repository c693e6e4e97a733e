"""Measures fused trials against the same trials one by one, in iterations per second, in one process and one run.

    python benchmarks/fusion.py [--quick] [--rows 1,8,64] [--runs 5] [--cuda] [--json FILE]
    python benchmarks/fusion.py --equality [--models MLP] [--cuda] [--json FILE]

An iteration is an epoch of scikit-learn's digits, 1,437 images in batches of 32, each trial in its own order, with
momentum and a learning rate of its own, and an evaluation on the other 360. On CPUs, one thread computes, as in a lane.
One by one, up to 4 trials train an iteration each after a first one, as FusedTrainables and as loops of PyTorch that
are written by hand, and the time is that for one of them. In turns with that, packs of k trials do the same. All
figures are medians, but for what it costs to trace a pack. ``--equality`` trains for 30 epochs both ways instead, with
each optimizer, and shows how the parameters and the accuracies differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fusion_equality import equality
from fusion_workload import MODELS, TRAINED, Digits, configs, digits
from measuring import machine, write_json
from torch import nn

from fluid.fused import FusedPack

#: The most trials that train one by one in a run: their time is proportional to their number.
ALONE = 4


class Plain:
    """The same training as a loop of PyTorch written by hand."""

    def __init__(self, config: dict[str, Any]) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = MODELS[config["model"]]().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01 * config["factor"], momentum=0.9)
        self.images, self.labels = (tensor.to(device) for tensor in digits())

    def train(self, picked: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images[picked]), self.labels[picked])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train_on(self, picked: torch.Tensor) -> torch.Tensor:
        return self.train(picked)

    def step(self) -> tuple[float, float]:
        images, labels, total = self.images, self.labels, torch.zeros((), device=self.images.device)
        for picked in torch.randperm(TRAINED, device=images.device).split(32):
            total += self.train_on(picked) * len(picked)
        with torch.no_grad():
            accuracy = (self.model(images[TRAINED:]).argmax(-1) == labels[TRAINED:]).float().mean()
        return total.item() / TRAINED, accuracy.item()


class Captured(Plain):
    """The same on a GPU with CUDA graphs: what a trial alone can gain. The last batch, a smaller one, runs as it is."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.picked = torch.arange(32, device=self.images.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.train(self.picked)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(self.graph):
            self.captured_loss = self.train(self.picked)

    def train_on(self, picked: torch.Tensor) -> torch.Tensor:
        if len(picked) < len(self.picked):
            return self.train(picked)
        self.picked.copy_(picked)
        self.graph.replay()
        return self.captured_loss


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns how long a call takes, with what it has queued on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(model: str, rows: int, runs: int) -> dict[str, float]:
    """Measures a pack of so many rows and trials one by one, in turns."""
    pack = FusedPack.of(Digits, configs(model, rows))
    alone, plain = [], []
    for config in configs(model, min(ALONE, rows)):
        trial = Digits()
        trial.setup(config)
        alone.append(trial)
        plain.append(Plain(config))
    captured = [Captured(config) for config in configs(model, 1)] if torch.cuda.is_available() else []
    for each in (*alone, *plain, *captured):
        each.step()
    first = seconds_of(pack.step)
    fused: list[float] = []
    single: list[float] = []
    loop: list[float] = []
    graph: list[float] = []
    for _ in range(runs):
        single += [seconds_of(trial.step) for trial in alone]
        loop += [seconds_of(trial.step) for trial in plain]
        graph += [seconds_of(trial.step) for trial in captured]
        fused.append(seconds_of(pack.step))
    alone_s, plain_s, fused_s = statistics.median(single), statistics.median(loop), statistics.median(fused) / rows
    return {
        "alone_iterations_per_s": 1.0 / alone_s,
        "plain_iterations_per_s": 1.0 / plain_s,
        "fused_iterations_per_s": 1.0 / fused_s,
        "ratio": alone_s / fused_s,
        "ratio_to_plain": plain_s / fused_s,
        "trace_s": max(0.0, first - statistics.median(fused)),
        **({"ratio_to_graphs": statistics.median(graph) / fused_s} if graph else {}),
    }


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1, 8 and 64 rows, 3 runs")
    parser.add_argument("--rows", default="", help="numbers of rows, by default 1, 2, 4, ... 256")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--models", default="", help="the beginnings of models' names, divided by semicolons")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="gpu is --cuda")
    parser.add_argument("--cuda", action="store_true", help="on the GPU, and an error without one")
    parser.add_argument("--equality", action="store_true", help="how far fused trials and the same alone drift apart")
    parser.add_argument("--json", type=Path, help="file of the results; what it has of the other measurement stays")
    return parser


def main() -> None:
    """Runs all models with all numbers of rows."""
    parser = make_parser()
    options = parser.parse_args()
    options.cuda |= options.device == "gpu"
    if options.cuda and not torch.cuda.is_available():
        parser.error("--cuda: PyTorch sees no GPU")
    if not options.cuda and torch.cuda.is_available():
        parser.error("PyTorch sees a GPU and would train on it: give --cuda, or set CUDA_VISIBLE_DEVICES= for the CPU")
    if not options.cuda:
        torch.set_num_threads(1)
    default = "1,8,64" if options.quick else "1,2,4,8,16,32,64,128,256"
    device = torch.cuda.get_device_name() if options.cuda else "one CPU thread"
    facts = {"machine": {**machine(), "device": device, "torch": torch.__version__}, "date": str(datetime.date.today())}
    models = [name for name in MODELS if name.startswith(tuple(options.models.split(";")))]
    if options.equality:
        write(options.json, {"equality": {**facts, "models": equality(models)}})
        return
    rows = [int(number) for number in (options.rows or default).split(",")]
    runs = options.runs or (3 if options.quick else 5)
    figures: dict[str, dict[str, Any]] = {}
    for model in models:
        figures[model] = {}
        for count in rows:
            found = figures[model][str(count)] = measure(model, count, runs)
            write(options.json, {**facts, "runs": runs, "models": figures})
            print(
                f"{model:30} k = {count:3}: alone {found['alone_iterations_per_s']:6.1f}, by hand "
                f"{found['plain_iterations_per_s']:6.1f}, fused {found['fused_iterations_per_s']:7.1f} iterations/s: "
                f"{found['ratio']:5.2f}x, {found['ratio_to_plain']:5.2f}x   "
                f"traced in {found['trace_s']:.2f} s"
                + (f", to CUDA graphs alone {found['ratio_to_graphs']:.2f}x" if options.cuda else "")
            )


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Adds figures to a file."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
    write_json(path, {**earlier, **figures})


if __name__ == "__main__":
    main()
