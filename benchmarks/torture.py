"""Tortures Fluid: random sessions of deterministic trials under random faults, all of whose results are checked.

    python benchmarks/torture.py [--seed 0] [--faults 100] [--seconds 600] [--jobs 1] [--sessions local,elastic]
        [--kinds kill_driver,...] [--skip stop_lane_long,...] [--state FILE] [--keep]

A session runs groups of trials, which it extends, stops, adds, calls and forgets at random, on 1 to 4 devices, while
processes are killed and stopped, files torn, writes failed, disks and host memory filled, checkpoints damaged, devices
removed, while strangers connect to its ports, and while trials misbehave. Drivers find another clock, another boot, or
modules in their working directory that are named as those of Python. Each of its drivers that ends early is followed by
one that resumes the session. Trials report a chain of hashes, so that a wrong state shows. Checked is: every iteration
is reported exactly once, with the right value; each trial ends as it should; no session hangs; resuming is never
refused; the times that Fluid tells are possible; no process is left 10 s after the end, and nothing in host memory.
docs/failures.md says what is promised. Findings are:

    iterations lost         one up to the trial's last, or up to the accepted budget, is not in results.jsonl, was told
                            to no driver, or not to the last one
    iterations repeated     one is twice in results.jsonl, or was told one driver twice in the same way
    values wrong            one differs from the chain, in results.jsonl or as told
    trials amiss            one has not ended, or otherwise than its script allows, ran more than was asked for, or was
                            never submitted; a call was answered wrongly, or not within 30 s after all trials had ended
    hangs                   no result, request or end of a driver within 120 s after the last fault
    resumes refused         a session with an accepted group cannot be resumed
    checkpoints thrown away a trial began before its newest checkpoint after a session that ended with its disk full,
                            and no other fault that destroys checkpoints
    times impossible        a time is less than the drivers took for what they told, or more than since the first began
    modules run             a process has executed a module of the working directory
    processes left          some with the session's mark in their environment, 10 s after the last driver
    files left in memory    anything in /dev/shm, which the session has for its own; needs root

A session that fails keeps its folder, and the line that reports it has the command that repeats it. Its faults are the
same then, but not the instants at which they hit. With ``--state``, a run goes on after the sessions in the file that
the same code has run, until all of them together have had so many faults.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from measuring import machine
from torture_io import IO_FAULTS, compile_library
from torture_machine import can_change_clocks
from torture_plan import SESSIONS

HERE = Path(__file__).resolve().parent
#: Seconds after which a session's supervisor is given up; a hang of a driver ends it long before.
_LONGEST = 1500.0
#: What must not happen, and what each is called.
FAILURES = {
    "lost": "iterations lost", "repeated": "iterations repeated", "wrong": "values wrong", "others": "trials amiss",
    "hangs": "hangs", "refused": "resumes refused", "orphans": "processes left", "litter": "files left in memory",
    "work": "checkpoints thrown away", "times": "times impossible", "imported": "modules of the working directory run",
    "crashed": "sessions crashed",
}  # fmt: skip
#: What else is added up.
_SUMMED = ("drivers", "iterations", "elastic", "wide")
#: What else the line of a session has of what was found.
_KEPT = ("seed", "kind", "faults", "ends", "errors", "seconds")


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
        path: a file of JSON lines, one per session, which those of this run are appended to; those of the same code in
            it are added up too. ``None`` for none.
        code: what identifies Fluid's code.
        **facts: what else each line has of this run.
    """

    def __init__(self, path: Path | None, *, code: str, **facts: Any) -> None:
        self._path = path
        self._facts = {"code": code, **facts}
        self.lines: list[dict[str, Any]] = []
        #: Sessions in the file that other code has run.
        self.others = 0
        if path is not None and path.exists():
            known = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self.lines = [line for line in known if line["code"] == code]
            self.others = len(known) - len(self.lines)

    @property
    def done(self) -> set[str]:
        """The seeds of the sessions that this code has run."""
        return {line["seed"] for line in self.lines}

    @property
    def faults(self) -> int:
        """Faults in all sessions."""
        return sum(sum(line["faults"].values()) for line in self.lines)

    def add(self, found: dict[str, Any]) -> None:
        """Adds a session, of which the file gets a line."""
        line = {name: found[name] for name in _KEPT if name in found} | {name: found.get(name, 0) for name in _SUMMED}
        line |= {"failures": failures_of(found), **self._facts}
        self.lines.append(line)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def table(self) -> str:
        """Returns the sums over all sessions, for people."""
        sums: Counter[str] = Counter()
        faults: Counter[str] = Counter()
        for line in self.lines:
            sums.update({name: line[name] for name in _SUMMED})
            sums.update(line["failures"])
            faults.update(line["faults"])
        sessions = Counter(line["kind"] for line in self.lines)
        kinds = ", ".join(f"{kind} {count}" for kind, count in sessions.most_common())
        failed = [line["seed"] for line in self.lines if line["failures"]]
        versions = ", ".join(sorted({f"{line['version']} of {line['commit']}" for line in self.lines}))
        lines = [
            f"{faults.total()} faults in {sessions.total()} sessions ({kinds}) of {sums['drivers']} drivers; "
            f"{sums['iterations']} iterations checked",
            f"{sums['wide']} of {sums['elastic']} elastic iterations on several devices",
            *(f"{sums[kind]:6d} {name}" for kind, name in FAILURES.items()),
            "faults:",
            *(f"{count:6d} {kind}" for kind, count in faults.most_common()),
            f"Fluid {versions}; code {self._facts['code']}",
        ]
        lines += [f"failed: {', '.join(failed)}"] * bool(failed)
        lines += [f"{self.others} sessions of other code in {self._path} are not counted"] * bool(self.others)
        return "\n".join(lines)


