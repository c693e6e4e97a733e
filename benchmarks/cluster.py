"""Measures Fluid on clusters: the engine with thousands of simulated devices, lanes on local nodes of a Ray cluster.

    python benchmarks/cluster.py [--part engine|nodes|all] [--devices 1000,10000] [--trials 100000]
                                 [--lanes 1x2,1x8,1x16,1x32,1x64,4x16] [--runs 1] [--json FILE]

Part "engine" (benchmarks/cluster_engine.py) gives CPU microseconds per event, the longest call of each kind, and the
driver's bytes per trial. Part "nodes" runs two trials per device, five iterations of 0.2 s each, on CPU devices that
nodes of one Ray cluster share (``ray.cluster_utils``), with Ray already running, and on the local backend in the same
run: seconds from the call of ``FluidExecutor`` to the first result and to the last, and the memory of an idle lane.
Last, 16 lanes run empty iterations. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import machine, run_apart
from rich.console import Console
from rich.table import Table

#: The work of a trial, and the number of trials per device.
ITERATIONS, SECONDS, PER_DEVICE = 5, 0.2, 2
#: Empty iterations: lanes, and iterations of each.
RATE_LANES, RATE_ITERATIONS = 16, 2_000


def parse_nodes(text: str) -> tuple[int, int]:
    """``"4x16"`` to 4 nodes of 16 devices each."""
    nodes, devices = text.split("x")
    return int(nodes), int(devices)


# -- one measurement, in a process of its own ---------------------------------------------------------------


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A thin trial: it sleeps, and reports its process."""
    for _ in range(config["iterations"]):
        if config["seconds"]:
            time.sleep(config["seconds"])
        yield {"pid": os.getpid()}


@contextlib.contextmanager
def ray_cluster(nodes: int, devices: int) -> Iterator[None]:
    """Runs local nodes of so many devices each, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": devices, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=devices)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def pss_bytes(process: int) -> int:
    """The memory of a process, what it shares counted in parts."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def lanes(backend: str, nodes: int, devices: int, *, empty: bool) -> dict[str, float]:
    """Runs trials on so many nodes of so many devices each.

    Args:
        backend: ``"local"`` or ``"ray"``.
        nodes: number of nodes; the local backend has as many devices on its one.
        devices: of each node.
        empty: whether iterations do nothing, and each device runs one trial of many.
    """
    from fluid import FluidExecutor, Trial, TrialGroup

    count = nodes * devices
    iterations = RATE_ITERATIONS if empty else ITERATIONS
    config = {"iterations": iterations, "seconds": 0.0 if empty else SECONDS}
    trials = count if empty else PER_DEVICE * count
    with ray_cluster(nodes, devices) if backend == "ray" else contextlib.nullcontext():
        begun = time.perf_counter()
        with FluidExecutor(backend, count, packing="off", verbose=0) as executor:
            group = TrialGroup(Trial(train, config, budget=iterations) for _ in range(trials))
            handle = executor.submit_trialgroup(group)
            first, results, processes = 0.0, 0, set()
            for result in handle.results():
                first = first or time.perf_counter()
                results += 1
                processes.add(result.metrics["pid"])
            ended = time.perf_counter()
            handle.raise_failures()
            idle = statistics.median(map(pss_bytes, processes))
    assert results == trials * iterations, results
    return {
        "first_s": first - begun,
        "all_s": ended - begun,
        "results_per_s": (results - 1) / (ended - first),
        "idle_lane_bytes": idle,
        "lanes": len(processes),
    }


def measure_one(what: str) -> dict[str, Any]:
    """Runs the measurement that a name stands for, such as ``"lanes:ray:4x16"``."""
    from cluster_engine import engine, memory

    kind, *rest = what.split(":")
    if kind == "engine":
        return engine(rest[0], int(rest[1]), int(rest[2]))
    if kind == "memory":
        return memory(int(rest[1]), int(rest[2]), traced=rest[0] == "traced")
    return lanes(rest[0], *parse_nodes(rest[1]), empty=kind == "rate")


# -- the benchmark ------------------------------------------------------------------------------------------


def apart(what: str, timeout: float) -> dict[str, Any] | None:
    """Returns the figures of one measurement; ``None`` if it failed."""
    done = run_apart(__file__, ["--one", what], what=what, timeout=timeout)
    return None if done is None else done.figures


