"""Tune's own loggers (CSV, JSON, TensorBoard) in a process of their own.

In Tune they take most of the driver's time per result, and importing tensorboardX imports PyTorch before the first
trial may start. Here the driver only sends each record as it is at that moment. The files have the same content in the
same order. Tune's save of the experiment's state, and the end of the sweep, wait until all records are in the files.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback

from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.logs.log_records import (
    LogEnd,
    LogFlush,
    LoggedResult,
    LoggerFailed,
    LogLine,
    LogResult,
    LogStart,
    SentTrial,
    shown_params,
)
from fluid.integrations.ray_tune.logs.logger_process import framed, take_records
from fluid.integrations.ray_tune.private_api import Trial
from fluid.processes.frames import FrameBuffer
from fluid.trainables.exception_pickle import load_exception, with_lane_cause
from fluid.waiting.waits import await_descriptor

#: Set to ``driver``, Tune's loggers stay in the driver.
LOGGERS_VARIABLE = "FLUID_TUNE_LOGGERS"
PROGRAM = "fluid.integrations.ray_tune.logs.logger_process:serve"
_NO_DEFAULTS = "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"
#: Its name in ``ray.tune.constants``, which older releases lack.
_CALLBACKS_VARIABLE = "RAY_TUNE_CALLBACKS"
_CHUNK = 1 << 16
#: How often the process is replaced within one sweep.
_MOST_REPLACEMENTS = 3
#: Files of a trial that have one record per line.
_LINES = ("result.json", "progress.csv")

_log = logging.getLogger(__name__)

#: Connections by executor and thread, while a sweep runs there: several threads may share an executor.
_of_sweep: dict[tuple[int, int], LoggerConnection] = {}


class LoggersLostError(FluidError):
    """The process of Tune's loggers has ended, and no other can take its place."""

    def __init__(self) -> None:
        super().__init__("the process that writes Tune's logs has ended; see logs/forkserver.log in the run folder")


