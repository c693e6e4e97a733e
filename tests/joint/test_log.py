"""The log of a shared folder: one order for all, whatever a file system answers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fluid.joint import log
from fluid.joint.log import LOG, LogError, SharedLog

ROOT = Path(__file__).resolve().parents[2]

#: Appends entries, and prints all that it has read, in order.
APPENDER = """
import sys
from fluid.joint.log import SharedLog
shared, name, count = sys.argv[1:]
log = SharedLog(shared, name)
for number in range(int(count)):
    for place, content in log.append(f"{name} {number}".encode()):
        print(place, content.decode())
"""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_PAUSE_S", 0.0)


def drafts(shared: Path) -> list[str]:
    return [path.name for path in (shared / LOG).iterdir() if path.name.startswith(".")]


def test_each_reads_what_others_append(tmp_path: Path) -> None:
    one, other = SharedLog(tmp_path, "one"), SharedLog(tmp_path, "other")
    assert list(one.append(b"a")) == [(0, b"a")]
    assert list(other.append(b"b")) == [(0, b"a"), (1, b"b")]
    assert one.read() == [(1, b"b")]
    assert one.read() == other.read() == []
    assert SharedLog(tmp_path, "late").read() == [(0, b"a"), (1, b"b")]
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_many_append_at_once_in_one_order(tmp_path: Path, kind: str) -> None:
    names, count = ["a", "b", "c", "d"], 40
    seen: dict[str, list[str]] = {name: [] for name in names}
    if kind == "processes":
        processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", APPENDER, str(tmp_path), name, str(count)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        }
        for name, process in processes.items():
            seen[name] = process.communicate()[0].splitlines()
            assert process.returncode == 0
    else:

        def append(name: str) -> None:
            shared = SharedLog(tmp_path, name)
            for number in range(count):
                seen[name] += [f"{at} {text.decode()}" for at, text in shared.append(f"{name} {number}".encode())]

        threads = [threading.Thread(target=append, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    whole = [f"{number} {content.decode()}" for number, content in SharedLog(tmp_path, "late").read()]
    assert len(whole) == len(names) * count
    for name in names:
        assert seen[name] == whole[: len(seen[name])]
        mine = [line.split(maxsplit=1)[1] for line in whole if line.split()[1] == name]
        assert mine == [f"{name} {number}" for number in range(count)]


def test_an_entry_is_whole_or_not_there(tmp_path: Path) -> None:
    ours = SharedLog(tmp_path, "a")
    content = os.urandom(3 << 20)
    assert list(ours.append(content)) == [(0, content)]
    (tmp_path / LOG / ".b.0").write_bytes(b"a draft whose writer was killed")
    assert SharedLog(tmp_path, "c").read() == [(0, content)]
    assert list(SharedLog(tmp_path, "b").append(b"")) == [(0, content), (1, b"")]


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: b"", lambda whole: whole[:-1] + b"?"])
def test_a_damaged_entry_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    ours = SharedLog(tmp_path, "a")
    list(ours.append(b"first"))
    list(ours.append(b"second"))
    path = tmp_path / LOG / "00000001"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LogError, match=r"log/00000001 cannot be read: it is damaged"):
        SharedLog(tmp_path, "b").read()


def failing(monkeypatch: pytest.MonkeyPatch, name: str, codes: list[int], *, after: bool = False) -> None:
    """Has a function of ``os`` fail with these codes, one a call; ``after`` once it has done its work."""
    real = getattr(os, name)

    def call(*arguments: object, **options: object) -> object:
        if not codes:
            return real(*arguments, **options)
        code = codes.pop(0)
        if after:
            real(*arguments, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ESTALE, errno.EIO])
def test_the_link_was_made_though_the_answer_says_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    failing(monkeypatch, "link", [code], after=True)
    ours = SharedLog(tmp_path, "a")
    assert list(ours.append(b"once")) == [(0, b"once")]
    assert list(ours.append(b"twice")) == [(1, b"twice")]
    assert SharedLog(tmp_path, "b").read() == [(0, b"once"), (1, b"twice")]
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("name", ["link", "open", "write", "fsync", "read"])
def test_what_passes_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours = SharedLog(tmp_path, "a")
    failing(monkeypatch, name, [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
    assert list(ours.append(b"1")) == [(0, b"1")]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    failing(monkeypatch, "link", [code])
    with pytest.raises(LogError, match="without hard links"):
        list(SharedLog(tmp_path, "a").append(b"1"))
    assert drafts(tmp_path) == []


def test_a_file_system_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "write", [errno.ENOSPC])
    with pytest.raises(LogError, match="cannot be written to: No space left"):
        list(SharedLog(tmp_path, "a").append(b"1"))
    assert drafts(tmp_path) == []
    assert SharedLog(tmp_path, "b").read() == []


def test_a_file_system_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(log, "_PAUSE_S", 1.0)
    monkeypatch.setattr(log, "nap", naps.append)
    failing(monkeypatch, "link", [errno.ETIMEDOUT] * 100)
    with pytest.raises(LogError, match=r"takes no entry: .*Connection timed out"):
        list(SharedLog(tmp_path, "a").append(b"1"))
    assert list(filter(None, naps)) == [2.0**tried for tried in range(log._TRIES - 1)], (
        "it does not wait for nothing at the end"
    )


@pytest.mark.parametrize("what", ["read", "append"])
def test_a_log_that_was_deleted(tmp_path: Path, what: str) -> None:
    ours = SharedLog(tmp_path, "a")
    list(ours.append(b"1"))
    for path in (tmp_path / LOG).iterdir():
        path.unlink()
    (tmp_path / LOG).rmdir()
    with pytest.raises(LogError, match=r"is gone|cannot be written to"):
        ours.read() if what == "read" else list(ours.append(b"2"))


def test_a_log_that_is_deleted_before_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "link", [errno.ENOENT])
    with pytest.raises(LogError, match=r"takes no entry: .*No such file"):
        list(SharedLog(tmp_path, "a").append(b"1"))
