"""Measures the gain of packing trials on one device, in iterations per second, and whether Fluid finds it.

    python benchmarks/packing.py [--device auto|gpu|cpu] [--quick] [--workloads cnn,...] [--counts 1,2,4] [--trials N]
        [--json FILE]

There are six workloads (packing_workload.py), of which one mostly waits for its input and one fills a GPU. For each, k
trials run in k processes on one device, for k of --counts: on a GPU by time slices and, where it can be used, under
MPS; on a machine without a GPU on one CPU core. The reference is one trial after another, each alone on the device.
Measurements are taken in turns, and medians count. "core" is the share of a core's time that the trials had: if trials
that compute have less than 1 of it on a CPU, other programs used the core too, and the figures are rough. Before that,
Fluid runs trials of the workload on the device, starting with one at a time, and decides from its measurements how many
to pack: alpha and c are from its profile, and c is compared with the best of --counts. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measuring import write_json
from packing_workload import WORKLOADS, Workload

HERE = Path(__file__).resolve().parent
#: Iterations a trial runs before it is measured.
WARM_UP = 3
#: Iterations of the trial whose time determines how many the others run.
PROBE = 10
#: Seconds that the processes have to end by themselves: killing a client disturbs MPS.
END_S = 10.0
#: Characters that are kept of why Fluid's part failed.
_TAIL = 1000
#: Imported by lanes before their first trial. The first optimizer imports the second one, which takes seconds.
PRELOAD = ["torch", "torch._dynamo"]


class Size:
    """The size of the measurements.

    Attributes:
        counts: numbers of trials.
        seconds: of one measurement.
        rounds: how many times each is taken.
        scale, steps: of the workloads.
        trials, trial_seconds: number of Fluid's trials, and seconds of each alone. Fluid does not try packing for less
            than some seconds of work.
    """

    def __init__(self, gpu: bool, quick: bool, counts: str | None, trials: int | None = None) -> None:
        given = sorted({1, *(int(part) for part in counts.split(","))}) if counts else None
        self.counts = given or ([1, 2, 4] if quick else [1, 2, 4, 8, 12, 16])
        self.seconds, self.rounds = (0.5, 3) if quick else (2.0, 5)
        self.scale, self.steps = (8, 10) if gpu else (1, 1)
        self.trials, self.trial_seconds = (6, 2.5) if quick else (2 * max(self.counts), 1.5)
        self.trials = trials or self.trials

    def config(self, name: str, seed: int = 0) -> dict[str, Any]:
        """Returns the config of a workload."""
        return {"name": name, "scale": self.scale, "steps": self.steps, "seed": seed}


# -- processes that run trials, without Fluid ----------------------------------------------------------------


def serve(connection: Connection, environment: dict[str, str], core: int | None) -> None:
    """A process that hosts one trial at a time."""
    os.environ.update(environment)
    if core is not None:
        os.sched_setaffinity(0, {core})
    workload = Workload()
    with contextlib.suppress(EOFError):
        while True:
            order, argument = connection.recv()
            if order == "setup":
                workload.setup(argument)
                for _ in range(WARM_UP):
                    workload.step()
                connection.send(None)
            else:
                connection.send(run_for(workload, argument))


def run_for(workload: Workload, seconds: float) -> tuple[float, float]:
    """Measures iterations per second of one trial, and the share of a core that it used."""
    begun, used = time.perf_counter(), time.process_time()
    done, now = 0, begun
    while now < begun + seconds:
        workload.step()
        done, now = done + 1, time.perf_counter()
    return done / (now - begun), (time.process_time() - used) / (now - begun)


@contextlib.contextmanager
def crew(size: int, environment: dict[str, str], core: int | None) -> Iterator[list[Connection]]:
    """Processes for a number of trials on one device."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(size)]
    processes = [context.Process(target=serve, args=(theirs, environment, core), daemon=True) for _, theirs in pairs]
    for process, (_, theirs) in zip(processes, pairs, strict=True):
        process.start()
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.close()
        for process in processes:
            process.join(END_S)
            process.kill()
            process.join()


