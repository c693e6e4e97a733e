"""Runs a measurement in a process of its own, with its own home folder, for benchmarks of whole programs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Apart(NamedTuple):
    """The output of a process.

    Attributes:
        figures: the JSON of its last line.
        seconds: how long it ran.
    """

    figures: Any
    seconds: float


def run_apart(
    script: str,
    arguments: Sequence[str],
    *,
    what: str,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Apart | None:
    """Runs a script with this interpreter; the last line that it prints is JSON.

    Args:
        script: its path.
        arguments: of its command line.
        what: the name of the measurement, for messages.
        timeout: seconds after which it is ended.
        environment: additional variables.

    Returns:
        Its output; ``None`` if it failed or did not end.
    """
    with tempfile.TemporaryDirectory() as home:
        variables = {**os.environ, "HOME": home, "FLUID_RUNS": home, "SYNETUNE_FOLDER": home, "OMP_NUM_THREADS": "1"}
        variables |= {"RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0", "RAY_AIR_NEW_OUTPUT": "0"}
        # Ray's workers inherit it; they import the trainables too.
        places = [str(HERE), str(HERE.parent / "examples"), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        command = [sys.executable, str(Path(script).resolve()), *arguments]
        begun = time.perf_counter()
        try:
            done = subprocess.run(
                command, env={**variables, **(environment or {})}, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            # Under Ray alone HyperBand waits for ever if a trial is being saved while its bracket finishes.
            print(f"{what} did not end within {timeout:.0f} s; this run is left out", file=sys.stderr)
            return None
        seconds = time.perf_counter() - begun
    if done.returncode:
        print(f"{what} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return Apart(json.loads(done.stdout.splitlines()[-1]), seconds)


def write_json(path: str | Path | None, figures: Mapping[str, Any]) -> None:
    """Writes figures to a file, or nothing without one.

    Benchmarks call it after each part, so that one that is killed leaves what it has measured. A reader sees the file
    as it was or as it is, never half of it.
    """
    if path is not None:
        new = Path(f"{path}.new")
        new.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def machine() -> dict[str, Any]:
    """Returns what figures depend on: cores, and the versions of Python and of Ray, if installed."""
    from importlib import metadata

    try:
        ray = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray = None
    return {"cores": os.cpu_count(), "python": platform.python_version(), "ray": ray}


def about() -> dict[str, Any]:
    """Returns what stands beside the figures of the benchmark that runs: its command, the date, and the machine."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
