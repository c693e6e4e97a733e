"""Deadlines and weights of groups: at submit, as they pass, in the run folder, resumed, and shown."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fluid
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.display.dashboard import render
from fluid.engine.events import PLAIN_TERMS, GroupDeadline
from fluid.errors import InvalidFieldError
from fluid.policies.owners.deadlines import deadline_of
from fluid.rehearsal import ReplayedIteration
from fluid.rehearsal.outcome import outcome_of
from fluid.reports.run.loader import load_run
from fluid.reports.tables.run import as_json
from fluid.results.submitted import GroupLine
from fluid.session.specs import terms_of


class Const:
    """Replayed: config["s"] seconds an iteration."""

    @staticmethod
    def replay(config: Any, iterations: int) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": 1.0 / i}, config["s"]) for i in iterations]  # type: ignore[attr-defined]


def simulated(path: Path, **options: Any) -> FluidExecutor:
    options = {"devices": 2, "packing": "off", "max_width": 1, "verbose": 0, **options}
    return FluidExecutor(backend="simulated", run_dir=path, **options)


def group(name: str, trials: int, seconds: float, budget: int, owner: str | None = None, key: str = "") -> TrialGroup:
    made = [
        Trial(Const, {"s": seconds}, budget=budget, trial_id=f"{name}{each}", profile_key=key or name)
        for each in range(trials)
    ]
    return TrialGroup(made, name=name, owner=owner)


def iterations(path: Path, name: str) -> dict[str, int]:
    lines = map(json.loads, (path / "results.jsonl").read_text().splitlines())
    return {line["trial"]: line["iteration"] for line in lines if line["trial"].startswith(name)}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- at the call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ({"deadline": 0}, "deadline", 'or text such as "2h"'),
        ({"deadline": "soon"}, "deadline", 'or text such as "2h"'),
        ({"deadline": []}, "deadline", '[("1h", 1), ("2h", 3)]'),
        ({"deadline": ["1h", "2h"]}, "deadline[0]", '[("1h", 1), ("2h", 3)]'),
        ({"deadline": [("1h", 1), ("1h", 3)]}, "deadline[1]", "its time must be after"),
        ({"deadline": [("1h", 3), ("2h", 1)]}, "deadline[1]", "its cost must be above 3"),
        ({"deadline": [("1h", 0)]}, "deadline[0]", "its cost must be above 0"),
        ({"deadline": 1e200}, "deadline", "must be at most 1e+12"),
        ({"deadline": [(1, 1), (1e13, 2)]}, "deadline[1]", "must be at most 1e+12"),
        ({"deadline": [("1h", 1e13)]}, "deadline[0]", "must be at most 1e+12"),
        ({"weight": 1e13}, "weight", "must be at most 1e+12"),
        ({"weight": 0}, "weight", "must be above 0"),
        ({"weight": "much"}, "weight", "must be a number"),
        ({"deadline": 5, "on_miss": "drop"}, "on_miss", "must be one of late, stop"),
        ({"on_miss": "stop"}, "on_miss", "needs a deadline"),
    ],
)
def test_what_is_no_deadline_is_refused(given: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        terms_of(group("a", 1, 1.0, 1), 1.0, False, **given)
    assert caught.value.field == field and text in str(caught.value)


def test_a_deadline_is_a_time_or_steps() -> None:
    assert deadline_of("2h") == deadline_of(7200) == deadline_of(timedelta(hours=2)) == GroupDeadline(((7200.0, 1.0),))
    steps = deadline_of([("1h", 1), (7200, 3)], "stop")
    assert steps == GroupDeadline(((3600.0, 1.0), (7200.0, 3.0)), "stop")
    assert steps is not None and steps.text == "1 h (cost 1), 2 h (cost 3), then stops"
    assert deadline_of(None) is None


def test_bad_terms_leave_nothing_behind(tmp_path: Path) -> None:
    with simulated(tmp_path) as running:
        with pytest.raises(InvalidFieldError, match="weight"):
            running.submit_trialgroup(group("a", 1, 1.0, 1), weight=-1.0)
        with pytest.raises(InvalidFieldError, match="on_miss"):
            fluid.submit_trialgroup(group("a", 1, 1.0, 1), on_miss="stop")
        handle = fluid.submit_trialgroup(group("a", 1, 1.0, 1), deadline="1m", weight=2.0, on_miss="stop")
        assert handle.wait() and len(running.status().groups) == 1
        assert running.status().groups[0].said == "deadline 1 min, then stops, weight 2"


# -- what happens at a deadline --------------------------------------------------------------------------------


def test_what_cannot_end_stops_at_the_deadline_and_what_can_runs_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(tmp_path) as running:
        handle = running.submit_trialgroup(group("a", 4, 50.0, 4), deadline=330.0, on_miss="stop")
        assert handle.wait()
        assert [state.value for state in handle.states.values()] == ["DONE", "DONE", "STOPPED", "STOPPED"]
        assert len(running.devices) == 2, "all devices are kept"
    assert iterations(tmp_path, "a") == {"a0": 4, "a1": 4, "a2": 2, "a3": 2}, "300 s: a third one ends at 350 s"
    assert outcome_of(tmp_path, group="a").makespan_s == pytest.approx(300.0)
    told = warnings(caplog)
    assert any(text.startswith("the deadline of 'a' in") and "cannot be met with 90%" in text for text in told)
    assert told[-1] == "'a': the deadline of 5 min 30 s has come: 2 of 4 trials were stopped"


def test_trials_run_on_after_a_deadline_that_was_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with simulated(tmp_path) as running:
        handle = running.submit_trialgroup(group("a", 4, 50.0, 4), deadline=330.0)
        assert handle.wait()
    assert set(iterations(tmp_path, "a").values()) == {4}
    assert warnings(caplog)[-1].startswith("'a' has missed its deadline of 5 min 30 s: it runs on")


def test_a_deadline_that_is_met_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with simulated(tmp_path) as running:
        assert running.submit_trialgroup(group("a", 4, 50.0, 4), deadline=420.0, on_miss="stop").wait()
    assert set(iterations(tmp_path, "a").values()) == {4} and warnings(caplog) == []


def test_what_was_measured_before_is_said_at_submission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with simulated(tmp_path) as running:
        assert running.submit_trialgroup(group("a", 4, 50.0, 4, key="net")).wait()
        running.submit_trialgroup(group("b", 4, 50.0, 4, key="net"), deadline=200.0)
        (said,) = warnings(caplog)  # Before anything of it has run.
        assert said.startswith("the deadline of 'b' in 3 min 20 s cannot be met with 90%")
        (status,) = (each for each in running.status().groups if each.name == "b")
        assert status.outlook == "deadline cannot be met"
        console = Console(file=io.StringIO(), width=140)
        console.print(render(running.status(), 140, 24))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "deadline 3 min 20 s, deadline cannot be met" in " ".join(shown.split())


def test_added_trials_have_the_deadline_of_their_group(tmp_path: Path) -> None:
    with simulated(tmp_path) as running:
        handle = running.submit_trialgroup(group("a", 1, 50.0, 2), deadline=220.0, on_miss="stop")
        assert handle.wait()
        handle.add(*group("b", 3, 50.0, 2).active)
        assert handle.wait()
        ended = {name: state.value for name, state in handle.states.items()}
        assert ended == {"a0": "DONE", "b0": "DONE", "b1": "DONE", "b2": "STOPPED"}, "two of them end at 200 s"
        handle.add(*group("c", 1, 50.0, 1).active)
        assert handle.wait()
        handle.add(*group("d", 1, 50.0, 1).active)
        assert handle.wait() and handle.states["d0"].value == "STOPPED", "the deadline has passed"


@pytest.mark.parametrize("lane_policy", ["fair", "longest_first", "srtf"])
@pytest.mark.parametrize(("deadline", "told"), [(400.0, 1), (2400.0, 0)])
def test_trials_that_take_turns_are_not_said_to_end_ever_later(
    tmp_path: Path, lane_policy: str, deadline: float, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(tmp_path, devices=1, packing="lane", lane_policy=lane_policy) as running:
        handle = running.submit_trialgroup(group("a", 3, 10.0, 60), deadline=deadline)
        other = running.submit_trialgroup(group("b", 2, 5.0, 10), deadline=3000.0)
        assert handle.wait() and other.wait()
    assert sum("of 'a'" in text and "cannot be met" in text for text in warnings(caplog)) == told


# -- several groups --------------------------------------------------------------------------------------------

SWEEPS = {"tight": (16, 50.0, 2, 460.0), "loose": (20, 15.0, 1, 2000.0)}


@pytest.mark.parametrize("policy", ["irs", "fifo"])
@pytest.mark.parametrize("owners", [("ann", "bob"), ("ann", "ann")])
@pytest.mark.parametrize("order", [("tight", "loose"), ("loose", "tight")])
def test_two_groups_that_can_both_meet_their_deadlines_do(
    tmp_path: Path, order: tuple[str, str], owners: tuple[str, str], policy: str
) -> None:
    with simulated(tmp_path, devices=4, group_policy=policy) as running:
        handles = []
        for name, owner in zip(order, owners, strict=True):
            *shape, deadline = SWEEPS[name]
            made = group(name, *shape, owner=owner)  # type: ignore[arg-type]
            handles.append(running.submit_trialgroup(made, deadline=deadline, on_miss="stop"))
        for handle in handles:
            assert handle.wait() and {state.value for state in handle.states.values()} == {"DONE"}


#: Devices, the group that is due first and the other one, which of them comes first, and whether both, or one, of their
#: keys were measured. A group: trials, seconds, budget, deadline.
TIGHT = {
    "nothing is tried on a device of what may be late": (2, (2, 5.0, 10, 57.5), (8, 20.0, 2, 242.0), "tight", ""),
    "nor of what nears its deadline": (1, (4, 5.0, 5, 115.0), (4, 50.0, 1, 345.0), "tight", ""),
    "what is unmeasured pauses for what is due before": (1, (8, 1.0, 2, 64.4), (24, 20.0, 10, 5607.0), "loose", ""),
    "and for nothing that is due later": (8, (8, 20.0, 5, 115.0), (4, 20.0, 1, 138.0), "tight", "one"),
    "what starts can pause, too": (2, (8, 1.0, 2, 32.2), (2, 20.0, 10, 285.0), "loose", "both"),
}


@pytest.mark.parametrize("case", TIGHT)
def test_a_tight_group_and_a_loose_one_both_meet_theirs(tmp_path: Path, case: str) -> None:
    devices, *groups, first, keys = TIGHT[case]
    shapes = dict(zip(("tight", "loose"), groups, strict=True))
    with simulated(tmp_path, devices=devices) as running:
        for name, (_, seconds, *_) in shapes.items():
            if keys == "both":
                running.submit_trialgroup(group(f"known {name}", 1, seconds, 2, key=name)).wait()
        handles = []
        for name in sorted(shapes, key=lambda name: name != first):
            trials, seconds, budget, deadline = shapes[name]
            made = group(name, trials, seconds, budget, key="net" if keys == "one" else name)
            handles.append(running.submit_trialgroup(made, deadline=deadline, on_miss="stop"))
        for handle in handles:
            assert handle.wait() and {state.value for state in handle.states.values()} == {"DONE"}


def test_what_is_unknown_is_not_taken_for_short_and_let_in_before_a_deadline(tmp_path: Path) -> None:
    with simulated(tmp_path, devices=2) as running:
        tight = running.submit_trialgroup(group("tight", 4, 50.0, 1), deadline=115.0, on_miss="stop")
        unknown = running.submit_trialgroup(group("unknown", 4, 50.0, 1))
        assert unknown.wait() and tight.wait()
        assert {state.value for state in tight.states.values()} == {"DONE"}


@pytest.mark.parametrize("order", [("tight", "loose"), ("loose", "tight")])
def test_two_sweeps_of_one_executor_that_can_both_meet_their_deadlines_do(
    tmp_path: Path, order: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    with simulated(tmp_path, devices=4, group_policy="fifo") as running:

        def sweep(name: str) -> None:
            trials, seconds, budget, deadline = SWEEPS[name]
            space = {"s": [seconds], "x": [float(each) for each in range(trials)]}
            options: dict[str, Any] = {"deadline": deadline, "name": name, "owner": name, "executor": running}
            found[name] = fluid.run(Const, space, metric="loss", algorithm="grid", budget=budget, **options)

        threads = [threading.Thread(target=sweep, args=(name,)) for name in order]
        running.session.hold.take()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.deadline is not None for each in running.status().groups] == [True, True]
    for name, result in found.items():
        assert [trial.iteration for trial in result.trials] == [SWEEPS[name][2]] * SWEEPS[name][0] and not result.notes
    assert warnings(caplog) == []


def test_a_tight_sweep_is_not_said_to_be_late_for_what_runs_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(tmp_path, devices=2) as running:
        later = running.submit_trialgroup(group("later", 16, 50.0, 4, key="net"), deadline="2h")
        space = {"s": [50.0], "x": [1.0, 2.0]}
        options: dict[str, Any] = {"deadline": 400.0, "name": "tight", "trial_options": {"profile_key": "net"}}
        result = fluid.run(Const, space, metric="loss", algorithm="grid", budget=4, **options)
        assert [trial.iteration for trial in result.trials] == [4, 4] and later.wait()
    assert warnings(caplog) == []


# -- what is told ------------------------------------------------------------------------------------------------


def test_why_tells_of_deadlines_and_of_those_before(tmp_path: Path) -> None:
    with simulated(tmp_path, devices=1) as running:
        first = running.submit_trialgroup(group("net", 2, 50.0, 2, owner="ann", key="net"), deadline="1h")
        first.wait(timeout=60.0)
        late = running.submit_trialgroup(group("late", 1, 50.0, 4, owner="bob", key="net"), deadline=100.0)
        plain = running.submit_trialgroup(group("plain", 1, 50.0, 1, owner="eve", key="net"), weight=0.001)
        assert first.wait() and late.wait() and plain.wait()
    run = load_run(tmp_path)
    stories = {trial: [line.text for line in lines] for (_, trial), lines in run.stories.items()}
    assert any("of its group, in" in text and "is met with" in text for text in stories["net1"])
    assert any("the deadline of its group, in 100 s, cannot be met" in text for text in stories["late0"])
    assert any("its group missed its deadline; its trials give way" in text for text in stories["late0"])
    assert any("it waited behind ann (deadline 1 h)" in text for text in stories["plain0"])
    told = {entry["name"]: entry for entry in as_json(run)["groups"]}
    assert told["late"]["deadline"] == [[100.0, 1.0]] and told["late"]["on_miss"] == "late"
    assert told["plain"]["deadline"] is None and told["plain"]["weight"] == 0.001
    assert [each.said for each in run.groups] == [
        "of ann, deadline 1 h",
        "of bob, deadline 1 min 40 s",
        "of eve, weight 0.001",
    ]


# -- the run folder ----------------------------------------------------------------------------------------------


def test_a_groups_line_keeps_its_deadline() -> None:
    terms = terms_of(group("a", 1, 1.0, 1, owner="ann"), 1.0, False, [("1h", 1), ("2h", 3)], 2.5, "stop")
    line = GroupLine("x", terms=terms, submitted_at=1000.0)
    assert GroupLine.read(json.loads(json.dumps(line.entry("0")))) == line
    left = line.terms_left(now=1000.0 + 5400.0).deadline
    assert left == GroupDeadline(((3600.0, 1.0), (7200.0, 3.0)), "stop", passed=5400.0)
    assert GroupLine.read({"group": "0", "name": "x"}).terms == PLAIN_TERMS
    for bad in ("2h", [[1.0]], [[2.0, 1.0], [1.0, 2.0]], [], [["a", 1.0]], [[float("nan"), 1.0]], [[1e200, 1.0]]):
        assert GroupLine.read({"group": "0", "deadline": bad, "weight": -1}).terms == PLAIN_TERMS


def slow(config: Any) -> Iterator[dict[str, float]]:
    for step in range(200):
        time.sleep(0.05)
        yield {"loss": 1.0 / (step + 1)}


@pytest.mark.slow
def test_what_is_left_of_a_deadline_counts_in_a_session_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"backend": "local", "devices": 1, "verbose": 0}
    trials = {name: [Trial(slow, {}, budget=200, trial_id=name)] for name in ("late", "stop", "far")}
    with FluidExecutor(run_dir=tmp_path, **options) as running:
        for name, made in trials.items():
            far = {"deadline": "1h", "weight": 3.0} if name == "far" else {"deadline": 0.5, "on_miss": name}
            running.submit_trialgroup(TrialGroup(made, name=name), **far)
        running.drain_all(10.0)
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    submitted = {line["name"]: line["submitted_at"] for line in lines if "name" in line}
    time.sleep(max(0.0, submitted["stop"] + 0.6 - time.time()))
    with FluidExecutor.resume(tmp_path, **options) as resumed:
        handles = {handle.name: handle for handle in resumed.handles}
        assert handles["stop"].wait(30) and handles["stop"].states["stop"].value == "STOPPED"
        groups = {each.name: each for each in resumed.status().groups}
        assert groups["far"].said == "deadline 1 h, weight 3" and groups["late"].outlook == "deadline missed"
        terms = resumed.session._state.groups["2"].terms
        assert terms.deadline is not None and 0.5 < terms.deadline.passed < 600.0, "what is left"
        for name in ("late", "far"):
            handles[name].stop(name)
    assert [each.said for each in load_run(tmp_path).groups][2] == "deadline 1 h, weight 3", "as it was submitted"


def test_groups_come_back_at_once_so_that_the_first_takes_no_device_that_is_anothers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "local", "devices": 1, "packing": "off", "verbose": 0}
    with FluidExecutor(run_dir=tmp_path, **options) as running:
        for name, weight in (("light", 1.0), ("heavy", 100.0)):
            running.submit_trialgroup(
                TrialGroup([Trial(slow, {}, budget=200, trial_id=name)], name=name), weight=weight
            )
        running.drain_all(10.0)
    with FluidExecutor.resume(tmp_path, **options) as resumed:
        handles = {handle.name: handle for handle in resumed.handles}
        while not (begun := [name for name, handle in handles.items() if handle.trials[0].iteration]):
            time.sleep(0.01)
        for name, handle in handles.items():
            handle.stop(name)
    assert begun == ["heavy"]
