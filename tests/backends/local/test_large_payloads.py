"""Large trainables and configs on the local backend: one file for all lanes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.sockets import FramedSocket
from fluid.backends.lanes import registry
from fluid.engine.commands import StartTrial, StopTrial
from fluid.engine.events import IterationDone, TrialFailed, TrialReleased
from fluid.trainables.payload import payload_of
from fluid.wire import encode

LANES = 8
SIZE = 1 << 20


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the RAM disk."""
    (tmp_path / "ram").mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(tmp_path / "ram"))
    return tmp_path / "ram"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each batch that the driver sends."""
    batches: list[int] = []
    send = FramedSocket.send

    def counted(self: FramedSocket, messages: Any) -> None:
        batches.append(len(encode(messages)))
        send(self, messages)

    monkeypatch.setattr(FramedSocket, "send", counted)
    return batches


def kept(ram: Path) -> list[str]:
    """The payloads that hosts keep: what each is, without its digest."""
    return sorted(file.name.partition("-")[0] for file in ram.glob("*/.payloads/*/*"))


def tail_of(data: bytes) -> Callable[[Any], Iterator[dict[str, Any]]]:
    """Returns a trainable that has the data, and tells the end of it and of the config's."""

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if config.get("raises"):
            raise ValueError("no")
        while True:
            yield {"data": data[-1], "config": config.get("data", b"-")[-1]}

    return train


def test_lanes_of_a_host_share_one_file(
    make_drive: Any, ram: Path, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_KEPT", 0)
    drive = make_drive(LANES)
    lanes = drive.lanes(*range(LANES))
    payload = payload_of(tail_of(os.urandom(SIZE) + b"\x07"), {})
    for lane in lanes:
        drive.backend.register(f"t{lane}", payload)
    drive.do(*(StartTrial(f"t{lane}", (lane,), iterations=1) for lane in lanes))
    assert [drive.of(IterationDone, f"t{lane}").metrics["data"] for lane in lanes] == [7] * LANES
    assert max(sent) < SIZE
    assert kept(ram) == ["trainable"]
    drive.do(*(StopTrial(f"t{lane}", (lane,)) for lane in lanes))
    for lane in lanes:
        drive.of(TrialReleased, f"t{lane}")
        assert kept(ram) == ["trainable"]
        drive.backend.forget(f"t{lane}")
    assert kept(ram) == []


def test_a_config_is_kept_until_its_trial_has_ended(make_drive: Any, ram: Path, sent: list[int]) -> None:
    drive = make_drive(2)
    first, second = drive.lanes(0, 1)
    for trial_id, config in {"a": {}, "same": {}, "bad": {"raises": True}}.items():
        drive.backend.register(trial_id, payload_of(tail_of(b"-"), {"data": bytes(SIZE) + b"\x08", **config}))
    drive.do(StartTrial("a", (first,), iterations=1))
    assert drive.of(IterationDone, "a").metrics["config"] == 8
    drive.do(StartTrial("same", (second,), iterations=1))
    assert drive.of(IterationDone, "same").metrics["config"] == 8
    assert kept(ram) == ["config"]
    drive.do(StopTrial("a", (first,)))
    drive.of(TrialReleased, "a")
    assert kept(ram) == []
    drive.do(StartTrial("a", (first,), iterations=1))  # It is extended.
    assert drive.of(IterationDone, "a").metrics["config"] == 8
    assert kept(ram) == ["config"]
    drive.do(StartTrial("bad", (second,), iterations=1))
    assert "no" in drive.of(TrialFailed, "bad").failure.message
    assert kept(ram) == ["config"]
    drive.backend.forget("a")
    drive.backend.forget("bad")
    assert kept(ram) == ["config"]  # One trial has still the same.
    drive.backend.forget("same")
    assert kept(ram) == []
    assert max(sent) < SIZE


def test_nothing_is_kept_after_the_session(make_drive: Any, ram: Path) -> None:
    drive = make_drive(1)
    (lane,) = drive.lanes(0)
    drive.backend.register("a", payload_of(tail_of(bytes(SIZE)), {"data": bytes(SIZE)}))
    drive.do(StartTrial("a", (lane,), iterations=1))
    drive.of(IterationDone, "a")
    assert kept(ram) == ["config", "trainable"]
    drive.backend.close()
    assert os.listdir(ram) == []


def test_small_payloads_are_not_kept(make_drive: Any, ram: Path) -> None:
    drive = make_drive(1)
    (lane,) = drive.lanes(0)
    drive.backend.register("a", payload_of(tail_of(b"a"), {"data": b"b"}))
    drive.do(StartTrial("a", (lane,), iterations=1))
    drive.of(IterationDone, "a")
    assert list(ram.glob("*/.payloads")) == []


def test_payloads_that_were_lost_with_host_memory_are_kept_again(make_drive: Any, ram: Path) -> None:
    drive = make_drive(3)
    lanes = drive.lanes(0, 1, 2)
    payload = payload_of(tail_of(bytes(SIZE) + b"\x07"), {"data": bytes(SIZE) + b"\x08"})
    for lane in lanes:
        drive.backend.register(f"t{lane}", payload)
    drive.do(StartTrial("t0", (0,), iterations=1))
    drive.of(IterationDone, "t0")
    (folder,) = ram.glob("*/.payloads")
    shutil.rmtree(folder)
    drive.do(StartTrial("t1", (1,), iterations=1), StartTrial("t2", (2,), iterations=1))
    for trial_id in ("t1", "t2"):
        assert drive.of(IterationDone, trial_id).metrics == {"data": 7, "config": 8}
    assert kept(ram) == ["config", "trainable"]
