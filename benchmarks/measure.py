"""Measures all figures of docs/benchmarks.md: each command, on an idle machine, in two runs or more.

    python benchmarks/measure.py --runs 2 --data DIR                # all of them: about an hour
    python benchmarks/measure.py --runs 2 overhead isolation        # only these
    python benchmarks/measure.py --list

Each command of :data:`COMMANDS` writes its figures as JSON. They go to benchmarks/results/NAME.json, with the command,
the machine, the date, and for each run the load before it and the seconds that it took. A file keeps its runs of the
same day and command; ``--runs`` says how many it is to have in the end, so that a measurement that was interrupted goes
on. Run by run, all names take their turn. A command waits until the machine is idle, for five minutes at most; what is
simulated need not (``--busy``).

DIR holds YAHPO Gym's ``lcbench``, and ``cifar10-10k.npz`` or CIFAR-10 itself, for what is rehearsed; without it these
commands are left out.
``python scripts/benchmarks_page.py`` then writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from measuring import HERE, machine, write_json

RESULTS = HERE / "results"
#: Seconds after which a command is given up.
LIMIT_S = 900.0
#: Seconds for which a command waits for an idle machine.
PATIENCE_S = 300.0
#: Share of the machine's CPU time that other programs may use before a command begins.
IDLE = 0.15


class Command(NamedTuple):
    """A benchmark with its options, and the option that names the file for its figures."""

    words: str
    option: str = "--json"

    def shown(self) -> str:
        """Returns the command as a user types it."""
        return f"python benchmarks/{self.words}"


COMMANDS = {
    "overhead": Command("overhead.py --runs 1 --systems fluid_local,fluid_ray,optuna_threads,ray_reuse_actors"),
    "isolation": Command("isolation.py --runs 1 --kills 3"),
    "ray_tune": Command("ray_tune.py --runs 1 --systems fluid,fluid_lane,ray_reuse_actors"),
    "ray_tune_as_it_is": Command("ray_tune.py --runs 1 --systems fluid,ray_default --workloads busy"),
    "joblib_search": Command("joblib_search.py --runs 3 --search svm --search tree --search large"),
    "transformers_search": Command("transformers_search.py --runs 1"),
    "xgboost_study": Command("xgboost_study.py --runs 1 --trials 24"),
    "fused_sweeps": Command("fused_sweeps.py --part native --runs 1"),
    "lanes": Command("lanes.py --parts srtf-real,rounds --runs 1 --seconds 30"),
    "shared_prefixes": Command("shared_prefixes.py --rounds 1"),
    "pbt": Command("pbt.py --seeds 1 --ray-seeds 1 --stock-seeds 0"),
    "urgent": Command("urgent.py --runs 1"),
    "tune_scalability": Command("tune_scalability.py --part asha,checkpoints --systems fluid,ray_reuse_actors"),
    "paper_sleep": Command(
        "paper.py --workloads sleep --devices 8 --systems fluid,fluid_fifo --algos random,hyperband,asha"
    ),
    "fork_exploits": Command("fork_exploits.py --rounds 3"),
    "elastic_resize": Command("elastic_resize.py --runs 1 --models 10M --backends torch"),
    "result_costs": Command("result_costs.py"),
    "torture": Command("torture.py --seed 20261129 --faults 200 --seconds 120 --jobs 2", "--state"),
    "soak": Command("soak.py --parts native --trials 4000"),
    "damaged_folders": Command("damaged_folders.py --quick"),
    "planner": Command("planner.py"),
    "paper_shapes": Command("paper_shapes.py --seeds 2"),
    "calibration": Command("calibration.py --groups 200"),
    "deadlines": Command("deadlines.py --quick", "--out"),
    "groups": Command("groups.py --seeds 1", "--out"),
    "group_deadlines": Command("group_deadlines.py --seeds 3 --mixed 0", "--out"),
    "quick_checks": Command("quick_checks.py"),
    "bohb": Command("bohb.py --data DIR --seeds 2", "--record"),
    "fidelity": Command("fidelity.py --data DIR --workloads cifar10", "--output"),
    "rehearsal": Command("rehearsal.py --data DIR --tasks 3945", "--out"),
}


def busy_share(seconds: float = 3.0) -> float:
    """Returns the share of all cores' time in which they are busy, in the next seconds."""

    def times() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
        return sum(numbers), numbers[3] + numbers[4]

    all_before, idle_before = times()
    time.sleep(seconds)
    all_after, idle_after = times()
    return 1.0 - (idle_after - idle_before) / max(1, all_after - all_before)


