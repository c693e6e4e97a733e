"""What groups require, whose they are and how urgent: at submit, at add, in the run folder, resumed, and shown."""

from __future__ import annotations

import io
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fluid
from fluid import Device, FluidExecutor, Requires, Trial, TrialGroup
from fluid.display.dashboard import render
from fluid.errors import InvalidFieldError
from fluid.loggers.prometheus import SessionCollector
from fluid.reports.run.loader import load_run
from fluid.results.submitted import GroupLine

GIB = 2.0**30


def train(config: Any) -> Iterator[dict[str, float]]:
    for step in range(config.get("steps", 2)):
        yield {"loss": config["x"] / (step + 1)}


def executor(path: Path, **options: Any) -> FluidExecutor:
    devices = [Device(0, memory_bytes=8 * GIB), Device(1, memory_bytes=2 * GIB, tags="small")]
    options = {"backend": "local", "devices": devices, "packing": "off", "verbose": 0, **options}
    return FluidExecutor(run_dir=path, **options)


def trials(prefix: str, number: int, **fields: Any) -> list[Trial]:
    return [Trial(train, {"x": float(each)}, trial_id=f"{prefix}{each}", budget=2, **fields) for each in range(number)]


def devices_of(path: Path, trial_id: str) -> set[int]:
    lines = map(json.loads, (path / "results.jsonl").read_text().splitlines())
    return {device for line in lines if line["trial"] == trial_id for device in line["devices"]}


@pytest.mark.slow
def test_trials_get_what_their_group_requires_at_submit_and_at_add(tmp_path: Path) -> None:
    with executor(tmp_path) as running:
        group = TrialGroup(trials("a", 2), requires=Requires(memory_bytes=4 * GIB, kind="cpu"), owner="ann")
        assert "requires=Requires(memory_bytes=" in repr(group) and repr(group).endswith("owner='ann')")
        handle = running.submit_trialgroup(group)
        own = Trial(train, {"x": 1.0}, trial_id="own", requires=Requires(memory_bytes=GIB, tags="small"))
        handle.add(*trials("b", 1), own)
        handle.wait()
        handle.extend("a0", 2)
        handle.wait()
        assert not handle.failures
    for trial_id in ("a0", "a1", "b0"):
        assert devices_of(tmp_path, trial_id) == {0}, "only the first device has 4 GiB"
    assert devices_of(tmp_path, "own") == {1}, "the trial's own fields win over the group's"


@pytest.mark.slow
def test_what_no_device_can_serve_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with executor(tmp_path) as running:
        first = running.submit_trialgroup(TrialGroup(trials("a", 1)))
        with pytest.raises(InvalidFieldError) as caught:
            running.submit_trialgroup(TrialGroup(trials("b", 2), name="large", requires=Requires(memory_bytes=9 * GIB)))
        text = str(caught.value)
        assert caught.value.field == "requires"
        assert "1 x cpu of 8 GiB on 'localhost'" in text and "Requires(wait=True) waits for one" in text
        with pytest.raises(InvalidFieldError, match="kind='gpu'"):  # The trial's own field wins, and fits nowhere.
            own = trials("c", 1, requires=Requires(kind="gpu"))
            running.submit_trialgroup(TrialGroup(own, requires=Requires(kind="cpu")))
        with pytest.raises(InvalidFieldError, match="kind='gpu'"):
            first.add(*trials("d", 1, requires=Requires(kind="gpu")))
        first.wait()
        assert [group.name for group in running.status().groups] == [first.name]
        again = running.submit_trialgroup(TrialGroup(trials("b", 2)))  # No id of the refused group is taken.
        again.wait()
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert {line.get("name") for line in lines if "trial" not in line} == {first.name, again.name}


