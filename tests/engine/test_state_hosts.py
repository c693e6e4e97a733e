"""A trial starts on the host whose memory holds its state, if that saves more than it costs."""

from __future__ import annotations

from engine_helpers import Hand, Known

from fluid.engine.events import LaneReady
from fluid.trialgroup import TrialState


class Hosts(Hand):
    """Two devices: a slow one on host "a", a fast one on host "b"; trial t has its state in the memory of a.

    Args:
        memory_s, host_s: seconds of a restore from memory and over the network; none were measured if both are 0.
        slow: speed of a's device; b's has speed 1.
        iterations: that t does once more.
        beside: speed of a further device on a; 0 for none.
    """

    def __init__(
        self, memory_s: float, host_s: float, slow: float = 1.0, iterations: int = 4, beside: float = 0.0
    ) -> None:
        profile = Known(packing=1, width=1)
        if memory_s or host_s:
            profile.restores.observe("key", "memory", memory_s)
            profile.restores.observe("key", "host", host_s)
        super().__init__(0, planner="fifo", profile=profile, max_packing=1, resident_limit=0)
        for index, (host, speed) in enumerate([("a", slow), ("b", 1.0), *([("a", beside)] if beside else [])]):
            self.add_device(index, host=host, speed=speed)
        self.submit("t", budget=1, profile_key="key", max_width=1)
        for lane in list(self.state.lanes):
            self.do(LaneReady(self.now, lane.lane_id))
        lane = self.lane("t")
        self.started("t")
        self.iterate("t")
        self.saved("t", lane, 1, dropped=True, in_memory=True, host="a")
        assert self.trial("t").state is TrialState.DONE
        self.extend("t", iterations)

    @property
    def started_on(self) -> int:
        return self.state.occupancy.held[self.trial("t").row][0]


def test_a_slower_device_is_taken_where_the_restore_saves_more() -> None:
    # Four iterations of a second: a device of speed 0.8 takes a second more.
    assert Hosts(memory_s=0.1, host_s=3.0, slow=0.8).started_on == 0


def test_a_faster_device_elsewhere_is_taken_where_that_saves_more() -> None:
    assert Hosts(memory_s=0.1, host_s=0.9, slow=0.8).started_on == 1
    assert Hosts(memory_s=0.1, host_s=3.0, slow=0.8, iterations=100).started_on == 1


def test_of_the_devices_on_its_host_the_faster_one_counts() -> None:
    assert Hosts(memory_s=0.1, host_s=3.0, slow=0.4, beside=0.8).started_on == 2


def test_where_restores_were_not_measured_speed_decides_and_else_the_host() -> None:
    assert Hosts(0.0, 0.0, slow=0.8).started_on == 1
    assert Hosts(0.0, 0.0).started_on == 0
