"""The files of a run folder as they are: JSON lines, some of which may be torn or missing.

A session may still run, or may have been killed, while its folder is read. So only ``results.jsonl`` has to be there;
everything else is read as far as it goes, and what could not be read is told in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fluid.display.format import count
from fluid.engine.journal import Recovered, replay
from fluid.errors import FluidError, InvalidFieldError
from fluid.planning.profile import Profile
from fluid.resources import Device


class RunFiles:
    """Reads the files of one folder.

    Args:
        path: the folder.

    Attributes:
        notes: what could not be read, a sentence each.

    Raises:
        InvalidFieldError: it is no run folder; the message names the path.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.notes: list[str] = []
        if not self.path.is_dir():
            reason = "is a file; the folder of a run is wanted" if self.path.exists() else "does not exist"
            raise InvalidFieldError("run", str(path), reason)
        if not (self.path / "results.jsonl").is_file():
            raise InvalidFieldError("run", str(path), "is not the folder of a run: it has no results.jsonl")

    def session(self) -> dict[str, Any]:
        """What ``session.json`` says; nothing where it is missing or broken."""
        try:
            content = json.loads(self._text("session.json"))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            self.notes.append("session.json is not JSON and was left out.")
            return {}
        return content if isinstance(content, dict) else {}

    def profile(self) -> Profile | None:
        """The profile, if it was written and can be read."""
        try:
            return Profile.load(self.path / "profile.json")
        except FileNotFoundError:
            return None
        except (FluidError, OSError) as error:
            self.notes.append(f"The profile was left out: {error}")
            return None

    def results(self) -> list[Mapping[str, Any]]:
        """Finished iterations, in the order in which they were written."""
        return list(self._lines("results.jsonl"))

    def trials(self) -> list[Mapping[str, Any]]:
        """Groups' names and trials' configs, in the order in which they were written."""
        return list(self._lines("trials.jsonl"))

    def journal(self) -> Recovered:
        """What the journal tells of groups and trials; nothing where it is missing or broken."""
        try:
            return replay(self._text("journal.jsonl").splitlines())
        except FileNotFoundError:
            self.notes.append("journal.jsonl is missing: budgets and how trials ended are not known.")
        except InvalidFieldError as error:
            # The value may be a whole line.
            self.notes.append(f"The journal was left out: {error.field} {error.reason}")
        return Recovered()

    def _lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        try:
            lines = self._text(name).splitlines()
        except FileNotFoundError:
            self.notes.append(f"{name} is missing.")
            return
        broken = 0
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError):
                # The last line is torn where the session was killed, or writes it just now.
                broken += number < len(lines)
                continue
            if isinstance(entry, dict):
                yield entry
            else:
                broken += bool(line.strip())
        if broken:
            self.notes.append(f"{count(broken, 'line')} of {name} could not be read.")

    def _text(self, name: str) -> str:
        try:
            # A line torn within a character must not make the others unreadable.
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InvalidFieldError("run", str(self.path / name), f"cannot be read: {error.strerror}") from error


def device_from(fields: object) -> Device:
    """A device from its fields as JSON; what is no field of a device is left out."""
    if not isinstance(fields, Mapping):
        raise InvalidFieldError("devices", fields, "each device must be an object")
    known = {name: fields[name] for name in ("host", "kind", "speed", "memory_bytes") if fields.get(name) is not None}
    return Device(int(fields["index"]), **known)
