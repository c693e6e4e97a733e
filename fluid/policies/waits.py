"""Tells the journal why queued trials wait: once for trials that are alike to placement, and again at each change.

It is what ``fluid why`` tells of trials that wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from fluid.engine.commands import FreeMemory, NoteWaiting, WaitReason
from fluid.engine.core import SessionState
from fluid.engine.policy import Policy
from fluid.engine.records import TrialRecord

#: Most devices that a note lists.
_MOST_DEVICES = 4
#: Lines that are kept beyond twice the number of waiting trials.
_SPARE_LINES = 64


@dataclass(slots=True)
class _WaitLine:
    """Queued trials of one width and one kind.

    Attributes:
        number: by which the journal knows the line.
        reason: the one noted last; ``None`` if none was.
    """

    number: int
    reason: WaitReason | None = None


class Waits(Policy):
    """Notes who waits for what.

    Args:
        core: the state of the session.
    """

    def __init__(self, core: SessionState) -> None:
        self._core = core
        #: (width, kind) -> line
        self._lines: dict[Hashable, _WaitLine] = {}
        self._next = 0

    def after_settling(self) -> None:
        """Notes trials that have joined a line and still wait, and lines that wait for something else than before."""
        scheduling, queue = self._core.scheduling, self._core.queue
        refused, joined = scheduling.placing.refused, scheduling.joined
        scheduling.joined = []
        self._rename_lines()
        if not queue:
            self._lines.clear()
            return
        if not joined and not refused:
            return
        new: dict[int, list[str]] = {}
        for trial in joined:
            if trial.row in queue:
                line = self._line_of(trial)
                if trial.line != line.number:
                    trial.line = line.number
                    new.setdefault(line.number, []).append(trial.trial_id)
        for trial in refused:
            if trial.row in queue:
                line = self._line_of(trial)
                self._note(trial, line, tuple(new.pop(line.number, ())) if new else ())
        for trial in joined:  # of lines whose first trial was not offered a device, as one like it was refused
            if new and trial.row in queue and trial.line in new:
                self._note(trial, self._line_of(trial), tuple(new.pop(trial.line)))
        if len(self._lines) > 2 * len(queue) + _SPARE_LINES:
            live = {queue.line(row) for row in queue}
            self._lines = {key: line for key, line in self._lines.items() if key in live}

    def _rename_lines(self) -> None:
        """Follows lines that got another width as a whole: the journal is told of the line, not of its trials."""
        for renamed in self._core.scheduling.renamed:
            lines = {new: self._lines.pop(old) for old, new in renamed.items() if old in self._lines and new != old}
            for line in lines.values():
                line.reason = None
            self._lines.update(lines)
        self._core.scheduling.renamed.clear()

    def _line_of(self, trial: TrialRecord) -> _WaitLine:
        key = self._core.queue.line(trial.row)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _WaitLine(self._next)
            self._next += 1
        return line

    def _note(self, trial: TrialRecord, line: _WaitLine, joined: tuple[str, ...]) -> None:
        reason = self._reason(trial)
        if not joined and reason is line.reason:
            return
        line.reason = reason
        need = self._core.estimates.need(trial)
        self._core.commands.append(
            NoteWaiting(
                line.number,
                at=self._core.now,
                trial_ids=joined,
                width=trial.width,
                reason=reason,
                need_bytes=None if need is None else need.peak_bytes,
                memory=self._free_memory(trial) if reason is WaitReason.MEMORY else (),
                wanted=trial.spec.wanted_devices if reason is WaitReason.REQUIREMENTS else None,
            )
        )

    def _reason(self, trial: TrialRecord) -> WaitReason:
        core = self._core
        if trial.pinned:
            lane_id = trial.residence.lane
            assert lane_id is not None
            return WaitReason.LANE if core.lanes[lane_id].holders else WaitReason.MEMORY
        if core.awaits_devices(trial):
            return WaitReason.REQUIREMENTS
        is_open = core.occupancy.has_open(trial.width, core.estimates.by_model(trial))
        return WaitReason.MEMORY if is_open else WaitReason.DEVICES

    def _free_memory(self, trial: TrialRecord) -> tuple[FreeMemory, ...]:
        """Devices with an open slot for the trial whose memory is bounded."""
        occupancy, memory = self._core.occupancy, self._core.memory
        by_model = self._core.estimates.by_model(trial)
        found = []
        for index in occupancy.residents:
            usable = memory.usable_bytes(index)
            if usable is not None and occupancy.is_open(index, trial.width, by_model):
                found.append(FreeMemory(index, max(0.0, usable - memory.filled_bytes(index)), usable))
        return tuple(sorted(found, key=lambda each: -each.free)[:_MOST_DEVICES])
