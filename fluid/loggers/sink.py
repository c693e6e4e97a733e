"""Calls one logger: only with what it has not stored yet, and no more once it has raised an error of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid._logs import brief, brief_traceback, logger_of, without_secrets
from fluid.checksums import checked_lines
from fluid.engine.events import Failure
from fluid.loggers.left_out import LeftOut
from fluid.loggers.logger import LoggedTrial, TrialLogger
from fluid.loggers.values import writable_failure
from fluid.results.damage import cut_torn_line, tell_damage
from fluid.results.records import Result
from fluid.results.run_files import JsonLines
from fluid.session.folder.files import AppendedFile
from fluid.session.listeners import TrialListener

# -- progress ------------------------------------------------------------------------------------
#
# What each logger has stored of a session, in a file of the run folder, so that a resumed session goes on there.


LOGGERS = "loggers.jsonl"


@dataclass(slots=True)
class LoggerProgress:
    """What one logger has stored.

    Attributes:
        results: the number of lines of ``results.jsonl``.
        ends: how the trials ended of whose end it was told, by their ids.
    """

    results: int = 0
    ends: dict[str, str] = field(default_factory=dict)


def read_progress(run_dir: Path) -> dict[str, LoggerProgress]:
    """What the loggers of earlier sessions have stored, by their keys. Cuts a torn last line off."""
    cut_torn_line(run_dir / LOGGERS)
    found: dict[str, LoggerProgress] = {}
    lines = JsonLines(run_dir / LOGGERS)
    for line in lines.there():
        entry = line.entry
        results, ends = entry.get("results"), entry.get("ends")
        if isinstance(results, int) and isinstance(ends, dict):
            # An older Fluid wrote destinations as they were.
            stored = found.setdefault(without_secrets(str(entry.get("logger"))), LoggerProgress())
            stored.results = results
            stored.ends.update(ends)
    tell_damage(run_dir / LOGGERS, lines.checks)
    return found


class LoggerProgressFile:
    """Appends to the file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOGGERS

    def append(self, key: str, results: int, ends: dict[str, str]) -> None:
        """Notes how far a logger has come, and the ends that it was told since the last call."""
        entry: dict[str, Any] = {"logger": key, "results": results, "ends": ends}
        with AppendedFile(self._path) as file:
            file.append(checked_lines([json.dumps(entry)], file.next_offset))


# -- sink ----------------------------------------------------------------------------------------


_log = logger_of("fluid.loggers")
#: The state of a trial that its search algorithm may extend: not its end.
PAUSED = "PAUSED"


#: Errors that are of the values that a logger was given; others are the logger's own.
_OF_VALUES = (ArithmeticError, TypeError, ValueError)


class TrialCalls:
    """Calls a logger about trials; what it cannot hold is left out, and told once.

    Args:
        key: names the logger in the log.
    """

    def __init__(self, key: str) -> None:
        self._left_out = LeftOut(key)
        #: Trials that it could not be told of.
        self._unknown: set[str] = set()

    def on_trial(self, logger: TrialLogger, trial: LoggedTrial) -> None:
        """Tells of a trial; as :meth:`call`. One that cannot be told of is left out altogether."""
        if not self.call(trial.trial_id, logger.on_trial, trial):
            self._unknown.add(trial.trial_id)

    def call(self, trial_id: str, method: Callable[..., Any], *facts: Any) -> bool:
        """Calls a method about a trial; returns whether it took what it was told.

        Raises:
            BaseException: an error of the logger's own.
        """
        if trial_id in self._unknown:
            return False
        try:
            method(*facts)
        except _OF_VALUES as error:
            if isinstance(error, OSError):  # A certificate's, for one.
                raise
            self._left_out.add(f"{method.__name__} of trial {trial_id!r}", error)
            return False
        return True

    def forget(self, trial_id: str) -> None:
        """The trial will not be heard of again."""
        self._unknown.discard(trial_id)

    def close(self) -> None:
        """The logger gets nothing more."""
        self._left_out.close()


