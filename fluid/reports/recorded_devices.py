"""The devices of a recorded run: which there were, and when they came and went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import DeviceAdded
from fluid.planners.rollout import Segment
from fluid.reports.segments import Resized
from fluid.reports.timeline import DeviceChange
from fluid.resources import Device
from fluid.results.iterations import FinishedIterations
from fluid.results.journal import Recovered
from fluid.results.run_files import device_from

#: Most seconds between two devices with which a session begins.
_TOGETHER_S = 5.0


def device_events(
    journal: Recovered, done: FinishedIterations, row_of: Mapping[str, int]
) -> tuple[list[DeviceChange], list[Resized]]:
    """Devices that were added or lost, and resizes of trials, in seconds since the run began."""
    changes: list[DeviceChange] = []
    resized: list[Resized] = []
    present: set[int] = set()
    #: Of a session that was resumed: devices that it had and that were not reported once more so far, and when it was.
    left, resumed_at = set[int](), 0.0
    #: Those that were added last, one shortly after the other: a session that begins has them all.
    together, added_at = set[int](), -math.inf
    for note, at in done.with_run_times(journal.places):
        time = max(at, 0.0)
        if isinstance(note, DeviceAdded):
            index = note.device.index
            if index in together or time > added_at + _TOGETHER_S:
                together = set()
            if index in present - left:
                left, resumed_at = present - together - {index}, time
            elif index not in present:
                changes.append((time, index, True))
            present.add(index)
            together.add(index)
            left.discard(index)
            added_at = time
            continue
        changes += [(resumed_at, index, False) for index in sorted(left)]
        present -= left
        left = set()
        if isinstance(note, NoteResize):
            if note.trial_id in row_of:
                resized.append(Resized(row_of[note.trial_id], at, note.seconds, note.device_ids))
        elif note.device_id in present:
            present.remove(note.device_id)
            changes.append((time, note.device_id, False))
    changes += [(resumed_at, index, False) for index in sorted(left)]
    return sorted(changes, key=lambda change: change[0]), resized


def devices_of(session: Mapping[str, Any], journal: Recovered, segments: Iterable[Segment]) -> tuple[Device, ...]:
    """The devices that the session began with, those that were added, and any others that trials used."""
    devices: dict[int, Device] = {}
    listed = session.get("devices")
    for fields in listed if isinstance(listed, list) else ():
        try:
            device = device_from(fields)
        except (KeyError, TypeError, ValueError):
            continue
        devices.setdefault(device.index, device)
    for note in journal.places:
        if isinstance(note, DeviceAdded):
            devices.setdefault(note.device.index, note.device)
        elif isinstance(note, NoteDeviceLost):
            devices.setdefault(note.device_id, Device(note.device_id))
    kind = next(iter(devices.values())).kind if devices else "gpu"
    for index in {device for segment in segments for device in segment.devices} - devices.keys():
        devices[index] = Device(index, kind=kind)
    return tuple(devices[index] for index in sorted(devices))
