"""The faults that the supervisor of a session of torture.py brings about while a driver runs."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torture_strangers
from torture_files import damage_checkpoint
from torture_io import PARTS, WriteFaults

#: Marks the processes of a session, in their environment.
MARK = "FLUID_TORTURE"
#: How lanes and servers are killed.
_DEATHS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
#: Seconds after which a process that was stopped for good goes on after all; it is to be killed long before.
_LONG = 60.0
#: Signals at which a driver closes its session.
_CLOSING = (signal.SIGINT, signal.SIGTERM)


def marked(token: str, name: str = "") -> Iterator[int]:
    """Gives the processes of a session that have not ended and whose name begins so."""
    entry = f"{MARK}={token}".encode()
    for process in os.listdir("/proc"):
        if process.isdecimal() and int(process) != os.getpid():
            with suppress(OSError):
                if entry in Path("/proc", process, "environ").read_bytes().split(b"\0") and (
                    _name(int(process)).startswith(name)
                ):
                    yield int(process)


def describe(process: int) -> str:
    """Returns a process's number, name, state, parent and command."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        name = stat[0].partition("(")[2]
        state, parent = stat[2].split()[:2]
        return f"{process} {name} {state} parent {parent} {command[:150]}"
    except OSError:
        return f"{process} has ended"


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


