"""Measures what resuming a session of many trials costs, against another checkout of Fluid.

    python benchmarks/resuming.py [--trials 20000] [--rounds 5] [--baseline CHECKOUT] [--json FILE]

A session of many trials of one iteration, in one group, runs on 2 CPU devices of the local backend; its run folder is
copied at the last result, as a killed driver leaves it. Copies of that folder are then resumed, in a process each: by
this checkout and by the other, in turn, and each also resumes a folder that the other has written. "CPU" is the
driver's, from the call of ``FluidExecutor.resume`` until all trials are known and the session is closed; the lowest of
all rounds counts, as other programs of the machine only ever add to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def tiny(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One iteration."""
    yield {"loss": config["x"]}


def write(folder: Path, trials: int) -> None:
    """Runs a session, and copies its folder at its last result."""
    from fluid import FluidExecutor, Trial, TrialGroup

    own = folder.with_name(f"{folder.name}-of-session")
    with FluidExecutor("local", 2, verbose=0, run_dir=own) as executor:
        group = TrialGroup([Trial(tiny, {"x": x}, budget=1, trial_id=f"n{x}") for x in range(trials)], "all")
        handle = executor.submit_trialgroup(group)
        for _ in handle.results():
            pass
        handle.wait()
        shutil.copytree(own, folder)


def resume(folder: Path, trials: int) -> None:
    """Resumes a session; prints the driver's seconds of CPU time."""
    import time

    from fluid import FluidExecutor

    begin = time.process_time()
    with FluidExecutor.resume(folder, backend="local", devices=2, verbose=0) as executor:
        (handle,) = executor.handles
        handle.wait()
        states = handle.states
    cpu = time.process_time() - begin
    assert len(states) == trials and {str(state) for state in states.values()} <= {"DONE", "TrialState.DONE"}, states
    print(json.dumps(cpu))


def run(checkout: Path, what: str, folder: Path, trials: int) -> str:
    """Runs a step of this program with the Fluid of a checkout; returns what it prints last."""
    command = [sys.executable, str(HERE / "resuming.py"), f"--{what}", str(folder), "--trials", str(trials)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # The first round compiles all modules, as an installation does.
    ran = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stdout + ran.stderr)
    return ran.stdout.strip().rpartition("\n")[2]


def measure(checkouts: dict[str, Path], trials: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns seconds of CPU time: by who resumes, and by who has written the folder."""
    found: dict[str, dict[str, float]] = {name: {} for name in checkouts}
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for writer, checkout in checkouts.items():
            run(checkout, "write", place / writer, trials)
        for _ in range(rounds):
            for writer in checkouts:
                for reader, checkout in checkouts.items():
                    if (reader, writer) == ("baseline", "this"):  # An older Fluid reads no newer folder.
                        continue
                    shutil.copytree(place / writer, copy := place / "copy")
                    seconds = float(run(checkout, "resume", copy, trials))
                    shutil.rmtree(copy)
                    found[reader][writer] = min(seconds, found[reader].get(writer, seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baseline", type=Path, metavar="CHECKOUT", help="another checkout of Fluid")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write or arguments.resume:
        (write if arguments.write else resume)(arguments.write or arguments.resume, arguments.trials)
        return
    checkouts = {"this": HERE.parent}
    if arguments.baseline:
        checkouts["baseline"] = arguments.baseline.resolve()
    found = measure(checkouts, arguments.trials, arguments.rounds)
    print(f"{arguments.trials:,} trials, s of CPU, lowest of {arguments.rounds}:")
    for reader, by_writer in found.items():
        for writer, seconds in by_writer.items():
            print(f"{seconds:8.2f}  {reader} resumes what {writer} has written")
    if "baseline" in found:
        least = found["baseline"]["baseline"]
        for writer, seconds in found["this"].items():
            print(f"{seconds / least:8.2f}  of the baseline's, for what {writer} has written")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"trials": arguments.trials, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
