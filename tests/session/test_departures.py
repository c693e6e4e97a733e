"""Who has left a lane after it was told to stop, on made-up events."""

from __future__ import annotations

import pytest

from fluid.engine.commands import StopLane, StopTrial
from fluid.engine.events import Checkpoint, Event, Failure, LaneLost, TrialFailed, TrialReleased, TrialSaved
from fluid.session.pump import Departures
from fluid.session.waits import SessionWaits

GROUPS = {"a": "0", "b": "0", "c": "1"}


def departures() -> Departures:
    made = Departures(GROUPS.get, SessionWaits())
    made.follow((), [StopTrial("a", (1, 2)), StopTrial("b", (1,)), StopTrial("c", (3,)), StopTrial("forgotten", (1,))])
    return made


def test_a_group_waits_for_its_own_trials_in_every_lane() -> None:
    made = departures()
    first, second = made.wait_for("0"), made.wait_for("1")
    made.follow([TrialReleased(1.0, "c", 3)], ())
    assert second.done() and not first.done()
    made.follow([TrialReleased(1.0, "a", 1), TrialReleased(1.0, "b", 1)], ())
    assert not first.done() and made.of("0") == ("a",)
    made.follow([TrialReleased(1.0, "a", 2)], ())
    assert first.done() and made.of("0") == ()
    assert made.wait_for("0").done()


def test_one_trial_is_waited_for_apart_from_others_of_its_group() -> None:
    made = departures()
    first, second = made.wait_for("0", "a"), made.wait_for("0", "b")
    made.follow([TrialReleased(1.0, "b", 1)], ())
    assert second.done() and not first.done()
    assert made.wait_for("0", "b").done(), "it has left"


SAVED = Checkpoint(1, "/x")


@pytest.mark.parametrize(
    ("event", "has_left"),
    [
        (TrialFailed(1.0, "c", 3, Failure("error", "went wrong")), True),
        (TrialSaved(1.0, "c", 3, SAVED, dropped=True), True),
        (TrialSaved(1.0, "c", 3, SAVED), False),
        (LaneLost(1.0, 3, "was killed"), True),
        (LaneLost(1.0, 1, "was killed"), False),
        (TrialReleased(1.0, "c", 1), False),
    ],
)
def test_what_ends_a_departure(event: Event, has_left: bool) -> None:
    made = departures()
    made.follow([event], ())
    assert made.wait_for("1").done() is has_left


def test_a_lane_that_is_told_to_end_is_waited_for_no_longer() -> None:
    made = departures()
    answer = made.wait_for("1")
    made.follow((), [StopLane(3)])
    assert answer.done()


def test_no_one_waits_for_a_session_that_ends() -> None:
    made = departures()
    answer = made.wait_for("0")
    made.give_up()
    assert answer.done()