@pytest.mark.slow
def test_a_group_waits_for_a_device_that_comes_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with executor(tmp_path) as running:
        requires = Requires(model="H100", wait=True)
        with caplog.at_level(logging.WARNING, logger="fluid.session"):
            handle = running.submit_trialgroup(TrialGroup(trials("w", 1), name="later", requires=requires))
        assert "trials of 'later' wait until there is a device with model 'H100'; there are 1 x cpu of" in caplog.text
        other = running.submit_trialgroup(TrialGroup(trials("o", 2)))
        assert other.wait(60)
        (group, _) = running.status().groups
        assert group.awaited == ("a device with model 'H100'",) and group.eta is None
        assert handle.eta is None and handle.forecast() is None and handle.states == {"w0": "QUEUED"}
        console = Console(file=io.StringIO(), width=100)
        console.print(render(running.status(), 100, 24))
        assert "waits for  later: a device with model 'H100'" in console.file.getvalue()  # type: ignore[attr-defined]
        running.session.add_device(Device(7, model="NVIDIA H100 80GB HBM3"))
        assert handle.wait(60) and handle.states == {"w0": "DONE"}
        assert running.status().groups[0].awaited == ()
    (story,) = (lines for (_, trial), lines in load_run(tmp_path).stories.items() if trial == "w0")
    assert any("it waited for a device with model 'H100'" in line.text for line in story)


def slow(config: Any) -> Iterator[dict[str, float]]:
    for step in range(2):
        time.sleep(0.2)
        yield {"loss": config["x"] / (step + 1)}


@pytest.mark.slow
def test_a_story_tells_which_devices_were_taken_and_behind_whom_a_trial_waited(tmp_path: Path) -> None:
    with executor(tmp_path) as running:
        of_ann = [Trial(slow, {"x": 1.0}, trial_id=f"a{each}", budget=2) for each in range(2)]
        first = running.submit_trialgroup(TrialGroup(of_ann, name="first", owner="ann"))
        of_bob = [Trial(slow, {"x": 1.0}, trial_id="b0", budget=2)]
        requires = Requires(memory_bytes=4 * GIB)
        second = running.submit_trialgroup(TrialGroup(of_bob, name="second", owner="bob", requires=requires))
        assert [group.place is not None for group in running.status().groups] == [True, True]
        assert first.wait(60) and second.wait(60)
    run = load_run(tmp_path)
    texts = [line.text for line in run.stories["1", "b0"]]
    assert texts[0] == "submitted, to run 2 iterations; it requires memory of at least 4 GiB"
    assert "the only device that it may use was taken, at first cpu 0 by a" in texts[1]
    # Later on a lane of cpu 0 may take memory there, which the text then says of both devices.
    waited = texts[1].partition("; from ")[0]
    assert "it waited behind ann" in waited and "cpu 1" not in waited
    assert not any("behind" in line.text for line in run.stories["0", "a0"])


@pytest.mark.slow
def test_terms_are_written_shown_and_resumed(tmp_path: Path) -> None:
    with executor(tmp_path, group_policy="fifo", fairness=1.5) as running:
        requires = Requires(memory_bytes=4 * GIB, wait=True)
        group = TrialGroup(trials("a", 2), name="first", requires=requires, owner="ann")
        handle = running.submit_trialgroup(group, priority=3.0, preempt=True)
        plain = running.submit_trialgroup(TrialGroup(trials("b", 1), name="plain"))
        handle.wait(), plain.wait()
        first, second = running.status().groups
        assert (first.owner, first.priority, first.preempt) == ("ann", 3.0, True)
        assert first.said == "of ann, priority 3, preempts" and second.said == ""
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    written = [line for line in lines if "trial" not in line]
    asked = {"memory_bytes": 4 * GIB, "wait": True}
    told = {"group": "0", "name": "first", "owner": "ann", "priority": 3.0, "preempt": True, "requires": asked}
    assert [{**line, "crc": 0} for line in written] == [
        {**told, "crc": 0},
        {"group": "1", "name": "plain", "crc": 0},
    ]

    run = load_run(tmp_path)
    said = "of ann, priority 3, preempts, requires memory of at least 4 GiB"
    assert [group.said for group in run.groups] == [said, ""]
    assert run.policy_text == "groups ordered by fifo, fairness 1.5"

    devices = [Device(0, memory_bytes=8 * GIB), Device(1, memory_bytes=2 * GIB, tags="small")]
    resumed = FluidExecutor.resume(tmp_path, backend="local", devices=devices, packing="off", verbose=0)
    with resumed:
        assert resumed.session._state.groups["0"].terms.preempt
        (first, second) = resumed.status().groups
        assert (first.owner, first.priority, first.preempt, second.said) == ("ann", 3.0, True, "")
        handle = resumed.handles[0]
        handle.add(*trials("c", 2))
        handle.wait()
    assert devices_of(tmp_path, "c0") == devices_of(tmp_path, "c1") == {0}, "the resumed group still requires it"
    facts = json.loads((tmp_path / "session.json").read_text())
    assert (facts["group_policy"], facts["fairness"]) == ("fifo", 1.5), "the session's own, as none was given"


