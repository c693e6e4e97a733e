"""What a trial prints: to its own log and, where the driver shows it, to the lane's own output as well.

The lane's own output is two files of the run folder, one for standard output and one for standard error. C libraries
and child processes write there too. The host reads both while they grow
(:mod:`fluid.backends.hosts.output`). Marks in them name the trainable whose trial printed what follows. What C
libraries and child processes wrote is copied to the trial's log at the end of an iteration.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO, cast

from fluid._private_files import make_folder, open_descriptor, open_private
from fluid.lane.checkpoints.paths import trial_folder

# -- own output ----------------------------------------------------------------------------------
#
# A lane's own standard output or error: a file that its C libraries and child processes write to as well.
#
# What the lane writes itself is told apart from that by its place in the file, so that the rest can be copied to the
# log of the trial whose code ran meanwhile.


#: Most bytes that are read at once.
_CHUNK = 1 << 20


class OwnOutput:
    """Writes to a lane's own output, by line, and reads what others have written there.

    Args:
        stream: the output. Of one that is no regular file nothing is read.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: The file, if it is one: opened at the first byte, and anew, as children share the position of the stream's
        #: own descriptor, which a trial may also turn to another file.
        self._path = _path_of(stream)
        self._file: int | None = None
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._seen = 0 if self._path is None else os.stat(self._path).st_size
        #: (begin, end) of what this process has written since, in bytes; what adjoins is one.
        self._spans: list[tuple[int, int]] = []

    def write(self, text: str) -> None:
        """Writes text, at the end of a line.

        Raises:
            OSError, ValueError: it cannot be written.
        """
        if self._path is None:
            self._stream.write(text)
            return
        self._pending.append(text)
        if "\n" in text:
            self.flush()

    def write_bytes(self, data: bytes) -> None:
        """Writes bytes at once; raises as :meth:`write`."""
        self.flush()
        if self._path is None:
            self._stream.buffer.write(data)
            self._stream.flush()
            return
        with self._lock:
            self._append(data)

    def flush(self) -> None:
        """Writes what is left of a line; raises as :meth:`write`."""
        if self._path is None:
            self._stream.flush()
            return
        if self._pending:
            with self._lock:
                text, self._pending = "".join(self._pending), []
                self._append(text.encode("utf-8", "backslashreplace"))

    def fileno(self) -> int:
        """The stream's descriptor, for child processes."""
        return self._stream.fileno()

    def pop_others(self) -> Iterator[bytes]:
        """Yields what others have written since the last call; nothing where it cannot be read."""
        if self._path is None:
            return
        with suppress(OSError), self._lock:
            size = os.stat(self._path).st_size
            if size == self._seen:
                return
            file = self._open()
            (position, self._seen), (spans, self._spans) = (self._seen, size), (self._spans, [])
            for begin, end in [*spans, (size, size)]:
                while position < begin:
                    data = os.pread(file, min(_CHUNK, begin - position), position)
                    if not data:
                        return  # The file was cut.
                    position += len(data)
                    yield data
                position = max(position, end)

    def begin_in_child(self) -> None:
        """Makes the copy of this in a process that a trial has forked one of its own."""
        self._lock = threading.Lock()
        self._pending = []

    def _open(self) -> int:
        if self._file is None:
            assert self._path is not None
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        return self._file

    def _append(self, data: bytes) -> None:
        file = self._open()
        while data:
            written = os.write(file, data)
            end = os.lseek(file, 0, os.SEEK_CUR)
            begin = end - written
            if self._spans and self._spans[-1][1] == begin:
                self._spans[-1] = (self._spans[-1][0], end)
            else:
                self._spans.append((begin, end))
            data = data[written:]


def _path_of(stream: TextIO) -> str | None:
    with suppress(OSError, ValueError):
        descriptor = stream.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            return path if os.path.exists(path) else None  # It may have been deleted.
    return None


# -- output --------------------------------------------------------------------------------------


#: A mark: the trainable's name, and the lane's process.
MARK = re.compile(rb"\x1efluid: ([^\x1e]*) pid=(\d+)\x1e\n?")
#: With what a mark begins.
MARK_BEGIN = b"\x1e"
_LONGEST_NAME = 80


