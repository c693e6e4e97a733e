"""What a handle tells of its trials while they run, and afterwards: the best, tables, states, checkpoints."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.reports.run.loader import load_run
from fluid.results.iterations import StoredIteration, only_of
from fluid.results.run_files import JsonLines
from fluid.session.listeners import TrialListener
from fluid.session.live_trials import LiveTrials
from fluid.trialgroup import Search, Shown, Trial, TrialGroup
from tests.waiting import PATIENCE, eventually


def fall(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, config.get("steps", 3) + 1):
        yield {"loss": config["lr"] / step, "eval": {"f1": step}}
    if "error" in config:
        raise ValueError(config["error"])
    if "gate" in config:
        while not os.path.exists(config["gate"]):
            time.sleep(0.01)
        yield {"loss": 0.0}


class Model:
    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.step_count = config, 0

    def step(self) -> dict[str, Any]:
        self.step_count += 1
        return {"loss": 1.0 / self.step_count}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(str(self.step_count))

    def load_checkpoint(self, folder: str) -> None:
        self.step_count = int(Path(folder, "count").read_text())


def trial(name: str, lr: float = 1.0, budget: int = 3, **config: Any) -> Trial:
    return Trial(fall, {"lr": lr, **config}, budget=budget + ("error" in config), trial_id=name)


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor(
        backend="local", devices=1, packing="off", max_failures=0, run_dir=tmp_path / "run", verbose=0
    ) as made:
        yield made


@pytest.mark.slow
def test_trials_are_told_while_they_run(executor: FluidExecutor, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    running, waiting = trial("runs", 1.0, 4, gate=str(gate)), trial("waits", 0.5)
    handle = executor.submit_trialgroup(TrialGroup([running, waiting], name="g"))
    eventually(lambda: len(handle.trials[0].results) == 3)
    first, second = handle.trials
    assert (first.trial_id, first.state, first.iteration, first.group) == ("runs", "RUNNING", 3, "g")
    assert (second.state, second.iteration, second.metrics, second.results) == ("QUEUED", 0, {}, ())
    assert handle.states == {"runs": "RUNNING", "waits": "QUEUED"}
    assert handle.result().state == "RUNNING" and fluid.load(executor.run_dir).state == "RUNNING"
    best = handle.best("loss")
    assert (best.trial_id, best.iteration, best.value) == ("runs", 3, pytest.approx(1 / 3))
    gate.touch()
    assert handle.wait(PATIENCE)
    assert handle.states == {"runs": "DONE", "waits": "DONE"} and handle.result().state == "DONE"
    assert handle.best("loss").value == 0.0


@pytest.mark.slow
def test_configs_are_those_given(executor: FluidExecutor) -> None:
    steps = {1, 2}
    handle = executor.submit_trialgroup(TrialGroup([Trial(fall, {"lr": 1.0, "set": steps}, trial_id="a")]))
    assert handle.wait(PATIENCE)
    steps.add(3)  # The trial has a copy of its config.
    assert handle.trials[0].config["set"] == handle.trials[0].results[0].config["set"] == {1, 2}
    assert fluid.load(executor.run_dir).trials[0].config["set"] == "{1, 2}"


@pytest.mark.slow
def test_the_search_of_the_group_says_what_is_best(executor: FluidExecutor) -> None:
    trials = [trial("a", 1.0), trial("b", 0.5)]
    group = TrialGroup(trials, search=Search("loss", "max", extends=True))
    handle = executor.submit_trialgroup(group)
    assert handle.wait(PATIENCE)
    assert (handle.best().trial_id, handle.best().value) == ("a", 1.0)
    assert (handle.best("loss", "min").trial_id, handle.best("eval/f1").value) == ("b", 3)
    assert [found.state for found in handle.trials] == ["PAUSED", "PAUSED"] and handle.states["a"] == "DONE"
    handle.stop("a", "STOPPED")
    assert [found.state for found in handle.trials] == ["STOPPED", "PAUSED"]


@pytest.mark.slow
def test_a_failed_trial_is_the_best_only_among_failed_ones(executor: FluidExecutor) -> None:
    group = TrialGroup([trial("bad", 0.01, error="too small"), trial("good")])
    handle = executor.submit_trialgroup(group)
    assert handle.wait(PATIENCE)
    assert handle.best("loss").trial_id == "good"
    only = executor.submit_trialgroup(TrialGroup([trial("worse", 5.0, error="x"), trial("bad 2", 0.5, error="x")]))
    assert only.wait(PATIENCE)
    assert only.best("loss").trial_id == "bad 2"
    failure = handle.trials[0].failure
    assert failure is not None and failure.message == "ValueError: too small" and "Traceback" in failure.traceback


@pytest.mark.slow
def test_a_listener_takes_nothing_from_the_handle(executor: FluidExecutor) -> None:
    class Best(TrialListener):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_result(self, result: fluid.Result) -> None:
            self.values.append(executor.handles[0].best("loss").value)

    listener = Best()
    handle = executor.submit_trialgroup(TrialGroup([trial("a")]), listener)
    assert handle.wait(PATIENCE)
    assert [found.iteration for found in handle.trials[0].results] == [1, 2, 3]
    assert listener.values[-1] == handle.best("loss").value == pytest.approx(1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_forgotten_trial_is_still_told(executor: FluidExecutor, asked: str) -> None:
    group = TrialGroup([trial("a", 0.1), trial("b"), trial("c", 0.01, error="gone")])
    handle = executor.submit_trialgroup(group)
    assert handle.wait(PATIENCE)
    if asked == "before":
        assert len(handle.trials) == 3
    handle.forget("a")
    handle.forget("c")
    found = {one.trial_id: one for one in handle.trials}
    assert {name: one.state for name, one in found.items()} == {"a": "DONE", "b": "DONE", "c": "FAILED"}
    assert (found["a"].config["lr"], found["a"].iteration) == (0.1, 3)
    failure = found["c"].failure
    assert failure is not None and failure.message == "ValueError: gone"
    assert (handle.best("loss").trial_id, handle.states) == ("a", {"b": "DONE"})
    handle.forget("b")
    assert len(handle.trials) == 3 and len(handle.dataframe()) == 3


@pytest.mark.slow
def test_a_handle_outlives_its_executor(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "run", verbose=0) as executor:
        group = TrialGroup([trial("a"), trial("open", budget=4, gate=str(tmp_path / "never"))])
        handle = executor.submit_trialgroup(group)
        eventually(lambda: all(len(found.results) == 3 for found in handle.trials))
    assert [found.state for found in handle.trials] == ["DONE", "UNFINISHED"] and handle.result().state == "UNFINISHED"
    assert handle.states["a"] == "DONE" and set(handle.states) == {"a", "open"}
    assert handle.best("loss").iteration == 3 and len(executor.dataframe()) == 2
    loaded = fluid.load(tmp_path / "run")
    assert [found.state for found in loaded.trials] == ["DONE", "UNFINISHED"] and loaded.state == "UNFINISHED"


@pytest.mark.slow
def test_a_resumed_session_tells_of_the_one_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "local", "devices": 1, "verbose": 0}
    with FluidExecutor(run_dir=tmp_path / "run", **options) as executor:
        shown = Trial(fall, {"lr": 0.25}, budget=3, trial_id="b", shown=Shown("sweep 1", {"rate": 0.25}, 10, "eval"))
        group = TrialGroup([trial("a"), shown, trial("gone", 0.1)], search=Search("loss", "min"))
        handle = executor.submit_trialgroup(group)
        assert handle.wait(PATIENCE)
        handle.stop("a", "STOPPED")
        handle.forget("gone")
        before = handle.trials
    with FluidExecutor.resume(tmp_path / "run", **options) as resumed:
        (again,) = resumed.handles
        again.add(trial("new", 0.01, budget=1))
        assert again.wait(PATIENCE)
        after = {found.trial_id: found for found in again.trials}
        for found in before:
            same = after[found.trial_id]
            assert (same.state, same.iteration, same.metrics, dict(same.config)) == (
                *(found.state, found.iteration, found.metrics),
                dict(found.config),
            )
        assert (after["sweep 1"].iteration, after["sweep 1"].metrics) == (13, {"f1": 3})
        assert (again.best().trial_id, len(again.dataframe())) == ("new", 4)


def test_trials_that_are_shown_as_one_are_one(executor: FluidExecutor) -> None:
    def part(name: str, before: int) -> Trial:
        shown = Shown("sweep 1", {"rate": 0.25}, before, "eval")
        return Trial(fall, {"lr": 0.25, "wrapped": True}, budget=2, trial_id=name, shown=shown)

    handle = executor.submit_trialgroup(TrialGroup([part("p.0", 0)], search=Search("f1", "max")))
    assert handle.wait(PATIENCE)
    handle.stop("p.0", "PAUSED")
    handle.add(part("p.1", 2))
    assert handle.wait(PATIENCE)
    for found in (handle.result(), fluid.load(executor.run_dir)):
        (only,) = found.trials
        assert (only.trial_id, only.config, only.iteration) == ("sweep 1", {"rate": 0.25}, 4)
        assert [one.iteration for one in only.results] == [1, 2, 3, 4]
        assert [one.metrics["f1"] for one in only.results] == [1, 2, 1, 2]
        assert (found.best.iteration, found.best.value) == (2, 2)


@pytest.mark.slow
def test_all_groups_are_in_the_table_of_the_executor(executor: FluidExecutor) -> None:
    pytest.importorskip("pandas")
    handles = [executor.submit_trialgroup(TrialGroup([trial(f"t{n}")], name=f"g{n}")) for n in range(2)]
    assert all(handle.wait(PATIENCE) for handle in handles)
    table = executor.dataframe()
    assert list(table["group"]) == ["g0", "g1"] and list(table["trial"]) == ["t0", "t1"]
    assert len(executor.dataframe("iteration")) == 6 and "group" not in handles[0].dataframe().columns


@pytest.mark.slow
def test_nothing_is_read_twice(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = executor.submit_trialgroup(TrialGroup([trial("a"), trial("b")]))
    assert handle.wait(PATIENCE)
    read: list[int] = []
    original = LiveTrials._new_results

    def counted(self: LiveTrials) -> Iterator[StoredIteration]:
        found = list(original(self))
        read.append(len(found))
        yield from found

    monkeypatch.setattr(LiveTrials, "_new_results", counted)
    assert len(handle.trials) == 2
    made = [trial for _, trial in handle._live._made.values()]
    handle.extend("b", 1)
    assert handle.wait(PATIENCE)
    second = handle.trials
    assert read == [6, 0] and second == handle.trials
    assert next(trial for _, trial in handle._live._made.values()) is made[0]


@pytest.mark.slow
def test_what_a_reader_changes_is_its_own(executor: FluidExecutor) -> None:
    given = [Trial(fall, {"lr": lr, "more": [1]}, budget=3, trial_id=name) for lr, name in ((1.0, "a"), (2.0, "b"))]
    handle = executor.submit_trialgroup(TrialGroup(given, search=Search("loss", "min")))
    assert handle.wait(PATIENCE)
    before, best = handle.trials, handle.best()
    for shown in (*before, best.trial, handle.best("eval/f1", "max").trial):
        for record in (shown, *shown.results):
            metrics: Any = record.metrics
            metrics.pop("loss")
            metrics["eval"]["f1"] = -1.0
            config: Any = record.config
            config["lr"] = 9.0
            config["more"].append(2)
    best.metrics.clear()  # type: ignore[attr-defined]
    assert [trial.config for trial in handle.trials] == [{"lr": 1.0, "more": [1]}, {"lr": 2.0, "more": [1]}]
    assert [[result.metrics["loss"] for result in trial.results] for trial in handle.trials] == [
        [1.0, 1 / 2, 1 / 3],
        [2.0, 1.0, 2 / 3],
    ]
    assert (handle.best().trial_id, handle.best().value, handle.best().metrics["loss"]) == ("a", 1 / 3, 1 / 3)
    assert handle.best("loss", "max").value == 2.0 and handle.best("eval/f1", "max").value == 3.0
    assert next(result.config["lr"] for result in handle.results()) in (1.0, 2.0)
    assert list(handle.dataframe()["config/lr"]) == [1.0, 2.0]


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    line = b'{"group": "0", "trial": "a", "iteration": %d, "seconds": 1.0, "width": 1.0, "devices": [0], "at": 9.0}\n'
    file = tmp_path / "results.jsonl"
    file.write_bytes(line % 1 + line.replace(b'"0"', b'"1"') % 1 + b"rubbish\n" + (line % 2)[:20])
    lines = JsonLines(file, read=only_of(["0"]))

    def new() -> list[int]:
        return [line.value.number for line in lines.new() if isinstance(line.value, StoredIteration)]

    assert new() == [1]
    with file.open("ab") as more:
        more.write((line % 2)[20:] + line % 3)
    assert new() == [2, 3] and new() == []


@pytest.mark.slow
def test_a_deleted_folder_is_one_clear_error(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(TrialGroup([trial("a")]))
    assert handle.wait(PATIENCE)
    (executor.run_dir / "results.jsonl").rename(executor.run_dir / "away")
    with pytest.raises(FluidError, match=r"the results are gone: .*results\.jsonl was deleted"):
        handle.best("loss")
    (executor.run_dir / "away").rename(executor.run_dir / "results.jsonl")
    assert handle.best("loss").trial_id == "a"


@pytest.mark.slow
def test_what_cannot_be_chosen_is_refused(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(TrialGroup([trial("a")]))
    assert handle.wait(PATIENCE)
    with pytest.raises(InvalidFieldError, match="metric=None: name one, as no search does; there are loss, eval/f1"):
        handle.best()
    with pytest.raises(FluidError, match="no trial has reported a number as 'accuracy'; there are loss, eval/f1"):
        handle.best("accuracy")
    with pytest.raises(InvalidFieldError, match="trial_id='b'"):
        handle.load_checkpoint("b")
    with pytest.raises(FluidError, match="trial 'a' has no checkpoint"):
        handle.load_checkpoint("a")


@pytest.mark.slow
def test_a_checkpoint_is_loaded_into_an_object_of_the_class(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        group = TrialGroup([Trial(Model, {"width": 8}, budget=1_000_000, trial_id="a")])
        handle = executor.submit_trialgroup(group)
        eventually(lambda: handle.trials[0].iteration)
        assert executor.drain_all(PATIENCE)
        model = handle.load_checkpoint("a")
        assert isinstance(model, Model) and model.config == {"width": 8}
        (found,) = handle.trials
        assert model.step_count == found.checkpoint_iteration == found.iteration
    (loaded,) = fluid.load(tmp_path / "run").trials
    for one in (loaded, pickle.loads(pickle.dumps(found))):
        assert one.load_checkpoint().step_count == model.step_count
    assert loaded.checkpoint is not None
    (loaded.checkpoint / "count").write_text("12345678")
    with pytest.raises(FluidError, match="cannot be loaded: "):
        loaded.load_checkpoint()
    shutil.rmtree(tmp_path / "run/trials")
    with pytest.raises(FluidError, match="has no checkpoint"):
        loaded.load_checkpoint()


@pytest.mark.slow
def test_forgotten_trials_keep_their_place(executor: FluidExecutor) -> None:
    group = TrialGroup([trial(name) for name in "abc"], search=Search("loss", "min"))
    handle = executor.submit_trialgroup(group)
    assert handle.wait(PATIENCE)
    handle.forget("b")
    assert [found.trial_id for found in handle.trials] == ["a", "b", "c"]
    handle.forget("a")
    handle.add(trial("d"))
    assert handle.wait(PATIENCE)
    assert [found.trial_id for found in handle.trials] == ["a", "b", "c", "d"]
    best = executor.status().groups[0].best
    assert (
        best is not None
        and best.trial_id == handle.best().trial_id == fluid.load(executor.run_dir).best.trial_id == "a"
    )


def test_many_trials_are_read_once(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(TrialGroup([trial("a")]))
    assert handle.wait(PATIENCE)
    live = LiveTrials(executor.session, executor.session.inboxes)
    assert live.read()[0].results == handle.trials[0].results


def count_up(config: dict[str, Any], state: dict[str, int] | None) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    count = 0 if state is None else state["count"]
    while True:
        count += 1
        yield {"loss": 1.0 / count}, {"count": count}


@pytest.mark.slow
def test_the_checkpoint_of_a_function_is_its_state(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(count_up, budget=1_000_000, trial_id="a")]))
        eventually(lambda: handle.trials[0].iteration)
        assert executor.drain_all(PATIENCE)
        (found,) = handle.trials
        assert handle.load_checkpoint("a") == {"count": found.iteration}
    (tmp_path / "run/payloads.pkl").unlink()
    assert fluid.load(tmp_path / "run").trials[0].load_checkpoint() == {"count": found.iteration}


@pytest.mark.slow
def test_a_config_can_be_told_later(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "local", "devices": 1, "verbose": 0}
    with FluidExecutor(run_dir=tmp_path / "run", **options) as executor:
        handle = executor.submit_trialgroup(TrialGroup([trial("a"), trial("b")], search=Search("loss")))
        assert handle.wait(PATIENCE)
        assert handle.trials[0].config == {"lr": 1.0}
        for name in "ab":
            handle.show_config(name, {"rate": 0.5, "width": (8, 8)})
        handle.forget("b")
        for config in (5, [1]):
            with pytest.raises(InvalidFieldError, match="config="):
                handle.show_config("a", config)  # type: ignore[arg-type]
        with pytest.raises(InvalidFieldError, match="trial_id='b'"):
            handle.show_config("b", {})
        assert [found.config for found in handle.trials] == [{"rate": 0.5, "width": (8, 8)}] * 2
        assert [found.config for found in fluid.load(executor.run_dir).trials] == [{"rate": 0.5, "width": [8, 8]}] * 2
    assert [one.config for one in load_run(tmp_path / "run").trials] == [{"rate": 0.5, "width": [8, 8]}] * 2
    for _ in range(2):
        with FluidExecutor.resume(tmp_path / "run", **options) as resumed:
            assert resumed.handles[0].best("loss").config == {"rate": 0.5, "width": [8, 8]}
            assert resumed.handles[0].name == handle.name


@pytest.mark.slow
def test_the_best_of_the_searchs_metric_is_read_alone(executor: FluidExecutor) -> None:
    group = TrialGroup([trial(str(lr), float(lr)) for lr in range(20, 0, -1)], search=Search("loss", "min"))
    handle = executor.submit_trialgroup(group)
    seen = [handle.best() for _ in handle.results()]
    assert [best.value for best in seen] == sorted([best.value for best in seen], reverse=True)
    assert handle.wait() and handle.best().trial_id == "1"
    best_so_far = {best.trial_id for best in seen} | {"1"}
    assert {shown for _, shown in handle._live._made} == best_so_far, "no other trial is made anew for it"
    whole = handle.result().best
    assert (whole.trial, whole.value, whole.iteration) == (handle.best().trial, 1 / 3, 3)
    assert handle.best("eval/f1", "max").value == 3.0, "another metric"
