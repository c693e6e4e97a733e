"""The process of a script: started, heard, held between two iterations, and ended with all that it has started.

It leads a session, and so a process group, of its own. The trainable reads its output and its reports as it waits, in
the lane's main thread: what it prints between two iterations waits in its pipes.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from fluid._clock import MonotonicClock, nap
from fluid.processes.below import BELOW, children_of_all_threads
from fluid.processes.children import adopt_orphans, open_process, state_of
from fluid.processes.session_mark import kill_marked
from fluid.trainables.script_link import END, GO, SAVE, VARIABLE

#: Most bytes that are read at once.
_CHUNK = 1 << 16
#: Lines of its output that errors show.
_LAST_LINES = 20
#: Seconds between two looks at files of metrics, and at a script that is being ended.
_POLL_S, _LOOK_S = 0.2, 0.01
#: Seconds in which a killed process vanishes.
_KILLED_S = 2.0
#: Seconds in which processes stop, and the states of those that have, or have ended.
_STOPPED_S, _STILL = 1.0, (b"T", b"t", b"Z", b"X", b"")
_CREDENTIALS = struct.Struct("3i")


class Said(NamedTuple):
    """What a script has reported.

    Attributes:
        metrics: by name.
        origin: how: a kind of :data:`fluid.scripts.readers.KINDS`, or ``"regex"``.
        saves: whether it can be asked to save its state, while it waits.
        waiting: its connection, if it waits for the answer.
    """

    metrics: Mapping[str, Any]
    origin: str
    saves: bool = False
    waiting: Any = None


class _Link:
    """A connection of the script's, with what has come of a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that further bytes end."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines


