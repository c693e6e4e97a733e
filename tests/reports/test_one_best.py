"""All who say which trial is the best say the same: the session as it runs, and all readers of its folder."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import fluid
from fluid.engine.commands import Report, ReportEnd
from fluid.engine.events import BudgetExtended, Failure
from fluid.rehearsal.outcome import outcome_of
from fluid.reports.run.loader import load_run
from fluid.reports.tables.ranking import best_iteration
from fluid.reports.tables.ranking import best_of as best_of_run
from fluid.reports.tables.ranking import ranked as ranked_rows
from fluid.results.best import best_of, merit_of, ranked
from fluid.results.metrics import Goal
from fluid.session.folder.resume import read_session
from fluid.session.inbox import GroupInbox
from fluid.trainables.encoded_metrics import encode_metrics
from fluid.trialgroup import Search, Shown, Trial, TrialGroup, TrialState
from tests.reports.conftest import Session, train

pytestmark = pytest.mark.slow

VALUES = [0.0, 1.0, 2.0, math.nan, math.inf, None]


class Told:
    """A session of one group: what its inbox is told, and its folder."""

    def __init__(self, path: Path, mode: str, trials: int) -> None:
        self.search = Search("loss", mode)
        self.numbers: dict[str, int] = {}
        self.open: set[str] = set()
        self.done: set[str] = set()
        self.present: set[str] = set()
        first = [self._make(None) for _ in range(trials)]
        self.folder = Session(path, {})
        self.folder.submit("g", first, self.search)
        self.group = TrialGroup(first, "g", search=self.search)
        self.inbox = GroupInbox("0", self.group)
        self.inbox.keep_forgotten()

    def _make(self, shown: int | None) -> Trial:
        trial_id = f"t{len(self.numbers)}"
        self.numbers[trial_id] = 0
        self.open.add(trial_id)
        self.present.add(trial_id)
        as_other = None if shown is None else Shown(f"s{shown}", {}, iterations=10 * len(self.numbers))
        return Trial(train, {}, budget=9, trial_id=trial_id, shown=as_other)

    def add(self, shown: int | None) -> None:
        trial = self._make(shown)
        self.folder.add("g", [trial])
        self.group.add(trial)
        self.inbox.reopen(trial.id)

    def report(self, trial: str, value: float | None) -> None:
        self.numbers[trial] += 1
        number, at = self.numbers[trial], float(sum(self.numbers.values()))
        metrics = {"loss": value}
        written = {"loss": repr(value)} if value is not None and not math.isfinite(value) else metrics
        self.folder.results((trial, number, at - 1.0, at, 1.0, (0,), written))
        self.inbox.take(
            Report(
                *(trial, "0"),
                iteration=number,
                metrics=encode_metrics(metrics),
                seconds=1.0,
                width=1.0,
                device_ids=(0,),
                at=at,
                rows=1,
            )
        )

    def end(self, trial: str, state: TrialState) -> None:
        failure = Failure("error", "ValueError: x") if state is TrialState.FAILED else None
        self.folder.end(trial, state.value, self.numbers[trial], failure)
        self.inbox.take(ReportEnd(trial, "0", state=state, iteration=self.numbers[trial], at=0.0, failure=failure))
        self.open.discard(trial)
        if state is TrialState.DONE:
            self.done.add(trial)

    def say(self, trial: str, outcome: str) -> None:
        self.folder.stop(trial, TrialState(outcome))  # type: ignore[arg-type]
        self.inbox.stop(trial, outcome)

    def extend(self, trial: str) -> None:
        self.folder.happened(BudgetExtended(0.0, trial, 3))
        self.inbox.reopen(trial)
        self.open.add(trial)
        self.done.discard(trial)

    def forget(self, trial: str) -> None:
        self.folder.forget(trial)
        self.inbox.drop(trial, None)
        self.present.discard(trial)
        self.done.discard(trial)


def play(told: Told, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Lets something happen to one of the trials."""
    what = draw(st.sampled_from(["report", "report", "report", "end", "add", "say", "extend", "forget"]))
    if what == "add":
        told.add(draw(st.sampled_from([None, 0, 1])))
        return
    those = {"extend": told.done, "forget": told.present - told.open}
    some = sorted(those.get(what, told.open))
    if not some:
        return
    trial = draw(st.sampled_from(some))
    if what == "report":
        told.report(trial, draw(st.sampled_from(VALUES)))
    elif what == "end":
        told.end(trial, draw(st.sampled_from([TrialState.DONE, TrialState.STOPPED, TrialState.FAILED])))
    elif what == "say":
        told.say(trial, draw(st.sampled_from(["DONE", "STOPPED", "FAILED"])))
    elif what == "extend":
        told.extend(trial)
    else:
        told.forget(trial)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["min", "max"]), st.integers(1, 4), st.integers(0, 25), st.data())
def test_all_who_say_which_trial_is_the_best_agree(mode: str, trials: int, steps: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = Told(Path(folder, "run"), mode, trials)
        try:
            for _ in range(steps):
                play(told, data.draw)
        finally:
            path = told.folder.close()
        live = told.inbox.facts.best
        goal = Goal("loss", mode == "min")
        loaded = fluid.load(path)
        found = best_of(loaded.trials, goal)
        expected = None if found is None else (found.trial_id, found.value, found.iteration)
        assert expected == (None if live is None else (live.trial_id, live.value, live.iteration))
        assert found is None or live is None or live.failed == (found.trial.state == TrialState.FAILED)
        by_merit = [one.trial_id for one in ranked(loaded.trials, lambda one: merit_of(one, goal))]
        assert found is None or by_merit[0] == found.trial_id

        run = load_run(path)
        shown = best_of_run(run, goal)
        value, iteration = (None, None) if shown is None or goal is None else best_iteration(shown, goal)
        assert expected == (None if iteration is None else (shown.trial_id, value, iteration.number))
        assert [run.trials[row].trial_id for row in ranked_rows(run.trials, goal)] == by_merit
        assert outcome_of(path, "loss", mode).best == (None if expected is None else expected[1])

        again = read_session(path).trackers()["0"].best()
        assert expected == (None if again is None else (again.trial_id, again.value, again.iteration))
