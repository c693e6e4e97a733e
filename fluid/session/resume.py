"""Reads the run folder of a session that has ended, so that another session can resume it.

The files are cut back to their last whole entries first. Then they are made to agree: a kill may have come between
writing two of them. Results are written before the journal, and payloads before both, so what the journal lacks of an
iteration or a submission is in another file.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fluid._logs import logger_of
from fluid.checksums import LineChecks
from fluid.engine.commands import ReportEnd
from fluid.engine.events import Checkpoint, Failure, GroupRecovered, TrialHistory
from fluid.engine.journal import replay
from fluid.engine.recovered import Recovered
from fluid.engine.trial_spec import TrialSpec
from fluid.errors import FluidError, InvalidFieldError
from fluid.lane.checkpoint_files import checkpoint_name, checkpoints_like, iteration_of
from fluid.lane.checkpoint_paths import kept_folder
from fluid.lane.checkpoint_store import checkpoints_on_disk
from fluid.lane.run_paths import folder_name, folder_of_host
from fluid.planning.profile import Profile
from fluid.random_state import Seeds
from fluid.results.folder_files import (
    FORECASTS,
    JOURNAL,
    PAYLOADS,
    PROFILE,
    RESULTS,
    SESSION,
    TRIALS,
    ends_in,
    facts_in,
    json_lines,
    read_facts,
)
from fluid.results.group_lines import GroupLine
from fluid.results.payload_file import StoredTrial, read_payloads
from fluid.results.submitted import SubmittedGroup, SubmittedTrials
from fluid.session.best import BestTracker
from fluid.session.earlier_results import EarlierResults
from fluid.session.run_folder import RunFolder
from fluid.session.torn_files import cut_file, cut_torn_line, tell_damage
from fluid.trainables.encoded_metrics import numbers_in
from fluid.trainables.json_form import is_form_of
from fluid.trainables.payload import TrialPayload
from fluid.trialgroup import Search, Shown, Trial, TrialGroup, TrialState

#: Seconds to wait for the processes of the killed session to move their checkpoints to disk.
_PATIENCE = 10.0
_PAUSE = 0.05
_log = logger_of(__name__)
_LOST = f"its trainable and config are gone from {PAYLOADS}"


@dataclass
class LeftGroup:
    """A group of the session.

    Attributes:
        line: what ``trials.jsonl`` says of it, with its terms as the journal has them.
        trials: its trials by id, but for those that were forgotten.
    """

    line: GroupLine
    trials: dict[str, Trial] = field(default_factory=dict)

    def submitted(self) -> TrialGroup:
        """The group as its submitter made it, with the trials that it has."""
        line = self.line
        return TrialGroup(
            self.trials.values(), line.name, search=line.search, requires=line.requires, owner=line.terms.owner
        )


@dataclass
class WrittenLines:
    """What ``trials.jsonl`` has lines of.

    Attributes:
        groups: the lines of groups, by group id.
        trials: trial ids.
        configs: configs as JSON has them, of trials whose payload is gone.
        shown: how reports show trials, by trial id.
    """

    groups: dict[str, GroupLine] = field(default_factory=dict)
    trials: set[str] = field(default_factory=set)
    configs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    shown: dict[str, Shown] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftSession:
    """A session that has ended, as its run folder tells.

    Attributes:
        folder: its run folder.
        recovered: how its trials stood, by its journal and its results.
        groups: by group id.
        results: what it reported.
        written: what ``trials.jsonl`` has lines of.
        lost: ids of unfinished trials that cannot run, as their payloads are gone.
        seeds: of the trials, by id.
    """

    folder: Path
    recovered: Recovered
    groups: dict[str, LeftGroup]
    results: EarlierResults
    written: WrittenLines
    lost: frozenset[str]
    seeds: Mapping[str, Seeds]

    def events(self, at: float, spec_of: Callable[[Trial, Search | None], TrialSpec]) -> list[GroupRecovered]:
        """The events that bring a new engine to where the session was.

        Args:
            at: seconds, on the clock of the session that goes on.
            spec_of: what an engine needs to know of a trial; asked for trials that are not in the journal.
        """
        groups: dict[str, dict[str, TrialHistory]] = {}
        for group_id, group in self.groups.items():
            known = self.recovered.groups.get(group_id, {})
            # Which trials share a process is for the session that goes on to say.
            isolated = {name: spec_of(trial, group.line.search).isolated for name, trial in group.trials.items()}
            groups[group_id] = {
                trial_id: replace(
                    history,
                    checkpoint=self._find(trial_id, history),
                    trial=replace(history.trial, isolated=isolated.get(trial_id, True)),
                )
                for trial_id, history in known.items()
            }
            for trial_id, trial in group.trials.items():
                if trial_id not in known:
                    reported = self.results.reported.get(trial_id, 0)
                    spec, budget = spec_of(trial, group.line.search), max(trial.budget, reported)
                    groups[group_id][trial_id] = TrialHistory(spec, budget=budget, reported=reported)
        recovered = replace(self.recovered, groups=groups)
        return recovered.events(at, lambda checkpoint: os.path.exists(checkpoint.path))

    @property
    def options(self) -> dict[str, Any]:
        """The options of an executor that goes on: what was measured, and what the session's own options were."""
        facts = read_facts(self.folder)
        names = ("keep", "checkpoint_bytes", "group_policy", "fairness")
        kept: dict[str, Any] = {name: facts[name] for name in names if name in facts}
        return {"profile": self.recovered.profile, **kept}

    @property
    def trial_ids(self) -> set[str]:
        """Ids that are taken, those of forgotten trials included."""
        return self.written.trials.union(*(group.trials for group in self.groups.values()))

    def trackers(self) -> dict[str, BestTracker]:
        """Finds the best result of each group."""
        found = {group_id: BestTracker(group.line.search) for group_id, group in self.groups.items()}
        entries = (line.entry or {} for line in json_lines(self.folder / TRIALS))
        for submitted in SubmittedTrials(entries, self.recovered, {}).groups():
            if submitted.group_id in found:
                self._tell(found[submitted.group_id], submitted)
        return found

    def _tell(self, tracker: BestTracker, submitted: SubmittedGroup) -> None:
        """Tells a tracker of the trials of its group, of their results and their ends."""
        parts = {part.trial_id: part for parts in submitted.trials.values() for part in parts}
        trials, results = self.groups[submitted.group_id].trials, self.results.groups.get(submitted.group_id)
        for part in sorted(parts.values(), key=lambda part: part.place):
            tracker.enter(trials.get(part.trial_id, part))
        for result in () if results is None else results.read(trials.get):
            if result.trial_id in parts:
                trial = trials.get(result.trial_id, parts[result.trial_id])
                tracker.hear(trial, result.iteration, numbers_in(result.metrics))
        for part in parts.values():
            tracker.end(part.trial_id, TrialState.FAILED if part.state == TrialState.FAILED else None)
            tracker.say(part.trial_id, self.recovered.outcomes.get(part.trial_id))
            if part.trial_id not in trials:
                tracker.forget(part.trial_id)

    def complete(self, folder: RunFolder, payloads: Mapping[str, Mapping[Trial, TrialPayload]], at: float) -> None:
        """Writes the lines of trials that the session was killed before writing.

        Args:
            folder: the run folder.
            payloads: pickles of the trials, by group.
            at: seconds, on the clock of the session that goes on.
        """
        folder.has_lines_of(self.written.groups)
        for group_id, group in self.groups.items():
            of_group = payloads[group_id].items()
            missing = {trial: payload for trial, payload in of_group if trial.id not in self.written.trials}
            if missing or group_id not in self.written.groups:
                folder.write_trial_lines(group_id, group.line, missing)
        folder.journal((), self.lost_ends(at))

    def lost_ends(self, at: float) -> list[ReportEnd]:
        """The ends of trials that cannot run, for the journal."""
        return [
            ReportEnd(
                trial_id,
                group_id,
                state=TrialState.FAILED,
                iteration=history.reported,
                at=at,
                failure=self.recovered.failures[trial_id],
            )
            for group_id, trials in self.recovered.groups.items()
            for trial_id, history in trials.items()
            if trial_id in self.lost
        ]

    def _find(self, trial_id: str, history: TrialHistory) -> Checkpoint | None:
        """The newest checkpoint of a trial that exists, at its present path.

        One in host memory is moved to disk once no lane runs. One beyond the last iteration reported is of no use, as
        the trial could not report the iterations up to it. The lane that restores the checkpoint reads it first, and
        takes an earlier one if it is damaged.
        """
        known = history.checkpoint
        disk, kept = (
            checkpoints_on_disk(str(self.folder), trial_id),
            kept_folder(str(self.folder), folder_name(trial_id)),
        )
        hosts = folder_of_host(glob.escape(str(self.folder)), "*")
        roots = [disk, kept, *(checkpoints_on_disk(host, trial_id) for host in glob.glob(hosts))]
        if known is None or known.iteration > history.reported:
            path = os.path.join(disk, checkpoint_name(history.reported, 0, 0))
        else:
            path, roots = known.path, [os.path.dirname(known.path), *roots]
        for found in checkpoints_like(path, roots, disk):
            if os.path.isdir(found):
                still_there = known is not None and known.in_memory and found == known.path
                host = "localhost" if known is None else known.host
                return Checkpoint(iteration_of(found), found, host=host, in_memory=still_there)
        return None


