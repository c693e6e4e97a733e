"""Tests of fluid.backends.simulated: it answers as the commands say, in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fluid.backends.base import Backend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import (
    Fork,
    LimitRows,
    NoteDeviceLost,
    Pause,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (
    Checkpoint,
    Event,
    IterationDone,
    LaneReady,
    PausePurpose,
    ResizeDone,
    TrialForked,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.errors import FluidError
from fluid.measure.runtime_model import FusedRates
from fluid.planners.rollout import Segment
from fluid.resources import Device
from fluid.trainables.payload import payload_of


def backend(devices: int = 1, *, epsilon: float = 0.0, speed: float = 1.0, **truth: float) -> SimulatedBackend:
    """A backend with a ready lane on each device, of the device's number."""
    rows: dict[str, int] = {}
    made = SimulatedBackend(
        lambda trial_id, _: Truth(**{"seconds": 1.0, **truth}, row=rows.setdefault(trial_id, len(rows))),  # type: ignore[arg-type]
        (Device(index, speed=speed) for index in range(devices)),
        epsilon=epsilon,
    )
    made.execute([StartLane(index, index) for index in range(devices)])
    assert made.poll() == [LaneReady(0.0, index) for index in range(devices)]
    return made


def endless(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {}


def until(made: SimulatedBackend, time: float) -> list[Event]:
    events: list[Event] = []
    while made.next_at() <= time:
        events += made.poll()
    return events


def test_a_trial_starts_and_iterates() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=2)])
    assert until(made, 9.0) == [
        TrialStarted(0.0, "a", 0, iteration=0, seconds=0.0),
        IterationDone(1.0, "a", 0, iteration=1, seconds=1.0),
        IterationDone(2.0, "a", 0, iteration=2, seconds=1.0),
    ]
    assert made.next_at() == float("inf")
    assert made.segments == [Segment(0, 0.0, 2.0, (0,), 1.0)]


def test_it_goes_on_from_a_checkpoint_and_from_where_it_was() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=1, checkpoint=Checkpoint(4, ""))])
    assert until(made, 9.0)[-1] == IterationDone(1.0, "a", 0, iteration=5, seconds=1.0)
    made.execute([RunIteration("a", (0,), 1)])
    assert until(made, 9.0) == [IterationDone(2.0, "a", 0, iteration=6, seconds=1.0)]


def test_more_iterations_add_up() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=1), RunIteration("a", (0,), 2)])
    assert len([event for event in until(made, 9.0) if isinstance(event, IterationDone)]) == 3


def test_packed_trials_slow_one_another_down_while_they_share_a_device() -> None:
    made = backend(alpha=1.25)
    made.execute([StartLane(1, 0), StartTrial("a", (0,), iterations=2), StartTrial("b", (1,), iterations=1)])
    done = [event for event in until(made, 9.0) if isinstance(event, IterationDone)]
    assert [(event.trial_id, event.at) for event in done] == [("a", 1.25), ("b", 1.25), ("a", 2.25)]
    assert {segment.width for segment in made.segments} == {0.5}


def test_a_wide_trial_is_faster_by_what_beta_leaves() -> None:
    made = backend(2, beta=1.25, speed=2.0)
    made.execute([StartTrial("a", (0, 1), iterations=1)])
    assert until(made, 9.0)[-1] == IterationDone(0.3125, "a", 0, iteration=1, seconds=0.3125)
    assert made.segments == [Segment(0, 0.0, 0.3125, (0, 1), 2.0)]


def test_a_pause_takes_effect_between_two_iterations_and_is_always_answered() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=5)])
    until(made, 0.0)
    made.execute([Pause("a", (0,), purpose=PausePurpose.PREEMPT)])
    assert until(made, 9.0) == [
        IterationDone(1.0, "a", 0, iteration=1, seconds=1.0),
        TrialPaused(1.0, "a", 0, iteration=1, purpose=PausePurpose.PREEMPT),
    ]
    made.execute([Pause("a", (0,), purpose=PausePurpose.PREEMPT)])
    assert until(made, 9.0) == [TrialPaused(1.0, "a", 0, iteration=1, purpose=PausePurpose.PREEMPT)]
    made.execute([RunIteration("a", (0,), 1)])
    assert until(made, 9.0) == [IterationDone(2.0, "a", 0, iteration=2, seconds=1.0)]


def test_a_resize_costs_epsilon() -> None:
    made = backend(2, epsilon=0.25)
    made.execute([StartTrial("a", (0,), iterations=5)])
    until(made, 0.0)
    made.execute([Pause("a", (0,), purpose=PausePurpose.PREEMPT)])
    until(made, 1.0)
    made.execute([Resize("a", (0, 1), (0,), iterations=2)])
    assert until(made, 9.0) == [
        ResizeDone(1.25, "a", 0.25, 0),
        IterationDone(1.75, "a", 0, iteration=2, seconds=0.5),
        IterationDone(2.25, "a", 0, iteration=3, seconds=0.5),
    ]
    assert made.resizes == 1
    assert made.segments[-1] == Segment(0, 1.0, 2.25, (0, 1), 2.0, pause=0.25)


