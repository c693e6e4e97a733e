"""Trials that the user pauses and resumes by hand."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.engine.commands import (
    NotePaused,
    NoteQueued,
    Pause,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import (
    SET_ASIDE,
    BudgetExtended,
    Checkpoint,
    DeviceDraining,
    GroupSubmitted,
    IterationDone,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrialSetAside,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.policies.engine import EngineState
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState


class Holding(Hand):
    """Pauses and resumes trials."""

    def pause(self, trial_id: str) -> list[Any]:
        return self.do(PauseRequested(self.now, trial_id))

    def set_aside(self, trial_id: str) -> list[Any]:
        return self.do(TrialSetAside(self.now, trial_id))

    def resume(self, trial_id: str) -> list[Any]:
        return self.do(ResumeRequested(self.now, trial_id))

    def rest(self, trial_id: str) -> None:
        """Pauses a trial that runs, to its end."""
        self.pause(trial_id)
        self.paused(trial_id)
        assert self.trial(trial_id).state is TrialState.PAUSED


def one_at_a_time(**options: Any) -> Holding:
    return Holding(max_packing=1, profile=Known(packing=1, width=1), **options)


class TestAtEveryState:
    def test_a_running_trial_leaves_its_device_after_its_iteration(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b")
        hand.started("a")
        hand.iterate("a")
        assert only(hand.pause("a"), Pause).trial_id == "a"
        assert hand.states() == {"a": "RUNNING", "b": "QUEUED"}
        commands = hand.paused("a")
        assert only(commands, NotePaused).iteration == 1
        assert hand.states() == {"a": "PAUSED", "b": "STARTING"}
        hand.started("b")
        hand.iterate("b", 3)
        assert hand.states() == {"a": "PAUSED", "b": "DONE"}
        hand.tick()
        commands = hand.resume("a")
        assert only(commands, NoteQueued).why == "resumed by the user"
        assert only(commands, RunIteration).iterations == 2, "it goes on where its state is"
        hand.iterate("a", 2)
        assert hand.reports("a") == [1, 2, 3] and hand.end("a") == "DONE"

    def test_one_that_is_set_aside_is_saved_to_disk_too_and_is_not_one_that_the_user_paused(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b")
        hand.started("a")
        hand.iterate("a")
        assert only(hand.set_aside("a"), Pause).trial_id == "a"
        assert none(hand.set_aside("a"), Pause), "once is enough"
        commands = hand.paused("a")
        save = only(commands, Save)
        assert (save.trial_id, save.durable, save.drop) == ("a", True, True)
        assert only(commands, NotePaused).why == SET_ASIDE
        assert hand.states() == {"a": "PAUSED", "b": "STARTING"}
        hand.set_aside("b")
        hand.started("b")
        assert hand.states() == {"a": "PAUSED", "b": "RUNNING"}, "its lane owes an answer"

    def test_one_that_waits_is_set_aside_at_once(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b")
        hand.set_aside("b")
        assert hand.trial("b").state is TrialState.PAUSED
        hand.started("a")
        hand.iterate("a", 3)
        hand.tick()
        assert hand.states() == {"a": "DONE", "b": "PAUSED"}, "it does not start"

    def test_a_queued_trial_is_held_in_the_queue(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b", "c")
        hand.started("a")
        assert only(hand.pause("b"), NotePaused).iteration == 0
        hand.iterate("a", 3)
        assert hand.states() == {"a": "DONE", "b": "PAUSED", "c": "STARTING"}
        hand.started("c")
        hand.iterate("c", 3)
        assert only(hand.resume("b"), StartTrial).trial_id == "b"

    def test_a_trial_that_is_about_to_start_gives_its_lane_up(self) -> None:
        hand = one_at_a_time(ready=False)
        hand.submit("a", "b")
        assert hand.states() == {"a": "STARTING", "b": "QUEUED"}
        hand.pause("a")
        assert hand.states() == {"a": "PAUSED", "b": "STARTING"}
        assert only(hand.ready(hand.trial("b").placement.lanes[0]), StartTrial).trial_id == "b"

    def test_a_trial_that_is_set_up_is_paused_once_it_is(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        assert none(hand.pause("a"), Pause)
        assert only(hand.started("a"), Pause).trial_id == "a"
        hand.paused("a")
        assert hand.states() == {"a": "PAUSED"}

    def test_a_widening_is_called_off(self) -> None:
        hand = Holding(1, profile=Known(packing=1, width=4))
        hand.submit("a", max_width=4, budget=100)
        hand.started("a")
        hand.iterate("a")
        hand.add_device(1)
        hand.tick()
        assert hand.states() == {"a": "RESIZING"}
        hand.pause("a")
        assert hand.states() == {"a": "RUNNING"}
        hand.paused("a")
        assert hand.states() == {"a": "PAUSED"} and not hand.state.occupancy.held

    def test_a_trial_that_moves_arrives_first(self) -> None:
        hand = Holding(1, profile=Known(packing=1, width=4))
        hand.submit("a", max_width=4, budget=100)
        hand.started("a")
        hand.iterate("a")
        for lane in hand.add_device(1):
            hand.ready(lane.lane_id)  # type: ignore[attr-defined]
        hand.tick()
        commands = hand.paused("a")
        assert only(commands, Resize).trial_id == "a"
        assert none(hand.pause("a"), Pause)
        assert only(hand.resized("a"), Pause).trial_id == "a"
        hand.paused("a")
        assert hand.states() == {"a": "PAUSED"} and not hand.state.occupancy.held


class TestRequests:
    def test_pausing_twice_is_harmless(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        hand.started("a")
        hand.pause("a")
        assert hand.pause("a") == []
        hand.paused("a")
        assert hand.pause("a") == []
        assert hand.states() == {"a": "PAUSED"}

    def test_resuming_one_that_is_not_paused_is_harmless(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", budget=1)
        assert hand.resume("a") == []
        hand.started("a")
        hand.iterate("a")
        assert hand.resume("a") == [] and hand.states() == {"a": "DONE"}

    @pytest.mark.parametrize("state", ["DONE", "STOPPED", "FAILED", "STOPPING"])
    def test_a_trial_that_has_ended_cannot_be_paused(self, state: str) -> None:
        hand = one_at_a_time()
        hand.submit("a", budget=1, retry_errors=False)
        hand.started("a")
        lane = hand.lane("a")
        if state == "DONE":
            hand.iterate("a")
        elif state == "FAILED":
            hand.failed("a", lane)
        else:
            hand.stop("a")
            if state == "STOPPED":
                hand.released("a", lane)
        assert hand.states() == {"a": state}
        with pytest.raises(InvalidFieldError, match=f"trial_id='a': is {state} and cannot be paused"):
            hand.pause("a")

    def test_a_trial_restored_to_be_called_is_done_and_cannot_be_paused(self) -> None:
        hand = one_at_a_time(resident_limit=0)
        hand.submit("a", budget=1)
        hand.started("a")
        lane = hand.lane("a")
        save = only(hand.iterate("a"), Save)
        hand.saved("a", save.lane_ids[0], 1, dropped=True)
        assert hand.trial("a").residence.lane is None and lane == save.lane_ids[0]
        hand.call("a")
        with pytest.raises(InvalidFieldError, match="is DONE and cannot be paused"):
            hand.pause("a")

    def test_an_unknown_trial_is_refused(self) -> None:
        hand = one_at_a_time()
        for event in (PauseRequested(0.0, "x"), ResumeRequested(0.0, "x")):
            with pytest.raises(InvalidFieldError, match="is unknown"):
                hand.do(event)

    def test_a_trial_that_ends_at_that_instant_has_ended(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", budget=1)
        hand.started("a")
        lane = hand.lane("a")
        hand.do(IterationDone(1.0, "a", lane, iteration=1, seconds=1.0), PauseRequested(1.0, "a"))
        assert hand.states() == {"a": "DONE"} and not hand.trial("a").held

    def test_a_trial_that_ends_before_it_has_paused_has_ended_and_can_be_extended(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", budget=1)
        hand.started("a")
        hand.pause("a")
        hand.iterate("a")
        hand.paused("a")
        assert hand.states() == {"a": "DONE"}
        hand.extend("a", 1)
        assert hand.states() == {"a": "RUNNING"}

    def test_resuming_before_it_has_paused_lets_it_go_on(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        hand.started("a")
        hand.pause("a")
        hand.resume("a")
        hand.paused("a")
        assert hand.states() == {"a": "RUNNING"}


class TestWhilePaused:
    def test_it_can_be_extended_and_stopped(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b")
        hand.started("a")
        hand.rest("a")
        hand.extend("a", 4)
        assert hand.states()["a"] == "PAUSED" and hand.trial("a").progress.budget == 7
        assert only(hand.stop("a"), StopTrial).trial_id == "a"
        assert hand.end("a") == "STOPPED"

    def test_stopping_one_that_is_about_to_pause(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        hand.started("a")
        lane = hand.lane("a")
        hand.pause("a")
        hand.do(StopRequested(hand.now, "a"))
        hand.released("a", lane)
        assert hand.states() == {"a": "STOPPED"} and not hand.trial("a").held

    def test_its_device_may_be_lost(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        hand.started("a")
        hand.iterate("a")
        hand.saved("a", hand.lane("a"), 1)
        hand.iterate("a")
        hand.rest("a")
        hand.lose_device(0)
        assert hand.states() == {"a": "PAUSED"} and hand.trial("a").progress.done == 1
        for command in hand.add_device(1):
            hand.ready(command.lane_id)  # type: ignore[attr-defined]
        assert hand.states() == {"a": "PAUSED"}
        assert only(hand.resume("a"), StartTrial).checkpoint == Checkpoint(1, "a/1")

    def test_it_may_fail_on_its_way_to_rest(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        hand.started("a")
        hand.pause("a")
        note = only(hand.failed("a", hand.lane("a")), NotePaused)
        assert (note.kind, note.failures) == ("error", 1)
        assert hand.states() == {"a": "PAUSED"}
        assert only(hand.resume("a"), StartTrial).checkpoint is None

    def test_its_device_drains(self) -> None:
        hand = one_at_a_time(devices=2)
        hand.submit("a")
        hand.started("a")
        hand.iterate("a")
        hand.rest("a")
        lane, device = hand.trial("a").residence.lane, hand.trial("a").residence.device
        save = only(hand.do(DeviceDraining(hand.now, device, 100.0)), Save)
        assert save.drop and save.durable
        hand.saved("a", lane, 1, dropped=True)
        assert device not in hand.state.occupancy.residents and hand.states() == {"a": "PAUSED"}
        assert only(hand.resume("a"), StartTrial).checkpoint == Checkpoint(1, "a/1")

    def test_what_cannot_be_saved_stays_and_keeps_its_device_from_being_given_back(self) -> None:
        hand = one_at_a_time(resident_limit=0)
        hand.submit("a", can_save=False)
        hand.started("a")
        hand.iterate("a")
        hand.rest("a")
        assert hand.trial("a").residence.lane is not None
        assert not hand.state.demand.may_give_back(0)
        hand.resume("a")
        assert hand.states() == {"a": "RUNNING"} and hand.trial("a").progress.done == 1

    def test_its_state_is_saved_where_memory_is_needed(self) -> None:
        need = MemoryNeed(60.0, 10.0)
        hand = one_at_a_time(memory=100.0)
        hand.submit("a", "b", memory=need)
        hand.started("a")
        hand.iterate("a")
        hand.pause("a")
        lane = hand.lane("a")
        save = only(hand.paused("a"), Save)
        assert save.trial_id == "a" and save.drop
        hand.saved("a", lane, 1, dropped=True)
        assert hand.states() == {"a": "PAUSED", "b": "STARTING"}

    def test_a_call_is_made_where_its_state_is(self) -> None:
        hand = one_at_a_time()
        hand.submit("a")
        hand.started("a")
        hand.rest("a")
        lane = hand.trial("a").residence.lane
        hand.call("a", 5)
        hand.called("a", lane, 5)
        assert hand.answers("a") == [(5, "")] and hand.states() == {"a": "PAUSED"}


class TestNotDemand:
    """To planners, autoscaling and predictions a paused trial is not there."""

    def test_no_device_is_asked_for_and_no_work_is_counted(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b", "c", budget=10)
        before = hand.state.allocations.work.total
        assert hand.state.demand.devices == 2
        hand.pause("c")
        assert hand.state.demand.devices == 1
        assert hand.state.allocations.work.total == pytest.approx(before * 2 / 3)
        hand.pause("b")
        assert hand.state.demand.devices == 0 and not hand.state.demand.trials_wait

    def test_others_get_its_devices(self) -> None:
        hand = Holding(2, profile=Known(packing=1, width=2))
        hand.submit("a", "b", max_width=2, budget=100)
        hand.started("a")
        hand.started("b")
        hand.iterate("a")
        hand.iterate("b")
        hand.rest("a")
        hand.tick()
        hand.paused("b")
        hand.resized("b")
        assert hand.trial("b").width == 2.0

    def test_the_widths_of_others_are_planned_as_if_it_were_not_there(self) -> None:
        def widths(paused: bool) -> dict[str, float]:
            hand = Holding(0, profile=Known(packing=1, width=4))
            hand.submit("a", "b", *(["p", "q"] if paused else []), max_width=4, budget=50)
            for name in ("p", "q") if paused else ():
                hand.pause(name)
            events = [hand.add_device(index) for index in range(4)]
            assert events
            return {name: hand.trial(name).width for name in ("a", "b")}

        assert widths(paused=True) == widths(paused=False)

    def test_the_prediction_leaves_it_out(self) -> None:
        def seconds(state: EngineState) -> float | None:
            return state.seconds_left("group of a")

        hand = one_at_a_time()
        hand.submit("a", "b", budget=10)
        hand.started("a")
        hand.iterate("a")
        both = seconds(hand.state)
        hand.pause("b")
        alone = seconds(hand.state)
        assert both is not None and alone is not None and alone < both
        hand.rest("a")
        assert seconds(hand.state) is None, "nothing of it runs or waits"

    def test_one_that_was_to_take_over_a_device_may_be_paused_meanwhile(self) -> None:
        hand = one_at_a_time(devices=2)
        hand.submit("a", "b", "c", budget=20)
        hand.started("a")
        hand.started("b")
        hand.pause("c")
        hand.rest("a")
        assert hand.states() == {"a": "PAUSED", "b": "RUNNING", "c": "PAUSED"}
        hand.resume("c")
        assert hand.states()["c"] == "STARTING"

    def test_budgets_may_change_while_it_waits(self) -> None:
        hand = one_at_a_time()
        hand.submit("a", "b", follow_up_iterations=5)
        hand.pause("b")
        hand.do(BudgetExtended(hand.now, "b", 2, follow_up_iterations=0))
        assert hand.states()["b"] == "PAUSED"


_SPECS = st.lists(
    st.tuples(
        st.integers(1, 30),  # budget
        st.sampled_from([1, 1, 2, 4]),  # most devices
        st.sampled_from([1.0, 1.0, 2.0]),  # priority
        st.sampled_from([0, 0, 9]),  # follow-up iterations
        st.booleans(),  # whether it is paused
        st.sampled_from([None, None, 0.5, 2]),  # devices asked for
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    specs=_SPECS,
    devices=st.integers(1, 5),
    planner=st.sampled_from(["portfolio", "dynamic", "static", "fifo"]),
    packing=st.sampled_from([1, 3]),
)
def test_planners_give_the_others_what_they_would_get_without_the_paused_ones(
    specs: list[tuple[int, int, float, int, bool, float | None]], devices: int, planner: str, packing: int
) -> None:
    def engine(*, with_paused: bool) -> Holding:
        hand = Holding(0, planner=planner, profile=Known(packing=packing, width=4))
        hand.state.set_most_devices(8)
        trials = tuple(
            TrialSpec(
                f"t{number}",
                budget,
                max_width=1 if asked else width,
                priority=priority,
                follow_up_iterations=further,
                devices=asked,
                gang=asked == 2,
            )
            for number, (budget, width, priority, further, paused, asked) in enumerate(specs)
            if with_paused or not paused
        )
        hand.do(GroupSubmitted(0.0, "g", trials))
        for number, (_, _, _, _, paused, _) in enumerate(specs):
            if paused and with_paused:
                hand.pause(f"t{number}")
        for index in range(devices):
            for command in hand.add_device(index):
                if isinstance(command, StartLane):
                    hand.ready(command.lane_id)
        hand.tick()
        return hand

    there, absent = engine(with_paused=True), engine(with_paused=False)
    for trial_id, trial in there.state.trials.items():
        other = absent.state.trials.get(trial_id)
        if other is None:
            assert trial.state is TrialState.PAUSED and trial.row not in there.state.queue
            continue
        held, expected = there.state.occupancy.held, absent.state.occupancy.held
        assert (trial.state, trial.width) == (other.state, other.width)
        assert held.get(trial.row) == expected.get(other.row)
    waiting = [there.state.trials.by_row[row].trial_id for row in there.state.queue]
    assert waiting == [absent.state.trials.by_row[row].trial_id for row in absent.state.queue]
    assert there.state.demand.devices == absent.state.demand.devices
    assert there.state.allocations.work.total == pytest.approx(absent.state.allocations.work.total)
    assert there.state.placing.reserved_devices == absent.state.placing.reserved_devices
