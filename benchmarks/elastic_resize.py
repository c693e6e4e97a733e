"""Measures how long training pauses when a trial is resized from one device to two and back, and when a device is lost.

    python benchmarks/elastic_resize.py [--runs 5] [--models small,10M] [--backends torch,gloo,horovod] [--json FILE]

Real processes run on the machine's GPUs in turn, else on CPU cores, with one thread each. "resize" is Fluid's, with a
spare process that was set up while the trial trained. "restart" saves a checkpoint, ends the processes and starts new
ones from it, as is done without elasticity. "kill" sends SIGKILL to rank 0 or rank 1 of a trial of width 2, which
continues alone. A pause is the time from the end of the last iteration before to the end of the first after it, less
the time of an iteration at the new width. After a kill nothing is subtracted: the pause has the repeated iteration.

Peers, measured in the same run: "horovod_driver" is Horovod's own elastic driver with a discovery script, and
"ray_resource_changing" is a trial of Ray Tune under its ResourceChangingScheduler, which restarts it with other
resources. Ratios are to "resize" with the same model and the default process group: "torch", here shared memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from elastic_resize_peers import SETTLED, horovod_driver, ray_resource_changing
from elastic_resize_workload import MODELS, Perceptron
from measuring import write_json

from fluid.elastic import ElasticRun

#: The GPUs of this machine, as in ``CUDA_VISIBLE_DEVICES``.
GPUS = tuple(str(index) for index in range(torch.cuda.device_count()))


def start(config: dict[str, Any], width: int, backend: str, checkpoint: str | None = None) -> ElasticRun:
    """Starts the processes."""
    return ElasticRun(Perceptron, config, width, backend=backend, checkpoint=checkpoint, gpus=GPUS)


def settle(run: ElasticRun) -> float:
    """Returns the seconds of an iteration."""
    seconds = []
    for _ in range(SETTLED):
        begun = time.perf_counter()
        run.run(1)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def resize(config: dict[str, Any], backend: str, runs: int) -> dict[str, list[float]]:
    """Returns the pauses of Fluid's resizes."""
    pauses: dict[str, list[float]] = {"1->2": [], "2->1": []}
    with start(config, 1, backend) as run:
        settle(run)
        for _ in range(runs):
            for name, width in (("1->2", 2), ("2->1", 1)):
                run.prepare(max(0, width - run.width))
                pauses[name].append(pause_of(run, lambda width=width: run.resize(width)))
    return pauses


def pause_of(run: ElasticRun, change: Callable[[], Any]) -> float:
    """Returns the seconds that an action between two iterations costs."""
    begun = time.perf_counter()
    change()
    run.run(1)
    return time.perf_counter() - begun - settle(run)


def restart(config: dict[str, Any], backend: str, runs: int) -> dict[str, list[float]]:
    """Returns the pauses of a restart from a checkpoint on disk, in new processes."""
    pauses: dict[str, list[float]] = {"1->2": [], "2->1": []}
    for _ in range(runs):
        for name, old, new in (("1->2", 1, 2), ("2->1", 2, 1)):
            with tempfile.TemporaryDirectory() as folder, start(config, old, backend) as run:
                settle(run)
                begun = time.perf_counter()
                run.save(folder)
                for pid in run.pids:
                    os.kill(pid, signal.SIGKILL)
                with start(config, new, backend, folder) as again:
                    again.run(1)
                    pauses[name].append(time.perf_counter() - begun - settle(again))
    return pauses


def kill(config: dict[str, Any], backend: str, runs: int) -> dict[str, list[float]]:
    """Returns the seconds from a process's death during an iteration to the end of that iteration without it."""
    pauses: dict[str, list[float]] = {"rank 0": [], "rank 1": []}
    with start(config, 2, backend) as run:
        for _ in range(runs):
            for rank, name in enumerate(pauses):
                seconds = settle(run)
                ends: list[float] = []
                widths: list[int] = []
                killed: list[float] = []

                def on_result(result: Any, pid: int = run.pids[rank], seconds: float = seconds) -> None:
                    ends.append(time.perf_counter())  # noqa: B023
                    widths.append(result.width)  # noqa: B023
                    if not killed:  # noqa: B023
                        time.sleep(seconds / 2)
                        os.kill(pid, signal.SIGKILL)
                        killed.append(time.perf_counter())  # noqa: B023

                run.run(50, on_result)
                alone = widths.index(1)
                pauses[name].append(ends[alone] - killed[0])
                run.resize(2)
    return pauses


#: Shorter pauses, in seconds, are within the variation of iterations; no ratio is given for them.
LEAST_S = 1e-3
#: Measured with each process group.
SYSTEMS = {"resize": resize, "restart": restart, "kill": kill}
#: The peers; each has its own process group.
PEERS = {"horovod_driver": horovod_driver, "ray_resource_changing": ray_resource_changing}
_PACKAGES = {"horovod": "horovod", "horovod_driver": "horovod", "ray_resource_changing": "ray"}


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5, help="measurements of each; the median counts")
    parser.add_argument("--models", default=",".join(MODELS), help="which models, comma-separated")
    parser.add_argument("--backends", default="torch,gloo,horovod", help="which process groups, comma-separated")
    parser.add_argument("--systems", default=",".join((*SYSTEMS, *PEERS)), help="what to measure, comma-separated")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    systems = options.systems.split(",")
    pauses: dict[str, dict[str, dict[str, list[float]]]] = {}
    for model in options.models.split(","):
        config = {"hidden": MODELS[model]}
        for name in filter(is_there, options.backends.split(",")):
            for system in (system for system in systems if system in SYSTEMS):
                pauses.setdefault(model, {})[f"{system}, {name}"] = SYSTEMS[system](config, name, options.runs)
                write_json(options.json, figures_of(pauses))
        for peer in filter(is_there, (system for system in systems if system in PEERS)):
            pauses.setdefault(model, {})[peer] = PEERS[peer](config, options.runs)
            write_json(options.json, figures_of(pauses))
    report(pauses)


def is_there(name: str) -> bool:
    """Whether the package of a process group or peer is installed; prints a line if it is not."""
    package = _PACKAGES.get(name)
    if package is None or importlib.util.find_spec(package) is not None:
        return True
    print(f"{package} is not installed: {name} is left out")
    return False


def figures_of(pauses: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """The figures of a file: of the machine, and the medians of all pauses."""
    medians = {
        model: {system: {change: statistics.median(seconds) for change, seconds in changes.items() if seconds}
                for system, changes in systems.items()}
        for model, systems in pauses.items()
    }  # fmt: skip
    return {
        "machine": f"{os.cpu_count()} CPU cores, {len(GPUS)} GPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "median_s": medians,
        "pauses_s": pauses,
    }


def report(pauses: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Prints the medians and ratios."""
    from rich.console import Console
    from rich.table import Table

    figures = figures_of(pauses)
    console = Console(width=110)
    console.print(f"{figures['machine']}, {figures['date']}")
    table = Table(title="Pause of training, seconds", title_justify="left")
    for column in ("model", "system", "change", "median", "least", "most", "to resize"):
        table.add_column(column, justify="left" if column in ("model", "system", "change") else "right")
    for model, systems in pauses.items():
        for system, changes in systems.items():
            for change, seconds in changes.items():
                if seconds:
                    base = figures["median_s"][model].get("resize, torch", {}).get(change)
                    ratio = f"{statistics.median(seconds) / base:.0f}x" if base and base > LEAST_S else ""
                    cells = [f"{value:.3f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]
                    table.add_row(model, system, change, *cells, ratio)
    console.print(table)


if __name__ == "__main__":
    main()
