"""``fluid report`` of several runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.reports.run.loader import load_run
from fluid.reports.tables.ranking import best_iteration
from fluid.reports.tables.run_comparison import as_json, compare
from tests.json_fields import undescribed

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]
Sweeps = tuple[Path, Path]


def refusal(capsys: Captured, *arguments: str) -> str:
    """The one line on stderr with which the command is refused."""
    assert main(["report", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fluid: error: ") and printed.err.count("\n") == 1
    return printed.err


def test_runs_are_measured_to_the_best_value_of_the_worst(two_sweeps: Sweeps) -> None:
    compared = compare([load_run(path) for path in two_sweeps])
    assert (compared.goal, [one.name for one in compared.runs]) == (("loss", True), ["asha", "random"])
    asha, random = compared.runs
    assert asha.best is not None and random.best is not None
    assert (asha.best.trial_id, asha.value) == ("asha-4", pytest.approx(0.25))
    assert (random.best.trial_id, random.value) == ("random-5", pytest.approx(0.2617))
    assert compared.winner is asha and compared.level == random.value
    # asha reached it with its best trial too; its third slot of four seconds ends at 12 s.
    assert (asha.reached, random.reached) == (12.0, 8.0)


def test_the_mode_turns_the_ranking_round(two_sweeps: Sweeps) -> None:
    compared = compare([load_run(path) for path in two_sweeps], mode="max")
    winner = compared.winner
    assert winner is not None and winner.name == "random"
    assert winner.best is not None and compared.goal is not None
    assert best_iteration(winner.best, compared.goal)[1].number == 1


def test_the_manual_shows_real_output(two_sweeps: Sweeps, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"    fluid report RUN_A RUN_B\n\n```text\n(.*?)\n```", manual, re.DOTALL)
    monkeypatch.chdir(two_sweeps[0].parent)
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["report", "asha", "random"]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()] == said.splitlines()
    assert not (two_sweeps[0] / "report.html").exists()


@pytest.mark.parametrize("columns", [44, 60, 80, 120])
def test_tables_fit_their_terminal(
    columns: int, two_sweeps: Sweeps, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["report", *map(str, two_sweeps)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert ("wall time" in " ".join(lines)) == (columns == 120)


def test_json(two_sweeps: Sweeps, capsys: Captured) -> None:
    assert main(["report", *map(str, two_sweeps), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["metric"], data["mode"], data["best_run"]) == ("loss", "min", str(two_sweeps[0]))
    asha = data["runs"][0]
    assert (asha["trials"], asha["iterations"], asha["devices"]) == (12, 36, 2)
    assert (asha["makespan_s"], asha["wall_time_s"], asha["reached_level_s"]) == (24.0, 31.0, 12.0)
    assert asha["best"]["config"] == {"lr": 0.02, "optimizer": {"name": "adam"}, "data": "digits"}
    assert undescribed({*data, *asha}, as_json) == set()


def test_runs_without_a_common_metric_are_still_compared(
    session: Callable[..., Any], two_sweeps: Sweeps, capsys: Captured
) -> None:
    empty = session({}, name="empty").close()
    assert main(["report", str(two_sweeps[0]), str(empty)]) == 0
    out = capsys.readouterr().out
    assert "Note on B: no trial reported loss." in out
    assert main(["report", str(empty), str(two_sweeps[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "loss"


def test_runs_of_one_name_are_told_apart_by_their_folders(session: Callable[..., Any], capsys: Captured) -> None:
    for name in ("first", "second"):
        session({}, name=name, **{"began": "2026"}).close()
    folders = [load_run(session({}, name=f"x/{name}").close()) for name in ("one", "two")]
    assert [one.name for one in compare(folders).runs] == ["one", "two"]


def test_nonsense_is_refused_in_one_line(two_sweeps: Sweeps, tmp_path: Path, capsys: Captured) -> None:
    one, other = map(str, two_sweeps)
    assert f"run='{one}': is given twice" in refusal(capsys, one, other, f"{one}/.")
    assert "metric='f1': is not a metric of" in refusal(capsys, one, other, "--metric", "f1")
    assert "mode='best': must be 'min'" in refusal(capsys, one, other, "--mode", "best")
    assert "columns='lr': applies to the trials of one run" in refusal(capsys, one, other, "--columns", "lr")
    assert "png='x.png': shows one run" in refusal(capsys, one, other, "--png", "x.png")
    assert f"run='{tmp_path}/no': does not exist" in refusal(capsys, one, f"{tmp_path}/no")
