"""Devices on several hosts, on the simulated backend: trials are on one host where they can be, near their state."""

from __future__ import annotations

from engine_helpers import Known

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, Notice, Resize, StartTrial
from fluid.engine.events import BudgetExtended, DeviceAdded, DeviceLost, Event, GroupSubmitted, Tick, TrialSpec
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.testing.validate import validate_state


class Run:
    """An engine and a simulated backend.

    Args:
        layout: a device per letter, on the host of that name.
        saves: whether every iteration is saved.
        packing: c.
    """

    def __init__(self, layout: str, *, saves: bool = False, packing: int = 1) -> None:
        devices = [Device(index, host=host) for index, host in enumerate(layout)]
        self.backend = SimulatedBackend(lambda _, __: Truth(seconds=1.0), devices, saves=saves)
        self.state = EngineState(make_planner("portfolio"), Known(packing=packing))
        self.log: list[Command] = []
        self.handle(*(DeviceAdded(0.0, device) for device in devices))

    def handle(self, *events: Event) -> None:
        commands = self.state.handle(*events)
        validate_state(self.state)
        self.backend.execute([command for command in commands if not isinstance(command, Notice)])
        self.log += commands

    def submit(self, *trials: TrialSpec) -> None:
        self.handle(GroupSubmitted(self.backend.now(), f"group-{trials[0].trial_id}", trials))

    def until(self, time: float) -> None:
        """Handles everything that happens up to a time."""
        while True:
            if self.backend.next_at() > self.backend.now() and self.state.wants_tick:
                self.handle(Tick(self.backend.now()))
            elif self.backend.next_at() > time:
                return
            else:
                self.handle(*self.backend.poll())

    def devices(self, trial_id: str) -> tuple[int, ...]:
        """The devices that a trial holds."""
        return self.state.occupancy.held.get(self.state.trials[trial_id].row, ())

    def moves(self, trial_id: str) -> int:
        """How often a trial was started or resized."""
        return sum(isinstance(one, (StartTrial, Resize)) and one.trial_id == trial_id for one in self.log)


def test_a_wide_trial_starts_on_one_host() -> None:
    run = Run("aabbb")
    run.submit(TrialSpec("wide", 9, max_width=3), TrialSpec("narrow", 3))
    run.until(0.5)
    assert run.devices("wide") == (2, 3, 4) and run.devices("narrow") == (0,)


def test_a_trial_widens_where_it_is_or_moves_to_a_host_that_can_hold_it() -> None:
    for layout, expected in (("ababa", (0, 2, 4)), ("ababb", (1, 3, 4))):
        run = Run(layout)
        run.submit(TrialSpec("long", 30, max_width=3), *(TrialSpec(f"short-{number}", 12) for number in range(4)))
        run.until(11.5)
        assert run.devices("long") == (0,)
        run.until(14.5)
        assert run.devices("long") == expected
        assert run.moves("long") == 2, "it was started, and resized once"


def test_a_trial_that_moves_to_another_host_ends_as_early_as_on_two() -> None:
    run = Run("abb")
    run.submit(TrialSpec("long", 20, max_width=2), TrialSpec("short", 12), TrialSpec("other", 12))
    run.until(11.5)
    assert run.devices("long") == (0,)
    run.until(99.0)
    assert run.state.trials["long"].state == "DONE"
    widened = next(one for one in run.log if isinstance(one, Resize))
    assert len(widened.lane_ids) == 2 and not set(widened.lane_ids) & set(widened.old_lane_ids)
    assert run.backend.now() == 13.0 + 7 / 2, "13 iterations of a second, and 7 of half a second"


def test_idle_devices_go_to_the_trials_on_their_hosts() -> None:
    run = Run("abbc")
    run.submit(
        TrialSpec("longer", 30, max_width=2),
        TrialSpec("long", 28, max_width=2),
        TrialSpec("short-b", 2),
        TrialSpec("short-c", 2),
    )
    run.until(0.5)
    assert [run.devices(name) for name in ("longer", "long", "short-b", "short-c")] == [(0,), (1,), (2,), (3,)]
    run.until(4.5)
    assert run.devices("long") == (1, 2) and run.devices("longer") == (0, 3)


def test_a_trial_that_lost_its_device_is_restored_where_its_checkpoint_is() -> None:
    run = Run("bab", saves=True)
    run.submit(TrialSpec("a", 9))
    run.until(2.5)
    assert run.devices("a") == (0,)
    run.handle(DeviceLost(run.backend.now(), 0))
    run.until(2.5)
    assert run.devices("a") == (2,)


def test_a_trial_whose_device_was_taken_goes_on_near_its_state() -> None:
    run = Run("bab")
    run.submit(TrialSpec("a", 2))
    run.until(3.0)
    run.submit(TrialSpec("other", 9))
    run.until(3.0)
    assert run.devices("other") == (0,)
    run.handle(BudgetExtended(run.backend.now(), "a", 2))
    run.until(3.5)
    assert run.devices("a") == (2,)


def test_a_packed_trial_joins_one_on_the_host_of_its_checkpoint() -> None:
    run = Run("baba", saves=True, packing=2)
    names = [f"trial-{number}" for number in range(4)]
    run.submit(*(TrialSpec(name, 9) for name in names))
    run.until(2.5)
    assert [run.devices(name) for name in names] == [(0,), (1,), (2,), (3,)]
    run.handle(DeviceLost(run.backend.now(), 3))
    run.until(2.5)
    assert run.devices("trial-3") == (1,)