def code_of(package: Path) -> str:
    """Returns a digest of a package's modules, by which sessions of the same code are known."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit() -> str:
    """Returns the commit of the checkout; empty if it is none, or there is no Git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def left_out(library: Path | None) -> dict[str, str]:
    """Returns the kinds of faults that this machine does not let happen, and why.

    Args:
        library: lets writes fail; ``None`` if it could not be compiled.
    """
    reasons: dict[str, str] = {}
    if library is None:
        reasons |= dict.fromkeys(IO_FAULTS, "no C compiler (cc)")
    if not can_change_clocks():
        reasons |= dict.fromkeys(("clock_forward", "clock_back"), "time namespaces are not permitted")
    if os.geteuid() != 0:
        reasons |= dict.fromkeys(("other_boot", "full_at_close"), "mounts need root")
    return reasons


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs sessions until there were enough faults or time is up; returns 1 if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", default="0", help="of the run; session n has the seed SEED/n")
    parser.add_argument("--session", type=int, help="only this session, which the state does not get")
    parser.add_argument("--faults", type=int, default=100, help="ends after this many, those in the state included")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begins no session after this time")
    parser.add_argument("--jobs", type=int, default=1, help="sessions at a time")
    parser.add_argument("--faults-per-session", type=int, help="instead of a random number")
    parser.add_argument("--sessions", default="", help=f"kinds of sessions, of {','.join(SESSIONS)}; default all")
    parser.add_argument("--kinds", default="", help="kinds of faults; default all")
    parser.add_argument("--skip", default="", help="kinds of faults to leave out")
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="gets a line per session; the run goes on after them"
    )
    parser.add_argument("--folder", type=Path, help="for the sessions; default a new one in the temporary folder")
    parser.add_argument("--keep", action="store_true", help="keeps the folders of all sessions")
    chosen = parser.parse_args(arguments)

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    root = (chosen.folder or Path(tempfile.mkdtemp(prefix="torture-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    library = compile_library(root)
    missing = left_out(library)
    for reason in sorted(set(missing.values())):
        print(f"left out: {', '.join(kind for kind, why in missing.items() if why == reason)}: {reason}", flush=True)
    options = {
        "faults": chosen.faults_per_session,
        "kinds": words(chosen.kinds),
        "skipped": [*words(chosen.skip), *missing],
        "sessions": words(chosen.sessions),
        "library": None if library is None else str(library),
    }
    command = f"python benchmarks/torture.py --seed {chosen.seed}"
    for name, value in (("sessions", chosen.sessions), ("kinds", chosen.kinds), ("skip", chosen.skip)):
        command += f" --{name} {value}" if value else ""
    if chosen.faults_per_session is not None:
        command += f" --faults-per-session {chosen.faults_per_session}"
    package = HERE.parent / "fluid"
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "command": command, "commit": commit()}
    version = runpy.run_path(str(package / "_version.py"))["__version__"]
    state = chosen.state if chosen.session is None else None
    totals = Totals(state, code=code_of(package), version=version, **facts)
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
                if f"{chosen.seed}/{number}" in totals.done:
                    number += 1
                    continue
                folder = root / f"{chosen.seed}-{number}"
                shutil.rmtree(folder, ignore_errors=True)
                running[threads.submit(run_session, f"{chosen.seed}/{number}", folder, options)] = number, folder
                number += 1
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                which, folder = running.pop(future)
                found = future.result()
                totals.add(found)
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
