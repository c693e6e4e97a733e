"""Policies of one's own beside Fluid's: what they propose too late, and devices that two of them choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import NotePlaced, NotePreempted, Notice
from fluid.engine.core import SessionState
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.engine.policy import Policy, Preempt
from fluid.engine.records import TrialRecord
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.testing.play import play


def run(*further: Callable[[SessionState], Policy], trials: int) -> list[Notice]:
    """Runs trials of 3 s on two devices; returns what the submitter and the journal were told."""
    backend = SimulatedBackend(lambda trial_id, config: Truth(seconds=1.0), [Device(0), Device(1)])
    specs = tuple(TrialSpec(f"t{number}", budget=3) for number in range(trials))
    return play(EngineState(make_planner("fifo"), further=further), backend, GroupSubmitted(0.0, "g", specs))


class Hasty(Policy):
    """Proposes once, and twice, to pause every trial there is, whatever it does."""

    def __init__(self, core: SessionState) -> None:
        self._core = core
        self._is_over = False

    def propose(self) -> list[Preempt]:
        trials = [] if self._is_over else [*self._core.trials.values()] * 2
        self._is_over = True
        return [Preempt(trial) for trial in trials]


def test_proposals_for_trials_that_do_not_run_are_dropped() -> None:
    told = run(Hasty, trials=4)
    paused = [notice.trial_id for notice in told if isinstance(notice, NotePreempted)]
    assert sorted(paused) == ["t0", "t1"]


class Chooses(Policy):
    """Sends every trial to a device; ``None`` for none."""

    def __init__(self, device: int | None) -> None:
        self._device = device

    def target_of(self, trial: TrialRecord) -> int | None:
        return self._device


@pytest.mark.parametrize("second", [None, 0])
def test_the_first_policy_that_chooses_a_device_is_heard(second: int | None) -> None:
    told = run(lambda core: Chooses(1), lambda core: Chooses(second), trials=1)
    assert [notice.device_ids for notice in told if isinstance(notice, NotePlaced)] == [(1,)]
