"""Loads a recorded run from its folder. The session may still be running, or may have been killed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fluid.display.format import count
from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import DeviceAdded
from fluid.engine.journal import Recovered
from fluid.lane.run_paths import trial_folder
from fluid.planning.profile import Profile
from fluid.planning.rollout import Segment
from fluid.report.history import RunHistory
from fluid.report.idle import idle_time
from fluid.report.run import GroupRun, KeyMeasurements, RecordedRun, TrialRun
from fluid.report.segments import Resized, segments_of, with_pauses
from fluid.report.story import Storyteller
from fluid.report.story_words import StoryLine
from fluid.report.timeline import DeviceChange, Timeline
from fluid.resources import Device
from fluid.results.folder_files import is_locked
from fluid.results.iterations import FinishedIterations, finished_iterations, reported_lines, shown_iterations
from fluid.results.metrics import is_number
from fluid.results.run_files import RunFiles, device_from, without_surrogates
from fluid.results.submitted import SubmittedGroup, SubmittedTrial, SubmittedTrials
from fluid.results.trial_results import files_of


def load_run(path: str | Path) -> RecordedRun:
    """Loads the run folder of a session, which may still be running or may have been killed.

    Args:
        path: the run folder.

    Raises:
        InvalidFieldError: the path is not a run folder, or cannot be read; the message names the path.
    """
    files = RunFiles(path)
    session, journal, done = files.session(), files.journal(), finished_iterations(reported_lines(files))
    entries = files.trials()
    _note_shared(files, entries, journal, done)
    submitted = SubmittedTrials(entries, journal, done.group_of).groups()
    groups = tuple(_group_run(files.path, group, done) for group in submitted)
    shown_as = {
        part.trial_id: (group.group_id, name)
        for group in submitted
        for name, parts in group.trials.items()
        for part in parts
    }
    trials = [trial for group in groups for trial in group.trials]
    rows = {(trial.group_id, trial.trial_id): row for row, trial in enumerate(trials)}
    row_of = {trial_id: rows[shown] for trial_id, shown in shown_as.items()}
    changes, resized = _device_events(journal, done, row_of)
    segments = with_pauses(segments_of([trial.finished for trial in trials]), resized)
    timeline = Timeline(
        _devices(session, journal, segments),
        tuple(segments),
        tuple(trial.trial_id for trial in trials),
        max((segment.end for segment in segments), default=0.0),
        changes=tuple(changes),
    )
    history = RunHistory(files.entries(), done)
    return RecordedRun(
        files.path,
        session,
        groups,
        timeline,
        _key_measurements(files.profile()),
        tuple(files.notes),
        stories=_stories(history, files, submitted, done),
        submitted={
            (group.group_id, name): [part.trial_id for part in parts]
            for group in submitted
            for name, parts in group.trials.items()
        },
        idle=idle_time(history, timeline),
        clock=_clock(session, done, history.zero),
        wall=_wall(session, done, history, timeline.makespan),
        is_running=is_locked(files.path),
    )


def _group_run(path: Path, group: SubmittedGroup, done: FinishedIterations) -> GroupRun:
    trials = tuple(_trial_run(path, name, parts, done) for name, parts in group.trials.items())
    return GroupRun(group.group_id, group.name, trials, group.search)


def _trial_run(path: Path, name: str, parts: Sequence[SubmittedTrial], done: FinishedIterations) -> TrialRun:
    """The submitted trials that are shown as one; the last determines its state."""
    last = parts[-1]
    return TrialRun(
        name,
        last.group_id,
        last.key,
        last.config,
        last.state,
        last.budget,
        "" if last.failure is None else last.failure.message,
        tuple(iteration for part in parts for iteration in shown_iterations(part, done)),
        "" if last.failure is None else last.failure.traceback,
        files_of(path, parts),
    )


def _stories(
    history: RunHistory, files: RunFiles, groups: Iterable[SubmittedGroup], done: FinishedIterations
) -> dict[tuple[str, str], list[StoryLine]]:
    """What happened to each trial, by group and shown name; submitted trials that are shown as one are told as one."""
    shown_as = {part.trial_id: (group, part) for group in groups for parts in group.trials.values() for part in parts}
    teller = Storyteller(
        history,
        name_of=lambda trial: shown_as[trial][1].shown_id if trial in shown_as else trial,
        log_of=lambda trial: os.path.join(trial_folder(str(files.path), trial), "output.log"),
        searched=lambda trial: trial in shown_as and shown_as[trial][0].search is not None,
    )
    found: dict[tuple[str, str], list[StoryLine]] = {}
    for trial, (group, part) in shown_as.items():
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


def _note_shared(
    files: RunFiles, entries: Iterable[Mapping[str, Any]], journal: Recovered, done: FinishedIterations
) -> None:
    """Adds a note if two sessions wrote the folder, which older versions of Fluid allowed."""
    listed = [entry["trial"] for entry in entries if "trial" in entry]
    twice = sum(
        len(iterations) - len({iteration.number for iteration in iterations}) for iterations in done.by_trial.values()
    )
    if journal.mixed or len(set(map(str, listed))) < len(listed):
        files.notes.append(
            "Two sessions of an older Fluid wrote this folder. Trials of one id are shown as one: their configs, "
            "states and results may be those of either session."
        )
    elif twice:
        files.notes.append(
            f"{count(twice, 'iteration')} were reported more than once: two drivers of an older Fluid ran this "
            "session at the same time."
        )


# --- The timeline


def _device_events(
    journal: Recovered, done: FinishedIterations, row_of: Mapping[str, int]
) -> tuple[list[DeviceChange], list[Resized]]:
    """Devices that were added or lost, and resizes of trials, in seconds since the run began."""
    changes: list[DeviceChange] = []
    resized: list[Resized] = []
    present: set[int] = set()
    #: Of a session that was resumed: devices that it had and that were not reported once more so far, and when it was.
    left, resumed_at = set[int](), 0.0
    for note, at in done.with_run_times(journal.places):
        time = max(at, 0.0)
        if isinstance(note, DeviceAdded):
            index = note.device.index
            if index in present - left:
                left, resumed_at = present - {index}, time
            elif index not in present:
                changes.append((time, index, True))
            present.add(index)
            left.discard(index)
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


def _devices(session: Mapping[str, Any], journal: Recovered, segments: Iterable[Segment]) -> tuple[Device, ...]:
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


def _key_measurements(profile: Profile | None) -> tuple[KeyMeasurements, ...]:
    if profile is None:
        return ()
    found = []
    keys = profile.keys()
    for key in keys:
        packing = profile.measured_packing(key)
        found.append(
            KeyMeasurements(
                without_surrogates(key),
                profile.seconds_per_iteration(key),
                profile.alpha(key),
                profile.beta(key),
                packing,
                profile.packing_limit(key, max(packing, 1)),
            )
        )
    return tuple(found)
