"""Measures what eight lanes of the CIFAR-10 example take to have the data: host memory and seconds.

    python benchmarks/shared_data.py [--part images] [--data DIR] [--lanes 8] [--runs 3] [--json FILE]
    python benchmarks/shared_data.py --part with_parameters [--size MB] [--lanes 8] [--runs 3] [--json FILE]

The data are those of ``--data``, a folder with CIFAR-10, or random images in files of CIFAR-10's size. One trial on
each of eight CPU devices sets the example up, reads all of its data, and is held there: the first one alone, the second
one alone, then the others. They load through ``fluid.shared``, or each lane for itself ("own"), or not at all ("none").
The memory of the data is the proportional set size (PSS) of all lanes, less that of lanes without data. The ways take
turns. The part ``with_parameters`` measures data of ``tune.with_parameters``: see shared_parameters.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import machine

HERE = Path(__file__).resolve().parent
#: Seconds after which a lane has failed.
_PATIENCE_S = 300.0


def pss_of(pid: int) -> float:
    """Returns the proportional set size of a process, bytes: of a shared page each process counts its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024.0 * float(line.split()[1]) for line in lines if line.startswith("Pss:"))


def notes_of(folder: Path, numbers: range) -> list[dict[str, Any]]:
    """Waits until these trials hold their data; returns what they noted."""
    deadline = time.monotonic() + _PATIENCE_S
    paths = [folder / f"{number}.json" for number in numbers]
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {sorted(path.name for path in folder.iterdir())} are there")
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in paths]


def measure(mode: str, data: str, lanes: int) -> dict[str, Any]:
    """Returns the bytes of the data and of all lanes, and the seconds of each lane, the first lane first."""
    from shared_data_workload import Held

    from fluid import FluidExecutor, Trial, TrialGroup

    with tempfile.TemporaryDirectory() as folder:
        (notes := Path(folder, "notes")).mkdir()
        fixed = {"shrink": 16, "images": None, "data": data, "mode": mode, "notes": str(notes)}
        widths = {"conv_1": 32, "conv_2": 64, "dense_1": 128}
        tuned = {"lr": 0.01, "momentum": 0.9, "dropout_1": 0.1, "dropout_2": 0.1, "seed": 0}
        trials = [
            Trial(Held, {**widths, **tuned, "fixed": {**fixed, "number": number}}, budget=1) for number in range(lanes)
        ]
        options: dict[str, Any] = {"devices": lanes, "packing": "off", "max_width": 1, "verbose": 0}
        with FluidExecutor("local", run_dir=Path(folder, "run"), **options) as executor:
            handles, noted = [], []
            for begin, end in ((0, 1), (1, 2), (2, lanes)):
                handles.append(executor.submit_trialgroup(TrialGroup(trials[begin:end])))
                noted += notes_of(notes, range(begin, end))
            pids = [note["pid"] for note in noted]
            if len(set(pids)) != lanes:
                raise RuntimeError(f"{lanes} trials are in {len(set(pids))} lanes")
            pss = list(map(pss_of, pids))
            (notes / "go").touch()
            for handle in handles:
                handle.wait()
                handle.raise_failures()
    seconds = {kind: [note[kind] for note in noted] for kind in ("loading_s", "reading_s")}
    return {"bytes": noted[0]["bytes"], "pss_bytes": sum(pss), "lane_pss_bytes": pss, **seconds}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns medians over the runs: by way, memory in times of the data, and seconds of the first and later lanes."""
    size = runs["shared"][0]["bytes"]
    without = statistics.median(run["pss_bytes"] for run in runs["none"])
    found: dict[str, Any] = {"data_bytes": size}
    for mode in ("shared", "own"):
        taken = [run["pss_bytes"] - without for run in runs[mode]]
        first = statistics.median(run["loading_s"][0] for run in runs[mode])
        second = statistics.median(run["loading_s"][1] for run in runs[mode])
        later = [seconds for run in runs[mode] for seconds in run["loading_s"][2:]]
        found[mode] = {
            "memory_bytes": statistics.median(taken),
            "memory_times_data": statistics.median(taken) / size,
            "first_loading_s": first,
            "second_loading_s": second,
            "second_by_first": second / first,
            "later_loading_s": statistics.median(later),
            "first_reading_s": statistics.median(run["reading_s"][0] for run in runs[mode]),
            "second_reading_s": statistics.median(run["reading_s"][1] for run in runs[mode]),
        }
    return found


def measure_images(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the CIFAR-10 example, and prints the figures."""
    sys.path.insert(1, str(HERE.parent / "examples"))
    from shared_data_workload import MODES, make_cifar10

    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            make_cifar10(Path(made))
        data = os.path.abspath(options.data or made)
        for _ in range(options.runs):
            for mode in MODES:
                runs[mode].append(measure(mode, data, options.lanes))
    found = summary(runs)
    print(f"{options.lanes} lanes, {found['data_bytes'] / 1e6:.0f} MB of data")
    for mode in ("shared", "own"):
        figures = found[mode]
        print(
            f"{mode}: {figures['memory_times_data']:.2f} times the data in memory; first loading "
            f"{figures['first_loading_s']:.3f} s, second {figures['second_loading_s']:.4f} s "
            f"({figures['second_by_first']:.3f} of it), the others together {figures['later_loading_s']:.4f} s"
        )
    return {**found, "runs": runs}


def measure_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Measures data of ``tune.with_parameters``, and prints the figures."""
    from shared_parameters import WAYS, Measuring, show_parameters, summary_of_parameters

    size = options.size * 1_000_000 // 2
    measuring = Measuring(pss_of, options.lanes, size, _PATIENCE_S)
    runs: dict[str, list[dict[str, Any]]] = {f"{runner} {mode}": [] for runner, mode in WAYS}
    for _ in range(options.runs):
        for runner, mode in WAYS:
            runs[f"{runner} {mode}"].append(measuring.measure(runner, mode))
    found = summary_of_parameters(runs, size)
    show_parameters(found, options.lanes)
    return {**found, "runs": runs}


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("images", "with_parameters"), default="images", help="what to measure")
    parser.add_argument("--data", metavar="DIR", help="folder with CIFAR-10; random images of its size by default")
    parser.add_argument("--size", metavar="MB", type=int, default=154, help="data of with_parameters, megabytes")
    parser.add_argument("--lanes", type=int, default=8, help="lanes, one per CPU device")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each way; the medians count")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the figures to this file, beside those of other data"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), str(HERE.parent / "examples"), os.environ.get("PYTHONPATH", "")))
    )
    found = measure_images(options) if options.part == "images" else measure_parameters(options)
    if options.json:
        written = {
            "machine": {**machine(), "torch": torch.__version__, "system": platform.release()},
            "date": time.strftime("%Y-%m-%d"),
            "lanes": options.lanes,
            **found,
        }
        path = Path(options.json)
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        of_images = "random images" if options.data is None else "images of --data"
        kept[of_images if options.part == "images" else options.part] = written
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
