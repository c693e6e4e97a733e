"""What the driver knows of its lanes: which are to be killed, which are on one machine, which know a trainable."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluid.backends.base import LaneConnected
from fluid.backends.lanes.connections import LaneConnections
from fluid.backends.local.backend import LocalBackend
from fluid.lane import messages as m
from fluid.processes.open_files import allow_open_files


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[LaneConnections]:
    with LocalBackend(1, run_dir=tmp_path / "run", preload=[]) as backend:
        connections = LaneConnections(backend._host)
        yield connections
        connections.close()


def connect(lanes: LaneConnections, lane_id: int, host: str) -> socket.socket:
    """Connects a lane of that machine; returns the lane's end."""
    ours, theirs = socket.socketpair()
    lanes.connect(LaneConnected(lane_id, ours, host))
    return theirs


def test_lanes_are_overdue_in_order_of_their_deadlines(lanes: LaneConnections) -> None:
    first, second, third = map(lanes.add, range(3))
    for lane, at in ((first, 9.0), (second, 4.0), (third, 6.0), (third, 3.0)):
        lanes.kill_at(lane, at)
    assert lanes.earliest_kill == 3.0
    assert lanes.pop_overdue(5.0) == [third, second]
    assert lanes.pop_overdue(5.0) == []
    lanes.kill_at(first, None)
    assert lanes.earliest_kill is None


def test_a_lane_that_is_gone_has_no_deadline(lanes: LaneConnections) -> None:
    lane = lanes.add(0)
    lanes.leave(lane, 2.0)
    lanes.remove(lane)
    lanes.kill_at(lane, 1.0)
    assert lanes.earliest_kill is None


def test_one_lane_per_machine_that_was_not_told_to_end(lanes: LaneConnections) -> None:
    one, two, three, four = map(lanes.add, range(4))
    ends = [connect(lanes, lane_id, host) for lane_id, host in enumerate(("a", "a", "b"))]
    assert lanes.one_per_host() == [four, one, three]
    lanes.leave(one, 1.0)
    lanes.remove(three)
    assert lanes.one_per_host() == [four, two]
    lanes.leave(two, 1.0)
    assert lanes.one_per_host() == [four]
    for end in ends:
        end.close()


def test_only_lanes_that_know_a_trainable_are_told_to_drop_it(lanes: LaneConnections) -> None:
    knows, gone, other = map(lanes.add, range(3))
    assert lanes.learns(knows, 7) and lanes.learns(gone, 7) and lanes.learns(other, 8)
    assert not lanes.learns(knows, 7)
    lanes.remove(gone)
    lanes.drop_trainable(7)
    assert [lane.outbox for lane in (knows, other)] == [[m.DropTrainable(7)], []]
    assert lanes.learns(knows, 7)


def test_a_backend_of_many_lanes_raises_the_limit_of_open_files(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import resource
            from fluid.backends.local.backend import LocalBackend
            from fluid.engine.commands import StartLane

            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
            with LocalBackend(1, run_dir={str(tmp_path / "run")!r}, preload=[]) as backend:
                backend.execute([StartLane(0, 0)])
                print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    assert done.stdout == "True\n", done.stderr


def test_a_limit_that_suffices_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_open_files(before[0])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
