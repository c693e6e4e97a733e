"""A file of a run folder that a session appends to: of each write all is there afterwards, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fluid._logs import logger_of
from fluid._private_files import open_descriptor
from fluid.errors import FluidError
from fluid.lane.checkpoints.paths import open_folder, path_now
from fluid.results.damage import end_of_lines


class AppendedFile(FileIO):
    """Opens a file to append to, for its owner only. One session writes it, and one thread at a time.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        # Without a buffer: what a full disk refuses is not written later, behind the session's back.
        super().__init__(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
        self._path = path
        #: Bytes of the file, and how much more the offset of the next line is; ``None`` before the first write.
        self._size: int | None = None
        self._shift: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the file, as it was when they were first asked for, and as was written since.

        So what is torn may be cut off until the first write.
        """
        if self._size is None:
            self._size = os.fstat(self.fileno()).st_size
        return self._size

    @property
    def is_cut(self) -> bool:
        """Whether another process has truncated it since the size was first asked for."""
        return self._size is not None and os.fstat(self.fileno()).st_size < self._size

    @property
    def next_offset(self) -> int:
        """The offset of the next line, for its checksum.

        It follows from that of the last line: where lines were lost or put in, it differs from the file's size.
        """
        if self._shift is None:
            self._shift = end_of_lines(self._path) - self.size
        return self.size + self._shift

    def append(self, data: bytes) -> None:
        """Writes data in one go; in several only where a signal comes between, or the disk is full.

        Raises:
            OSError: it cannot be written. What was written of it is cut off again.
        """
        self.append_parts((data,))

    def append_parts(self, parts: Iterable[bytes]) -> None:
        """Writes data that is made part by part: all of it, or nothing.

        Raises:
            OSError: it cannot be written. What was written of it is cut off again, as after any other error.
        """
        start = size = self.size
        try:
            for part in parts:
                written = self.write(part)
                while written < len(part):
                    written += self.write(part[written:])
                size += len(part)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self._path)
            with suppress(OSError):
                self.truncate(start)
            raise
        self._size = size


# -- folder watch --------------------------------------------------------------------------------
#
# Whether a run folder is still there while its session runs: someone may delete, move or exchange it, or its files.
#
# What the session writes then is lost, or is scattered over two folders. So the session ends, within seconds: the
# work of hours that the user cannot keep is worth less than the time to begin again.


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
                f"resume it there: fluid.run(..., run_dir={place!r}, resume=True), or FluidExecutor.resume({place!r})"
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
