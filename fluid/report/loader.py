"""Reads a run from its folder, which may be that of a session that still runs or was killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fluid.engine.commands import NoteDeviceLost, NoteResize
from fluid.engine.events import DeviceAdded
from fluid.engine.journal import PastTrial, Recovered
from fluid.errors import InvalidFieldError
from fluid.planning.profile import Profile
from fluid.planning.rollout import Segment
from fluid.report.run import PAUSED, UNFINISHED, UNKNOWN, GroupRun, KeyMeasurements, Run, TrialRun
from fluid.report.run_files import RunFiles, device_from
from fluid.report.segments import Iterations, Resized, Step, read_iterations, segments_of, with_pauses
from fluid.report.timeline import DeviceChange, Timeline
from fluid.resources import Device
from fluid.trialgroup import Search


def load_run(path: str | Path) -> Run:
    """Reads the folder of a session, which may still run or have been killed.

    Args:
        path: the folder.

    Raises:
        InvalidFieldError: it is no run folder, or cannot be read; the message names the path.
    """
    files = RunFiles(path)
    session, journal, done = files.session(), files.journal(), read_iterations(files)
    groups, parts = _Reader(files, journal, done).groups()
    trials = [trial for group in groups for trial in group.trials]
    rows = {(trial.group_id, trial.trial_id): row for row, trial in enumerate(trials)}
    row_of = {part: rows[shown] for part, shown in parts.items()}
    changes, resized = _places(journal, done, row_of)
    segments = with_pauses(segments_of([trial.steps for trial in trials]), resized)
    timeline = Timeline(
        _devices(session, journal, segments),
        tuple(segments),
        tuple(trial.trial_id for trial in trials),
        max((segment.end for segment in segments), default=0.0),
        changes=tuple(changes),
    )
    return Run(files.path, session, groups, timeline, _key_facts(files.profile()), tuple(files.notes))


# --- Trials and groups


@dataclass
class _Group:
    """A group while it is read.

    Attributes:
        parts: by the name a trial is shown by, what was submitted for it, in order.
    """

    name: str
    search: Search | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)


class _Reader:
    """Puts together what three files tell of trials.

    Groups and trials come in the order of ``trials.jsonl``; then those that only the journal or the results know.
    """

    def __init__(self, files: RunFiles, journal: Recovered, done: Iterations) -> None:
        self._journal = journal
        self._done = done
        self._known: dict[str, PastTrial] = {
            **{
                trial: PastTrial(group, history, journal.failures.get(trial))
                for group, trials in journal.groups.items()
                for trial, history in trials.items()
            },
            **journal.past,
        }
        #: What ``trials.jsonl`` has of each trial.
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[str, _Group] = {}
        for entry in files.trials():
            if "trial" in entry:
                self._entries.setdefault(str(entry["trial"]), entry)
            else:
                group = str(entry.get("group", ""))
                self._groups.setdefault(group, _Group(str(entry.get("name") or group), _search(entry)))

    def groups(self) -> tuple[tuple[GroupRun, ...], dict[str, tuple[str, str]]]:
        """The groups, and by the id of what was submitted the group and the trial it is shown as."""
        shown: dict[str, tuple[str, str]] = {}
        order: dict[str, None] = {}
        for trial in dict.fromkeys([*self._entries, *self._known, *self._done.steps]):
            if self._known and trial not in self._known and trial not in self._done.steps:
                continue  # It was refused when it was submitted.
            entry = self._entries.get(trial, {})
            group = str(entry.get("group", self._group_of(trial)))
            name = str(entry.get("shown", trial))
            self._groups.setdefault(group, _Group(group)).parts.setdefault(name, []).append(trial)
            order[group], shown[trial] = None, (group, name)
        found = (
            GroupRun(
                group,
                self._groups[group].name,
                tuple(self._trial(group, name, parts) for name, parts in self._groups[group].parts.items()),
                self._groups[group].search,
            )
            for group in order
        )
        return tuple(found), shown

    def _group_of(self, trial: str) -> str:
        return self._known[trial].group_id if trial in self._known else self._done.groups.get(trial, "")

    def _trial(self, group: str, name: str, parts: Sequence[str]) -> TrialRun:
        """A trial of all that was submitted for it: the last says how it stands."""
        entry, known = self._entries.get(parts[-1], {}), self._known.get(parts[-1])
        config = entry.get("config")
        state = self._state(parts[-1], self._groups[group].search)
        return TrialRun(
            name,
            group,
            str(entry.get("key", "" if known is None else known.history.trial.profile_key)),
            config if isinstance(config, Mapping) else {},
            state,
            None if known is None or "shown" in entry else known.history.budget,
            known.failure.message if state == "FAILED" and known is not None and known.failure is not None else "",
            tuple(step for part in parts for step in self._steps(part)),
        )

    def _state(self, trial: str, search: Search | None) -> str:
        if trial not in self._known:
            return UNKNOWN
        ended = self._journal.outcomes.get(trial, self._known[trial].history.ended)
        if ended == "DONE" and search is not None and trial not in self._journal.outcomes:
            return PAUSED
        return ended or UNFINISHED

    def _steps(self, trial: str) -> Iterator[Step]:
        """Its iterations, numbered on from those that it had done before, with what people know as its metrics."""
        entry = self._entries.get(trial, {})
        before, within = entry.get("iterations"), entry.get("metrics")
        for step in self._done.steps.get(trial, ()):
            if isinstance(before, int):
                step = replace(step, iteration=step.iteration + before)
            if isinstance(within, str):
                step = replace(step, metrics=_within(step.metrics, f"{within}/"))
            yield step


def _within(metrics: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix) and value is not None
    }


def _search(entry: Mapping[str, Any]) -> Search | None:
    """What a group is about; ``None`` if it does not say so, or in a way that cannot be read."""
    fields = {name: entry.get(name) for name in ("metric", "mode", "trials")}
    if not entry.keys() & fields.keys():
        return None
    try:
        return Search(**fields)
    except InvalidFieldError:
        return None


# --- The timeline


def _places(
    journal: Recovered, done: Iterations, row_of: Mapping[str, int]
) -> tuple[list[DeviceChange], list[Resized]]:
    """Devices that came and went, and trials that went on at another width, on the run's own time."""
    changes: list[DeviceChange] = []
    resized: list[Resized] = []
    there: set[int] = set()
    for place, at in done.on_time(journal.places):
        if isinstance(place, NoteResize):
            if place.trial_id in row_of:
                resized.append(Resized(row_of[place.trial_id], at, place.seconds, place.device_ids))
        elif isinstance(place, DeviceAdded):
            # A session that goes on finds the devices that were there before.
            if place.device.index not in there:
                there.add(place.device.index)
                changes.append((max(at, 0.0), place.device.index, True))
        elif place.device_id in there:
            there.remove(place.device_id)
            changes.append((max(at, 0.0), place.device_id, False))
    return changes, resized