def read_session(folder: Path) -> LeftSession:
    """Reads the folder of a session that has ended, and cuts off what is torn of its files.

    Args:
        folder: the run folder, which the caller has locked.

    Raises:
        InvalidFieldError: its files cannot be read.
    """
    try:
        facts = _facts(folder)
        if facts.get("rehearsed"):
            raise InvalidFieldError("run_dir", str(folder), "was rehearsed: run the sweep again, from the same seed")
        return _read(folder, ends_in(facts))
    except OSError as error:
        raise InvalidFieldError("run_dir", str(folder), f"cannot be read: {error.strerror}") from error


def _read(folder: Path, ends: Mapping[str, int]) -> LeftSession:
    """Reads the files, which ended at these places as ``session.json`` was written, by name."""
    for name in (JOURNAL, RESULTS, TRIALS, FORECASTS):
        cut_torn_line(folder / name)
    recovered = _replay(folder, ends.get(JOURNAL, 0))
    results = EarlierResults.scan(folder, ends.get(RESULTS, 0))
    forgotten = {trial_id for trials in recovered.forgotten.values() for trial_id in trials}
    in_journal = {trial_id for trials in recovered.groups.values() for trial_id in trials}
    payloads = read_payloads(folder / PAYLOADS, lambda trial_id: trial_id in in_journal or trial_id in forgotten)
    cut_file(folder / PAYLOADS, payloads.whole_bytes)
    stored = {trial.trial_id: trial for trial in payloads.trials if trial.trial_id not in forgotten}
    known = {*in_journal, *forgotten, *stored}
    written = _read_lines(folder, ends.get(TRIALS, 0), lambda trial_id: trial_id in known, in_journal - stored.keys())
    lost = _agree(recovered, results, stored)
    recovered.profile = recovered.profile or _profile(folder)
    groups = _groups(recovered, stored, written)
    _require_same_configs(folder, groups, {name for name, trial in stored.items() if not trial.is_checked})
    _wait_until_settled(recovered)
    seeds = {trial_id: trial.seeds for trial_id, trial in stored.items() if trial.seeds is not None}
    return LeftSession(folder, recovered, groups, results, written, lost, seeds)


