"""The shim that the torture of the shared folder uses does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slow_attributes import compile_shim, shim_variables

#: Answers expressions, one a line; the shim is about this process only.
PROBE = textwrap.dedent("""\
    import os, sys, time
    def there(call, *args):
        try:
            found = call(*args)
        except FileNotFoundError:
            return False
        if isinstance(found, int):
            os.close(found)
        return True
    for line in sys.stdin:
        print(repr(eval(line)), flush=True)
""")


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    library = compile_shim(tmp_path)
    if library is None:
        pytest.skip("no C compiler")
    return library


class Client:
    """A process that has the shim."""

    def __init__(self, shim: Path, below: Path, clock: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROBE],
            env={**os.environ, **shim_variables(shim, below, clock, names_s=60.0)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, expression: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        return eval(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def client(shim: Path, tmp_path: Path) -> Iterator[Client]:
    (tmp_path / "below").mkdir()
    one = Client(shim, tmp_path / "below", tmp_path / "clock")
    yield one
    one.close()


def test_attributes_are_told_late_and_data_at_once(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "below" / "file"
    file.write_text("old")
    looks = [f"os.stat({str(file)!r})", f"os.stat('file', dir_fd=os.open({str(file.parent)!r}, 0))"]
    before = [client.ask(f"({look}).st_mtime_ns, ({look}).st_size") for look in looks]
    assert before == [(file.stat().st_mtime_ns, 3)] * 2
    file.write_text("rather new")
    os.utime(file, (1, 1))
    assert [client.ask(f"({look}).st_mtime_ns, ({look}).st_size") for look in looks] == before
    assert client.ask(f"os.path.getsize({str(file)!r})") == 3
    client.ask("time.sleep(3.1)")
    assert client.ask(f"({looks[0]}).st_mtime_ns, ({looks[0]}).st_size") == (10**9, 10)
    file.write_text("newest")
    assert client.ask(f"({looks[0]}).st_size") == 10
    # Opening it asks the server again.
    assert client.ask(f"open({str(file)!r}).read()") == "newest"
    assert client.ask(f"({looks[0]}).st_size") == 6


def test_what_a_process_writes_itself_it_knows(client: Client, tmp_path: Path) -> None:
    file = str(tmp_path / "below" / "file")
    client.ask(f"globals().update(file=open({file!r}, 'wb', buffering=0))")
    assert client.ask("os.fstat(file.fileno()).st_size, file.write(b'12'), os.fstat(file.fileno()).st_size") == (
        0,
        2,
        2,
    )
    assert not client.ask(f"os.path.exists({file!r} + '2')")
    client.ask(f"os.link({file!r}, {file!r} + '2')")
    assert client.ask(f"os.path.exists({file!r} + '2')")


def test_a_missing_name_stays_missing_until_its_folder_is_opened(client: Client, tmp_path: Path) -> None:
    folder = str(tmp_path / "below")
    ways = {
        "a": "there(os.open, {path!r}, 0)",
        "b": "os.access({path!r}, 0)",
        "c": "os.path.exists({path!r})",
        "d": "there(lambda: os.open('d', 0, dir_fd=fd))",
    }

    def asked() -> list[bool]:
        return [client.ask(way.format(path=f"{folder}/{name}")) for name, way in sorted(ways.items())]

    client.ask(f"globals().update(fd=os.open({folder!r}, 0))")
    assert asked() == [False] * 4
    for name in ways:
        (tmp_path / "below" / name).touch()
    assert asked() == [False] * 4
    client.ask(f"os.close(os.open({str(tmp_path)!r}, 0))")
    assert asked() == [False] * 4, "another folder was opened"
    client.ask(f"os.close(os.open({folder!r}, os.O_DIRECTORY))")
    assert asked() == [True] * 4


def test_listing_a_folder_opens_it(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "below" / "name"
    assert not client.ask(f"os.path.exists({str(path)!r})")
    path.touch()
    assert not client.ask(f"os.path.exists({str(path)!r})")
    assert client.ask(f"os.listdir({str(path.parent)!r})") == ["name"]
    assert client.ask(f"os.path.exists({str(path)!r})")


def test_only_the_wall_clock_jumps(client: Client, tmp_path: Path) -> None:
    clocks = "time.time(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic()"
    before = client.ask(clocks)
    for hours in (5, -7):
        (tmp_path / "clock").write_text(str(hours * 3600))
        after = client.ask(clocks)
        assert [round((late - early) / 3600) for early, late in zip(before, after, strict=True)] == [hours, hours, 0]


def test_other_folders_are_left_alone(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "beside"
    assert not client.ask(f"os.path.exists({str(path)!r})")
    path.write_text("1")
    assert client.ask(f"os.path.getsize({str(path)!r})") == 1
    path.write_text("12")
    assert client.ask(f"os.path.getsize({str(path)!r})") == 2
