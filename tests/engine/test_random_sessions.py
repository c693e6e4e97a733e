"""The engine under random events: its invariants hold after each, and everything ends."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fluid.testing.fake_backend import Chances
from fluid.testing.random_sessions import RandomSession, random_session

#: A fraction of a byte blocked a device; a lane that was ended freed less than it took; a trial of unknown need waited
#: for devices that kept states overfilled; a state stayed for calls that waited for iterations after it; trials that
#: took turns counted as fused on a device that they shared; a device that retired was not seen to be empty; a trial
#: waited for faster devices that were idle, or for ever; an urgent one that was narrowed was not tried again; a trial
#: that left the queue left the device idle that was kept for it; a lane of several devices was ended for want of memory
#: on one of them, and nothing started on the others; the only device was cleared in vain, time after time.
_FAILED_ONCE = (90182, 90282, 90408, 1000022, 1000654, 1000771, 1000953, 1001163, 1011084, 1011228, 1011234, 1011833)
_FAILED_ONCE += (2006199, 2007054, 2011852, 5003552, 6002115, 6002410, 7007488, 7009739, 7011286, 8010824)


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis chooses the steps, and shortens those that break something."""

    session: RandomSession

    @initialize(
        seed=st.integers(0, 2**16),
        planner=st.sampled_from(["portfolio", "dynamic", "static", "fifo"]),
        trouble=st.booleans(),
    )
    def begin(self, seed: int, planner: str, trouble: bool) -> None:
        chances = Chances(0.02, 0.02, 0.02, 0.1, 0.1, 0.3, 0.1, 6.0, ask=0.05) if trouble else Chances(own_save=0.2)
        self.session = RandomSession(random.Random(seed), chances, planner)

    @rule(count=st.integers(1, 6))
    def submit(self, count: int) -> None:
        self.session.submit(count)

    @rule()
    def add_trial(self) -> None:
        self.session.add_trial()

    @rule()
    def extend(self) -> None:
        self.session.extend()

    @rule()
    def stop(self) -> None:
        self.session.stop()

    @rule()
    def call(self) -> None:
        self.session.call()

    @precondition(lambda self: self.session.requests)
    @rule()
    def answer_request(self) -> None:
        self.session.answer_request()

    @rule()
    def forget(self) -> None:
        self.session.forget()

    @rule()
    def submit_nonsense(self) -> None:
        self.session.submit_nonsense()

    @precondition(lambda self: len(self.session.state.occupancy) < 6)
    @rule()
    def add_device(self) -> None:
        self.session.add_device()

    @rule()
    def lose_device(self) -> None:
        self.session.lose_device()

    @rule()
    def kill_lane(self) -> None:
        self.session.kill_lane()

    # Several of these, so that lanes get on with their work between two troubles.
    @rule(steps=st.integers(1, 20))
    def work(self, steps: int) -> None:
        self.session.work(steps)

    @rule(steps=st.integers(1, 20))
    def work_and_hear(self, steps: int) -> None:
        self.session.work(steps)
        self.session.hear()

    @rule()
    def hear(self) -> None:
        self.session.hear()

    @rule()
    def hear_and_tick(self) -> None:
        self.session.hear()
        self.session.tick()

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestEngineMachine: Any = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_a_long_random_session_keeps_its_invariants_and_ends(seed: int) -> None:
    random_session(seed, steps=250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", _FAILED_ONCE)
def test_a_session_that_broke_something_once_does_no_more(seed: int) -> None:
    random_session(seed, steps=250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_many_long_random_sessions(seed: int) -> None:
    random_session(seed, steps=600)
