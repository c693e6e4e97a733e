"""Reads the files of a run folder: JSON and JSON lines, any of which may be missing or damaged.

The session may still be running, or may have been killed. So only ``results.jsonl`` must exist; of the other files as
much is read as possible, and a note names what could not be read.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fluid._clock import ClockReading, local_time
from fluid.checksums import DAMAGED, LineChecks, split_line, split_object
from fluid.errors import FluidError, InvalidFieldError
from fluid.keeping import finite_number
from fluid.measure.json_input import read_record, without_surrogates
from fluid.resources import Device
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


def runs_home() -> Path:
    """The folder of the run folders for which the user has named no place."""
    return Path(os.environ.get("FLUID_RUNS", "~/fluid_runs")).expanduser()


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
    facts = None if content is None else as_written(content)
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


def read_search(entry: Mapping[str, Any]) -> Search | None:
    """The search in a group's line of ``trials.jsonl``; ``None`` if it has none, or one that cannot be read."""
    known = {each.name: entry[each.name] for each in fields(Search) if each.name in entry}
    if not known.keys() & {"metric", "mode", "trials"}:
        return None
    try:
        return read_record({"extends": True, **known}, Search, "search")
    except InvalidFieldError:
        return None


# -- json lines ----------------------------------------------------------------------------------
#
# A file of JSON lines, also while its session writes it: each reading takes the lines that are new.


#: What stands for a line that is no JSON, or is damaged, repeated or out of order.
BROKEN = object()
#: Bytes before the position that must be as they were: if not, the file was replaced.
_REMEMBERED = 256


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: its number, from 1.
        start, end: its first byte, and the byte behind its newline.
        value: what was made of its JSON text, or ``BROKEN``.
    """

    number: int
    start: int
    end: int
    value: Any

    @property
    def entry(self) -> dict[str, Any]:
        """Its JSON object; empty if it has none."""
        return self.value if isinstance(self.value, dict) else {}


class JsonLines:
    """The lines of one file.

    An unfinished last line waits until it is whole: a session is writing it, or was killed meanwhile.

    Args:
        path: the file.
        start: the byte at which the first line begins.
        read: makes a line's value of its JSON text.

    Attributes:
        count: lines taken so far.
        checks: what is damaged of these.
    """

    def __init__(self, path: Path, start: int = 0, read: Callable[[bytes], Any] | None = None) -> None:
        self._path = path
        self._read = read or parsed
        self.count = 0
        self.checks = LineChecks(start)
        #: The byte behind the lines taken so far, and the last bytes before it.
        self._position = start
        self._before = b""

    def new(self, end: int | None = None) -> Iterator[Line]:
        """Takes the new lines one by one, but for blank ones. Those that the caller leaves are new again.

        Args:
            end: the byte at which to end; ``None`` for the end of the file.

        Raises:
            FileNotFoundError: the file is missing, and was when it was read before.
            OSError: the file cannot be read.
            ReplacedError: the lines taken so far are no longer in the file.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            if not self._before:
                raise
            raise ReplacedError(f"{self._path} was deleted") from None
        with file:
            file.seek(self._position - len(self._before))
            if file.read(len(self._before)) != self._before:
                raise ReplacedError(f"{self._path} was truncated or replaced")
            for line in file:
                # A JSON object ends where its braces do: it is whole even if its newline is missing.
                if (end is not None and self._position >= end) or not (line.endswith(b"\n") or self._is_whole(line)):
                    return
                begins, start = not self._before or self._before.endswith(b"\n"), self._position
                self._position += len(line)
                self._before = line[-_REMEMBERED:] if begins else (self._before + line)[-_REMEMBERED:]
                self.count += begins
                if not line.isspace():
                    yield Line(self.count, start, self._position, self._value_of(line))
                elif begins:
                    self.checks.take(line)

    def there(self, end: int | None = None) -> Iterator[Line]:
        """The same of a file that may be missing, which has none."""
        with suppress(FileNotFoundError):
            yield from self.new(end)

    def _value_of(self, line: bytes) -> Any:
        text = self.checks.take(line)
        value = BROKEN if text is None else self._read(text)
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


def parsed(text: bytes) -> Any:
    """The value of JSON text, as reports show it; ``BROKEN`` if it is none."""
    value = as_written(text)
    return without_surrogates(value) if b"\\ud" in text else value


def as_written(text: bytes) -> Any:
    """The value of JSON text, with the lone surrogates that it has; ``BROKEN`` if it is none."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        pass
    try:
        # NaN and lone surrogates are none of JSON. A line cut off within a character must not make others unreadable.
        return json.loads(text.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return BROKEN


def is_entry(line: bytes) -> bool:
    """Whether a line by itself is a JSON object, and not damaged."""
    offset, text = split_line(line)
    return offset != DAMAGED and isinstance(parsed(text), dict)


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


def devices_in(facts: Mapping[str, Any]) -> dict[int, Device]:
    """The devices that a session began with, by index, as far as its facts can be read."""
    found: dict[int, Device] = {}
    listed = facts.get("devices")
    for each in listed if isinstance(listed, list) else ():
        with suppress(KeyError, TypeError, ValueError):
            device = device_from(each)
            found.setdefault(device.index, device)
    return found


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
