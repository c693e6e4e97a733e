"""The folder of one session, as the session writes it: journal, results, and what is needed to resume it.

session.json      what the session is: version, planner, devices, when it began
session.lock      locked while the session runs; who holds it
journal.jsonl     one line per event and decision, as fluid.results.journal encodes it, in order
results.jsonl     one line per finished iteration: group, trial, iteration, metrics, seconds, width, devices, at
forecasts.jsonl   when groups were forecast to end, every now and then
loggers.jsonl     how far each logger has come, if there are loggers
trials.jsonl      one line per group: group, name, search, and owner, priority, preempt and requires where they are
                  given; one per trial: group, trial, config (as JSON where possible), seeds, and the name by which
                  reports show it; one per trial whose shown config was told later; one per group and session in
                  which the code of its trainable had changed
payloads.pkl      trainables and configs, pickled, for resuming
profile.json      measured overheads and paces, written at the end
logs/             what lanes printed outside of trials
trials/           what trials printed, and their checkpoints

Each line has a checksum, its key "crc", which also tells where in the file it belongs; session.json and profile.json
end with one, and each frame of payloads.pkl begins with one (:mod:`fluid.checksums`). What is damaged is not used, and
that is told, or the folder is refused. By "bytes" in session.json, where the other files ended when that was written, a
file that was cut since is noticed.

Configs may hold secrets: all files are for their owner only.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fluid._clock import ClockReading, timestamp
from fluid._logs import logger_of
from fluid._private_files import FILE_MODE, FOLDER_MODE, make_folder
from fluid._version import __version__
from fluid.checksums import checked_lines, checked_object, checked_parts
from fluid.engine.commands import Command, Report
from fluid.engine.events import Event
from fluid.errors import InvalidFieldError
from fluid.joint.folders import beside, is_shared
from fluid.measure.profile import Profile
from fluid.results.checkpoints import checked_frames
from fluid.results.iterations import CLOCK_RESET_S
from fluid.results.journal import encode, encode_apart
from fluid.results.run_files import (
    ENDS,
    FORECASTS,
    FORMAT,
    JOURNAL,
    PAYLOADS,
    PROFILE,
    RESULTS,
    SESSION,
    TRIALS,
    clock_facts,
    is_used,
    read_facts,
    runs_home,
    time_in_files,
    why_unreadable,
)
from fluid.results.submitted import GroupLine
from fluid.session.folder.existing import SetAside, candidates, holds_a_session
from fluid.session.folder.files import AppendedFile, FolderWatch
from fluid.session.folder.lock import FolderLock, InUseError
from fluid.trainables.json_form import json_form
from fluid.trainables.payload import TrialPayload
from fluid.trainables.usage import NO_USAGE
from fluid.trialgroup import Trial
from fluid.wire import plain

_log = logger_of(__name__)
#: Fields of entries that are times on the session's clock.
_TIMES = ("at", "begun_at", "deadline")
#: A clock that is behind by more seconds than this is told of.
_BEHIND_S = 5.0
#: Trials that are written together.
_BATCH = 256

T = TypeVar("T")

#: Is told what happened, what the engine decided, and whether another driver has run it.
Follower = Callable[[Sequence[Event], Sequence[Command], bool], None]


class RunFolder:
    """Writes a session's files, and keeps other sessions off the folder until it is closed.

    What one call of the engine brings is written before its commands are executed, results first: an iteration that is
    in the journal is in the results too.

    Args:
        path: the folder; it exists.
        lock: the lock on it; released when the folder is closed.

    Attributes:
        path: the folder.
        session_id: an id that no other session has; kept when the session is resumed.
        shift: seconds from the session's clock to the time axis of its files; see :mod:`fluid.results.run_files`.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock
        facts = read_facts(path)
        self._began = str(facts.get("began", timestamp()))
        self._clock_before = facts.get("clock")
        self._last_at: float | None = None
        self.session_id = str(facts.get("id") or secrets.token_hex(8))
        make_folder(path / "logs")
        self._journal = AppendedFile(path / JOURNAL)
        self._results = AppendedFile(path / RESULTS)
        self._trials = AppendedFile(path / TRIALS)
        self._payloads = AppendedFile(path / PAYLOADS)
        self._forecasts: AppendedFile | None = None
        self._watch = FolderWatch(path, self._files)
        #: Trainables written so far, by their digests: each is written once, before the first trial that has it.
        self._trainables: dict[bytes, int] = {}
        #: Groups whose line was written.
        self._groups: set[str] = set()
        self._followers: list[Follower] = []
        #: The run that was here before, until this session has trials.
        self._replaced: SetAside | None = None
        self.shift = 0.0

    @classmethod
    def create(cls, path: str | Path | None, if_exists: str = "error", *, name: str = "") -> RunFolder:
        """Makes the folder of a new session; ``None`` for a new one in ``$FLUID_RUNS`` or ``~/fluid_runs``.

        Args:
            path: the folder.
            if_exists: what to do where it holds a session: ``"overwrite"`` for a new folder in its place, once the new
                session has trials; ``"new"`` for one beside it; else it is refused.
            name: of what is to run there, for the name of the folder that ``None`` asks for; empty if unknown.

        Raises:
            InvalidFieldError: a session has written there, or the folder cannot be made or written to.
        """
        if path is None:
            path = runs_home() / _new_name(name)
        folder = folder_of(path)
        if if_exists == "new":
            for candidate in candidates(folder):
                with suppress(InUseError):  # Another program has just taken it.
                    return cls._made(candidate)
        if is_shared(folder):
            raise InvalidFieldError("run_dir", str(path), "is shared by several drivers: join=True takes part")
        if if_exists != "overwrite" or not is_used(folder):
            return cls._made(folder)
        try:
            replaced = SetAside(folder)
        except OSError as error:
            raise InvalidFieldError("run_dir", str(path), f"cannot be replaced: {error.strerror}") from error
        try:
            made = cls._made(folder)
        except BaseException:
            replaced.put_back()
            raise
        made._replaced = replaced
        return made

    @classmethod
    def _made(cls, folder: Path) -> RunFolder:
        try:
            make_folder(folder)
            if not any(folder.iterdir()) and folder.stat().st_uid == os.geteuid():
                folder.chmod(FOLDER_MODE)
            return cls._locked(folder, new=True)
        except FileExistsError:
            raise InvalidFieldError("run_dir", str(folder), "is a file; give a folder") from None
        except OSError as error:
            raise InvalidFieldError("run_dir", str(folder), f"cannot be used: {error.strerror}") from error

    @classmethod
    def reopen(cls, path: str | Path) -> RunFolder:
        """Opens the folder of a session that has ended, to resume it.

        Raises:
            InvalidFieldError: it is not the folder of a session, another session runs there, it is of a newer Fluid,
                or it cannot be written to.
        """
        folder = folder_of(path)
        if is_shared(folder) or len(beside(folder)) > 1:
            raise InvalidFieldError("run_dir", str(path), "is shared by several drivers: join=True goes on there")
        if not (folder / JOURNAL).is_file():
            raise InvalidFieldError("run_dir", str(path), f"is not the folder of a session: it has no {JOURNAL}")
        newer = why_unreadable(read_facts(folder))
        if newer is not None:
            raise InvalidFieldError("run_dir", str(path), newer)
        try:
            return cls._locked(folder, new=False)
        except OSError as error:
            raise InvalidFieldError("run_dir", str(path), f"cannot be used: {error.strerror}") from error

    @classmethod
    def _locked(cls, folder: Path, *, new: bool) -> RunFolder:
        lock = FolderLock(folder)
        try:
            if new and is_used(folder):
                raise InUseError("run_dir", str(folder), holds_a_session())
            return cls(folder, lock)
        except BaseException:
            lock.release()
            raise

    def go_on_after(self, last_at: float) -> None:
        """Says when an earlier session wrote its last entry, in seconds on the time axis of the files."""
        self._last_at = last_at

    def begin(self, now: ClockReading) -> dict[str, Any]:
        """Begins to write times; returns what ``session.json`` is to say of the clock.

        Args:
            now: the session's clock as it begins.
        """
        if self._last_at is not None:
            known, last = time_in_files(self._clock_before, now), self._last_at
            if known is None:  # An older Fluid wrote there: a step back is a reboot.
                known = now.at if now.at >= last - CLOCK_RESET_S else last
            elif known < last:
                known, behind = last, last - known
                if now.name and behind > _BEHIND_S:
                    text = "the clock is %.0f s behind the end of the session before: no time counts between the two"
                    _log.warning(text, behind)
            self.shift = known - now.at
        return clock_facts(now, self.shift)

    def look(self) -> None:
        """Looks whether the folder and its files are what and where they were.

        Raises:
            FluidError: they are not; the error says what is lost, and what can be done.
        """
        self._watch.look()

    def write_session(self, **facts: Any) -> None:
        """Writes what the session is, in place of what was written before."""
        own = {"format": FORMAT, "fluid": __version__, "id": self.session_id, "began": self._began, "pid": os.getpid()}
        place = self._watch.place
        if place is None:
            return
        ends = {name: file.size if name == PAYLOADS else file.next_offset for name, file in self._files.items()}
        content = {**own, **facts, ENDS: ends}
        draft = place / f".{SESSION}.tmp"
        draft.unlink(missing_ok=True)
        with AppendedFile(draft) as file:
            file.append(checked_object(json.dumps(content, indent=1, default=repr)))
            os.fsync(file.fileno())  # Else a power cut may leave the new name with nothing in it.
        os.replace(draft, place / SESSION)

    def write_trials(
        self,
        group_id: str,
        group: GroupLine,
        trials: Mapping[Trial, TrialPayload],
        contents: Mapping[str, tuple[str, int, str]] = MappingProxyType({}),
    ) -> None:
        """Writes submitted trials, and the line of their group before the first of them.

        Args:
            group_id: the group's id.
            group: what its line says.
            trials: the trials, each with its pickles.
            contents: what trials compute, by id (:class:`fluid.session.reuse.Content`), for later runs.
        """
        self.write_payloads(group_id, group.name, trials)
        self.write_trial_lines(group_id, group, trials, contents)

    def write_payloads(self, group_id: str, name: str, trials: Mapping[Trial, TrialPayload]) -> None:
        """Writes what trials of a group are resumed from; of one that was written before, this counts from now on."""
        known = len(self._trainables)
        try:
            self._payloads.append_parts(self._framed(group_id, name, trials))
        except BaseException:
            for digest in list(self._trainables)[known:]:  # They were cut off again.
                del self._trainables[digest]
            raise

    def write_trial_lines(
        self,
        group_id: str,
        group: GroupLine,
        trials: Mapping[Trial, TrialPayload],
        contents: Mapping[str, tuple[str, int, str]] = MappingProxyType({}),
    ) -> None:
        """Writes what reports show of trials, and the line of their group before the first of them."""
        if group_id not in self._groups:
            self._groups.add(group_id)
            _append_lines(self._trials, [_line(group.entry(group_id))])
        for batch in _batches(trials.items()):
            entries = [{"group": group_id, "trial": trial.id, **_facts(trial, payload)} for trial, payload in batch]
            for entry in entries if contents else ():
                entry |= {"content": list(found)} if (found := contents.get(entry["trial"])) is not None else {}
            _append_lines(self._trials, map(_line, entries))

    def write_code_change(self, entry: Mapping[str, Any]) -> None:
        """Writes which trials of a group go on with other code, for reports."""
        _append_lines(self._trials, [_line(dict(entry))])

    def write_shown_config(self, trial_id: str, config: Any) -> None:
        """Writes the hyperparameters that reports show of a trial from now on, in their JSON form."""
        _append_lines(self._trials, [_line({"shown": trial_id, "config": config})])

    def has_lines_of(self, group_ids: Iterable[str]) -> None:
        """Says that an earlier session wrote the lines of these groups."""
        self._groups.update(group_ids)

    def follow(self, follower: Follower) -> None:
        """Calls ``follower`` from now on, in the session's thread, after what happened was written."""
        self._followers.append(follower)

    def journal(self, events: Sequence[Event], commands: Sequence[Command], *, others: bool = False) -> None:
        """Writes what happened and what the engine decided; ``others`` is whether another driver has run it."""
        reports = [command for command in commands if isinstance(command, Report)]
        if reports:
            _append_lines(self._results, (line for report in reports for line in _result_lines(report, self.shift)))
        entries: list[dict[str, Any]] = []
        for item in (*events, *commands):
            if (apart := encode_apart(item)) is not None:
                self._append_entries(entries)
                entries = []
                parts = _parts(self._timed(apart[0]), apart[1])
                self._journal.append_parts(checked_parts(parts, self._journal.next_offset))
            elif (entry := encode(item)) is not None:
                entries.append(self._timed(entry))
        self._append_entries(entries)
        for follower in self._followers:
            follower(events, commands, others)

    def _append_entries(self, entries: list[dict[str, Any]]) -> None:
        if entries:
            _append_lines(self._journal, map(_line, entries))

    def write_forecasts(self, entries: Iterable[dict[str, Any]]) -> None:
        """Appends forecasts of groups."""
        lines = [_line(self._timed(entry)) for entry in entries]
        if lines:
            self._forecasts = self._forecasts or AppendedFile(self.path / FORECASTS)
            _append_lines(self._forecasts, lines)

    def _timed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """An entry with its times on the axis of the files."""
        if self.shift:
            for name in _TIMES:
                if isinstance(entry.get(name), float):
                    entry[name] += self.shift
        return entry

    def write_profile(self, profile: Profile) -> None:
        """Writes what was measured."""
        place = self._watch.place
        if place is not None:
            profile.save(place / PROFILE)
            (place / PROFILE).chmod(FILE_MODE)

    def delete_replaced(self) -> None:
        """Deletes the run that was here before, as this session has trials now; for the thread that submitted them."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.delete()

    def close(self) -> None:
        """Closes the files, and gives the folder free; of a session without trials, to the run that was here before."""
        self._watch.close()
        for file in self._files.values():
            file.close()
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            replaced.put_back(is_held=True)
        self._lock.release()

    @property
    def _files(self) -> dict[str, AppendedFile]:
        """The files that are appended to, by name."""
        files = {JOURNAL: self._journal, RESULTS: self._results, TRIALS: self._trials, PAYLOADS: self._payloads}
        return files if self._forecasts is None else {**files, FORECASTS: self._forecasts}

    def _framed(self, group_id: str, name: str, trials: Mapping[Trial, TrialPayload]) -> Iterator[bytes]:
        """The frames of trials behind their heads, some at a time: pickles of all would be a multiple of the trials."""
        offset, left = self._payloads.size, len(trials)
        for batch in _batches(trials.items()):
            frames = [*self._new_trainables(batch), self._frame(group_id, name, batch)]
            left -= len(batch)
            if not left:
                frames[-1]["complete"] = True
            part = checked_frames(map(pickle.dumps, frames), offset)
            offset += len(part)
            yield part

    def _new_trainables(self, batch: Iterable[tuple[Trial, TrialPayload]]) -> Iterator[dict[str, Any]]:
        """The frames of the trainables that ``payloads.pkl`` does not have."""
        for trainable in (payload.trainable for _, payload in batch):
            if trainable.digest not in self._trainables:
                self._trainables[trainable.digest] = len(self._trainables)
                code = None if trainable.code is None else trainable.code.entry()
                yield {"trainable": self._trainables[trainable.digest], "pickled": trainable.pickled, "code": code}

    def _frame(self, group_id: str, name: str, batch: Iterable[tuple[Trial, TrialPayload]]) -> dict[str, Any]:
        """The frame of trials: what they all have once, and of each what it has by itself."""
        fields = [_stored_fields(trial) for trial, _ in batch]
        shared = _shared(fields)
        trials = [
            (
                self._trainables[payload.trainable.digest],
                payload.config,
                {name: value for name, value in own.items() if name not in shared},
                _seeds(payload),
            )
            for own, (_, payload) in zip(fields, batch, strict=True)
        ]
        return {"group": group_id, "name": name, "fields": shared, "trials": trials}


#: Most characters of a sweep's name in the name of its folder.
_LONGEST_PART = 48


def _new_name(name: str) -> str:
    """The name of a new folder, ``2026-11-26-122212-train-asha-9e5257``: in order of time, with any shell and disk."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    part = re.sub(r"[^A-Za-z0-9._]+", "-", plain)[:_LONGEST_PART].strip("-.")
    began = timestamp().replace(":", "").replace(" ", "-")
    return "-".join([began, *([part] if part else []), secrets.token_hex(3)])