def test_every_lane_says_that_a_stopped_trial_has_left_it() -> None:
    made = backend(2)
    made.execute([StartTrial("a", (0, 1), iterations=5)])
    until(made, 0.0)
    made.execute([StopTrial("a", (0, 1))])
    assert until(made, 9.0)[1:] == [TrialReleased(0.5, "a", 0), TrialReleased(0.5, "a", 1)]


def test_the_other_lanes_of_a_wide_trial_let_go_and_the_first_goes_on_alone() -> None:
    made = backend(2)
    made.execute([StartTrial("a", (0, 1), iterations=1)])
    until(made, 9.0)
    made.execute([StopTrial("a", (1,))])
    assert made.poll() == [TrialReleased(0.5, "a", 1)]
    made.execute([RunIteration("a", (0,), 1)])
    assert until(made, 9.0) == [IterationDone(1.5, "a", 0, iteration=2, seconds=1.0)]


def test_a_trial_that_is_not_there_is_not_answered_for() -> None:
    made = backend()
    made.execute([StopTrial("a", (0,)), Pause("a", (0,), purpose=PausePurpose.PREEMPT), Save("a", (0,))])
    assert made.next_at() == float("inf")


def test_a_saved_trial_leaves_if_it_is_told_to() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=1)])
    until(made, 9.0)
    made.execute([Save("a", (0,)), Save("a", (0,), drop=True), Save("a", (0,))])
    saved = made.poll()
    assert [event.dropped for event in saved if isinstance(event, TrialSaved)] == [False, True]


@pytest.mark.parametrize("restart", [True, False])
def test_a_lane_that_ends_takes_its_trial_along(restart: bool) -> None:
    made = backend(2)
    made.execute([StartTrial("a", (0,), iterations=5)])
    until(made, 0.0)
    made.execute([StopLane(0)])
    assert made.next_at() == float("inf")
    if restart:
        made.execute([StartTrial("a", (1,), iterations=1)])
        assert until(made, 9.0)[-1] == IterationDone(1.0, "a", 1, iteration=1, seconds=1.0), (
            "nothing is left of its first life"
        )


def test_every_iteration_may_be_saved() -> None:
    made = SimulatedBackend(lambda *_: Truth(1.0), [Device(0)], saves=True)
    made.execute([StartLane(0, 0), StartTrial("a", (0,), iterations=1)])
    assert until(made, 9.0)[-1] == TrialSaved(1.0, "a", 0, Checkpoint(1, ""))


def test_it_is_a_backend() -> None:
    assert isinstance(backend(), Backend)


def test_time_passes_no_further_than_the_timeout_and_not_once_it_is_woken() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=1)])
    assert [type(event) for event in made.poll()] == [TrialStarted]
    assert made.poll(0.25) == [] and made.now() == 0.25
    made.wake()
    assert made.poll() == [] and made.now() == 0.25
    assert [type(event) for event in made.poll(90.0)] == [IterationDone] and made.now() == 1.0


def test_it_waits_to_be_woken_where_nothing_will_happen() -> None:
    made = backend()
    waiting = threading.Thread(target=made.poll)
    waiting.start()
    made.wake()
    waiting.join(90.0)
    assert not waiting.is_alive() and made.now() == 0.0


def test_a_trial_behaves_as_its_config_says() -> None:
    made = SimulatedBackend(lambda trial_id, config: Truth(config["seconds"]), [Device(0)])
    made.register("a", payload_of(endless, {"seconds": 3.0}))
    made.execute([StartLane(0, 0), StartTrial("a", (0,), iterations=1)])
    assert until(made, 9.0)[-1].at == 3.0


def test_what_is_no_command_is_refused_and_nothing_is_done() -> None:
    made = backend()
    for bad in (NoteDeviceLost(0, 0.0), StartLane(7, 7)):
        with pytest.raises(FluidError, match=r"no command for a backend|no device 7"):
            made.execute([StartTrial("a", (0,), iterations=1), bad])
    assert made.next_at() == float("inf")
    made.close()
    for call in (made.poll, lambda: made.execute([])):
        with pytest.raises(FluidError, match="closed"):
            call()


# --- fused trials


RATES = FusedRates.of({2: 1.2, 4: 2.0})


def packed(*keys: str | None) -> SimulatedBackend:
    """A backend with one lane, where trial number i has the i-th fusion key."""
    made = SimulatedBackend(lambda name, _: Truth(1.0, fusion_key=keys[int(name)], fused=RATES), [Device(0)])
    made.execute([StartLane(0, 0)])
    made.poll()
    return made


