"""The files of a logger: those in the run folder are for their owner only, others as the umask has it."""

from __future__ import annotations

import itertools
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from fluid._private_files import close_to_others, make_folder, open_private, replacing


class Files:
    """Makes a logger's files and folders.

    Args:
        folder: the logger's.
        run_dir: the run folder.
    """

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self._is_private = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run_dir))

    def make_folder(self, path: Path) -> None:
        """Makes a folder, and those above it that are missing."""
        if self._is_private:
            make_folder(path)
        else:
            path.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path, mode: str, **options: Any) -> IO[Any]:
        """As :func:`open`."""
        return open_private(path, mode, **options) if self._is_private else path.open(mode, **options)

    def close(self, path: Path) -> None:
        """Says that all in a folder, which a library has written, is complete."""
        if self._is_private:
            close_to_others(path)

    def replacing(self, path: Path) -> AbstractContextManager[Path]:
        """Gives a draft that takes the file's place."""
        return replacing(path, private=self._is_private)


# -- claims --------------------------------------------------------------------------------------
#
# Names in a folder that several sessions share: each is of one session, which finds it again when it is resumed.


#: The file, in a folder, with the id of the session that the folder is of.
CLAIM = ".fluid_session"


def claim(folder: Path, name: str, session_id: str, files: Files) -> Path:
    """Makes a folder within ``folder`` and returns it; ``name-2`` and so on if another session has ``name``."""
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(folder / candidate for candidate in candidates if is_claimed(folder / candidate, session_id, files))


def is_claimed(folder: Path, session_id: str, files: Files) -> bool:
    """Makes a folder the session's unless it is another's; returns whether it is."""
    files.make_folder(folder)
    try:
        with files.open(folder / CLAIM, "x", encoding="utf-8") as file:
            file.write(session_id)
    except FileExistsError:
        return (folder / CLAIM).read_text(encoding="utf-8") == session_id
    return True
