"""A node of a cluster that has another version of Fluid than the driver: it is refused, in one sentence."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import eventually

pytest.importorskip("ray")
from fluid.backends.base import DeviceBinding, LaneDying, LaneExited
from fluid.backends.hosts.folders import SessionFolders
from fluid.backends.hosts.host import HostSettings
from fluid.backends.ray import launcher as ray_launcher
from fluid.backends.ray import remote
from fluid.backends.ray.host_actor import ActorEnded, Checked, HostStart
from fluid.backends.ray.launcher import RayLauncher
from fluid.processes import handshake
from fluid.resources import Device
from fluid.wire import VERSION

pytestmark = pytest.mark.ray

REFUSED = (
    f"lost the host that it came from, which cannot be used: it runs Fluid 0.0.1 and the driver Fluid {VERSION}: "
    "install the same"
)


class Actors:
    """In place of Ray: starts nothing, and says of each host that is checked that its actor has died."""

    def __init__(self, *_: Any) -> None:
        self.started: list[HostStart] = []
        self.killed: list[int] = []
        self.news: list[Any] = []

    def start(self, node: str, start: HostStart) -> None:
        self.started.append(start)

    def kill(self, number: int) -> None:
        self.killed.append(number)

    def check(self, number: int) -> None:
        self.news += [ActorEnded(number, "died: its connection was closed"), Checked(number)]

    def request(self, work: Callable[[], None]) -> None:
        pass

    def take(self) -> list[Any]:
        news, self.news = self.news, []
        return news

    def close(self, hosts: Any) -> bool:
        return True


class Launching:
    """A launcher with a device on another node, for which a lane was asked."""

    def __init__(self, folder: Path) -> None:
        devices: Any = SimpleNamespace(
            devices=(Device(0, host="10.0.0.7"),),
            node="here",
            ip="127.0.0.1",
            node_of=lambda index: "there",
            node_at=lambda node: SimpleNamespace(ip="127.0.0.1", object_store_bytes=0.0),
            close=lambda seconds: None,
        )
        settings = HostSettings(SessionFolders("0a" * 8, str(folder), True))
        self.launcher = RayLauncher(devices, settings, in_process=True, gpu_tokens=lambda node: ())
        self.actors: Any = self.launcher.actors
        self.launcher.launch(3, DeviceBinding((0,), "cpu", node="there"))
        self.reports: list[Any] = []

    def connect(self, number: int) -> Any:
        """Connects as a host, or its lane, does; returns the other end of the connection."""
        (start,) = self.actors.started
        assert start.settings.driver is not None
        found: list[Any] = []
        client = threading.Thread(
            target=lambda: found.extend(handshake.connect_all(start.settings.driver, start.settings.key, [number]))
        )
        client.start()
        while client.is_alive():
            self.poll()
            client.join(0.01)
        self.poll()
        return found[0]

    def poll(self) -> list[Any]:
        self.reports += self.launcher.poll()
        return self.reports


@pytest.fixture
def launching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launching]:
    monkeypatch.setattr(ray_launcher, "HostActors", Actors)
    (tmp_path / "run").mkdir()
    made = Launching(tmp_path / "run")
    yield made
    made.launcher.close()


def test_a_host_of_another_version_is_refused_whatever_ray_says_of_its_end(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "VERSION", "0.0.1")
    with launching.connect(launching.actors.started[0].number) as sock:
        eventually(lambda: any(isinstance(report, LaneExited) for report in launching.poll()))
        assert launching.reports == [LaneDying(3), LaneExited(3, REFUSED)]
        assert sock.recv(100) == b"", "nothing was sent to it"
    assert launching.actors.killed == [launching.actors.started[0].number]


def test_a_host_of_this_version_is_used(launching: Launching) -> None:
    with launching.connect(launching.actors.started[0].number) as sock:
        launching.poll()
        assert sock.recv(100) != b"" and launching.reports == []


def test_a_lane_of_another_version_is_not_connected(launching: Launching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "VERSION", "0.0.1")
    with launching.connect(3) as sock:
        assert sock.recv(100) == b"" and launching.reports == []


# -- calls -----------------------------------------------------------------------------------------------------------


class Creates:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_call_of_another_version_is_refused_before_anything_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    make, created = remote._made_by_value(), tmp_path / "created"
    data = pickle.dumps((len, (Creates(str(created)),)))
    told = f"this node has Fluid {VERSION} and the driver 0.0.1: install the same on both"
    with pytest.raises(ImportError, match=told):
        make(([], "", "0.0.1", data))
    assert not created.exists()
    with pytest.raises(TypeError):  # The length of what os.mkdir returns.
        make(([], "", VERSION, data))
    assert created.exists()


def test_a_call_of_this_version_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert remote._made_by_value()(remote.pickled(max, 3, 7)) == 7
