"""Lanes as clients of an MPS daemon that Fluid did not start: a real daemon process of the stand-in program."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mps_program import Fake
from waiting import eventually

from fluid.backends.hosts.gpu import sharing as gpu_sharing
from fluid.backends.local import LocalBackend
from fluid.engine.commands import KillLane, RunIteration, StartLane, StartTrial
from fluid.engine.events import IterationDone, LaneLost
from fluid.gpu import mps_foreign
from fluid.gpu.mps_foreign import ForeignDaemon
from fluid.trainables.payload import payload_of


class Probe:
    """Says in which process it runs, and which daemon that is a client of."""

    def setup(self, config: dict[str, Any]) -> None:
        pass

    def step(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "pipe": os.environ["CUDA_MPS_PIPE_DIRECTORY"]}


@pytest.fixture
def folder(fake: Fake, tmp_path: Path) -> Iterator[Path]:
    """The pipe folder of a daemon that runs, and has a server."""
    folder = tmp_path / "pipe"
    folder.mkdir()
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    daemon = subprocess.Popen([fake.program, "-f"], env=environment, stdout=subprocess.DEVNULL)
    eventually(lambda: (folder / "control").exists())
    tell(fake, folder, f"start_server -uid {os.getuid()}")
    (fake.told / "start_server").unlink()
    yield folder
    tell(fake, folder, "quit")
    daemon.wait()


def tell(fake: Fake, folder: Path, command: str) -> None:
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(folder)}
    subprocess.run([fake.program], input=f"{command}\n", text=True, check=True, env=environment)


@pytest.fixture
def backend(fake: Fake, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    """Two devices that stand in for GPUs, in a job with a daemon of its own."""
    monkeypatch.setattr(gpu_sharing, "foreign_daemon", lambda environment: str(folder))
    monkeypatch.setattr(gpu_sharing, "find_program", lambda: str(fake.program))
    # A path in which gpu_sharing asks for the machine's daemon, and which is of no other use in time slices.
    monkeypatch.setattr("fluid.backends.local._LocalBindings.token", lambda self, device: f"GPU-{device.index}")
    with LocalBackend(2, run_dir=tmp_path / "run", preload=[], grace=0.2) as made:
        yield made


def run(drive: Any, backend: LocalBackend, name: str, lane: int) -> dict[str, Any]:
    backend.register(name, payload_of(Probe, {}))
    drive.do(StartTrial(name, (lane,), iterations=1))
    return dict(drive.of(IterationDone, name).metrics)


@pytest.mark.slow
def test_a_fault_that_it_reports_ends_the_lanes_of_the_gpu_and_new_ones_wait(
    backend: LocalBackend, fake: Fake, folder: Path, make_drive: Any
) -> None:
    drive = type(make_drive())(backend)
    suspect, idle, elsewhere = drive.lanes(0, 0, 1)
    seen, before = run(drive, backend, "suspect", suspect), run(drive, backend, "other", elsewhere)
    assert seen["pipe"] == str(folder)
    (folder / "fault").touch()
    os.kill(seen["pid"], signal.SIGKILL)
    lost = {event.lane_id: event for event in (drive.until(LaneLost), drive.until(LaneLost))}
    assert {lane: event.blameless for lane, event in lost.items()} == {suspect: False, idle: True}
    assert "is in FAULT" in lost[idle].reason
    drive.do(StartLane(50, 0), RunIteration("other", (elsewhere,), 1))
    assert drive.of(IterationDone, "other").metrics["pid"] == before["pid"], "another GPU"
    assert 50 not in backend._host._running, "it waits until the server accepts clients"
    (folder / "fault").unlink()
    run(drive, backend, "again", 50)
    told = set(os.listdir(fake.told))
    assert not told & {"start_server", "quit", "terminate_client"}, "the daemon was asked, and told nothing"


@pytest.mark.slow
def test_a_death_without_a_fault_takes_no_other_lane_along(backend: LocalBackend, make_drive: Any) -> None:
    drive = type(make_drive())(backend)
    one, other = drive.lanes(0, 0)
    os.kill(run(drive, backend, "one", one)["pid"], signal.SIGKILL)
    assert drive.until(LaneLost).lane_id == one
    run(drive, backend, "other", other)


def test_the_work_of_its_clients_is_not_ended_by_it(backend: LocalBackend, fake: Fake, make_drive: Any) -> None:
    drive = type(make_drive())(backend)
    (lane,) = drive.lanes(0)
    run(drive, backend, "t", lane)
    drive.do(KillLane(lane, "was killed in a test", at=0.0))
    assert drive.until(LaneLost).reason == "was killed in a test"
    assert not (fake.told / "terminate_client").exists()


def test_new_lanes_do_not_wait_for_ever(
    backend: LocalBackend, folder: Path, make_drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of other programs may keep the server in FAULT."""
    monkeypatch.setattr(mps_foreign, "_MOST_WAIT_S", 0.3)
    monkeypatch.setattr(mps_foreign, "_LOOK_S", 0.01)
    drive = type(make_drive())(backend)
    (lane,) = drive.lanes(0)
    seen = run(drive, backend, "t", lane)
    (folder / "fault").touch()
    os.kill(seen["pid"], signal.SIGKILL)
    drive.until(LaneLost)
    run(drive, backend, "again", *drive.lanes(0))


def test_the_wait_ends_when_the_backend_is_closed(backend: LocalBackend, folder: Path, make_drive: Any) -> None:
    drive = type(make_drive())(backend)
    (lane,) = drive.lanes(0)
    seen = run(drive, backend, "t", lane)
    (folder / "fault").touch()
    os.kill(seen["pid"], signal.SIGKILL)
    drive.until(LaneLost)
    eventually(lambda: not backend._host._sharing.watchdogs[0].is_ready)
    backend.close()


def test_a_daemon_that_does_not_answer_is_no_fault(fake: Fake, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = ForeignDaemon(str(fake.program), str(folder))
    (folder / "fault").touch()
    assert "is in FAULT" in daemon.problem()
    fake.tell("busy")
    with caplog.at_level(logging.WARNING):
        assert (daemon.problem(), daemon.problem()) == ("", "")
    assert len(caplog.records) == 1 and "temporarily unavailable" in caplog.text