class ScriptProcess:
    """Runs a script.

    Args:
        command: its words.
        environment: of the process; the variable of its link is added.
        readers: of its standard output and standard error: each takes bytes, and whether they are the last, and yields
            what they say, with its origin.
        poll: returns what files say; ``None`` if there are none to look at.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        readers: Sequence[Callable[[bytes, bool], Iterator[Said]]],
        poll: Callable[[], list[Said]] | None,
    ) -> None:
        adopt_orphans()
        self._clock = MonotonicClock()
        self._poll = poll
        self._polled_at = self._clock.now()
        self._said: deque[Said] = deque()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._mark = f"fluid-script-{os.urandom(16).hex()}"
        self._listener.bind(f"\0{self._mark}")
        self._listener.listen()
        self._links: list[_Link] = []
        #: Children of this process, and whether they are the script's.
        self._known: dict[int, bool] = {}
        #: Whether the group was stopped by SIGSTOP.
        self._is_held = False
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.errors: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            self._process = subprocess.Popen(
                command,
                env={**environment, VARIABLE: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            self._listener.close()
            self._selector.close()
            raise
        BELOW.leaders.add(self._process.pid)
        #: Readable once it has ended; ``None`` on an old kernel, where that is looked up now and then.
        self._ended = open_process(self._process.pid)
        self._pipes: dict[int, _Pipe] = {}
        for stream, reader in zip((self._process.stdout, self._process.stderr), readers, strict=True):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            is_error = stream is self._process.stderr
            self._pipes[stream.fileno()] = pipe = _Pipe(stream, is_error, reader)
            self._selector.register(stream, selectors.EVENT_READ, pipe)
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        if self._ended is not None:
            self._selector.register(self._ended, selectors.EVENT_READ, None)
        self._has_ended = False

    @property
    def exit_code(self) -> int | None:
        """Its exit status, negative for a signal; ``None`` while it runs."""
        return self._process.wait() if self._has_ended else None

    def next(self) -> Said | None:
        """Lets the script run until it says something; ``None`` once it has ended and said all."""
        while not self._said:
            if self._has_ended:
                return None
            for _ in self._strays():
                pass  # Those that have ended are waited for, so that they do not stay as zombies.
            self._signal(signal.SIGCONT)
            self._hear(None if self._poll is None else _POLL_S)
        return self._said.popleft()

    def answer(self, said: Said, text: str = GO) -> None:
        """Lets what waits in a report go on; does nothing for what does not wait."""
        if said.waiting is not None:
            with suppress(OSError):
                said.waiting.socket.sendall(text.encode() + b"\n")

    def save(self, said: Said, folder: str) -> str | None:
        """Has the script, which waits in a report, save its state; returns the error, or ``None``.

        It ends as the script does.
        """
        self.answer(said, f"{SAVE}{folder}")
        self._signal(signal.SIGCONT)
        while not self._has_ended:
            self._hear(None)
            for position, other in enumerate(self._said):
                if other.waiting is said.waiting and "saved" in other.metrics:
                    del self._said[position]
                    error: str | None = other.metrics["saved"]
                    return error
        return "it has ended meanwhile"

    def hold(self) -> None:
        """Stops all processes of the group until the next :meth:`next`, also one that waits in a report."""
        if not self._has_ended and not self._is_held:
            self._signal(signal.SIGSTOP)

    def stand_still(self) -> list[int]:
        """Stops all processes of the group, and returns the script's once they are, or after a second."""
        self.hold()
        deadline = self._clock.now() + _STOPPED_S
        found = BELOW.processes()
        while any(map(self._moves, found)) and self._clock.now() < deadline:
            nap(_LOOK_S)
            found = BELOW.processes()
        return found

    def _moves(self, process: int) -> bool:
        """Whether a process of the group has a thread that was not stopped yet."""
        with suppress(OSError):
            threads = map(int, os.listdir(f"/proc/{process}/task"))
            return os.getpgid(process) == self._process.pid and any(state_of(each) not in _STILL for each in threads)
        return False

    def let_run(self, seconds: float) -> None:
        """Lets the script run so long, whatever it says; that is kept."""
        self._signal(signal.SIGCONT)
        until = self._clock.now() + seconds
        while not self._has_ended and (left := until - self._clock.now()) > 0.0:
            self._hear(left)
        self.hold()

    def end(self, grace_s: float, waiting: Said | None) -> None:
        """Ends the script and all that it has started: SIGTERM, then, after so many seconds, SIGKILL."""
        if waiting is not None:
            self.answer(waiting, END)
        deadline = self._clock.now() + grace_s
        if not self._is_gone():
            self._kill(signal.SIGTERM)
            self._signal(signal.SIGCONT, always=True)
            while not self._is_gone() and self._clock.now() < deadline:
                self._hear(_LOOK_S)
                while self._said:
                    self.answer(self._said.popleft(), END)  # It reports after it was told to stop.
        if not self._is_gone():
            self._kill(signal.SIGKILL)
        BELOW.leaders.discard(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        if any(self._strays()):
            kill_marked(self._mark, VARIABLE)
            for process in self._strays():
                with suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)
        if not self._has_ended:
            self._drain()
            self._has_ended = True
        self._close()

    # -- hearing -------------------------------------------------------------------------------------------

    def _hear(self, timeout: float | None) -> None:
        """Waits until something comes, and takes it; output first, as what was printed before a report precedes it."""
        if self._poll is not None and self._clock.now() - self._polled_at >= _POLL_S:
            self._look_at_files()
        if self._ended is None:
            timeout = _LOOK_S if timeout is None else min(timeout, _LOOK_S)
        events = [key for key, _ in self._selector.select(timeout)]
        for key in events:
            if isinstance(key.data, _Pipe):
                self._read(key.data)
        for key in events:
            if isinstance(key.data, _Link):
                self._read_link(key.data)
            elif key.data is self._listener:
                self._accept()
        if any(key.data is None for key in events) or (self._ended is None and self._process.poll() is not None):
            self._process.wait()
            BELOW.leaders.discard(self._process.pid)
            if self._ended is not None:
                self._selector.unregister(self._ended)
            self._drain()
            self._has_ended = True

    def _look_at_files(self) -> None:
        if self._poll is not None:
            self._said += self._poll()
            self._polled_at = self._clock.now()

    def _drain(self) -> None:
        """Takes what is there of a script that has ended; what it has started may still hold its pipes."""
        for pipe in list(self._pipes.values()):
            while self._read(pipe):
                pass
            if not pipe.is_at_end:
                pipe.keep(b"\n", self.lines, self.errors)
                self._said += pipe.reader(b"", True)
        for link in list(self._links):
            while self._read_link(link):
                pass
        self._look_at_files()

    def _read(self, pipe: _Pipe) -> bool:
        """Takes a chunk of output; returns whether there was one."""
        if pipe.is_at_end:
            return False
        try:
            data = os.read(pipe.stream.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            output: Any = sys.stderr if pipe.is_error else sys.stdout
            output.buffer.write(data)
            pipe.keep(data, self.lines, self.errors)
        else:
            pipe.is_at_end = True
            pipe.keep(b"\n", self.lines, self.errors)
            self._selector.unregister(pipe.stream)
        self._said += pipe.reader(data, not data)
        return bool(data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(found)[1] != os.getuid():
            connection.close()  # Another user's.
            return
        connection.setblocking(False)
        link = _Link(connection)
        self._links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _read_link(self, link: _Link) -> bool:
        try:
            data = link.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()
        for line in link.lines(data):
            with suppress(ValueError, KeyError, TypeError):
                message = json.loads(line)
                if "saved" in message:
                    self._said.append(Said(message, "saved", waiting=link))
                else:
                    self._said.append(Said(message["metrics"], message["origin"], bool(message["saves"]), link))
        return bool(data)

    # -- signals and the end -------------------------------------------------------------------------------

    def _signal(self, number: int, *, always: bool = False) -> None:
        """Stops or continues the group, unless it is so already."""
        stops = number == signal.SIGSTOP
        if stops != self._is_held or always:
            self._is_held = stops
            self._kill(number)

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _is_gone(self) -> bool:
        """Whether neither the script nor another process of its group is left."""
        if not self._has_ended:
            return False
        if any(self._strays()):
            with suppress(OSError):
                os.killpg(self._process.pid, 0)
                return False
        return True

    def _strays(self) -> Iterator[int]:
        """Processes that the script has started, whose parents have ended: they are this process's children now."""
        for process in children_of_all_threads(os.getpid()):
            with suppress(ChildProcessError):
                if self._is_stray(process) and os.waitpid(process, os.WNOHANG) == (0, 0):
                    yield process

    def _is_stray(self, process: int) -> bool:
        """Whether the script has started a child of this process; other trials of the lane have children, too."""
        if process not in self._known and process not in BELOW.leaders:
            with suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
                is_marked = f"{VARIABLE}={self._mark}".encode() in file.read().split(b"\0")
                self._known[process] = is_marked or os.getsid(process) == self._process.pid
        return self._known.get(process, False)

    def _close(self) -> None:
        self._selector.close()
        for link in self._links:
            link.socket.close()
        self._listener.close()
        for pipe in self._pipes.values():
            pipe.stream.close()
        if self._ended is not None:
            os.close(self._ended)


class _Pipe:
    """An output of the script's.

    Attributes:
        stream: where it is read.
        is_error: whether it is standard error.
        reader: of what it says.
        is_at_end: whether all was read.
    """

    def __init__(self, stream: IO[bytes], is_error: bool, reader: Callable[[bytes, bool], Iterator[Said]]) -> None:
        self.stream = stream
        self.is_error = is_error
        self.reader = reader
        self.is_at_end = False
        self._rest = b""

    def keep(self, data: bytes, lines: deque[str], errors: deque[str]) -> None:
        """Keeps the last lines for errors."""
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()[-_CHUNK:]
        for part in parts[-_LAST_LINES:]:
            if text := part.decode(errors="replace").rstrip():
                lines.append(text)
                if self.is_error:
                    errors.append(text)