class Sink:
    """One logger.

    Args:
        listener: the logger.
        key: what a resumed session recognizes it by.
        stored: what it has stored of earlier sessions.

    Attributes:
        is_alive: whether it is called any further.
        calls: number of calls that have returned.
        is_called: whether it is being called.
        stored: lines of ``results.jsonl`` that it has stored.
        noted: those of which the run folder has a note.
        begins_anew: see :class:`TrialLogger`.
        new_ends: how trials ended of whose end it was told since this was emptied, by their ids.
    """

    def __init__(self, listener: TrialListener, key: str, stored: LoggerProgress) -> None:
        self._listener = listener
        self._logger = listener if isinstance(listener, TrialLogger) else None
        self.key = key
        self.is_alive = True
        self.calls = 0
        self.is_called = False
        self.begins_anew = self._logger is not None and self._logger.begins_anew
        self.stored = self.noted = 0 if self.begins_anew else stored.results
        self._past_ends = {} if self.begins_anew else stored.ends
        self.new_ends: dict[str, str] = {}
        #: Trials that it was told of, by id; whether they have ended.
        self._has_ended: dict[str, bool] = {}
        self._calls = TrialCalls(key)

    def start(self, trial: LoggedTrial) -> None:
        """A trial starts, or goes on."""
        self._tell(trial)
        self._call_about(trial, self._listener.on_start, trial.trial_id)

    def result(self, line: int, trial: LoggedTrial, result: Result) -> None:
        """A trial has finished an iteration, which is on a line of ``results.jsonl``."""
        if line > self.stored:
            self._tell(trial)
            self._call_about(trial, self._listener.on_result, result)

    def end(self, trial: LoggedTrial, state: str, failure: Failure | None) -> None:
        """A trial has ended, or is paused."""
        self._tell(trial)
        self._has_ended[trial.trial_id] = state != PAUSED
        self.new_ends[trial.trial_id] = state
        self._call_about(trial, self._listener.on_end, trial.trial_id, state, writable_failure(failure))

    def past_end(self, trial: LoggedTrial, state: str, failure: Failure | None) -> None:
        """A trial has ended in an earlier session."""
        if self._past_ends.get(trial.trial_id) != state:
            self.end(trial, state, failure)

    def config(self, trial: LoggedTrial) -> None:
        """The config of a trial was told."""
        if self._logger is not None and trial.trial_id in self._has_ended:
            self._call(self._calls.on_trial, self._logger, trial)

    def forget(self, trial_id: str) -> None:
        """A trial will not be heard of again."""
        self._has_ended.pop(trial_id, None)
        self._calls.forget(trial_id)

    def flush(self, line: int) -> bool:
        """Lets it store what it was told, up to a line of ``results.jsonl``; returns whether all is stored."""
        is_stored = self._logger is None or bool(self._call(self._logger.flush))
        if self.is_alive and is_stored:
            self.stored = max(self.stored, line)
        return is_stored or not self.is_alive

    @property
    def has_news(self) -> bool:
        """Whether it has come further than is noted."""
        return not self.begins_anew and bool(self.new_ends or self.stored > self.noted)

    def take_news(self) -> dict[str, str]:
        """Returns the ends to note now, with :attr:`stored`."""
        self.noted, ends, self.new_ends = self.stored, self.new_ends, {}
        return ends

    def close(self, error: BaseException) -> None:
        """The executor was closed."""
        self._call(self._listener.on_broken, error)
        self._calls.close()

    def _tell(self, trial: LoggedTrial) -> None:
        if self._has_ended.get(trial.trial_id, True):
            self._has_ended[trial.trial_id] = False
            if self._logger is not None:
                self._call(self._calls.on_trial, self._logger, trial)

    def _call_about(self, trial: LoggedTrial, method: Callable[..., Any], *facts: Any) -> None:
        self._call(self._calls.call, trial.trial_id, method, *facts)

    def _call(self, method: Callable[..., Any], *facts: Any) -> Any:
        """Calls a method of the logger, unless one has raised."""
        if not self.is_alive:
            return None
        self.is_called = True
        try:
            answer = method(*facts)
        except BaseException as error:  # Also SystemExit: it must not end the other loggers.
            self.is_alive = False
            text = "logger %s raised %s; it gets nothing more of this session; the trials and other loggers go on\n%s"
            _log.warning(text, self.key, brief(error), brief_traceback(error))
            try:
                self._listener.on_broken(error)
            except BaseException as second:
                _log.debug("logger %s raised again as it was closed: %s", self.key, brief(second))
            return None
        finally:
            self.is_called = False
        self.calls += 1
        return answer
