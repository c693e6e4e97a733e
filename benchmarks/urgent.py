"""An urgent group of three trials inside a running sweep, on real lanes: how soon it starts, and what the sweep loses.

    python benchmarks/urgent.py [--runs 3] [--json FILE]

The sweep has 64 trials that sleep, so that the devices of this machine are as fast as if each had a core; the urgent
ones are submitted while all devices are busy. Measured are, for each run:

* from the call to the start of the first iteration of the last of the urgent trials, and the seconds of a sweep's
  iteration, within which a device can be free at the earliest;
* iterations of the sweep that were lost or repeated: each is counted in the trial's own process, where it runs;
* the sweep's makespan with the urgent group, less that without it, over the urgent work / n.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import about

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.local import LocalBackend

#: How much longer than the urgent work / n the sweep may take, and how long after an iteration the urgent trials start.
MOST_GROWTH, MOST_DELAY_S = 1.05, 0.1


def train(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, float], int]]:
    """Sleeps, and notes each of its iterations in a file: number, begin and end."""
    done = 0 if state is None else state
    while True:
        begun = time.time()
        time.sleep(config["seconds"])
        done += 1
        with Path(config["log"]).open("a", encoding="utf-8") as log:
            log.write(json.dumps([config["name"], done, begun, time.time()]) + "\n")
        yield {"loss": 1.0 / done}, done


def trials(kind: str, count: int, iterations: int, seconds: float, folder: Path) -> list[Trial]:
    """Trials that sleep, with ids and logs of their own."""
    made = []
    for number in range(count):
        name = f"{kind}-{number}"
        config = {"seconds": seconds, "name": name, "log": str(folder / f"{name}.log")}
        made.append(Trial(train, config, trial_id=name, budget=iterations))
    return made


def ran(folder: Path, kind: str) -> list[tuple[str, int, float, float]]:
    """The iterations that trials of a kind ran: trial, number, begin and end."""
    lines = [line for log in sorted(folder.glob(f"{kind}-*.log")) for line in log.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]


def sweep(options: argparse.Namespace, *, urgent: bool) -> dict[str, Any]:
    """Runs the sweep, with or without the urgent group; returns what was measured."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        backend = LocalBackend([Device(index, kind="cpu") for index in range(options.devices)], preload=[])
        with FluidExecutor(backend, packing="off", run_dir=folder / "run", verbose=0) as executor:
            while len(executor.devices) < options.devices:
                time.sleep(0.01)
            group = trials("sweep", options.trials, options.iterations, options.seconds, folder)
            handle = executor.submit_trialgroup(TrialGroup(group, name="sweep"))
            figures: dict[str, Any] = {}
            if urgent:
                while len(ran(folder, "sweep")) < options.devices * options.iterations // 2:
                    time.sleep(0.01)
                # Not always at the same place of an iteration.
                time.sleep(options.seconds * options.offset)
                more = trials("urgent", options.urgent, options.urgent_iterations, options.seconds, folder)
                submitted = time.time()
                urgently = executor.submit_trialgroup(TrialGroup(more, name="urgent"), priority=10.0, preempt=True)
                figures["call_s"] = time.time() - submitted
                urgently.wait()
            handle.wait()
        swept, urged = ran(folder, "sweep"), ran(folder, "urgent")
        journal = (folder / "run" / "journal.jsonl").read_text().splitlines()
    times = Counter((name, number) for name, number, _, _ in swept)
    wanted = {(f"sweep-{one}", number + 1) for one in range(options.trials) for number in range(options.iterations)}
    figures["lost"] = len(wanted - times.keys())
    figures["repeated"] = sum(times.values()) - len(times)
    figures["makespan_s"] = max(end for *_, end in swept) - min(begin for _, _, begin, _ in swept)
    if urgent:
        first = sorted(begin for _, number, begin, _ in urged if number == 1)
        figures["starts_s"] = [begin - submitted for begin in first]
        figures["start_s"] = first[-1] - submitted
        figures["urgent_work_s"] = sum(end - begin for _, _, begin, end in urged)
        noted = [json.loads(line) for line in journal]
        victims = {line["trial_id"] for line in noted if line["what"] == "NotePreempted" and line.get("urgent_group")}
        placed = [line for line in noted if line["what"] == "NotePlaced" and line["trial_id"] in victims]
        figures["paused"] = len(victims)
        figures["moved"] = sum(line["iteration"] > 0 and not line.get("resident") for line in placed)
    return figures


def main() -> None:
    """Runs the sweeps in turns, and prints and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each sweep (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=10, help="of each trial (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of an iteration (default: %(default)s)")
    parser.add_argument("--urgent", type=int, default=3, help="urgent trials (default: %(default)s)")
    parser.add_argument("--urgent-iterations", type=int, default=20, help="of each of them (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows = []
    for run in range(options.runs):
        options.offset = run / options.runs
        without, within = sweep(options, urgent=False), sweep(options, urgent=True)
        share = within["urgent_work_s"] / options.devices
        row = {
            "start_s": round(within["start_s"], 4),
            "starts_s": [round(each, 4) for each in within["starts_s"]],
            "call_s": round(within["call_s"], 4),
            "paused": within["paused"],
            "moved": within["moved"],
            "lost": within["lost"] + without["lost"],
            "repeated": within["repeated"] + without["repeated"],
            "makespan_s": round(within["makespan_s"], 3),
            "makespan_without_s": round(without["makespan_s"], 3),
            "urgent_work_over_n_s": round(share, 3),
            "growth_over_urgent_work": round((within["makespan_s"] - without["makespan_s"]) / share, 3),
        }
        rows.append(row)
        print(row, flush=True)
    summary = {
        "latest_start_s": max(row["start_s"] for row in rows),
        "allowed_start_s": round(options.seconds + MOST_DELAY_S, 3),
        "lost": sum(row["lost"] for row in rows),
        "repeated": sum(row["repeated"] for row in rows),
        "growth_over_urgent_work": round(statistics.median(row["growth_over_urgent_work"] for row in rows), 3),
        "allowed_growth": MOST_GROWTH,
    }
    print(summary)
    if options.json:
        facts = {
            **about(),
            "devices": options.devices,
            "trials": options.trials,
            "iteration_s": options.seconds,
        }
        options.json.write_text(json.dumps({**facts, **summary, "runs": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
