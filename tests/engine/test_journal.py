from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from engine_helpers import Hand, Known

from fluid.engine.commands import (
    Command,
    KillLane,
    NoteDeviceLost,
    NoteDrained,
    NotePaused,
    NoteResize,
    Report,
    ReportEnd,
    ReportRequest,
    RunIteration,
)
from fluid.engine.events import (
    PLAIN_TERMS,
    BudgetExtended,
    CallRequested,
    Checkpoint,
    DeviceAdded,
    DeviceDraining,
    Event,
    FailRequested,
    Failure,
    GroupSubmitted,
    GroupTerms,
    PauseRequested,
    ResumeRequested,
    SessionDraining,
    StopRequested,
    Tick,
    TrialAsked,
    TrialForgotten,
    TrialsAdded,
    TrialSaved,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.measure.profile import Profile
from fluid.policies.engine import EngineState
from fluid.resources import Device, MemoryNeed, Requires
from fluid.results import journal
from fluid.results.journal import ProfileSaved, encode, encode_apart, replay
from fluid.testing.fake_backend import Chances
from fluid.testing.random_sessions import RandomSession
from fluid.trialgroup import TrialState

SPEC = TrialSpec(
    "a",
    5,
    priority=2.0,
    profile_key="key",
    max_width=4,
    memory=MemoryNeed(1.0, 2.0),
    can_save=False,
    retry_errors=False,
    iteration_timeout_s=12.5,
    requires=Requires(model="A100", tags=("a", "b")),
    devices=4,
    gang=True,
)


def lines(*items: Event | Command) -> list[str]:
    return [json.dumps(entry) for item in items if (entry := encode(item)) is not None]


def report(iteration: int, trial_id: str = "a") -> Report:
    return Report(
        trial_id,
        "g",
        iteration=iteration,
        metrics={"loss": object()},
        seconds=1.0,
        width=1.0,
        device_ids=(0,),
        at=float(iteration),
    )


def test_what_was_asked_for_and_how_far_it_came_is_recovered() -> None:
    recovered = replay(
        lines(
            GroupSubmitted(0.0, "g", (SPEC, TrialSpec("b", 2))),
            TrialsAdded(1.0, "g", (TrialSpec("c", 3),)),
            report(1),
            TrialSaved(1.5, "a", 0, Checkpoint(1, "a/1", "here")),
            report(2),
            TrialSaved(2.5, "a", 0, Checkpoint(2, "a/2", "here", in_memory=True)),
            BudgetExtended(3.0, "a", 4),
            report(1, "b"),
            ReportEnd(
                "b", "g", state="FAILED", iteration=1, at=4.0, failure=Failure("error", "no", "tb", b"exception")
            ),
            StopRequested(5.0, "c"),
        )
    )
    a, b, c = recovered.groups["g"].values()
    assert (a.trial, a.budget, a.reported, a.ended) == (SPEC, 9, 2, None)
    assert a.checkpoint == Checkpoint(2, "a/2", "here", in_memory=True)
    assert (b.ended, recovered.failures["b"]) == ("FAILED", Failure("error", "no", "tb"))
    assert c.ended == "STOPPED"
    assert recovered.at == 5.0 and recovered.unfinished and not recovered.torn


class Name(str):
    """A text of the user's own class, as of NumPy's ``choice``."""

    __slots__ = ()


def test_what_users_name_and_count_by_classes_of_their_own_is_written_as_what_it_is() -> None:
    spec = TrialSpec(Name("a"), np.int64(3), priority=np.float32(2.0), config=((Name("lr"), np.str_("x")),))
    events = (
        GroupSubmitted(0.0, "0", (spec,), GroupTerms(Name("ann"))),
        StopRequested(1.0, np.str_("a")),
        DeviceAdded(2.0, Device(np.int64(1), speed=np.float32(0.5))),
    )
    recovered = replay(lines(*events))
    assert recovered.groups["0"]["a"].trial == TrialSpec("a", 3, priority=2.0, config=(("lr", "x"),))
    assert recovered.terms["0"] == GroupTerms("ann")
    assert recovered.places == [DeviceAdded(2.0, Device(1, speed=0.5))]
    many = tuple(TrialSpec(Name(f"t{number}"), 1) for number in range(300))
    entry, batches = encode_apart(GroupSubmitted(0.0, "0", many)) or pytest.fail("they are few")
    assert json.loads(json.dumps([entry, *batches]))[1][0]["trial_id"] == "t0"


def test_what_the_user_paused_stays_paused_until_it_is_resumed_or_ends() -> None:
    recovered = replay(
        lines(
            GroupSubmitted(0.0, "g", tuple(TrialSpec(name, 5) for name in "abcd")),
            *(PauseRequested(1.0, name) for name in "abcd"),
            NotePaused("a", at=1.5, iteration=0, why="paused by the user"),
            ResumeRequested(2.0, "b"),
            ReportEnd("c", "g", state="DONE", iteration=5, at=3.0),
            BudgetExtended(4.0, "c", 1),
            StopRequested(5.0, "d"),
        )
    )
    assert {name: history.paused for name, history in recovered.groups["g"].items()} == {
        "a": True,
        "b": False,
        "c": False,
        "d": False,
    }
    (event,) = recovered.events(9.0)
    again = replay(lines(event))
    assert again.groups["g"]["a"].paused


def test_what_the_submitter_said_of_a_trial_counts_in_a_session_that_goes_on() -> None:
    entries = lines(
        GroupSubmitted(0.0, "g", (TrialSpec("a", 1), TrialSpec("b", 1), TrialSpec("c", 1))),
        report(1),
        ReportEnd("a", "g", state="DONE", iteration=1, at=1.0),
        StopRequested(2.0, "a", TrialState.DONE),
        StopRequested(2.0, "b", TrialState.PAUSED),
        StopRequested(2.0, "c"),
    )
    for _ in range(2):  # a session that goes on writes what it took over
        entries += lines(*replay(entries).events(3.0))
    hand = Hand()
    hand.do(*replay(entries).events(0.0))
    group = hand.state.groups["g"]
    assert {each.outcome for each in group.ended} == {TrialState.DONE, TrialState.PAUSED, None}
    assert group.known == 2, "one comes back as another trial"


def test_a_checkpoint_that_is_gone_is_replaced_by_a_durable_one() -> None:
    recovered = replay(
        lines(
            GroupSubmitted(0.0, "g", (TrialSpec("a", 5),)),
            report(1),
            TrialSaved(1.5, "a", 0, Checkpoint(1, "a/1")),
            report(2),
            TrialSaved(2.5, "a", 0, Checkpoint(2, "a/2", in_memory=True)),
        )
    )
    (event,) = recovered.events(10.0, readable=lambda checkpoint: not checkpoint.in_memory)
    assert event.trials[0].checkpoint == Checkpoint(1, "a/1")
    (event,) = recovered.events(10.0, readable=lambda _: False)
    assert event.trials[0].checkpoint is None


def test_a_done_trial_that_was_extended_is_not_done() -> None:
    done = ReportEnd("a", "g", state="DONE", iteration=1, at=1.0)
    entries = lines(GroupSubmitted(0.0, "g", (TrialSpec("a", 1),)), report(1), done, BudgetExtended(2.0, "a", 2))
    (history,) = replay(entries).groups["g"].values()
    assert (history.ended, history.budget) == (None, 3)


def test_a_trial_that_finished_early_is_extended_from_there() -> None:
    done = ReportEnd("a", "g", state="DONE", iteration=2, at=1.0)
    (history,) = replay(lines(GroupSubmitted(0.0, "g", (TrialSpec("a", 9),)), done)).groups["g"].values()
    assert history.budget == 2


def test_a_trial_that_was_forgotten_does_not_come_back_and_its_id_stays_taken() -> None:
    entries = lines(
        GroupSubmitted(0.0, "g", (TrialSpec("a", 1), TrialSpec("b", 3))),
        report(1),
        TrialSaved(1.0, "a", 0, Checkpoint(1, "a/1")),
        ReportEnd("a", "g", state="FAILED", iteration=1, at=1.0, failure=Failure("error", "no")),
        TrialForgotten(2.0, "a"),
        ReportEnd("a", "g", state="STOPPED", iteration=1, at=2.0),
    )
    for _ in range(2):  # a session that goes on writes what it took over
        recovered = replay(entries)
        assert list(recovered.groups["g"]) == ["b"] and not recovered.durable
        assert list(recovered.failures) == ["a"], "why it failed is known"
        entries += lines(*recovered.events(3.0))
    hand = Hand()
    hand.do(*replay(entries).events(0.0))
    assert hand.states() == {"b": "STARTING"}
    with pytest.raises(InvalidFieldError, match="taken"):
        hand.submit("a", group="h")


def test_a_call_of_an_earlier_session_is_not_made_again() -> None:
    entries = lines(
        GroupSubmitted(0.0, "g", (TrialSpec("a", 1),)),
        report(1),
        ReportEnd("a", "g", state="DONE", iteration=1, at=1.0),
        CallRequested(2.0, "a", call_id=0, method="method", payload=b""),
    )
    hand = Hand()
    hand.do(*replay(entries).events(0.0))
    assert hand.states() == {"a": "DONE"}


def test_most_events_and_commands_are_not_written() -> None:
    assert encode(Tick(0.0)) is None
    assert encode(RunIteration("a", (0,), 1)) is None
    assert encode(TrialAsked(0.0, "a", 0, request_id=0, payload=b"")) is None
    assert encode(ReportRequest(trial_id="a", group_id="g", lane_id=0, request_id=0, payload=b"")) is None


def test_the_outcome_of_a_forgotten_trial_is_recovered() -> None:
    recovered = replay(
        lines(
            GroupSubmitted(0.0, "g", (TrialSpec("a", 1), TrialSpec("b", 1), TrialSpec("c", 1))),
            report(1),
            ReportEnd("a", "g", state="DONE", iteration=1, at=1.0),
            StopRequested(2.0, "a", "DONE"),
            ReportEnd("a", "g", state="STOPPED", iteration=1, at=2.0),
            TrialForgotten(2.0, "a"),
            ReportEnd("b", "g", state="FAILED", iteration=0, at=3.0, failure=Failure("error", "no")),
            StopRequested(3.0, "b"),
            TrialForgotten(3.0, "b"),
        )
    )
    a, b = recovered.past.values()
    assert (recovered.forgotten, a.reported, a.ended, b.ended) == ({"g": ["a", "b"]}, 1, "STOPPED", "FAILED")
    assert recovered.failures == {"b": Failure("error", "no")}
    assert recovered.outcomes == {"a": "DONE"}
    assert list(recovered.groups["g"]) == ["c"]


def test_a_trial_that_its_submitter_failed_has_failed_though_it_had_not_left_its_lane() -> None:
    failure = Failure("metric", "it reported none")
    recovered = replay(
        lines(
            GroupSubmitted(0.0, "g", (TrialSpec("a", 1), TrialSpec("b", 2), TrialSpec("c", 1))),
            ReportEnd("a", "g", state="DONE", iteration=1, at=1.0),
            *(FailRequested(2.0, name, failure) for name in "abc"),
            ReportEnd("c", "g", state="FAILED", iteration=1, at=2.0, failure=failure),
        )
    )
    assert [history.ended for history in recovered.groups["g"].values()] == ["FAILED"] * 3
    assert recovered.failures == dict.fromkeys("abc", failure)


def test_an_entry_names_its_class_and_has_its_fields() -> None:
    (stop, end) = lines(
        StopRequested(1.0, "a"),
        ReportEnd("a", "g", state="FAILED", iteration=1, at=4.0, failure=Failure("error", "no", "tb", b"e")),
    )
    assert json.loads(stop) == {
        "v": journal.VERSION,
        "what": "StopRequested",
        "at": 1.0,
        "trial_id": "a",
        "outcome": None,
        "now": False,
    }
    expected = {"kind": "error", "message": "no", "traceback": "tb", "exception": None, "squeezed": False}
    expected |= {"site": "", "is_form": False}
    assert json.loads(end)["failure"] == expected


def test_a_field_that_cannot_be_read_is_named_with_its_line() -> None:
    first, second = lines(GroupSubmitted(0.0, "g", (TrialSpec("a", 5),)), report(1))
    wrong = json.loads(first)
    wrong["trials"][0]["budget"] = "five"
    with pytest.raises(InvalidFieldError, match=r"^trials\[0\]\.budget='five': must be a number \(line 2\)"):
        replay([second, json.dumps(wrong)])
    with pytest.raises(InvalidFieldError, match=r"^group_id='g': is of no group .*\(line 1\)"):
        replay(lines(TrialsAdded(1.0, "g", (TrialSpec("c", 3),))))


def test_devices_and_resizes_are_told_in_order() -> None:
    happened = [
        DeviceAdded(0.0, Device(0, "here", "gpu", memory_bytes=8.0)),
        NoteResize("a", at=1.0, width=2.0, device_ids=(0, 3), seconds=0.25),
        NoteDeviceLost(3, 2.0),
    ]
    assert replay(lines(*happened)).places == happened


def test_a_killed_lane_is_written_with_its_reason_and_changes_no_trial() -> None:
    submitted = GroupSubmitted(0.0, "g", (TrialSpec("a", 5),))
    (entry,) = lines(KillLane(3, "was in the way", at=7.0))
    told = {"what": "KillLane", "lane_id": 3, "reason": "was in the way", "at": 7.0}
    assert json.loads(entry).items() >= told.items()
    recovered = replay([*lines(submitted), entry])
    assert recovered.groups == replay(lines(submitted)).groups and recovered.at == 7.0


@pytest.mark.parametrize("timeout", ["auto", None, 0.5, 30.0])
def test_the_limit_of_an_iteration_is_recovered(timeout: Any) -> None:
    spec = TrialSpec("a", 5, iteration_timeout_s=timeout)
    assert replay(lines(GroupSubmitted(0.0, "g", (spec,)))).groups["g"]["a"].trial == spec


def test_drains_are_written_and_change_no_trial() -> None:
    submitted = GroupSubmitted(0.0, "g", (TrialSpec("a", 5),))
    drained = lines(
        DeviceDraining(1.0, 0, 31.0),
        SessionDraining(2.0, 27.0),
        NoteDrained(3.0, device_id=None, unsaved=("a",)),
        NoteDrained(4.0, device_id=0, unsaved=()),
    )
    assert [json.loads(line)["what"] for line in drained[1:3]] == ["SessionDraining", "NoteDrained"]
    recovered = replay([*lines(submitted), *drained])
    assert recovered.groups == replay(lines(submitted)).groups and recovered.at == 4.0


def test_a_torn_last_line_is_passed_over() -> None:
    entries = lines(GroupSubmitted(0.0, "g", (TrialSpec("a", 5),)), report(1))
    recovered = replay([*entries, entries[-1][:20], "", "\n"])
    assert recovered.torn and recovered.groups["g"]["a"].reported == 1
    assert replay([line.encode() for line in entries]).groups == recovered.groups


@pytest.mark.parametrize(
    "second",
    [
        GroupSubmitted(5.0, "g", (TrialSpec("b", 2),)),
        GroupSubmitted(5.0, "h", (SPEC,)),
        TrialsAdded(5.0, "g", (SPEC,)),
    ],
)
def test_a_journal_of_two_sessions_is_known_by_what_was_submitted_twice(second: Event) -> None:
    first = [GroupSubmitted(0.0, "g", (SPEC,)), StopRequested(1.0, "a")]
    assert not replay(lines(*first)).mixed
    assert not replay(lines(*first, *replay(lines(*first)).events(2.0))).mixed, "it was resumed"
    assert replay(lines(*first, second)).mixed
    if second.group_id == "h":
        assert replay(lines(*first, TrialForgotten(2.0, "a"), second)).mixed, "its id stays taken"


def test_a_torn_line_elsewhere_is_an_error() -> None:
    entries = lines(GroupSubmitted(0.0, "g", (TrialSpec("a", 5),)), report(1))
    with pytest.raises(InvalidFieldError, match="line 1 is not JSON"):
        replay([entries[0][:10], entries[1]])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"v": 99, "what": "GroupSubmitted"}, "unknown version"),
        ({"what": "GroupSubmitted"}, "unknown version"),
        ({"v": journal.VERSION, "what": "Party"}, "line 1 is of an unknown kind"),
        ({"v": journal.VERSION, "what": ["Tick"]}, "line 1 is of an unknown kind"),
        ({"v": journal.VERSION, "what": "GroupSubmitted", "group_id": "g"}, r"^at=None: is missing \(line 1\)"),
        ({"v": journal.VERSION, "what": "StopRequested", "at": 0.0, "trial_id": "a", "why": 1}, "why=1: is no field"),
        ([], "not an object"),
    ],
)
def test_lines_of_unknown_kind_are_errors(entry: object, message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        replay([json.dumps(entry)])


def test_the_newest_profile_is_recovered() -> None:
    profile = Profile()
    profile.observe("key", 2.0)
    snapshots = [ProfileSaved(0.0, Profile().to_json()), ProfileSaved(1.0, profile.to_json())]
    recovered = replay([json.dumps(encode(snapshot)) for snapshot in snapshots])
    assert recovered.profile is not None
    assert recovered.profile.seconds_per_iteration("key") == 2.0


def test_a_recovered_session_goes_on_and_reports_each_iteration_once() -> None:
    entries = lines(
        GroupSubmitted(0.0, "g", (TrialSpec("a", 4), TrialSpec("b", 2), TrialSpec("c", 1, can_save=False))),
        report(1),
        TrialSaved(1.5, "a", 0, Checkpoint(1, "a/1")),
        report(2),
        report(1, "b"),
        report(2, "b"),
        ReportEnd("b", "g", state="DONE", iteration=2, at=4.0),
        report(1, "c"),
        ReportEnd("c", "g", state="DONE", iteration=1, at=5.0),
    )
    hand = Hand(profile=Known(packing=1, width=1))
    hand.do(*replay(entries).events(0.0))
    assert hand.states() == {"a": "STARTING", "b": "DONE", "c": "DONE"}
    assert hand.state.groups["g"].open == 1
    hand.started("a", 1)
    hand.iterate("a", 3)
    assert hand.reports("a") == [3, 4]
    hand.extend("b")
    hand.started("b", 0)
    hand.iterate("b", 4)
    assert hand.reports("b") == [3, 4]
    hand.extend("c")
    hand.started("c", 0)
    hand.iterate("c", 3)
    assert hand.reports("c") == [2, 3], "it cannot be saved, and runs from the beginning"


@pytest.mark.parametrize("seed", range(20))
def test_a_driver_killed_at_any_moment_loses_no_trial(seed: int) -> None:
    rng = random.Random(seed)
    session = RandomSession(rng, Chances(own_save=0.3))
    written: list[str] = []
    handle = session.state.handle

    def recording(*events: Event) -> list[Command]:
        commands = handle(*events)
        written.extend(lines(*events, *commands))
        return commands

    session.state.handle = recording  # type: ignore[method-assign]
    for _ in range(rng.randint(5, 120)):
        steps = [lambda: session.submit(2), session.extend, session.stop, session.hear, session.tick]
        rng.choice([*steps, session.call, session.forget])()
        session.work(10)
        session.hear()
    after = RandomSession(rng, Chances())
    after._next_group, after.forgotten = session._next_group, session.forgotten
    after.reported = dict(session.reported)
    recovered = replay(written)
    after.ends = {
        trial_id: history.ended
        for group in recovered.groups.values()
        for trial_id, history in group.items()
        if history.ended is not None
    }
    after.handle(*recovered.events(session.backend.now))
    assert after.state.trials.keys() == session.state.trials.keys()
    assert isinstance(after.state, EngineState)
    for group_id, trial_ids in recovered.forgotten.items():
        for trial_id in trial_ids:
            after.refused(TrialsAdded(session.backend.now, group_id, (TrialSpec(trial_id, 1),)))
    after.drain()


def test_the_terms_of_groups_are_resumed_and_missing_ones_are_plain() -> None:
    terms = GroupTerms("ann", 2.0, preempt=True, expected_trials=9)
    events = [GroupSubmitted(0.0, "g", (TrialSpec("a", 2),), terms), GroupSubmitted(1.0, "h", (TrialSpec("b", 2),))]
    entries = [encode(event) for event in events]
    assert entries[0] is not None and entries[0]["terms"]["owner"] == "ann"
    assert entries[1] is not None
    del entries[1]["terms"]  # As a journal of an older version has it.
    recovered = replay(json.dumps(entry) for entry in entries)
    assert recovered.terms == {"g": terms, "h": PLAIN_TERMS}
    first, second = recovered.events(5.0)
    assert (first.terms, second.terms) == (terms, PLAIN_TERMS)
    again = replay(json.dumps(encode(event)) for event in (first, second))
    assert again.terms == recovered.terms, "resumed once more"
    hand = Hand(1)
    hand.do(first), hand.do(second)
    assert hand.state.groups["g"].terms == terms and hand.trial("a").group_priority == 2.0


def test_what_earlier_versions_wrote_for_reports_is_passed_over() -> None:
    kept = {"v": journal.VERSION, "what": "NoteKeptWidth", "trial_id": "a", "at": 7.5, "width": 2.0}
    for entry in ({**kept, "stall_s": 8.0}, {**kept, "stall_s": {}}):
        assert replay([json.dumps(entry)]).at == 7.5
