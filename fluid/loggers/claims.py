"""Names in a folder that several sessions share: each is of one session, which finds it again when it is resumed."""

from __future__ import annotations

import itertools
from pathlib import Path

from fluid.loggers.logger_files import Files

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
