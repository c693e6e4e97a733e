"""Reads the files of a run folder: JSON and JSON lines, any of which may be missing or damaged.

The session may still be running, or may have been killed. So only ``results.jsonl`` must exist; of the other files as
much is read as possible, and a note names what could not be read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fluid._clock import ClockReading, local_time
from fluid.checksums import DAMAGED, LineChecks, parse_text, split_line, split_object
from fluid.errors import FluidError, InvalidFieldError
from fluid.keeping import finite_number
from fluid.measure.profile import Profile
from fluid.resources import Device
from fluid.results.journal import Recovered, Replay
from fluid.search_shape import SearchShape
from fluid.trialgroup import Search

# -- folder files --------------------------------------------------------------------------------
#
# The files of a run folder: their names, and how one that may be damaged is read.


SESSION = "session.json"
JOURNAL = "journal.jsonl"
RESULTS = "results.jsonl"
TRIALS = "trials.jsonl"
PAYLOADS = "payloads.pkl"
PROFILE = "profile.json"
FORECASTS = "forecasts.jsonl"
LOCK = "session.lock"
#: The files that a session holds locked while it runs.
LOCKED = (LOCK, JOURNAL)
#: Version of the folder's files; the journal's entries have a version of their own. Version 1 had no checksums.
FORMAT = 2
#: Where ``session.json`` says how far the other files went when it was written.
ENDS = "bytes"


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        start, end: its first byte, and the byte behind its newline.
        entry: its JSON object; ``None`` if it has none, or is damaged, repeated or out of order.
    """

    start: int
    end: int
    entry: dict[str, Any] | None


def is_used(folder: Path) -> bool:
    """Whether a session has written to the folder."""
    names = (SESSION, JOURNAL, RESULTS, TRIALS, PAYLOADS)
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in names)


def read_facts(folder: Path) -> dict[str, Any]:
    """The content of ``session.json``; empty if it is missing or damaged."""
    try:
        content = facts_in((folder / SESSION).read_bytes())
    except FileNotFoundError:
        return {}
    return content or {}


def facts_in(data: bytes) -> dict[str, Any] | None:
    """The object that ``session.json`` holds; ``None`` if the file is damaged."""
    content = split_object(data)
    try:
        facts = None if content is None else json.loads(content.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict):
        return None
    facts.pop("crc", None)  # Of a file that another program has written anew.
    return facts


def ends_in(facts: Mapping[str, Any]) -> dict[str, int]:
    """Where the files ended when these facts were written, by name: the offset of the next line, or bytes."""
    found = facts.get(ENDS)
    return {name: end for name, end in found.items() if type(end) is int} if isinstance(found, dict) else {}


def price_in(facts: Mapping[str, Any]) -> float | None:
    """US dollars for a device-hour, as ``session.json`` has it; ``None`` if it has none."""
    return amount_in(facts, "price_per_device_hour")


def amount_in(facts: Mapping[str, Any], name: str) -> float | None:
    """A number of at least 0 among the facts of a session; ``None`` if it has none of this name."""
    value = finite_number(facts.get(name))
    return value if value is not None and value >= 0.0 else None


def why_unreadable(facts: Mapping[str, Any]) -> str | None:
    """Why this version of Fluid cannot read a folder with these facts; ``None`` if it can."""
    written = facts.get("format")
    if not isinstance(written, int) or written <= FORMAT:
        return None
    return f"is of Fluid {facts.get('fluid', '?')}, format {written}; this Fluid reads formats up to {FORMAT}"


def is_locked(folder: Path) -> bool:
    """Whether a session runs in the folder: whether one of :data:`LOCKED` is locked, by whatever process.

    A file that may not be opened is looked for in the kernel's list of locks, by its number alone: on some file systems
    the list names another device. So a session may be taken to run that has ended, but not the reverse.
    """
    return any(_is_locked(folder / name) for name in LOCKED)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        return _is_listed(path)
    except OSError:
        return False
    try:
        # It is shared with other readers, and given up at once: a session that begins at this moment tries again.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)  # A child that another thread forks meanwhile has the file open, too.
    except BlockingIOError:
        return True
    except OSError:
        return False  # A file system without locks.
    finally:
        os.close(file)
    return False


def _is_listed(path: Path) -> bool:
    try:
        number, listed = str(path.stat().st_ino), Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return False
    fields = [line.split() for line in listed.splitlines() if "->" not in line]
    return any(field.rpartition(":")[2] == number for line in fields for field in line if field.count(":") == 2)


def json_lines(path: Path, start: int = 0, end: int | None = None, checks: LineChecks | None = None) -> Iterator[Line]:
    """Gives the lines of a file of JSON objects from byte ``start`` to ``end``; none if the file is missing.

    Args:
        path: the file.
        start, end: bytes; ``None`` for the end of the file.
        checks: is told of all lines, for a caller who wants to know what is damaged.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    checks = checks or LineChecks(start)
    with file:
        file.seek(start)
        for line in file:
            if end is not None and start >= end:
                return
            text = checks.take(line)
            entry = None if text is None else _object_in(text)
            if text is not None and entry is None:
                checks.refuse()
            yield Line(start, start + len(line), entry)
            start += len(line)


def read_search(entry: Mapping[str, Any]) -> Search | None:
    """The search in a group's line of ``trials.jsonl``; ``None`` if it has none, or one that cannot be read."""
    fields = {name: entry.get(name) for name in ("metric", "mode", "trials")}
    if not entry.keys() & fields.keys():
        return None
    try:
        besides = tuple((metric, mode) for metric, mode in entry.get("besides", ()))
        seconds = entry.get("time_budget_s")
        shape = None if entry.get("shape") is None else SearchShape(**entry["shape"])
        return Search(
            **fields,
            extends=entry.get("extends", True),
            besides=besides,
            time_budget_s=seconds,
            shape=shape,
            keeps_best=entry.get("keeps_best", False),
        )
    except (InvalidFieldError, TypeError, ValueError):
        return None


