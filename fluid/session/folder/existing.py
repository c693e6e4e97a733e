"""Run folders that hold a session already: what takes their place, and how they are deleted.

Only what a session writes is ever deleted. A folder is renamed before anything in it is: a program that looks for
the run finds all of it, or nothing.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fluid._logs import logger_of
from fluid._private_files import FOLDER_MODE
from fluid.backends.hosts import memory as host_memory
from fluid.errors import FluidError, InvalidFieldError
from fluid.joint.folders import beside, is_shared
from fluid.results.run_files import (
    FORECASTS,
    JOURNAL,
    LOCK,
    PAYLOADS,
    PROFILE,
    RESULTS,
    SESSION,
    TRIALS,
    is_locked,
    is_used,
)
from fluid.session.folder.lock import FolderLock, InUseError

_log = logger_of(__name__)
#: What may be done where ``run_dir`` holds a session, the default first.
IF_EXISTS = ("error", "resume", "overwrite", "new")
#: What sessions, their lanes, loggers and reports write into a run folder, as patterns of names.
_WRITTEN = (
    *(SESSION, LOCK, JOURNAL, RESULTS, TRIALS, PAYLOADS, PROFILE, FORECASTS, "loggers.jsonl", f".{SESSION}.tmp"),
    *("logs", "trials", "hosts", "fusion", "tensorboard", "csv", "parquet", "wandb"),
    *("report.html", "timeline.png", ".view-*.html", ".notes", ".payloads-*", ".fluid-*"),
)
#: The same of folders whose names a user may have chosen, too: ``logs`` of a program's own, a ``csv`` of its data.
_WRITTEN_IN: Mapping[str, tuple[str, ...]] = {
    "logs": ("forkserver.log", "lane-*"),
    "csv": ("*iterations*.csv", "*trials*.csv", ".fluid_*"),
    "parquet": ("*iterations*.parquet", "*trials*.parquet", ".fluid_*"),
}
#: Foreign entries that an error names at most.
_MOST_NAMED = 3


def holds_a_session(go_on: str = "if_exists='resume'") -> str:
    """Why a folder is not used that holds a session, and what can be done.

    Args:
        go_on: the argument by which the caller goes on with it.
    """
    others = "if_exists='overwrite' to delete it, or 'new' for a folder beside it"
    return f"holds a session already: pass {go_on} to go on, {others}"


def candidates(folder: Path) -> Iterator[Path]:
    """The folder, and those beside it, ``folder-2`` and so on, that hold no session."""
    number = 1
    while True:
        made = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not (is_used(made) or is_shared(made) or (made.exists() and not made.is_dir())):
            yield made
        number += 1


class SetAside:
    """A run that is to be deleted: under another name, beside its folder, until :meth:`delete` or :meth:`put_back`.

    An empty folder takes its place.

    Args:
        folder: the run folder; it holds a session.

    Attributes:
        place: where it was, without links.

    Raises:
        InvalidFieldError: a session runs there, several drivers share it, or it has other files than a session's.
        OSError: it cannot be moved.
    """

    def __init__(self, folder: Path) -> None:
        self.place = Path(os.path.realpath(folder))
        if is_shared(self.place) or len(beside(self.place)) > 1:
            raise InvalidFieldError("run_dir", str(folder), "is shared by several drivers: it is not deleted")
        if Path.cwd().is_relative_to(self.place):
            raise InvalidFieldError("run_dir", str(folder), "is not deleted: this program runs in that folder")
        self._lock = FolderLock(self.place)
        try:
            if foreign := sorted(_foreign(self.place)):
                named = ", ".join(foreign[:_MOST_NAMED]) + (", ..." if len(foreign) > _MOST_NAMED else "")
                raise InvalidFieldError(
                    "run_dir", str(folder), f"is not deleted: it holds other files than a session's: {named}"
                )
            self._aside = self._beside()
            os.rename(self.place, self._aside)
            with suppress(FileExistsError):  # Another program has just taken the name: it fails, or has a session.
                os.mkdir(self.place, FOLDER_MODE)
        except BaseException:
            self._lock.release()
            raise

    def delete(self) -> None:
        """Deletes it, and what killed processes have left of earlier runs of that name. What cannot be is logged."""
        for left in (self._aside, *self._left_behind()):
            try:
                host_memory.drop_of(str(self.place), left.stat().st_ino)
                shutil.rmtree(left)
            except OSError as error:
                _log.warning("%s, which holds the run that was replaced, cannot be deleted: %s", left, error.strerror)
        self._lock.release()

    def put_back(self, *, is_held: bool = False) -> None:
        """Gives it its name back, and deletes the session without trials that has taken its place meanwhile.

        A session of another program's stays: the run is then where it was put aside, which is logged.

        Args:
            is_held: whether the caller holds the lock of the folder that has taken its place.
        """
        newer = self._beside()
        lock: FolderLock | None = None
        try:
            if self.place.exists():
                if not is_held:
                    lock = FolderLock(self.place)
                    if is_used(self.place):
                        raise InUseError("run_dir", str(self.place), holds_a_session())
                os.rename(self.place, newer)
            os.rename(self._aside, self.place)
            shutil.rmtree(newer, ignore_errors=True)
        except InUseError:
            _log.error("the run that was in %s, where another program now has one, is in %s", self.place, self._aside)
        except OSError as error:
            _log.error("the run that was in %s is now in %s: %s", self.place, self._aside, error.strerror)
        if lock is not None:
            lock.release()
        self._lock.release()

    @property
    def _prefix(self) -> str:
        return f".{self.place.name}.replaced-"

    def _beside(self) -> Path:
        return self.place.with_name(f"{self._prefix}{secrets.token_hex(4)}")

    def _left_behind(self) -> list[Path]:
        with suppress(OSError):
            names = [name for name in os.listdir(self.place.parent) if name.startswith(self._prefix)]
            found = [self.place.with_name(name) for name in names]
            return [one for one in found if one != self._aside and not is_locked(one)]
        return []


def _foreign(folder: Path) -> Iterator[str]:
    """Names of what is in a run folder, but is none of a session's; other runs are not, wherever they are."""
    for name in os.listdir(folder):
        if not _is_ours(name, _WRITTEN):
            yield name
        elif (folder / name).is_dir():
            known = _WRITTEN_IN.get(name, ("*",))
            for inner in os.listdir(folder / name):
                if not _is_ours(inner, known) or is_used(folder / name / inner):
                    yield f"{name}/{inner}"


def _is_ours(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def delete_run(folder: Path) -> None:
    """Deletes a run folder: all of it, or nothing.

    Raises:
        InvalidFieldError: it holds no session, a session runs there, several drivers share it, or it has other files
            than a session's.
        FluidError: it cannot be moved.
    """
    if not is_used(folder):
        raise InvalidFieldError("run_dir", str(folder), "is not the folder of a run")
    try:
        run = SetAside(folder)
        with suppress(OSError):  # Another program has just begun a session there.
            os.rmdir(run.place)
        run.delete()
    except OSError as error:
        raise FluidError(f"{folder} cannot be deleted: {error.strerror}") from error
