"""Measures what a process of its own costs a trial, against trials that run one after another in the same processes.

    python benchmarks/isolation.py [--runs 3] [--parts starts,empty,busy,leaks,resting,shared,kills] [--json FILE]

* starts: from the end of a trial's clean-up to the next one's set-up, on one device, PyTorch imported beforehand.
* empty: 256 trials of one empty iteration on two devices, without PyTorch. busy: 32 trials of 10 iterations of 10 ms.
* leaks: the memory of a trial's process, where each of 12 trials leaks 20 MB.
* resting: savable trials that rest in a process each, 250 a device: the memory that each process shares with no other;
  then few may rest, and all are extended: how many were restored from host memory, and how many were lost.
* shared: milliseconds that ``fluid.shared`` takes in a process that is not the first, of an array of 100 MB.
* kills: the lane of a trial is killed (SIGKILL) several times: seconds until its next iteration begins, with and
  without a spare lane, where an import statement names PyTorch, and where a lane finds it only when it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import machine, run_apart

#: Seconds after which a measurement has failed.
_PATIENCE_S = 300.0
#: Trials in a row of ``starts``, of which the first ones are left out; of ``empty``, ``busy`` and ``leaks``.
_STARTS, _LEFT_OUT, _EMPTY, _BUSY, _LEAKS = 60, 10, 256, 32, 12
#: Batches of an iteration of ``kills``, about 0.2 s; seconds between two kills, and until the first.
_BATCHES, _PAUSE_S, _BEFORE_S = 300, 1.0, 10.0


def executor(folder: str, **options: Any) -> Any:
    from fluid import FluidExecutor

    return FluidExecutor("local", run_dir=Path(folder, "run"), verbose=0, **{"packing": "off", **options})


def seconds_of(function: Any, count: int, devices: int, isolation: str) -> dict[str, float]:
    """Seconds from the submission of so many trials to the end of the last, in a session that has just begun."""
    from fluid import Trial, TrialGroup

    with tempfile.TemporaryDirectory() as folder, executor(folder, devices=devices, isolation=isolation) as session:
        budget = 1 if function.__name__ == "empty" else 10
        begun = time.perf_counter()
        handle = session.submit_trialgroup(TrialGroup([Trial(function, {}, budget=budget) for _ in range(count)]))
        handle.wait()
        seconds = time.perf_counter() - begun
        handle.raise_failures()
    return {"seconds": seconds}


def empty(isolation: str) -> dict[str, float]:
    from isolation_workload import empty as function

    return seconds_of(function, _EMPTY, 2, isolation)


def busy(isolation: str) -> dict[str, float]:
    from isolation_workload import busy as function

    return seconds_of(function, _BUSY, 2, isolation)


def starts(spares: int) -> dict[str, float]:
    """Milliseconds from the end of a trial's clean-up to the next one's set-up: the median, and 9 of 10."""
    from isolation_workload import Noting

    from fluid import Trial, TrialGroup

    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.txt")
        with executor(folder, devices=1, spare_lanes=spares) as session:
            trials = [Trial(Noting, {"notes": str(notes)}) for _ in range(_STARTS)]
            handle = session.submit_trialgroup(TrialGroup(trials))
            handle.wait()
            handle.raise_failures()
        lines = [line.split() for line in notes.read_text(encoding="ascii").splitlines()]
    set_up = sorted(float(at) for at, what, _ in lines if what == "setup")[1:]
    ended = sorted(float(at) for at, what, _ in lines if what == "end")
    gaps = [1e3 * (later - before) for before, later in zip(ended, set_up, strict=False)][_LEFT_OUT:]
    return {"median_ms": statistics.median(gaps), "p90_ms": statistics.quantiles(gaps, n=10)[-1]}


def leaks(isolation: str) -> dict[str, float]:
    """The memory of the processes of the first and of the last trial, MB."""
    from isolation_workload import leaking

    from fluid import Trial, TrialGroup

    with tempfile.TemporaryDirectory() as folder, executor(folder, devices=1, isolation=isolation) as session:
        handle = session.submit_trialgroup(TrialGroup([Trial(leaking) for _ in range(_LEAKS)]))
        found = [result.metrics["rss_mb"] for result in handle.results()]
    return {"first_mb": found[0], "last_mb": found[-1]}


def private_mb(pid: int) -> float:
    """Memory that a process shares with no other one, MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty")) / 1e3


def resting(trials: int) -> dict[str, Any]:
    """Trials that rest in their processes, and go on after most of these were ended for want of memory."""
    from isolation_workload import Resting

    from fluid import Trial, TrialGroup
    from fluid.session.options import IdleLanes

    IdleLanes.look = lambda self, now: None  # type: ignore[method-assign]  # It is set here.
    with tempfile.TemporaryDirectory() as folder, executor(folder, devices=2) as session:
        lanes = session._session._state.lanes
        lanes.most_idle = lanes.most_processes = trials
        group = TrialGroup([Trial(Resting, {}, follow_up_iterations=1, trial_id=f"t{n}") for n in range(trials)])
        handle = session.submit_trialgroup(group)
        handle.wait()
        pids = {result.metrics["pid"] for result in handle.results()}
        memory = [private_mb(pid) for pid in pids]
        lanes.most_idle = 16  # From now on, as if memory lacked: states are saved as further trials come to rest.
        for number in range(trials):
            handle.extend(f"t{number}", 1)
        handle.wait()
        handle.raise_failures()
        results = [result.metrics for result in handle.results() if result.iteration == 2]
    return {
        "processes": len(pids),
        "private_mb": statistics.median(memory),
        "most_mb": max(memory),
        "restored": sum(result["was_restored"] for result in results),
        "lost": trials - sum(result["count"] == 2 for result in results),
    }