def _facts(folder: Path) -> dict[str, Any]:
    """The content of ``session.json``; empty if it is missing, or damaged, which is logged."""
    try:
        facts = facts_in((folder / SESSION).read_bytes())
    except FileNotFoundError:
        return {}
    if facts is None:
        _log.warning("%s is damaged: the session goes on without the options that it had", folder / SESSION)
    return facts or {}


def _replay(folder: Path, end: int) -> Recovered:
    """Replays the journal, which went on to the offset ``end`` at least."""
    checks = LineChecks()
    try:
        with (folder / JOURNAL).open("rb") as lines:
            recovered = replay(_checked_lines(folder, lines, checks))
    except InvalidFieldError as error:
        raise InvalidFieldError("run_dir", str(folder), f"{JOURNAL}: {error.field} {error.reason}") from error
    tell_damage(folder / JOURNAL, checks, end)
    if recovered.mixed:
        reason = "two sessions of an older Fluid wrote there, and their trials cannot be told apart"
        raise InvalidFieldError("run_dir", str(folder), reason)
    return recovered


def _checked_lines(folder: Path, lines: Iterable[bytes], checks: LineChecks) -> Iterator[bytes]:
    """The JSON text of the journal's lines.

    Raises:
        InvalidFieldError: one of them is damaged, repeated or missing: what follows from it cannot be known.
    """
    for line in lines:
        text = checks.take(line)
        if checks.damage:
            reason = f"{JOURNAL} is damaged at line {checks.first}; the session cannot be resumed"
            raise InvalidFieldError("run_dir", str(folder), reason)
        yield line if text is None else text


