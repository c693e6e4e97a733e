"""Trials that take turns in one lane: mean completion, rounds, and memory.

    python benchmarks/lanes.py [--parts srtf-simulated,srtf-real,rounds,memory] [--device cpu|gpu] [--json FILE]

* ``srtf-simulated``: 100 jobs of the shape of Salus' trace (``salus_trace.py``) arrive at one simulated device. Their
  mean completion in one lane, the shortest remaining time first, against first come, first served. Nothing is known of
  a job before its first iteration. The best possible ratio of each trace, with lengths known, is beside it.
* ``srtf-real``: the same shape in seconds, on one CPU device of this machine. Jobs multiply matrices, and wait as for a
  GPU. Traces are those of the first 100 for which the best possible ratio is nearest to the published one.
* ``rounds``: 16 configurations on one CPU device in rounds, against one after another: until all have a first result,
  and until all have ended.
* ``memory``: 64 small trials in one lane against a process each: the proportional set size (PSS) of the lanes, where
  each process counts its part of a shared page, or with ``--device gpu`` the bytes that are used on the device.

Parts that other programs disturb alternate between the ways in an order that turns from run to run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from lanes_workload import Busy, Small
from measuring import machine
from salus_trace import (
    PUBLISHED_RATIO,
    TOTAL_S,
    TraceJob,
    first_come_first_served,
    mean_completion,
    salus_trace,
    shortest_remaining_first,
)

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import ReportEnd
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.gpu.nvml import find_gpus, used_bytes
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.testing.play import Session

HERE = Path(__file__).resolve().parent
#: Seconds after which something has failed.
_PATIENCE_S = 300.0
#: Least and most seconds of an iteration on a real device: lanes need some tenths of a millisecond for each.
_REAL_ITERATION_S = (0.005, 0.02)
#: Executor's options by way.
WAYS: dict[str, dict[str, Any]] = {
    "fifo": {"planner": "fifo", "packing": "off", "group_policy": "fifo"},
    "srtf": {"packing": "lane", "lane_policy": "srtf", "max_packing": 128},
}


# --- Shortest remaining time first


def simulate(trace: Sequence[TraceJob], way: str) -> list[float]:
    """When each job ends on one simulated device, seconds; nothing is known of a job before it runs."""
    jobs, takes_turns = {job.name: job for job in trace}, way == "srtf"
    backend = SimulatedBackend(
        lambda name, _: Truth(jobs[name].iteration_s),
        [Device(0)],
        record=False,
        lane_policy="srtf" if takes_turns else None,
    )
    planner = make_planner("portfolio" if takes_turns else "fifo", c=1, d=1)
    how = {"turns": 128} if takes_turns else {"group_policy": "fifo"}
    engine = EngineState(planner, max_packing=1, **how)
    session = Session(engine, backend, checked=False, patience_s=math.inf)
    for job in trace:
        while backend.now() < job.at:
            session.step(latest=job.at)
        spec = TrialSpec(job.name, job.iterations, profile_key=job.name)
        session.tell(GroupSubmitted(job.at, job.name, (spec,)))
    session.run()
    ends = {end.trial_id: end.at for end in session.told(ReportEnd)}
    return [ends[job.name] for job in trace]


def srtf_simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Mean completions of traces under both ways, and their ratios."""
    rows = []
    for seed in range(options.seeds):
        trace = salus_trace(seed, jobs=options.jobs)
        fifo, srtf = (mean_completion(trace, simulate(trace, way)) / 60.0 for way in WAYS)
        best, worst = (
            mean_completion(trace, policy(trace)) / 60.0
            for policy in (shortest_remaining_first, first_come_first_served)
        )
        row = {"fifo_min": fifo, "srtf_min": srtf, "ratio": fifo / srtf, "possible_ratio": worst / best}
        rows.append({name: round(value, 3) for name, value in row.items()})
    return {"seeds": options.seeds, "jobs": options.jobs, **summary_of(rows), "runs": rows}


def summary_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Geometric mean, least and most of the ratios, and that of what was possible."""
    ratios = [row["ratio"] for row in rows]
    return {
        "ratio": round(geometric_mean(ratios), 3),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "possible_ratio": round(geometric_mean(row["possible_ratio"] for row in rows), 3),
    }


def run_trace(trace: Sequence[TraceJob], way: str) -> tuple[float, float]:
    """Runs jobs on one CPU device of this machine; returns the mean seconds from arrival to end, and those of all."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with FluidExecutor("local", [Device(0, kind="cpu")], run_dir=run, verbose=0, **WAYS[way]) as executor:
            warm_up(executor)
            begun, handles = time.monotonic(), []
            for job in trace:
                time.sleep(max(0.0, begun + job.at - time.monotonic()))
                trial = Trial(Busy, {"seconds": job.iteration_s}, budget=job.iterations, profile_key=job.name)
                handles.append(executor.submit_trialgroup(TrialGroup([trial], name=job.name)))
            for handle in handles:
                if not handle.wait(timeout=_PATIENCE_S):
                    raise TimeoutError(f"{handle.name} has not ended")
                handle.raise_failures()
        found = completions(run)
    return fmean(found.values()), max(job.at + found[job.name] for job in trace)