def shared(trials: int) -> dict[str, float]:
    """Milliseconds in which trials, each in a process of its own, get data that the first one has loaded."""
    from isolation_workload import attaching

    from fluid import Trial, TrialGroup

    with tempfile.TemporaryDirectory() as folder, executor(folder, devices=1) as session:
        handle = session.submit_trialgroup(TrialGroup([Trial(attaching) for _ in range(trials)]))
        found = [result.metrics for result in handle.results()]
    later = sorted(metrics["ms"] for metrics in found if not metrics["loaded"])
    return {"loaded": len(found) - len(later), "median_ms": statistics.median(later), "most_ms": later[-1]}


def first(path: Path, what: str, after: float, but: int | None = None) -> tuple[float, int]:
    """Waits for a note of that kind, of another process than ``but``; returns its time and its process."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for at, kind, pid in (line.split() for line in lines if line.endswith("\n")):
            if kind == what and float(at) > after and int(pid) != but:
                return float(at), int(pid)
        time.sleep(0.002)
    raise TimeoutError(f"no {what} in {_PATIENCE_S:g} s")


def kills(way: str, spares: int, count: int) -> dict[str, float]:
    """Kills the lane of a trial so many times; seconds until it is set up again, and until it iterates."""
    import isolation_workload

    from fluid import Trial, TrialGroup

    seconds: dict[str, list[float]] = {"setup": [], "iteration": []}
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "0.txt")
        options: dict[str, Any] = {"devices": 1, "max_failures": count + 1, "spare_lanes": spares}
        with executor(folder, **options) as session:
            trainable = getattr(isolation_workload, way)
            session.submit_trialgroup(TrialGroup([Trial(trainable, {"notes": folder, "batches": _BATCHES}, 100_000)]))
            _, pid = first(note, "iteration", 0.0)
            time.sleep(_BEFORE_S)
            for _ in range(count):
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                for what, found in seconds.items():
                    at, new = first(note, what, killed, pid)
                    found.append(at - killed)
                pid = new
                time.sleep(_PAUSE_S)
    return {f"{what}_s": statistics.median(found) for what, found in seconds.items()}


_MEASURED: dict[str, Callable[..., Any]] = {
    "starts": starts,
    "empty": empty,
    "busy": busy,
    "leaks": leaks,
    "resting": resting,
    "shared": shared,
    "kills": kills,
}


def apart(part: str, *arguments: str | int) -> Any:
    """Runs one measurement in a process of its own: the driver must not have loaded PyTorch."""
    what = " ".join(map(str, (part, *arguments)))
    found = run_apart(__file__, ["--only", *what.split()], what=what, timeout=2 * _PATIENCE_S)
    if found is None:
        raise SystemExit(f"{what} failed")
    print(f"  {what}: {', '.join(f'{name} {value:.4g}' for name, value in found.figures.items())}", flush=True)
    return found.figures


def pairs(part: str, figure: str, runs: int) -> dict[str, Any]:
    """Runs a part with processes of their own and with shared ones in turns; the ratio of the medians."""
    found: dict[str, list[float]] = {"trial": [], "lane": []}
    for number in range(runs):
        for isolation in ("trial", "lane") if number % 2 else ("lane", "trial"):
            found[isolation].append(apart(part, isolation)[figure])
    ratio = statistics.median(found["trial"]) / statistics.median(found["lane"])
    print(f"{part}: {ratio:.2f} times as long with a process of its own for each trial")
    return {**found, "ratio": ratio}


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each way; the medians count (default: %(default)s)"
    )
    parser.add_argument("--parts", default=",".join(_MEASURED), help="which (default: all)")
    parser.add_argument("--trials", type=int, default=500, help="that rest (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="of each way (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        part, *arguments = options.only
        print(json.dumps(_MEASURED[part](*(int(each) if each.isdigit() else each for each in arguments))))
        return
    parts: set[str] = set(options.parts.split(","))
    if unknown := parts - _MEASURED.keys():
        parser.error(f"--parts: {', '.join(sorted(unknown))}: must be of {', '.join(_MEASURED)}")
    figures: dict[str, Any] = {}
    if "starts" in parts:
        for spares in (1, 0):
            runs = figures[f"starts, {spares} spare"] = [apart("starts", spares) for _ in range(options.runs)]
            median = statistics.median(each["median_ms"] for each in runs)
            print(f"starts: {median:.2f} ms in the median, {spares} spare")
    if "empty" in parts:
        figures["empty"] = pairs("empty", "seconds", options.runs)
    if "busy" in parts:
        figures["busy"] = pairs("busy", "seconds", options.runs)
    if "leaks" in parts:
        figures["leaks"] = {isolation: apart("leaks", isolation) for isolation in ("trial", "lane")}
    if "resting" in parts:
        figures["resting"] = apart("resting", options.trials)
    if "shared" in parts:
        figures["shared"] = apart("shared", _STARTS)
    if "kills" in parts:
        for way in ("Named", "Found"):
            for spares in (1, 0):
                figures[f"kills, {way}, {spares} spare"] = apart("kills", way, spares, options.kills)
    if options.json:
        about = {**machine(), "system": platform.release(), "python": sys.version.split()[0]}
        written = {"machine": about, "date": time.strftime("%Y-%m-%d"), **figures}
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