def steps(events: list[Event]) -> list[tuple[float, str, int, float, bool]]:
    """(at, trial, rows, seconds, settled) of each iteration."""
    done = [event for event in events if isinstance(event, IterationDone)]
    return [(event.at, event.trial_id, event.rows, event.seconds, event.settled) for event in done]


def start(made: SimulatedBackend, *names: str, iterations: int = 1) -> None:
    made.execute([StartTrial(name, (0,), iterations=iterations) for name in names])


def test_trials_of_one_key_that_run_at_once_in_a_lane_take_their_steps_together() -> None:
    made = packed("key", "key")
    start(made, "0", "1", iterations=2)
    events = until(made, 9.0)
    assert events[:2] == [TrialStarted(0.0, name, 0, iteration=0, seconds=0.0, fusion_key="key") for name in "01"]
    first, second = (1.2, 1.2, False), (2.4, 1.2, True)
    assert [(at, seconds, settled) for at, _, _, seconds, settled in steps(events)] == [first] * 2 + [second] * 2
    assert [(name, rows) for _, name, rows, _, _ in steps(events)] == [("0", 2), ("1", 2)] * 2


def test_a_trial_joins_at_the_next_step_and_leaves_after_one() -> None:
    made = packed("key", "key")
    start(made, "0", iterations=4)
    assert steps(until(made, 1.5)) == [(1.0, "0", 1, 1.0, True)]
    made.poll(0.5)
    start(made, "1", iterations=1)
    assert sorted((round(at, 9), name, rows) for at, name, rows, _, _ in steps(until(made, 9.0))) == [
        (2.0, "0", 1),
        (3.2, "0", 2),
        (3.2, "1", 2),
        (4.2, "0", 1),
    ]


def test_trials_of_other_keys_and_of_none_take_turns() -> None:
    made = packed("key", "key", "other", None)
    start(made, "0", "1", "2", "3", iterations=2)
    turns = [("0", 2), ("1", 2), ("2", 1), ("3", 1)]
    assert [(name, rows) for _, name, rows, _, _ in steps(until(made, 99.0))] == turns * 2


def test_a_lane_keeps_to_the_limit_of_rows() -> None:
    made = packed("key", "key", "key")
    made.execute([LimitRows(0, 2)])
    start(made, "0", "1", "2", iterations=3)
    assert [(name, rows) for _, name, rows, _, _ in steps(until(made, 2.5))] == [("0", 2), ("1", 2), ("2", 2), ("0", 2)]
    made.execute([LimitRows(0, 1)])
    assert [(name, rows) for _, name, rows, _, _ in steps(until(made, 9.0))] == [
        *[("1", 2), ("0", 2)],  # they had begun
        *[("2", 1), ("1", 1), ("2", 1)],
    ]


def test_packs_in_two_lanes_share_the_device_as_two_processes() -> None:
    truth = Truth(1.0, alpha=1.5, fusion_key="key", fused=RATES)
    made = SimulatedBackend(lambda _name, _config: truth, [Device(0)])
    made.execute([StartLane(0, 0), StartLane(1, 0)])
    made.poll()
    made.execute([StartTrial(f"{index}", (index // 2,), iterations=1) for index in range(4)])
    assert [round(at, 9) for at, *_ in steps(until(made, 9.0))] == [1.8] * 4


def test_a_trial_that_waits_for_its_turn_pauses_and_leaves_at_once() -> None:
    made = packed(None, None, None)
    start(made, "0", "1", "2", iterations=3)
    assert len(until(made, 0.5)) == 3
    made.poll(0.5)
    made.execute([Pause("1", (0,), purpose=PausePurpose.PREEMPT), StopTrial("2", (0,))])
    assert made.poll() == [
        TrialPaused(0.5, "1", 0, iteration=0, purpose=PausePurpose.PREEMPT),
        TrialReleased(0.5, "2", 0),
    ]
    assert [(at, name) for at, name, *_ in steps(until(made, 9.0))] == [(1.0, "0"), (2.0, "0"), (3.0, "0")]


def test_a_lane_that_stops_takes_its_pack_with_it() -> None:
    made = packed("key", "key")
    start(made, "0", "1")
    until(made, 0.0)
    made.execute([StopLane(0)])
    assert made.next_at() == float("inf")


def test_a_fork_is_answered_between_two_iterations_unless_its_parent_leaves() -> None:
    made = backend()
    made.execute([StartTrial("a", (0,), iterations=3), Fork("a", (0,), child="b", at=2)])
    made.execute([Fork("a", (0,), child="c", at=9)])
    checkpoint = Checkpoint(2, "", "localhost", in_memory=True)
    forked = TrialForked(2.0, "b", parent="a", lane_id=0, checkpoint=checkpoint)
    assert forked in until(made, 3.0)
    made.execute([StopTrial("a", (0,)), StartTrial("a", (0,), iterations=9)])
    assert not [event for event in until(made, 20.0) if isinstance(event, TrialForked)]
