"""The host's end of the fork server and of its guardian.

See :mod:`fluid.backends.hosts.forkserver.main` and :mod:`fluid.backends.hosts.forkserver.guardian`.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid._private_files import make_folder
from fluid.backends.hosts.forkserver.guardian import (
    END,
    NO_DESCRIPTORS,
    PROGRAM,
    ForkServerState,
    MpsControl,
    exit_code,
)
from fluid.errors import FluidError
from fluid.lane.protocol import LaneOptions
from fluid.processes.children import children, describe_exit, is_stopped
from fluid.processes.interpreters import start_program
from fluid.processes.session_mark import SESSION_VARIABLE, kill_marked
from fluid.processes.signals import blocked_for_driver
from fluid.wire import decoder, encode

_log = logger_of(__name__)

#: One thread each, so that there are no threads that a fork would lose. A lane sets its own numbers.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    # Makes torch.cuda.is_available() ask NVML, not CUDA, which must not be initialised before a fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_LARGEST_ANSWER = 1 << 20
#: Seconds the guardian has to kill everything below it, before it is killed itself.
_END_S = 5.0
#: Seconds that modules may take to load for which no lane waits.
_LONGEST_LATE_S = 60.0
_LOST = "lost the fork server it came from"
_decode = decoder(Any)


class Exited(NamedTuple):
    """A lane has ended, or could not be forked; ``reason`` is to be read after "lane 3".

    Attributes:
        blameless: whether something outside it has ended it.
    """

    lane_id: int
    reason: str
    blameless: bool = False


@dataclass(slots=True, eq=False)
class _ForkingProcess:
    """A process that forks lanes, or is about to.

    Attributes:
        control: the connection to it, on which neither end waits.
        to_load: the modules that it was forked to load.
        late: whether no lane waits for it.
        modules: those that it and the servers it comes from have loaded, or could not.
        pid: its process; ``None`` until it has told.
        loading: the module that it is loading.
        since: when it began, seconds.
        lanes: those that it has forked, or was asked to, and that have not ended.
        requests: what it has not read, each with the descriptor that goes with it.
    """

    control: socket.socket
    to_load: tuple[str, ...] = ()
    late: bool = False
    modules: frozenset[str] = frozenset()
    pid: int | None = None
    loading: str = ""
    since: float = 0.0
    lanes: set[int] = field(default_factory=set)
    requests: deque[tuple[bytes, socket.socket | None]] = field(default_factory=deque)

    def close(self) -> None:
        """Closes the connection, and those that it was not given."""
        for _, connection in self.requests:
            if connection is not None:
                connection.close()
        self.requests.clear()
        self.control.close()


class ForkServerProcess:
    """The host's end of a fork server, which is started at once, and again if it dies.

    Lanes are forked by the newest server that is ready. Where modules are to be loaded before the next lane, requests
    for lanes wait here for an heir that has them; modules that are loaded late make none wait, so their heir comes
    after the first lane.

    Args:
        run_folder: folder of the run; logs of the server and of the lanes go to ``logs`` there.
        memory_folder: folder of the checkpoints in host memory; empty if there is none.
        mark: the session's; see :mod:`fluid.processes.session_mark`.
        temporary: whether both folders are deleted once the driver is gone.
        preload: modules to load first.
        driver_address: where the session's driver listens, if this process is not the driver.
        environment: variables that the server and the lanes get beside those of this process.
    """

    def __init__(
        self,
        run_folder: str,
        *,
        memory_folder: str = "",
        mark: str,
        temporary: bool = False,
        preload: Sequence[str] = (),
        driver_address: tuple[str, int] | None = None,
        environment: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._environment = dict(environment)
        self._driver_address = driver_address
        self._run_folder = run_folder
        self._memory_folder = memory_folder
        self._mark = mark
        self._temporary = temporary
        self._clock = MonotonicClock()
        #: What lanes are to have from the start, in order of loading, with whether they need not wait for it.
        self._modules: dict[str, bool] = dict.fromkeys(preload, False)
        #: Those that no server loads any more, with the reason.
        self._refused: dict[str, str] = {}
        #: register() of a trial may preload from another thread than the one that polls.
        self._lock = threading.RLock()
        #: The base, and its heirs in order of age; the last one forks lanes. None while the server does not run.
        self._servers: list[_ForkingProcess] = []
        #: The one that is loading modules.
        self._heir: _ForkingProcess | None = None
        #: Requests for lanes that wait for it.
        self._held: deque[tuple[LaneOptions, socket.socket]] = deque()
        self._ended: list[Exited] = []
        self._superseded: list[int] = []
        #: Watches the connections, each with its server; with an event to write where requests wait.
        self._selector = selectors.EpollSelector()
        #: Processes that were stopped at the last look.
        self._stopped: set[int] = set()
        #: The guardian, and the pipe to it.
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = -1
        self._closed = False
        self._log_folder = os.path.join(run_folder, "logs")
        make_folder(self._log_folder)
        try:
            self._start()
        except BaseException:
            self._selector.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process of the base; ``None`` while there is none, or it has not told it yet."""
        with self._lock:
            self._receive()
            return self._servers[0].pid if self._servers else None

    def lane_processes(self) -> list[int]:
        """Returns the processes that were forked here and run; none where the kernel does not list them."""
        with self._lock:
            servers = {server.pid for server in self._all_servers() if server.pid is not None}
        return [process for server in servers for process in children(server) if process not in servers]

    @property
    def guardian(self) -> int | None:
        """The guardian's process; ``None`` while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def wants_to_write(self) -> bool:
        """Never: its own selector waits for that."""
        return False

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to do; -1 once it is closed."""
        return -1 if self._closed else self._selector.fileno()

    def preload(self, modules: Sequence[str], *, late: bool = False) -> None:
        """Loads modules before the next lane is forked. Those that cannot be loaded are left out.

        Args:
            modules: their names.
            late: whether lanes do not wait for it, and have those modules from the start once it is done.
        """
        with self._lock:
            for name in modules:
                if name not in self._modules or not late:
                    self._modules[name] = late
            self._advance()

    def loading(self) -> str:
        """The module that an heir is importing while lanes wait for it; empty if there is none."""
        with self._lock:
            heir = self._heir
            return heir.loading if heir is not None and self._held and not heir.late else ""

    def fork(self, options: LaneOptions, connection: socket.socket) -> None:
        """Forks a lane, which need not be there yet on return.

        Args:
            options: the lane's settings.
            connection: its end of the connection to the driver; closed here once it was handed over.

        Raises:
            FluidError: the server was closed, or cannot be started.
        """
        with self._lock:
            try:
                if not self._servers:
                    self._start()
            except BaseException as error:
                connection.close()
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    raise FluidError(NO_DESCRIPTORS) from error
                raise
            self._held.append((options, connection))
            self._advance()

    def kill(self, lane_id: int, control: MpsControl | None = None) -> None:
        """Kills a lane, if it is there.

        Args:
            lane_id: its number.
            control: of the MPS daemon that is to end the lane's work before, where its clients are to go on.
        """
        with self._lock:
            for held in [held for held in self._held if held[0].lane_id == lane_id]:
                self._held.remove(held)
                held[1].close()
                self._ended.append(Exited(lane_id, "was killed before it was forked"))
            self._tell_server_of(lane_id, "kill", (lane_id, control))

    def dump_stacks(self, lane_id: int) -> None:
        """Makes a lane write its stacks to its log, if it is there."""
        with self._lock:
            self._tell_server_of(lane_id, "dump", lane_id)

    def look(self) -> None:
        """Continues the servers and their guardian if they were stopped (SIGSTOP), at the second look; cheap."""
        with self._lock:
            if self._heir is not None and self._heir.late and self._clock.now() > self._heir.since + _LONGEST_LATE_S:
                self._lose_heir(f"it took longer than {_LONGEST_LATE_S:.0f} s to be imported")
            processes = (self.guardian, *(server.pid for server in self._all_servers()))
            stopped = {pid for pid in processes if pid is not None and is_stopped(pid)}
            for pid in stopped & self._stopped:
                _log.warning("the fork server of the lanes, process %d, was stopped (SIGSTOP): it is continued", pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            self._stopped = stopped

    def poll(self) -> list[Exited]:
        """Returns the lanes that have ended since the last call."""
        with self._lock:
            for server in self._all_servers():
                self._flush(server)
            self._receive()
            ended, self._ended = self._ended, []
        return ended

    def take_superseded(self) -> list[int]:
        """Returns the lanes, of those that have not ended, whose server has got an heir since the last call."""
        with self._lock:
            superseded, self._superseded = self._superseded, []
        return superseded

    def close(self) -> None:
        """Ends the server and every process below it; none is left when it returns."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            guardian = self._dismiss_guardian()
            self._disconnect()
            if not was_closed:
                self._selector.close()
        if guardian is not None:
            self._await_end(guardian)

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes the connection, and leaves the server alone."""
        if self._closed:
            return
        self._closed = True
        self._selector.close()  # The driver's goes on to watch what is closed here.
        for server in self._all_servers():
            server.close()
        for _, connection in self._held:
            connection.close()
        if self._process is not None:
            os.close(self._guard)
            self._process.returncode = 0  # Not its child: it must not wait for it.
            self._process = None

    # -- the base ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise FluidError("the fork server was closed")
        ours, theirs = _connected()
        with theirs:
            try:
                reader, self._guard = os.pipe()
                try:
                    self._process = self._execute(theirs.fileno(), reader)
                except BaseException:
                    os.close(self._guard)
                    raise
                finally:
                    os.close(reader)
            except BaseException:
                ours.close()
                raise
        self._servers = [self._watched(_ForkingProcess(ours))]
        self._advance()

    def _execute(self, control: int, guard: int) -> subprocess.Popen[bytes]:
        """Starts the program, which forks into guardian and server."""
        state = ForkServerState(
            control=control,
            guard=guard,
            host=os.getpid(),
            mark=self._mark,
            run_folder=self._run_folder,
            memory_folder=self._memory_folder,
            temporary=self._temporary,
            driver_address=self._driver_address,
        )
        environment = {
            **os.environ,
            **self._environment,
            **_ENVIRONMENT,
            SESSION_VARIABLE: self._mark,
        }
        with (
            open(os.path.join(self._log_folder, "forkserver.log"), "ab", opener=_for_owner) as log,
            blocked_for_driver(),
        ):
            return start_program(
                PROGRAM,
                [state.to_json()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[control, guard],
                start_new_session=True,  # No Ctrl-C reaches it: the driver decides what that means.
            )

    # -- its heirs -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Has what is missing loaded, and the lanes forked that need not wait for it."""
        if not self._servers:
            return
        newest = self._servers[-1]
        missing = [name for name in self._modules if name not in newest.modules and name not in self._refused]
        urgent = [name for name in missing if not self._modules[name]]
        if self._heir is not None and self._heir.late and urgent:
            self._request(newest, "disown", None)
            self._drop_heir()  # It begins again, after those that lanes wait for.
        if not urgent:
            while self._held:
                options, connection = self._held.popleft()
                newest.lanes.add(options.lane_id)
                self._request(newest, "fork", tuple(options), connection)
        if self._heir is None and (urgent or (missing and any(server.lanes for server in self._servers))):
            self._fork_heir(newest, tuple(urgent or missing), late=not urgent)

    def _fork_heir(self, newest: _ForkingProcess, modules: tuple[str, ...], *, late: bool) -> None:
        try:
            ours, theirs = _connected()
        except OSError as error:  # No descriptors: what it should load is left to the lanes.
            self._refuse(modules, str(error))
            self._advance()
            return
        loaded = newest.modules | frozenset(modules)
        self._heir = self._watched(_ForkingProcess(ours, modules, late, loaded, since=self._clock.now()))
        self._request(newest, "heir", (modules, late), theirs)

    def _take_over(self, heir: _ForkingProcess) -> None:
        """Lets an heir that has loaded its modules fork the next lanes."""
        newest = self._servers[-1]
        self._superseded += sorted(newest.lanes)
        if newest is not self._servers[0]:
            self._request(newest, "retire", None)  # It ends with its last lane.
        self._heir = None
        self._servers.append(heir)
        self._advance()

    def _lose_heir(self, reason: str) -> None:
        """Goes on without an heir, and what it could not load."""
        heir = self._heir
        assert heir is not None
        self._refuse((heir.loading,) if heir.loading else heir.to_load, reason)
        self._request(self._servers[-1], "disown", None)
        self._drop_heir()
        self._advance()

    def _refuse(self, modules: Iterable[str], reason: str) -> None:
        for name in modules:
            self._refused[name] = reason
            _log.info("lanes start without %s: not loaded ahead: %s", name, reason)

    def _drop_heir(self) -> None:
        if self._heir is not None:
            self._forget(self._heir)
            self._heir = None

    # -- connections ---------------------------------------------------------------------------------------

    def _all_servers(self) -> list[_ForkingProcess]:
        return [*self._servers, *([] if self._heir is None else [self._heir])]

    def _watched(self, server: _ForkingProcess) -> _ForkingProcess:
        self._selector.register(server.control, selectors.EVENT_READ, server)
        return server

    def _forget(self, server: _ForkingProcess) -> None:
        self._selector.unregister(server.control)
        server.close()

    def _tell_server_of(self, lane_id: int, name: str, argument: Any) -> None:
        for server in self._servers:
            if lane_id in server.lanes:
                self._request(server, name, argument)

    def _request(
        self, server: _ForkingProcess, name: str, argument: Any, connection: socket.socket | None = None
    ) -> None:
        server.requests.append((encode((name, argument)), connection))
        self._flush(server)

    def _flush(self, server: _ForkingProcess) -> None:
        while server.requests:
            data, connection = server.requests[0]
            try:
                descriptors = [] if connection is None else [connection.fileno()]
                socket.send_fds(server.control, [data], descriptors)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                break  # It is gone; poll() will notice.
            server.requests.popleft()
            if connection is not None:
                connection.close()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if server.requests else 0)
        if self._selector.get_key(server.control).events != wanted:
            self._selector.modify(server.control, wanted, server)

    def _receive(self) -> None:
        """Reads what the servers say."""
        for server in self._all_servers():
            while server in self._all_servers():
                try:
                    answer = server.control.recv(_LARGEST_ANSWER)
                except (BlockingIOError, InterruptedError):
                    break
                except OSError:
                    answer = b""
                if answer:
                    self._read(server, _decode(answer))
                else:
                    self._lose(server)

    def _read(self, server: _ForkingProcess, answer: Sequence[Any]) -> None:
        if answer[0] == "exited":
            server.lanes.discard(answer[1])
            self._ended.append(Exited(*answer[1:]))
        elif answer[0] == "started":
            server.pid = answer[1]
        elif answer[0] == "loading":
            server.loading = answer[1]
        elif answer[0] == "loaded":
            _, name, seconds, error = answer
            server.loading = ""
            if error:
                _log.info("lanes start without %s: %s", name, error)
            else:
                _log.debug("%s was loaded for all lanes in %.3f s", name, seconds)
        elif server is self._heir and answer[0] == "spoilt":
            self._lose_heir(answer[1])
        elif server is self._heir and answer[0] == "ready":
            self._take_over(server)

    def _lose(self, server: _ForkingProcess) -> None:
        """Reports the lanes of a server that has ended, which have ended with it; the base's end is that of all."""
        if server is self._heir:
            self._lose_heir("the process that loaded it ended")
        elif server is self._servers[0]:
            self._lose_all()
        else:
            self._servers.remove(server)
            self._forget(server)
            self._ended += [Exited(lane_id, _LOST) for lane_id in sorted(server.lanes)]
            self._advance()

    def _lose_all(self) -> None:
        lanes = {options.lane_id for options, _ in self._held}.union(*(server.lanes for server in self._servers))
        self._disconnect()
        reason = _LOST
        guardian = self._dismiss_guardian()
        if guardian is not None:
            self._await_end(guardian)
            who = "whose guardian" if guardian.returncode < 0 else "which"
            reason += f", {who} {describe_exit(exit_code(guardian.returncode))}; see {self._log_folder}/forkserver.log"
        self._ended += [Exited(lane_id, reason) for lane_id in sorted(lanes)]

    def _dismiss_guardian(self) -> subprocess.Popen[bytes] | None:
        """Tells the guardian to end everything below it, and returns it, if there is one."""
        guardian, self._process = self._process, None
        if guardian is not None:
            with suppress(OSError):  # It has died.
                os.write(self._guard, END)
            os.close(self._guard)
        return guardian

    def _await_end(self, guardian: subprocess.Popen[bytes]) -> None:
        """Waits for the guardian's end; kills what is left if it did not end by itself."""
        try:
            with suppress(subprocess.TimeoutExpired):
                guardian.wait(_END_S)
        finally:  # Also when interrupted.
            guardian.kill()  # If it still runs. The server and its lanes die with it.
            guardian.wait()
            if guardian.returncode < 0:
                kill_marked(self._mark)

    def _disconnect(self) -> None:
        for server in self._all_servers():
            self._forget(server)
        for _, connection in self._held:
            connection.close()
        self._servers.clear()
        self._held.clear()
        self._heir = None


def _connected() -> tuple[socket.socket, socket.socket]:
    """Makes a connection to a server: its host's end, which never waits, and its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
