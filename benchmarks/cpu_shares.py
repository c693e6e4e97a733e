"""How lanes that share CPU cores divide them: by threads, by cores, by weight, or not at all.

Each trial of a packed device has as many threads as it would have alone. The simulation compares the ends of trials
with unlike CPU parts on 8 cores: the kernel's fair share of cores, an even division of the cores (affinity), and the
longest remaining path first (weight). The real part measures on this machine's cores two PyTorch trainings of unlike
lengths, in alternating runs::

    python benchmarks/cpu_shares.py                      # both
    python benchmarks/cpu_shares.py --runs 0             # the simulation alone: seconds
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CORES = 8
#: Weights of the kernel: of a process of nice value 0 and of one of 5.
FIRST, LAST = 1024.0, 335.0


@dataclass
class Work:
    """A trial: iterations of a CPU part and a GPU part.

    Attributes:
        cpu: core-seconds of an iteration's CPU part.
        threads: cores that this part can use.
        gpu: seconds of the GPU part.
        left: iterations left.
        cpu_left: core-seconds left of the CPU part that runs; 0 in the GPU part.
        gpu_left: seconds left of the GPU part that runs.
    """

    cpu: float
    threads: int
    gpu: float
    left: int
    cpu_left: float = 0.0
    gpu_left: float = 0.0

    @property
    def path(self) -> float:
        """Seconds left if it had all the cores that it can use."""
        done = (self.cpu - self.cpu_left) / self.threads if self.cpu_left else self.cpu / self.threads
        return self.left * (self.cpu / self.threads + self.gpu) - done - (self.gpu - self.gpu_left)


def fair(running: Sequence[Work], weights: Sequence[float], cores: float) -> list[float]:
    """Cores of each, by weights; what one cannot use is the others'."""
    given, open_ = [0.0] * len(running), set(range(len(running)))
    while open_ and cores > 1e-12:
        total = sum(weights[each] for each in open_)
        full = {each for each in open_ if running[each].threads - given[each] <= cores * weights[each] / total}
        if not full:
            for each in open_:
                given[each] += cores * weights[each] / total
            break
        for each in full:
            cores -= running[each].threads
            given[each] = float(running[each].threads)
        open_ -= full
    return given


def kernel(computing: list[Work], there: list[Work]) -> list[float]:
    """All have the same weight, and all cores."""
    return fair(computing, [1.0] * len(computing), CORES)


def affinity(computing: list[Work], there: list[Work]) -> list[float]:
    """Each trial that is there has cores of its own, also while it does not compute."""
    return [min(each.threads, CORES / len(there)) for each in computing]


def longest_first(computing: list[Work], there: list[Work]) -> list[float]:
    """The trial with the longest path left has the weight of nice value 0, the others that of 5."""
    longest = max(there, key=lambda each: each.path)
    return fair(computing, [FIRST if each is longest else LAST for each in computing], CORES)


def ends(trials: list[Work], divide: Callable[[list[Work], list[Work]], list[float]]) -> list[float]:
    """When each trial ends, seconds, in that order."""
    now, found = 0.0, []
    for each in trials:
        each.cpu_left = each.cpu
    while there := [each for each in trials if each.left]:
        computing = [each for each in there if each.cpu_left > 0.0]
        rates = dict(zip(map(id, computing), divide(computing, there), strict=True))
        waits = [each.cpu_left / rates[id(each)] if each.cpu_left > 0.0 else each.gpu_left for each in there]
        passed = min(waits)
        now += passed
        for each, wait in zip(there, waits, strict=True):
            is_over = wait <= passed * (1 + 1e-12)
            if each.cpu_left > 0.0:
                each.cpu_left = 0.0 if is_over else each.cpu_left - rates[id(each)] * passed
                if is_over:
                    each.gpu_left = each.gpu
            elif is_over:
                each.left, each.cpu_left, each.gpu_left = each.left - 1, each.cpu, 0.0
                if not each.left:
                    found.append(now)
            else:
                each.gpu_left -= passed
    return found


