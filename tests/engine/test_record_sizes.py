"""A session may have very many trials, most of which wait or have ended: they share what is alike of them."""

from __future__ import annotations

from engine_helpers import Hand, Known

from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.engine.records import NO_LIMITS, NOWHERE, TrialRecord
from fluid.session.forecasting.left import trials_left


class Unchecked(Hand):
    """Does not validate the state after each call: that looks at the placement of all trials, and so makes it."""

    def do(self, *events: Event) -> list[Command]:
        commands = self.state.handle(*events)
        self.log += commands
        return commands


def has_placement(trial: TrialRecord) -> bool:
    """Whether a trial has one, without making it."""
    try:
        TrialRecord.__dict__["placement"].__get__(trial)
    except AttributeError:
        return False
    return True


def test_trials_that_wait_or_have_ended_have_no_parts_of_their_own() -> None:
    hand = Unchecked(devices=1, profile=Known(packing=1, width=1))
    hand.submit("a", "b", "c", "d", group="g")
    hand.started("a")
    lane = hand.lane("a")
    hand.stop("a")
    hand.released("a", lane)
    hand.state.hangs("g", hand.now)
    trials_left(hand.state, "g", hand.now)
    assert hand.states()["a"] == "STOPPED" and hand.states()["c"] == hand.states()["d"] == "QUEUED"
    assert [has_placement(hand.trial(trial_id)) for trial_id in "abd"] == [False, True, False]
    trials = list(hand.state.trials.values())
    assert all(trial.limits is NO_LIMITS for trial in trials)
    assert all(trial.residence is NOWHERE for trial in trials)
    assert trials[2].story is trials[3].story
