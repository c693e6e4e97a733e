"""Loads a recorded run from its folder. The session may still be running, or may have been killed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fluid._clock import read_clock
from fluid.display.format import count
from fluid.engine.commands import NoteDeviceLost
from fluid.lane.checkpoints.paths import trial_folder
from fluid.reports.analysis.cohorts import cohorts_of
from fluid.reports.analysis.costs import Paid, price_of
from fluid.reports.analysis.forecasts import WrittenForecast, read_forecasts
from fluid.reports.analysis.idle import idle_time
from fluid.reports.analysis.key_measurements import key_measurements
from fluid.reports.analysis.resizes import resize_gains
from fluid.reports.analysis.restores import restores_of
from fluid.reports.run.run import GroupRun, RecordedRun, TrialRun
from fluid.reports.run.segments import device_events, devices_of, segments_of, with_pauses
from fluid.reports.run.timeline import Timeline
from fluid.reports.story.history import RunHistory
from fluid.reports.story.story import Storyteller
from fluid.reports.story.words import StoryLine
from fluid.results.iterations import FinishedIterations, files_of, known_start, shown_iterations
from fluid.results.metrics import is_number
from fluid.results.run_files import ReplacedError, time_in_files
from fluid.results.stored_run import StoredRun, read_run
from fluid.results.submitted import SubmittedGroup, SubmittedTrial
from fluid.trialgroup import Search


def load_run(path: str | Path, price: float | None = None) -> RecordedRun:
    """Loads the run folder of a session, which may still be running or may have been killed.

    Args:
        path: the run folder.
        price: US dollars for a device-hour; ``None`` for the session's own.

    Raises:
        InvalidFieldError: the path is not a run folder, or cannot be read; the message names the path. Or the price is
            no number of at least 0.
    """
    return RunReader(path, price).read()


class RunReader:
    """Loads a run folder, and reads on while its session writes it: each reading takes the lines that are new.

    If a file was truncated or replaced, the folder is read anew.

    Args:
        path: the run folder.
        price: US dollars for a device-hour; ``None`` for the session's own.

    Raises:
        InvalidFieldError: the path is not a run folder; the message names it.
    """

    def __init__(self, path: str | Path, price: float | None = None) -> None:
        self._path = path
        self._price = price_of({}, price)
        self._content = _Content(path, self._price)

    def read(self) -> RecordedRun:
        """The run as it stands.

        Raises:
            InvalidFieldError: the folder cannot be read; the message names the path.
        """
        try:
            self._content.take()
        except ReplacedError:
            self._content = _Content(self._path, self._price)
            self._content.take()
        return self._content.run()

    def read_on(self) -> RecordedRun | None:
        """The run as it stands, at a cost that depends on what is new.

        The timeline, the idle time and the stories of trials that have no new lines are those of the reading before.

        Returns:
            ``None`` if these can no longer be used, as times or rows of trials have changed: call :meth:`read`.

        Raises:
            InvalidFieldError: the folder cannot be read; the message names the path.
        """
        try:
            self._content.take()
        except ReplacedError:
            return None
        return self._content.run_on()


class _Content:
    """What was read of a run folder."""

    def __init__(self, path: str | Path, price: float | None) -> None:
        self._files = read_run(path, "run")
        self._price = price
        #: Iterations taken so far.
        self._taken = 0
        self._done = FinishedIterations()
        self._history, self._heard = RunHistory(self._done), 0
        #: Trials by group and shown name, with what they were made of.
        self._made: dict[tuple[str, str], tuple[object, TrialRun]] = {}
        #: Submitted trials that had new lines since the run was made.
        self._changed: set[str] = set()
        #: Device-seconds in which iterations ran, less those of trials: of a trial whose neighbours ended.
        self._beside = 0.0
        #: The run as it was made last; ``None`` if its times no longer hold.
        self._run: RecordedRun | None = None

    def take(self) -> None:
        """Reads the new lines."""
        files = self._files
        files.refresh()
        self._session, self._journal = files.session, files.journal
        reported = files.reported[self._taken :]
        self._taken += len(reported)
        self._submitted, self._foretold = files.groups, files.forecasts
        self._keys = key_measurements(files.profile)
        had_times, stays = bool(self._done.by_trial), self._done.extend(reported)
        if not stays:
            self._done = FinishedIterations(files.reported)
        if not stays or had_times != bool(self._done.by_trial):
            self._history, self._heard = RunHistory(self._done), 0
            self._made.clear()
            self._run = None
        self._changed.update(one.trial_id for one in reported)
        self._changed |= self._history.extend(files.entries[self._heard :])
        self._heard = len(files.entries)
        lost = [note for note in self._journal.places if isinstance(note, NoteDeviceLost) and note.reason]
        self._notes = (
            *files.notes,
            *_rehearsal_notes(self._session),
            *_shared_notes(files, self._done),
            *(f"Device {note.device_id} was given up: {note.reason}." for note in lost),
            *files.losses(),
        )
        self._groups = tuple(
            GroupRun(
                group.name,
                group.search,
                group.requires,
                group.terms,
                group_id=group.group_id,
                trials=tuple(self._trial(group, name, parts) for name, parts in group.trials.items()),
                shared_runs=tuple(self._trial(group, name, parts) for name, parts in group.shared_runs.items()),
            )
            for group in self._submitted
        )

    def run(self) -> RecordedRun:
        """The run, made of all that was read."""
        files, done, history = self._files, self._done, self._history
        trials = _rows(self._groups)
        rows = {(trial.group_id, trial.trial_id): row for row, trial in enumerate(trials)}
        row_of = {
            part.trial_id: rows[group.group_id, name]
            for group in self._submitted
            for name, parts in group.all.items()
            for part in parts
        }
        changes, resized = device_events(self._journal, done, row_of)
        recorded = segments_of([trial.own for trial in trials])
        segments = with_pauses(recorded.segments, resized)
        timeline = Timeline(
            devices_of(self._session, self._journal, segments),
            tuple(segments),
            tuple(trial.trial_id for trial in trials),
            max((segment.end for segment in segments), default=0.0),
            changes=tuple(changes),
            packs=recorded.packs,
        )
        ran_by = done.ran_by
        self._run = RecordedRun(
            files.folder,
            self._session,
            self._groups,
            timeline,
            self._keys,
            self._notes,
            stories=_stories(history, files.path, self._submitted, done),
            idle=idle_time(history, timeline),
            resize_gains=resize_gains(history, ran_by),
            restores=restores_of(history),
            cohorts=cohorts_of(files.profile, history, ran_by),
            clock=_clock(self._session, done, history.zero),
            wall=_wall(self._session, done, history, timeline.makespan),
            is_running=files.is_running,
            makespan=timeline.makespan,
            forecasts=self._forecasts(),
            read_at=self._read_at(),
            paid=self._paid(timeline),
        )
        self._changed.clear()
        return self._run

    def run_on(self) -> RecordedRun | None:
        """The run, of which only trials that changed are made anew; ``None`` if more is to be."""
        if self._run is None:
            return None
        trials = _rows(self._groups)
        before = [(trial.group_id, trial.trial_id) for trial in self._run.rows]
        if before != [(trial.group_id, trial.trial_id) for trial in trials[: len(before)]]:
            return None
        files, done, history = self._files, self._done, self._history
        told = _stories(history, files.path, self._submitted, done, self._changed)
        self._run = replace(
            self._run,
            session=self._session,
            groups=self._groups,
            keys=self._keys,
            notes=self._notes,
            stories={**self._run.stories, **told},
            clock=_clock(self._session, done, history.zero),
            wall=_wall(self._session, done, history, done.end),
            is_running=files.is_running,
            makespan=done.end,
            forecasts=self._forecasts(),
            read_at=self._read_at(),
            paid=self._paid(self._run.timeline),
        )
        self._changed.clear()
        return self._run

    def _forecasts(self) -> dict[str, list[WrittenForecast]]:
        return read_forecasts(self._foretold, self._done, self._history.zero)

    def _read_at(self) -> float | None:
        """The time now, in seconds since the run began; ``None`` if its session has ended."""
        if not self._files.is_running:
            return None
        now = read_clock()
        at = time_in_files(self._session.get("clock"), now)
        return (now.at if at is None else at) + self._done.offsets[-1] - self._history.zero

    def _paid(self, timeline: Timeline) -> Paid:
        """For how long devices were held, and their price."""
        done, history, session = self._done, self._history, self._session
        known, closed = session.get("clock"), session.get("closed")
        shift = done.offsets[-1] - history.zero
        began = known.get("at") if isinstance(known, Mapping) else None
        last = closed + shift if is_number(closed) else max(history.end, done.end)
        # Journals of the first versions do not have the devices.
        held = history.meter.device_seconds(last) if history.meter.has_heard else timeline.device_seconds
        ended = max(history.end, done.end) if self._files.is_running else done.end
        took = ended - began - shift if is_number(began) else None
        used = math.fsum(group.device_seconds for group in self._groups)
        if self._run is None or timeline is not self._run.timeline:
            self._beside = math.fsum(b - a for each in timeline.busy_intervals.values() for a, b in each) - used
        return Paid(held, used + self._beside, took, price_of(session, self._price))

    def _trial(self, group: SubmittedGroup, name: str, parts: Sequence[SubmittedTrial]) -> TrialRun:
        shown = group.group_id, name
        made_of = parts, [len(self._done.by_trial.get(part.trial_id, ())) for part in parts]
        known = self._made.get(shown)
        if known is None or known[0] != made_of:
            known = self._made[shown] = made_of, _trial_run(self._files.path, name, parts, self._done, group.search)
        return known[1]


def _rows(groups: Sequence[GroupRun]) -> list[TrialRun]:
    """The trials, then what Fluid has added, in the order of :attr:`RecordedRun.rows`."""
    trials = [trial for group in groups for trial in group.trials]
    return trials + [shared for group in groups for shared in group.shared_runs]


def _trial_run(
    path: Path, name: str, parts: Sequence[SubmittedTrial], done: FinishedIterations, search: Search | None
) -> TrialRun:
    """The submitted trials that are shown as one; the last determines its state.

    The budget is that of the search where its shape tells it: of a trial that was stopped at a rung, the budget of its
    own is what it ran, and says nothing.
    """
    shown = {item.name: getattr(parts[-1], item.name) for item in fields(SubmittedTrial)}
    if search is not None and search.shape is not None:
        shown["budget"] = max(shown["budget"] or 0, search.shape.rungs[-1])
    finished = tuple(iteration for part in parts for iteration in shown_iterations(part, done))
    shown["start"] = known_start(parts[0].start, ((one.number, one.source) for one in finished))
    return TrialRun(**{**shown, "trial_id": name}, finished=finished, files=files_of(path, parts))


def _stories(
    history: RunHistory,
    path: Path,
    groups: Sequence[SubmittedGroup],
    done: FinishedIterations,
    only: AbstractSet[str] | None = None,
) -> dict[tuple[str, str], list[StoryLine]]:
    """What happened to each trial, by group and shown name; submitted trials that are shown as one are told as one.

    Args:
        history: the run's journal.
        path: the run folder.
        groups: the trials.
        done: their iterations.
        only: the submitted trials of which the stories are wanted; ``None`` for all.
    """
    shown_as = {part.trial_id: (group, part) for group in groups for parts in group.all.values() for part in parts}
    teller = Storyteller(
        history,
        name_of=lambda trial: shown_as[trial][1].shown_id if trial in shown_as else trial,
        log_of=lambda trial: os.path.join(trial_folder(str(path), trial), "output.log"),
        searched=lambda trial: trial in shown_as and shown_as[trial][0].search is not None,
        owner_of=lambda trial: shown_as[trial][0].owner_words if trial in shown_as else "",
    )
    found: dict[tuple[str, str], list[StoryLine]] = {}
    wanted = [
        (trial, group, part)
        for trial, (group, part) in shown_as.items()
        if only is None or any(each.trial_id in only for each in group.all[part.shown_id])
    ]
    for trial, group, part in wanted:
        lines = teller.tell(trial, tuple(shown_iterations(part, done)))
        found.setdefault((group.group_id, part.shown_id), []).extend(lines)
    return {shown: sorted(lines, key=lambda line: line.at) for shown, lines in found.items()}


def _clock(session: Mapping[str, Any], done: FinishedIterations, zero: float) -> datetime | None:
    """Wall-clock time at ``zero`` on the session's clock; ``None`` if unknown, or the session's clock was reset."""
    known = session.get("clock")
    if not isinstance(known, Mapping) or len(done.offsets) > 1:
        return None
    try:
        return datetime.strptime(known["time"], "%Y-%m-%d %H:%M:%S") + timedelta(seconds=zero - known["at"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _wall(session: Mapping[str, Any], done: FinishedIterations, history: RunHistory, makespan: float) -> float | None:
    """Seconds from the start of the session to its end; ``None`` if unknown, or if its clock was reset."""
    known = session.get("clock")
    began, closed = known.get("at") if isinstance(known, Mapping) else None, session.get("closed")
    if not is_number(began) or len(done.offsets) > 1:
        return None
    ended = closed if is_number(closed) else history.zero + max(history.end, makespan)
    # session.json has the clock of the last session; the journal of one that was resumed began before.
    return max(0.0, ended - min(began, history.zero + history.start))


def _rehearsal_notes(session: Mapping[str, Any]) -> Iterator[str]:
    """A note if trials were replayed, and not run."""
    if session.get("rehearsed"):
        overheads = session.get("overheads")
        source = overheads.get("source") if isinstance(overheads, Mapping) else None
        yield (
            "Rehearsed: trials were replayed on a virtual clock, and none was run. "
            f"Overheads of packing, scaling and moves: {source or 'unknown'}."
        )


def _shared_notes(files: StoredRun, done: FinishedIterations) -> Iterator[str]:
    """A note if two sessions wrote the folder, which older versions of Fluid allowed."""
    listed = [entry["trial"] for entry in files.lines if "trial" in entry]
    if files.journal.mixed or len(set(map(str, listed))) < len(listed):
        yield (
            "Two sessions of an older Fluid wrote this folder. Trials of one id are shown as one: their configs, "
            "states and results may be those of either session."
        )
    elif done.repeated:
        yield (
            f"{count(done.repeated, 'iteration')} were reported more than once: two drivers of an older Fluid ran this "
            "session at the same time."
        )
