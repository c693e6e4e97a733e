"""A script's way to the trial that started it: what it reports goes there, and waits until the trial may go on.

It needs the standard library only, and is loaded by its path, too: the script's own interpreter may lack Fluid
(:mod:`fluid.scripts.hook`). A message is a line of JSON; the answer is a line of text.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Names the trial's socket, in the environment of its script and of what that starts.
VARIABLE = "FLUID_SCRIPT"
#: The folder that :func:`fluid.trial_dir` returns, and the one of :func:`fluid.get_checkpoint`.
TRIAL_DIR, CHECKPOINT_DIR = "FLUID_TRIAL_DIR", "FLUID_GET_CHECKPOINT"
#: The trial's answers: go on; save to the folder that follows; the trial has ended.
GO, SAVE, END = "go", "save ", "end"
#: Of a process that is one of several that train together, as torchrun sets it: only the first one reports.
_RANK = "RANK"


class ScriptLink:
    """The connection of this process to its trial; made at the first report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: Any = None
        self._lines: Any = None
        self._process = 0

    def report(self, metrics: Mapping[str, Any], origin: str, save: Callable[[Path], object] | None = None) -> None:
        """Reports metrics, and returns when the trial may go on.

        Args:
            metrics: numbers, texts, and mappings of these; all else is left out.
            origin: how the script reported them: ``"fluid"`` or ``"wandb"``.
            save: writes the state that the script can go on from into the empty folder that it is given.

        Raises:
            SystemExit: the trial has ended.
        """
        if os.environ.get(_RANK, "0") != "0":
            return
        with self._lock:
            try:
                self._connect()
                self._send({"metrics": plain(metrics), "origin": origin, "saves": save is not None})
                while (answer := self._lines.readline().decode().rstrip("\n")).startswith(SAVE):
                    assert save is not None
                    self._send({"saved": _error_of(save, Path(answer[len(SAVE) :]))})
            except OSError:
                return  # Fluid has gone, and ends this process.
        if answer == END:
            raise SystemExit(0)

    def _connect(self) -> None:
        if self._socket is not None and self._process == os.getpid():
            return  # Else this is a fork, and the connection its parent's.
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect("\0" + os.environ[VARIABLE])
        except OSError:
            made.close()
            raise
        self._socket, self._lines, self._process = made, made.makefile("rb"), os.getpid()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def is_in_script() -> bool:
    """Whether this process is a script that Fluid has started as a trial, or was started by one."""
    return VARIABLE in os.environ


def plain(value: Any) -> Any:
    """A value as JSON has it: mappings are copied without what JSON lacks, numbers of arrays become Python's."""
    if isinstance(value, Mapping):
        found = {str(name): plain(one) for name, one in value.items()}
        return {name: one for name, one in found.items() if one is not None}
    if isinstance(value, (bool, int, str)):
        return value
    try:
        number = value if isinstance(value, float) else value.item()  # Of NumPy, PyTorch and their like.
    except Exception:
        return None
    if isinstance(number, float) and not math.isfinite(number):
        return float(number)  # Python's JSON has NaN and infinity.
    return number if isinstance(number, (bool, int, float, str)) else None


def _error_of(save: Callable[[Path], object], folder: Path) -> str | None:
    try:
        save(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


#: The process's own.
LINK = ScriptLink()
