"""Which lanes are told of checkpoints."""

from __future__ import annotations

import socket
from typing import Any

from fluid.backends.base import LaneConnected
from fluid.backends.lanes.connections import LaneConnections
from fluid.backends.lanes.retention import LaneRetention


def test_a_lane_that_runs_is_told_rather_than_one_that_is_being_started() -> None:
    unused: Any = None  # Only waiting needs the launcher.
    lanes = LaneConnections(unused)
    retention = LaneRetention(lanes, unused)
    ours, theirs = socket.socketpair()
    with theirs:
        first = lanes.add(0)
        assert retention.one_per_host() == {"localhost": first}, "its messages wait for it"
        runs, _ = lanes.add(1), lanes.add(2)  # The last may be on another machine: that shows once it has connected.
        lanes.connect(LaneConnected(1, ours, "localhost"))
        assert retention.one_per_host() == {"localhost": runs}
        lanes.close()
