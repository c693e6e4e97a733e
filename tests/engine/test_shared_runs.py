"""Trials that are one run until their configs part."""

from __future__ import annotations

from engine_helpers import Hand, none

from fluid.engine.commands import (
    Command,
    Fork,
    ForkSaved,
    NoteTrial,
    Report,
    ReportEnd,
    ReportSetBack,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import (
    Checkpoint,
    Failure,
    GroupRecovered,
    GroupSubmitted,
    IterationDone,
    StartState,
    TrialFailed,
    TrialForked,
    TrialHistory,
    TrialSpec,
)
from fluid.trainables.encoded_metrics import IterationRun, encode_metrics

AT = 3


def run_spec(run: str = "run", budget: int = AT, parent: str | None = None, at: int = 0, **spec: object) -> TrialSpec:
    start = None if parent is None else StartState(parent, at, is_shared=True)
    return TrialSpec(run, budget, start=start, is_shared_run=True, **spec)


def spec_of(trial: str, budget: int = 5, run: str = "run", at: int = AT, **spec: object) -> TrialSpec:
    return TrialSpec(trial, budget, start=StartState(run, at, is_shared=True), **spec)


class Sharing(Hand):
    """Runs a tree of trials."""

    def begin(self, *specs: TrialSpec) -> list[Command]:
        commands = self.do(GroupSubmitted(self.now, "tree", specs))
        self.start_all()
        return commands

    def step(self, trial: str, times: int = 1) -> list[Command]:
        commands: list[Command] = []
        for _ in range(times):
            iteration = self.trial(trial).progress.done + 1
            commands = self.iterate(trial, metrics=encode_metrics({"loss": iteration}))
        return commands

    def answer(self) -> None:
        """Answers all forks that were asked for and can be there."""
        for item in list(self.log):
            trial = self.state.trials.get(item.child if isinstance(item, Fork) else getattr(item, "trial_id", ""))
            if isinstance(item, Fork | ForkSaved) and trial is not None and trial.awaits:
                at, parent = trial.spec.start.at, trial.spec.start.parent
                if self.trial(parent).progress.reported >= at:
                    lane = item.lane_ids[0] if isinstance(item, Fork) else None
                    found = Checkpoint(at, f"{trial.trial_id}/{at}")
                    self.do(TrialForked(self.now, trial.trial_id, parent=parent, lane_id=lane, checkpoint=found))
        for lane in self.state.lanes:
            if not lane.ready:
                self.ready(lane.lane_id)
        for trial_id, state in self.states().items():
            if state == "STARTING":
                self.started(trial_id, self.trial(trial_id).progress.done)

    def sources(self, trial: str) -> list[tuple[int, str]]:
        return [
            (item.iteration, item.source) for item in self.log if isinstance(item, Report) and item.trial_id == trial
        ]


def test_what_a_run_reports_is_reported_for_each_trial_with_its_source() -> None:
    hand = Sharing(2)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    assert [item.trial_id for item in hand.log if isinstance(item, StartTrial)] == ["run"]
    hand.step("run", AT)
    hand.answer()
    for trial in ("a", "b"):
        hand.step(trial, 2)
        assert hand.sources(trial) == [(1, "run"), (2, "run"), (3, "run"), (4, ""), (5, "")]
        assert hand.end(trial) == "DONE"
    assert hand.reports("run") == [1, 2, 3]


def test_forks_are_asked_for_before_the_run_comes_to_them() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    assert [(item.child, item.at) for item in hand.log if isinstance(item, Fork)] == [("a", 3), ("b", 3)]


def test_a_run_within_a_run_reports_what_both_did() -> None:
    hand = Sharing(2)
    inner = run_spec("inner", 5, "run", AT)
    hand.begin(run_spec(), inner, spec_of("a", 6, "inner", 5), spec_of("b", 6, "inner", 5), spec_of("c", 6))
    hand.step("run", AT)
    hand.answer()
    hand.step("inner", 2)
    hand.answer()
    hand.step("a")
    expected = [(1, "run"), (2, "run"), (3, "run"), (4, "inner"), (5, "inner"), (6, "")]
    assert hand.sources("a") == expected and hand.sources("b") == expected[:5]
    assert hand.sources("inner") == [(1, "run"), (2, "run"), (3, "run"), (4, ""), (5, "")]


def test_a_run_of_short_iterations_is_passed_on_as_one() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a", budget=2), spec_of("b"))
    metrics = tuple(encode_metrics({"loss": each}) for each in (1.0, 2.0, 3.0))
    run = IterationRun((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), metrics)
    lane, hand.now = hand.lane("run"), 3.0
    hand.do(IterationDone(3.0, "run", lane, iteration=3, seconds=1.0, metrics=metrics[-1], run=run))
    told = {item.trial_id: item for item in hand.log if isinstance(item, Report)}
    assert [each[0] for each in told["b"].iterations] == [1, 2, 3]
    assert [(each[0], each[3].numbers) for each in told["a"].iterations] == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert hand.end("a") == "DONE"


def test_a_trial_that_comes_to_its_budget_before_it_parts_is_done_without_a_process() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(budget=2), spec_of("a", budget=2, extends=True), spec_of("b", budget=1, extends=True))
    hand.step("run")
    assert hand.end("b") == "DONE" and hand.end("a") is None
    hand.step("run")
    assert hand.end("a") == "DONE" and hand.states()["run"] == "DONE"
    assert none(hand.log, Fork)