def folder_of(path: str | Path) -> Path:
    """A run folder's absolute path.

    Raises:
        InvalidFieldError: it is no path.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in os.fspath(path):
        raise InvalidFieldError("run_dir", path, "must be the path of a folder")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # The home of an unknown user.
        raise InvalidFieldError("run_dir", str(path), str(error)) from error


def _stored_fields(trial: Trial) -> dict[str, Any]:
    """The fields of a trial that ``payloads.pkl`` has beside its trainable and config."""
    return {
        "budget": trial.budget,
        "priority": trial.priority,
        "trial_id": trial.id,
        "profile_key": trial.key,
        "max_width": trial.max_width,
        "memory": trial.memory,
        "retry_errors": trial.retry_errors,
        "follow_up_iterations": trial.follow_up_iterations,
        "iteration_timeout_s": trial.iteration_timeout_s,
        "requires": trial.requires,
        "devices": trial.devices,
        "threads": trial.threads,
        "isolation": trial.isolation,
        "chdir": trial.chdir,
        "start_from": trial.start_from,
        "prefix": trial.prefix,
        "is_shared_run": trial.is_shared_run,
    }


def _shared(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of the entries have in common, but for the ids."""
    first, *others = entries
    return {
        name: value
        for name, value in first.items()
        if name != "trial_id" and all(type(one[name]) is type(value) and one[name] == value for one in others)
    }


