"""Members of a shared folder that are killed, stopped and whose clocks jump while they work.

What they have made of it, :mod:`check_log` checks.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slow_attributes import compile_shim, shim_variables

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("kill", "stop", "jump")
#: In the environment of all processes of a member.
_MARK = "FLUID_TORTURE_MEMBER"
#: Seconds after which members that nothing is done to any more must have ended.
PATIENCE_S = 120.0


@dataclass
class Torn:
    """What came of members.

    Attributes:
        shared: their folder.
        injected: how many faults of each kind.
        ended: exit codes and outputs of those that ended by themselves.
        orphans: how many processes were left of members in the end.
    """

    shared: Path
    injected: Counter[str] = field(default_factory=Counter)
    ended: list[tuple[int, str]] = field(default_factory=list)
    orphans: int = 0


class MemberProcess:
    """A process that is a member, with all that it starts.

    Args:
        command: what it runs.
        name: its own among the members of a test.
        folder: for its output and its clock.
        variables: of its environment, besides those of this process.
    """

    def __init__(self, command: Sequence[str], name: str, folder: Path, variables: Mapping[str, str]) -> None:
        self._mark = f"{_MARK}={folder}/{name}".encode()
        self._output, self.clock = folder / f"{name}.txt", folder / f"{name}.clock"
        key, _, value = self._mark.decode().partition("=")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT), "SLOW_CLOCK": str(self.clock), **variables, key: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.is_stopped = False

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def kill(self, *, whole: bool) -> None:
        """Kills it; ``whole`` with all that it has started, as a machine that fails, else that has to end by itself."""
        self._process.kill()
        self._process.wait()
        if whole:
            self.sweep_up()

    def sweep_up(self) -> int:
        """Kills what is left of its processes; returns how many these were."""
        left = self._pids()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    def pause(self, *, whole: bool) -> None:
        """Stops it; ``whole`` with all that it has started, as a machine that sleeps."""
        self.is_stopped = True
        for pid in self._pids() if whole else [self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self.is_stopped = False
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


class Torture:
    """Works a sweep with members, and injects faults as long as it runs.

    Args:
        command: what a member runs; it begins with the arguments of Python.
        shared: the members' folder.
        folder: for what the test itself writes.
        members: how many at once.
        faults: how many at most.
        seed: of the faults.
        lease_s: seconds for which members may be silent.
        shim: the compiled shim that members have; ``None`` for none, and no jumps of clocks.
        every_s: seconds between two faults, in the mean.
    """

    def __init__(
        self,
        command: Sequence[str],
        shared: Path,
        folder: Path,
        *,
        members: int = 4,
        faults: int = 50,
        seed: int = 0,
        lease_s: float = 2.0,
        shim: Path | None = None,
        every_s: float = 0.5,
    ) -> None:
        self._command = [sys.executable, *command]
        self._folder = folder
        self._faults, self._lease_s, self._every_s = faults, lease_s, every_s
        self._shim = shim
        self._random = random.Random(seed)
        self._torn = Torn(shared)
        self._count = 0
        #: When those that are stopped go on.
        self._waking: dict[MemberProcess, float] = {}
        self._killed: list[MemberProcess] = []
        self._members = [self._started() for _ in range(members)]

    def run(self, after_faults: Callable[[], None] = lambda: None) -> Torn:
        """Runs until all members have ended by themselves.

        Args:
            after_faults: called once no more faults are to come.

        Raises:
            TimeoutError: they do not.
        """
        try:
            self._inject()
            after_faults()
            self._await()
        finally:
            for member in self._members + self._killed:
                self._torn.orphans += member.sweep_up()
        return self._torn

    def _started(self) -> MemberProcess:
        variables = {} if self._shim is None else shim_variables(self._shim, self._torn.shared)
        name, self._count = f"m{self._count}", self._count + 1
        return MemberProcess(self._command, name, self._folder, variables)

    def _inject(self) -> None:
        kinds = [kind for kind in FAULTS if self._shim is not None or kind != "jump"]
        while self._torn.injected.total() < self._faults:
            self._sleep(self._random.expovariate(1.0 / self._every_s))
            while len(running := [one for one in self._members if not one.is_stopped]) < 2:
                self._sleep(0.1)
            if any(member.exit_code is not None for member in running):
                return  # The sweep is over.
            victim, kind = self._random.choice(running), self._random.choice(kinds)
            self._torn.injected[kind] += 1
            if kind == "kill":
                victim.kill(whole=self._random.random() < 0.5)
                self._killed.append(victim)
                self._members[self._members.index(victim)] = self._started()
            elif kind == "stop":
                victim.pause(whole=self._random.random() < 0.5)
                self._waking[victim] = time.monotonic() + self._lease_s * self._random.uniform(1.2, 2.0)
            else:
                victim.clock.write_text(str(round(self._random.uniform(-20.0, 20.0) * 3600)))

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for member in [one for one, at in self._waking.items() if at <= now]:
                del self._waking[member]
                member.go_on()
            if now >= until:
                return
            time.sleep(min(0.05, until - now))

    def _await(self) -> None:
        patience = time.monotonic() + PATIENCE_S
        while any(member.exit_code is None for member in self._members):
            self._sleep(0.1)
            if time.monotonic() >= patience:
                texts = [member.output[-3000:] for member in self._members if member.exit_code is None]
                raise TimeoutError("members do not end:\n" + "\n---\n".join(texts))
        for member in self._members:
            assert member.exit_code is not None
            self._torn.ended.append((member.exit_code, member.output))


def shim_or_none(folder: Path) -> Path | None:
    """Compiles the shim into a new folder; ``None`` if that cannot be done here."""
    if not sys.platform.startswith("linux") or shutil.which("gcc") is None:
        return None
    folder.mkdir()
    return compile_shim(folder)
