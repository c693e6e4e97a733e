"""``fluid runs``, and the commands that show the newest run where they are given none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.reports.tables.runs import as_json
from fluid.trialgroup import Search, Trial
from tests.json_fields import undescribed

Sessions = Callable[..., Any]
Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]


def write(session: Sessions, name: str, value: float, began: str, failed: bool = False) -> Path:
    made = session({}, name=name, began=began)
    made.submit(
        f"sweep-of-{Path(name).name}", [Trial(print, {"lr": 0.1}, trial_id=f"{name}-a")], Search("loss", "min", 1)
    )
    made.results((f"{name}-a", 1, 0.0, 1.0, 1.0, (0,), {"loss": value}))
    made.end(f"{name}-a", "FAILED" if failed else "DONE")
    return Path(made.close())


@pytest.fixture
def home(session: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, with three runs, of which a damaged one is the newest, and a folder without a run."""
    write(session, "home/old", 0.25, "2026-01-31 12:00:00", failed=True)
    write(session, "home/new", 0.125, "2026-02-01 12:00:00")
    damaged = write(session, "home/torn", 0.5, "2026-02-02 12:00:00")
    (damaged / "results.jsonl").unlink()
    (tmp_path / "home/notes").mkdir()
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "home"))
    return tmp_path / "home"


def printed(capsys: Captured, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_all_runs_are_listed_the_newest_first(home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    head, _, *lines = [line.split() for line in printed(capsys, "runs").splitlines() if line.strip()]
    assert head == ["run", "sweep", "state", "best", "trials", "began", "took", "size"]
    assert [line[0] for line in lines if len(line) > 2] == ["torn", "new", "old", "1"]
    new, old = (" ".join(line) for line in lines if line[0] in ("new", "old"))
    assert new.startswith("new sweep-of-new done loss 0.125 (less is better) 1 2026-02-01 12:00")
    assert old.startswith("old sweep-of-old done loss 0.25 (less is better) 1, 1 failed 2026-01-31 12:00")
    assert " ".join(lines[-1]) == "1 folder without a run: notes"
    monkeypatch.setenv("COLUMNS", "80")
    narrow = printed(capsys, "runs", str(home))
    assert all(len(line) <= 80 for line in narrow.splitlines()) and "0.125" in narrow and "sweep-of" not in narrow


def test_runs_are_chosen(home: Path, capsys: Captured) -> None:
    def names(*options: str) -> list[str]:
        return [run["run"] for run in json.loads(printed(capsys, "runs", "--json", *options))["runs"]]

    assert names() == ["torn", "new", "old"]
    assert names("--state", "done") == ["new", "old"]
    assert (
        names("--name", "OF-OLD") == ["old"] and names("--name", "e") == ["new", "old"] and names("--name", "?") == []
    )
    assert names("--limit", "1") == ["torn"] and names("--state", "done", "--limit", "1") == ["new"]
    assert names(str(home / "new")) == ["new"]
    assert "... and 2 older runs; --limit 0 shows all" in printed(capsys, "runs", "--limit", "1")


def test_what_the_manual_names(home: Path, capsys: Captured) -> None:
    data = json.loads(printed(capsys, "runs", "--json"))
    torn, new, old = data["runs"]
    assert (data["dir"], data["others"]) == (str(home), [str(home / "notes")])
    assert new["best"] == {"metric": "loss", "mode": "min", "value": 0.125, "trial": "home/new-a"}
    assert (new["name"], new["trials"], new["states"], new["path"]) == (
        "sweep-of-new",
        1,
        {"DONE": 1},
        str(home / "new"),
    )
    assert new["began"].startswith("2026-02-01T12:00:00") and new["bytes"] > 0 and new["why"] is None
    assert (torn["state"], torn["best"]) == ("damaged", None) and "results.jsonl" in torn["why"]
    assert old["states"] == {"FAILED": 1}
    assert undescribed({*data, *new, *new["best"]}, as_json) == set()
    manual = (ROOT / "docs/cli.md").read_text(encoding="utf-8").partition("## fluid runs")[2].partition("\n## ")[0]
    from fluid.results.runs import STATES

    assert {state for state in STATES if f"`{state}`" not in manual} == set()


def test_what_cannot_be_used_is_refused(home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        ([str(home / "no")], "dir="),
        (["--state", "dead"], "state='dead': must be one of"),
        (["--limit", "-1"], "limit=-1"),
    ):
        assert main(["runs", *arguments]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv("FLUID_RUNS", str(home / "none yet"))
    assert "no run in" in printed(capsys, "runs")
    assert json.loads(printed(capsys, "runs", "--json"))["runs"] == []
    for command in (["report"], ["why", "a"], ["view"]):
        assert main(command) == 2
        assert "there is no run in" in capsys.readouterr().err


def test_without_a_run_the_newest_is_shown(home: Path, capsys: Captured) -> None:
    assert main(["report", "--json"]) == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["run"] == str(home / "new") and errors == f"the newest run: {home / 'new'}\n"
    assert main(["why", "home/new-a"]) == 0
    assert "home/new-a: done" in capsys.readouterr().out
    assert main(["why", str(home / "new")]) == 2
    assert "is a run folder: name one of its trials, too" in capsys.readouterr().err
    assert not os.listdir(home / "notes")


@pytest.mark.parametrize("trials", [{"DONE": float("inf")}, {"DONE": "many"}, ["DONE"], 7])
def test_a_summary_that_another_program_wrote_hides_no_other_run(home: Path, trials: Any, capsys: Captured) -> None:
    facts = json.loads((home / "new/session.json").read_text())
    facts.pop("crc", None)  # As there is none in a file that another program has written.
    facts["summary"] = {"name": "x", "trials": trials}
    (home / "new/session.json").write_text(json.dumps(facts))
    states = {row["run"]: row["state"] for row in json.loads(printed(capsys, "runs", "--json"))["runs"]}
    assert len(states) == 3 and states["new"] == "damaged"
