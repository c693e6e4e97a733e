"""The process that writes the files of Tune's loggers: a fork of the fork server, which has loaded Tune.

It calls Tune's own logger callbacks, one record after another, as the driver would. Where several results of a trial
are waiting, TensorBoard's file is flushed to disk after the last of them only.
"""

from __future__ import annotations

import logging
import pickle
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray.air.constants import EXPR_PARAM_FILE, EXPR_PARAM_PICKLE_FILE
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback, TBXLoggerCallback

from fluid.integrations.ray_tune.logs.log_records import (
    LogEnd,
    LogFlush,
    LoggerFailed,
    LogLine,
    LogResult,
    LogStart,
    SentTrial,
)
from fluid.loggers.left_out import LeftOut
from fluid.processes import frames
from fluid.processes.children import set_process_name
from fluid.trainables.exception_pickle import dump_exception

#: Most records that wait here; the driver waits once the connection is full as well.
_MOST_WAITING = 4096
_CHUNK = 1 << 18


def framed(record: Any) -> bytes:
    """Returns a record as it is sent."""
    return b"".join(frames.framed(pickle.dumps(record, pickle.HIGHEST_PROTOCOL)))


def take_records(buffer: frames.FrameBuffer) -> Iterator[Any]:
    """Yields the records that are complete in a buffer, and removes them from it.

    Raises:
        FrameError: what has come is no record.
    """
    for body in buffer.bodies():
        yield pickle.loads(body)


def serve(connection: socket.socket) -> None:
    """Runs the loggers until the driver closes the connection; the first record has their names."""
    set_process_name("fluid-loggers")
    channel = _DriverConnection(connection)
    logging.getLogger().handlers[:] = [_ToDriver(channel)]
    logging.getLogger().setLevel(logging.INFO)
    names = channel.next()
    if names is None:
        return
    loggers = _FileLoggers(channel)
    with loggers.reporting():
        loggers.make(names)
    while (record := channel.next()) is not None:
        with loggers.reporting():
            loggers.handle(record)
    loggers.flush()


class _DriverConnection:
    """The connection to the driver, and the records that have come."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = frames.FrameBuffer()
        self._waiting: deque[Any] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no record waits."""
        self._read()
        return not self._waiting

    def next(self) -> Any:
        """Waits for the next record and takes it; ``None`` once the driver has closed the connection."""
        self._read()
        while not self._waiting:
            if not self._read(wait=True):
                return None
        return self._waiting.popleft()

    def send(self, record: Any) -> None:
        """Sends the driver a record."""
        with suppress(OSError):  # It is gone; next() will notice.
            self._socket.sendall(framed(record))

    def _read(self, *, wait: bool = False) -> bool:
        """Reads what has come, up to a limit, so that the driver need not wait; returns whether there is a driver."""
        if len(self._waiting) >= _MOST_WAITING:
            return True
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            data = self._socket.recv(_CHUNK, flags)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self._buffer.add(data)
        try:
            self._waiting.extend(take_records(self._buffer))
        except frames.FrameError:
            return False
        return bool(data)


class _ToDriver(logging.Handler):
    """Sends what is logged here to the driver, which logs it."""

    def __init__(self, channel: _DriverConnection) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        named = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname, "msg": text}
        self._channel.send(LogLine(named))


class _JsonFileLogger(JsonLoggerCallback):  # type: ignore[misc]
    """Tune's, with the files of the config as the driver has made them."""

    def update_config(self, trial: SentTrial, config: Any) -> None:
        self._trial_configs[trial] = config
        Path(trial.local_path, EXPR_PARAM_FILE).write_text(trial.config_text)
        Path(trial.local_path, EXPR_PARAM_PICKLE_FILE).write_bytes(trial.config_pickle)


class _FileLoggers:
    """The loggers and their trials."""

    def __init__(self, channel: _DriverConnection) -> None:
        self._channel = channel
        self._loggers: list[LoggerCallback] = []
        self._trials: dict[str, SentTrial] = {}
        #: What each logger could not hold.
        self._left_out: dict[LoggerCallback, LeftOut] = {}
        #: Writers of TensorBoard's files that are still to be flushed to disk.
        self._unflushed: dict[Any, None] = {}

    def make(self, names: tuple[str, ...]) -> None:
        """Makes the loggers."""
        made = {"csv": CSVLoggerCallback, "json": _JsonFileLogger, "tbx": self._tensorboard}
        self._loggers = [made[name]() for name in names]

    def handle(self, record: Any) -> None:
        """Has loggers write a record."""
        if isinstance(record, LogFlush):
            self.flush()
            self._channel.send(record)
            return
        loggers = [self._loggers[position] for position in record.loggers]
        if isinstance(record, LogStart):
            self._trials[record.trial.trial_id] = record.trial
            for logger in loggers:
                self._call(logger.log_trial_start, record.trial)
            return
        trial = self._trials[record.trial_id]
        if isinstance(record, LogResult):
            result = record.result.unpickle(trial)
            for logger in loggers:
                self._call(logger.log_trial_result, record.iteration, trial, result)
        elif isinstance(record, LogEnd):
            trial.evaluated_params = record.evaluated_params
            for logger in loggers:
                self._call(logger.log_trial_end, trial, failed=record.failed)
        if self._unflushed and self._channel.is_empty:
            self.flush()

    def _call(self, method: Callable[..., Any], *facts: Any, **more: Any) -> None:
        """Calls a logger about a trial; what it cannot hold of that trial's values is left out."""
        try:
            method(*facts, **more)
        except (ArithmeticError, TypeError, ValueError) as error:
            if isinstance(error, OSError):
                raise
            logger = method.__self__  # type: ignore[attr-defined]
            left_out = self._left_out.setdefault(logger, LeftOut(type(logger).__name__))
            left_out.add(f"a call of {method.__name__}", error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports an error in the block, of a logger's own, to the driver, which raises it."""
        try:
            yield
        except Exception as error:
            self._channel.send(LoggerFailed(dump_exception(error), traceback.format_exc()))

    def flush(self) -> None:
        """Flushes TensorBoard's files to disk."""
        while self._unflushed:
            self._unflushed.popitem()[0].flush_now()

    def _tensorboard(self) -> TBXLoggerCallback:
        # It imports PyTorch where there is one, only to know the name of its tensors: 1.5 s that no trial may need.
        absent = "torch" not in sys.modules
        if absent:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            logger = TBXLoggerCallback()
        finally:
            if absent:
                del sys.modules["torch"]
        unflushed = self._unflushed

        class Writer(logger._summary_writer_cls):  # type: ignore[misc,name-defined]
            """Flushes its file once no record waits."""

            def flush(self) -> None:
                unflushed[self] = None

            def flush_now(self) -> None:
                super().flush()

            def close(self) -> None:
                unflushed.pop(self, None)
                super().close()

        logger._summary_writer_cls = Writer
        return logger
