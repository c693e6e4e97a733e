"""Reads a run folder, for all who want to know what is in it: :func:`read_run`.

The session may still be running, or may have been killed. So only ``results.jsonl`` must exist; of the other files as
much is read as possible, and a note names what could not be read. Nothing is unpickled, and the folder is not changed.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fluid.checksums import LineChecks
from fluid.errors import FluidError, InvalidFieldError
from fluid.joint.folders import MembersReader, fullest, is_shared
from fluid.measure.json_input import without_surrogates
from fluid.measure.profile import Profile
from fluid.results.code_changes import code_notes
from fluid.results.damage import IterationGaps
from fluid.results.iterations import StoredIteration, read_iteration
from fluid.results.journal import Recovered, Replay
from fluid.results.run_files import (
    BROKEN,
    ENDS,
    FORECASTS,
    JOURNAL,
    PROFILE,
    RESULTS,
    SESSION,
    TRIALS,
    JsonLines,
    ends_in,
    facts_in,
    is_locked,
    line_count,
    parsed,
    why_unreadable,
)
from fluid.results.submitted import SubmittedGroup, SubmittedTrials

#: The files, in the order in which they are read: what a session writes first comes later.
_FILES = (SESSION, JOURNAL, RESULTS, TRIALS, FORECASTS, PROFILE)


def read_run(folder: str | Path, argument: str = "run_dir") -> StoredRun:
    """Reads a run folder.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.results import read_run
        >>> def train(config):
        ...     yield {"loss": config["lr"]}
        >>> with FluidExecutor("local", 1, run_dir="runs/one", verbose=0) as executor:
        ...     executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5})], "rung-0")).wait()
        True
        >>> run = read_run("runs/one")
        >>> run.name, [(each.number, each.metrics) for each in run.reported], run.notes
        ('rung-0', [(1, {'loss': 0.5})], [])

    Args:
        folder: the run folder, or one that several drivers share.
        argument: how the caller names it, for errors.

    Raises:
        InvalidFieldError: the path is not a run folder, or is of a newer Fluid; the message names it.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InvalidFieldError(argument, folder, "must be the path of a run folder")
    path = Path(folder).expanduser()
    if not path.is_dir():
        reason = "is a file; give the folder of a run" if path.exists() else "does not exist"
        raise InvalidFieldError(argument, str(folder), reason)
    shared = path if is_shared(path) and not (path / RESULTS).is_file() else None
    if shared is not None:
        path = fullest(shared) or shared
    if not (path / RESULTS).is_file():
        raise InvalidFieldError(argument, str(folder), "is not the folder of a run: it has no results.jsonl")
    run = StoredRun(path, argument, shared)
    newer = why_unreadable(run.session)
    if newer is not None:
        raise InvalidFieldError(argument, str(folder), newer)
    return run


