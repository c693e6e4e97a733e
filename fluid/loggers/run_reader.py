"""Reads what a session writes to its run folder, as loggers are told it: trials, and results in the order written.

Texts are given with escapes for the characters that not all sinks can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fluid.errors import FluidError
from fluid.loggers.logger import LoggedTrial
from fluid.loggers.values import writable
from fluid.results.iterations import StoredIteration, read_iteration, result_of
from fluid.results.records import Result
from fluid.results.run_files import RESULTS, TRIALS, JsonLines, Line, ReplacedError, as_written
from fluid.results.submitted import GroupLine, SubmittedTrial, read_trial
from fluid.trialgroup import Search


class ReadResult(NamedTuple):
    """A line of ``results.jsonl``.

    Attributes:
        line: its number, from 1.
        trial: the trial; ``None`` if the line is no result, or was not wanted.
        result: as the trial is shown.
    """

    line: int
    trial: LoggedTrial | None = None
    result: Result | None = None


class SessionReader:
    """Reads a run folder; each call reads on where the last one ended.

    Args:
        run_dir: the run folder.
        session_id: its session's.
    """

    def __init__(self, run_dir: Path, session_id: str) -> None:
        self._run_dir = run_dir
        self._session_id = session_id
        self._results = JsonLines(run_dir / RESULTS, read=partial(read_iteration, read=as_written))
        self._lines = JsonLines(run_dir / TRIALS, read=as_written)
        self._groups: dict[str, GroupLine] = {}
        #: By id of the submitted trial.
        self._parts: dict[str, SubmittedTrial] = {}
        #: By group and shown id: several submitted trials may be shown as one.
        self._trials: dict[tuple[str, str], LoggedTrial] = {}
        #: The group and the shown id that have each id under which a trial is logged.
        self._owners: dict[str, tuple[str, str]] = {}

    @property
    def line(self) -> int:
        """Lines of ``results.jsonl`` read so far."""
        return self._results.count

    def read_trials(self) -> list[LoggedTrial]:
        """Reads new lines of ``trials.jsonl``; returns trials whose config was told after they were submitted."""
        changed = []
        for line in self._new(self._lines):
            entry = line.entry
            if "trial" in entry:
                self._enter(entry)
            elif "shown" in entry:
                part = self._parts.get(str(entry["shown"]))
                if part is not None:
                    part = replace(part, config=_mapping(entry.get("config")))
                    self._parts[part.trial_id] = part
                    place = part.group_id, part.shown_id
                    self._trials[place] = replace(self._trials[place], config=part.config)
                    changed.append(self._trials[place])
            elif "group" in entry:
                group_id = str(entry["group"])
                self._groups.setdefault(group_id, GroupLine.read(entry))
        return changed

    def results(self, until: int, after: int = 0) -> Iterator[ReadResult]:
        """Yields the new lines of ``results.jsonl`` up to line ``until``; of those up to line ``after`` the number."""
        lines = self._new(self._results)
        while self.line < until and (line := next(lines, None)) is not None:
            reported = line.value if line.number > after else None
            trial = self.find(reported.trial_id) if isinstance(reported, StoredIteration) else None
            if reported is None or trial is None:
                yield ReadResult(line.number)
                continue
            result = result_of(reported, self._parts[reported.trial_id])
            yield ReadResult(
                line.number, trial, replace(result, trial_id=trial.trial_id, metrics=writable(result.metrics))
            )

    def find(self, submitted_id: str) -> LoggedTrial | None:
        """The trial that a submitted trial is shown as; ``None`` if it is unknown."""
        part = self._parts.get(submitted_id)
        if part is None:
            self.read_trials()  # It was submitted a moment ago.
            part = self._parts.get(submitted_id)
        return None if part is None else self._trials[part.group_id, part.shown_id]

    def search_of(self, submitted_id: str) -> Search | None:
        """What the search algorithm of a submitted trial's group said; ``None`` if none submits its trials."""
        part = self._parts.get(submitted_id)
        return None if part is None else self._group(part.group_id).search

    def forget(self, submitted_id: str) -> None:
        """Drops a submitted trial."""
        part = self._parts.pop(submitted_id, None)
        if part is not None:
            shown = part.group_id, part.shown_id
            if part.trial_id == part.shown_id:  # Any other may come back as another submitted trial.
                self._trials.pop(shown, None)

    def _enter(self, entry: Mapping[str, Any]) -> None:
        trial_id, group_id = str(entry["trial"]), str(entry.get("group", ""))
        part = read_trial(trial_id, entry, config=_mapping(entry.get("config")), state="")
        if part.is_shared_run:
            return  # It is no trial of the user's.
        self._parts[trial_id] = part
        place, shown = (group_id, part.shown_id), writable(part.shown_id)
        self._trials[place] = LoggedTrial(
            trial_id=shown if self._owners.setdefault(shown, place) == place else f"{shown}-{group_id}",
            group=writable(self._group(group_id).name),
            config=part.config,
            uid=writable(f"{self._session_id}-{group_id}-{part.shown_id}"),
            start=part.start,
        )

    def _group(self, group_id: str) -> GroupLine:
        return self._groups.setdefault(group_id, GroupLine(group_id))

    def _new(self, lines: JsonLines) -> Iterator[Line]:
        """Yields the new lines of a file; those that are not taken are yielded by the next call."""
        try:
            yield from lines.new()
        except (FileNotFoundError, ReplacedError):
            raise FluidError(f"the run folder {self._run_dir} was deleted") from None


def _mapping(value: object) -> Mapping[str, Any]:
    return writable(value) if isinstance(value, dict) else {}
