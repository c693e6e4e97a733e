"""Tests whether a folder gives what several drivers need of it, for ``fluid doctor --shared``.

What counts is what the folder does, not what its file system is called. Processes append to a log there, the same
that a sweep has, as fast as they can, and what each of them has read has to be the same. :mod:`fluid.joint.meeting`
does that with other machines.

Run as a program, this module is one of those processes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid._clock import MonotonicClock
from fluid._private_files import FILE_MODE, make_folder, replacing
from fluid.errors import FluidError
from fluid.joint.log import SharedLog
from fluid.joint.meeting import Meeting, Spread, Unfit, meet
from fluid.processes.interpreters import start_program

#: Seconds above which a look at the log, an append, and the way of an entry to another machine and back are slow.
SLOW_LOOK_S, SLOW_APPEND_S, SLOW_ANSWER_S = 0.005, 0.1, 1.0
#: Processes that append at once, and how often each does.
_PROCESSES, _RACES = 4, 25
#: How often one process appends, and looks at the log.
_APPENDS, _LOOKS = 40, 200
#: Seconds after which no more is measured, and after which processes that append are given up.
_ENOUGH_S, _HANGS_S = 5.0, 60.0
#: Fills an entry, so that it takes more than one block.
_FILLING = b"." * 6000

#: File systems of one machine.
_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"))
#: How the mount of an object store is told, by its type or its source.
_OBJECT_STORES = re.compile("s3fs|mountpoint-s3|gcsfuse|goofys|geesefs|rclone|blobfuse", re.IGNORECASE)
_ELSEWHERE = "Use NFS (also EFS), a parallel file system such as Lustre, CephFS or BeeGFS, or JuiceFS"


@dataclass(frozen=True)
class FileSystem:
    """What the kernel says of the mount that a folder is on.

    Attributes:
        type: such as ``nfs4``.
        source: what is mounted, such as ``server:/home``.
        mounted_at: where.
        options: of the mount, and of the file system.
    """

    type: str
    source: str
    mounted_at: str
    options: tuple[str, ...]

    @property
    def is_object_store(self) -> bool:
        """Whether its files are the objects of a bucket, as far as its name tells."""
        return self.type.startswith("fuse") and bool(_OBJECT_STORES.search(f"{self.type} {self.source}"))

    @property
    def is_local(self) -> bool:
        """Whether it is of this machine alone."""
        return self.type in _LOCAL


@dataclass
class Probe:
    """What was found of a folder.

    Attributes:
        file_system: ``None`` if it is not known.
        given: what drivers need, by name, and whether the folder gives it; ``None`` if that was not tested, as
            something before it is not given.
        append: seconds of an append to the log by one process alone; ``None`` if it was not measured.
        look: seconds of a look at the log that finds nothing new.
        appends_per_s: of :attr:`processes` processes together that append at once.
        meeting: with other machines; ``None`` if none was asked for, or could be held.
        problems: why the folder cannot be used, and what to do.
        warnings: what may go wrong.
    """

    folder: Path
    file_system: FileSystem | None
    given: dict[str, bool | None]
    problems: list[str]
    warnings: list[str]
    append: Spread | None = None
    look: Spread | None = None
    appends_per_s: float | None = None
    processes: int = _PROCESSES
    meeting: Meeting | None = None

    @property
    def is_usable(self) -> bool:
        """Whether drivers can share the folder."""
        return not self.problems


def probe(folder: str | Path, *, wait_s: float = 0.0) -> Probe:
    """Tests a folder, and removes all that was written there.

    Args:
        folder: it has to be there.
        wait_s: seconds for which others that test the same folder, on other machines, are waited for; 0: none are.
    """
    folder = Path(os.path.realpath(folder))
    found = Probe(folder, file_system_of(folder), {}, [], [])
    place = folder / f".fluid-doctor-{secrets.token_hex(4)}"
    tests: dict[str, Callable[[Path, Probe], None]] = {
        "files": _try_files,
        "rename": _try_rename,
        "links": _try_links,
        "log": _try_log,
        "race": _try_race,
    }
    found.given.update(dict.fromkeys(tests))
    try:
        for name, test in tests.items():
            found.given[name] = False
            try:
                make_folder(place)
                test(place, found)
            except OSError as error:
                found.problems.append(f"{folder} refuses files: {error.strerror or error}.")
                break
            except FluidError as error:
                found.problems.append(f"{error}.".replace(str(place), str(folder)))
                break
            found.given[name] = True
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if found.is_usable and wait_s > 0.0:
        found.meeting = meet(folder, wait_s)
        found.problems += found.meeting.problems
    found.warnings += _warnings(found)
    return found


def file_system_of(folder: Path, mounts: str | None = None) -> FileSystem | None:
    """Finds the mount that a folder is on.

    Args:
        folder: an absolute path without symbolic links.
        mounts: what ``/proc/self/mountinfo`` has; it is read if ``None``.

    Returns:
        ``None`` if that is not known.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    best: FileSystem | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        of_mount, of_system = before.split(" "), after.split(" ")
        if len(of_mount) < 6 or len(of_system) < 3:
            continue
        at = _unescaped(of_mount[4])
        if not folder.is_relative_to(at) or (best is not None and len(at) < len(best.mounted_at)):
            continue
        options = dict.fromkeys([*of_mount[5].split(","), *of_system[2].split(",")])
        best = FileSystem(of_system[0], _unescaped(of_system[1]), at, tuple(options))
    return best


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# -- what one process can test -------------------------------------------------------------------------------