def _facts(trial: Trial, payload: TrialPayload) -> dict[str, Any]:
    """What reports show of a trial."""
    facts = {"config": payload.shown_config, "key": trial.key, "seeds": _seeds(payload)}
    if trial.start_from is not None:
        facts["start"] = {name: value for name, value in trial.start_from._asdict().items() if value}
    if trial.is_shared_run:
        facts["is_shared_run"] = True
    if trial.shown is None:
        return facts
    shown = {"shown": trial.shown.trial_id, "iterations": trial.shown.iterations, "metrics": trial.shown.metrics}
    return {**facts, **shown}


def _seeds(payload: TrialPayload) -> dict[str, int] | None:
    seeds = payload.process.seeds
    return None if seeds is None else seeds._asdict()


def _result_lines(report: Report, shift: float) -> list[str]:
    """The lines of ``results.jsonl`` for an iteration or a run of them. The lane has made the JSON of the metrics.

    Args:
        report: the iterations.
        shift: seconds from the session's clock to the time axis of the file.
    """
    whose = f'{{"group": {json.dumps(report.group_id)}, "trial": {json.dumps(report.trial_id)}, "iteration": '
    where = f', "width": {report.width!r}, "devices": {list(report.device_ids)}, "at": '
    end = f', "rows": {report.rows}' if report.rows > 1 else ""
    end += f', "source": {json.dumps(report.source)}' if report.source else ""
    end += "}" if report.usage is NO_USAGE else f', "usage": {json.dumps(plain(report.usage))}}}'
    return [
        f'{whose}{iteration}, "metrics": {metrics.text}, "seconds": {seconds!r}{where}{at + shift!r}{end}'
        for iteration, at, seconds, metrics in report.iterations
    ]


def _append_lines(file: AppendedFile, lines: Iterable[str]) -> None:
    """Writes lines, each of them a JSON object, with their checksums."""
    file.append(checked_lines(lines, file.next_offset))


def _parts(entry: dict[str, Any], batches: Iterable[list[dict[str, Any]]]) -> Iterator[str]:
    """The JSON of an entry, part by part, with the ``trials`` that batches give."""
    begin = f'{_line(entry)[:-1]}, "trials": ['
    for batch in batches:
        yield begin + _line(batch)[1:-1]
        begin = ", "
    yield "]"
    yield "}"


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Items, so many at a time that what is made of them takes little memory."""
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _line(entry: dict[str, Any] | list[dict[str, Any]]) -> str:
    """An entry, or several, as JSON; what JSON cannot hold is written as its text."""
    try:
        return json.dumps(entry)
    except Exception:
        return json.dumps(json_form(entry))