def test_a_trial_that_is_extended_gets_what_the_run_did_meanwhile_and_the_run_goes_on() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(budget=2), spec_of("a", budget=2, extends=True), spec_of("b", budget=1, extends=True))
    hand.step("run", 2)
    hand.extend("b", 1)
    assert hand.sources("b") == [(1, "run"), (2, "run")] and hand.ends("b") == ["DONE", "DONE"]
    assert none(hand.log, ReportSetBack), "it has lost nothing"
    hand.extend("b", 3)
    assert hand.states()["b"] == "PAUSED" and hand.trial("run").progress.budget == AT
    hand.start_all()
    hand.step("run")
    hand.answer()
    hand.step("b", 2)
    assert hand.sources("b")[2:] == [(3, "run"), (4, ""), (5, "")]
    assert hand.reports("a") == [1, 2]


def test_a_run_that_goes_beyond_where_a_trial_parts_reports_it_what_is_common() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a"))
    hand.extend("run", 2)
    hand.step("run", AT + 2)
    assert hand.sources("a") == [(1, "run"), (2, "run"), (3, "run")]


def test_a_nested_run_catches_up_from_the_outside_in() -> None:
    hand = Sharing(1)
    inner = run_spec("inner", 1, "run", AT)
    hand.begin(run_spec(), inner, spec_of("a", 1, "inner", 5), spec_of("b", 1, "inner", 5), spec_of("c", 6))
    hand.step("run", 2)
    assert hand.reports("a") == [1] and hand.reports("inner") == [1]
    hand.extend("a", 1)
    assert hand.reports("a") == [1, 2] and hand.reports("inner") == [1, 2] and hand.reports("b") == [1]


def test_a_run_that_nobody_needs_any_more_is_stopped_and_not_before() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    assert none(hand.stop("a"), StopTrial)
    assert [item.trial_id for item in hand.stop("b") if isinstance(item, StopTrial)] == ["run"]


def test_a_run_that_raises_fails_its_trials_as_it_would_each_alone() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(retry_errors=False), spec_of("a"), spec_of("b"))
    hand.step("run")
    hand.do(TrialFailed(hand.now, "run", hand.lane("run"), Failure("error", "ValueError: lr")))
    ends = {item.trial_id: item for item in hand.log if isinstance(item, ReportEnd)}
    assert [ends[trial].failure.message for trial in ("a", "b")] == ["ValueError: lr"] * 2


def test_infeasible_runs_are_infeasible_trials() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    hand.do(TrialFailed(hand.now, "run", hand.lane("run"), Failure("infeasible", "too large")))
    assert [hand.end(trial) for trial in ("a", "b")] == ["INFEASIBLE"] * 2


def test_a_run_that_asks_for_what_its_trials_do_not_agree_on_leaves_them_to_run_alone() -> None:
    hand = Sharing(2)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    hand.step("run")
    hand.do(TrialFailed(hand.now, "run", hand.lane("run"), Failure("parted", "asked for iteration 9")))
    assert hand.states() == {"run": "FAILED", "a": "STARTING", "b": "STARTING"}
    assert [(item.trial_id, item.text) for item in hand.log if isinstance(item, NoteTrial)] == [
        ("a", "runs alone from its start: asked for iteration 9"),
        ("b", "runs alone from its start: asked for iteration 9"),
    ]
    hand.start_all()
    hand.step("a", 5)
    assert hand.sources("a") == [(1, "run"), (2, ""), (3, ""), (4, ""), (5, "")]


def test_a_state_that_cannot_be_saved_leaves_trials_to_run_alone() -> None:
    hand = Sharing(2)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    hand.step("run", AT)
    hand.do(TrialForked(hand.now, "a", parent="run", lane_id=0, problem="a lock cannot be pickled", cannot=True))
    assert hand.trial("a").spec.start is None and hand.states()["a"] == "STARTING"


def test_a_run_that_ends_by_itself_ends_its_trials() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    hand.iterate("run", finished=True)
    assert [hand.end(trial) for trial in ("a", "b")] == ["DONE", "DONE"]
    assert [hand.reports(trial) for trial in ("a", "b")] == [[1], [1]]


def test_a_run_repeats_nothing_to_its_trials_after_its_lane_died() -> None:
    hand = Sharing(1)
    hand.begin(run_spec(), spec_of("a"), spec_of("b"))
    hand.step("run", 2)
    hand.lose(hand.lane("run"))
    hand.start_all()
    hand.step("run", AT)
    hand.answer()
    assert hand.reports("a") == [1, 2, 3]


def test_a_session_that_goes_on_goes_on_with_its_tree() -> None:
    hand = Sharing(2)
    saved = Checkpoint(4, "a/4")
    past = (
        TrialHistory(run_spec(), budget=AT, reported=AT, checkpoint=Checkpoint(AT, "run/3"), ended="DONE"),
        TrialHistory(spec_of("a"), budget=5, reported=4, checkpoint=saved),
        TrialHistory(spec_of("b"), budget=5, reported=AT),
        TrialHistory(spec_of("c", budget=1), budget=1, reported=1, ended="DONE"),
    )
    commands = hand.do(GroupRecovered(hand.now, "tree", past))
    assert [item.checkpoint for item in commands if isinstance(item, StartTrial)] == [saved]
    assert [item.trial_id for item in commands if isinstance(item, ForkSaved)] == ["b"]
    hand.start_all()
    hand.extend("c", 4)  # What the run has reported meanwhile is not at hand: it runs alone.
    assert hand.trial("c").spec.start is None
