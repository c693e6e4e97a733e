"""The results of a session that is resumed. They stay in ``results.jsonl``, and are read when someone asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid.checksums import LineChecks
from fluid.errors import FluidError
from fluid.results.folder_files import RESULTS, TRIALS, json_lines
from fluid.results.gaps import IterationGaps
from fluid.results.iterations import CLOCK_RESET_S, ReportedIteration, read_reported
from fluid.results.records import Result
from fluid.results.torn_files import tell_damage
from fluid.trialgroup import Trial


@dataclass
class GroupResults:
    """The earlier results of one group.

    Attributes:
        folder: the run folder.
        group_id: the group.
        start, end: the bytes of ``results.jsonl`` that hold them, among those of other groups.
        first_start, last_end: seconds, on the axis of :class:`EarlierResults`.
    """

    folder: Path
    group_id: str
    start: int
    end: int
    first_start: float = math.inf
    last_end: float = -math.inf

    def read(self, trial_of: Callable[[str], Trial | None]) -> Iterator[Result]:
        """Gives the results in the order written; their metrics are what JSON makes of them.

        Args:
            trial_of: a trial, by its id; ``None`` for one that was forgotten, whose config is then read from
                ``trials.jsonl``, as JSON has it.

        Raises:
            FluidError: the file was deleted meanwhile.
        """
        if not (self.folder / RESULTS).is_file():
            raise FluidError(f"the results of the sessions before are gone: {self.folder / RESULTS} was deleted")
        forgotten: dict[str, Mapping[str, Any]] | None = None
        for line in json_lines(self.folder / RESULTS, self.start, self.end):
            reported = read_reported(line.entry or {})
            if reported is None or reported.group_id != self.group_id:
                continue
            config: Any = trial_of(reported.trial_id)
            if config is None:
                forgotten = self._configs() if forgotten is None else forgotten
                config = forgotten.get(reported.trial_id, {})
            yield Result(
                trial_id=reported.trial_id,
                iteration=reported.number,
                metrics=reported.metrics,
                seconds=reported.seconds,
                width=reported.width,
                device_ids=reported.devices,
                rows=reported.rows,
                config=config,
            )

    def _configs(self) -> dict[str, Mapping[str, Any]]:
        entries = (line.entry or {} for line in json_lines(self.folder / TRIALS))
        return {
            entry["trial"]: entry["config"]
            for entry in entries
            if entry.get("group") == self.group_id and "trial" in entry and isinstance(entry.get("config"), dict)
        }


@dataclass
class EarlierResults:
    """What ``results.jsonl`` holds when a session is resumed.

    Times are on one axis, that of the files; where an older Fluid wrote there after a reboot, what follows its reset is
    set behind the latest result.

    Attributes:
        reported: newest iteration, by trial id.
        gaps: which iterations there are.
        groups: by group id.
        latest: when the last iteration ended.
        damage: lines that are damaged, repeated or missing, as :class:`fluid.checksums.LineChecks` counts them.
        offset: seconds from the last times in the files to the axis.
    """

    reported: dict[str, int] = field(default_factory=dict)
    gaps: IterationGaps = field(default_factory=IterationGaps)
    groups: dict[str, GroupResults] = field(default_factory=dict)
    latest: float = -math.inf
    offset: float = 0.0
    damage: int = 0

    @classmethod
    def scan(
        cls, folder: Path, least: int = 0, hear: Callable[[ReportedIteration], None] = lambda _: None
    ) -> EarlierResults:
        """Reads a run folder's results, and keeps where they are. Damaged lines are skipped, and told in the log.

        Args:
            folder: the run folder.
            least: the offset to which the file went on at least.
            hear: called with each result, in the order written.
        """
        found, checks = cls(), LineChecks()
        for line in json_lines(folder / RESULTS, checks=checks):
            reported = None if line.entry is None else read_reported(line.entry)
            if reported is None:
                if line.entry is not None:
                    checks.refuse()
                continue
            trial_id, group_id = reported.trial_id, reported.group_id
            found.reported[trial_id] = max(reported.number, found.reported.get(trial_id, 0))
            found.gaps.take(trial_id, reported.number)
            start, end = found._on_axis(reported.at - reported.seconds, reported.at)
            if group_id not in found.groups:
                found.groups[group_id] = GroupResults(folder, group_id, line.start, line.end)
            group = found.groups[group_id]
            group.end = line.end
            group.first_start, group.last_end = min(group.first_start, start), max(group.last_end, end)
            hear(reported)
        found.damage = checks.damage
        tell_damage(folder / RESULTS, checks, least)
        return found

    def _on_axis(self, start: float, end: float) -> tuple[float, float]:
        if end + self.offset < self.latest - CLOCK_RESET_S:
            self.offset = self.latest - start
        start, end = start + self.offset, end + self.offset
        self.latest = max(self.latest, end)
        return start, end