class LoggerConnection:
    """The driver's end of the connection to the loggers.

    If their process dies, another goes on with the same files; the records that were under way are lost, and a warning
    says how many those may be.

    Args:
        connection: to their process.
        names: of the loggers, in the order in which they are called.
        start: starts another process and returns the connection to it; ``None`` if there can be no other.
    """

    def __init__(
        self, connection: socket.socket, names: Sequence[str], start: Callable[[], socket.socket | None] | None = None
    ) -> None:
        self._connect(connection)
        self._start = start
        self._replacements = 0
        self._names = tuple(names)
        self._failure: LoggerFailed | None = None
        self._flushed = True
        #: Number of records sent since the files were known to have all.
        self._under_way = 0
        #: Trials that have started and not ended, with the loggers that know of them.
        self._started: dict[str, tuple[set[int], SentTrial]] = {}
        #: The config of each trial that the process knows; a result usually has the same object.
        self._configs: dict[str, Any] = {}
        #: Trials with a result; a logger looks for earlier logs at the first one.
        self._with_result: set[str] = set()
        self.send(self._names)

    def start(self, loggers: tuple[int, ...], trial: Trial) -> None:
        """Tells loggers of a trial's start."""
        self._configs[trial.trial_id] = trial.config
        logged = SentTrial(trial)
        known, _ = self._started.get(trial.trial_id, (set(), None))
        self.send(LogStart(loggers, logged))
        self._started[trial.trial_id] = known.union(loggers), logged
        self.raise_failure()

    def write(self, loggers: tuple[int, ...], trial: Trial, iteration: int, result: dict[str, Any]) -> None:
        """Has loggers write a result."""
        trial_id = trial.trial_id
        if trial_id not in self._with_result:
            self._with_result.add(trial_id)
            self.start((), trial)
        self.send(LogResult(loggers, trial_id, iteration, LoggedResult.of(result, self._configs[trial_id])))
        self.raise_failure()

    def end(self, loggers: tuple[int, ...], trial: Trial, failed: bool) -> None:
        """Tells loggers of a trial's end."""
        if trial.trial_id in self._configs:
            self.send(LogEnd(loggers, trial.trial_id, failed, shown_params(trial)))
            self._with_result.discard(trial.trial_id)
            known, logged = self._started.pop(trial.trial_id, (set(), None))
            if logged is not None and known.difference(loggers):
                self._started[trial.trial_id] = known.difference(loggers), logged
        self.raise_failure()

    def flush(self) -> None:
        """Waits until all records are in the files.

        Raises:
            LoggersLostError: the process has ended.
        """
        if self._flushed:
            return
        self.send(LogFlush())
        while not self._flushed:
            try:
                await_descriptor(self._socket.fileno())
                self._receive()
            except LoggersLostError:
                self._replace()
                self.send(LogFlush())

    def raise_failure(self) -> None:
        """Raises what a logger has raised, once."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        cause = FluidError(f"a logger of Tune raised:\n{failure.traceback}")
        raised = load_exception(failure.exception)
        raise cause if raised is None else with_lane_cause(raised, cause)

    def send(self, record: Any) -> None:
        """Sends a record; waits where the process is far behind.

        Raises:
            LoggersLostError: the process has ended, and no other can take its place.
        """
        data = framed(record)
        while True:
            try:
                self._send(data)
                return
            except LoggersLostError:
                self._replace()

    def _send(self, record: bytes) -> None:
        self._flushed = False
        self._under_way += 1
        data = memoryview(record)
        self._receive()
        while data:
            try:
                data = data[self._socket.send(data) :]
            except (BlockingIOError, InterruptedError):
                await_descriptor(self._socket.fileno(), writable=True)
                self._receive()
            except OSError as error:
                raise LoggersLostError from error

    def _connect(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._buffer = FrameBuffer()

    def _replace(self) -> None:
        """Starts another process, which goes on with the files."""
        self._socket.close()
        if self._start is None or self._replacements == _MOST_REPLACEMENTS:
            raise LoggersLostError
        self._replacements += 1
        _log.warning(
            "The process that writes the logs of Ray Tune has ended; another goes on with them. Of result.json, "
            "progress.csv and TensorBoard's files, up to %d records are lost.",
            self._under_way,
        )
        try:
            connection = self._start()
        except Exception as error:
            raise LoggersLostError from error
        if connection is None:
            raise LoggersLostError
        self._connect(connection)
        self._under_way = 0
        self._send(framed(self._names))
        for loggers, trial in self._started.values():
            _cut_torn_lines(trial.local_path)
            self._send(framed(LogStart(tuple(sorted(loggers)), trial)))

    def close(self) -> None:
        """Closes the connection; the process then ends."""
        self._socket.close()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            raise LoggersLostError
        self._buffer.add(data)
        try:
            records = list(take_records(self._buffer))
        except Exception as error:  # Another library has written to the connection.
            raise LoggersLostError from error
        for record in records:
            if isinstance(record, LogFlush):
                self._flushed, self._under_way = True, 0
            elif isinstance(record, LoggerFailed):
                self._failure = self._failure or record
            elif isinstance(record, LogLine):
                line = logging.makeLogRecord(record.attributes)
                logger = logging.getLogger(line.name)
                if logger.isEnabledFor(line.levelno):
                    logger.handle(line)


def _cut_torn_lines(folder: str) -> None:
    """Removes the last lines of a trial's files where they are not whole."""
    for name in _LINES:
        path = Path(folder, name)
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(path, whole)


class _ApartMixin:
    """The methods of a logger callback that send records to the process.

    The first of several callbacks that follow one another sends for all of them.
    """

    _connection: LoggerConnection | None = None
    #: Positions of the loggers for which this one sends.
    _loggers: tuple[int, ...] = ()

    def attach(self, connection: LoggerConnection, loggers: tuple[int, ...]) -> None:
        """Makes it send records; without loggers, another callback sends for it."""
        self._connection, self._loggers = connection, loggers

    def log_trial_start(self, trial: Trial) -> None:
        if self._connection is not None and self._loggers:
            self._connection.start(self._loggers, trial)

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        if self._connection is not None and self._loggers:
            self._connection.write(self._loggers, trial, iteration, result)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        if self._connection is not None and self._loggers:
            self._connection.end(self._loggers, trial, failed)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        if self._connection is not None:
            self._connection.flush()
            self._connection.raise_failure()

    def get_state(self) -> None:
        """Waits for the files: Tune is about to save the experiment's state, and to upload it with them."""
        if self._connection is not None:
            self._connection.flush()


class CSVLoggerApart(_ApartMixin, CSVLoggerCallback):  # type: ignore[misc]
    """``CSVLoggerCallback`` in the process of the loggers."""

    def __reduce__(self) -> Any:
        return CSVLoggerCallback, ()


class JsonLoggerApart(_ApartMixin, JsonLoggerCallback):  # type: ignore[misc]
    """``JsonLoggerCallback`` in the process of the loggers."""

    def __reduce__(self) -> Any:
        return JsonLoggerCallback, ()


