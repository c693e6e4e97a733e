"""Calls the loggers of a session, in a thread of their own.

The engine's thread only notes starts and ends, and how many results the run folder has by then. The loggers' thread
reads the results from the run folder, so that a slow logger costs neither the engine time nor the driver memory, and a
logger that missed some gets them when the session is resumed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluid._clock import Clock, MonotonicClock
from fluid._logs import brief_traceback, logger_of
from fluid.engine.commands import Command, Report, ReportEnd, ReportStart
from fluid.engine.events import Event, Failure, StopRequested, TrialForgotten
from fluid.errors import FluidError
from fluid.loggers.logger import LoggedSession, TrialLogger
from fluid.loggers.run_reader import SessionReader
from fluid.loggers.sink import LoggerProgress, LoggerProgressFile, Sink, read_progress
from fluid.results.run_files import RESULTS
from fluid.results.submitted import shown_state
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.resume import LeftSession
from fluid.session.listeners import TrialListener
from fluid.session.output import Output
from fluid.session.status import Status
from fluid.trialgroup import TrialState
from fluid.waiting.waits import AwaitedThread

if TYPE_CHECKING:
    from fluid.loggers.prometheus import MetricsServer

_log = logger_of("fluid.loggers")
#: Seconds in which events gather before loggers are called; between two notes of how far loggers have come; after which
#: a logger that has not stored all is asked again.
_GATHER_S, _NOTE_S, _AGAIN_S = 0.2, 1.0, 1.0
#: Results after which loggers are flushed.
_MOST_AT_ONCE = 1000
#: Seconds after which a closing executor says what it waits for; of silence after which it gives a logger up.
_SAY_S, _GIVE_UP_S = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class PastEnd:
    """A trial that ended in an earlier session.

    Attributes:
        trial_id: the submitted trial.
        state: as it is shown.
        failure: why it failed; ``None`` if it did not.
    """

    trial_id: str
    state: str
    failure: Failure | None


#: What the loggers' thread is told besides results.
_Told = ReportStart | ReportEnd | StopRequested | TrialForgotten | PastEnd


class LoggerHub:
    """Follows a session, and calls its loggers until it is closed.

    Args:
        loggers: in the order in which they are called.
        folder: the session's run folder.

    Raises:
        InvalidFieldError: one refuses the session.
        FluidError: as a logger raises it.
    """

    def __init__(self, loggers: Sequence[TrialListener], folder: RunFolder, clock: Clock | None = None) -> None:
        self._sinks = _make_sinks(loggers, folder)
        self._clock = clock or MonotonicClock()
        self._reader = SessionReader(folder.path, folder.session_id)
        self._file = LoggerProgressFile(folder.path)
        #: Lines of results.jsonl; written by the engine's thread only.
        self._written = _lines_of(folder)
        #: What was told, each with the lines of results.jsonl that come before it.
        self._told: deque[tuple[int, _Told]] = deque()
        #: Lines of it that another driver's loggers get: the number before the first, and the last.
        self._left_out: deque[tuple[int, int]] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        #: How submitted trials ended, and what their submitter said of it, by id; as what they were shown last.
        self._ended: dict[str, ReportEnd] = {}
        self._outcomes: dict[str, TrialState] = {}
        self._shown: dict[str, str] = {}
        self._noted_at = self._clock.now()
        self._thread = AwaitedThread("fluid-loggers", self._run)
        self._thread.start()
        folder.follow(self._follow)

    # -- from the engine's thread --------------------------------------------------------------------------

    def _follow(self, events: Sequence[Event], commands: Sequence[Command], others: bool) -> None:
        """Notes what the session has just written; of what ``others`` have run, that it is there."""
        written = self._written
        if others:
            lines = sum(command.count for command in commands if type(command) is Report)
            if lines:
                self._left_out.append((written, written + lines))
            self._written = written + lines
            return
        for event in events:  # First: it says what the end that follows from it is to be called.
            if type(event) is StopRequested or type(event) is TrialForgotten:
                self._told.append((written, event))
        for command in commands:
            if type(command) is Report:
                written += command.count
            elif type(command) is ReportEnd or type(command) is ReportStart:
                self._told.append((written, command))
        self._written = written
        if not self._wake.is_set():
            self._wake.set()

    # -- from any thread -----------------------------------------------------------------------------------

    def recall(self, ends: Iterable[PastEnd]) -> None:
        """Tells of trials that ended in earlier sessions those loggers that were not told then."""
        written = self._written
        self._told.extend((written, end) for end in ends)
        self._wake.set()

    @property
    def backlog(self) -> int:
        """Results that loggers were not told yet."""
        return max(0, self._written - self._reader.line)

    def close(self) -> None:
        """Waits until the loggers were told everything, unless they fall silent; says what it waits for."""
        self._closing.set()
        self._wake.set()
        calls, silent = -1, 0.0
        self._thread.join(_SAY_S)
        while self._thread.is_alive():
            before, calls = calls, sum(sink.calls for sink in self._sinks)
            silent = silent + _SAY_S if calls == before else 0.0
            if silent >= _GIVE_UP_S:
                text = "gave up waiting for %s: %d results were not logged; fluid export can log them"
                _log.warning(text, self._names, self.backlog)
                return
            if not silent:
                _log.warning("waiting for %s: %d results to log", self._names, self.backlog)
            self._thread.join(_SAY_S)

    @property
    def _names(self) -> str:
        return ", ".join(sink.key for sink in self._sinks if sink.is_called) or "the loggers"

    # -- in the loggers' thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            all_stored = True
            while any(sink.is_alive for sink in self._sinks):
                is_last = self._closing.is_set()  # All that was told until now is told to the loggers below.
                if not is_last:
                    self._wake.wait(None if all_stored else _AGAIN_S)
                    self._closing.wait(_GATHER_S)
                self._wake.clear()
                self._deliver()
                all_stored = self._flush()
                if is_last:
                    break
        except Exception as error:
            _log.error("nothing more of this session is logged\n%s", brief_traceback(error))
        for sink in self._sinks:
            sink.close(FluidError("the executor was closed"))  # It stores all.
            sink.flush(self._reader.line)
        self._note()

    def _deliver(self) -> None:
        """Tells the loggers what is new, each event after the results that came before it."""
        written = self._written  # Read first: what comes before this line was told.
        told = deque[tuple[int, _Told]]()
        while self._told and self._told[0][0] <= written:
            told.append(self._told.popleft())
        for changed in self._reader.read_trials():
            for sink in self._sinks:
                sink.config(changed)
        wanted = min(sink.stored for sink in self._sinks)
        for line, trial, result in self._reader.results(written, after=wanted):
            while told and told[0][0] < line:
                self._tell(told.popleft()[1])
            while self._left_out and self._left_out[0][1] < line:
                self._left_out.popleft()
            is_others = bool(self._left_out) and self._left_out[0][0] < line
            if trial is not None and result is not None and not is_others:
                for sink in self._sinks:
                    sink.result(line, trial, result)
            if line % _MOST_AT_ONCE == 0:
                self._flush()
        for _, one in told:
            self._tell(one)

    def _tell(self, told: _Told) -> None:
        trial_id = told.trial_id
        trial = self._reader.find(trial_id)
        if trial is None:
            return
        if isinstance(told, TrialForgotten):
            for known in (self._ended, self._outcomes):
                known.pop(trial_id, None)
            if trial_id == trial.trial_id:  # Any other may come back as another submitted trial.
                self._shown.pop(trial_id, None)
                for sink in self._sinks:
                    sink.forget(trial_id)
            self._reader.forget(trial_id)
        elif isinstance(told, PastEnd):
            self._shown[trial.trial_id] = told.state
            for sink in self._sinks:
                sink.past_end(trial, told.state, told.failure)
        elif isinstance(told, ReportStart):
            self._ended.pop(trial_id, None)
            self._shown.pop(trial.trial_id, None)
            for sink in self._sinks:
                sink.start(trial)
        elif isinstance(told, StopRequested):
            if told.outcome is not None:
                self._outcomes[trial_id] = told.outcome
                self._end(trial_id)
        else:
            self._ended[trial_id] = told
            self._end(trial_id)

    def _end(self, trial_id: str) -> None:
        """Tells how a trial has ended, if it has, and as far as that is new."""
        end, trial = self._ended.get(trial_id), self._reader.find(trial_id)
        if end is None or trial is None:
            return
        state = shown_state(end.state, self._outcomes.get(trial_id), self._reader.search_of(trial_id))
        if self._shown.get(trial.trial_id) != state:
            self._shown[trial.trial_id] = state
            for sink in self._sinks:
                sink.end(trial, state, end.failure)

    def _flush(self) -> bool:
        """Lets the loggers store what they were told; returns whether all have, and that is noted."""
        stored = [sink.flush(self._reader.line) for sink in self._sinks]
        if self._clock.now() >= self._noted_at + _NOTE_S:
            self._note()
        return all(stored) and not any(sink.has_news for sink in self._sinks)

    def _note(self) -> None:
        """Notes how far the loggers have come."""
        self._noted_at = self._clock.now()
        for sink in self._sinks:
            if sink.has_news:
                self._file.append(sink.key, sink.stored, sink.take_news())


def _make_sinks(loggers: Sequence[TrialListener], folder: RunFolder) -> list[Sink]:
    listed = list(loggers)
    session = LoggedSession(session_id=folder.session_id, run_dir=folder.path)
    for listener in listed:
        if isinstance(listener, TrialLogger):
            listener.on_session(session)
    stored, times = read_progress(folder.path), Counter[str]()
    sinks = []
    for listener in listed:
        key = listener.key if isinstance(listener, TrialLogger) else type(listener).__qualname__
        times[key] += 1
        key = key if times[key] == 1 else f"{key} {times[key]}"
        sinks.append(Sink(listener, key, stored.get(key, LoggerProgress())))
    return sinks


def _lines_of(folder: RunFolder) -> int:
    with (folder.path / RESULTS).open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


# -- attached ------------------------------------------------------------------------------------
#
# What watches the session of an executor from outside: its loggers, and the server of its metrics.


class Attached:
    """The loggers and the metrics of one executor.

    Args:
        output: which loggers, and where the metrics are served.
        folder: the session's run folder.
        status: gives its status.

    Attributes:
        metrics_address: where the metrics are served: ``127.0.0.1:9400``; ``None`` if they are not.

    Raises:
        InvalidFieldError: a logger or the port cannot be used.
    """

    def __init__(
        self,
        output: Output,
        folder: RunFolder,
        status: Callable[[], Status],
    ) -> None:
        self._server: MetricsServer | None = None
        self._hub: LoggerHub | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if output.metrics_port is not None:
                from fluid.loggers.prometheus import MetricsServer  # Imports the client of Prometheus.

                self._server = MetricsServer(output.metrics_port, status, self._backlog)
            if len(output.loggers):
                self._hub = LoggerHub(output.loggers, folder)
            undo.pop_all()
        self.metrics_address = None if self._server is None else self._server.address

    def recall(self, left: LeftSession) -> None:
        """Tells the loggers how trials of an earlier session ended, as far as they were not told then."""
        if self._hub is not None:
            self._hub.recall(_past_ends(left))

    def close(self) -> None:
        """Waits until the loggers have all. The session has ended."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()

    def _backlog(self) -> int:
        return 0 if self._hub is None else self._hub.backlog


def _past_ends(left: LeftSession) -> Iterator[PastEnd]:
    recovered = left.recovered
    for group_id, trials in recovered.groups.items():
        for trial_id, history in trials.items():
            if history.ended is not None:
                state = shown_state(history.ended, recovered.outcomes.get(trial_id), left.groups[group_id].line.search)
                yield PastEnd(trial_id, state, recovered.failures.get(trial_id))
