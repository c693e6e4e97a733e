"""Processes that rehearse the sweeps of a comparison, one after the other, so that imports are paid for once each."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from fluid.processes.children import describe_exit
from fluid.processes.interpreters import start_program
from fluid.rehearsal.outcome import SweepOutcome

_PROGRAM = "fluid.integrations.comparing.player"


class Unplayed(NamedTuple):
    """Why a sweep could not be played.

    Attributes:
        text: of the error.
        is_missing: whether a package is not installed, which all sweeps of its row need.
    """

    text: str
    is_missing: bool = False


class Players:
    """Processes that end with the ``with`` statement; as many as there are calls at once.

    Args:
        log: file to which goes what libraries print there.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._idle: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Players:
        return self

    def __exit__(self, *exception: object) -> None:
        for player in self._idle:
            _end(player)

    def play(self, task: tuple[Any, ...]) -> SweepOutcome | Unplayed:
        """Plays a sweep in one of the processes; may be called from several threads.

        Args:
            task: a function and its arguments, which can be pickled; it returns the outcome.
        """
        try:
            player = self._idle.pop()
        except IndexError:
            player = self._start()
        try:
            answer: SweepOutcome | Unplayed = _ask(player, task)
        except (EOFError, OSError, pickle.UnpicklingError):
            player.communicate()  # Closes the pipes, and waits.
            return Unplayed(f"its process {describe_exit(player.returncode)}")
        except BaseException:
            _end(player)
            raise
        self._idle.append(player)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return start_program(_PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)


def _ask(player: subprocess.Popen[bytes], task: tuple[Any, ...]) -> Any:
    assert player.stdin is not None and player.stdout is not None
    player.stdin.write(pickle.dumps(task))
    player.stdin.flush()
    return pickle.load(player.stdout)


def _end(player: subprocess.Popen[bytes]) -> None:
    player.kill()
    player.communicate()
