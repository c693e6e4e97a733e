from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_ENGINE := str(Path(__file__).parents[1] / "engine")) not in sys.path:
    sys.path.append(_ENGINE)
import pytest
from engine_helpers import Hand, Known

from fluid.display.names import has_ended, states_text, with_interrupted
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.events import PauseRequested, StopRequested
from fluid.engine.records import TrialRecord
from fluid.measure.measurements import MIN_OBSERVATIONS
from fluid.measure.profile import Profile
from fluid.policies.hung import HungTrials
from fluid.session.status import GroupFacts, GroupStatus, Status
from fluid.session.status_reader import StatusReader
from fluid.trialgroup import PAUSED_BY_USER, Search, TrialState


@dataclass
class KnownFacts:
    facts: GroupFacts
    shows: int = 0


def status_of(hand: Hand, at: float, search: Search | None = None, *, began: float = 0.0, **facts: Any) -> Status:
    known = {name: KnownFacts(GroupFacts(name="rung", search=search, **facts)) for name in hand.state.groups}
    return StatusReader(hand.state, known).read(at, began=began)


def group_of(hand: Hand, search: Search | None = None, **facts: Any) -> GroupStatus:
    (group,) = status_of(hand, hand.now, search, **facts).groups
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
    hand, search = running(), Search("loss", "min", 8, extends=True)
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


def test_a_trial_that_the_user_paused_counts_as_such() -> None:
    hand = running()
    hand.do(PauseRequested(hand.now, "b"))
    assert group_of(hand, Search("loss", "min", 8)).trials == {"RUNNING": 1, "PAUSED BY THE USER": 1, "QUEUED": 1}
    group = group_of(hand)
    assert (group.iterations_done, group.iterations) == (1, 9)
    assert states_text(group.trials) == "1 running, 1 queued, 1 paused by the user"
    assert not has_ended({"DONE": 2, PAUSED_BY_USER: 1})
    assert with_interrupted({"RUNNING": 2, PAUSED_BY_USER: 1}) == {PAUSED_BY_USER: 1, "INTERRUPTED": 2}


def test_a_trial_that_comes_back_as_another_is_counted_once() -> None:
    hand, search = running(), Search(extends=True)
    hand.do(StopRequested(hand.now, "b", TrialState.PAUSED))
    assert group_of(hand, search).trials == {"RUNNING": 1, "QUEUED": 1}
    hand.forget("b")
    assert group_of(hand, search).trials == {"RUNNING": 1, "QUEUED": 1}
    hand.do(StopRequested(hand.now, "a", TrialState.STOPPED))
    assert group_of(hand, search).trials["STOPPING"] == 1, "until it has left its lane"


def test_a_trial_that_gives_no_result_is_named_and_its_group_has_no_eta() -> None:
    hand = running()
    hand.iterate("a")  # A first iteration alone may be a whole job, which may take any time.
    hand.now += 9.0
    assert status_of(hand, hand.now).silent == () and group_of(hand).eta == 7.0
    hand.now += 1.0
    status = status_of(hand, hand.now - 5.0, began=5.0)
    assert status.silent == (("a", 10.0),) and status.groups[0].eta is None
    hand.iterate("a")
    assert status_of(hand, hand.now).silent == () and group_of(hand).eta == 6.0


def test_a_trial_that_its_search_cannot_extend_is_done() -> None:
    hand = running()
    hand.iterate("a", 2)
    assert group_of(hand, Search()).trials == {"DONE": 1, "STARTING": 1, "QUEUED": 1}


def test_the_iterations_of_a_search_count_the_trials_to_come() -> None:
    hand, search = running(), Search("loss", "min", 8, extends=True)
    group = group_of(hand, search)
    assert (group.iterations_done, group.iterations, group.share) == (1, 24, 1 / 24), "3 iterations each, so far"
    hand.iterate("a", 2)
    hand.do(StopRequested(hand.now, "a", "DONE"))
    hand.started("b")
    hand.iterate("b")
    hand.stop("b")
    hand.released("b", hand.lane("b"))
    group = group_of(hand, search)
    assert group.iterations_done == 4
    assert group.iterations == 4 + 2 * 6, "one of two trials was stopped after its first iteration"


