"""Loads a recorded run from its folder. The session may still be running, or may have been killed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fluid.display.format import count
from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import DeviceAdded
from fluid.engine.journal import PastTrial, Recovered
from fluid.lane.messages import trial_folder
from fluid.planning.profile import Profile
from fluid.planning.rollout import Segment
from fluid.report.history import RunHistory
from fluid.report.idle import idle_time
from fluid.report.run import UNFINISHED, UNKNOWN, GroupRun, KeyMeasurements, RecordedRun, TrialRun
from fluid.report.run_files import RunFiles, device_from, without_surrogates
from fluid.report.segments import (
    FinishedIteration,
    FinishedIterations,
    Resized,
    read_iterations,
    segments_of,
    with_pauses,
)
from fluid.report.story import Storyteller
from fluid.report.story_words import StoryLine
from fluid.report.timeline import DeviceChange, Timeline
from fluid.resources import Device
from fluid.session.folder_files import read_search
from fluid.trialgroup import Search, TrialState


def load_run(path: str | Path) -> RecordedRun:
    """Loads the run folder of a session, which may still be running or may have been killed.

    Args:
        path: the run folder.

    Raises:
        InvalidFieldError: the path is not a run folder, or cannot be read; the message names the path.
    """
    files = RunFiles(path)
    session, journal, done = files.session(), files.journal(), read_iterations(files)
    _note_shared(files, journal, done)
    reader = _TrialsReader(files, journal, done)
    groups, shown_as = reader.groups()
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
        stories=_stories(history, files, reader, groups, shown_as),
        submitted=_by_value(shown_as),
        idle=idle_time(history, timeline),
        clock=_clock(session, done, history.zero),
    )


def _stories(
    history: RunHistory,
    files: RunFiles,
    reader: _TrialsReader,
    groups: Sequence[GroupRun],
    shown_as: Mapping[str, tuple[str, str]],
) -> dict[tuple[str, str], list[StoryLine]]:
    """What happened to each trial, by group and shown name; submitted trials that are shown as one are told as one."""
    searched = {group.group_id for group in groups if group.search is not None}
    teller = Storyteller(
        history,
        name_of=lambda trial: shown_as[trial][1] if trial in shown_as else trial,
        log_of=lambda trial: os.path.join(trial_folder(str(files.path), trial), "output.log"),
        searched=lambda trial: trial in shown_as and shown_as[trial][0] in searched,
    )
    found: dict[tuple[str, str], list[StoryLine]] = {}
    for trial, shown in shown_as.items():
        found.setdefault(shown, []).extend(teller.tell(trial, tuple(reader.iterations(trial))))
    return {shown: sorted(lines, key=lambda line: line.at) for shown, lines in found.items()}


def _by_value(shown_as: Mapping[str, tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for trial, shown in shown_as.items():
        found.setdefault(shown, []).append(trial)
    return found


def _clock(session: Mapping[str, Any], done: FinishedIterations, zero: float) -> datetime | None:
    """Wall-clock time at ``zero`` on the session's clock; ``None`` if unknown, or the session's clock was reset."""
    known = session.get("clock")
    if not isinstance(known, Mapping) or len(done.offsets) > 1:
        return None
    try:
        return datetime.strptime(known["time"], "%Y-%m-%d %H:%M:%S") + timedelta(seconds=zero - known["at"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _note_shared(files: RunFiles, journal: Recovered, done: FinishedIterations) -> None:
    """Adds a note if two sessions wrote the folder, which older versions of Fluid allowed."""
    listed = [entry["trial"] for entry in files.trials() if "trial" in entry]
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


# --- Trials and groups


@dataclass
class _SubmittedGroup:
    """A group while it is read.

    Attributes:
        parts: the submitted trials, in order, by the name under which reports show them. Several have one name if a
            trial of the search algorithm was submitted anew from a checkpoint.
    """

    name: str
    search: Search | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)


class _TrialsReader:
    """Combines the three files about trials: ``trials.jsonl``, the journal and the results.

    Groups and trials are in the order of ``trials.jsonl``, followed by those that only the other files mention.
    """

    def __init__(self, files: RunFiles, journal: Recovered, done: FinishedIterations) -> None:
        self._journal = journal
        self._done = done
        #: The trials that the journal mentions.
        self._journaled: dict[str, PastTrial] = {
            **{
                trial: PastTrial(group, history, journal.failures.get(trial))
                for group, trials in journal.groups.items()
                for trial, history in trials.items()
            },
            **journal.past,
        }
        #: The entry of each trial in ``trials.jsonl``.
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[str, _SubmittedGroup] = {}
        for entry in files.trials():
            if "trial" in entry:
                self._entries.setdefault(str(entry["trial"]), entry)
            else:
                group = str(entry.get("group", ""))
                self._groups.setdefault(group, _SubmittedGroup(str(entry.get("name") or group), read_search(entry)))

    def groups(self) -> tuple[tuple[GroupRun, ...], dict[str, tuple[str, str]]]:
        """The groups; and, by the id of a submitted trial, the group and the name under which reports show it."""
        shown_as: dict[str, tuple[str, str]] = {}
        order: dict[str, None] = {}
        for trial in dict.fromkeys([*self._entries, *self._journaled, *self._done.by_trial]):
            if self._journaled and trial not in self._journaled and trial not in self._done.by_trial:
                continue  # The engine refused it.
            entry = self._entries.get(trial, {})
            group = str(entry.get("group", self._group_of(trial)))
            name = str(entry.get("shown", trial))
            self._groups.setdefault(group, _SubmittedGroup(group)).parts.setdefault(name, []).append(trial)
            order[group], shown_as[trial] = None, (group, name)
        found = (
            GroupRun(
                group,
                self._groups[group].name,
                tuple(self._trial(group, name, parts) for name, parts in self._groups[group].parts.items()),
                self._groups[group].search,
            )
            for group in order
        )
        return tuple(found), shown_as

    def _group_of(self, trial: str) -> str:
        return self._journaled[trial].group_id if trial in self._journaled else self._done.group_of.get(trial, "")

    def _trial(self, group: str, name: str, parts: Sequence[str]) -> TrialRun:
        """Combines the submitted trials that are shown as one; the last determines its state."""
        entry, known = self._entries.get(parts[-1], {}), self._journaled.get(parts[-1])
        config = entry.get("config")
        state = self._state(parts[-1], self._groups[group].search)
        failure = None if known is None else known.failure
        return TrialRun(
            name,
            group,
            str(entry.get("key", "" if known is None else known.history.trial.profile_key)),
            config if isinstance(config, Mapping) else {},
            state,
            None if known is None or "shown" in entry else known.history.budget,
            failure.message if failure is not None and state == TrialState.FAILED else "",
            tuple(iteration for part in parts for iteration in self.iterations(part)),
        )

    def _state(self, trial: str, search: Search | None) -> str:
        if trial not in self._journaled:
            return UNKNOWN
        ended = self._journal.outcomes.get(trial, self._journaled[trial].history.ended)
        if ended is TrialState.DONE and search is not None and trial not in self._journal.outcomes:
            return TrialState.PAUSED.value
        return ended.value if ended is not None else UNFINISHED

    def iterations(self, trial: str) -> Iterator[FinishedIteration]:
        """The iterations of a submitted trial, numbered as in the trial it is shown as, with that trial's metrics."""
        entry = self._entries.get(trial, {})
        before, outer = entry.get("iterations"), entry.get("metrics")
        for iteration in self._done.by_trial.get(trial, ()):
            if isinstance(before, int):
                iteration = replace(iteration, number=iteration.number + before)
            if isinstance(outer, str):
                iteration = replace(iteration, metrics=_nested(iteration.metrics, f"{outer}/"))
            yield iteration


def _nested(metrics: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix) and value is not None
    }


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