def wait_until_idle(limit_s: float) -> dict[str, float]:
    """Waits for an idle machine, or until the limit; returns what the load is then."""
    end = time.monotonic() + limit_s
    while (busy := busy_share()) > IDLE and time.monotonic() < end:
        pass
    return {"busy_share": round(busy, 3), "load_1_min": round(os.getloadavg()[0], 2)}


def read_figures(path: Path) -> Any:
    """Returns what a command wrote, JSON or lines of JSON, without what stands beside the figures of all runs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    common = ("command", "date", "machine", "options")
    return {key: value for key, value in json.loads(text).items() if key not in common}


def measure(command: Command, data: Path | None, idle_limit_s: float) -> dict[str, Any] | None:
    """Runs a command once; returns its entry among the runs, or ``None`` if it failed."""
    load = wait_until_idle(idle_limit_s)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / ("figures.jsonl" if command.option == "--state" else "figures.json")
        words = [str(data) if word == "DIR" else word for word in command.words.split()]
        begun = time.monotonic()
        with open(Path(folder) / "output", "w+", encoding="utf-8") as output:
            try:
                ended = subprocess.run(
                    [sys.executable, str(HERE / words[0]), *words[1:], command.option, str(figures)],
                    cwd=folder, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S,
                    env={**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                ended = f"not ended within {LIMIT_S:.0f} s"
            seconds = time.monotonic() - begun
            output.seek(0)
            text = output.read()
        if ended or not figures.exists():
            print(f"  failed: {ended}\n{text[-3000:]}", file=sys.stderr)
            return None
        return {"load": load, "seconds": round(seconds, 1), "figures": read_figures(figures)}


def runs_of(path: Path, command: Command, today: str) -> list[dict[str, Any]]:
    """Returns the runs of a file that count: those of this command and day."""
    if not path.exists():
        return []
    old = json.loads(path.read_text(encoding="utf-8"))
    return list(old["runs"]) if (old.get("command"), old.get("date")) == (command.shown(), today) else []


def main() -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
    parser.add_argument("--runs", type=int, default=2, help="of each, in the end (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with lcbench and CIFAR-10")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--busy", action="store_true", help="wait for no idle machine: for what is simulated")
    parser.add_argument("--list", action="store_true", help="print the commands, and measure nothing")
    options = parser.parse_args()
    if unknown := set(options.names) - set(COMMANDS):
        parser.error(f"no such names: {', '.join(sorted(unknown))}; --list has all")
    names = options.names or list(COMMANDS)
    if options.list:
        print("\n".join(f"{name}: {COMMANDS[name].shown()}" for name in names))
        return 0
    today, failed = time.strftime("%Y-%m-%d"), []
    for number in range(1, options.runs + 1):
        for name in names:
            command, path = COMMANDS[name], options.results / f"{name}.json"
            if "DIR" in command.words.split() and options.data is None:
                print(f"{name}: left out, as it needs --data")
                continue
            runs = runs_of(path, command, today)
            if len(runs) >= number:
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}, run {number}: {command.shown()}", flush=True)
            run = measure(command, options.data, 0.0 if options.busy else PATIENCE_S)
            if run is None:
                failed.append(name)
                continue
            print(f"  {run['seconds']:.0f} s, after a load of {run['load']['load_1_min']}", flush=True)
            entry = {"command": command.shown(), "date": today, "machine": machine(), "runs": [*runs, run]}
            write_json(path, entry)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
