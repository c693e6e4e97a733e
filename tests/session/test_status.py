from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_ENGINE := str(Path(__file__).parents[1] / "engine")) not in sys.path:
    sys.path.append(_ENGINE)
from engine_helpers import Hand, Known

from fluid.engine.events import StopRequested
from fluid.session.status import GroupStatus, status_of
from fluid.trialgroup import Search, TrialState


def group_of(hand: Hand, search: Search | None = None) -> GroupStatus:
    (group,) = status_of(hand.state, {"group of a": ("rung", search)}, hand.now).groups
    return group


def running() -> Hand:
    """One that runs, at iteration 1 of 3, and two that wait for it."""
    hand = Hand(profile=Known(packing=1, width=1))
    hand.submit("a", "b", "c")
    hand.started("a")
    hand.iterate("a")
    return hand


def test_a_group_that_runs() -> None:
    hand = running()
    group = group_of(hand)
    assert (group.name, group.trials) == ("rung", {"RUNNING": 1, "QUEUED": 2})
    assert (group.iterations_done, group.iterations, group.eta, group.expected) == (1, 9, 8.0, None)


def test_what_a_stopped_trial_left_out_is_not_counted() -> None:
    hand = running()
    hand.stop("b")
    hand.iterate("a", 2)
    hand.started("c")
    group = group_of(hand)
    assert group.trials == {"DONE": 1, "STOPPED": 1, "RUNNING": 1}
    assert (group.iterations_done, group.iterations) == (3, 6)


def test_trials_that_were_forgotten_are_counted() -> None:
    hand = running()
    hand.stop("b")
    hand.iterate("a", 2)
    hand.forget("a")
    hand.forget("b")
    group = group_of(hand)
    assert group.trials == {"DONE": 1, "STOPPED": 1, "STARTING": 1}
    assert (group.iterations_done, group.iterations) == (3, 6)


def test_a_trial_of_a_search_waits_until_it_is_decided_about() -> None:
    hand, search = running(), Search("loss", "min", 8)
    hand.iterate("a", 2)
    assert group_of(hand, search).trials == {"PAUSED": 1, "STARTING": 1, "QUEUED": 1}
    hand.do(StopRequested(hand.now, "a", "DONE"), StopRequested(hand.now, "c", "FAILED"))
    for forgotten in (False, True):
        if forgotten:
            hand.forget("a")
            hand.forget("c")
        group = group_of(hand, search)
        assert group.trials == {"DONE": 1, "FAILED": 1, "STARTING": 1}
        assert (group.expected, group.eta) == (8, None)


def test_a_trial_that_comes_back_as_another_is_counted_once() -> None:
    hand, search = running(), Search()
    hand.do(StopRequested(hand.now, "b", TrialState.PAUSED))
    assert group_of(hand, search).trials == {"RUNNING": 1, "QUEUED": 1}
    hand.forget("b")
    assert group_of(hand, search).trials == {"RUNNING": 1, "QUEUED": 1}
    hand.do(StopRequested(hand.now, "a", TrialState.STOPPED))
    assert group_of(hand, search).trials["STOPPING"] == 1, "until it has left its lane"


def test_a_trial_that_gives_no_result_is_named_and_its_group_has_no_eta() -> None:
    hand = running()
    hand.now += 9.0
    assert status_of(hand.state, {}, hand.now).silent == () and group_of(hand).eta == 8.0
    hand.now += 1.0
    status = status_of(hand.state, {}, hand.now - 5.0, began=5.0)
    assert status.silent == (("a", 10.0),) and status.groups[0].eta is None
    hand.iterate("a")
    assert status_of(hand.state, {}, hand.now).silent == () and group_of(hand).eta == 7.0
