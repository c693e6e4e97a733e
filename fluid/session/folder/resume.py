"""Reads the run folder of a session that has ended, so that another session can resume it.

The files are cut back to their last whole entries first. Then they are made to agree: a kill may have come between
writing two of them. Results are written before the journal, and payloads before both, so what the journal lacks of an
iteration or a submission is in another file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from msgspec import structs

from fluid._clock import wall_seconds
from fluid._logs import logger_of
from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.folders import HERE
from fluid.engine.commands import ReportEnd, ReportSetBack
from fluid.engine.events import Checkpoint, Failure, GroupRecovered, TrialHistory, TrialSpec
from fluid.errors import FluidError, InvalidFieldError
from fluid.lane.checkpoints.files import checkpoint_name, checkpoints_like, iteration_of
from fluid.lane.checkpoints.paths import checkpoints_folder, folder_name, folder_of_host, kept_folder, trials_folder
from fluid.lane.checkpoints.store import checkpoints_on_disk
from fluid.measure.profile import Profile
from fluid.random_state import Seeds
from fluid.results.best import NOT_BEST, BestTracker
from fluid.results.checkpoints import StoredTrial, read_payloads
from fluid.results.code_changes import CodeChange
from fluid.results.damage import cut_file, cut_torn_line, gap_notes, tell_damage
from fluid.results.iterations import StoredIteration
from fluid.results.journal import Recovered, changed
from fluid.results.loading import EarlierResults
from fluid.results.run_files import (
    FORECASTS,
    JOURNAL,
    PAYLOADS,
    PROFILE,
    RESULTS,
    SESSION,
    TRIALS,
    JsonLines,
    as_written,
    ends_in,
    facts_in,
    read_facts,
)
from fluid.results.stored_run import JournalLines
from fluid.results.submitted import GroupLine, SubmittedTrial, SubmittedTrials
from fluid.session.folder.folder import RunFolder
from fluid.trainables.encoded_metrics import numbers_in
from fluid.trainables.json_form import is_form_of
from fluid.trainables.payload import TrialPayload
from fluid.trainables.trainable_code import TrainableCode
from fluid.trialgroup import Search, Shown, Trial, TrialGroup, TrialState

_log = logger_of("fluid.session")
#: Seconds to wait for the processes of the killed session to move their checkpoints to disk.
_PATIENCE = 10.0
_UNUSABLE = f"its trainable and config cannot be unpickled from {PAYLOADS}"
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
        own = [trial for trial in self.trials.values() if not trial.is_shared_run]
        return TrialGroup(own, line.name, search=line.search, requires=line.requires, owner=line.terms.owner)


@dataclass
class WrittenLines:
    """What ``trials.jsonl`` has lines of.

    Attributes:
        groups: the lines of groups, by group id.
        trials: ids of trials, in the order written.
        unstored: the lines of trials that have no payload, by trial id.
        shown: how reports show trials, by trial id.
        unchecked: the configs of trials whose payloads no checksum vouches for, by trial id.
    """

    groups: dict[str, GroupLine] = field(default_factory=dict)
    trials: dict[str, None] = field(default_factory=dict)
    unstored: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    shown: dict[str, Shown] = field(default_factory=dict)
    unchecked: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftSession:
    """A session that has ended, as its run folder tells.

    Attributes:
        folder: its run folder.
        recovered: how its trials stood, by its journal and its results.
        groups: by group id.
        results: what it reported.
        written: what ``trials.jsonl`` has lines of.
        lost: ids of unfinished trials that cannot run, as their payloads are gone or cannot be unpickled.
        seeds: of the trials, by id.
        codes: those of their trainables, by id, as far as they are known.
        unusable: ids of all trials whose payloads are gone or cannot be unpickled, also of those that have ended.
        best: finds the best result of each group.
        renewed: ids of trials that go on with another trainable, or other fields, than are written.
    """

    folder: Path
    recovered: Recovered
    groups: dict[str, LeftGroup]
    results: EarlierResults
    written: WrittenLines
    lost: frozenset[str]
    seeds: Mapping[str, Seeds]
    codes: Mapping[str, TrainableCode]
    unusable: frozenset[str]
    best: _Trackers
    renewed: set[str] = field(default_factory=set)

    def retry_failed(self) -> list[str]:
        """Has the trials that have failed tried again, but for those that cannot run; returns their ids."""
        retried = []
        for trials in self.recovered.groups.values():
            for trial_id, history in trials.items():
                if history.ended is TrialState.FAILED and trial_id not in self.unusable:
                    trials[trial_id] = structs.replace(history, ended=None, failures=0)
                    self.recovered.failures.pop(trial_id, None)
                    self.recovered.outcomes.pop(trial_id, None)
                    retried.append(trial_id)
        return retried

    @property
    def failed(self) -> list[str]:
        """Ids of the trials that have failed."""
        groups = self.recovered.groups.values()
        return [name for trials in groups for name, one in trials.items() if one.ended is TrialState.FAILED]

    def trackers(self) -> Mapping[str, BestTracker]:
        """Those of the best result of each group, by group id, told how the trials stand."""
        self.best.end(self.recovered)
        return self.best.of_groups

    def events(
        self,
        at: float,
        spec_of: Callable[[Trial, Search | None], TrialSpec],
        adapt: Callable[[TrialSpec, Trial | None], TrialSpec],
    ) -> list[GroupRecovered]:
        """The events that bring a new engine to where the session was.

        Args:
            at: seconds, on the clock of the session that goes on.
            spec_of: what an engine needs to know of a trial; asked for trials that are not in the journal.
            adapt: makes of what the journal says of a trial what holds in the session that goes on.
        """
        groups: dict[str, dict[str, TrialHistory]] = {}
        on_disk = CheckpointFolders(str(self.folder))
        for group_id, group in self.groups.items():
            known = self.recovered.groups.get(group_id, {})
            histories = groups[group_id] = {
                trial_id: changed(
                    history,
                    checkpoint=_find(trial_id, history, on_disk),
                    trial=adapt(history.trial, group.trials.get(trial_id)),
                )
                for trial_id, history in known.items()
            }
            for trial_id, trial in group.trials.items():
                if trial_id not in known:
                    reported = self.results.reported.get(trial_id, 0)
                    spec, budget = spec_of(trial, group.line.search), max(trial.budget, reported)
                    histories[trial_id] = TrialHistory(spec, budget=budget, reported=reported)
                elif trial_id in self.renewed:
                    spec, history = spec_of(trial, group.line.search), histories[trial_id]
                    found = history.checkpoint if spec.can_save else None
                    renewed = structs.replace(spec, budget=history.trial.budget)
                    histories[trial_id] = structs.replace(history, checkpoint=found, trial=renewed)
        now = wall_seconds()
        terms = {group_id: group.line.terms_left(now) for group_id, group in self.groups.items()}
        recovered = replace(self.recovered, groups=groups, terms=terms)
        return recovered.events(at, lambda checkpoint: os.path.exists(checkpoint.path))

    @property
    def last_at(self) -> float:
        """When the last entry was written, in seconds on the time axis of the files."""
        return max(self.recovered.at, self.results.axis.latest - self.results.axis.offsets[-1])

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
        return set(self.written.trials).union(*(group.trials for group in self.groups.values()))

    @property
    def submitted_trials(self) -> int:
        """How many trials were submitted, without runs that they share."""
        shared = (trial.is_shared_run for group in self.groups.values() for trial in group.trials.values())
        return len(self.trial_ids) - sum(shared)

    def complete(
        self,
        folder: RunFolder,
        payloads: Mapping[str, Mapping[Trial, TrialPayload]],
        changes: Iterable[CodeChange],
        at: float,
    ) -> None:
        """Writes the lines of trials that the session was killed before writing, and what trials go on with instead.

        Args:
            folder: the run folder.
            payloads: pickles of the trials, by group.
            changes: what of their code has changed.
            at: seconds, on the clock of the session that goes on.
        """
        folder.has_lines_of(self.written.groups)
        for group_id, group in self.groups.items():
            of_group = payloads[group_id].items()
            missing = {trial: payload for trial, payload in of_group if trial.id not in self.written.trials}
            if missing or group_id not in self.written.groups:
                folder.write_trial_lines(group_id, group.line, missing)
            renewed = {trial: payload for trial, payload in of_group if trial.id in self.renewed}
            if renewed:
                folder.write_payloads(group_id, group.line.name, renewed)
        for change in changes:
            folder.write_code_change(change.entry())
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


class CheckpointFolders:
    """Where checkpoints of trials are on disk. The folders that there are, are listed once for all trials.

    Args:
        run_folder: the run folder.
    """

    def __init__(self, run_folder: str) -> None:
        self._run_folder = run_folder
        hosts = glob.glob(folder_of_host(glob.escape(run_folder), "*"))
        self._trials = {base: frozenset(_names(trials_folder(base))) for base in (run_folder, *hosts)}

    def first(self, trial_id: str) -> str:
        """The folder to which checkpoints of a trial in host memory move."""
        return checkpoints_on_disk(self._run_folder, trial_id)

    def of(self, trial_id: str) -> list[str]:
        """The folders that may hold checkpoints of a trial."""
        if not any(self._trials.values()):
            return []
        name = folder_name(trial_id)
        found = [checkpoints_folder(base, name) for base, trials in self._trials.items() if name in trials]
        return [kept_folder(self._run_folder, name), *found] if found else []


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _find(trial_id: str, history: TrialHistory, folders: CheckpointFolders) -> Checkpoint | None:
    """The newest checkpoint of a trial that exists, at its present path.

    One in host memory is moved to disk once no lane runs. One beyond the last iteration reported is of no use, as the
    trial could not report the iterations up to it. The lane that restores the checkpoint reads it first, and takes an
    earlier one if it is damaged.
    """
    known, roots = history.checkpoint, folders.of(trial_id)
    if known is None and not roots:
        return None
    disk = folders.first(trial_id)
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
    forgotten = {trial_id for trials in recovered.forgotten.values() for trial_id in trials}
    in_journal = {trial_id for trials in recovered.groups.values() for trial_id in trials}
    payloads = read_payloads(folder / PAYLOADS, lambda trial_id: trial_id in in_journal or trial_id in forgotten)
    cut_file(folder / PAYLOADS, payloads.whole_bytes)
    stored = {trial.trial_id: trial for trial in payloads.trials if trial.trial_id not in forgotten}
    known = {*in_journal, *forgotten, *stored}
    written = _read_lines(folder, ends.get(TRIALS, 0), known, stored)
    trials, problems = _unpickle(stored, written)
    groups = _groups(recovered, stored, trials, written)
    best = _Trackers(groups, written, recovered)
    results = EarlierResults.scan(folder, ends.get(RESULTS, 0), best.hear)
    reported, skipped = recovered.reported.items(), recovered.skipped
    missing = {name: parts for name, n in reported if (parts := results.gaps.of(name, n, skipped.get(name, 0)))}
    lost = _agree(recovered, results, stored, problems)
    _tell_of_gaps(folder, missing, recovered)
    recovered.profile = recovered.profile or _profile(folder)
    _require_same_configs(
        folder, trials, {name: one for name, one in written.unchecked.items() if name not in problems}
    )
    _reclaim(recovered, folder)
    seeds = {trial_id: trial.seeds for trial_id, trial in stored.items() if trial.seeds is not None}
    codes = {trial_id: trial.code for trial_id, trial in stored.items() if trial.code is not None}
    unusable = frozenset([*(in_journal - stored.keys()), *problems])
    return LeftSession(folder, recovered, groups, results, written, lost, seeds, codes, unusable, best)


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
    journal = JournalLines(folder / JOURNAL, as_written, keep=False)
    try:
        recovered = journal.read()
    except InvalidFieldError as error:
        reason = f"{JOURNAL}: {error.field} {error.reason}"
        if journal.lines.checks.is_checked and journal.lines.checks.damage:
            reason = f"{JOURNAL} is damaged at line {journal.lines.checks.first}; the session cannot be resumed"
        raise InvalidFieldError("run_dir", str(folder), reason) from error
    tell_damage(folder / JOURNAL, journal.lines.checks, end)
    if recovered.mixed:
        reason = "two sessions of an older Fluid wrote there, and their trials cannot be told apart"
        raise InvalidFieldError("run_dir", str(folder), reason)
    return recovered


def _profile(folder: Path) -> Profile | None:
    """What the session measured, if it ended in order."""
    try:
        return Profile.load(folder / PROFILE)
    except FileNotFoundError:
        return None
    except (FluidError, OSError) as error:
        _log.warning("what the session measured was ignored: %s", error)
        return None


def _read_lines(folder: Path, end: int, known: Collection[str], stored: Mapping[str, StoredTrial]) -> WrittenLines:
    """Reads ``trials.jsonl``, and cuts off the last lines if neither journal nor payloads know their trials.

    Args:
        folder: the run folder.
        end: the offset to which the file went on at least.
        known: ids of the trials that are in the journal or the payloads.
        stored: the trials that have a payload, by id.
    """
    written, started, keep = WrittenLines(), dict[str, GroupLine](), 0
    lines = JsonLines(folder / TRIALS, read=as_written)
    for line in lines.there():
        entry = line.entry
        if "trial" not in entry:
            trial_id = str(entry.get("shown", ""))
            if "shown" in entry and trial_id in known:  # Its config was told later.
                keep = line.end
                with suppress(InvalidFieldError, KeyError):
                    shown = written.shown.get(trial_id, Shown(trial_id))
                    written.shown[trial_id] = replace(shown, config=entry["config"])
            elif "code_of" in entry:
                keep = line.end
            elif "group" in entry:
                started[str(entry["group"])] = GroupLine.read(entry)
        elif (trial_id := str(entry["trial"])) in known:
            keep = line.end
            written.groups.update(started)
            started.clear()
            written.trials[trial_id] = None
            if trial_id not in stored:
                written.unstored[trial_id] = entry
            if "shown" in entry:
                with suppress(InvalidFieldError, KeyError):
                    shown = Shown(entry["shown"], entry["config"], entry.get("iterations", 0), entry.get("metrics"))
                    written.shown[trial_id] = shown
            elif trial_id in stored and not stored[trial_id].is_checked:
                written.unchecked[trial_id] = entry.get("config")
    tell_damage(folder / TRIALS, lines.checks, end)
    cut_file(folder / TRIALS, keep)
    return written


def _unpickle(stored: Mapping[str, StoredTrial], written: WrittenLines) -> tuple[dict[str, Trial], dict[str, str]]:
    """Unpickles the trials; says of each that cannot be why. In place of such a one stands one that raises that."""
    trials: dict[str, Trial] = {}
    problems: dict[str, str] = {}
    trainables: dict[bytes, Any] = {}
    broken: dict[bytes, str] = {}
    for trial_id, trial in stored.items():
        problem = broken.get(trial.trainable)
        if problem is None:
            try:
                trials[trial_id] = trial.load(trainables, written.shown.get(trial_id))
                continue
            except InvalidFieldError as error:
                problem = f"{_UNUSABLE}: {type(error.__cause__).__name__}: {error.__cause__}"
                if trial.trainable not in trainables:
                    broken[trial.trainable] = problem
        problems[trial_id] = problem
        shown, stand_in = written.shown.get(trial_id), partial(_raise_lost, problem)
        trials[trial_id] = Trial.of_checked(
            {"trainable": stand_in, "config": trial.load_config(), "shown": shown, **trial.fields}
        )
    for problem in dict.fromkeys(problems.values()):
        ids = [trial_id for trial_id, one in problems.items() if one == problem]
        who = f"trial {ids[0]!r} cannot" if len(ids) == 1 else f"{len(ids)} trials, such as {ids[0]!r}, cannot"
        _log.warning("%s go on: %s", who, problem)
    return trials, problems


def _raise_lost(problem: str, config: Mapping[str, Any]) -> NoReturn:
    """Stands for the trainable of a trial that cannot be unpickled."""
    raise FluidError(problem)


def _agree(
    recovered: Recovered,
    results: EarlierResults,
    stored: Mapping[str, StoredTrial],
    problems: Mapping[str, str],
) -> frozenset[str]:
    """Brings what the journal says of the trials to what the other files have; returns those that cannot run.

    Args:
        recovered: what the journal says.
        results: the results.
        stored: the trials whose payloads there are.
        problems: why some of them cannot be unpickled.
    """
    lost: set[str] = set()
    for trials in recovered.groups.values():
        for trial_id, history in trials.items():
            history = _told(history, results.reported.get(trial_id, 0), recovered.durable.get(trial_id))
            if trial_id not in stored:
                # It cannot be extended either: its state is treated as one that cannot be saved.
                history = structs.replace(
                    history, trial=structs.replace(history.trial, can_save=False), checkpoint=None
                )
                if history.ended is None:
                    lost.add(trial_id)
                    history = structs.replace(history, ended=TrialState.FAILED)
                if history.ended is TrialState.FAILED:
                    recovered.failures.setdefault(trial_id, Failure("error", _LOST))
            elif trial_id in problems and history.ended is None:
                lost.add(trial_id)
                history = structs.replace(history, ended=TrialState.FAILED)
                recovered.failures[trial_id] = Failure("error", problems[trial_id])
            trials[trial_id] = history
    return frozenset(lost)


def closes_gap(history: TrialHistory, told: int, durable: Checkpoint | None) -> bool:
    """Whether a trial that was done is run again, as ``results.jsonl`` ends at iteration ``told``, before its end.

    It is if it has a checkpoint from before the gap. A trial that a search extends is not: what the search decided by
    its results stands.
    """
    at = [checkpoint.iteration for checkpoint in (history.checkpoint, durable) if checkpoint is not None]
    is_done = history.ended is TrialState.DONE and not history.trial.extends
    return is_done and told < history.reported and min(at, default=told + 1) <= told


def _told(history: TrialHistory, told: int, durable: Checkpoint | None) -> TrialHistory:
    """The history of a trial of which ``told`` iterations are in ``results.jsonl``.

    More than the journal has were reported: they are written first. Where there are fewer, as after a power cut, the
    missing ones are reported again if the trial can go back to before them; so are those of a trial that was done.
    """
    if closes_gap(history, told, durable):
        history = structs.replace(history, ended=None)
    checkpoint, reported = history.checkpoint, max(told, history.reported)
    if history.ended is None and (checkpoint is None or checkpoint.iteration <= told):
        reported = told
    elif history.ended is None and durable is not None and durable.iteration <= told:
        reported, checkpoint = told, durable
    ended, budget = history.ended, max(history.budget, reported)
    if ended is None and checkpoint is not None and checkpoint.iteration >= budget:
        ended = TrialState.DONE  # The entry of its end was cut off.
    return changed(history, reported=reported, budget=budget, checkpoint=checkpoint, ended=ended)


def _tell_of_gaps(folder: Path, missing: Mapping[str, list[tuple[int, int]]], recovered: Recovered) -> None:
    """Warns of iterations that are missing, and says which of them are run again."""
    if not missing:
        return
    histories = {name: one for trials in recovered.groups.values() for name, one in trials.items()}
    for note in gap_notes(missing):
        _log.warning("%s: %s", folder, note)
    again = [
        name
        for name, parts in missing.items()
        if (one := histories.get(name)) is not None and one.ended is None and one.reported < parts[-1][1]
    ]
    if again:
        _log.warning("trials that run what is missing at their end again: %s", ", ".join(again))


def _groups(
    recovered: Recovered, stored: Mapping[str, StoredTrial], trials: Mapping[str, Trial], written: WrittenLines
) -> dict[str, LeftGroup]:
    """The groups, with their unpickled trials; a trial of which the payload is gone gets one that raises."""
    groups: dict[str, LeftGroup] = {}
    for group_id in dict.fromkeys([*recovered.groups, *(trial.group_id for trial in stored.values())]):
        line = written.groups.get(group_id, GroupLine(group_id))
        groups[group_id] = LeftGroup(line.with_terms(recovered.terms.get(group_id)))
    for trial in stored.values():
        group = groups[trial.group_id]
        group.trials[trial.trial_id] = trials[trial.trial_id]
        if trial.group_id not in written.groups:
            group.line = replace(group.line, name=trial.name)
    for group_id, histories in recovered.groups.items():
        for trial_id, history in histories.items():
            if trial_id not in groups[group_id].trials:
                config, spec = written.unstored.get(trial_id, {}).get("config"), history.trial
                config = config if isinstance(config, dict) else {}
                kept = Trial(_LostTrainable, config, spec.budget, trial_id=trial_id, profile_key=spec.profile_key)
                groups[group_id].trials[trial_id] = kept
    return groups


class _Trackers:
    """Finds the best result of each group while the results are read.

    Args:
        groups: the groups.
        written: what ``trials.jsonl`` has, forgotten trials included: what they reported counts.
        recovered: the session, by its journal.

    Attributes:
        of_groups: the trackers, by group id.
    """

    def __init__(self, groups: Mapping[str, LeftGroup], written: WrittenLines, recovered: Recovered) -> None:
        self.of_groups = {group_id: BestTracker(group.line.search) for group_id, group in groups.items()}
        #: The trials, in order of submission, each with the tracker of its group.
        self._trials: dict[str, tuple[BestTracker, Trial | SubmittedTrial]] = {}
        self._forgotten = recovered.past.keys()
        forgotten = SubmittedTrials(written.unstored.values(), recovered, {})
        there = {
            trial_id: (group_id, trial) for group_id in groups for trial_id, trial in groups[group_id].trials.items()
        }
        for trial_id in dict.fromkeys((*written.trials, *there, *self._forgotten)):
            if trial_id in there:
                group_id, trial = there[trial_id]
                self._enter(group_id, trial_id, trial)
            elif trial_id in self._forgotten:
                past = forgotten.trial(trial_id)
                self._enter(past.group_id, trial_id, past)

    def _enter(self, group_id: str, trial_id: str, trial: Trial | SubmittedTrial) -> None:
        if group_id in self.of_groups:
            self._trials[trial_id] = self.of_groups[group_id], trial
            self.of_groups[group_id].enter(trial)

    def hear(self, reported: StoredIteration) -> None:
        """Takes a result."""
        if reported.trial_id in self._trials:
            tracker, trial = self._trials[reported.trial_id]
            tracker.hear(trial, reported.number, numbers_in(reported.metrics))

    def end(self, recovered: Recovered) -> None:
        """Takes it how the trials have ended, once all results were heard."""
        ended = {trial_id: history.ended for trial_id, history in recovered.histories.items()}
        failed = {trial_id: state for trial_id, state in ended.items() if state in NOT_BEST}
        differ = {*failed, *recovered.outcomes, *self._forgotten}
        for trial_id in [trial_id for trial_id in self._trials if trial_id in differ]:
            tracker, _ = self._trials[trial_id]
            if trial_id in failed:
                tracker.end(trial_id, failed[trial_id])
            tracker.say(trial_id, recovered.outcomes.get(trial_id))
            if trial_id in self._forgotten:
                tracker.forget(trial_id)


def _require_same_configs(folder: Path, trials: Mapping[str, Trial], configs: Mapping[str, Any]) -> None:
    """Compares the configs of trials, as they are pickled, with those in ``trials.jsonl``, by trial id.

    Raises:
        InvalidFieldError: one is another: either file is damaged.
    """
    for trial_id, config in configs.items():
        if not is_form_of(trials[trial_id].config, config):
            reason = f"the config of trial {trial_id!r} in {PAYLOADS} is another one than in {TRIALS}: one is damaged"
            raise InvalidFieldError("run_dir", str(folder), reason)


class _LostTrainable:
    """Stands for a trainable that is gone."""

    def step(self) -> Mapping[str, Any]:
        """Raises an error that says so."""
        raise FluidError(_LOST)


def _reclaim(recovered: Recovered, folder: Path) -> None:
    """Moves to disk what the session has left in host memory; waits while its processes, killed, still do so."""
    in_memory = {
        os.path.dirname(os.path.dirname(history.checkpoint.path))
        for trials in recovered.groups.values()
        for history in trials.values()
        if history.checkpoint is not None and history.checkpoint.in_memory
    }
    for memory_folder in in_memory:
        host_memory.reclaim(memory_folder, str(folder), _PATIENCE)


# -- lost checkpoints ----------------------------------------------------------------------------
#
# Tells, as a session is resumed, of trials whose newest checkpoint is nowhere: the machine restarted, for example.


#: Most trials that the warning names.
_MOST_TOLD = 20


def lost_checkpoints(recovered: Recovered, events: Iterable[GroupRecovered]) -> list[ReportSetBack]:
    """Finds, and warns of, trials that go on from an earlier state than that of the checkpoint which the journal names.

    Args:
        recovered: the session as its journal tells it.
        events: as the session goes on.
    """
    lost: list[ReportSetBack] = []
    for event in events:
        for history in event.trials:
            trial_id, now = history.trial.trial_id, history.checkpoint
            known = recovered.groups.get(event.group_id, {}).get(trial_id)
            was = None if known is None or known.ended is not None else known.checkpoint
            if was is None or was.iteration > history.reported or (now is not None and now.iteration >= was.iteration):
                continue
            where = "" if was.host == HERE else f" of {was.host}"
            reason = f"the checkpoint {was.path}{where} is gone"
            lost.append(
                ReportSetBack(
                    trial_id,
                    event.group_id,
                    at=event.at,
                    lost=was.iteration,
                    checkpoint=now,
                    reason=reason,
                    cannot_load=False,
                )
            )
    if lost:
        shown = [f"{one.trial_id!r} from iteration {_iteration(one)}, not {one.lost}" for one in lost[:_MOST_TOLD]]
        more = [f"{len(lost) - _MOST_TOLD:,} more"] if len(lost) > _MOST_TOLD else []
        _log.warning("the newest checkpoints of these trials are gone, and they go on: %s", ", ".join([*shown, *more]))
    return lost


def _iteration(report: ReportSetBack) -> int:
    return 0 if report.checkpoint is None else report.checkpoint.iteration
