"""What statuses and handles show of trials that wait for a state to start from, and of runs that trials share."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_ENGINE := str(Path(__file__).parents[1] / "engine")) not in sys.path:
    sys.path.append(_ENGINE)
from engine_helpers import Hand

import fluid
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Report, ReportEnd, ReportStart
from fluid.engine.events import GroupSubmitted, PauseRequested, StartState, TrialSpec
from fluid.resources import Device
from fluid.search import schedule
from fluid.session.inbox import GroupInbox
from fluid.session.status import GroupFacts, GroupStatus
from fluid.session.status_reader import StatusReader, standing_of
from fluid.trainables.encoded_metrics import encode_metrics
from fluid.trial_fields import StartFrom
from fluid.trialgroup import PAUSED_BY_USER, Search, Trial, TrialGroup, TrialState


class Known:
    shows = 0

    def __init__(self, shared_runs: Collection[str], search: Search | None) -> None:
        self.facts = GroupFacts(name="g", shared_runs=frozenset(shared_runs), search=search)


def group_of(hand: Hand, *shared_runs: str, search: Search | None = None) -> GroupStatus:
    known = {name: Known(shared_runs, search) for name in hand.state.groups}
    (group,) = StatusReader(hand.state, known).read(hand.now).groups
    return group


def forking() -> Hand:
    """``a`` runs, at iteration 1 of 4; ``child`` is to start from its iteration 3."""
    hand = Hand()
    child = TrialSpec("child", 6, start=StartState("a", 3))
    hand.do(GroupSubmitted(hand.now, "g", (TrialSpec("a", 4), child)))
    hand.start_all()
    hand.iterate("a")
    return hand


def sharing() -> Hand:
    """``run`` is run once for ``a`` and ``b``, which go on from iteration 3 to 5; it is at iteration 1."""
    hand = Hand()
    start = StartState("run", 3, is_shared=True)
    specs = TrialSpec("run", 3, is_shared_run=True), TrialSpec("a", 5, start=start), TrialSpec("b", 5, start=start)
    hand.do(GroupSubmitted(hand.now, "g", specs))
    hand.start_all()
    hand.iterate("run")
    return hand


def test_a_trial_that_waits_for_a_state_is_queued_and_not_paused() -> None:
    hand = forking()
    assert hand.trial("child").state is TrialState.PAUSED
    assert group_of(hand).trials == {"RUNNING": 1, "QUEUED": 1}
    assert standing_of(hand.state, ["g"]).states["child"] is TrialState.QUEUED


def test_one_that_its_user_paused_meanwhile_is_paused() -> None:
    hand = forking()
    hand.do(PauseRequested(hand.now, "child"))
    assert group_of(hand).trials == {"RUNNING": 1, PAUSED_BY_USER: 1}
    assert standing_of(hand.state, ["g"]).states["child"] is TrialState.PAUSED


def test_shared_runs_are_not_counted() -> None:
    hand = sharing()
    group = group_of(hand, "run")
    assert group.trials == {"QUEUED": 2}
    assert group.iterations == 10
    hand.iterate("run", 2)
    assert hand.trial("run").state is TrialState.DONE
    assert group_of(hand, "run").trials == {"QUEUED": 2}
    search = Search("loss", "min", trials=2, extends=True)
    assert group_of(hand, "run", search=search).trials == {"QUEUED": 2}
    known = {name: Known(["run"], None) for name in hand.state.groups}
    (closing,) = StatusReader(hand.state, known).closing()
    assert closing.states == {"UNFINISHED": 2}


def report(trial: str, iteration: int, at: float, source: str = "") -> Report:
    facts: dict[str, Any] = {"seconds": 1.0, "width": 1.0, "device_ids": (0,), "source": source}
    return Report(trial, "0", iteration=iteration, metrics=encode_metrics({"loss": 1.0 / iteration}), at=at, **facts)


def test_an_inbox_counts_the_time_of_shared_iterations_once() -> None:
    trials = [Trial(print, {}, budget=2, trial_id=name) for name in "ab"]
    inbox = GroupInbox("0", TrialGroup(trials, "g", search=Search("loss", "min")))
    inbox.shared_runs = frozenset(["run"])
    inbox.take(ReportStart("run", "0", at=0.0, width=1.0, device_ids=(0,)))
    inbox.take(report("run", 1, at=1.0))
    inbox.take(ReportEnd("run", "0", state=TrialState.DONE, iteration=1, at=1.0, failure=None))
    for name in "ab":
        inbox.take(report(name, 1, at=1.0, source="run"))
        inbox.take(report(name, 2, at=3.0))
        inbox.take(ReportEnd(name, "0", state=TrialState.DONE, iteration=2, at=3.0, failure=None))
    assert (inbox.facts.results, inbox.facts.result_seconds) == (3, 3.0)
    assert (inbox.facts.first_start, inbox.makespan) == (0.0, 3.0)
    assert [*inbox.states] == ["a", "b"]
    found = [(each.trial_id, each.iteration, each.source, each.device_seconds) for each in inbox.results()]
    assert found == [("a", 1, "run", 0.0), ("a", 2, "", 1.0), ("b", 1, "run", 0.0), ("b", 2, "", 1.0)]


def test_the_makespan_has_the_shared_iterations_that_came_first() -> None:
    inbox = GroupInbox("0", TrialGroup([Trial(print, {}, trial_id="a")], "g"))
    inbox.shared_runs = frozenset(["run"])
    inbox.take(report("run", 1, at=5.0))
    inbox.take(report("a", 1, at=5.0, source="run"))
    assert inbox.makespan == 1.0


class Savable:
    """Never run here."""

    def setup(self, config: Any) -> None: ...
    def step(self) -> None: ...
    def save_checkpoint(self, folder: str) -> None: ...
    def load_checkpoint(self, folder: str) -> None: ...


def simulated() -> SimulatedBackend:
    return SimulatedBackend(lambda trial_id, config: Truth(1.0), [Device(0), Device(1)], saves=True)


def executor_in(folder: Path) -> fluid.FluidExecutor:
    return fluid.FluidExecutor(simulated(), run_dir=folder, verbose=0)


def test_a_handle_and_its_folder_tell_of_forks_alike(tmp_path: Path) -> None:
    with executor_in(tmp_path) as executor:
        # In one group, as a parent that runs may be beyond iteration 4 by the time that it is forked.
        parent = Trial(Savable, {}, budget=6, trial_id="a")
        fork = Trial(Savable, {"lr": 1.0}, budget=6, trial_id="b", start_from="a", at=4)
        handle = executor.submit_trialgroup(fluid.TrialGroup([parent, fork], "g"))
        assert handle.wait()
        _, child = handle.trials
        assert child.trial_id == "b"
        assert child.start == StartFrom("a", 4)
        assert [each.iteration for each in child.results] == [5, 6]
    assert [each.start for each in fluid.load(tmp_path).trials] == [None, StartFrom("a", 4)]


def test_a_handle_and_its_folder_tell_of_shared_iterations_alike(tmp_path: Path) -> None:
    rates = (schedule({0: 1.0, 3: rate}) for rate in (0.1, 0.2))
    trials = [Trial(Savable, {"lr": rate}, budget=5, trial_id=f"t{k}") for k, rate in enumerate(rates)]
    with executor_in(tmp_path) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup(trials, "g"))
        assert handle.wait()
        assert handle.makespan == 5.0
        assert handle.states == {"t0": "DONE", "t1": "DONE"}
        for found in (handle.trials, fluid.load(tmp_path).trials):
            assert [each.trial_id for each in found] == ["t0", "t1"]
            sources = [[each.source for each in one.results] for one in found]
            assert sources == [["g-shared-00000"] * 3 + [""] * 2] * 2
            assert [each.start for each in found] == [StartFrom("g-shared-00000", 3, is_shared=True)] * 2
            assert [each.device_seconds for each in found] == [2.0, 2.0]
    with fluid.FluidExecutor.resume(tmp_path, backend=simulated(), verbose=0) as executor:
        (again,) = executor.handles
        assert {each.trial_id for each in again.results()} == {"t0", "t1"}
        assert again.makespan == 5.0
