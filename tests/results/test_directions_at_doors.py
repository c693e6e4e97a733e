"""Whoever judges by a metric asks for its mode where nothing says it, and shows no best where nobody can be asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, Search, Trial, TrialGroup
from fluid.cli import main
from fluid.display.dashboard import best_text, no_best_text
from fluid.display.notebook import best_html
from fluid.rehearsal import recorded
from fluid.rehearsal.outcome import outcome_of
from fluid.reports.page.data import metrics_of
from fluid.reports.run.loader import load_run
from fluid.search.stop_rules import StopRules, TrialStop
from tests.checked_files import write_checked

EITHER = "mode=None: 'default' may mean either; pass mode='min' or mode='max'"


def train(config: dict[str, float]) -> Iterator[dict[str, float]]:
    for step in (1, 2):
        yield {"default": config["x"] / step, "loss": 1.0 - config["x"] / step}


def group(search: Search | None = None) -> TrialGroup:
    return TrialGroup([Trial(train, {"x": x}, budget=2, trial_id=f"t{x}") for x in (0.25, 0.5)], "g", search=search)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of two trials that no search has submitted."""
    path = tmp_path_factory.mktemp("run") / "run"
    with FluidExecutor(backend="local", devices=1, run_dir=path, verbose=0) as executor:
        executor.submit_trialgroup(group()).wait()
    return path


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0, keep="best:1") as made:
        yield made


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidFieldError) as caught:
        call()
    assert caught.value.field == "mode"
    return str(caught.value)


def test_calls_ask_for_the_mode(executor: FluidExecutor, folder: Path) -> None:
    assert refused(lambda: fluid.run(train, {"x": [0.5]}, metric="default", executor=executor)) == EITHER
    assert refused(lambda: fluid.run(train, {"x": [0.5]}, metric=["loss", "default"], algorithm="grid")) == EITHER
    assert refused(lambda: executor.submit_trialgroup(group(Search("default")))) == EITHER
    assert refused(lambda: fluid.load(folder, "default")) == EITHER
    result = fluid.load(folder)
    assert refused(lambda: result.best_by("default")) == EITHER
    assert refused(lambda: outcome_of(folder, "default").best) == EITHER
    assert "pass metric='default' and mode='min' or mode='max'" in refused(lambda: recorded(folder))
    assert result.best_by("default", "max").value == 0.5 and result.best_by("default", "min").value == 0.125
    assert result.best_by("loss").value == 0.5 and fluid.load(folder, "loss").best.mode == "min"
    assert recorded(folder, metric="default", mode="max").mode == "max"
    with pytest.raises(fluid.FluidError, match="no trial has reported a number as 'lss'; there are default, loss"):
        result.best_by("lss")


@pytest.mark.slow
def test_a_handle_asks_for_the_mode(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(group(Search("loss", "max")))
    handle.wait()
    assert handle.best().value == 0.875, "what the search says counts before the name"
    assert refused(lambda: handle.best("default")) == refused(lambda: handle.result("default")) == EITHER
    assert handle.best("default", "min").value == 0.125
    assert "best loss 0.875 (more is better), t0.25" in repr(handle)
    assert "best: loss=0.875 (more is better) at iteration 2" in repr(handle.result())


@pytest.mark.slow
def test_no_best_is_shown_where_nobody_can_be_asked(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group())
        handle.wait()
        (status,) = executor.status().groups
        assert status.best is None and status.open_metric == "default"
        assert "no best: 'default' may mean either; pass Search('default', 'min') or 'max'" in repr(handle)
        assert "may mean either" in handle._repr_html_() and "may mean either" in best_html(status)
        line = no_best_text("default", 80, lead="  ").plain
        assert line == "  no best: 'default' may mean either; pass Search('default', 'min') or 'max'"


def test_reports_show_no_best_without_a_mode(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*options: str) -> str:
        assert main(["report", str(folder), *options]) == 0
        return capsys.readouterr().out

    text = said()
    assert "no best: 'default' may mean either; pass --mode min or --mode max" in text
    assert "best default" not in text and "last default" in text
    assert json.loads(said("--json"))["best"] is None
    assert "best default 0.5 (more is better): t0.5, at iteration 1" in said("--mode", "max")
    assert "best loss 0.5 (less is better): t0.5" in said("--metric", "loss")
    assert main(["report", str(folder), "--metric", "default"]) == 2
    assert EITHER in capsys.readouterr().err
    modes = {metric["name"]: metric["mode"] for metric in metrics_of([load_run(folder)])}
    assert (modes["default"], modes["loss"]) == (None, "min")


def test_a_folder_whose_search_was_recorded_without_a_mode_is_read(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    lines = (copy / "trials.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        if "name" in entry and "trial" not in entry:
            entry.update(metric="default", mode=None, trials=2)
    write_checked(copy / "trials.jsonl", map(json.dumps, entries))
    result = fluid.load(copy)
    assert (result.metric, result.mode) == ("default", None)
    assert f"no best: {EITHER.partition(': ')[2]}" in repr(result)
    assert refused(lambda: result.best) == EITHER
    assert "best/default" not in result.dataframe()
    assert fluid.load(copy, mode="min").best.value == 0.125


def test_values_at_which_trials_stop_are_reached_from_the_side_of_the_name() -> None:
    rules = StopRules({"loss": 0.25, "epoch": 3, "val_acc": 0.75}, {"default": True})
    assert rules.result(0, 1.0, {"loss": 0.5, "epoch": 1, "val_acc": 0.5}.get) is None
    for reached in ({"loss": 0.125}, {"epoch": 3}, {"val_acc": 0.875}):
        assert rules.result(0, 1.0, reached.get) == TrialStop(is_success=True)


@pytest.mark.slow
def test_a_line_says_which_is_better_where_it_fits(executor: FluidExecutor) -> None:
    executor.submit_trialgroup(group(Search("loss", "min"))).wait()
    (status,) = executor.status().groups
    assert status.best is not None
    assert best_text(status.best, 80).plain == "best loss 0.5 (less is better)  t0.5, iteration 1  x=0.5"
    assert best_text(status.best, 44).plain == "best loss 0.5  t0.5, iteration 1  x=0.5"
