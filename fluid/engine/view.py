"""What the engine shows of itself in the status of a session: copies, which later events do not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fluid.devices.occupancy import Occupancy
from fluid.engine.core import SessionState
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.key_estimates import KeyEstimate
from fluid.engine.placing.lanes import Lanes
from fluid.engine.records import TrialRecord, Trials
from fluid.resources import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device.

    Attributes:
        device_id, kind, host: the device.
        residents: the trials that run there, each with its width; that of one that takes turns is for when it iterates.
        lanes: the number of its lanes.
        packs: trials that share a process, in which they are fused as far as they can be, or take turns.
        in_turns: whether they take turns.
    """

    device_id: int
    kind: str
    host: str
    residents: tuple[tuple[str, float], ...]
    lanes: int
    packs: tuple[tuple[str, ...], ...] = ()
    in_turns: bool = False

    @property
    def sharing(self) -> str:
        """What the trials of a pack are, in words: ``"fused"`` or ``"in turns"``."""
        return "in turns" if self.in_turns else "fused"

    @property
    def parts(self) -> tuple[tuple[tuple[str, ...], float], ...]:
        """The residents, those of a pack together: the trials and the width of each part, in order.

        The width of a trial in a pack says how many may be there. The device is all theirs, however many there are.
        """
        if not self.packs:
            return tuple(((trial,), width) for trial, width in self.residents)
        pack_of = {trial: pack for pack in self.packs for trial in pack}
        parts = dict.fromkeys(pack_of.get(trial, (trial,)) for trial, _ in self.residents)
        return tuple((part, 1.0 / len(parts)) for part in parts)


def device_statuses(core: SessionState) -> tuple[DeviceStatus, ...]:
    """Copies how the devices stand, by index."""
    return tuple(_status(device, core.trials, core.occupancy, core.lanes) for device in core.occupancy.devices)


def seconds_left(trials: Iterable[TrialRecord], occupancy: Occupancy, estimates: Estimates) -> float | None:
    """Predicted seconds until trials have ended: those of the longest, or of all their work over all devices, if more.

    Trials that the user paused are left out. ``None`` where none of the others was measured.
    """
    unended = [trial for trial in trials if not trial.state.ended]
    if not unended:
        return 0.0
    unended = [trial for trial in unended if not trial.is_held]
    if not occupancy or not any(estimates.is_measured(trial) for trial in unended):
        return None
    by_id = {trial.trial_id: trial for trial in unended}
    longest = max(_path(trial, by_id, estimates) for trial in unended)
    beside = -(-len(unended) // len(occupancy))
    work = sum(estimates.height(trial) * devices_taken(trial, estimates.of_key(trial), beside) for trial in unended)
    return max(longest, work / len(occupancy))


def _path(trial: TrialRecord, others: Mapping[str, TrialRecord], estimates: Estimates) -> float:
    """Seconds until a trial has ended, with those until the trials from whose states it starts have come there."""
    seconds, start = estimates.seconds_left(trial), trial.spec.start
    while trial.awaits and start is not None and (parent := others.get(start.parent)) is not None:
        left = max(0, (start.at or 0) - max(parent.progress.done, parent.progress.starts_at))
        seconds += left * estimates.pace(parent)
        trial, start = parent, parent.spec.start
    return seconds


def devices_taken(trial: TrialRecord, key: KeyEstimate, beside: int) -> float:
    """How many devices a trial takes for its runtime alone; less than one if it is fused, of so many on a device."""
    if trial.spec.gang:
        return float(trial.fixed_width or 1)
    rows = min(key.fusing.total, beside)
    return key.stretch(1.0 / rows) / rows


def places(core: SessionState) -> dict[str, int]:
    """Where the trials of each group with open ones stand among those of all owners, 1 for those that start first.

    Empty where there is one owner.
    """
    ranks = core.queue.ranks
    if not ranks:
        return {}
    keys = {
        group.group_id: (-group.terms.priority, ranks.get(group.owner, len(ranks)), group.owner)
        for group in core.groups.values()
        if group.open
    }
    if len({owner for *_, owner in keys.values()}) < 2:
        return {}
    order = {key: place for place, key in enumerate(sorted(set(keys.values())), 1)}
    return {group_id: order[key] for group_id, key in keys.items()}


def _status(device: Device, trials: Trials, occupancy: Occupancy, lanes: Lanes) -> DeviceStatus:
    # A row without a trial keeps the old devices of one that moves.
    held = [trials.by_row[row] for row in occupancy.residents[device.index] if row in trials.by_row]
    in_turns = bool(held) and held[0].takes_turns
    packs: tuple[tuple[str, ...], ...] = ()
    if in_turns:
        packs = tuple(tuple(lane.holders) for lane in lanes.on(device.index) if lane.holders)
    elif held and held[0].row in occupancy.groups.of:
        packs = (tuple(trial.trial_id for trial in held),)
    return DeviceStatus(
        device_id=device.index,
        kind=device.kind,
        host=device.host,
        residents=tuple((trial.trial_id, lanes.width_of(trial, trial.width, fused=not in_turns)) for trial in held),
        lanes=len(lanes.on(device.index)),
        packs=packs,
        in_turns=in_turns,
    )