class StoredRun:
    """What is in a run folder. Each file is read when it is first asked for, and read on after :meth:`refresh`.

    Args:
        path: the run folder.
        argument: how the caller named it, for errors.
        shared: the folder in which several drivers work, of one of which this is the run folder; ``None`` for a run
            by itself.
    """

    def __init__(self, path: Path, argument: str = "run_dir", shared: Path | None = None) -> None:
        self.path = path
        #: What is read, for people and for what they write about it.
        self.folder = shared or path
        self._members = None if shared is None else MembersReader(shared)
        self._argument = argument
        self._journal_lines = JournalLines(path / JOURNAL)
        self._lines = {name: JsonLines(path / name) for name in (TRIALS, FORECASTS)}
        self._lines[RESULTS] = JsonLines(path / RESULTS, read=read_iteration)
        self._found: dict[str, list[Mapping[str, Any]]] = {TRIALS: [], FORECASTS: []}
        self._reported: list[StoredIteration] = []
        self._of_trial: dict[str, list[StoredIteration]] = {}
        #: Lines of results.jsonl that are no iteration, and iterations whose gaps are known.
        self._unusable = self._followed = 0
        self._gaps = IterationGaps()
        #: Where the files ended as session.json was written, and their JSON objects so far, by name.
        self._ends: dict[str, int] = {}
        self._objects = Counter[str]()
        #: One sentence for each thing that could not be read, by file.
        self._notes: dict[str, list[str]] = {}

    def refresh(self) -> None:
        """Has what is asked for from now on read on from where the reading before ended.

        What is asked for then raises :class:`fluid.results.run_files.ReplacedError` where a file is no longer the one
        that was read.
        """
        for name, member in vars(StoredRun).items():
            if isinstance(member, cached_property):
                vars(self).pop(name, None)
        self._notes.clear()

    @property
    def notes(self) -> list[str]:
        """One sentence for each thing that could not be read so far."""
        return [note for name in _FILES for note in self._notes.get(name, ())]

    @cached_property
    def session(self) -> dict[str, Any]:
        """The content of ``session.json``; empty if it is missing or damaged."""
        try:
            data = (self.path / SESSION).read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unreadable(SESSION, error) from error
        content = facts_in(data)
        if content is None:
            what = "not JSON" if parsed(data) is BROKEN else "damaged"
            self._note(SESSION, f"session.json is {what} and was ignored.")
            return {}
        self._ends = ends_in(content)
        content.pop(ENDS, None)
        facts: dict[str, Any] = without_surrogates(content)
        return facts

    @cached_property
    def journal(self) -> Recovered:
        """The groups and trials in the journal; empty if it is missing or damaged."""
        _ = self.session
        try:
            recovered = self._journal_lines.read()
            self._note_end(JOURNAL, self._journal_lines.lines.checks)
            return recovered
        except FileNotFoundError:
            self._note(JOURNAL, "journal.jsonl is missing: budgets and final states of trials are unknown.")
        except InvalidFieldError as error:
            # The error's value may be a whole line, so it is omitted.
            self._note(JOURNAL, f"The journal was ignored: {error.field} {error.reason}")
        except OSError as error:
            raise self._unreadable(JOURNAL, error) from error
        return Recovered()

    @property
    def entries(self) -> Sequence[Mapping[str, Any]]:
        """The entries of the journal, as they are, up to the first that cannot be used."""
        _ = self.journal
        return self._journal_lines.entries

    @cached_property
    def reported(self) -> Sequence[StoredIteration]:
        """The finished iterations, in the order written; each reading adds to the same list."""
        _ = self.journal  # First: what it tells of is in this file.
        for value in self._new_values(RESULTS):
            if isinstance(value, StoredIteration):
                self._reported.append(value)
                self._of_trial.setdefault(value.trial_id, []).append(value)
            else:
                self._unusable += 1
        if self._unusable:
            self._note(RESULTS, f"{line_count(self._unusable)} of results.jsonl could not be used.")
        return self._reported

    @property
    def ran(self) -> list[StoredIteration]:
        """Those that trials ran themselves: time and devices count once, with the trial that used them."""
        return [one for one in self.reported if not one.source]

    @property
    def of_trial(self) -> Mapping[str, Sequence[StoredIteration]]:
        """The same by submitted trial."""
        _ = self.reported
        return self._of_trial

    @cached_property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``trials.jsonl``: names of groups and configs of trials, in the order written."""
        _ = self.reported
        self._found[TRIALS] += self._new_values(TRIALS)
        return self._found[TRIALS]

    @cached_property
    def forecasts(self) -> Sequence[Mapping[str, Any]]:
        """The lines of ``forecasts.jsonl``, in the order written; none if the session forecast nothing."""
        if (self.path / FORECASTS).is_file():
            self._found[FORECASTS] += self._new_values(FORECASTS)
        return self._found[FORECASTS]

    @cached_property
    def profile(self) -> Profile | None:
        """The profile; ``None`` if it was not written or cannot be read."""
        try:
            return Profile.load(self.path / PROFILE)
        except FileNotFoundError:
            return None
        except (FluidError, OSError) as error:
            self._note(PROFILE, f"The profile was ignored: {error}")
            return None

    @property
    def newest_profile(self) -> Profile:
        """What the session measured: the profile, else the newest one in the journal, else nothing."""
        return self.profile or self.journal.profile or Profile()

    @cached_property
    def groups(self) -> tuple[SubmittedGroup, ...]:
        """The groups, with their trials."""
        return self._submitted.groups()

    @cached_property
    def is_running(self) -> bool:
        """Whether its session ran when this was first asked for."""
        return is_locked(self.path)

    @property
    def name(self) -> str:
        """The session's own name; else that of its only group; else that of the folder."""
        only = self.groups[0].name if len(self.groups) == 1 else self.path.resolve().name
        return str(self.session.get("name") or only)

    @property
    def date(self) -> str:
        """The day on which the session began; empty if unknown."""
        return str(self.session.get("began", ""))[:10]

    def losses(self) -> list[str]:
        """One sentence for each thing that is missing, or that has changed: what the files together tell."""
        for one in itertools.islice(self.reported, self._followed, None):
            self._gaps.take(one.trial_id, one.number)
        self._followed = len(self.reported)
        notes = [] if self._members is None else self._members.notes()
        journal = self.journal
        notes += [*self._gaps.notes(journal.reported, journal.skipped), *code_notes(self.lines)]
        if not self.is_running:  # Else files that are read later have more.
            notes += self._submitted.lost(has_journal=not self._notes.get(JOURNAL))
        return notes

    @cached_property
    def _submitted(self) -> SubmittedTrials:
        lines, group_of = self.lines, {name: found[0].group_id for name, found in self._of_trial.items()}
        return SubmittedTrials(lines, self.journal, group_of)

    def _new_values(self, name: str) -> list[Any]:
        """The new lines of a file that hold JSON objects, with notes about others."""
        lines, found = self._lines[name], []
        try:
            for line in lines.new():
                if isinstance(line.value, (dict, StoredIteration)):
                    found.append(line.value)
                elif line.value is not BROKEN:
                    lines.checks.refuse()
        except FileNotFoundError:
            self._note(name, f"{name} is missing.")
        except OSError as error:
            raise self._unreadable(name, error) from error
        checks = lines.checks
        self._objects[name] += len(found)
        if checks.damage and not self._objects[name]:
            self._note(name, f"{name} is damaged: none of its {line_count(lines.count)} could be read.")
        elif checks.damage:
            damaged = f"{line_count(checks.damage)} of {name} could not be read, the first at line {checks.first}."
            self._note(name, damaged)
        self._note_end(name, checks)
        return found

    def _note(self, name: str, text: str) -> None:
        self._notes.setdefault(name, []).append(text)

    def _note_end(self, name: str, checks: LineChecks) -> None:
        """Adds a note if a file is shorter than ``session.json`` says."""
        if not checks.reaches(self._ends.get(name, 0)):
            self._note(name, f"{name} ends too early: its last lines are missing.")

    def _unreadable(self, name: str, error: OSError) -> InvalidFieldError:
        return InvalidFieldError(self._argument, str(self.path / name), f"cannot be read: {error.strerror}")


class JournalLines:
    """The journal, replayed as far as it was read.

    Args:
        path: the file.
        read: makes an entry of its JSON text.
        keep: whether the entries are kept.

    Attributes:
        lines: the file's.
        entries: those up to the first that cannot be used.
    """

    def __init__(self, path: Path, read: Callable[[bytes], Any] = parsed, *, keep: bool = True) -> None:
        self.lines = JsonLines(path, read=read)
        self.entries: list[Mapping[str, Any]] = []
        self._keep = keep
        self._replay = Replay()
        self._error: InvalidFieldError | None = None

    def read(self) -> Recovered:
        """Takes the new lines.

        Raises:
            InvalidFieldError: one of them, or of those before, cannot be used: what follows from it cannot be known.
            OSError: the file cannot be read.
        """
        for line in self.lines.new():
            try:
                if self._error is None:
                    self._take(line.value, line.number)
            except InvalidFieldError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._replay.result

    def _take(self, value: Any, number: int) -> None:
        checks = self.lines.checks
        if checks.is_checked and checks.first is not None and number >= checks.first:
            raise InvalidFieldError("journal", None, f"is damaged at line {checks.first}")
        self._replay.take(value, number)
        if self._keep and value is not BROKEN:
            self.entries.append(value)
