"""Calls one logger: only with what it has not stored yet, and no more once it has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid._logs import logger_of
from fluid.engine.events import Failure
from fluid.loggers.logger import LoggedTrial, TrialLogger
from fluid.loggers.progress import LoggerProgress
from fluid.results.records import Result
from fluid.session.results import TrialListener

_log = logger_of("fluid.loggers")
#: The state of a trial that its search algorithm may extend: not its end.
PAUSED = "PAUSED"


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

    def start(self, trial: LoggedTrial) -> None:
        """A trial starts, or goes on."""
        self._tell(trial)
        self._call(self._listener.on_start, trial.trial_id)

    def result(self, line: int, trial: LoggedTrial, result: Result) -> None:
        """A trial has finished an iteration, which is on a line of ``results.jsonl``."""
        if line > self.stored:
            self._tell(trial)
            self._call(self._listener.on_result, result)

    def end(self, trial: LoggedTrial, state: str, failure: Failure | None) -> None:
        """A trial has ended, or is paused."""
        self._tell(trial)
        self._has_ended[trial.trial_id] = state != PAUSED
        self.new_ends[trial.trial_id] = state
        self._call(self._listener.on_end, trial.trial_id, state, failure)

    def past_end(self, trial: LoggedTrial, state: str, failure: Failure | None) -> None:
        """A trial has ended in an earlier session."""
        if self._past_ends.get(trial.trial_id) != state:
            self.end(trial, state, failure)

    def config(self, trial: LoggedTrial) -> None:
        """The config of a trial was told."""
        if self._logger is not None and trial.trial_id in self._has_ended:
            self._call(self._logger.on_trial, trial)

    def forget(self, trial_id: str) -> None:
        """A trial will not be heard of again."""
        self._has_ended.pop(trial_id, None)

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

    def _tell(self, trial: LoggedTrial) -> None:
        if self._has_ended.get(trial.trial_id, True):
            self._has_ended[trial.trial_id] = False
            if self._logger is not None:
                self._call(self._logger.on_trial, trial)

    def _call(self, method: Callable[..., Any], *facts: Any) -> Any:
        """Calls a method of the logger, unless one has raised."""
        if not self.is_alive:
            return None
        self.is_called = True
        try:
            answer = method(*facts)
        except BaseException as error:  # Also SystemExit: it must not end the other loggers.
            self.is_alive = False
            text = "logger %s raised %r; it gets nothing more of this session; the trials and other loggers go on"
            _log.warning(text, self.key, error, exc_info=error)
            try:
                self._listener.on_broken(error)
            except BaseException as second:
                _log.debug("logger %s raised again as it was closed: %r", self.key, second)
            return None
        finally:
            self.is_called = False
        self.calls += 1
        return answer