def entry_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line by itself; ``None`` if it has none, or is damaged."""
    offset, text = split_line(line)
    return None if offset == DAMAGED else _object_in(text)


def _object_in(text: bytes) -> dict[str, Any] | None:
    try:
        entry = parse_text(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


# -- json lines ----------------------------------------------------------------------------------
#
# Follows a file of JSON lines while its session writes it: each reading takes the lines that are new.


#: What stands for a line that is no JSON, or is damaged, repeated or out of order.
BROKEN = object()
#: Bytes before the position that must be as they were: if not, the file was replaced.
_REMEMBERED = 256


class JsonLines:
    """The lines of one file.

    An unfinished last line waits until it is whole: a session is writing it, or was killed meanwhile.

    Args:
        path: the file.

    Attributes:
        count: lines taken so far.
        checks: what is damaged of these.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.checks = LineChecks()
        #: Bytes taken so far, and the last of them.
        self._position = 0
        self._before = b""

    def new(self) -> list[tuple[int, Any]]:
        """Takes the new lines: the number and the JSON value of each that is not blank, or ``BROKEN``.

        Raises:
            FileNotFoundError: the file is missing, and was when it was read before.
            OSError: the file cannot be read.
            ReplacedError: the lines taken so far are no longer in the file.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._position - len(self._before))
                same = file.read(len(self._before)) == self._before
                data = file.read()
        except FileNotFoundError:
            if not self._position:
                raise
            same = False
        if not same:
            raise ReplacedError(f"{self._path} was truncated or replaced")
        found = []
        start = 0
        while start < len(data):
            end = data.find(b"\n", start) + 1
            line = data[start : end or len(data)]
            # A JSON object ends where its braces do: it is whole even if its newline is missing.
            if not end and not self._is_whole(line):
                break
            begins = start or not self._before or self._before.endswith(b"\n")
            start += len(line)
            if begins:
                self.count += 1
            if line.strip():
                found.append((self.count, self._value_of(line)))
            elif begins:
                self.checks.take(line)
        self._position += start
        self._before = (self._before + data[max(0, start - _REMEMBERED) : start])[-_REMEMBERED:]
        return found

    def _value_of(self, line: bytes) -> Any:
        text = self.checks.take(line)
        value = BROKEN if text is None else parsed(text)
        if text is not None and value is BROKEN:
            self.checks.refuse()
        return value

    def _is_whole(self, line: bytes) -> bool:
        """Whether an unfinished last line lacks its newline only."""
        offset, text = split_line(line)
        if offset >= 0:
            return b'"}' in line[-3:]  # Behind these the newline may be damaged.
        return not self.checks.is_checked and isinstance(parsed(text), dict)


class ReplacedError(FluidError):
    """A file was truncated or replaced by another one since it was read."""


def without_surrogates(value: Any) -> Any:
    """What JSON holds, with an escape such as ``\\udce9`` for each lone surrogate in a text.

    No output can hold one. A file name that is not UTF-8 has some, and older versions of Fluid let them into ids.
    """
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [without_surrogates(inner) for inner in value]
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(inner) for name, inner in value.items()}
    return value


def parsed(line: bytes) -> Any:
    """The value of JSON text; ``BROKEN`` if it is none."""
    # A line cut off within a character must not make the others unreadable.
    text = line.decode("utf-8", errors="replace")
    try:
        content = parse_text(text)
    except (ValueError, RecursionError):
        return BROKEN
    return without_surrogates(content) if "\\ud" in text else content


# -- run files -----------------------------------------------------------------------------------


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


# -- file times ----------------------------------------------------------------------------------
#
# The time axis of a run folder: one for all sessions that write there, also on other machines or after a reboot.
#
# The first session writes what its monotonic clock shows. Each further one adds a shift to its own, so that times in
# the files of a run compare as they are. ``session.json`` tells, in ``clock``, what the clocks showed as its last
# session began: where the next one has the same clock, it adds the same shift; else it takes from the wall clocks how
# much later it is. If a wall clock was set back, so that the next session would begin before the last entry of the
# files, it begins right there.


def time_in_files(clock: object, now: ClockReading) -> float | None:
    """Returns the present time on the axis of a run's files; ``None`` if the files do not tell.

    Args:
        clock: ``clock`` in ``session.json``, as :func:`clock_facts` makes it; older versions of Fluid told less.
        now: the clock of this process.
    """
    known = clock if isinstance(clock, Mapping) else {}
    at, wall, shift = (finite_number(known.get(name)) for name in ("at", "wall", "shift"))
    if at is None or wall is None or shift is None:
        return None
    return now.at + shift if now.name and now.name == known.get("name") else at + now.wall - wall


def clock_facts(began: ClockReading, shift: float) -> dict[str, Any]:
    """What ``session.json`` says of a session's clock.

    Args:
        began: what the clock showed as the session began.
        shift: seconds that the session adds to what its clock shows, in all files.
    """
    return {
        "at": began.at + shift,
        "time": local_time(began.wall, "%Y-%m-%d %H:%M:%S"),
        "wall": began.wall,
        "name": began.name,
        "shift": shift,
    }