def _profile(folder: Path) -> Profile | None:
    """What the session measured, if it ended in order."""
    try:
        return Profile.load(folder / PROFILE)
    except FileNotFoundError:
        return None
    except (FluidError, OSError) as error:
        _log.warning("what the session measured was ignored: %s", error)
        return None


def _read_lines(folder: Path, end: int, is_known: Callable[[str], bool], lost: set[str]) -> WrittenLines:
    """Reads ``trials.jsonl``, and cuts off the last lines if neither journal nor payloads know their trials.

    Args:
        folder: the run folder.
        end: the offset to which the file went on at least.
        is_known: whether journal or payloads know the trial of this id.
        lost: ids of trials whose configs are wanted.
    """
    written, started, keep, checks = WrittenLines(), dict[str, GroupLine](), 0, LineChecks()
    for line in json_lines(folder / TRIALS, checks=checks):
        entry = line.entry or {}
        if "trial" not in entry:
            trial_id = str(entry.get("shown", ""))
            if "shown" in entry and is_known(trial_id):  # Its config was told later.
                keep = line.end
                with suppress(InvalidFieldError, KeyError):
                    shown = written.shown.get(trial_id, Shown(trial_id))
                    written.shown[trial_id] = replace(shown, config=entry["config"])
            elif "group" in entry:
                started[str(entry["group"])] = GroupLine.read(entry)
        elif is_known(str(entry["trial"])):
            keep = line.end
            written.groups.update(started)
            started.clear()
            written.trials.add(entry["trial"])
            if entry["trial"] in lost and isinstance(entry.get("config"), dict):
                written.configs[entry["trial"]] = entry["config"]
            if "shown" in entry:
                with suppress(InvalidFieldError, KeyError):
                    shown = Shown(entry["shown"], entry["config"], entry.get("iterations", 0), entry.get("metrics"))
                    written.shown[entry["trial"]] = shown
    tell_damage(folder / TRIALS, checks, end)
    cut_file(folder / TRIALS, keep)
    return written


def _agree(recovered: Recovered, results: EarlierResults, stored: Mapping[str, StoredTrial]) -> frozenset[str]:
    """Brings what the journal says of the trials to what the other files have; returns those that cannot run."""
    lost: set[str] = set()
    for trials in recovered.groups.values():
        for trial_id, history in trials.items():
            history = _told(history, results.reported.get(trial_id, 0), recovered.durable.get(trial_id))
            if trial_id not in stored:
                # It cannot be extended either: its state is treated as one that cannot be saved.
                history = replace(history, trial=replace(history.trial, can_save=False), checkpoint=None)
                if history.ended is None:
                    lost.add(trial_id)
                    history = replace(history, ended=TrialState.FAILED)
                if history.ended is TrialState.FAILED:
                    recovered.failures.setdefault(trial_id, Failure("error", _LOST))
            trials[trial_id] = history
    return frozenset(lost)