def test_a_search_has_an_eta_once_trials_have_ended() -> None:
    hand, search = running(), Search("loss", "min", 8, extends=True)
    facts: dict[str, Any] = {"first_start": hand.now - 1.0, "results": 1, "result_seconds": 1.0}
    assert group_of(hand, search, **facts).eta is None, "none has ended, so the scheduler may end any of them early"
    assert group_of(hand, Search("loss", "min", 8), **facts).eta == 23.0, "a second an iteration"
    for trial in "ab":
        if trial == "b":
            hand.started("b")
            hand.iterate("b")
        hand.iterate(trial, 2)
        hand.do(StopRequested(hand.now, trial, "DONE"))
    facts = {"first_start": hand.now - 6.0, "results": 6, "result_seconds": 12.0}
    assert group_of(hand, search, **facts).eta == 18.0
    assert group_of(hand, Search("loss", "min", 3, extends=True), **facts).eta == 6.0, "the last one runs alone"
    endless = group_of(hand, Search("loss", "min", extends=True), **facts)
    assert endless.eta is None, "it may submit any number of trials"
    assert endless.share is None


def test_measurements_name_the_model_where_devices_are_of_several() -> None:
    profile = Profile()
    for model, seconds in (("A100", 2.0), ("H200", 1.1)):
        for _ in range(MIN_OBSERVATIONS):
            profile.observe("net", 1.0, model=model)
            profile.observe("net", seconds, model=model, co_residents=2)
    hand = Hand(devices=0, profile=profile)
    hand.add_device(0, model="H200")
    assert status_of(hand, 0.0).packing == {"net": 2}
    assert status_of(hand, 0.0).alpha == {"net": pytest.approx(1.1)}
    hand.add_device(1, model="A100")
    status = status_of(hand, 0.0)
    assert status.packing == {"net on A100": 2, "net on H200": 2}
    assert status.alpha["net on H200"] == pytest.approx(1.1)
    assert status.alpha["net on A100"] > 1.5


def test_a_look_costs_what_goes_on_and_not_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of groups that have ended are kept as they were; of others, trials that have not ended are visited."""
    hand, ends = Hand(profile=Known(packing=1, width=1)), [f"{group}-{trial}" for group in "xyz" for trial in range(20)]
    for group in "xyz":
        hand.submit(*(name for name in ends if name.startswith(group)), group=group)
    hand.submit("runs", "waits", *(f"open-{trial}" for trial in range(50)), group="goes on")
    for name in [*ends, *(f"open-{trial}" for trial in range(50))]:
        hand.stop(name)
    hand.released("x-0", hand.lane("x-0"))
    hand.started("runs")
    known = {name: KnownFacts(GroupFacts(name=name)) for name in hand.state.groups}
    reader = StatusReader(hand.state, known)
    before = reader.read(hand.now)
    visited: list[str] = []
    for look, name_of in ((HungTrials, "silence"), (Estimates, "seconds_left")):
        inner = getattr(look, name_of)

        def seen(self: Any, trial: TrialRecord, *more: Any, inner: Any = inner) -> Any:
            visited.append(trial.trial_id)
            return inner(self, trial, *more)

        monkeypatch.setattr(look, name_of, seen)
    after = reader.read(hand.now)
    assert set(visited) == {"runs", "waits"}
    assert [len(group.trials) for group in after.groups] == [1, 1, 1, 3]
    assert [one is other for one, other in zip(before.groups, after.groups, strict=True)] == [True, True, True, False]
    known["x"].shows += 1
    hand.forget("y-3")
    rows = zip(after.groups, reader.read(hand.now).groups, strict=True)
    assert [one is other for one, other in rows] == [False, False, True, False], "one is shown otherwise, one forgotten"