def throughput(connections: list[Connection], size: Size, name: str, counts: list[int]) -> dict[int, dict[str, float]]:
    """Measures iterations per second of k trials together, and the share of a core that they used, by k."""
    for seed, connection in enumerate(connections):
        connection.send(("setup", size.config(name, seed)))
    for connection in connections:
        connection.recv()
    rates: dict[int, list[float]] = {k: [] for k in counts}
    shares: dict[int, list[float]] = {k: [] for k in counts}
    for _ in range(size.rounds):
        for k in counts:
            for connection in connections[:k]:
                connection.send(("run", size.seconds))
            pairs = [connection.recv() for connection in connections[:k]]
            rates[k].append(sum(rate for rate, _ in pairs))
            shares[k].append(sum(share for _, share in pairs))
    return {k: {"rate": statistics.median(rates[k]), "core": statistics.median(shares[k])} for k in counts}


# -- Fluid ---------------------------------------------------------------------------------------------------


def fluid(name: str, size: Size, gpu: bool) -> dict[str, Any]:
    """Runs trials with Fluid on one device, packed and not; returns its profile's figures, and the seconds.

    The seconds count from the first result on: importing PyTorch takes the same time in both cases.
    """
    from fluid import FluidExecutor, Trial, TrialGroup
    from fluid.backends.local import LocalBackend

    figures: dict[str, Any] = {}
    budget = 0
    for packing in ("off", "auto"):
        # A CPU device is one core: lanes on other cores would seem to gain from packing.
        with (
            LocalBackend(devices=1, pin_cores=not gpu, preload=PRELOAD) as backend,
            FluidExecutor(backend=backend, packing=packing, max_packing=max(size.counts), verbose=0) as executor,
        ):
            if not budget:
                probe = executor.submit_trialgroup(TrialGroup([Trial(Workload, size.config(name), budget=PROBE)]))
                seconds = [result.seconds for result in probe.results()]
                probe.raise_failures()
                budget = max(WARM_UP, round(size.trial_seconds / statistics.median(seconds)))
            group = TrialGroup([Trial(Workload, size.config(name, x), budget=budget) for x in range(size.trials)])
            handle = executor.submit_trialgroup(group)
            ends = [time.perf_counter() for _ in handle.results()]
            handle.raise_failures()
            figures[f"seconds_{packing}"] = ends[-1] - ends[0]
            profile = executor.profile
            (key,) = profile.keys()
    figures["alpha"] = profile.alpha(key)
    figures["measured_packing"] = profile.measured_packing(key)
    figures["c"] = profile.packing_limit(key, max(1, profile.measured_packing(key)))
    figures["benefits"] = profile.marginal_benefits(key)
    figures["seconds_per_iteration"] = profile.seconds_per_iteration(key)
    return figures