def _try_files(place: Path, found: Probe) -> None:
    """What was written and synchronised is read."""
    _write(place / "file", b"one")
    if (place / "file").read_bytes() != b"one":
        raise Unfit(f"{place} does not keep what is written to a file")


def _try_rename(place: Path, found: Probe) -> None:
    """A file takes the place of another one as a whole."""
    with replacing(place / "file") as draft:
        _write(draft, b"two")
    if (place / "file").read_bytes() != b"two" or draft.exists():
        raise Unfit(f"{place} does not replace a file by another one (rename)")


def _try_links(place: Path, found: Probe) -> None:
    """A file gets a second name, unless that is taken; it outlives the first one."""
    draft, name = place / "draft", place / "name"
    _write(draft, b"first")
    try:
        os.link(draft, name)
    except OSError as error:
        raise Unfit(_no_links(place, found.file_system, error)) from error
    os.unlink(draft)
    _write(draft, b"second")
    try:
        os.link(draft, name)
    except FileExistsError:
        pass
    else:
        raise Unfit(f"{place} gives a second file a name that is taken, so two drivers could have one trial")
    if name.read_bytes() != b"first":
        raise Unfit(f"{place} loses a file as its first name is removed")


def _no_links(place: Path, system: FileSystem | None, error: OSError) -> str:
    if system is not None and system.is_object_store:
        return (
            f"{place} is on the mount of an object store ({system.type} {system.source}), whose files have no hard "
            f"links ({error.strerror}): drivers cannot agree there who was first. {_ELSEWHERE}"
        )
    kind = "" if system is None else f" of type {system.type}"
    advice = _ELSEWHERE
    if error.errno == errno.EPERM and system is not None and system.type in ("cifs", "smb3"):
        advice = f"An SMB share has them if its server's file system has, such as NTFS or ext4. Else: {_ELSEWHERE}"
    return f"{place} is on a file system{kind} without hard links ({error.strerror}). {advice}"