def test_prometheus_is_told_whose_groups_are_and_what_awaits_devices(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with executor(tmp_path) as running:
        requires = Requires(kind="gpu", wait=True)
        running.submit_trialgroup(TrialGroup(trials("a", 1), name="first", requires=requires, owner="ann"), priority=3)
        running.submit_trialgroup(TrialGroup(trials("b", 1), name="plain"))
        families = {family.name: family.samples for family in SessionCollector(running.status, lambda: 0).collect()}
    terms = [(one.labels["group"], one.labels["owner"], one.value) for one in families["fluid_group_priority"]]
    assert terms == [("first", "ann", 3.0), ("plain", "", 1.0)]
    awaits = {one.labels["group"]: one.value for one in families["fluid_group_awaits_devices"]}
    assert awaits == {"first": 1.0, "plain": 0.0}


def test_a_line_that_cannot_be_used_is_read_as_far_as_it_can() -> None:
    bad = {"group": "3", "owner": 4, "priority": "high", "preempt": 1, "requires": {"kind": "tpu"}}
    assert GroupLine.read(bad) == GroupLine("3")
    good = GroupLine("x", None, Requires(tags="a|b", wait=True))
    assert GroupLine.read(json.loads(json.dumps(good.entry("1")))) == good


def test_a_sweep_passes_on_whose_it_is_and_what_it_requires(tmp_path: Path) -> None:
    with executor(tmp_path) as running:
        said: dict[str, Any] = {"requires": Requires(memory_bytes=4 * GIB), "owner": "eve", "priority": 2.0}
        fluid.run(train, {"x": [1.0, 2.0]}, metric="loss", algorithm="grid", budget=2, **said, name="sweep")
        (group,) = running.status().groups
        assert (group.owner, group.priority, group.preempt) == ("eve", 2.0, False)
        assert {device for trial in ("sweep-00000", "sweep-00001") for device in devices_of(tmp_path, trial)} <= {0}
        with pytest.raises(InvalidFieldError, match=r"requires=Requires\(kind='gpu'\)"):
            fluid.run(train, {"x": [1.0]}, metric="loss", algorithm="grid", requires=Requires(kind="gpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("owner", ""),
        ("owner", 3),
        ("requires", "gpu"),
        ("priority", -1),
        ("priority", math.nan),
        ("priority", "high"),
        ("preempt", 1),
    ],
)
def test_bad_terms_are_refused_at_the_call(tmp_path: Path, field: str, value: object) -> None:
    with executor(tmp_path) as running:
        handle = running.submit_trialgroup(TrialGroup(trials("a", 2)))
        submitted = {field: value} if field in ("priority", "preempt") else {}
        with pytest.raises(InvalidFieldError) as caught:
            group = TrialGroup(trials("b", 1), **({} if submitted else {field: value}))  # type: ignore[arg-type]
            running.submit_trialgroup(group, **submitted)  # type: ignore[arg-type]
        assert caught.value.field == field and (caught.value.value is value or caught.value.value == value)
        with pytest.raises(InvalidFieldError) as caught:
            fluid.run(train, {"x": [1.0]}, metric="loss", algorithm="grid", **{field: value})  # type: ignore[arg-type]
        assert caught.value.field == field
        assert handle.wait(60) and not handle.failures
        assert len(running.status().groups) == 1


@pytest.mark.parametrize(("field", "value"), [("group_policy", "x"), ("group_policy", None), ("fairness", -1)])
def test_a_bad_policy_is_refused_when_an_executor_is_made(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        executor(tmp_path / "run", **{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)