class Faults:
    """Brings about faults.

    Args:
        folder: the session's.
        token: that marks its processes.
        draws: what is drawn from.
        memory: the RAM disk.
        owns_memory: whether only the session's processes see it. If not, it is not filled.
        writes: lets writes fail; ``None`` if they cannot.

    Attributes:
        driver: the process that drives the session now.
        filler: what fills the disk until the driver has ended; ``None`` if it is not full.
    """

    def __init__(
        self,
        folder: Path,
        token: str,
        draws: random.Random,
        memory: Path,
        *,
        owns_memory: bool,
        writes: WriteFaults | None,
    ) -> None:
        self._folder = folder
        self._token = token
        self._draws = draws
        self._memory = memory
        self._writes = writes
        self.driver = 0
        self.filler: Path | None = None
        self._later_on: list[Callable[[], None]] = []
        self._kinds: dict[str, Callable[[], bool]] = {
            "kill_lane": lambda: self._kill(self._lanes()),
            "stop_lane": lambda: self._stop(self._lanes(), self._draws.uniform(0.05, 1.9)),
            "stop_lane_long": lambda: self._stop(self._lanes(), _LONG),
            "kill_server": lambda: self._kill(self._named("fluid-forks")),
            "stop_server": lambda: self._stop(self._named("fluid-forks"), self._draws.choice([0.2, 1.0, 1.9, _LONG])),
            "kill_driver": lambda: self._signal([self.driver], signal.SIGKILL),
            "stop_driver": lambda: self._stop([self.driver], self._draws.uniform(0.05, 3.0)),
            "kill_driver_and_server": self._kill_driver_and_server,
            "kill_all": lambda: self._signal(
                [self.driver, *self._named("fluid-forks"), *self._lanes()], signal.SIGKILL
            ),
            "kill_guardian": lambda: self._kill(self._named("fluid-guard")),
            "kill_guardian_and_server": lambda: self._signal(
                [*self._named("fluid-guard"), *self._named("fluid-forks")], signal.SIGKILL
            ),
            "kill_every": lambda: self._signal([self.driver, *self._named("fluid-")], signal.SIGKILL),
            "term_driver": lambda: self._signal([self.driver], signal.SIGTERM),
            "term_driver_twice": self._term_twice,
            "int_driver": lambda: self._signal([self.driver], signal.SIGINT),
            "hup_driver": lambda: self._signal([self.driver], signal.SIGHUP),
            "usr1_driver": lambda: self._signal([self.driver], signal.SIGUSR1),
            "fill_disk": lambda: self._fill(folder / "disk", self._draws.uniform(0.1, 1.5)),
            "fill_memory": lambda: owns_memory and self._fill(self._memory, self._draws.uniform(0.1, 3.0)),
            "limit_file": self._limit_file,
            "lose_memory": self._lose_memory,
            "damage_checkpoint": self._damage_checkpoint,
            "kill_rank0": lambda: self._kill(self._rank0()),
            "stop_rank0": lambda: self._stop(self._rank0(), self._draws.choice([0.5, 1.5, _LONG])),
            "kill_mps": lambda: self._kill([*self._named("fluid-mps"), *self._named("nvidia-cuda-mps")]),
            "eio": lambda: self._fail_write("eio"),
            "short_write": lambda: self._fail_write("short_write"),
            "enospc": lambda: self._fail_write("enospc"),
            "full_at_close": self._full_at_close,
            "strangers": self._strangers,
            "stop_mps": lambda: self._stop(self._named("nvidia-cuda-mps"), 1.0),
        }

    def bring(self, kind: str) -> bool:
        """Brings a fault about; returns whether there was anything that it could befall."""
        return self._kinds[kind]()

    def end(self) -> None:
        """Does now what is still to be done later."""
        for do in self._later_on:
            do()
        self._later_on.clear()

    # -- processes -------------------------------------------------------------------------------------------

    def _named(self, name: str) -> list[int]:
        return list(marked(self._token, name))

    def _lanes(self) -> list[int]:
        return self._named("fluid-lane")

    def _rank0(self) -> list[int]:
        """Lanes in which rank 0 of a trial trained last, at a width above 1."""
        lanes = self._lanes()
        noted = []
        for note in (self._folder / "notes").glob("rank0.*"):
            with suppress(OSError, ValueError):
                noted.append(int(note.read_text()))
        return [lane for lane in lanes if lane in noted]

    def _kill(self, processes: list[int]) -> bool:
        return bool(processes) and self._signal([self._draws.choice(processes)], self._draws.choice(_DEATHS))

    def _signal(self, processes: list[int], number: int) -> bool:
        sent = False
        for process in processes:
            with suppress(OSError):
                os.kill(process, number)
                sent = True
        return sent

    def _stop(self, processes: list[int], seconds: float) -> bool:
        if not processes:
            return False
        process = self._draws.choice(processes)
        return self._signal([process], signal.SIGSTOP) and self._signal_later(process, signal.SIGCONT, seconds)

    def _signal_later(self, process: int, number: int, seconds: float) -> bool:
        """Sends a signal after some seconds, unless the process has ended: its number may be another's then."""

        try:
            handle = os.pidfd_open(process)
        except OSError:
            return False

        def send() -> None:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, number)
            os.close(handle)

        self._later(seconds, send)
        return True

    def _term_twice(self) -> bool:
        """The first signal says that the machine is about to end, the second is to end the driver at once."""
        return self._signal([self.driver], signal.SIGTERM) and self._signal_later(
            self.driver, signal.SIGTERM, self._draws.uniform(0.0, 1.0)
        )

    def _kill_driver_and_server(self) -> bool:
        processes = [self.driver, *self._named("fluid-forks")]
        self._draws.shuffle(processes)
        return self._signal(processes, signal.SIGKILL)

    # -- files -----------------------------------------------------------------------------------------------

    def _fill(self, place: Path, seconds: float) -> bool:
        """Fills a disk up to the last byte, for a while."""
        filler = self._filler(place)
        if filler is None:
            return False
        self._later(seconds, lambda: filler.unlink(missing_ok=True))
        return True

    def _filler(self, place: Path) -> Path | None:
        """Fills a disk by a file; ``None`` if it is not a disk of its own."""
        if os.stat(place).st_dev == os.stat(self._folder).st_dev:
            return None
        filler = place / f"filler-{time.monotonic_ns()}"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        return filler

    def _full_at_close(self) -> bool:
        """The disk is full when the driver ends its session, until the session's processes have ended."""
        if self.filler is None:
            self.filler = self._filler(self._folder / "disk")
        return self.filler is not None and self._signal([self.driver], self._draws.choice(_CLOSING))

    def make_room(self) -> None:
        """Takes away what has filled the disk until the driver had ended."""
        if self.filler is not None:
            self.filler.unlink(missing_ok=True)
            self.filler = None

    def _fail_write(self, kind: str) -> bool:
        """Lets a write that follows fail, in place of the one that still was to."""
        if self._writes is None:
            return False
        part = self._draws.choices(list(PARTS), list(PARTS.values()))[0]
        skip, half = self._draws.choice([0, 0, 1, 5, 20]), self._draws.random() < 0.5
        self._writes.arm(kind, part, skip=skip, half=half)
        return True

    def _strangers(self) -> bool:
        """Strangers connect to all ports on which the driver and Fluid's processes listen."""
        ports = torture_strangers.ports([self.driver, *self._named("fluid-"), *self._named("ray::FluidHost")])
        if not ports:
            return False
        way, seconds = self._draws.choice(sorted(torture_strangers.WAYS)), self._draws.uniform(0.5, 12.0)
        what = [way, str(seconds), str(self._draws.random()), *(f"{ip}:{port}" for ip, port in ports)]
        with (self._folder / "strangers.txt").open("a") as file:
            file.write(" ".join(what) + "\n")
        program = [sys.executable, "-SE", torture_strangers.__file__, *what]
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={})

        def end() -> None:
            process.kill()
            process.wait()

        self._later(seconds + 1.0, end)
        return True

    def _limit_file(self) -> bool:
        """Lets a write of the driver end in the middle, as on a full disk: the longest file may grow by some bytes."""
        run = self._folder / "disk" / "run"
        sizes = [path.stat().st_size for path in run.glob("*.jsonl")]
        if not sizes:
            return False
        limit = max(sizes) + self._draws.randint(0, 3000)
        try:
            resource.prlimit(self.driver, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        except OSError:
            return False
        return True

    def _lose_memory(self) -> bool:
        """Empties host memory, as its loss would; locks stay, or the session could not even notice."""
        trials = [trial for session in self._in_memory() for trial in session.iterdir() if trial.is_dir()]
        for trial in trials:
            shutil.rmtree(trial, ignore_errors=True)
        return bool(trials)

    def _damage_checkpoint(self) -> bool:
        return damage_checkpoint(self._draws, *self._in_memory(), self._folder / "disk")

    def _in_memory(self) -> list[Path]:
        """The session's own folders on the RAM disk."""
        found = []
        for note in self._memory.glob("fluid-*/.session"):
            with suppress(OSError):
                if str(self._folder) in note.read_text():
                    found.append(note.parent)
        return found

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        """Calls a function once: after some seconds, or at the end of the session."""
        first = threading.Lock()

        def do_once() -> None:
            if first.acquire(blocking=False):
                do()

        timer = threading.Timer(seconds, do_once)
        timer.daemon = True
        timer.start()
        self._later_on.append(do_once)
