"""Real scripts, and sweeps over them, for the tests of this folder."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluid.results.sweep import SweepResult
from fluid.scripts.trainable import Script
from fluid.sweep import run


def write_script(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def losses(result: SweepResult) -> list[list[float]]:
    """The losses of each trial's iterations."""
    return [[float(one.metrics["loss"]) for one in trial.results] for trial in result.trials]


def alive(mark: str) -> list[int]:
    """Processes that have a text in their command line or environment, but this one; zombies have neither."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            text = Path(f"/proc/{process}/cmdline").read_bytes() + Path(f"/proc/{process}/environ").read_bytes()
            if mark.encode() in text and int(process) != os.getpid():
                found.append(int(process))
    return found


def wait_until(condition: Callable[[], Any]) -> Any:
    """Waits for what another process does; far longer than it takes, as the machine may be busy."""
    until = time.monotonic() + 60.0
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


#: Options of the script; others are of ``fluid.run``.
_OF_SCRIPTS = ("metric_from", "metric_regex", "iteration_key", "checkpoint_flag", "grace_s", "config_in_env", "budget")


class ScriptSweeps:
    """Runs sweeps over scripts, on the executor in force.

    Args:
        folder: for the scripts, whose path marks their processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, text: str, *words: str, space: Any = None, **options: Any) -> SweepResult:
        """Runs a sweep over a script of this text, with these words as its arguments."""
        own = {"budget": 27, "config_in_env": True}
        own |= {name: options.pop(name) for name in _OF_SCRIPTS if name in options}
        space = {"x": [1]} if space is None else space
        command = [sys.executable, write_script(self.folder, text), *words]
        script = Script.checked(command, space, metric=options.get("metric", "loss"), **own)
        asked = {"metric": "loss", "mode": "min", "algorithm": "grid", "budget": script.budget, **options}
        return run(script.trainable(), space, **asked)
