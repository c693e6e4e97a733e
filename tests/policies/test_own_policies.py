"""Policies of one's own beside Fluid's: what they propose too late, and devices that two of them choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import NotePlaced, NotePreempted, Notice, ReportEnd
from fluid.engine.core import SessionState
from fluid.engine.events import Alarm, DeviceAdded, GroupSubmitted, Tick, TrialSpec
from fluid.engine.policy import Policy, Preempt
from fluid.engine.records import TrialRecord
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.testing.validate import validate_state


def run(*further: Callable[[SessionState], Policy], trials: int) -> list[Any]:
    """Runs trials of 3 s on two devices; returns what the submitter and the journal were told."""
    backend = SimulatedBackend(lambda trial_id, config: Truth(seconds=1.0), [Device(0), Device(1)])
    engine = EngineState(make_planner("fifo"), further=further)
    specs = tuple(TrialSpec(f"t{number}", budget=3) for number in range(trials))
    events: list[Any] = [*(DeviceAdded(0.0, device) for device in backend.devices()), GroupSubmitted(0.0, "g", specs)]
    told: list[Any] = []
    while sum(isinstance(notice, ReportEnd) for notice in told) < trials:
        commands = engine.handle(*events)
        validate_state(engine)
        told += [command for command in commands if isinstance(command, Notice)]
        backend.execute([command for command in commands if not isinstance(command, Notice)])
        alarm_at = float("inf") if engine.alarm_at is None else engine.alarm_at
        if engine.wants_tick and backend.next_at() > backend.now():
            events = [Tick(backend.now())]
        elif alarm_at < backend.next_at():
            backend.clock.advance_to(alarm_at)
            events = [Alarm(alarm_at)]
        else:
            events = backend.poll()
    return told


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