def fluid_apart(name: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Runs Fluid's part in a process of its own, with its own environment; the end of its output if it failed."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--device", options.device]
    command += ["--quick"] if options.quick else []
    command += ["--counts", options.counts] if options.counts else []
    command += ["--trials", str(options.trials)] if options.trials else []
    with tempfile.TemporaryDirectory() as home:
        everything = {**os.environ, **environment, "FLUID_RUNS": home, "HOME": home}
        done = subprocess.run(command, env=everything, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"Fluid's part of {name} failed:\n{done.stderr}", file=sys.stderr)
        return {"failed": done.stderr[-_TAIL:]}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


# -- the benchmark -------------------------------------------------------------------------------------------


def ways_to_share(gpu: str | None) -> Generator[tuple[str, dict[str, str]], None, None]:
    """The ways to share the device, each in force until the next: its name, and the environment of processes."""
    if gpu is None:
        yield "one core", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return
    from fluid.gpu.mps_control import MpsError
    from fluid.gpu.mps_support import unsupported_reason_here
    from fluid.gpu.nvml import describe_gpus
    from fluid.mps import MpsDaemon

    yield "time slices", {"CUDA_VISIBLE_DEVICES": gpu}
    try:
        if reason := unsupported_reason_here([state for state in describe_gpus() if state.token == gpu]):
            raise MpsError(reason)
        daemon = MpsDaemon([gpu])
    except MpsError as error:
        print(f"without MPS: {error}", file=sys.stderr)
        return
    with daemon:
        yield "MPS", daemon.lane_environment(gpu)


def measure(options: argparse.Namespace, names: list[str], gpu: str | None, name_of_device: str) -> dict[str, Any]:
    """Measures everything, by workload. The file has what was measured so far, should this be interrupted."""
    from fluid.gpu.mps_support import MOST_CLIENTS

    size = Size(gpu is not None, options.quick, options.counts, options.trials)
    core = None if gpu is not None else min(os.sched_getaffinity(0))
    figures: dict[str, Any] = {name: {"throughput": {}, "fluid": {}} for name in names}
    found = {
        "device": name_of_device,
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "quick": options.quick,
        "workloads": figures,
    }
    with contextlib.closing(ways_to_share(gpu)) as ways:  # MPS ends here in any case.
        for way, environment in ways:
            counts = [k for k in size.counts if way != "MPS" or k <= MOST_CLIENTS]
            with crew(max(counts), environment, core) as connections:
                for name in names:
                    figures[name]["throughput"][way] = throughput(connections, size, name, counts)
                    write_json(options.json, found)
            for name in names:
                figures[name]["fluid"][way] = said = fluid_apart(name, options, environment)
                write_json(options.json, found)
                if "failed" in said:
                    continue
                by_count = figures[name]["throughput"][way]
                if said["c"] not in by_count:
                    with crew(said["c"], environment, core) as connections:
                        by_count |= throughput(connections, size, name, [said["c"]])
                said["against_best"] = by_count[said["c"]]["rate"] / max(one["rate"] for one in by_count.values())
                write_json(options.json, found)
    return found


def report(figures: dict[str, Any]) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{figures['device']}, {figures['date']}; iterations/s of k trials together, and against one by one")
    for name, found in figures["workloads"].items():
        for way, by_count in found["throughput"].items():
            console.print(f"\n{name}: {WORKLOADS[name]}; {way}")
            table = Table()
            for column in ("k", "iterations/s", "against one by one", "core"):
                table.add_column(column, justify="right")
            alone = by_count[min(by_count)]["rate"]
            for k, one in by_count.items():
                table.add_row(str(k), f"{one['rate']:.1f}", f"{one['rate'] / alone:.2f}x", f"{one['core']:.2f}")
            console.print(table)
            console.print(verdict(found["fluid"][way]))


def verdict(said: dict[str, Any]) -> str:
    """Returns Fluid's result for a workload, in a line."""
    if "failed" in said:
        return "Fluid: its part failed"
    found = "packing is of no use" if said["c"] == 1 else f"packing pays up to {said['c']} trials"
    return (
        f"Fluid: {found} (alpha {said['alpha']:.3f}, measured up to {said['measured_packing']}); "
        f"{said['seconds_off']:.1f} s without packing, {said['seconds_auto']:.1f} s with: "
        f"{said['seconds_off'] / said['seconds_auto']:.2f}x. Its c reaches {said['against_best']:.0%} of the best rate"
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--device", choices=["auto", "gpu", "cpu"], default="auto", help="auto is a GPU if there is one"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements: some minutes on CPU")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, comma-separated")
    parser.add_argument("--counts", help="numbers of trials on the device, comma-separated")
    parser.add_argument("--trials", type=int, help="number of Fluid's trials (default: twice the largest count, or 6)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--one", choices=list(WORKLOADS), help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark and prints its tables."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    from fluid.gpu.nvml import describe_gpus

    gpus = [] if options.device == "cpu" else describe_gpus()
    if options.device == "gpu" and not gpus:
        parser.error("--device gpu: no usable GPU was found")
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            size = Size(bool(gpus), options.quick, options.counts, options.trials)
            figures = fluid(options.one, size, bool(gpus))
        print(json.dumps(figures))
        return
    names = options.workloads.split(",")
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"--workloads: {', '.join(sorted(unknown))} is not among {', '.join(WORKLOADS)}")
    figures = measure(
        options, names, gpus[0].token if gpus else None, gpus[0].name if gpus else f"{platform.machine()} CPU core"
    )
    report(figures)
    if any("failed" in said for found in figures["workloads"].values() for said in found["fluid"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
