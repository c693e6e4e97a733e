"""Whether a run folder is still there while its session runs: someone may delete, move or exchange it, or its files.

What the session writes then is lost, or is scattered over two folders. So the session ends, within seconds: the
work of hours that the user cannot keep is worth less than the time to begin again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fluid._logs import logger_of
from fluid.errors import FluidError
from fluid.lane.checkpoints.paths import open_folder, path_now
from fluid.session.appended_file import AppendedFile

_log = logger_of(__name__)


class FolderWatch:
    """Compares a run folder and its files with what the session has open.

    Args:
        path: the folder.
        files: those in it without which the session cannot be resumed, by name, open for writing at their ends.
    """

    def __init__(self, path: Path, files: Mapping[str, AppendedFile]) -> None:
        self._path = path
        self._files = files
        self._descriptor = open_folder(str(path))
        #: Whether the last look found something amiss: it may be a deletion that is under way.
        self._amiss = False
        self._is_told = False

    @property
    def place(self) -> Path | None:
        """Where the folder is now; ``None`` if it is nowhere."""
        try:
            place = path_now(self._descriptor)
        except OSError:
            return None
        return None if place is None else Path(place)

    def look(self) -> None:
        """Looks at all of it.

        Raises:
            FluidError: the last two looks found something amiss.
        """
        problem = self._problem()
        was_amiss, self._amiss = self._amiss, problem is not None
        if problem is not None and was_amiss:
            self._is_told = True
            raise FluidError(problem)

    def close(self) -> None:
        """Looks a last time, and logs what is amiss, unless that has ended the session."""
        if self._descriptor < 0:
            return
        problem = None if self._is_told else self._problem()
        if problem is not None:
            _log.error("%s", problem)
        os.close(self._descriptor)
        self._descriptor = -1

    def _problem(self) -> str | None:
        """What is amiss, and what follows from it; ``None`` if nothing is."""
        if not _is(str(self._path), self._descriptor):
            try:
                place = path_now(self._descriptor)
            except OSError:
                return (
                    f"the run folder {self._path} cannot be found any more: while the session ran, it was moved to "
                    "where this program cannot see it, or its disk was unmounted"
                )
            if place is None:
                return (
                    f"the run folder {self._path} was deleted while the session ran: its results are lost, except for "
                    "those that this program has received, and the session cannot be resumed"
                )
            return (
                f"the run folder {self._path} was moved to {place} while the session ran; "
                f"FluidExecutor.resume({place!r}) goes on with the session"
            )
        lost = [name for name, file in self._files.items() if not _is(str(self._path / name), file.fileno())]
        cut = [name for name, file in self._files.items() if name not in lost and file.is_cut]
        if not lost and not cut:
            return None
        found = [(lost, "deleted or replaced"), (cut, "truncated")]
        what = " and ".join(f"{', '.join(names)} {_were(names)} {how}" for names, how in found if names)
        return (
            f"{what} in the run folder {self._path} while the session ran: what was written there is lost, except for "
            "results that this program has received"
        )


def _is(path: str, descriptor: int) -> bool:
    """Whether there is, at a path, what a descriptor stands for; also if that cannot be told at the moment."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _were(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"
