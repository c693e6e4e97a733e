"""What follows from a log: whose a trial is, and what of all that is told counts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fluid.joint.entries import (
    Begun,
    Claimed,
    Ended,
    Extended,
    Founded,
    Iterated,
    Joined,
    Left,
    Lost,
    OtherCode,
    Released,
    Started,
    StopAsked,
    Submitted,
    Wants,
    entry_of,
    read_entry,
)
from fluid.joint.state import MOST_LOSSES, BegunTrial, Gone, JointState, Tenure

JOINED = Joined(folder="f", host="h", pid=1, process="p", devices={0: "cpu"}, version="v")


def iterated(lease: int, iteration: int, count: int = 1, trial_id: str = "g-00000") -> Iterated:
    return Iterated(
        trial_id,
        lease,
        iteration=iteration,
        metrics=('{"loss": 1}',) * count,
        seconds=(1.0,) * count,
        at=1.0,
        ages=(0.0,) * count,
        width=1.0,
        device_ids=(0,),
    )


def ended(lease: int, state: str = "DONE", iteration: int = 0, trial_id: str = "g-00000") -> Ended:
    return Ended(trial_id, lease, state=state, iteration=iteration)


class Log:
    """A state, to which entries are appended."""

    def __init__(self) -> None:
        self.state = JointState()
        self.number = 0

    def add(self, writer: str, *items: Any) -> list[Any]:
        number, self.number = self.number, self.number + 1
        return [fact for item in items for fact in self.state.apply(number, writer, item)]


@pytest.fixture
def shared() -> Log:
    """Members a and b; a has the trial g-00000 by the lease 3."""
    one = Log()
    one.add("a", JOINED)
    one.add("b", JOINED)
    one.add("a", Founded("g", {}))
    assert isinstance(one.add("a", Begun("g", most=2))[0], BegunTrial)
    return one


def test_entries_say_who_wrote_them() -> None:
    items = [JOINED, Founded("g", {"a": "1"}, ("s",)), iterated(3, 2, 2), ended(3, "FAILED", 2), Lost("b")]
    assert read_entry(entry_of("a", 7, items)) == ("a", items)
    assert entry_of("a", 7, []) != entry_of("a", 8, [])
    for content in (b"", b"\x90", entry_of("a", 7, [])[:-1]):
        with pytest.raises(ValueError):
            read_entry(content)


def test_iterations_count_once_and_in_order(shared: Log) -> None:
    assert shared.add("a", Started("g-00000", 3), iterated(3, 1), iterated(3, 2)) != []
    for void in (iterated(3, 2), iterated(3, 1), iterated(3, 4), iterated(3, 3, 2), iterated(3, 2, 0)):
        assert shared.add("a", void) == [], void
    assert shared.add("a", iterated(3, 5, 3)) == [iterated(3, 5, 3)]
    assert shared.state.trials["g-00000"].reported == 5


def test_only_the_holder_tells_of_a_trial(shared: Log) -> None:
    for void in (iterated(3, 1), ended(3), Started("g-00000", 3), Released("g-00000", 3)):
        assert shared.add("b", void) == []
        assert shared.add("stranger", void) == []
    assert shared.add("a", iterated(2, 1)) == [], "another lease"
    assert shared.add("a", iterated(3, 1, trial_id="g-00001")) == [], "an unknown trial"


def test_the_first_claim_counts(shared: Log) -> None:
    assert shared.add("b", Claimed("g", "g-00000")) == [], "it is taken"
    shared.add("a", Released("g-00000", 3))
    number = shared.number
    assert shared.add("b", Claimed("g", "g-00000")) and not shared.add("a", Claimed("g", "g-00000"))
    trial = shared.state.trials["g-00000"]
    assert (trial.holder, trial.lease) == ("b", number)
    assert list(shared.state.members["b"].trials) == ["g-00000"] and not shared.state.members["a"].trials


def test_what_a_lost_member_tells_is_void(shared: Log) -> None:
    shared.add("a", iterated(3, 1))
    assert shared.add("b", Lost("a", "silent")) == [Gone("a", ("g-00000",), is_lost=True, reason="silent")]
    assert shared.add("b", Lost("a")) == [], "it is told once"
    number = shared.number
    shared.add("b", Claimed("g", "g-00000"))
    for void in (iterated(3, 2), ended(3), Begun("g"), Claimed("g", "g-00000"), Lost("b"), Wants(1), Left(), JOINED):
        assert shared.add("a", void) == [], void
    # Nor under its new name by its old lease.
    assert shared.add("a~2", JOINED) == [JOINED]
    assert shared.add("a~2", iterated(3, 2)) == []
    assert shared.add("b", iterated(number, 1)) == [], "it was told before"
    assert shared.add("b", iterated(number, 2)) == [iterated(number, 2)]
    assert shared.state.trials["g-00000"].tenures == [Tenure("a", 3, 1), Tenure("b", number, 2)]
    assert [member.name for member in shared.state.present] == ["b", "a~2"]


def test_a_lease_that_comes_back_is_another_one(shared: Log) -> None:
    shared.add("a", Released("g-00000", 3))
    number = shared.number
    shared.add("a", Claimed("g", "g-00000"))
    assert shared.add("a", iterated(3, 1)) == []
    assert shared.add("a", iterated(number, 1)) != []


def test_who_leaves_takes_no_trial_with_it(shared: Log) -> None:
    shared.add("a", Started("g-00000", 3), Wants(2))
    assert shared.add("a", Left()) == [Gone("a", ("g-00000",), is_lost=False, reason="it has left")]
    trial, member = shared.state.trials["g-00000"], shared.state.members["a"]
    assert (trial.lease, trial.holder, trial.runs, trial.losses) == (None, None, False, 0)
    assert (member.wants, member.gone) == (0, "it has left")


def lose_in_a_row(shared: Log, times: int, *, started: bool = True) -> list[Any]:
    facts: list[Any] = []
    for _ in range(times):
        trial = shared.state.trials["g-00000"]
        if trial.lease is None:
            name = f"m{shared.number}"
            shared.add(name, JOINED)
            shared.add(name, Claimed("g", "g-00000"))
        assert trial.lease is not None and trial.holder is not None
        if started:
            shared.add(trial.holder, Started("g-00000", trial.lease))
        facts = shared.add("b", Lost(trial.holder))
    return facts


def test_losses_in_a_row_fail_a_trial(shared: Log) -> None:
    gone, failure = lose_in_a_row(shared, MOST_LOSSES)
    assert isinstance(gone, Gone) and isinstance(failure, Ended)
    assert (failure.trial_id, failure.state, failure.iteration) == ("g-00000", "FAILED", 0)
    assert "3 drivers in a row" in failure.message
    assert shared.state.trials["g-00000"].is_over
    assert shared.add("b", Claimed("g", "g-00000")) == []


def test_losses_do_not_fail_a_trial_that_gets_on_or_did_not_run(shared: Log) -> None:
    lose_in_a_row(shared, MOST_LOSSES + 3, started=False)
    assert lose_in_a_row(shared, MOST_LOSSES - 1)
    number = shared.number
    shared.add("b", Claimed("g", "g-00000"))
    shared.add("b", iterated(number, 1), Released("g-00000", number))
    assert shared.state.trials["g-00000"].losses == 0
    lose_in_a_row(shared, MOST_LOSSES - 1)
    assert not shared.state.trials["g-00000"].is_over


def test_a_trial_that_is_done_goes_on_and_one_that_is_over_does_not(shared: Log) -> None:
    shared.add("a", iterated(3, 1), ended(3, iteration=1))
    trial = shared.state.trials["g-00000"]
    assert (trial.ended, trial.holder, trial.is_over) == ("DONE", "a", False)
    assert shared.add("a", iterated(3, 2)) and trial.ended == ""
    assert shared.add("a", ended(3, "STOPPED", 2)) and trial.is_over and trial.holder is None
    assert shared.add("a", iterated(3, 3)) == shared.add("b", Claimed("g", "g-00000")) == []


def test_trials_are_numbered_by_the_log(shared: Log) -> None:
    assert shared.add("b", Begun("other")) == [], "nobody has founded it"
    number = shared.number
    facts = shared.add("b", Begun("g", most=2), Begun("g", most=2))
    assert len(facts) == 1, "the sweep has two trials"
    assert (facts[0].trial.trial_id, facts[0].trial.holder, facts[0].trial.lease) == ("g-00001", "b", number)


def test_the_first_founder_counts(shared: Log) -> None:
    assert shared.add("b", Founded("g", {"budget": "9"})) == []
    assert shared.state.founded["g"].arguments == {}


def test_what_begins_with_a_sweep_is_the_founders() -> None:
    log = Log()
    log.add("a", JOINED), log.add("b", JOINED)
    for member, most in (("a", 2), ("b", 3)):  # Both found it at once, with other arguments.
        log.add(member, Founded("g", {"samples": str(most)}), *[Begun("g", most=most, is_free=True)] * most)
    assert log.state.begun == {"g": 2} and log.state.trials["g-00001"].lease is None


def test_the_first_text_of_a_trial_counts(shared: Log) -> None:
    assert shared.add("a", Submitted("h", {"t0": "x=1", "t1": "x=2"}))
    assert shared.add("b", Submitted("h", {"t1": "x=3", "t2": "x=4"}))
    assert shared.state.submitted == {"t0": "x=1", "t1": "x=2", "t2": "x=4"}
    assert not shared.add("c", Submitted("h", {"t3": ""})), "it takes no part"


def test_other_code_is_noted(shared: Log) -> None:
    assert shared.state.notes == []
    shared.add("b", OtherCode("g", ("train", "Net")))
    assert shared.state.notes == ["g: driver b ran other code than the first one: train, Net."]


def test_what_submitters_ask_for(shared: Log) -> None:
    assert shared.add("a", Extended("g-00000", 3)) and not shared.add("b", Extended("g-00000", 2))
    assert shared.add("a", StopAsked("g-00000", "x")) and not shared.add("b", StopAsked("g-00000", "y"))
    assert (shared.state.budgets, shared.state.stops) == ({"g-00000": 3}, {"g-00000": "x"})


def test_the_same_log_gives_the_same_state_however_it_is_cut_into_reads() -> None:
    draw = random.Random(4)
    items: list[tuple[int, str, Any]] = [
        (0, "a", JOINED),
        (1, "b", JOINED),
        (2, "c", JOINED),
        (3, "a", Founded("g", {})),
    ]
    for number in range(4, 600):
        trial_id, lease = f"g-{draw.randrange(5):05d}", draw.randrange(max(4, number - 30), number + 1)
        item = draw.choice(
            [
                Begun("g", most=5),
                Claimed("g", trial_id),
                Started(trial_id, lease),
                iterated(lease, draw.randrange(1, 4), trial_id=trial_id),
                ended(lease, trial_id=trial_id),
                Released(trial_id, lease),
                Lost(draw.choice("abc") + draw.choice(["", "~2"])),
                JOINED,
            ]
        )
        items.append((number, draw.choice("abc") + ("~2" if number > 300 else ""), item))
    one, other = JointState(), JointState()
    facts = [fact for each in items for fact in one.apply(*each)]
    again = [fact for each in items for fact in other.apply(*each)]
    assert facts == again and one.trials == other.trials and one.members == other.members
    for member in one.members.values():
        mine = {trial.trial_id for trial in one.trials.values() if trial.holder == member.name}
        assert mine == set(member.trials) and not (member.gone and mine)


def test_a_trial_may_begin_for_any_member() -> None:
    shared = Log()
    shared.add("a", JOINED), shared.add("b", JOINED), shared.add("a", Founded("g", {}))
    (fact,) = shared.add("a", Begun("g", most=1, is_free=True))
    assert isinstance(fact, BegunTrial) and fact.trial.lease is None
    claimed = Claimed("g", "g-00000")
    assert shared.add("b", claimed) == [claimed] and shared.add("a", claimed) == []
    assert shared.state.trials["g-00000"].holder == "b"


def test_no_more_trials_are_under_way_than_may_be() -> None:
    shared = Log()
    shared.add("a", JOINED), shared.add("b", JOINED), shared.add("a", Founded("g", {}))
    begun = Begun("g", under_way=1)
    assert len(shared.add("a", begun)) == 1 and shared.add("b", begun) == []
    lease = shared.state.trials["g-00000"].lease
    assert lease is not None
    shared.add("a", ended(lease))
    assert len(shared.add("b", begun, begun)) == 1, "the first has ended"
    shared.add("a", iterated(lease, 1))
    shared.add("b", ended(shared.state.trials["g-00001"].lease or 0, trial_id="g-00001"))
    assert shared.add("b", begun) == [], "the first goes on"
