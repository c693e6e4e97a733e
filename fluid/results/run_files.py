"""Reads the files of a run folder: JSON and JSON lines, any of which may be missing or damaged.

The session may still be running, or may have been killed. So only ``results.jsonl`` must exist; of the other files as
much is read as possible, and a note names what could not be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fluid.engine.journal import Recovered, replay
from fluid.errors import FluidError, InvalidFieldError
from fluid.planning.profile import Profile
from fluid.resources import Device
from fluid.results.folder_files import JOURNAL, PROFILE, RESULTS, SESSION, TRIALS, read_facts, why_unreadable


class RunFiles:
    """Reads the files of one folder.

    Args:
        path: the run folder.
        argument: how the caller named it, for errors.

    Attributes:
        notes: one sentence for each thing that could not be read.

    Raises:
        InvalidFieldError: the path is not a run folder; the message names it.
    """

    def __init__(self, path: str | Path, argument: str = "run") -> None:
        self._argument = argument
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidFieldError(argument, path, "must be the path of a run folder")
        self.path = Path(path).expanduser()
        self.notes: list[str] = []
        if not self.path.is_dir():
            reason = "is a file; give the folder of a run" if self.path.exists() else "does not exist"
            raise InvalidFieldError(argument, str(path), reason)
        if not (self.path / RESULTS).is_file():
            raise InvalidFieldError(argument, str(path), "is not the folder of a run: it has no results.jsonl")
        newer = why_unreadable(read_facts(self.path))
        if newer is not None:
            raise InvalidFieldError(argument, str(path), newer)

    def session(self) -> dict[str, Any]:
        """The content of ``session.json``; empty if it is missing or damaged."""
        try:
            content = _parse(self._text(SESSION))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            self.notes.append("session.json is not JSON and was ignored.")
            return {}
        return content if isinstance(content, dict) else {}

    def profile(self) -> Profile | None:
        """The profile; ``None`` if it was not written or cannot be read."""
        try:
            return Profile.load(self.path / PROFILE)
        except FileNotFoundError:
            return None
        except (FluidError, OSError) as error:
            self.notes.append(f"The profile was ignored: {error}")
            return None

    def results(self) -> list[Mapping[str, Any]]:
        """The lines of ``results.jsonl``: finished iterations, in the order written."""
        return list(self._lines(RESULTS))

    def trials(self) -> list[Mapping[str, Any]]:
        """The lines of ``trials.jsonl``: names of groups and configs of trials, in the order written."""
        return list(self._lines(TRIALS))

    def entries(self) -> list[Mapping[str, Any]]:
        """The lines of the journal as they are; those that cannot be read are left out, without a note."""
        notes = list(self.notes)
        found = list(self._lines(JOURNAL))
        self.notes = notes  # journal() says what is wrong
        return found

    def journal(self) -> Recovered:
        """The groups and trials in the journal; empty if it is missing or damaged."""
        try:
            return replay(map(_journal_line, self._text(JOURNAL).splitlines()))
        except FileNotFoundError:
            self.notes.append("journal.jsonl is missing: budgets and final states of trials are unknown.")
        except InvalidFieldError as error:
            # The error's value may be a whole line, so it is omitted.
            self.notes.append(f"The journal was ignored: {error.field} {error.reason}")
        return Recovered()

    def _lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        try:
            lines = self._text(name).splitlines()
        except FileNotFoundError:
            self.notes.append(f"{name} is missing.")
            return
        broken = found = 0
        for number, line in enumerate(lines, 1):
            try:
                entry = _parse(line) if line.strip() else None
            except (ValueError, RecursionError):
                # The last line is incomplete if the session was killed, or is writing it now.
                broken += number < len(lines)
                continue
            if isinstance(entry, dict):
                found += 1
                yield entry
            else:
                broken += bool(line.strip())
        if broken and not found:
            self.notes.append(f"{name} is damaged: none of its {line_count(len(lines))} could be read.")
        elif broken:
            self.notes.append(f"{line_count(broken)} of {name} could not be read.")

    def _text(self, name: str) -> str:
        try:
            # A line cut off within a character must not make the others unreadable.
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise InvalidFieldError(self._argument, str(self.path / name), reason) from error


def line_count(number: int) -> str:
    """A number of lines, for people."""
    return "1 line" if number == 1 else f"{number:,} lines"


def _parse(text: str) -> Any:
    """Parses JSON; lone surrogates, which older versions of Fluid let into ids and no output can hold, become ``?``."""
    content = json.loads(text)
    return without_surrogates(content) if "\\ud" in text else content


def without_surrogates(value: Any) -> Any:
    """What JSON holds, with ``?`` for each lone surrogate in a text."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, list):
        return [without_surrogates(inner) for inner in value]
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(inner) for name, inner in value.items()}
    return value


def _journal_line(line: str) -> str:
    try:
        return json.dumps(_parse(line)) if "\\ud" in line else line
    except (ValueError, RecursionError):
        return line


def device_from(fields: object) -> Device:
    """A device from its JSON fields; unknown fields are ignored."""
    if not isinstance(fields, Mapping):
        raise InvalidFieldError("devices", fields, "each device must be an object")
    names = ("host", "kind", "speed", "memory_bytes", "model", "tags")
    known = {name: fields[name] for name in names if fields.get(name) is not None}
    return Device(int(fields["index"]), **known)
