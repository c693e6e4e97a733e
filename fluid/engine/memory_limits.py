"""Memory limits: how much of a shared device's memory the process of each trial there may take.

A trial that grows beyond its need then runs out of memory itself, instead of a neighbour that asks for the last bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fluid.engine import tuning
from fluid.engine.commands import LimitMemory, StartTrial
from fluid.engine.core import SessionState
from fluid.engine.records import TrialRecord
from fluid.trialgroup import TrialState


class MemoryLimits:
    """Limits trials that share a device whose memory is known; a trial that is alone has no limit."""

    def __init__(self, core: SessionState) -> None:
        self._core = core
        #: device -> (trial's row, lane) -> the limit that the lane was told, bytes.
        self._told: dict[int, dict[tuple[int, int], float]] = {}

    def update(self) -> None:
        """Tells the lanes of devices on which trials, needs or memory have changed; a trial that starts, with that."""
        changed, commands = self._core.memory.pop_changed(), self._core.commands
        if changed:
            starts = {each.trial_id: index for index, each in enumerate(commands) if isinstance(each, StartTrial)}
            for device in changed:
                self._update(device, starts)

    def _update(self, device: int, starts: Mapping[str, int]) -> None:
        told, kept = self._told.pop(device, {}), {}
        commands = self._core.commands
        for trial, limit in self._limits(device):
            lane_id = trial.placement.lanes[0]
            before = told.pop((trial.row, lane_id), None)
            start = starts.get(trial.trial_id)
            if start is not None:  # Its lane knows of no limit yet.
                command = commands[start]
                assert isinstance(command, StartTrial)
                commands[start] = replace(command, limit_bytes=limit)
                before = limit
            elif limit is None or before is None or not _is_close(before, limit):
                if limit is not None or before is not None:
                    commands.append(LimitMemory(trial.trial_id, (lane_id,), limit))
                before = limit
            if before is not None:
                kept[trial.row, lane_id] = before
        records = self._core.trials.by_row
        # A trial that rests in its lane has its limit still, and is told if it has none when it runs again.
        kept.update({key: limit for key, limit in told.items() if _rests(records.get(key[0]), key[1])})
        if kept:
            self._told[device] = kept

    def _limits(self, device: int) -> list[tuple[TrialRecord, float | None]]:
        """The trials whose code runs on a device alone, and the limit that each is to have; ``None`` for none.

        Each gets a part of the memory that is left over, and may exceed its need a little in any case: needs of trials
        of a key differ, and the share of the device beyond the watermark is free.
        """
        core = self._core
        rows, usable = core.occupancy.residents.get(device, ()), core.memory.usable_bytes(device)
        if usable is None:
            return []
        spare = max(0.0, usable - core.memory.taken_bytes(device)) / max(1, len(rows))
        found: list[tuple[TrialRecord, float | None]] = []
        for row in rows:
            trial = core.trials.by_row.get(row)
            if trial is None or not _runs_in_one_lane(trial):
                continue
            need = None if len(rows) == 1 else core.memory.need_of(row)
            least = None if need is None else need.peak_bytes
            limit = None if least is None else max(tuning.MEMORY_TOLERANCE * least, least + spare)
            found.append((trial, limit or None))
        return found


def _runs_in_one_lane(trial: TrialRecord) -> bool:
    if len(trial.placement.lanes) != 1 or not trial.placement.launched or trial.spec.gang:
        return False
    return trial.state in (TrialState.STARTING, TrialState.RUNNING)


def _rests(trial: TrialRecord | None, lane_id: int) -> bool:
    return trial is not None and trial.residence.lane == lane_id


def _is_close(told: float, limit: float) -> bool:
    """Whether a limit need not be told again: it was a little less before, or hardly more."""
    return tuning.LOOSE_LIMIT * limit <= told <= tuning.TIGHT_LIMIT * limit
