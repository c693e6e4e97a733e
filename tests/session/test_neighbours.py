"""Sessions that use the same cores or GPUs: the second one says so."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fluid import FluidExecutor
from fluid.backends.local import choose_devices
from fluid.resources import Device, available_cores
from fluid.session.folder.lock import FolderLock
from fluid.session.neighbours import Neighbours, SessionDevices, overlap

CORES = len(available_cores())


def devices(pid: int = 1, cpus: int = 0, cores: tuple[int, ...] = (0, 1), **facts: Any) -> SessionDevices:
    return SessionDevices(pid, f"/runs/{pid}", cpus, cores, **{"gpus": (), **facts})


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The lines of the log so far, of sessions that find none but this test's."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    caplog.set_level(logging.WARNING, "fluid")
    return lambda: [record.getMessage() for record in caplog.records]


def test_cores_are_shared_where_there_are_more_devices_than_cores() -> None:
    own = devices(cpus=1)
    assert overlap(own, [devices(2, cpus=1)]) == ((), ()), "one for each"
    assert overlap(own, [devices(2, cpus=2)]).cpu == (devices(2, cpus=2),)
    assert overlap(own, [devices(2, cpus=1), devices(3, cpus=1)]).cpu != ()
    assert overlap(own, [devices(2, cpus=8, cores=(2, 3))]) == ((), ()), "on cores of its own"
    assert overlap(own, [devices(2, cpus=2, cores=(1, 2))]) == ((), ()), "there are three cores in all"
    assert overlap(own, [devices(2, gpus=("GPU-1",))]) == ((), ())
    assert overlap(devices(gpus=("GPU-1",)), [devices(2, cpus=8)]) == ((), ())


def test_gpus_are_shared_where_they_are_the_same() -> None:
    own, same, other = (devices(pid, gpus=gpus) for pid, gpus in ((1, ("A", "B")), (2, ("B", "C")), (3, ("C",))))
    assert overlap(own, [same, other]) == ((), (same,))
    joined = msgspec.structs.replace(same, shared="/shared")
    assert overlap(msgspec.structs.replace(own, shared="/shared"), [joined]) == ((), ()), "by design"
    assert overlap(msgspec.structs.replace(own, shared="/other"), [joined]).gpu == (joined,)


def test_a_second_executor_on_the_same_cores_says_so(told: Callable[[], list[str]], tmp_path: Path) -> None:
    def made(name: str, **options: Any) -> FluidExecutor:
        return FluidExecutor(run_dir=tmp_path / name, **{"backend": "local", "devices": CORES, **options})

    with made("first"):
        assert told() == []
        made("quiet", verbose=0).close()
        made("replayed", backend="simulated").close()
        assert told() == []
        made("second", devices=1).close()
        (line,) = told()
        where = f"another executor of this process ({tmp_path / 'first'}) runs trials on {CORES} CPU devices"
        assert line.startswith(where) and f"and this executor on 1, where there are {CORES} cores" in line
    made("third").close()
    assert len(told()) == 1, "those before are gone"
    assert list((tmp_path / "runtime/fluid-sessions").iterdir()) == []


def test_a_session_of_another_process_counts_as_long_as_it_lives(told: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    program = f"""
from pathlib import Path
from fluid.session.folder.lock import FolderLock
from fluid.session.neighbours import Neighbours, SessionDevices
lock = FolderLock(Path({str(tmp_path / "run")!r}))
Neighbours(SessionDevices(4711, {str(tmp_path / "run")!r}, 9, (0, 1), ("GPU-1",)))
print("lives", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"lives\n"
    files = tmp_path / "runtime/fluid-sessions"
    (files / "torn.json").write_text("{")
    Neighbours(devices(1, cpus=1, gpus=("GPU-1", "GPU-2"))).leave()
    cpu, gpu = told()
    assert cpu.startswith(f"process 4711 ({tmp_path / 'run'}) runs trials on 9 CPU devices")
    assert gpu.startswith(f"process 4711 ({tmp_path / 'run'}) uses 1 of the 2 GPUs of this executor, too")
    other.kill()
    other.communicate()
    Neighbours(devices(1, cpus=1)).leave()
    assert len(told()) == 2 and [file.name for file in files.iterdir()] == ["torn.json"]
    FolderLock(tmp_path / "run").release()


def test_a_sweep_within_a_trial_is_no_neighbour_of_the_one_around_it(
    told: Callable[[], list[str]], tmp_path: Path
) -> None:
    program = "import sys, fluid; fluid.FluidExecutor(run_dir=sys.argv[1], backend='local', devices=1).close()"
    with FluidExecutor(run_dir=tmp_path / "outer", backend="local", devices=CORES):
        command = [sys.executable, "-c", program, str(tmp_path / "inner")]  # As a lane of it, or a script, does.
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "inner/session.json").exists() and found.stderr == ""


def test_no_folder_for_it_is_no_error(
    told: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime/fluid-sessions").write_text("a file")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no"))
    Neighbours(devices(cpus=1)).leave()
    assert told() == []


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        ([CORES + 5], True),
        (f"cpu:{CORES}", True),
        (["0", f"{CORES}"], True),
        ([0], False),
        ("cpu", False),
        (CORES + 3, False),
        ([Device(CORES + 5)], False),
    ],
)
def test_an_index_without_a_core_is_told(given: Any, is_told: bool, told: Callable[[], list[str]]) -> None:
    choose_devices(given, [])
    assert len(told()) == is_told
    if is_told:
        assert told()[0].startswith(f"devices={given!r}: there ") and "its trials run on any core" in told()[0]
