"""Large trainables and configs on two nodes of a real cluster: each node is sent them once."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_drive import Drive, parent_of

from fluid.backends.hosts.sockets import FramedSocket
from fluid.engine.commands import StartTrial
from fluid.engine.events import IterationDone, LaneLost
from fluid.trainables.payload import payload_of
from fluid.wire import encode

pytest.importorskip("ray")

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_large_payload_crosses_the_network_once_per_node_and_again_for_a_new_host(
    make: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = []
    send = FramedSocket.send

    def counted(self: FramedSocket, messages: Any) -> None:
        crossed.append(len(encode(messages)))
        send(self, messages)

    monkeypatch.setattr(FramedSocket, "send", counted)
    data = os.urandom(8 << 20)

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"lengths": [len(data), len(config["data"])], "parent": os.getppid()}

    payload = payload_of(train, {"data": os.urandom(4 << 20)})
    once = len(payload.trainable.pickled) + len(payload.config)
    drive = make(None)
    trials = (f"t{number}" for number in itertools.count())

    def run(*lanes: int) -> int:
        """Runs a trial on each lane, all at once; returns the fork server."""
        names = list(itertools.islice(trials, len(lanes)))
        for name in names:
            drive.backend.register(name, payload)
        drive.do(*(StartTrial(name, (lane,), iterations=1) for name, lane in zip(names, lanes, strict=True)))
        seen = [drive.until(IterationDone, trial_id=name).metrics for name in names]
        assert all(metrics["lengths"] == [8 << 20, 4 << 20] for metrics in seen)
        return int(seen[0]["parent"])

    server = run(*drive.lanes(4, 4, 5, 5))
    assert once <= sum(crossed) < 1.1 * once
    run(*drive.lanes(4))
    run(*drive.lanes(0))  # The driver's own node.
    assert sum(crossed) < 1.1 * once
    os.kill(parent_of(parent_of(server)), signal.SIGKILL)
    for lane in (0, 1, 2, 3, 4):
        drive.until(LaneLost, lane_id=lane)
    run(*drive.lanes(4, 5))
    assert 2 * once <= sum(crossed) < 2.1 * once
