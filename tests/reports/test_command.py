"""``fluid report``; the other commands are tested in ``tests/test_cli.py``."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid._imports import try_import
from fluid.cli import main
from fluid.reports.analysis.idle import IdleTime
from fluid.reports.analysis.restores import Restores
from fluid.reports.tables.run import as_json, idle_json
from fluid.trialgroup import Trial
from tests.json_fields import undescribed

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]
Sessions = Callable[..., Any]


def refusal(capsys: Captured, *arguments: str) -> str:
    """The one line on stderr with which the command is refused."""
    assert main(["report", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fluid: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_the_page_and_the_picture_go_into_the_folder(small_run: Path, capsys: Captured) -> None:
    assert main(["report", str(small_run)]) == 0
    assert (small_run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (small_run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == [f"wrote {small_run}/report.html", f"wrote {small_run}/timeline.png"]
    # What the first report wrote does not disturb the second.
    assert main(["report", str(small_run)]) == 0
    assert capsys.readouterr().out == out


def test_the_tables_tell_of_groups_trials_and_what_was_measured(small_run: Path, capsys: Captured) -> None:
    assert main(["report", str(small_run)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "run: 4 trials on 3 devices, makespan 10 s, devices busy 77 %, 1 resize"
    assert "rung 0 3 6 8 s 2 done, 1 failed" in lines
    ranked = [line for line in lines if re.match(r"[abcd] (done|failed|unfinished) ", line)]
    # A failed trial is last, whatever its value.
    assert [line.split()[0] for line in ranked] == ["d", "a", "b", "c"]
    assert ranked[1] == "a done 3/3 0.4 0.1 5.50 s 1/2, x2"
    assert lines[1:3] == ["best loss 0.3 (less is better): d, at iteration 1 of 4; unfinished", "lr=0.2, act=relu"]
    failed = lines.index("c failed: ValueError: too <small>")
    # What the engine did comes last.
    assert lines[failed + 2 : failed + 5] == [
        "30 device-seconds; 77 % of it ran iterations",
        "net: 2 s per iteration alone, alpha 1.250, c 2, beta 1.000",
        f"what happened to a trial, and why: fluid why {small_run} TRIAL",
    ]


def test_the_files_can_go_elsewhere(small_run: Path, tmp_path: Path, capsys: Captured) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    assert main(["report", str(small_run), "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {page}"
    assert main(["report", str(small_run), "--png", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {picture}"
    assert page.exists() and "<svg" in picture.read_text(encoding="utf-8")
    assert not (small_run / "report.html").exists()
    assert not (small_run / "timeline.png").exists()


def test_json(small_run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["report", str(small_run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert not (small_run / "report.html").exists()
    assert (data["run"], data["devices"], data["makespan_s"], data["resizes"]) == (str(small_run), 3, 10.0, 1)
    assert data["utilisation"] == pytest.approx(23.0 / 30.0)
    assert data["groups"][1] == {
        "group": "1",
        "name": "rung 1",
        "search": None,
        "owner": None,
        "priority": 1.0,
        "preempt": False,
        "weight": 1.0,
        "deadline": None,
        "on_miss": None,
        "requires": None,
        "trials": 1,
        "shared_runs": 0,
        "states": {"UNFINISHED": 1},
        "iterations": 1,
        "makespan_s": 2.0,
        "device_seconds": 6.0,
        "cost_usd": None,
    }
    trial = data["trials"][0]
    assert (trial["trial"], trial["state"], trial["iterations"], trial["budget"]) == ("a", "DONE", 3, 3)
    assert trial["widths"] == [{"width": 0.5, "seconds": 4.0}, {"width": 2.0, "seconds": 1.5}]
    assert (trial["last"]["loss"], trial["least"]["loss"], trial["greatest"]["loss"]) == (0.4, 0.4, 0.9)
    assert data["trials"][2]["failure"] == "ValueError: too <small>"
    assert [key["key"] for key in data["profile"]] == ["net"]
    assert data["notes"] == []
    page = tmp_path / "page.html"
    assert main(["report", str(small_run), "--json", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out) == data
    assert page.exists()


def test_json_knows_no_nan(session: Sessions, capsys: Captured) -> None:
    made = session({"g": [Trial(print, {"p": float("nan")}, trial_id="a")]}, limit=float("inf"))
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": float("nan"), "list": [float("inf")]}))
    assert main(["report", str(made.close()), "--json"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["trials"][0]["last"] == {"loss": None, "list": [None]}


@pytest.mark.parametrize("columns", [44, 60, 90, 160])
def test_tables_fit_their_terminal(
    columns: int, small_run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["report", str(small_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole = ("wrote ", "what happened to a trial, and why: fluid why ")  # Paths and commands are for copying.
    assert all(len(line) <= columns for line in lines if not line.startswith(whole))
    assert any(line.split()[:2] == ["a", "done"] for line in lines)


def test_a_pipe_gets_whole_lines_without_blanks_at_their_ends(
    session: Sessions, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    values = {f"hyperparameter_{k}": "some text " * 4 for k in range(12)}
    made = session({"g": [Trial(print, values, trial_id="a"), Trial(print, values, trial_id="b")]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 0.1}))
    assert main(["report", str(made.close())]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    (config,) = [line for line in lines if "hyperparameter_0=" in line]
    assert "hyperparameter_11=" in config and len(config) > 500


def test_long_tables_are_cut(session: Sessions, capsys: Captured) -> None:
    made = session({f"group {k}": [Trial(print, trial_id=f"{k}.{j}") for j in range(2)] for k in range(30)})
    assert main(["report", str(made.close())]) == 0
    out = capsys.readouterr().out
    assert "... and 10 more groups" in out
    assert "... and 40 more trials" in out
    assert "group 29" in out and "group 9 " not in out


def test_before_the_first_iteration_there_is_no_chart(session: Sessions, capsys: Captured) -> None:
    path = session({"g": [Trial(print, trial_id="a")]}).close()
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "did not draw timeline.png: no iteration has finished yet"
    assert (path / "report.html").exists()
    assert f"png='{path}/x.png': no iteration has finished yet" in refusal(capsys, str(path), "--png", f"{path}/x.png")


def test_without_matplotlib_there_is_no_chart(
    small_run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with try_import("matplotlib", extra="plot") as imports:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    monkeypatch.setattr("fluid.reports.figures.gantt._imports", imports)
    assert main(["report", str(small_run)]) == 0
    out = capsys.readouterr().out
    assert "did not draw timeline.png: " in out and "pip install 'matplotlib>=3.7'" in out
    assert f"wrote {small_run}/report.html" in out
    assert "pip install 'matplotlib>=3.7'" in refusal(capsys, str(small_run), "--png", "x.png")


def test_what_cannot_be_used_is_refused(small_run: Path, tmp_path: Path, capsys: Captured) -> None:
    run = str(small_run)
    assert f"run='{tmp_path}/none': does not exist" in refusal(capsys, f"{tmp_path}/none")
    assert f"run='{tmp_path}': is not the folder of a run" in refusal(capsys, str(tmp_path))
    assert "png='x.nonsense': must end in one of" in refusal(capsys, run, "--png", "x.nonsense")
    assert "png='nowhere/x.png': cannot be written" in refusal(capsys, run, "--png", "nowhere/x.png")
    assert "html='nowhere/x.html': cannot be written" in refusal(capsys, run, "--html", "nowhere/x.html")


def test_names_cannot_move_the_cursor(session: Sessions, capsys: Captured) -> None:
    evil = "a\n\x1b[2Jb[red]"
    made = session({evil: [Trial(print, {evil: 1}, trial_id=evil, profile_key=evil)]})
    made.results((evil, 1, 0.0, 1.0, 1.0, (0,), {evil: 1.0}))
    assert main(["report", str(made.close())]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a??[2Jb[red]" in out


def test_the_manual_shows_real_output(small_run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"    fluid report RUN\n\n```text\n(.*?)\n```", manual, re.DOTALL)
    monkeypatch.chdir(small_run.parent)
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["report", "run"]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == said.splitlines()


def test_every_field_is_described(small_run: Path, capsys: Captured) -> None:
    assert main(["report", str(small_run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    fields = {*data, *data["groups"][0], *data["trials"][0], *data["profile"][0], *data["best"], *data["importances"]}
    assert undescribed({*fields, *data["resize_gains"]}, as_json) == set()
    assert undescribed(data["restores"], Restores.as_json) == set()
    assert data["idle"] is None
    no_time = IdleTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert undescribed(idle_json(no_time), idle_json) == set()


def test_what_describes_the_json_of_commands_is_on_a_page() -> None:
    page = (ROOT / "docs" / "api" / "files.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    for entry in entries:
        *modules, name = entry.split(".")
        of_class = [modules.pop()] if modules[-1][0].isupper() else []
        found: Any = importlib.import_module(".".join(modules))
        for each in (*of_class, name):
            found = getattr(found, each)
        assert found.__doc__, entry
    written = [
        f"{path.relative_to(ROOT).with_suffix('')}".replace("/", ".")
        for folder in ("commands", "reports")
        for path in (ROOT / "fluid" / folder).rglob("*.py")
        if re.search("The output of ``fluid .*--json``", path.read_text(encoding="utf-8"))
    ]
    assert len(written) > 7
    assert [module for module in written if not any(entry.startswith(f"{module}.") for entry in entries)] == []
