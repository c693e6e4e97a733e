"""Device memory in the engine: what is learnt after a trial was placed, what lanes take, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import Save, StartLane, StartTrial, StopLane, StopTrial
from fluid.engine.events import (
    GroupSubmitted,
    LaneLost,
    LaneMeasured,
    LaneReady,
    PauseRequested,
    ResumeRequested,
    StateMeasured,
    TrialSpec,
)
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed

GB = 1e9


class Learns(Known):
    """A profile that knows all but memory, and learns that."""

    def observe_memory(self, key: str, memory: MemoryNeed, *, model: str | None = None, rows: int = 1) -> bool:
        self._need = MemoryNeed.most(*filter(None, (self._need, memory)))
        return True


def started(commands: list[Any]) -> list[str]:
    return [command.trial_id for command in commands if isinstance(command, StartTrial)]


def ready(hand: Hand, commands: list[Any], own_bytes: float = 0.0) -> list[Any]:
    """Makes the requested lanes ready."""
    lanes = [command.lane_id for command in commands if isinstance(command, StartLane)]
    return hand.do(*(LaneReady(hand.now, lane_id, own_bytes) for lane_id in lanes))


# --- What is learnt after a trial was placed


def test_a_need_that_was_measured_while_the_trial_runs_counts_against_others() -> None:
    """10 GB, and trials that turn out to need 6: the second is not placed beside the first."""
    hand = Hand(memory=10 * GB, profile=Profile(), max_packing=4)
    hand.submit("a", "b", budget=20)
    hand.started("a")
    hand.iterate("a", memory=MemoryNeed(5 * GB, 1 * GB))
    hand.iterate("a", 11)
    hand.tick()
    assert hand.state.estimates.packing(hand.trial("a")) == 2, "packing would be tried now"
    assert hand.states() == {"a": "RUNNING", "b": "QUEUED"}
    save = only(hand.iterate("a", 8), Save)
    hand.saved("a", save.lane_ids[0], 20, dropped=True)
    assert hand.states() == {"a": "DONE", "b": "STARTING"}


def test_trials_with_small_needs_are_still_packed() -> None:
    hand = Hand(memory=10 * GB, profile=Profile(), max_packing=4)
    hand.submit("a", "b", budget=20)
    hand.started("a")
    hand.iterate("a", memory=MemoryNeed(3 * GB, 1 * GB))
    hand.iterate("a", 11)
    hand.tick()
    assert hand.states() == {"a": "RUNNING", "b": "STARTING"}


def test_a_need_that_grows_counts_for_all_trials_of_its_key_and_keeps_others_off_the_device() -> None:
    hand = Hand(memory=10 * GB, profile=Learns(packing=4))
    specs = [TrialSpec(trial_id, 9) for trial_id in "ab"]
    specs.append(TrialSpec("c", 9, profile_key="other", memory=MemoryNeed(2 * GB)))
    ready(hand, hand.do(GroupSubmitted(0.0, "group", tuple(specs))))
    for trial_id in ("a", "b", "c"):
        hand.started(trial_id)
    hand.iterate("a", memory=MemoryNeed(3 * GB, 0.5 * GB))
    occupancy = hand.state.occupancy
    assert occupancy.memory.running_bytes(0) == 9 * GB, "b was not measured, and is of the same key"
    hand.submit("d", profile_key="other", memory=MemoryNeed(0.5 * GB))
    hand.tick()
    assert hand.states()["d"] == "QUEUED"
    hand.iterate("b", memory=MemoryNeed(4 * GB, 0.5 * GB))
    assert occupancy.memory.running_bytes(0) == 11 * GB, "more than the device has, and no trial is evicted"
    assert [hand.states()[trial_id] for trial_id in "abc"] == ["RUNNING"] * 3


def test_what_was_learnt_is_kept_when_a_resize_is_called_off() -> None:
    hand = Hand(memory=10 * GB, profile=Learns(packing=1))
    hand.submit("a", budget=50, max_width=2)
    hand.started("a")
    hand.add_device(1, 10 * GB)
    hand.tick()
    hand.iterate("a", memory=MemoryNeed(6 * GB))
    assert hand.states() == {"a": "RESIZING"}
    hand.submit("b", memory=MemoryNeed(1 * GB))  # It needs a device, so the widening is off.
    assert hand.states() == {"a": "RUNNING", "b": "STARTING"}
    occupancy = hand.state.occupancy
    assert [occupancy.memory.need_of(hand.trial(name).row) for name in "ab"] == [MemoryNeed(6 * GB), MemoryNeed(1 * GB)]


# --- What lanes take for themselves


def lane_bytes(hand: Hand, device: int = 0) -> float:
    """Bytes that count for lanes if one more trial came to the device."""
    occupancy = hand.state.occupancy
    return occupancy.memory.lane_bytes(device, len(occupancy.residents[device]) + 1)


def test_a_lane_takes_memory_for_as_long_as_it_lives() -> None:
    hand = Hand(memory=10 * GB, ready=False)
    hand.do(LaneReady(0.0, 0, 0.5 * GB))
    assert lane_bytes(hand) == 0.0, "room for one lane is beyond the watermark"
    ready(hand, hand.submit("a", "b", budget=1, memory=MemoryNeed(1 * GB)))
    assert lane_bytes(hand) == 1 * GB, "the second lane, which is not ready yet, and one more"
    for trial_id in "ab":
        hand.started(trial_id)
        hand.iterate(trial_id)
    assert lane_bytes(hand) == 0.5 * GB, "both lanes exist, and the next trial can use one"
    hand.lose(1)
    assert lane_bytes(hand) == 0.0
    hand.lose_device(0)
    hand.add_device(0, 10 * GB)
    assert lane_bytes(hand) == 0.0


def test_a_lane_that_takes_more_or_less_than_before() -> None:
    """What one lane takes is the estimate for the next; a wrong figure does not stay after it was corrected."""
    hand = Hand(memory=10 * GB, ready=False)
    hand.do(LaneReady(0.0, 0, 3 * GB))
    ready(hand, hand.submit("a", "b", memory=MemoryNeed(1 * GB)), 0.5 * GB)
    assert lane_bytes(hand) == 3.5 * GB
    hand.do(LaneMeasured(0.0, 0, 1 * GB))
    assert lane_bytes(hand) == 1.5 * GB
    hand.do(LaneMeasured(0.0, 1, 2 * GB))
    assert lane_bytes(hand) == 3 * GB
    hand.do(LaneLost(0.0, 1, "died"), LaneMeasured(0.0, 1, 9 * GB))
    assert lane_bytes(hand) == 2 * GB, "the lane in its place is not measured yet, and one more"


def test_memory_that_a_lane_gives_back_is_for_the_trials_that_wait() -> None:
    hand = Hand(memory=10 * GB, ready=False)
    hand.do(LaneReady(0.0, 0, 3 * GB))
    hand.submit("a", "b", memory=MemoryNeed(4 * GB))
    assert hand.states() == {"a": "STARTING", "b": "QUEUED"}
    hand.do(LaneMeasured(0.0, 0, 0.5 * GB))
    assert hand.states() == {"a": "STARTING", "b": "STARTING"}


def test_contexts_count_among_trials_that_share_a_device() -> None:
    """9 GB usable: four trials of 2 would fit, but not with the lanes that they need, ready or not."""
    for own_bytes, expected in ((0.0, 4), (0.5 * GB, 3)):
        hand = Hand(memory=10 * GB, ready=False)
        hand.do(LaneReady(0.0, 0, own_bytes))
        ready(hand, hand.submit(*"abcd", memory=MemoryNeed(2 * GB)), own_bytes)
        assert list(hand.states().values()).count("STARTING") == expected


def test_a_trial_that_is_alone_needs_no_room_for_its_own_lane() -> None:
    hand = Hand(memory=10 * GB, ready=False)
    hand.do(LaneReady(0.0, 0, 0.5 * GB))
    hand.submit("a", memory=MemoryNeed(9 * GB))
    assert hand.states() == {"a": "STARTING"}


def three_idle_lanes() -> Hand:
    """A device of 10 GB with lanes of 0.5, and a trial that is done and can be saved kept in the first."""
    hand = Hand(memory=10 * GB, ready=False)
    hand.do(LaneReady(0.0, 0, 0.5 * GB))
    ready(hand, hand.submit("a", "b", "c", budget=1, memory=MemoryNeed(1 * GB)), 0.5 * GB)
    for trial_id in "abc":
        hand.started(trial_id)
        hand.iterate(trial_id)
    for trial_id in "bc":
        lane = hand.trial(trial_id).residence.lane
        hand.stop(trial_id)
        hand.released(trial_id, lane)
    assert lane_bytes(hand) == 1 * GB
    return hand


def test_empty_lanes_are_ended_for_a_trial_that_needs_their_memory() -> None:
    hand = three_idle_lanes()
    commands = hand.submit("d", memory=MemoryNeed(7.5 * GB))
    assert [command.lane_id for command in commands if isinstance(command, StopLane)] == [1]
    assert hand.states()["d"] == "STARTING", "at once: no state had to be saved"
    assert none(commands, Save)


def test_a_state_is_evicted_if_empty_lanes_are_not_enough() -> None:
    hand = three_idle_lanes()
    commands = hand.submit("d", memory=MemoryNeed(9 * GB))
    assert [command.lane_id for command in commands if isinstance(command, StopLane)] == [1, 2]
    save = only(commands, Save)
    assert hand.states()["d"] == "QUEUED"
    assert started(hand.saved("a", save.lane_ids[0], 1, dropped=True)) == ["d"]


def test_memory_that_ran_out_while_ended_lanes_were_still_there_is_no_final_failure() -> None:
    hand = three_idle_lanes()
    hand.stop("a")
    hand.released("a", 0)
    hand.submit("d", memory=MemoryNeed(8.5 * GB))
    hand.started("d")
    hand.failed("d", hand.lane("d"), "out_of_memory")
    assert hand.end("d") is None, "the remaining empty lanes were ended, and the trial is tried again"
    hand.started("d")
    hand.failed("d", hand.lane("d"), "out_of_memory")
    assert hand.end("d") == "FAILED", "no lane is left to end"


# --- Trials of unknown need


def kept_state(**spec: Any) -> Hand:
    """A device of 10 GB that keeps the state of a trial that is done."""
    hand = Hand(memory=10 * GB, profile=Known(packing=1))
    hand.submit("a", budget=1, memory=MemoryNeed(4 * GB), **spec)
    hand.started("a")
    hand.iterate("a")
    return hand


def test_states_that_can_be_fetched_back_leave_before_an_unknown_trial_starts() -> None:
    hand = kept_state()
    commands = hand.submit("b")
    save = only(commands, Save)
    assert save.trial_id == "a" and save.drop
    assert not started(commands) and hand.states()["b"] == "STARTING"
    assert started(hand.saved("a", save.lane_ids[0], 1, dropped=True)) == ["b"]


@pytest.mark.parametrize("loss", ["fails", "dies"])
def test_an_unknown_trial_starts_also_if_the_state_is_lost(loss: str) -> None:
    hand = kept_state()
    save = only(hand.submit("b"), Save)
    if loss == "fails":
        commands = hand.failed("a", save.lane_ids[0])
    else:
        commands = ready(hand, hand.do(LaneLost(hand.now, save.lane_ids[0], "killed")))
    assert started(commands) == ["b"]


def test_an_unknown_trial_that_is_stopped_does_not_wait_for_the_save() -> None:
    hand = kept_state()
    save = only(hand.submit("b"), Save)
    hand.stop("b")
    assert hand.end("b") == "STOPPED"
    assert not started(hand.saved("a", save.lane_ids[0], 1, dropped=True))


def test_a_state_that_cannot_be_fetched_back_is_kept() -> None:
    hand = kept_state(can_save=False)
    commands = hand.submit("b")
    assert started(commands) == ["b"]
    assert none(commands, StopTrial)
    assert hand.trial("a").residence.lane is not None


@pytest.mark.parametrize(("memory", "need"), [(None, None), (10 * GB, MemoryNeed(1 * GB))])
def test_no_state_is_evicted_where_memory_is_no_bound_or_the_need_is_known(
    memory: float | None, need: MemoryNeed | None
) -> None:
    hand = Hand(memory=memory, profile=Known(packing=1))
    hand.submit("a", budget=1, memory=MemoryNeed(4 * GB))
    hand.started("a")
    hand.iterate("a")
    commands = hand.submit("b", memory=need)
    assert started(commands) == ["b"]
    assert none(commands, Save)


def test_a_queued_trial_starts_when_another_has_left_a_lane_and_freed_its_memory() -> None:
    hand = Hand(devices=2, memory=10 * GB, profile=Known(packing=1, memory=MemoryNeed(6 * GB)))
    hand.submit("a", budget=5, max_width=2)
    assert started(hand.lose_device(1)) == [], "its lane on the other device still holds 6 of 9 usable GB"
    assert started(hand.released("a", 0)) == ["a"]


# --- What states take at rest, as lanes measure it


def kept(hand: Hand) -> float:
    return hand.state.memory.reserved.get(0, 0.0) / GB


def test_a_state_takes_what_its_lane_has_measured() -> None:
    hand = Hand(memory=10 * GB)
    hand.submit("a", budget=1, memory=MemoryNeed(2 * GB, 3 * GB))
    hand.started("a")
    hand.iterate("a")
    assert kept(hand) == 2.0, "as it usually does"
    hand.do(StateMeasured(hand.now, "a", 0, 4 * GB))
    assert kept(hand) == 4.0
    hand.extend("a", 1)
    assert kept(hand) == 0.0, "it runs again"


def test_a_state_that_takes_less_than_was_booked_makes_room() -> None:
    hand = Hand(memory=10 * GB)
    ready(hand, hand.submit("a", "b", memory=MemoryNeed(4 * GB), can_save=False))
    for name in "ab":
        hand.started(name)
    hand.iterate("a", 3)
    hand.submit("c", memory=MemoryNeed(2 * GB))
    assert hand.states() == {"a": "DONE", "b": "RUNNING", "c": "QUEUED"} and kept(hand) == 4.0
    hand.do(StateMeasured(hand.now, "a", hand.trial("a").residence.lane, 2 * GB))
    assert hand.states()["c"] == "STARTING" and kept(hand) == 2.0


def test_what_was_measured_before_the_pause_counts_after_it() -> None:
    hand = Hand(memory=10 * GB)
    hand.submit("a", budget=9, memory=MemoryNeed(2 * GB))
    hand.started("a")
    hand.iterate("a")
    hand.do(PauseRequested(hand.now, "a"))
    hand.do(StateMeasured(hand.now, "a", 0, 3 * GB), StateMeasured(hand.now, "gone", 0, 9 * GB))
    hand.paused("a")
    assert kept(hand) == 3.0
    hand.do(ResumeRequested(hand.now, "a"))
    hand.iterate("a")
    hand.do(PauseRequested(hand.now, "a"))
    hand.paused("a")
    assert kept(hand) == 3.0, "its lane tells changes only"


def test_a_state_that_grows_at_rest_has_others_evicted() -> None:
    hand = Hand(memory=10 * GB)
    for name in "ab":
        hand.submit(name, budget=1, memory=MemoryNeed(4 * GB))
        hand.started(name)
        hand.iterate(name)
    assert kept(hand) == 8.0
    save = only(hand.do(StateMeasured(hand.now, "b", hand.trial("b").residence.lane, 6 * GB)), Save)
    assert save.trial_id == "b", "the one that takes most"