class TBXLoggerApart(_ApartMixin, TBXLoggerCallback):  # type: ignore[misc]
    """``TBXLoggerCallback`` in the process of the loggers; the driver does not import tensorboardX."""

    def __init__(self) -> None:
        """Does nothing."""

    def __reduce__(self) -> Any:
        return TBXLoggerCallback, ()


_APART: dict[type, tuple[str, type]] = {
    CSVLoggerCallback: ("csv", CSVLoggerApart),
    JsonLoggerCallback: ("json", JsonLoggerApart),
    TBXLoggerCallback: ("tbx", TBXLoggerApart),
}


@contextmanager
def loggers_apart(executor: FluidExecutor, callbacks: Sequence[Any] | None) -> Iterator[Any]:
    """Runs Tune's own loggers in a process of their own while a sweep runs.

    Args:
        executor: runs the sweep.
        callbacks: those of the user.

    Yields:
        The callbacks to give to Tune: the user's, with Tune's own loggers replaced and those added that Tune would add;
        or those given, where the backend starts no such processes or a variable says which callbacks to use.
    """
    wanted = _with_loggers(callbacks)
    apart = [callback for callback in wanted if isinstance(callback, _ApartMixin)]
    if not apart or os.environ.get(_CALLBACKS_VARIABLE) or os.environ.get(LOGGERS_VARIABLE) == "driver":
        yield callbacks
        return
    connection = executor.session.start_program(PROGRAM)
    if connection is None:
        yield callbacks
        return
    names = {kind: name for name, kind in _APART.values()}
    process = LoggerConnection(
        connection,
        [names[type(callback)] for callback in apart],
        lambda: executor.session.start_program(PROGRAM),
    )
    sweep = (id(executor), threading.get_ident())
    _of_sweep[sweep] = process
    try:
        _attach(process, wanted)
        yield wanted
        process.flush()
    finally:
        del _of_sweep[sweep]
        process.close()


def flush_loggers(executor: FluidExecutor) -> None:
    """Waits until the files have all that the loggers of this thread's sweep on an executor were sent."""
    process = _of_sweep.get((id(executor), threading.get_ident()))
    if process is not None:
        process.flush()


def _with_loggers(callbacks: Sequence[Any] | None) -> list[Any]:
    """Replaces Tune's own loggers, and adds those that Tune would add."""
    wanted = [_APART[type(callback)][1]() if type(callback) in _APART else callback for callback in callbacks or ()]
    if os.environ.get(_NO_DEFAULTS, "0") != "1":
        for kind, (name, apart) in _APART.items():
            is_installed = name != "tbx" or importlib.util.find_spec("tensorboardX") is not None
            if is_installed and not any(isinstance(callback, kind) for callback in wanted):
                wanted.append(apart())
    return wanted


def _attach(process: LoggerConnection, callbacks: Sequence[Any]) -> None:
    """Makes the first of each row of loggers send for the whole row: callbacks between rows may change results."""
    position = 0
    row: list[Any] = []
    for callback in [*callbacks, None]:
        if isinstance(callback, _ApartMixin):
            row.append(callback)
            continue
        for index, logger in enumerate(row):
            logger.attach(process, () if index else tuple(range(position, position + len(row))))
        position += len(row)
        row = []


# -- logs ----------------------------------------------------------------------------------------
#
# Uploads the logs that Tune keeps of a trial before Tune replaces them by older copies.


#: Files that Tune replaces by their uploaded copies whenever a trial with a checkpoint starts.
_LOGS = ("result.json", "progress.csv")


def save_logs(trial: Trial) -> None:
    """Uploads a trial's logs where they are longer than the uploaded copies, so that Tune loses no lines.

    To be called before Tune replaces the logs. A local file system is written in place, so an upload in progress may
    have emptied some of the copies: this function waits for it. An object store keeps the old copies until the new
    ones are complete.
    """
    if trial.checkpoint is None:
        return
    files, folder = trial.storage.storage_filesystem, trial.storage.trial_fs_path
    if files.type_name == "local":
        try:
            trial.storage.syncer.wait()
        except Exception as error:  # Tune would notice this failure only at its next upload.
            _log.warning("Uploading the experiment's state to %s failed: %s", trial.storage.experiment_fs_path, error)
    for name in _LOGS:
        local, remote = Path(trial.local_path, name), Path(folder, name).as_posix()
        if not local.exists():
            continue
        uploaded = files.get_file_info(remote)
        if uploaded.type == pyarrow.fs.FileType.File and uploaded.size < local.stat().st_size:
            pyarrow.fs.copy_files(str(local), remote, destination_filesystem=files)
