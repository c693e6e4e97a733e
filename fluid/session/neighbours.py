"""Which other sessions of this user run on the same cores and GPUs of this machine, so that one that begins can say so.

Each session that uses devices of this machine has a file in a folder of the user's that names its run folder and its
devices. Whether it still runs is told by the lock on the run folder, so what a killed one has left is never believed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from fluid._logs import logger_of
from fluid._private_files import open_private
from fluid.backends.base import Backend
from fluid.gpu.nvml import find_gpus
from fluid.processes.children import ancestors
from fluid.processes.own_folders import require_own, temporary_folder
from fluid.resources import available_cores
from fluid.results.run_files import is_locked

#: The driver's machine, as devices name it.
_HERE = "localhost"
#: The folder of the files, and others that are named at most.
_FOLDER, _MOST_NAMED = "fluid-sessions", 3
_log = logger_of("fluid.session")


class SessionDevices(msgspec.Struct, frozen=True):
    """What a session uses of this machine.

    Attributes:
        pid: of its driver.
        run_dir: its run folder, on which it holds the lock.
        cpus: how many CPU devices it has.
        cores: the cores on which its driver may run.
        gpus: the UUIDs of its GPUs.
        shared: the folder in which it works with others; empty for a session by itself.
    """

    pid: int
    run_dir: str
    cpus: int
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    shared: str = ""

    @classmethod
    def of(cls, backend: Backend, run_dir: Path, shared: Path | None) -> SessionDevices | None:
        """What the session of a backend uses; ``None`` if that is nothing of this machine."""
        if backend.is_virtual or backend.replays:
            return None
        devices = [device for device in backend.devices() if device.host == _HERE]
        used = [device.index for device in devices if device.kind == "gpu"]
        known = find_gpus() if used else []
        gpus = tuple(known[index].token for index in used if index < len(known))
        cpus = sum(device.kind == "cpu" for device in devices)
        own = os.getpid(), str(run_dir), cpus, tuple(available_cores()), gpus, "" if shared is None else str(shared)
        return cls(*own) if cpus or gpus else None


class Overlap(NamedTuple):
    """What other sessions use, too.

    Attributes:
        cpu: those that have CPU devices on the same cores, if all together have more devices than there are cores.
        gpu: those that have one of the same GPUs.
    """

    cpu: tuple[SessionDevices, ...]
    gpu: tuple[SessionDevices, ...]


def overlap(own: SessionDevices, others: Sequence[SessionDevices]) -> Overlap:
    """Finds what a session shares with others by accident; drivers of one shared folder share by design."""
    strangers = [one for one in others if not own.shared or one.shared != own.shared]
    beside = [one for one in strangers if one.cpus and set(one.cores) & set(own.cores)] if own.cpus else []
    cores = set(own.cores).union(*(one.cores for one in beside))
    wanted = own.cpus + sum(one.cpus for one in beside)
    gpu = tuple(one for one in strangers if set(one.gpus) & set(own.gpus))
    return Overlap(tuple(beside) if wanted > len(cores) else (), gpu)


class Neighbours:
    """Says which devices a session uses, until :meth:`leave`, and warns of others that use the same.

    Args:
        own: what it uses; ``None`` for nothing of this machine.
    """

    def __init__(self, own: SessionDevices | None) -> None:
        self._file: Path | None = None
        if own is None:
            return
        with suppress(OSError):  # No warning is worth a session that does not begin.
            folder = _folder()
            above = ancestors()  # A sweep within a trial uses what that trial's session has given it.
            _warn(own, overlap(own, [one for one in _living(folder) if one.pid not in above]))
            file = folder / f"{own.pid}-{secrets.token_hex(4)}.json"
            with open_private(file, "wb") as out:
                out.write(msgspec.json.encode(own))
            self._file = file

    def leave(self) -> None:
        """Uses them no longer. Leaving twice is harmless."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()
            self._file = None


def _folder() -> Path:
    """The folder of the files, the same for all processes of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isdir(runtime):
        with suppress(OSError):
            folder = os.path.join(runtime, _FOLDER)
            os.makedirs(folder, mode=0o700, exist_ok=True)
            require_own(folder)
            return Path(folder)
    return Path(temporary_folder(f"{_FOLDER}-{os.getuid()}"))


def _living(folder: Path) -> list[SessionDevices]:
    """The sessions that run; the files of others are deleted."""
    found = []
    for file in folder.glob("*.json"):
        with suppress(OSError):
            try:
                one = msgspec.json.decode(file.read_bytes(), type=SessionDevices)
            except ValueError:
                continue  # It is only being written.
            if is_locked(Path(one.run_dir)):
                found.append(one)
            else:
                file.unlink()
    return found


def _warn(own: SessionDevices, others: Overlap) -> None:
    if others.cpu:
        cores = len(set(own.cores).union(*(one.cores for one in others.cpu)))
        devices = sum(one.cpus for one in others.cpu)
        _log.warning(
            "%s %s on %d CPU devices of this machine already, and this executor on %d, where there are %d cores: their "
            "trials take longer; end it first, or give devices=, fewer for each",
            _named(others.cpu),
            "runs trials" if len(others.cpu) == 1 else "run trials",
            devices,
            own.cpus,
            cores,
        )
    if others.gpu:
        both = len({gpu for one in others.gpu for gpu in one.gpus} & set(own.gpus))
        _log.warning(
            "%s %s %d of the %d GPUs of this executor, too: they share memory and time; give each other devices=",
            _named(others.gpu),
            "uses" if len(others.gpu) == 1 else "use",
            both,
            len(own.gpus),
        )


def _named(others: Sequence[SessionDevices]) -> str:
    names = [
        f"{'another executor of this process' if one.pid == os.getpid() else f'process {one.pid}'} ({one.run_dir})"
        for one in others[:_MOST_NAMED]
    ]
    more = len(others) - len(names)
    return " and ".join([*names, *([f"{more} more"] if more else [])])
