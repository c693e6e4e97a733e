"""The machine that a driver of torture.py finds: its clock, its boot, its RAM disk, and its working directory.

    python -SE benchmarks/torture_machine.py SECONDS COMMAND...

runs a command with a monotonic clock that many seconds ahead of the machine's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

_CLONE_NEWTIME, _CLONE_NEWNS = 0x80, 0x20000
_MS_BIND, _MS_REC_PRIVATE = 0x1000, 0x4000 | 0x40000
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: Says that this process has a RAM disk, and mounts, of its own.
_OWN = "FLUID_TORTURE_OWN_MEMORY"
#: Modules that no process of a session may take from its working directory.
HOSTILE = ("json", "random", "socket", "types", "fluid")
_NOTES_ITSELF = """\
import posix
import sys

_file = posix.open({note!r}, posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT, 0o600)
posix.write(_file, ({name!r} + " in " + " ".join(sys.orig_argv[:4]) + "\\n").encode("utf-8", "replace")[:300])
posix.close(_file)
"""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def owns_memory() -> bool:
    """Whether this process has a RAM disk of its own."""
    return os.environ.get(_OWN) == "1"


def take_own_memory(megabytes: int) -> None:
    """Mounts a RAM disk that only this process and those below it see, if the system lets it."""
    libc = _libc()
    if os.geteuid() == 0 and libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
        if mount_tmpfs(Path("/dev/shm"), megabytes):
            os.environ[_OWN] = "1"


def mount_tmpfs(place: Path, megabytes: int) -> bool:
    """Mounts a RAM disk of a size at a folder; returns whether that worked."""
    return _libc().mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, f"size={megabytes}m".encode()) == 0


def boot_anew(folder: Path) -> bool:
    """Gives this process, which owns its mounts, and those below it the id of another boot; returns whether it worked.

    Args:
        folder: for the file that has the id.
    """
    boot = str(uuid.uuid4())
    file = folder / f"boot-{boot}"
    file.write_text(f"{boot}\n")
    _libc().mount(str(file).encode(), _BOOT_ID.encode(), None, _MS_BIND, None)
    return Path(_BOOT_ID).read_text().strip() == boot


def with_clock(seconds: float, command: list[str]) -> list[str]:
    """The command with the monotonic clock so many seconds ahead of the machine's."""
    return [sys.executable, "-SE", str(Path(__file__).resolve()), str(round(seconds)), *command] if seconds else command


def can_change_clocks() -> bool:
    """Whether the system lets this process make time namespaces."""
    command = with_clock(1000.0, [sys.executable, "-SE", "-c", "import time; print(time.monotonic())"])
    before = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode == 0 and float(ran.stdout) > before + 900.0


def write_hostile_modules(folder: Path, note: Path) -> None:
    """Writes modules that note in a file that they were executed."""
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(_NOTES_ITSELF.format(note=str(note), name=name))


def _enter_clock(seconds: int) -> None:
    """Moves this process, which has one thread, into a time namespace."""
    libc = _libc()
    if libc.unshare(_CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "no time namespace")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    namespace = os.open("/proc/self/ns/time_for_children", os.O_RDONLY)
    if libc.setns(namespace, _CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "no time namespace")
    os.close(namespace)


if __name__ == "__main__":
    _enter_clock(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