def _write(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        os.write(file, content)
        os.fsync(file)
    finally:
        os.close(file)


def _try_log(place: Path, found: Probe) -> None:
    """Measures a log that one process uses alone."""
    log, clock = SharedLog(place, "doctor"), MonotonicClock()
    found.append = _measure(lambda: _consume(log.append(b"%d " % log.appended + _FILLING)), _APPENDS, clock)
    found.look = _measure(lambda: _consume(log.read()), _LOOKS, clock)


def _measure(work: Callable[[], None], times: int, clock: MonotonicClock) -> Spread:
    taken: list[float] = []
    since = clock.now()
    while len(taken) < times and clock.now() < since + _ENOUGH_S:
        began = clock.now()
        work()
        taken.append(clock.now() - began)
    return Spread.of(taken)


def _consume(items: Iterable[Any]) -> None:
    for _ in items:
        pass


# -- what several processes can test -------------------------------------------------------------------------


def _try_race(place: Path, found: Probe) -> None:
    """Several processes append at once, and all read the same."""
    place = place / "race"
    make_folder(place)
    racers = [
        start_program("fluid.joint.probe", [str(place), str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for number in range(_PROCESSES)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            racer.stdout.readline()  # It is ready.
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(b"\n")
            racer.stdin.flush()
        told = [_result_of(racer, place) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    merged = [_head(content) for _, content in SharedLog(place, "reader").read()]
    appended = [entry for result in told for entry in result["appended"]]
    if sorted(merged) != sorted(appended):
        raise Unfit(
            f"{place.parent} lost or doubled entries as {_PROCESSES} processes appended at once: {len(appended)} were "
            f"appended, {len(merged)} are there. Hard links must not take a name that is taken. {_ELSEWHERE}"
        )
    if any(result["read"] != merged[: len(result["read"])] for result in told):
        raise Unfit(f"{place.parent} shows the entries of a log in another order to another process. {_ELSEWHERE}")
    found.appends_per_s = len(merged) / max(result["seconds"] for result in told)


def _result_of(racer: subprocess.Popen[bytes], place: Path) -> dict[str, Any]:
    try:
        output, _ = racer.communicate(timeout=_HANGS_S)
    except subprocess.TimeoutExpired as error:
        raise Unfit(
            f"{place.parent} did not show to one process within {_HANGS_S:.0f} s what another one of this machine had "
            "written there"
        ) from error
    try:
        result: dict[str, Any] = json.loads(output)
    except ValueError:
        result = {"error": f"a process that tested {place.parent} ended with status {racer.returncode}"}
    if "error" in result:
        raise Unfit(result["error"])
    return result


def _head(content: bytes) -> str:
    return content[: -len(_FILLING)].decode()


def _race(folder: str, name: str) -> dict[str, Any]:
    """What one of the processes does."""
    log, clock = SharedLog(folder, name), MonotonicClock()
    print(flush=True)
    sys.stdin.readline()
    read: list[str] = []
    appended: list[str] = []
    began = clock.now()
    while len(appended) < _RACES and clock.now() < began + _ENOUGH_S:
        appended.append(f"{name} {len(appended)}")
        read += [_head(content) for _, content in log.append(appended[-1].encode() + _FILLING)]
    return {"seconds": clock.now() - began, "appended": appended, "read": read}


# -- what is said of it --------------------------------------------------------------------------------------


def _warnings(found: Probe) -> Iterable[str]:
    system, others = found.file_system, found.meeting.others if found.meeting else ()
    if found.append is not None and found.append.median_s > SLOW_APPEND_S:
        yield f"An append is slow: {found.append.median_s:.2g} s. What one driver reports, the others see late."
    if found.look is not None and found.look.median_s > SLOW_LOOK_S:
        milliseconds = found.look.median_s * 1000.0
        yield f"A look at the log is slow: {milliseconds:.2g} ms, and each driver looks 5 to 20 times a second."
    if system is not None and system.is_local and all(other.is_here for other in others):
        yield (
            f"{system.type} is a file system of this machine: drivers of other machines can join only if they mount "
            "the folder, as by NFS."
        )
    if system is not None and system.type.startswith("nfs"):
        if "nocto" in system.options:
            yield "It is mounted with nocto: a driver may not see for minutes what others wrote. Mount it without."
        if {"soft", "softerr"}.intersection(system.options):
            yield "It is mounted with soft: a server that is busy or restarts ends drivers. Mount it with hard."
    for other in others:
        worst = max(other.entry.worst_s, other.content.worst_s)
        if worst > SLOW_ANSWER_S:
            advice = _cache_advice(system)
            yield f"It took up to {worst:.2g} s until an answer of {other.host} was read: decisions come late.{advice}"
    for other in others:
        if other.is_here:
            yield f"Process {other.pid} is of this machine, so what other machines see was not tested with it."


def _cache_advice(system: FileSystem | None) -> str:
    """What of a mount may make it show late what others wrote."""
    if system is None:
        return ""
    if system.type.startswith("fuse"):
        return " Mount it with shorter caches of names and attributes (negative_timeout, entry_timeout, attr_timeout)."
    options = [option for option in system.options if option.startswith(("ac", "lookupcache"))]
    return f" Its mount options matter: {', '.join(options)}." if options else ""


def main(folder: str, name: str) -> None:
    """Appends together with other processes, as one of them.

    Args:
        folder: of the log.
        name: of this process.
    """
    try:
        result = _race(folder, name)
    except FluidError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
