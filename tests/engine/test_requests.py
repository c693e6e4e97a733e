"""Requests of trials to their submitters: who is asked, who is answered, and the time that trials wait."""

from __future__ import annotations

from engine_helpers import Hand, none, only

from fluid.engine.commands import Answer, Command, KillLane, ReportRequest
from fluid.engine.events import Alarm, RequestAnswered, TrialAsked


def ask(hand: Hand, trial_id: str = "a", lane_id: int = 0, number: int = 7) -> list[Command]:
    return hand.do(TrialAsked(hand.now, trial_id, lane_id, request_id=number, payload=b"question"))


def answer(hand: Hand, trial_id: str = "a", lane_id: int = 0, number: int = 7) -> list[Command]:
    event = RequestAnswered(hand.now, trial_id, lane_id, request_id=number, payload=b"answer")
    return hand.do(event)


def running(*names: str, **spec: object) -> Hand:
    hand = Hand(devices=len(names))
    hand.submit(*names, **{"budget": 100, **spec})
    for name in names:
        hand.started(name)
    return hand


def test_the_submitter_is_asked_and_the_lane_is_answered() -> None:
    hand = running("a")
    asked = only(ask(hand), ReportRequest)
    assert (asked.group_id, asked.trial_id, asked.payload) == ("group of a", "a", b"question")
    told = only(answer(hand), Answer)
    assert (told.trial_id, told.lane_id, told.request_id, told.payload, told.failed) == ("a", 0, 7, b"answer", False)


def test_the_set_up_may_ask() -> None:
    hand = Hand()
    hand.submit("a")
    assert only(ask(hand), ReportRequest).trial_id == "a"
    only(answer(hand), Answer)
    hand.started("a")
    hand.iterate("a", 3)
    assert hand.end("a") == "DONE"


def test_a_trial_that_has_ended_is_refused() -> None:
    hand = running("a")
    hand.stop("a")
    assert only(ask(hand), Answer).payload is None
    hand.released("a", 0)
    hand.forget("a")
    assert only(ask(hand), Answer).payload is None


def test_a_lane_that_the_trial_has_left_is_refused() -> None:
    hand = running("a", "b")
    commands = ask(hand, "a", hand.lane("b"))
    assert none(commands, ReportRequest) and only(commands, Answer).payload is None


def test_an_answer_to_a_lost_lane_goes_nowhere() -> None:
    hand = running("a")
    ask(hand)
    hand.lose(0)
    assert hand.trial("a").placement.asking == frozenset()
    assert none(answer(hand), Answer)


def test_a_trial_that_waits_for_an_answer_does_not_hang() -> None:
    hand = running("a", iteration_timeout_s=10.0)
    hand.now = 1.0
    ask(hand)
    for _ in range(5):
        alarm_at = hand.state.alarm_at
        assert alarm_at is not None
        hand.now = max(hand.now + 10.0, alarm_at)
        assert none(hand.do(Alarm(hand.now)), KillLane)
    assert hand.state.silent(hand.now) == []
    answer(hand)
    answered = hand.now
    killed: list[Command] = []
    while none(killed, KillLane):  # From the answer on, the time counts again.
        alarm_at = hand.state.alarm_at
        assert alarm_at is not None
        hand.now = max(hand.now, alarm_at)
        killed = hand.do(Alarm(hand.now))
    assert 10.0 <= hand.now - answered <= 25.0


def test_a_trial_that_was_stopped_while_it_waited_is_ended_at_its_limit() -> None:
    hand = running("a", iteration_timeout_s=10.0)
    ask(hand)
    hand.stop("a")
    killed: list[Command] = []
    while none(killed, KillLane):
        alarm_at = hand.state.alarm_at
        assert alarm_at is not None and alarm_at < 100.0
        hand.now = max(hand.now, alarm_at)
        killed = hand.do(Alarm(hand.now))
