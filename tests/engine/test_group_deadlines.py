"""Groups with a deadline or a weight in the engine: which comes first, what pauses for it, and what is said of it."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import NotePreempted, Pause, ReportEnd
from fluid.engine.events import GroupDeadline, GroupSubmitted, GroupTerms, TrialSpec
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.policies.owners.pauses import MOST_PAUSES, DeadlinePauses
from fluid.policies.owners.shares import GROUP_POLICIES
from fluid.resources import Device
from fluid.testing.play import Session
from fluid.testing.random_sessions import random_session


def due(seconds: float, *, owner: str | None = None, **more: float) -> GroupTerms:
    """Terms with one deadline."""
    return GroupTerms(owner, deadline=GroupDeadline(((seconds, 1.0),)), **more)  # type: ignore[arg-type]


class Play:
    """Groups on simulated devices; the seconds of an iteration are those of a trial's group.

    Args:
        devices: how many; one trial at a time is on each.
        options: of the engine; ``planner`` by name.
    """

    def __init__(self, devices: int = 4, *, planner: str = "portfolio", **options: object) -> None:
        self._seconds: dict[str, float] = {}
        self.backend = SimulatedBackend(
            lambda trial_id, config: Truth(self._seconds[trial_id.partition(" ")[0]]),
            [Device(index) for index in range(devices)],
        )
        engine = EngineState(make_planner(planner), max_packing=1, max_width=1, **options)  # type: ignore[arg-type]
        self.session = Session(engine, self.backend)

    def submit(
        self, group: str, trials: int, budget: int, seconds: float, terms: GroupTerms, key: str | None = None
    ) -> None:
        """Submits a group, of a profile key of its own or of ``key``, which may be measured."""
        self._seconds[group] = seconds
        specs = tuple(TrialSpec(f"{group} {number}", budget, profile_key=key or group) for number in range(trials))
        self.session.tell(GroupSubmitted(self.backend.now(), group, specs, terms))

    def until(self, at: float) -> None:
        self.session.run(lambda: self.backend.now() >= at)

    def ends(self) -> dict[str, float]:
        """When each group has ended; runs to the end."""
        self.session.run()
        found: dict[str, float] = {}
        for end in self.session.told(ReportEnd):
            found[end.trial_id.partition(" ")[0]] = end.at
        return found

    def pauses_for(self, group: str) -> list[NotePreempted]:
        return [note for note in self.session.told(NotePreempted) if (note.successor or "").startswith(group)]


LOOSE = {"whole": (12, 1, 25.0), "short steps": (4, 15, 5.0), "many": (60, 5, 1.0)}


@pytest.mark.parametrize("planner", ["portfolio", "dynamic"])
@pytest.mark.parametrize("owners", [("me", "me"), (None, "you")])
@pytest.mark.parametrize("loose_first", [False, True])
@pytest.mark.parametrize("shape", LOOSE)
def test_two_sweeps_that_can_both_meet_theirs_both_do(
    planner: str, owners: tuple[str | None, str], loose_first: bool, shape: str
) -> None:
    play = Play(planner=planner)
    submissions = [
        ("tight", 16, 2, 25.0, due(230.0, owner=owners[0])),
        ("loose", *LOOSE[shape], due(2000.0, owner=owners[1])),
    ]
    for group in submissions[::-1] if loose_first else submissions:
        play.submit(*group)
    ends = play.ends()
    assert ends["tight"] <= 230.0 and ends["loose"] <= 300.0, "200 s of one and 75 s of the other"


@pytest.mark.parametrize("policy", GROUP_POLICIES)
def test_deadlines_decide_under_every_group_policy(policy: str) -> None:
    play = Play(group_policy=policy)
    play.submit("first", 4, 1, 10.0, GroupTerms())
    play.submit("short", 8, 1, 10.0, due(500.0))
    play.submit("long", 8, 1, 40.0, due(95.0))
    assert play.ends() == pytest.approx({"first": 10.0, "long": 90.0, "short": 110.0})


def test_what_cannot_be_met_gives_way_and_ends_all_the_same() -> None:
    play = Play()
    play.submit("probe", 4, 1, 1.0, GroupTerms())
    play.submit("hopeless", 16, 2, 25.0, due(60.0))
    play.submit("fine", 8, 2, 25.0, due(220.0))
    play.submit("plain", 4, 2, 5.0, GroupTerms())
    ends = play.ends()
    assert ends["fine"] <= 220.0 and ends["plain"] < ends["hopeless"]


def test_what_was_missed_in_an_earlier_session_gives_way_until_it_was_late_for_as_long_as_its_deadline() -> None:
    def order(passed: float) -> list[str]:
        play = Play(1)
        play.submit("probe", 1, 2, 1.0, GroupTerms(), "net")
        late = GroupTerms(deadline=GroupDeadline(((300.0, 1.0),), passed=passed), weight=10.0)
        play.submit("late", 2, 30, 1.0, late, "net")
        play.submit("fine", 2, 40, 1.0, due(90.0), "net")
        ends = play.ends()
        return sorted(ends, key=ends.__getitem__)

    assert order(310.0) == ["probe", "fine", "late"]
    assert order(610.0) == ["probe", "late", "fine"]


def test_a_weight_brings_a_group_forward() -> None:
    def end(weight: float) -> float:
        play = Play()
        play.submit("first", 4, 1, 10.0, GroupTerms())
        play.submit("short", 8, 1, 10.0, GroupTerms())
        play.submit("heavy", 16, 1, 10.0, GroupTerms(weight=weight))
        return play.ends()["heavy"]

    assert end(1.0) == pytest.approx(70.0) and end(10.0) == pytest.approx(50.0)


def test_a_higher_priority_starts_first_whatever_is_due() -> None:
    play = Play()
    play.submit("first", 4, 1, 10.0, GroupTerms())
    play.submit("due", 4, 1, 10.0, due(25.0))
    play.submit("high", 4, 1, 10.0, GroupTerms(priority=2.0))
    assert play.ends() == pytest.approx({"first": 10.0, "high": 20.0, "due": 30.0})


@pytest.mark.parametrize("planner", ["portfolio", "dynamic", "static", "fifo"])
def test_long_trials_pause_for_a_group_that_would_be_late_and_no_others_do(planner: str) -> None:
    play = Play(planner=planner)
    play.submit("known", 1, 3, 10.0, GroupTerms(), "net")
    play.submit("long", 4, 120, 10.0, GroupTerms(), "net")
    play.until(100.0)
    play.submit("slack", 4, 3, 10.0, due(5000.0), "net")
    play.until(150.0)
    assert not play.pauses_for("slack"), "it is met without"
    play.submit("tight", 8, 3, 10.0, due(100.0), "net")
    ends = play.ends()
    assert ends["tight"] <= 150.0 + 100.0
    assert {note.trial_id.partition(" ")[0] for note in play.pauses_for("slack")} <= {"slack"}, "its own trials only"
    assert {note.trial_id.partition(" ")[0] for note in play.pauses_for("tight")} == {"long"}
    assert len(play.pauses_for("tight")) <= 4 * MOST_PAUSES
    assert ends["long"] <= 1200.0 + 60.0 + 30.0 + 40.0, "the others grow by its work"


@pytest.mark.parametrize("narrow", [4, 8])
def test_devices_are_kept_for_gangs_that_can_meet_their_deadline_so(narrow: int) -> None:
    """Trials of one device end one by one, and their times were unknown when the first gang began to wait."""
    seconds = {f"narrow {number}": 0.04 + 0.002 * number for number in range(narrow)}
    gangs = tuple(TrialSpec(f"gang {number}", 30, profile_key="gang", devices=2, gang=True) for number in range(2))
    backend = SimulatedBackend(lambda trial_id, config: Truth(seconds.get(trial_id, 0.05)), [Device(0), Device(1)])
    session = Session(EngineState(make_planner("portfolio"), max_packing=1, max_width=1), backend)
    session.tell(GroupSubmitted(0.0, "narrow", tuple(TrialSpec(each, 40, profile_key="narrow") for each in seconds)))
    session.tell(GroupSubmitted(0.0, "gang", gangs, due(5.7)))
    session.run()
    assert max(end.at for end in session.told(ReportEnd) if end.group_id == "gang") <= 5.7


def test_a_trial_pauses_for_deadlines_a_bounded_number_of_times() -> None:
    play = Play(1)
    play.submit("long", 1, 200, 1.0, GroupTerms(), "net")
    for number in range(8):
        play.until(20.0 * (number + 1))
        play.submit(f"tight{number}", 1, 5, 1.0, due(9.0), "net")
    play.ends()
    assert len(play.pauses_for("tight")) == MOST_PAUSES


@pytest.mark.parametrize("can_save", [True, False])
def test_only_a_trial_that_can_be_saved_pauses(can_save: bool) -> None:
    hand = Hand(devices=1, profile=Known(packing=1, width=1))
    hand.submit("long", budget=500, can_save=can_save)
    hand.started("long")
    hand.iterate("long", 3)
    hand.submit("tight", budget=5, terms=due(20.0))
    pauses = [each.trial_id for each in hand.tick() if isinstance(each, Pause)]
    assert pauses == (["long"] if can_save else [])


def test_only_pauses_that_were_made_count() -> None:
    hand = Hand(devices=1, profile=Known(packing=1, width=1))
    hand.submit("long", budget=500)
    hand.started("long")
    hand.iterate("long", 3)
    hand.submit("tight", budget=5, terms=due(20.0))
    (pauses,) = (each for each in hand.state.policies if isinstance(each, DeadlinePauses))
    for _ in range(2 * MOST_PAUSES):
        assert [leaving.trial_id for leaving, _ in pauses.choose()] == ["long"], "proposed, but not made"
    assert [each.trial_id for each in hand.tick() if isinstance(each, Pause)] == ["long"]


def test_what_is_said_of_a_group() -> None:
    play = Play()
    engine, now = play.session.engine, play.backend.now
    play.submit("plain", 4, 4, 10.0, GroupTerms())
    play.submit("fine", 8, 4, 10.0, due(1000.0))
    play.submit("vain", 40, 3, 10.0, due(150.0))
    assert engine.lateness("plain", 0.0) is None
    unmeasured = engine.lateness("fine", 0.0)
    assert unmeasured is not None and unmeasured.odds is unmeasured.can_be_met is None and not unmeasured.missed
    play.until(75.0)
    vain = engine.lateness("vain", now())
    assert (
        vain is not None and vain.odds == pytest.approx(0.0, abs=0.01) and vain.can_be_met is False and not vain.missed
    )
    assert vain.earliest_s is not None and vain.earliest_s > 75.0
    play.until(140.0)
    fine = engine.lateness("fine", now())
    assert fine is not None and fine.odds == pytest.approx(1.0, abs=0.01) and fine.can_be_met and not fine.missed
    assert fine.earliest_s is not None and fine.earliest_s <= 80.0
    late = engine.lateness("vain", 151.0)
    assert late is not None and late.missed and late.odds == 0.0 and late.can_be_met is False
    play.session.run(lambda: not engine.groups["fine"].open)
    assert engine.lateness("fine", now()) is None, "it has ended"


def test_a_group_with_a_deadline_is_an_owner_of_its_own() -> None:
    hand = Hand(devices=1)
    hand.submit("a", terms=GroupTerms("ann"))
    hand.submit("b", terms=due(10.0, owner="ann"))
    hand.submit("c", terms=GroupTerms("ann", weight=2.0))
    hand.submit("d", terms=GroupTerms("ann"))
    owners = [group.owner for group in hand.state.groups.values()]
    assert owners == [0, 1, 2, 0]


@pytest.mark.parametrize("seed", range(6))
def test_random_sessions_with_deadlines(seed: int) -> None:
    """What holds for every session holds for those, and everything ends."""
    random_session(seed, 150, with_deadlines=True, **({"max_packing": 1} if seed % 2 else {}))


#: A trial waited for ever for a lane that was ended as it cleaned up; one whose key had been parted had no quantum yet,
#: as far as was known.
@pytest.mark.parametrize(("seed", "more"), [(7307, {"max_packing": 1}), (7136, {})])
def test_random_sessions_with_deadlines_and_unknown_keys(seed: int, more: dict[str, int]) -> None:
    random_session(seed, 250, with_deadlines=True, new_keys=True, **more)


def test_sessions_without_deadlines_stay_as_they_were() -> None:
    """The option draws from numbers of its own."""
    plain, other = (random_session(5, 80, with_deadlines=wanted) for wanted in (False, True))
    assert plain.state.groups.keys() == other.state.groups.keys()
    assert any(group.terms.deadline for group in other.state.groups.values())
    assert not any(group.terms.deadline for group in plain.state.groups.values())
