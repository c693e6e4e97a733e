"""From where the trials of a run were restored, how often no disk was read, and what that saved."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid.display.format import count, duration, percent
from fluid.reports.story.history import Entry, RunHistory
from fluid.reports.story.words import bytes_name

#: Where states were, in the order in which reports name them, and how.
SOURCES = {"device": "on the device", "memory": "in host memory", "disk": "on disk", "host": "on another host"}
#: Seconds that reading a byte from disk is taken to cost where no restore from disk was measured: 200 MB/s.
ASSUMED_DISK_S = 5e-9


@dataclass(frozen=True)
class SourceRestores:
    """Restores from one source.

    Attributes:
        number: how many.
        seconds: the median; ``None`` where nothing is read, as on the device.
    """

    number: int
    seconds: float | None = None


@dataclass(frozen=True)
class Restores:
    """How trials went on from states that they had: after a rung, a preemption, a move or a failure.

    Attributes:
        sources: by source, those from which a trial was restored.
        unknown: restores of which the source was not recorded.
        saved_s: seconds that those on a device or in memory took less than from disk.
        is_estimated: whether what the disk takes was not measured for all of them, but estimated by their bytes.
        bytes: that were read.
    """

    sources: Mapping[str, SourceRestores] = field(default_factory=dict)
    unknown: int = 0
    saved_s: float = 0.0
    is_estimated: bool = False
    bytes: int = 0

    @property
    def number(self) -> int:
        """Restores of which the source is known."""
        return sum(each.number for each in self.sources.values())

    @property
    def hit_rate(self) -> float | None:
        """Share of these that found the state on the device or in its host's memory; ``None`` if there are none."""
        hits = sum(self.sources[source].number for source in ("device", "memory") if source in self.sources)
        return hits / self.number if self.number else None

    @property
    def text(self) -> str:
        """In a line; empty if no trial was restored, or the journal does not tell from where."""
        if self.hit_rate is None or (self.unknown and self.sources.keys() == {"device"}):
            return ""
        named = [
            f"{each.number} {SOURCES[source]}" + ("" if each.seconds is None else f" ({duration(each.seconds)} each)")
            for source, each in self.sources.items()
        ]
        text = f"{count(self.number, 'restore')}: {', '.join(named)}; {percent(self.hit_rate)} without a disk"
        if self.saved_s > 0.0:
            text += f", which saved {duration(self.saved_s)}"
            text += " as estimated from the bytes" if self.is_estimated else ""
        return text

    def as_json(self) -> dict[str, Any]:
        """From where trials were restored, in the output of ``fluid report --json`` as ``restores``.

        * ``by_source``: of each source (``device``, ``memory``, ``disk``, ``host``: the memory of another host) the
          ``number`` of restores and ``median_s``, ``null`` on a device, where nothing is read
        * ``unknown``: restores of which the source was not recorded
        * ``hit_rate``: the share of the others on the device or in memory; ``saved_s``, how much less these took than
          from disk, and ``is_estimated``, whether that was estimated from the bytes for some
        * ``bytes`` that were read
        """
        return {
            "by_source": {
                source: {"number": each.number, "median_s": each.seconds} for source, each in self.sources.items()
            },
            "unknown": self.unknown,
            "hit_rate": self.hit_rate,
            "saved_s": self.saved_s,
            "is_estimated": self.is_estimated,
            "bytes": self.bytes,
        }


class RestoreRecord(NamedTuple):
    """One restore: of a trial of a profile key, from where, in how many seconds, of how many bytes if known."""

    key: str
    source: str
    seconds: float
    bytes: int


def restores_of(history: RunHistory) -> Restores:
    """The restores of a run, as its journal tells them."""
    found: list[RestoreRecord] = []
    unknown = 0
    for trial, entries in history.of_trial.items():
        size, key = 0, history.key_of.get(trial, "")
        for number, entry in enumerate(entries):
            if entry.what == "NotePlaced" and entry.fields.get("resident") and _went_on(entries, number):
                found.append(RestoreRecord(key, "device", 0.0, size))
            elif entry.what == "TrialStarted" and (entry.fields.get("iteration") or 0) > 0:
                restored = _restored(key, entry.fields.get("restoring"))
                if restored is None:
                    unknown += 1
                else:
                    found.append(restored)
                    size = restored.bytes
    return _summed(found, unknown)


def set_up_words(iteration: int, started: Mapping[str, Any]) -> str:
    """How a trial was set up in its lane, for its story: ``"restored from host memory in 0.2 s"``."""
    seconds = duration(float(started["seconds"]))
    restored = _restored("", started.get("restoring"))
    if restored is None or not iteration:
        return f"{'restored' if iteration else 'set up'} in {seconds}"
    place = {"memory": "host memory", "host": "another host"}.get(restored.source, restored.source)
    size = bytes_name(restored.bytes) if restored.bytes else "its checkpoint"
    return f"restored from {place} in {seconds}, of which reading {size} took {duration(restored.seconds)}"


def _went_on(entries: Sequence[Entry], placed: int) -> bool:
    """Whether a trial that was placed where its state is kept went on there, and was not set up anew."""
    for entry in entries[placed + 1 :]:
        if entry.what == "TrialStarted":
            return False
        if entry.what in ("IterationReported", "NotePlaced", "NoteQueued", "NotePaused", "ReportEnd"):
            return True
    return True


def _restored(key: str, restoring: object) -> RestoreRecord | None:
    if not isinstance(restoring, (list, tuple)) or len(restoring) != 3 or restoring[0] not in SOURCES:
        return None
    source, seconds, size = restoring
    if not isinstance(seconds, (int, float)) or not isinstance(size, int):
        return None
    return RestoreRecord(key, str(source), float(seconds), size)


def _summed(found: Sequence[RestoreRecord], unknown: int) -> Restores:
    seconds: dict[str, list[float]] = {}
    for each in found:
        seconds.setdefault(each.source, []).append(each.seconds)
    sources = {
        source: SourceRestores(len(seconds[source]), None if source == "device" else statistics.median(seconds[source]))
        for source in SOURCES
        if source in seconds
    }
    from_disk: dict[str, list[float]] = {}
    for each in found:
        if each.source == "disk":
            from_disk.setdefault(each.key, []).append(each.seconds)
    per_byte = [each.seconds / each.bytes for each in found if each.source == "disk" and each.bytes > 0]
    rate = statistics.median(per_byte) if per_byte else ASSUMED_DISK_S
    usual = statistics.median([each.bytes for each in found if each.bytes]) if any(each.bytes for each in found) else 0
    saved, is_estimated = 0.0, False
    for each in found:
        if each.source in ("device", "memory"):
            measured = each.key in from_disk
            disk = statistics.median(from_disk[each.key]) if measured else rate * (each.bytes or usual)
            saved += max(0.0, disk - each.seconds)
            is_estimated |= not measured
    return Restores(sources, unknown, saved, is_estimated, sum(each.bytes for each in found if each.source != "device"))