def engine_part(console: Console, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the engine, and prints its tables."""
    figures: dict[str, Any] = {}
    table = Table(title=f"the engine, {options.trials:,} trials, CPU time", title_justify="left")
    for column in (
        "devices",
        "workload",
        "events",
        "us per event",
        "garbage, us",
        "what",
        "calls",
        "mean ms",
        "max ms",
    ):
        table.add_column(column, justify="left" if column in ("workload", "what") else "right")
    bytes_table = Table(title="memory of the driver per trial, bytes", title_justify="left")
    for column in ("devices", "resident set", "tracemalloc", "of which the user's trials"):
        bytes_table.add_column(column, justify="right")
    for devices in map(int, options.devices.split(",")):
        for workload in ("group", "stream"):
            found = apart(f"engine:{workload}:{devices}:{options.trials}", options.timeout)
            if found is None:
                continue
            figures[f"{workload}, {devices} devices"] = found
            head = [f"{devices:,}", workload, f"{found['events']:,}", f"{found['us_per_event']:.1f}"]
            head.append(f"{found['garbage_us_per_event']:.1f}")
            for kind, call in found["calls"].items():
                shown = [kind, f"{call['calls']:,}", f"{call['mean_ms']:.3f}", f"{call['longest_ms']:.1f}"]
                table.add_row(*head, *shown)
                head = [""] * len(head)
        grown = [apart(f"memory:{how}:{devices}:{options.trials}", options.timeout) for how in ("rss", "traced")]
        if all(grown):
            figures[f"memory, {devices} devices"] = dict(zip(("rss", "traced"), grown, strict=True))
            shares = [f"{each['bytes_per_trial']:,.0f}" for each in grown if each]
            bytes_table.add_row(f"{devices:,}", *shares, f"{grown[1]['users_bytes_per_trial']:,.0f}")
    console.print(table)
    console.print(bytes_table)
    return figures


def _medians(found: list[dict[str, float] | None]) -> dict[str, float]:
    known = [each for each in found if each is not None]
    return {name: statistics.median(each[name] for each in known) for name in known[0]} if known else {}


def nodes_part(console: Console, options: argparse.Namespace) -> dict[str, Any]:
    """Measures lanes on nodes, the two backends in turn, and prints ratios of Ray to local."""
    figures: dict[str, Any] = {}
    ideal = PER_DEVICE * ITERATIONS * SECONDS
    table = Table(title=f"seconds from FluidExecutor(), Ray running; the work takes {ideal} s", title_justify="left")
    for column in (
        "nodes x devices",
        "first, local",
        "first, Ray",
        "all, local",
        "all, Ray",
        "more",
        "idle lane, Ray/local",
    ):
        table.add_column(column, justify="right")
    for shape in options.lanes.split(","):
        taken: dict[str, list[dict[str, float] | None]] = {"local": [], "ray": []}
        for _ in range(options.runs):
            for backend, found in taken.items():
                found.append(apart(f"lanes:{backend}:{shape}", options.timeout))
        medians = {backend: _medians(found) for backend, found in taken.items()}
        figures[shape] = medians
        local, ray = medians["local"], medians["ray"]
        if local and ray:
            row = [f"{each[name]:.2f}" for name in ("first_s", "all_s") for each in (local, ray)]
            row.append(f"{ray['all_s'] - local['all_s']:+.2f} s")
            table.add_row(shape, *row, f"{ray['idle_lane_bytes'] / local['idle_lane_bytes']:.2f}x")
    console.print(table)
    rates = {backend: apart(f"rate:{backend}:1x{RATE_LANES}", options.timeout) for backend in ("local", "ray")}
    figures["empty iterations"] = rates
    if rates["local"] and rates["ray"]:
        each = {backend: found["results_per_s"] for backend, found in rates.items() if found}
        console.print(
            f"results per second, empty iterations on {RATE_LANES} lanes: local {each['local']:,.0f}, "
            f"Ray {each['ray']:,.0f}, {each['ray'] / each['local']:.2f}x"
        )
    return figures


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("engine", "nodes", "all"), default="all", help="what to measure")
    parser.add_argument("--devices", default="1000,10000", help="numbers of simulated devices, comma-separated")
    parser.add_argument("--trials", type=int, default=100_000, help="trials on them (default: %(default)s)")
    parser.add_argument("--lanes", default="1x2,1x8,1x16,1x32,1x64,4x16", help="nodes x devices, comma-separated")
    parser.add_argument("--runs", type=int, default=1, help="runs of each on nodes; the median counts (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=1800.0, help="most seconds of one process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            figures = measure_one(options.one)
        print(json.dumps(figures))
        sys.stdout.flush()
        os._exit(0)  # Ray prints nothing behind the figures.
    console = Console(width=120)
    command = " ".join(["python benchmarks/cluster.py", *sys.argv[1:]])
    content: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "command": command}
    for part, measure in (("engine", engine_part), ("nodes", nodes_part)):
        if options.part in (part, "all"):
            content[part] = measure(console, options)
    if options.json:
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
