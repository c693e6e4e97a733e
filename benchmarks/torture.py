"""Tortures Fluid: random sessions of deterministic trials under random faults, all of whose results are checked.

    python benchmarks/torture.py [--seed 0] [--faults 100] [--seconds 600] [--jobs 1] [--sessions local,elastic]
        [--kinds kill_driver,...] [--skip stop_lane_long,...] [--add-to FILE] [--keep]

A session runs groups of trials, which it extends, stops, adds, calls and forgets at random, on 1 to 4 devices, while
processes are killed and stopped, files torn, disks and host memory filled, checkpoints damaged, devices removed, and
while trials misbehave. Each of its drivers that ends early is followed by one that resumes the session. Trials report
a chain of hashes, so that a wrong state shows. Checked is: every iteration is reported exactly once, with the right
value; each trial ends as it should; no session hangs; resuming is never refused; no process is left 10 s after the end,
and nothing in host memory. docs/reliability.md says what each of that means.

A session that fails keeps its folder, and the line that reports it has the command that repeats it. Its faults are the
same then, but not the instants at which they hit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from measuring import machine
from torture_plan import SESSIONS

HERE = Path(__file__).resolve().parent
#: Seconds after which a session's supervisor is given up; a hang of a driver ends it long before.
_LONGEST = 1500.0
#: What must not happen, and what each is called.
FAILURES = {
    "lost": "iterations lost", "repeated": "iterations repeated", "wrong": "values wrong", "others": "trials amiss",
    "hangs": "hangs", "refused": "resumes refused", "orphans": "processes left", "litter": "files left in memory",
    "crashed": "sessions crashed",
}  # fmt: skip
#: What else is added up.
_SUMMED = ("drivers", "iterations", "elastic_iterations", "wide_iterations")


def run_session(seed: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Runs a session in a process of its own; returns what it found."""
    command = [sys.executable, str(HERE / "torture_session.py"), seed, str(folder), json.dumps(options)]
    places = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    try:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return {"seed": seed, "kind": "?", "drivers": 0, "iterations": 0, "faults": {}, "crashed": [err[-3000:]]}
    return found


def failures_of(found: dict[str, Any]) -> dict[str, int]:
    """Returns what went wrong in a session: how often, by kind."""
    return {kind: len(found[kind]) for kind in FAILURES if found.get(kind)}