def trial_log(run_folder: str, trial_id: str) -> str:
    """Returns the file of what a trial prints."""
    return os.path.join(trial_folder(run_folder, trial_id), "output.log")


def lane_output(run_folder: str, lane_id: int) -> tuple[str, str]:
    """Returns the files of a lane's own standard output and standard error."""
    stem = os.path.join(run_folder, "logs", f"lane-{lane_id}")
    return f"{stem}.out", f"{stem}.log"


def has_text(path: str) -> bool:
    """Whether a file of a lane's own output has anything but marks; false if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return bool(MARK.sub(b"", file.read(1 << 16)))
    return False


class TrialLog:
    """The log of the trial whose code runs.

    It is opened at the first write, so that silent trials have none, and closed at the switch to another trial, so that
    thousands of residents can have one.

    Attributes:
        path: the file; ``None`` while no trial runs.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._file: TextIO | None = None
        self._abandoned: TextIO | None = None

    def switch(self, path: str | None) -> None:
        """Goes on with the log of another trial; ``None`` for none."""
        if path != self.path:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self.path, self._file = path, None

    def write(self, text: str) -> None:
        """Writes text, buffered by line, so that the log is complete even if the trial is killed."""
        try:
            if (file := self._file or self.open()) is not None:
                file.write(text)
        except (OSError, ValueError):  # Not contextlib.suppress, which takes longer than to write.
            pass  # A full disk, or a thread that prints during a switch, must not fail a trial.

    def write_bytes(self, data: bytes) -> None:
        """Writes bytes, at once."""
        with suppress(OSError, ValueError):
            if (file := self.open()) is not None:
                file.flush()
                file.buffer.write(data)
                file.flush()

    def flush(self) -> None:
        """Flushes buffered text."""
        if self._file is not None:
            with suppress(OSError, ValueError):
                self._file.flush()

    def begin_in_child(self) -> None:
        """Writes nothing in a process that the trial has forked: what that prints is copied from the lane's output."""
        self._abandoned, self._file, self.path = self._file, None, None  # Closing it would write what is buffered.

    def open(self) -> TextIO | None:
        """Returns the open log; ``None`` if no trial runs, or its log cannot be opened."""
        if self._file is None and self.path is not None:
            with suppress(OSError):
                make_folder(os.path.dirname(self.path))
                # What a trial prints may hold secrets of its config: the file is for its owner only.
                self._file = cast(
                    TextIO, open_private(self.path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
                )
        return self._file


class Output(io.TextIOBase):
    """Replaces ``sys.stdout`` or ``sys.stderr``: writes to the log of the trial whose code runs.

    One object serves for the whole life of the lane: a logging handler that a trial set up keeps a reference to it,
    and must not write to that trial's log, or to a closed file, while other trials run.

    Args:
        own: the lane's own stream; receives the output while no trial runs.
        log: the log of the trial that runs.
        echo: whether ``own`` also receives what trials print.
    """

    def __init__(self, own: TextIO, log: TrialLog, *, echo: bool) -> None:
        self._own = OwnOutput(own)
        self._log = log
        self._echo = echo
        self._pid = os.getpid()
        self._name = ""
        #: The name of the newest mark; ``None`` if the next text needs one, because a line was left unfinished.
        self._marked: str | None = ""
        self._in_line = False

    def switch(self, name: str) -> None:
        """Goes on with another trial, of the trainable of that name."""
        self._name = name
        if self._in_line:
            self._in_line, self._marked = False, None

    def mark(self) -> None:
        """Writes a mark unless the newest one is still right."""
        if self._echo and self._name != self._marked:
            self._marked = self._name
            self._own.write(f"\x1efluid: {self._name} pid={self._pid}\x1e\n")

    def write(self, text: str) -> int:
        """Writes text; what cannot be written is lost, and fails no trial."""
        if self._log.path is not None:
            self._log.write(text)
            if not self._echo:
                return len(text)
        try:
            if self._name != self._marked:
                self.mark()
            self._own.write(text)
            self._in_line = text[-1:] != "\n" if text else self._in_line
        except (OSError, ValueError):
            pass
        return len(text)

    def flush(self) -> None:
        """Flushes buffered text."""
        self._log.flush()
        if self._echo or self._log.path is None:
            self._own.flush()

    def fileno(self) -> int:
        """The descriptor of the lane's own output, for sub-processes."""
        return self._own.fileno()

    def isatty(self) -> bool:
        """False."""
        return False

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """How characters that cannot be encoded are written."""
        return "backslashreplace"

    @property
    def buffer(self) -> OutputBytes:
        """The same output, as a stream of bytes."""
        return OutputBytes(self)

    def write_bytes(self, data: bytes) -> int:
        """Writes bytes, at once."""
        with suppress(OSError, ValueError):
            self.mark()
            self.flush()
            self._log.write_bytes(data)
            if self._echo or self._log.path is None:
                self._own.write_bytes(data)
        return len(data)

    def collect(self) -> None:
        """Copies what C libraries and child processes have written since the last call to the log of the trial."""
        with suppress(OSError, ValueError):
            self._own.flush()
        for data in self._own.pop_others():
            self._log.write_bytes(data)

    def begin_in_child(self) -> None:
        """Begins in a process that the trial has forked."""
        self._own.begin_in_child()


class OutputBytes(io.RawIOBase):
    """What a lane prints, as a stream of bytes.

    Args:
        output: the stream of text.
    """

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        """Writes bytes, at once."""
        return self._output.write_bytes(bytes(data))

    def flush(self) -> None:
        """Flushes the text that was written before."""
        self._output.flush()

    def fileno(self) -> int:
        """The descriptor of the lane's own output."""
        return self._output.fileno()

    def writable(self) -> bool:
        """True."""
        return True


class LaneStreams:
    """The standard output and error of a lane, which its trials share.

    Args:
        stdout: the lane's own.
        stderr: the lane's own.
        echo: whether these also receive what trials print.

    Attributes:
        stdout: replaces ``sys.stdout``.
        stderr: replaces ``sys.stderr``.
        log: of the trial whose code runs.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, *, echo: bool = False) -> None:
        self.log = TrialLog()
        self.stdout = Output(stdout, self.log, echo=echo)
        self.stderr = Output(stderr, self.log, echo=echo)

    def switch(self, path: str | None, name: str = "") -> None:
        """Goes on with the output of another trial.

        Args:
            path: its log; ``None`` if no trial runs.
            name: its trainable's.
        """
        self.collect()
        self.log.switch(path)
        self.stdout.switch(name)
        self.stderr.switch(name)

    def collect(self) -> None:
        """Copies what C libraries and child processes have written to the log of the trial whose code ran."""
        self.stdout.collect()
        self.stderr.collect()

    def begin_in_child(self) -> None:
        """Goes on in a process that a trial has forked, which writes as other child processes do."""
        self.log.begin_in_child()
        self.stdout.begin_in_child()
        self.stderr.begin_in_child()

    def mark(self) -> None:
        """Marks what C libraries and child processes write from now on as that of the trial that runs."""
        with suppress(OSError, ValueError):
            self.stdout.mark()
            self.stderr.mark()


def printable_name(trainable: object) -> str:
    """Returns the name under which the output of a trainable's trials is shown."""
    while isinstance(trainable, functools.partial):
        trainable = trainable.func
    name = str(getattr(trainable, "__name__", None) or type(trainable).__name__)
    return "".join(filter(str.isprintable, name))[:_LONGEST_NAME]


# -- stack dump ----------------------------------------------------------------------------------
#
# Stack dumps: at a signal a lane writes the stacks of its threads to a file, also while its code never returns.


#: A real-time signal near the end of those: libraries and users take SIGUSR2, and the C library the first ones.
DUMP_SIGNAL = signal.SIGRTMAX - 3


def lane_stacks(run_folder: str, lane_id: int) -> str:
    """Returns the file of a lane's stacks."""
    return os.path.join(run_folder, "logs", f"lane-{lane_id}.stacks")


def dump_stacks_at_signal(run_folder: str, lane_id: int) -> None:
    """Makes this process write its stacks to a file of its own at :data:`DUMP_SIGNAL`.

    The C code of the standard library's faulthandler does it, without the interpreter: a thread that never gives the
    interpreter lock back does not keep it from that. It needs a descriptor that stays open, which the trials' own logs
    do not: the driver copies the stacks there (:mod:`fluid.backends.hosts.host`).
    """
    path = lane_stacks(run_folder, lane_id)
    make_folder(os.path.dirname(path))
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True)