def _told(history: TrialHistory, told: int, durable: Checkpoint | None) -> TrialHistory:
    """The history of a trial of which ``told`` iterations are in ``results.jsonl``.

    More than the journal has were reported: they are written first. Where there are fewer, as after a power cut, the
    missing ones are reported again if the trial can go back to before them.
    """
    checkpoint, reported = history.checkpoint, max(told, history.reported)
    if history.ended is None and (checkpoint is None or checkpoint.iteration <= told):
        reported = told
    elif history.ended is None and durable is not None and durable.iteration <= told:
        reported, checkpoint = told, durable
    ended, budget = history.ended, max(history.budget, reported)
    if ended is None and checkpoint is not None and checkpoint.iteration >= budget:
        ended = TrialState.DONE  # The entry of its end was cut off.
    return replace(history, reported=reported, budget=budget, checkpoint=checkpoint, ended=ended)


def _groups(recovered: Recovered, stored: Mapping[str, StoredTrial], written: WrittenLines) -> dict[str, LeftGroup]:
    """The groups, with their trials unpickled; a trial of which the payload is gone gets one that raises."""
    groups: dict[str, LeftGroup] = {}
    trainables: dict[bytes, Any] = {}
    for group_id in dict.fromkeys([*recovered.groups, *(trial.group_id for trial in stored.values())]):
        line = written.groups.get(group_id, GroupLine(group_id))
        terms = recovered.terms.setdefault(group_id, line.terms)
        groups[group_id] = LeftGroup(replace(line, terms=terms))
    for trial in stored.values():
        group = groups[trial.group_id]
        group.trials[trial.trial_id] = trial.load(trainables).changed(shown=written.shown.get(trial.trial_id))
        if trial.group_id not in written.groups:
            group.line = replace(group.line, name=trial.name)
    for group_id, trials in recovered.groups.items():
        for trial_id, history in trials.items():
            if trial_id not in groups[group_id].trials:
                config, spec = written.configs.get(trial_id, {}), history.trial
                kept = Trial(_LostTrainable, config, spec.budget, trial_id=trial_id, profile_key=spec.profile_key)
                groups[group_id].trials[trial_id] = kept
    return groups


def _require_same_configs(folder: Path, groups: Mapping[str, LeftGroup], unchecked: set[str]) -> None:
    """Compares the configs that are pickled without a checksum with those in ``trials.jsonl``.

    Raises:
        InvalidFieldError: one is another: either file is damaged.
    """
    trials = {name: trial for group in groups.values() for name, trial in group.trials.items() if name in unchecked}
    for line in json_lines(folder / TRIALS) if trials else ():
        entry = line.entry or {}
        trial = trials.get(entry.get("trial", ""))
        if trial is not None and "shown" not in entry and not is_form_of(trial.config, entry.get("config")):
            reason = f"the config of trial {trial.id!r} in {PAYLOADS} is another one than in {TRIALS}: one is damaged"
            raise InvalidFieldError("run_dir", str(folder), reason)


class _LostTrainable:
    """Stands for a trainable that is gone."""

    def step(self) -> Mapping[str, Any]:
        """Raises an error that says so."""
        raise FluidError(_LOST)


def _wait_until_settled(recovered: Recovered) -> None:
    """Waits while the killed session's processes still move checkpoints to disk."""
    in_memory = {
        os.path.dirname(os.path.dirname(history.checkpoint.path))
        for trials in recovered.groups.values()
        for history in trials.values()
        if history.checkpoint is not None and history.checkpoint.in_memory
    }
    waiter, waited = threading.Event(), 0.0
    while waited < _PATIENCE and any(map(os.path.exists, in_memory)):
        waiter.wait(_PAUSE)
        waited += _PAUSE
