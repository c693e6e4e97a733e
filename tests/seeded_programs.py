"""Runs a program twice, each time in a process of its own, and returns the lines that each has printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lines_of(program: Path, *arguments: str) -> list[str]:
    """Runs a program that prints lines; returns them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLUID_RUNS": str(program.parent / "runs")}
    command = [sys.executable, str(program), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines
    return lines


def two_runs(program: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """The lines of two runs of a program, which should be the same."""
    return lines_of(program, *arguments), lines_of(program, *arguments)
