"""The lines of a trial's story, and the words that they are made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluid.display.format import count, duration, fraction, index_ranges
from fluid.reports.story.history import Entry, requires_of
from fluid.results.iterations import StoredIteration


@dataclass(frozen=True)
class StoryLine:
    """One thing that happened to a trial.

    Attributes:
        at: seconds since the first iteration of the run began; negative before.
        what: one word: ``"submitted"``, ``"waited"``, ``"started"``, ``"ran"``, ``"resized"``, ``"saved"``,
            ``"awaits"``, ``"forked"``, ``"shared"``, ``"preempted"``, ``"queued"``, ``"hung"``, ``"set_back"``,
            ``"extended"``, ``"resumed"``, ``"stop"``, ``"pause"``, ``"paused"``, ``"resume"``, ``"deadline"``,
            ``"ended"``, ``"told"`` or ``"unfinished"``.
        text: one sentence without its period.
        facts: the figures in it: seconds, iterations, indices.
    """

    at: float
    what: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def ran_line(
    run: Sequence[StoredIteration],
    saves: Sequence[Entry],
    *,
    not_before: float,
    kinds: Mapping[int, str],
    alone: float | None = None,
) -> StoryLine:
    """Iterations that ran one after the other, with what was saved meanwhile.

    Args:
        run: the iterations, all of them fused, or none.
        saves: saves of the trial on the way.
        not_before: the first iteration began at that time or later.
        kinds: the kind of each device.
        alone: measured seconds of an iteration of such a trial alone; ``None`` if unknown.
    """
    first, last = run[0], run[-1]
    seconds = math.fsum(one.end - one.start for one in run)
    numbers = f"iteration {first.number}" if len(run) == 1 else f"iterations {first.number} to {last.number}"
    width = f"{fraction(first.width)} of " if first.width < 1.0 and first.rows == 1 else ""
    text = f"ran {numbers} on {width}{devices_name(first.devices, kinds)} in {duration(seconds)}"
    text += f", {duration(seconds / len(run))} each" if len(run) > 1 else ""
    facts: dict[str, Any] = {"first": first.number, "last": last.number, "seconds": seconds, "width": first.width}
    if first.rows > 1:
        text += _fused_with(run, alone, facts)
    if saves:
        checkpoint = saves[-1].fields["checkpoint"]
        took = statistics.median(float(save.fields["seconds"]) for save in saves)
        often = f"{len(saves)} times, last" if len(saves) > 1 else "once,"
        text += f"; saved {often} {after_iteration(int(checkpoint['iteration']))}"
        text += f", to {medium_name(checkpoint)} in {duration(took)}"
        facts["saves"], facts["save_s"] = len(saves), took
    return StoryLine(max(first.start, not_before), "ran", text, facts)


def _fused_with(run: Sequence[StoredIteration], alone: float | None, facts: dict[str, Any]) -> str:
    """With how many others iterations were fused, and what that gained; the figures are added to the facts."""
    most, least = (pick(one.rows for one in run) for pick in (max, min))
    text = f"; fused with {count(most - 1, 'other')}"
    text += f", at the end with {run[-1].rows - 1}" if run[-1].rows == least < most else ""
    text += f", at times with {least - 1}" if run[-1].rows != least else ""
    facts["rows"] = most
    facts["device_s"] = math.fsum(one.device_seconds for one in run)
    seconds = math.fsum(one.seconds for one in run)
    if alone is not None and seconds > 0.0:
        gain = facts["fused_gain"] = alone * sum(one.rows for one in run) / seconds
        text += f": {gain:.1f}x the iterations per second of one alone"
    return text


def after_iteration(iteration: int) -> str:
    """The state that a trial goes on from."""
    return f"after iteration {iteration}" if iteration else "from the beginning"


def gained(seconds: float) -> str:
    """A gain of seconds; a loss if negative."""
    return f"{duration(abs(seconds))} {'earlier' if seconds >= 0.0 else 'later'}"


def size_name(width: float) -> str:
    """A width in words."""
    return f"{fraction(width)} of a device" if width < 1.0 else count(round(width), "device")


def devices_name(devices: Sequence[int], kinds: Mapping[int, str]) -> str:
    """Devices by their indices: ``"cpu 0"``, ``"gpus 0-3"``; ``"devices 0,1"`` if they are of several kinds.

    Args:
        devices: their indices.
        kinds: the kind of each device.
    """
    found = {kinds.get(device, "device") for device in devices}
    kind = found.pop() if len(found) == 1 else "device"
    return f"{kind} {devices[0]}" if len(devices) == 1 else f"{kind}s {index_ranges(devices)}"


def medium_name(checkpoint: Mapping[str, Any]) -> str:
    """Where a checkpoint is."""
    return "host memory" if checkpoint.get("in_memory") else "disk"


def bytes_name(size: float) -> str:
    """A size in memory."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def needs_text(spec: Mapping[str, Any]) -> str:
    """The device memory that a trial needs and what it requires of devices, as the journal says; empty for nothing."""
    text, memory = "", spec.get("memory")
    if isinstance(memory, Mapping):
        text += f" with {bytes_name(memory['persistent_bytes'] + memory['ephemeral_bytes'])} of device memory"
    requires = requires_of(spec)
    return text if requires is None else f"{text}; it requires {requires}"
