"""Prints what ``fluid doctor --shared`` found of a folder: as a table with sentences, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fluid.display.format import duration, number
from fluid.joint.meeting import Spread
from fluid.joint.probe import SLOW_APPEND_S, SLOW_LOOK_S, Probe
from fluid.reports.doctor import named_values, sentences

#: What drivers need, in words.
_NEEDS = {
    "files": "files that are written, synchronised and read",
    "rename": "a file that takes another one's place",
    "links": "hard links that fail where the name is taken",
    "log": "a log",
    "race": "a log to which several processes append at once",
}


def probe_report(found: Probe) -> RenderableType:
    """What was found, as a table, followed by what the folder gives and what it does not."""
    parts: list[RenderableType] = [*named_values(_rows(found)), Text()]
    given = [name for name, is_given in found.given.items() if is_given]
    parts += sentences("+", [f"The folder gives {_NEEDS[name]}." for name in given], "green")
    parts += sentences("!", found.warnings, "yellow")
    parts += sentences("x", found.problems, "red")
    return Group(*parts, Text(), Text(_verdict(found), style="bold"))


def probe_json(found: Probe) -> dict[str, Any]:
    """The output of ``fluid doctor --shared DIR --json``; what was not measured is ``null``.

    * ``folder``: its path; ``file_system``: ``type``, ``source``, ``mounted_at`` and ``options`` of the mount
    * ``usable``: whether drivers can share the folder; ``problems`` and ``warnings``: sentences, why not, and what may
      go wrong
    * ``given``: by name, whether the folder gives what is needed: ``files``, ``rename``, ``links``, ``log``, ``race``
      (several processes append at once); ``null`` after the first that it does not give
    * ``append``, ``look``: seconds of an append, and of a look at the log that finds nothing new: ``median_s``,
      ``p95_s``, ``worst_s``, and ``times``, how often each was measured
    * ``processes``, ``appends_per_s``: processes that appended at once, and appends per second of all together
    * ``others``: a list of the other machines' processes: ``host``, ``pid``, ``is_here`` (it is of this machine), and
      the seconds until an answer was read, by an ``entry`` of a log and by the ``content`` of a file that is rewritten,
      as for ``append``
    """
    system, meeting = found.file_system, found.meeting
    return {
        "folder": str(found.folder),
        "file_system": None if system is None else asdict(system),
        "usable": found.is_usable,
        "given": found.given,
        "append": None if found.append is None else asdict(found.append),
        "look": None if found.look is None else asdict(found.look),
        "processes": found.processes,
        "appends_per_s": found.appends_per_s,
        "others": [asdict(other) for other in (meeting.others if meeting is not None else ())],
        "problems": found.problems,
        "warnings": found.warnings,
    }


def _verdict(found: Probe) -> str:
    if found.is_usable:
        return "Several drivers can share this folder."
    if all(found.given.values()):
        return "Drivers of this machine can share this folder. That several machines can was not shown."
    return "Drivers cannot share this folder."


def _rows(found: Probe) -> Iterable[tuple[str, str]]:
    yield "folder", str(found.folder)
    if (system := found.file_system) is not None:
        yield "file system", f"{system.type}, {system.source} on {system.mounted_at}"
        yield "options", ", ".join(system.options)
    if found.append is not None:
        yield "an append", f"{_spread(found.append)} (good: less than {duration(SLOW_APPEND_S)})"
    if found.look is not None:
        yield "a look", f"{_spread(found.look)} (good: less than {duration(SLOW_LOOK_S)})"
    if found.appends_per_s is not None:
        yield "appends", f"{number(found.appends_per_s)} a second, of {found.processes} processes together"
    for other in found.meeting.others if found.meeting is not None else ():
        yield f"{other.host}, process {other.pid}", ""
        yield "  entry, answer", _answer(other.entry)
        yield "  content, answer", _answer(other.content)


def _spread(spread: Spread) -> str:
    return f"{duration(spread.median_s)}, 95 % within {duration(spread.p95_s)}"


def _answer(spread: Spread) -> str:
    return f"{duration(spread.median_s)}, at worst {duration(spread.worst_s)}"