def _devices(session: Mapping[str, Any], journal: Recovered, segments: Iterable[Segment]) -> tuple[Device, ...]:
    """The devices the session began with, those that joined, and any others that were used."""
    devices: dict[int, Device] = {}
    listed = session.get("devices")
    for fields in listed if isinstance(listed, list) else ():
        try:
            device = device_from(fields)
        except (KeyError, TypeError, ValueError):
            continue
        devices.setdefault(device.index, device)
    for place in journal.places:
        if isinstance(place, DeviceAdded):
            devices.setdefault(place.device.index, place.device)
        elif isinstance(place, NoteDeviceLost):
            devices.setdefault(place.device_id, Device(place.device_id))
    kind = next(iter(devices.values())).kind if devices else "gpu"
    for index in {device for segment in segments for device in segment.devices} - devices.keys():
        devices[index] = Device(index, kind=kind)
    return tuple(devices[index] for index in sorted(devices))


def _key_facts(profile: Profile | None) -> tuple[KeyMeasurements, ...]:
    if profile is None:
        return ()
    found = []
    keys = profile.keys()
    for key in keys:
        packing = profile.measured_packing(key)
        found.append(
            KeyMeasurements(
                key,
                profile.seconds_per_iteration(key),
                profile.alpha(key),
                profile.beta(key),
                packing,
                profile.packing_limit(key, max(packing, 1)),
            )
        )
    return tuple(found)