def mixes(kind: str, seed: int) -> list[dict[str, Any]]:
    """Trials of a device. ``"parallel"``: CPU parts use all cores. ``"loaders"``: up to 4. ``"serial"``: one."""
    draw = random.Random(f"{kind} {seed}")
    threads = {"parallel": CORES, "loaders": 4, "serial": 1}[kind]
    count = {"parallel": 3, "loaders": 4, "serial": 12}[kind]
    return [
        {"cpu": draw.choice([0.1, 0.5, 2.0]) * threads, "threads": threads, "gpu": 0.5, "left": draw.randint(5, 40)}
        for _ in range(count)
    ]


def simulate(seeds: int) -> dict[str, dict[str, float]]:
    """Mean makespans and mean ends of trials by mix, each over that of the even division by affinity."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("parallel", "loaders", "serial"):
        ratios: dict[str, list[float]] = defaultdict(list)
        for seed in range(seeds):
            made = mixes(kind, seed)
            even = ends([Work(**each) for each in made], affinity)
            for divide in (kernel, longest_first):
                ours = ends([Work(**each) for each in made], divide)
                ratios[f"{divide.__name__}: makespan"].append(ours[-1] / even[-1])
                ratios[f"{divide.__name__}: mean end"].append(statistics.mean(ours) / statistics.mean(even))
        found[kind] = {name: statistics.mean(each) for name, each in ratios.items()}
    return found


# -- real ------------------------------------------------------------------------------------------


def train(iterations: int, order: dict[str, Any], place: int, neighbour: str) -> None:
    """Trains in this process as a lane of this place would."""
    import torch

    threads = order["threads"]
    cores = sorted(os.sched_getaffinity(0))
    if order.get("affinity"):
        os.sched_setaffinity(0, {cores[place % len(cores)]})
    if order.get("weight") and place:
        os.nice(5)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(256, 512), torch.randint(10, (256,))
    for _ in range(iterations):
        if order["alone"] != threads and not os.path.exists(f"/proc/{neighbour}"):
            threads = order["alone"]  # The neighbour has ended.
            torch.set_num_threads(threads)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def serve() -> None:
    """Forks trainings, as it is told line by line; prints the seconds that they took."""
    import torch  # noqa: F401  # Before the forks.

    for line in sys.stdin:
        order = json.loads(line)
        begun, children = time.perf_counter(), []
        for place, iterations in enumerate(order["iterations"]):
            child = os.fork()
            if not child:
                train(iterations, order, place, str(children[0]) if children else "self")
                os._exit(0)
            children.append(child)
        for _ in children:
            os.wait()  # Whichever ends: the other one looks for it.
        print(time.perf_counter() - begun, flush=True)


def measure(runs: int) -> dict[str, Any]:
    """Medians of alternating runs, in seconds, and their ratios to threads that are divided."""
    cores = len(os.sched_getaffinity(0))
    iterations = [25, 50]
    divided = {"threads": max(1, cores // 2), "alone": cores, "iterations": iterations}
    fixed = {"threads": cores, "alone": cores, "iterations": iterations}
    ways: dict[str, dict[str, Any]] = {
        "threads divided": divided,
        "fixed": fixed,
        "fixed, affinity": {**fixed, "affinity": True},
        "fixed, weight": {**fixed, "iterations": iterations[::-1], "weight": True},
    }
    variables = {**os.environ, "OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE"}
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    )
    assert server.stdin is not None and server.stdout is not None
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, order in ways.items():
            print(json.dumps(order), file=server.stdin, flush=True)
            seconds[name].append(float(server.stdout.readline()))
    server.communicate()
    found = {}
    for name, each in seconds.items():
        base = seconds["threads divided"]
        ratios = [one / other for one, other in zip(each[1:], base[1:], strict=True)]  # The first ones warm up.
        found[name] = {"seconds": statistics.median(each[1:]), "ratio": statistics.median(ratios)}
        found[name] |= {"least": min(ratios), "most": max(ratios)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="alternating real runs; 0 for none")
    parser.add_argument("--seeds", type=int, default=100, help="random devices per mix")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    for kind, ratios in simulate(arguments.seeds).items():
        print(f"{kind:9}", *(f"{name} {ratio:.3f}," for name, ratio in ratios.items()))
    if arguments.runs:
        for name, figures in measure(arguments.runs).items():
            print(f"{name:26}", *(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