class Totals:
    """Adds sessions up.

    Args:
        path: a file of earlier totals, which these are added to and written to; ``None`` for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        self._this: dict[str, Any] = {}

    def begin(self, **facts: Any) -> None:
        """Begins a run."""
        self._this = {**facts, "sessions": {}, "faults": {}, "ends": {}, "errors": {}, "failed": []}
        self._this |= dict.fromkeys((*_SUMMED, "seconds"), 0)
        self._this |= dict.fromkeys(FAILURES, 0)
        self.runs.append(self._this)

    def add(self, found: dict[str, Any], seconds: float) -> None:
        """Adds a session."""
        this = self._this
        for name, counts in (
            ("sessions", {found["kind"]: 1}),
            ("faults", found["faults"]),
            ("ends", found.get("ends", {})),
        ):
            this[name] = dict(sorted((Counter(this[name]) + Counter(counts)).items()))
        this["drivers"] += found["drivers"]
        this["iterations"] += found["iterations"]
        this["elastic_iterations"] += found.get("elastic", 0)
        this["wide_iterations"] += found.get("wide", 0)
        this["seconds"] = round(seconds, 1)
        for kind, times in failures_of(found).items():
            this[kind] += times
        this["errors"] = dict(sorted((Counter(this["errors"]) + Counter(found.get("errors", []))).items()))
        if failures_of(found):
            this["failed"].append({"seed": found["seed"], "kind": found["kind"], **failures_of(found)})
        if self._path is not None:
            self._path.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n", encoding="utf-8")

    @property
    def faults(self) -> int:
        """Faults in this run."""
        return sum(self._this["faults"].values())

    def table(self) -> str:
        """Returns the sums over all runs, for people."""
        sums: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        sessions: Counter[str] = Counter()
        for run in self.runs:
            faults.update(run["faults"])
            sessions.update(run["sessions"])
            sums.update(
                {
                    name: run[name]
                    for name in (*FAILURES, "drivers", "iterations", "elastic_iterations", "wide_iterations")
                }
            )
        kinds = ", ".join(f"{kind} {count}" for kind, count in sessions.most_common())
        lines = [
            f"{faults.total()} faults in {sessions.total()} sessions ({kinds}) of {sums['drivers']} drivers; "
            f"{sums['iterations']} iterations checked",
            f"{sums['wide_iterations']} of {sums['elastic_iterations']} elastic iterations on several devices",
            *(f"{sums[kind]:6d} {name}" for kind, name in FAILURES.items()),
            "faults: " + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()),
        ]
        return "\n".join(lines)


def main() -> int:
    """Runs sessions until there were enough faults or time is up; returns 1 if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", default="0", help="of the run; session n has the seed SEED/n")
    parser.add_argument("--session", type=int, help="only this session")
    parser.add_argument("--faults", type=int, default=100, help="ends after this many")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begins no session after this time")
    parser.add_argument("--jobs", type=int, default=1, help="sessions at a time")
    parser.add_argument("--faults-per-session", type=int, help="instead of a random number")
    parser.add_argument("--sessions", default="", help=f"kinds of sessions, of {','.join(SESSIONS)}; default all")
    parser.add_argument("--kinds", default="", help="kinds of faults; default all")
    parser.add_argument("--skip", default="", help="kinds of faults to leave out")
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="adds this run to those in the file")
    parser.add_argument("--folder", type=Path, help="for the sessions; default a new one in the temporary folder")
    parser.add_argument("--keep", action="store_true", help="keeps the folders of all sessions")
    chosen = parser.parse_args()

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    options = {
        "faults": chosen.faults_per_session,
        "kinds": words(chosen.kinds),
        "skipped": words(chosen.skip),
        "sessions": words(chosen.sessions),
    }
    root = chosen.folder or Path(tempfile.mkdtemp(prefix="torture-"))
    totals = Totals(chosen.add_to)
    command = f"python benchmarks/torture.py --seed {chosen.seed}"
    for name, value in (("sessions", chosen.sessions), ("kinds", chosen.kinds), ("skip", chosen.skip)):
        command += f" --{name} {value}" if value else ""
    if chosen.faults_per_session is not None:
        command += f" --faults-per-session {chosen.faults_per_session}"
    totals.begin(date=time.strftime("%Y-%m-%d"), machine=machine(), command=command, seed=chosen.seed)
    begun, number, bad = time.monotonic(), chosen.session or 0, 0
    running: dict[Future[dict[str, Any]], tuple[int, Path]] = {}
    with ThreadPoolExecutor(chosen.jobs) as threads:
        while True:
            while (
                len(running) < chosen.jobs
                and totals.faults < chosen.faults
                and time.monotonic() - begun < chosen.seconds
                and (chosen.session is None or number == chosen.session)
            ):
                folder = root / f"{chosen.seed}-{number}"
                shutil.rmtree(folder, ignore_errors=True)
                running[threads.submit(run_session, f"{chosen.seed}/{number}", folder, options)] = number, folder
                number += 1
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                which, folder = running.pop(future)
                found = future.result()
                totals.add(found, time.monotonic() - begun)
                failed = failures_of(found)
                print(_line(which, found, failed, totals.faults, time.monotonic() - begun), flush=True)
                if failed:
                    bad += 1
                    for kind in failed:
                        print("\n".join(f"    {kind}: {str(text).strip()[-600:]}" for text in found[kind][:5]))
                    print(f"    again: {command} --session {which}    folder: {folder}", flush=True)
                    (folder / "found.json").write_text(json.dumps(found, indent=1))
                elif not chosen.keep:
                    shutil.rmtree(folder, ignore_errors=True)
    print(totals.table())
    return 1 if bad else 0


def _line(number: int, found: dict[str, Any], failed: dict[str, int], faults: int, seconds: float) -> str:
    verdict = "; ".join(f"{times} {FAILURES[kind]}" for kind, times in failed.items()) or "right"
    return (
        f"{seconds:6.0f} s, {faults:5d} faults; session {number} ({found['kind']}, {found['drivers']} drivers, "
        f"{sum(found['faults'].values())} faults, {found['iterations']} iterations): {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
