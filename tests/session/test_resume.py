"""A session that is resumed from its run folder, whatever a kill, a full disk or a power cut left of its files."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.events import Checkpoint, GroupSubmitted, TrialSaved, TrialSpec
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.reports.run.loader import load_run
from fluid.resources import Device, MemoryNeed, Requires
from fluid.results.journal import encode
from fluid.results.submitted import GroupLine
from fluid.session.folder.files import AppendedFile
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.resume import read_session
from fluid.session.listeners import TrialListener
from fluid.trainables.payload import payload_of
from fluid.trial_fields import StartFrom
from fluid.trialgroup import Search, Trial, TrialGroup
from tests.checked_files import checked, without_checksums, write_checked

PATIENCE = 90.0
FILES = ("payloads.pkl", "trials.jsonl", "results.jsonl", "journal.jsonl")
#: Iterations that the trials of :func:`run` may do; an extension may be lost with the call that asked for it.
BUDGETS = {"a": (2, 4), "b": (3,), "c": (2,), "d": (2,)}


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Never run: the backend is simulated."""
    yield {}


def count_up(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        yield {"step": step, "pair": (step, config["x"])}


class Deaf(TrialListener):
    """Does nothing with what it hears."""


class Savable:
    """Never run either."""

    def step(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, folder: str) -> None:
        """Never called."""

    def load_checkpoint(self, folder: str) -> None:
        """Never called."""


def simulated(*, saves: bool = False) -> SimulatedBackend:
    return SimulatedBackend(lambda trial_id, config: Truth(config["seconds"]), [Device(0), Device(1)], saves=saves)


def trial(name: str, budget: int, seconds: float = 1.0, trainable: Any = train) -> Trial:
    return Trial(trainable, {"seconds": seconds}, budget=budget, trial_id=name)


def run(folder: Path, *, saves: bool = False) -> None:
    """A session of two groups, with trials that are added, extended, stopped and forgotten."""
    kind = Savable if saves else train
    with FluidExecutor(simulated(saves=saves), run_dir=folder, verbose=0) as executor:
        search = Search("loss", "max", trials=3)
        trials = [trial("a", 2, trainable=kind), trial("b", 3, 0.7, kind)]
        first = executor.submit_trialgroup(TrialGroup(trials, "first", search=search))
        assert first.wait(PATIENCE)
        second = executor.submit_trialgroup(TrialGroup([trial("c", 2, 1.3, kind)], "second"), Deaf())
        first.extend("a", 2)
        first.stop("b")
        first.add(trial("d", 2, trainable=kind))
        assert first.wait(PATIENCE) and second.wait(PATIENCE)
        first.forget("b")


def resume(folder: Path, backend: Any = None) -> FluidExecutor:
    return FluidExecutor.resume(folder, backend=backend or simulated(), verbose=0)


def finish(folder: Path) -> dict[str, list[int]]:
    """Resumes a session until its trials have ended; returns the iterations of each, as the handles give them."""
    told: dict[str, list[int]] = defaultdict(list)
    with resume(folder) as executor:
        for handle in executor.handles:
            assert handle.wait(PATIENCE)
            assert set(handle.states.values()) <= {"DONE", "STOPPED"}, handle.failures
            for result in handle.results():
                told[result.trial_id].append(result.iteration)
    return dict(told)


def written(folder: Path) -> dict[str, list[int]]:
    """The iterations of each trial in ``results.jsonl``."""
    found: dict[str, list[int]] = defaultdict(list)
    for line in (folder / "results.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found[entry["trial"]].append(entry["iteration"])
    return dict(found)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The folder of a session that ended in order."""
    run(tmp_path / "run")
    return tmp_path / "run"


# -- a kill at any moment ------------------------------------------------------------------------------------------


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """What sessions write, in order: the file, and the bytes."""
    found: list[tuple[str, bytes]] = []

    def record(file: AppendedFile, data: bytes) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        if name in FILES:
            found.append((name, data))
        return FileIO.write(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(AppendedFile, "write", record)
        yield found


@pytest.fixture(params=[False, True], ids=["unsaved", "saved"])
def writes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """What a session writes."""
    with recorded(monkeypatch) as found:
        run(tmp_path / "whole", saves=request.param)
    # A simulated checkpoint has no path. It can be restored if there is one, on disk: no process is to move it there.
    path = json.dumps(str(tmp_path)).encode()
    changes = {b'"path": ""': b'"path": ' + path, b'"in_memory": true': b'"in_memory": false'}
    for before, after in changes.items():
        found = [(name, data.replace(before, after)) for name, data in found]
    ends = defaultdict[str, int](int)
    for number, (name, data) in enumerate(found):  # Their lengths have changed.
        if name != "payloads.pkl":
            found[number] = name, checked(data.splitlines(keepends=True), ends[name])
        ends[name] += len(found[number][1])
    return found


def killed_in(folder: Path, writes: Sequence[tuple[str, bytes]], cut: int) -> None:
    """Makes the folder of a session that was killed when ``cut`` bytes of its last write were written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    *before, (last, data) = writes
    for file in FILES:
        content = b"".join(part for name, part in before if name == file)
        (folder / file).write_bytes(content + (data[:cut] if last == file else b""))


def require_each_once(folder: Path, where: Any) -> None:
    """Resumes a session twice, and compares what it has reported, and reports, with what it must."""
    whole = (folder / "results.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    was_told = [(entry["trial"], entry["iteration"]) for entry in map(json.loads, whole)]
    for _ in range(2):
        told = finish(folder)
        assert told == written(folder), where
        for trial_id, iterations in told.items():
            assert len(iterations) in BUDGETS[trial_id], (where, trial_id)
            assert iterations == list(range(1, len(iterations) + 1)), (where, trial_id)
        assert all(iteration in told[trial_id] for trial_id, iteration in was_told), where


@pytest.mark.slow
def test_a_kill_at_any_write_loses_and_repeats_no_iteration(
    writes: list[tuple[str, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, (_, data) in enumerate(writes, start=1):
        for cut in sorted({0, 1, len(data) // 2, len(data) - 1}):
            killed_in(tmp_path / "killed", writes[:number], cut)
            require_each_once(tmp_path / "killed", (number, cut))


def test_a_kill_at_any_write_of_a_session_that_was_resumed(
    writes: list[tuple[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    first = writes[: len(writes) // 2]
    killed_in(tmp_path / "first", first, len(first[-1][1]))
    with recorded(monkeypatch) as second:
        finish(tmp_path / "first")
    assert len(second) > 5
    for number, (_, data) in enumerate(second, start=1):
        for cut in (0, len(data) // 2):
            killed_in(tmp_path / "killed", [*first, *second[:number]], cut)
            require_each_once(tmp_path / "killed", (number, cut))


def test_results_are_written_first_and_payloads_before_the_journal(writes: list[tuple[str, bytes]]) -> None:
    files = [name for name, _ in writes]
    for number, (name, data) in enumerate(writes):
        if name == "results.jsonl":
            assert files[number + 1] == "journal.jsonl" and b"IterationReported" in writes[number + 1][1]
        if name == "journal.jsonl" and (b"GroupSubmitted" in data or b"TrialsAdded" in data):
            before = takewhile(lambda name: name in ("payloads.pkl", "trials.jsonl"), reversed(files[:number]))
            assert list(dict.fromkeys(before)) == ["trials.jsonl", "payloads.pkl"]


# -- torn files ----------------------------------------------------------------------------------------------------


TAILS = {
    "half a line": b'{"v": 2, "what": "Iteratio!',
    "no newline": b'{"v": 2}',
    "half a character": b'{"v": "\xc3',
    "no JSON": b"garbage\n",
    "zeros": bytes(5000),
    "zeros behind half a line": b'{"v"' + bytes(100_000),
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
@pytest.mark.parametrize("name", FILES)
def test_a_torn_tail_is_cut_off_once_and_for_all(
    ended: Path, name: str, tail: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = (ended / name).read_bytes()
    (ended / name).write_bytes(before + tail)
    expected = written(ended) if name != "results.jsonl" else None
    told = finish(ended)
    assert f"{name}: its last entry was not whole, and was cut off ({len(tail)} bytes)" in caplog.text
    assert (ended / name).read_bytes().startswith(before) and tail not in (ended / name).read_bytes()
    assert told == {"a": [1, 2, 3, 4], "b": [1, 2, 3], "c": [1, 2], "d": [1, 2]}
    assert expected in (None, told)
    caplog.clear()
    assert finish(ended) == told and not caplog.records


@pytest.mark.parametrize("name", FILES)
def test_a_last_entry_that_is_cut_in_two_can_be_resumed_twice(ended: Path, name: str) -> None:
    content = (ended / name).read_bytes()
    (ended / name).write_bytes(content[:-9])
    for _ in range(2):
        told = finish(ended)
        assert all(iterations == list(range(1, len(iterations) + 1)) for iterations in told.values())


def test_a_journal_line_that_is_damaged_before_the_end_is_named(ended: Path) -> None:
    lines = (ended / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (ended / "journal.jsonl").write_bytes(b"".join([*lines[:3], b'{"v": 2, \xff\n', *lines[3:]]))
    for _ in range(2):
        with pytest.raises(InvalidFieldError, match=r"run_dir=.*journal\.jsonl is damaged at line 4"):
            resume(ended)
    (ended / "journal.jsonl").write_bytes(b"".join(lines))
    finish(ended)


@pytest.mark.parametrize("name", ["results.jsonl", "trials.jsonl"])
def test_other_lines_that_are_damaged_before_the_end_are_skipped(
    ended: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = (ended / name).read_bytes().splitlines(keepends=True)
    (ended / name).write_bytes(b"".join([lines[0], b"gar\xffbage\n", b'{"trial": 5}\n', *lines[1:]]))
    assert finish(ended) == {"a": [1, 2, 3, 4], "b": [1, 2, 3], "c": [1, 2], "d": [1, 2]}
    assert f"{name}: 2 lines are damaged or missing, the first at line 2" in caplog.text


def test_payloads_that_are_damaged_before_the_end_are_named(ended: Path) -> None:
    content = bytearray((ended / "payloads.pkl").read_bytes())
    content[20:30] = bytes(10)
    (ended / "payloads.pkl").write_bytes(content)
    with pytest.raises(InvalidFieldError, match=r"payloads\.pkl is damaged at byte 0"):
        resume(ended)
    assert (ended / "payloads.pkl").read_bytes() == content, "nothing was cut off"


# -- files that do not agree ---------------------------------------------------------------------------------------


def test_a_trial_whose_payload_is_gone_fails_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FluidExecutor(simulated(), run_dir=folder, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([trial("a", 2)], "first"))
        assert handle.wait(PATIENCE)
        size = (folder / "payloads.pkl").stat().st_size
        handle.add(trial("b", 2), trial("c", 2))
        assert handle.wait(PATIENCE)
        handle.extend("b", 3)
        assert handle.wait(PATIENCE)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if "BudgetExtended" in line)
    (folder / "journal.jsonl").write_text("".join(lines[: last + 1]))
    os.truncate(folder / "payloads.pkl", size)
    for _ in range(2):
        with resume(folder) as executor:
            (handle,) = executor.handles
            assert handle.wait(PATIENCE)
            assert handle.states == {"a": "DONE", "b": "FAILED", "c": "DONE"}
            assert "gone from payloads.pkl" in handle.failures["b"].message
            configs = {result.trial_id: result.config for result in handle.results()}
            assert configs == {name: {"seconds": 1.0} for name in "abc"}
            with pytest.raises(InvalidFieldError):
                handle.extend("b", 1)
    failed = {each.trial_id: each.failure_text for each in load_run(folder).trials}
    assert failed["a"] == failed["c"] == "" and "gone from payloads.pkl" in failed["b"]


def test_a_submission_that_the_journal_lost_is_there_again(ended: Path) -> None:
    (ended / "journal.jsonl").write_bytes(b"")
    (ended / "trials.jsonl").write_bytes(b"")
    (ended / "results.jsonl").write_bytes(b"")
    assert finish(ended) == {"a": [1, 2], "b": [1, 2, 3], "c": [1, 2], "d": [1, 2]}
    run = load_run(ended)
    assert [group.name for group in run.groups] == ["first", "second"] and not run.notes
    assert {each.trial_id: each.config for each in run.trials}["c"] == {"seconds": 1.3}


def test_lines_of_trials_that_no_other_file_has_are_cut_off(ended: Path) -> None:
    before = (ended / "trials.jsonl").read_bytes()
    stray = b'{"group": "2", "name": "lost"}\n{"group": "2", "trial": "e", "config": {}}\n'
    (ended / "trials.jsonl").write_bytes(before + stray)
    with resume(ended) as executor:
        again = executor.submit_trialgroup(TrialGroup([trial("e", 1, 2.0)], "third"))
        assert again.wait(PATIENCE) and again.states == {"e": "DONE"}
    run = load_run(ended)
    assert not run.notes
    assert run.groups[2].name == "third" and run.groups[2].trials[0].config == {"seconds": 2.0}


def test_results_that_are_gone_are_reported_again_where_the_trial_can_go_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FluidExecutor(simulated(), run_dir=folder, verbose=0) as executor:
        assert executor.submit_trialgroup(TrialGroup([trial("a", 4), trial("b", 9)])).wait(PATIENCE)
    for name in ("journal.jsonl", "results.jsonl"):  # b has not ended.
        lines = (folder / name).read_text().splitlines(keepends=True)
        wanted = "IterationReported" if name == "journal.jsonl" else '"trial": "b"'
        kept = [line for line in lines if '"b"' not in line or wanted in line or "Submitted" in line]
        of_b = [line for line in kept if '"b"' in line and wanted in line]
        kept = [line for line in kept if line not in of_b[6 if name == "journal.jsonl" else 3 :]]
        write_checked(folder / name, kept)
    assert finish(folder) == {"a": [1, 2, 3, 4], "b": list(range(1, 10))}


def lose_results(folder: Path, trial_id: str, iterations: set[int]) -> None:
    """Takes lines out of a file without checksums, which would tell of it."""
    without_checksums(folder)
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    kept = [
        line
        for line, entry in zip(lines, entries, strict=True)
        if entry["trial"] != trial_id or entry["iteration"] not in iterations
    ]
    (folder / "results.jsonl").write_text("".join(kept))


@pytest.mark.parametrize("kept", [3, 5])
def test_a_trial_that_was_done_runs_its_lost_end_again_from_a_checkpoint_before_it(
    kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with FluidExecutor(simulated(saves=True), run_dir=folder, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([trial("a", 6, trainable=Savable), trial("b", 2)]))
        assert handle.wait(PATIENCE)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    entry = encode(TrialSaved(4.0, "a", None, Checkpoint(4, str(folder / "none"))))
    lines = [line for line in lines if "TrialSaved" not in line]
    end = next(place for place, line in enumerate(lines) if "ReportEnd" in line and '"a"' in line)
    write_checked(folder / "journal.jsonl", [*lines[:end], json.dumps(entry), *lines[end:]])
    lose_results(folder, "a", set(range(kept + 1, 7)))
    text = f"{6 - kept} iteration{'s are' if kept < 5 else ' is'} missing from results.jsonl, though reported: a ("
    assert text in fluid.load(folder).notes[0] and text in load_run(folder).notes[0]
    told = finish(folder)
    assert text in caplog.text
    if kept >= 4:  # The checkpoint is of iteration 4.
        assert told == written(folder) == {"a": list(range(1, 7)), "b": [1, 2]}
        assert not fluid.load(folder).notes and "run what is missing at their end again" in caplog.text
    else:
        assert told["a"] == [1, 2, 3] and text in fluid.load(folder).notes[0]


def test_a_gap_in_the_middle_is_named(ended: Path, caplog: pytest.LogCaptureFixture) -> None:
    lose_results(ended, "a", {2})
    note = "1 iteration is missing from results.jsonl, though reported: a (2)."
    assert fluid.load(ended).notes == (note,) and load_run(ended).notes == (note,)
    assert finish(ended)["a"] == [1, 3, 4]
    assert note in caplog.text


def test_a_trainable_that_cannot_be_unpickled_fails_its_own_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, modules = tmp_path / "run", tmp_path / "modules"
    modules.mkdir()
    monkeypatch.syspath_prepend(modules)
    names = ("left_of_this_test", "gone_of_this_test")
    for name in names:
        (modules / f"{name}.py").write_text("class Net:\n    def step(self):\n        return {}\n")
    importlib.invalidate_caches()
    with FluidExecutor(simulated(), run_dir=folder, verbose=0) as executor:
        for name in names:
            net = importlib.import_module(name).Net
            group = TrialGroup([trial(f"{name}-{part}", 3, trainable=net) for part in ("done", "open")], name)
            assert executor.submit_trialgroup(group).wait(PATIENCE)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if not ("-open" in line and ("ReportEnd" in line or "IterationReported" in line))]
    write_checked(folder / "journal.jsonl", lines)
    for name in names:
        lose_results(folder, f"{name}-open", {2, 3})
    text = (modules / "gone_of_this_test.py").read_text()
    (modules / "gone_of_this_test.py").write_text("class Net:\n    def = step\n")
    monkeypatch.delitem(sys.modules, "gone_of_this_test")
    importlib.invalidate_caches()
    with resume(folder) as executor:
        left, gone = executor.handles
        assert left.wait(PATIENCE) and set(left.states.values()) == {"DONE"}
        assert gone.wait(PATIENCE)
        assert gone.states == {"gone_of_this_test-done": "DONE", "gone_of_this_test-open": "FAILED"}
        assert "cannot be unpickled from payloads.pkl: SyntaxError" in gone.failures["gone_of_this_test-open"].message
    assert "2 trials, such as 'gone_of_this_test-done', cannot go on: its trainable and config" in caplog.text
    (modules / "gone_of_this_test.py").write_text(text)
    importlib.invalidate_caches()
    with FluidExecutor.resume(folder, backend=simulated(), verbose=0, retry_failed=True) as executor:
        _, gone = executor.handles
        assert gone.wait(PATIENCE) and set(gone.states.values()) == {"DONE"}
        assert [one.iteration for one in gone.results() if one.trial_id.endswith("open")] == [1, 2, 3]


def test_what_has_changed_of_an_imported_class_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, module = tmp_path / "run", tmp_path / "net_of_that_test.py"
    monkeypatch.syspath_prepend(tmp_path)
    module.write_text("class Net:\n    def step(self):\n        return {'version': 1}\n")
    importlib.invalidate_caches()
    net = importlib.import_module("net_of_that_test").Net
    with FluidExecutor(simulated(), run_dir=folder, verbose=0) as executor:
        assert executor.submit_trialgroup(TrialGroup([trial("a", 3, trainable=net)], "nets")).wait(PATIENCE)
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    write_checked(folder / "journal.jsonl", (line for line in lines if "ReportEnd" not in line))
    lose_results(folder, "a", {3})
    shutil.copytree(folder, tmp_path / "unchanged")  # A resumed session may end the trial before it is closed.
    with resume(tmp_path / "unchanged"):
        assert "changed since" not in caplog.text
    module.write_text("class Net:\n    def step(self):\n        return {'version': 2, 'more': 3}\n")
    monkeypatch.delitem(sys.modules, "net_of_that_test")
    importlib.invalidate_caches()
    with resume(folder) as executor:
        assert executor.handles[0].wait(PATIENCE)
    assert "nets: Net.step changed since the session before: 1 trial (a from iteration" in caplog.text
    assert "Net.step changed between two sessions" in fluid.load(folder).notes[0]


@pytest.mark.slow
def test_trainables_can_be_given_to_a_session_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(version: int) -> Any:
        def step(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
            while True:
                yield {"version": version}

        return step

    folder = tmp_path / "run"
    with FluidExecutor("local", 1, run_dir=folder, verbose=0) as executor:
        group = TrialGroup([Trial(make(1), budget=2, trial_id=name) for name in "ab"], "steps")
        executor.submit_trialgroup(group).pause("b")
        executor.handles[0].pause("a")
    options = {"backend": "local", "devices": 1, "verbose": 0}
    for bad, problem in (
        ({"trainables": {"stairs": make(2)}}, "is no group of the session, which has steps"),
        ({"trainables": [make(2)]}, "must be a dict"),
        ({"trainables": {"steps": 3}}, "trainable=3"),
        ({"code": "old"}, "code='old'"),
        ({"retry_failed": "yes"}, "retry_failed='yes'"),
    ):
        with pytest.raises(InvalidFieldError, match=problem):
            FluidExecutor.resume(folder, **options, **bad)
    given = Trial(make(2), priority=3.0)
    with FluidExecutor.resume(folder, **options, trainables={"steps": given}, code="new") as executor:
        (handle,) = executor.handles
        for name in "ab":
            handle.resume(name)
        assert handle.wait(PATIENCE)
        assert {result.metrics["version"] for result in handle.results() if result.iteration == 2} == {2}
    assert "steps: version of step changed since" in caplog.text


# -- what handles have after a resume ------------------------------------------------------------------------------


def test_every_field_of_a_trial_is_kept(tmp_path: Path) -> None:
    given = Trial(
        train,
        {"seconds": 1.0},
        budget=9,
        priority=3.0,
        trial_id="a",
        profile_key="key",
        max_width=2,
        memory=MemoryNeed(1.0, 2.0),
        retry_errors=False,
        follow_up_iterations=4,
        iteration_timeout_s=500.0,
        requires=Requires(kind="cpu", tags=()),
        devices=1,
        threads=2,
        isolation="lane",
        chdir=True,
        start_from=StartFrom("parent", 7),
        prefix=False,
    ).changed(is_shared_run=True)
    shown_only = {"shown"}  # Reports read it from trials.jsonl.
    defaults = Trial(train, trial_id="b")
    names = {field.name for field in fields(Trial)} - shown_only - {"at"}  # start_from has it.
    assert all(getattr(given, name) != getattr(defaults, name) for name in names - {"trainable"}), (
        "none is forgotten here"
    )
    folder = RunFolder.create(tmp_path / "run")
    folder.write_trials("0", GroupLine("sweep"), {given: payload_of(train, given.config, None)})
    folder.journal([GroupSubmitted(0.0, "0", (TrialSpec("a", given.budget),))], [])
    folder.close()
    kept = read_session(folder.path).groups["0"].trials["a"]
    assert {name: getattr(kept, name) for name in names} == {name: getattr(given, name) for name in names}


def test_measurements_are_kept(ended: Path) -> None:
    before = (ended / "profile.json").read_text()
    assert "train" in before
    with resume(ended) as executor:
        assert executor.profile.keys()
    assert (ended / "profile.json").read_text() == before


def test_all_results_of_a_session_that_had_ended_are_there(ended: Path) -> None:
    with resume(ended) as executor:
        first, second = executor.handles
        assert first.done and first.states == {"a": "DONE", "d": "DONE"} and second.states == {"c": "DONE"}
        assert first.search == Search("loss", "max", trials=3) and second.search is None
        results = list(first.results())
        assert results == list(first.results()), "a second reader begins at the first result"
        assert {result.trial_id: result.config for result in results} == {
            "a": {"seconds": 1.0},
            "b": {"seconds": 0.7},
            "d": {"seconds": 1.0},
        }
        assert [result.iteration for result in second.results()] == [1, 2], "its listener is gone"
        run = load_run(ended)
        assert [first.makespan, second.makespan] == pytest.approx([group.makespan for group in run.groups])
        assert executor.handles[0].search == run.groups[0].search


def test_results_that_were_deleted_meanwhile_are_missed(ended: Path) -> None:
    with resume(ended) as executor:
        (ended / "results.jsonl").unlink()
        with pytest.raises(FluidError, match=r"results\.jsonl was deleted"):
            list(executor.handles[0].results())


@pytest.mark.slow
def test_results_before_and_after_a_resume_are_one_row(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"backend": "local", "devices": 1, "verbose": 0}
    with FluidExecutor(run_dir=folder, **options) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(count_up, {"x": 5}, budget=3, trial_id="a")]))
        before = list(handle.results())
    with FluidExecutor.resume(folder, **options) as executor:
        (handle,) = executor.handles
        handle.add(Trial(count_up, {"x": 6}, budget=2, trial_id="b"))
        results = list(handle.results())
        assert [(result.trial_id, result.iteration) for result in results] == [
            *(("a", 1), ("a", 2), ("a", 3)),
            *(("b", 1), ("b", 2)),
        ]
        assert before[0].metrics == {"step": 1, "pair": (1, 5)}
        assert results[0].metrics == {"step": 1, "pair": [1, 5]}, "as JSON has it"
        assert results[3].metrics == {"step": 1, "pair": (1, 6)}
        assert [result.seconds for result in results[:3]] == [result.seconds for result in before]
        makespan = handle.makespan
    (group,) = load_run(folder).groups
    assert makespan == pytest.approx(group.makespan)
    assert json.loads((folder / "session.json").read_text())["pid"] == os.getpid()


def test_the_makespan_does_not_count_a_clock_that_was_reset(ended: Path) -> None:
    lines = [json.loads(line) for line in (ended / "results.jsonl").read_text().splitlines()]
    for entry in lines:  # As if the machine had run for a day before.
        entry["at"] += 86_400.0
    write_checked(ended / "results.jsonl", map(json.dumps, lines))
    with resume(ended) as executor:
        first = executor.handles[0]
        before = first.makespan
        first.add(trial("e", 2))
        assert first.wait(PATIENCE)
        assert before is not None and first.makespan is not None
        assert before < first.makespan < before + 60.0


# -- a disk that is full -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["submit", "add", "extend", "stop"])
def test_a_full_disk_ends_the_session_which_can_be_resumed(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first byte of the journal's entry is written, and then the disk is full."""
    folder = tmp_path / "run"
    executor = FluidExecutor(simulated(), run_dir=folder, verbose=0)
    handle = executor.submit_trialgroup(TrialGroup([trial("a", 2)], "first"))
    assert handle.wait(PATIENCE)

    def full(file: AppendedFile, data: bytes) -> int:
        if file is executor._folder._journal:
            FileIO.write(file, data[:1])
            raise OSError(28, "No space left on device")
        return FileIO.write(file, data)

    changes: dict[str, Callable[[], Any]] = {
        "submit": lambda: executor.submit_trialgroup(TrialGroup([trial("b", 2)], "second")),
        "add": lambda: handle.add(trial("b", 2)),
        "extend": lambda: handle.extend("a", 2),
        "stop": lambda: handle.stop("a"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(AppendedFile, "write", full)
        with pytest.raises(OSError, match="No space left"):
            changes[change]()
        with pytest.raises(FluidError, match=r"closed.*No space left"):
            handle.extend("a", 1)
        executor.close()
    for _ in range(2):
        told = finish(folder)
        assert told == {"a": [1, 2], **({"b": [1, 2]} if change in ("submit", "add") else {})}
