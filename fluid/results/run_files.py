"""Reads the files of a run folder: JSON and JSON lines, any of which may be missing or damaged.

The session may still be running, or may have been killed. So only ``results.jsonl`` must exist; of the other files as
much is read as possible, and a note names what could not be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluid.checksums import LineChecks
from fluid.errors import FluidError, InvalidFieldError
from fluid.measure.profile import Profile
from fluid.resources import Device
from fluid.results.folder_files import (
    ENDS,
    FORECASTS,
    JOURNAL,
    PROFILE,
    RESULTS,
    SESSION,
    TRIALS,
    ends_in,
    facts_in,
    read_facts,
    why_unreadable,
)
from fluid.results.journal import Recovered, Replay
from fluid.results.json_lines import BROKEN, JsonLines, parsed, without_surrogates


class RunFiles:
    """Reads the files of one folder. What is asked for once more is read on from where the reading before ended.

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
        facts = read_facts(self.path)
        newer = why_unreadable(facts)
        if newer is not None:
            raise InvalidFieldError(argument, str(path), newer)
        #: Where the lines of each file ended as ``session.json`` was written.
        self._ends = ends_in(facts)
        self._objects = {name: _Objects(self.path / name) for name in (RESULTS, TRIALS, FORECASTS)}
        self._journal = _Journal(self.path / JOURNAL)

    def session(self) -> dict[str, Any]:
        """The content of ``session.json``; empty if it is missing or damaged."""
        try:
            data = (self.path / SESSION).read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unreadable(SESSION, error) from error
        content = facts_in(data)
        if content is None:
            what = "not JSON" if parsed(data) is BROKEN else "damaged"
            self.notes.append(f"session.json is {what} and was ignored.")
            return {}
        self._ends = ends_in(content)
        content.pop(ENDS, None)
        facts: dict[str, Any] = without_surrogates(content)
        return facts

    def profile(self) -> Profile | None:
        """The profile; ``None`` if it was not written or cannot be read."""
        try:
            return Profile.load(self.path / PROFILE)
        except FileNotFoundError:
            return None
        except (FluidError, OSError) as error:
            self.notes.append(f"The profile was ignored: {error}")
            return None

    def results(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``results.jsonl``: finished iterations, in the order written."""
        return self._entries(RESULTS)

    def trials(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``trials.jsonl``: names of groups and configs of trials, in the order written."""
        return self._entries(TRIALS)

    def forecasts(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``forecasts.jsonl``, in the order written; none if the session forecast nothing."""
        return self._entries(FORECASTS) if (self.path / FORECASTS).is_file() else ()

    def entries(self) -> Sequence[Mapping[str, Any]]:
        """The lines of the journal that :meth:`journal` read, as they are, up to the first that cannot be used."""
        return self._journal.entries

    def journal(self) -> Recovered:
        """The groups and trials in the journal; empty if it is missing or damaged."""
        try:
            recovered = self._journal.read()
            self._note_end(JOURNAL, self._journal.lines.checks)
            return recovered
        except FileNotFoundError:
            self.notes.append("journal.jsonl is missing: budgets and final states of trials are unknown.")
        except InvalidFieldError as error:
            # The error's value may be a whole line, so it is omitted.
            self.notes.append(f"The journal was ignored: {error.field} {error.reason}")
        except OSError as error:
            raise self._unreadable(JOURNAL, error) from error
        return Recovered()

    def _entries(self, name: str) -> Sequence[Mapping[str, Any]]:
        objects = self._objects[name]
        try:
            objects.read()
        except FileNotFoundError:
            self.notes.append(f"{name} is missing.")
        except OSError as error:
            raise self._unreadable(name, error) from error
        checks, lines = objects.lines.checks, objects.lines.count
        if checks.damage and not objects.found:
            self.notes.append(f"{name} is damaged: none of its {line_count(lines)} could be read.")
        elif checks.damage:
            self.notes.append(
                f"{line_count(checks.damage)} of {name} could not be read, the first at line {checks.first}."
            )
        self._note_end(name, checks)
        return objects.found

    def _note_end(self, name: str, checks: LineChecks) -> None:
        """Adds a note if a file is shorter than ``session.json`` says."""
        if not checks.reaches(self._ends.get(name, 0)):
            self.notes.append(f"{name} ends too early: its last lines are missing.")

    def _unreadable(self, name: str, error: OSError) -> InvalidFieldError:
        return InvalidFieldError(self._argument, str(self.path / name), f"cannot be read: {error.strerror}")


class _Objects:
    """The objects in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.lines = JsonLines(path)
        self.found: list[Mapping[str, Any]] = []

    def read(self) -> None:
        """Takes the new lines."""
        for _, value in self.lines.new():
            if isinstance(value, dict):
                self.found.append(value)
            elif value is not BROKEN:
                self.lines.checks.refuse()


class _Journal:
    """The journal, replayed as far as it was read."""

    def __init__(self, path: Path) -> None:
        self.lines = JsonLines(path)
        self._replay = Replay()
        self._error: InvalidFieldError | None = None
        #: The entries up to the first that cannot be used.
        self.entries: list[Mapping[str, Any]] = []

    def read(self) -> Recovered:
        """Takes the new lines; raises InvalidFieldError if one of them or of those before cannot be used."""
        for number, value in self.lines.new():
            try:
                if self._error is None:
                    self._take(value, number)
            except InvalidFieldError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._replay.result

    def _take(self, value: Any, number: int) -> None:
        checks = self.lines.checks
        if checks.is_checked and checks.first is not None and number >= checks.first:
            raise InvalidFieldError("journal", None, f"is damaged at line {checks.first}")
        if value is BROKEN:
            self._replay.take_broken(number)
        else:
            self._replay.take(value, number)
            self.entries.append(value)


def line_count(number: int) -> str:
    """A number of lines, for people."""
    return "1 line" if number == 1 else f"{number:,} lines"


def device_from(fields: object) -> Device:
    """A device from its JSON fields; unknown fields are ignored."""
    if not isinstance(fields, Mapping):
        raise InvalidFieldError("devices", fields, "each device must be an object")
    names = ("host", "kind", "speed", "memory_bytes", "model", "tags")
    known = {name: fields[name] for name in names if fields.get(name) is not None}
    return Device(int(fields["index"]), **known)