def warm_up(executor: FluidExecutor) -> None:
    """Runs one iteration, so that the lane runs."""
    handle = executor.submit_trialgroup(TrialGroup([Trial(Busy, {"seconds": 0.01}, budget=1)], name="warm-up"))
    if not handle.wait(timeout=_PATIENCE_S):
        raise TimeoutError("the warm-up has not ended")


def completions(run: Path) -> dict[str, float]:
    """Seconds from the submission of each group to the end of its last trial, by name, given the run folder."""
    lines = map(json.loads, (run / "trials.jsonl").read_text(encoding="utf-8").splitlines())
    names = {line["group"]: line["name"] for line in lines if "name" in line}
    begun, ended = dict[str, float](), dict[str, float]()
    for line in map(json.loads, (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["what"] == "GroupSubmitted":
            begun.setdefault(line["group_id"], line["at"])
        elif line["what"] == "ReportEnd":
            ended[line["group_id"]] = line["at"]
    return {name: ended[group] - begun[group] for group, name in names.items() if name != "warm-up"}


def in_turn(ways: Sequence[str], run: int) -> list[str]:
    """The ways in the order of a run."""
    return [*ways[run % len(ways) :], *ways[: run % len(ways)]]


def like_the_published(count: int) -> list[int]:
    """Seeds of the traces that are most like the published one, by what there is to gain."""

    def distance(seed: int) -> float:
        trace = salus_trace(seed)
        means = [
            mean_completion(trace, policy(trace)) for policy in (first_come_first_served, shortest_remaining_first)
        ]
        return abs(math.log(means[0] / means[1] / PUBLISHED_RATIO))

    return sorted(range(100), key=distance)[:count]


def srtf_real(options: argparse.Namespace) -> dict[str, Any]:
    """Mean completions of short traces on this machine under both ways, and their ratios."""
    rows = []
    for run, seed in enumerate(like_the_published(options.runs)):
        scale = options.seconds / TOTAL_S
        trace = salus_trace(seed, jobs=options.jobs, scale=scale, iteration_s=_REAL_ITERATION_S)
        means = {way: run_trace(trace, way) for way in in_turn(list(WAYS), run)}
        best, worst = (
            mean_completion(trace, policy(trace)) for policy in (shortest_remaining_first, first_come_first_served)
        )
        row = {f"{way}_{name}": value for way in WAYS for name, value in zip(("s", "all_s"), means[way], strict=True)}
        row |= {"seed": seed, "ratio": means["fifo"][0] / means["srtf"][0], "possible_ratio": worst / best}
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(f"  {rows[-1]}", flush=True)
    return {"jobs": options.jobs, "work_s": options.seconds, **summary_of(rows), "runs": rows}


# --- Rounds


def run_configurations(options: argparse.Namespace, **how: Any) -> dict[str, float]:
    """Runs configurations on one device; returns seconds from their submission, and of one iteration.

    They are until the last one has its first result, and until all have ended.
    """
    trials = [
        Trial(Busy, {"seconds": options.chunk_s}, budget=options.chunks, trial_id=f"config-{number}")
        for number in range(options.configurations)
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with FluidExecutor("local", [Device(0, kind="cpu")], run_dir=run, verbose=0, **how) as executor:
            warm_up(executor)
            first: dict[str, float] = {}
            seconds = []
            begun = time.monotonic()
            handle = executor.submit_trialgroup(TrialGroup(trials, name="configurations"))
            for result in handle.results():
                first.setdefault(result.trial_id, time.monotonic() - begun)
                seconds.append(result.seconds)
            handle.raise_failures()
        total = completions(run)["configurations"]
    return {"first_results_s": max(first.values()), "total_s": total, "chunk_s": median(seconds)}


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds against one configuration after another."""
    ways: dict[str, dict[str, Any]] = {"rounds": {"rounds": True}, "one by one": {"packing": "off"}}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for run in range(options.runs):
        for way in in_turn(list(ways), run):
            found[way].append(run_configurations(options, **ways[way]))
            print(f"  {way}: {found[way][-1]}", flush=True)
    pairs = list(zip(found["rounds"], found["one by one"], strict=True))
    chunks = [one["first_results_s"] / (options.configurations * other["chunk_s"]) for one, other in pairs]
    totals = [one["total_s"] / other["total_s"] for one, other in pairs]
    return {
        "configurations": options.configurations,
        "chunks": options.chunks,
        "first_results_over_chunks": round(median(chunks), 4),
        "total_over_one_by_one": round(median(totals), 4),
        "one_by_one_first_results_over_chunks": round(
            median(one["first_results_s"] / (options.configurations * one["chunk_s"]) for one in found["one by one"]), 3
        ),
        "runs": {way: [{name: round(value, 4) for name, value in row.items()} for row in found[way]] for way in ways},
    }


# --- Memory


def pss_of(pid: int) -> float:
    """The proportional set size of a process, bytes: of a shared page each process counts its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024.0 * float(line.split()[1]) for line in lines if line.startswith("Pss:"))


def used_on_gpu() -> float:
    """Bytes that are used on the first GPU."""
    used = used_bytes(find_gpus()[0].token)
    if used is None:
        raise RuntimeError("NVML does not tell what is used on the GPU")
    return used


def in_lanes(options: argparse.Namespace, devices: list[Device], measured: Callable[[set[int]], float]) -> float:
    """The bytes of trials that all train, on these devices; a device has one lane."""
    config = {"device": "cpu" if options.device == "cpu" else "cuda", "rest_s": 0.005}
    trials = [Trial(Small, config, budget=10**6) for _ in range(options.trials)]
    how = {"packing": "lane", "lane_policy": "fair", "max_packing": max(2, options.trials)}
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run")
        executor = stack.enter_context(FluidExecutor("local", devices, run_dir=run, verbose=0, **how))
        handle = executor.submit_trialgroup(TrialGroup(trials, name="small"))
        pids: dict[str, int] = {}
        for result in handle.results():
            if result.iteration >= 2:
                pids[result.trial_id] = int(result.metrics["pid"])
            if len(pids) == len(trials):
                break
        handle.raise_failures()
        lanes = set(pids.values())
        if len(lanes) != len(devices):
            raise RuntimeError(f"{len(trials)} trials on {len(devices)} devices are in {len(lanes)} lanes")
        found = measured(lanes)
        for trial_id in pids:
            handle.stop(trial_id)
        handle.wait(timeout=_PATIENCE_S)
    return found


def in_own_processes(options: argparse.Namespace) -> float:
    """The bytes on the GPU of as many trials in a process of its own each."""

    def held() -> Iterator[subprocess.Popen[str]]:
        for _ in range(options.trials):
            yield stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(HERE / "lanes_workload.py"), "cuda"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    with ExitStack() as stack:
        processes = list(held())
        for process in processes:
            if process.stdout is None or not process.stdout.readline().strip():
                raise RuntimeError("a trial in a process of its own has failed")
        found = used_on_gpu()
        for process in processes:
            process.communicate()
    return found


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of trials in one lane, and in a process each."""
    if options.device == "gpu":
        gpu = find_gpus()[0]
        before = used_on_gpu()
        device = Device(0, kind="gpu", memory_bytes=gpu.memory_bytes, model=gpu.name)
        lane = in_lanes(options, [device], lambda _: used_on_gpu()) - before
        processes = in_own_processes(options) - before
    else:
        lane, processes = (
            in_lanes(
                options, [Device(index, kind="cpu") for index in range(count)], lambda pids: sum(map(pss_of, pids))
            )
            for count in (1, options.trials)
        )
    return {
        "device": options.device,
        "trials": options.trials,
        "one_lane_bytes": lane,
        "a_process_each_bytes": processes,
        "lane_over_processes": round(lane / processes, 4),
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "srtf-simulated": srtf_simulated,
    "srtf-real": srtf_real,
    "rounds": rounds,
    "memory": memory,
}


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, comma-separated (default: all)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where the memory is measured")
    parser.add_argument("--seeds", type=int, default=20, help="traces that are simulated (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of what is real (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=100, help="of a trace (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="work of 100 real jobs (default: %(default)s)")
    parser.add_argument("--configurations", type=int, default=16, help="in rounds (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=8, help="iterations of each (default: %(default)s)")
    parser.add_argument("--chunk-s", type=float, default=0.1, help="seconds of one (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=64, help="whose memory is measured (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file of the results; what it has of other parts stays")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the parts, and prints and writes what came of them."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    names = options.parts.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"--parts: {', '.join(unknown)} is not among {', '.join(PARTS)}")
    for name in names:
        figures = PARTS[name](options)
        print(name, {key: value for key, value in figures.items() if key != "runs"}, flush=True)
        if options.json:
            earlier = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
            facts = {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
            earlier[name] = {**facts, **figures}
            options.json.write_text(json.dumps(earlier, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
