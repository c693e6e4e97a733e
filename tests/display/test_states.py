from __future__ import annotations

from fluid.display.names import ended_trials, has_ended, listed_states, state_style, states_text
from fluid.trialgroup import TrialState


def test_every_state_is_listed_with_its_number() -> None:
    trials = {state.value: number for number, state in enumerate(TrialState, 1)}
    listed = listed_states(trials)
    assert {state for state, _ in listed} == set(TrialState)
    assert all(text == f"{trials[state]} {state.lower()}" for state, text in listed)
    assert listed[0][0] is TrialState.RUNNING
    ended = [TrialState.DONE, TrialState.STOPPED, TrialState.INFEASIBLE, TrialState.FAILED]
    assert [state for state, _ in listed[-4:]] == ended


def test_states_of_reports_stand_before_those_that_have_ended() -> None:
    trials = {"DONE": 1200, "UNFINISHED": 2, "RUNNING": 0, "QUEUED": 3}
    assert states_text(trials) == "3 queued, 2 unfinished, 1,200 done"


def test_which_trials_have_ended() -> None:
    assert ended_trials({"DONE": 2, "STOPPED": 3, "FAILED": 1, "QUEUED": 4}) == 6
    assert has_ended({"DONE": 2, "FAILED": 1, "QUEUED": 0})
    assert not has_ended({"DONE": 2, "PAUSED": 1})


def test_failures_stand_out() -> None:
    styles = {state_style(state) for state in TrialState if state is not TrialState.FAILED}
    assert "red" in state_style(TrialState.FAILED)
    assert not any("red" in style for style in styles)
    assert state_style("RUNNING") == ""
