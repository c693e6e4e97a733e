"""The best trial, the table of trials and the failures in ``fluid report``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.engine.events import Failure
from fluid.reports.tables.trials import last_frame
from fluid.trialgroup import Trial

Captured = pytest.CaptureFixture[str]


def trial(trial_id: str, budget: int = 1, **config: Any) -> Trial:
    """A trial that is never run."""
    return Trial(print, config, budget=budget, trial_id=trial_id)


def report(capsys: Captured, *arguments: str) -> list[str]:
    """The lines of a report, with single spaces."""
    assert main(["report", *arguments]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def refusal(capsys: Captured, *arguments: str) -> str:
    """The one line on stderr with which the command is refused."""
    assert main(["report", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_the_best_trial_comes_first_with_its_config(two_sweeps: tuple[Path, Path], capsys: Captured) -> None:
    lines = report(capsys, str(two_sweeps[0]))
    assert lines[1:3] == [
        "best loss 0.25 (less is better): asha-4, at iteration 4 of 4; done",
        # What all trials share is last.
        "lr=0.02, optimizer/name=adam, data=digits",
    ]
    order = [line.split()[0] for line in lines if line.startswith("asha-") and "failed:" not in line]
    assert order[0] == "asha-4" and order[-1] == "asha-3" and len(order) == 12


def test_a_failure_is_told_with_its_place_and_its_log(two_sweeps: tuple[Path, Path], capsys: Captured) -> None:
    log = two_sweeps[0] / "trials" / "asha-3" / "output.log"
    log.parent.mkdir(parents=True)
    log.write_text("epoch 2\n")
    lines = report(capsys, str(two_sweeps[0]))
    at = lines.index("asha-3 failed: ValueError: loss is nan")
    assert lines[at + 1] == 'train.py, line 31, in train: raise ValueError("loss is nan")'
    assert lines[at + 2] == f"log: {log}"


def test_trials_that_failed_alike_are_told_once(session: Callable[..., Any], capsys: Captured) -> None:
    made = session({"g": [trial(f"t{k}", 2, lr=0.1 * k) for k in range(7)]})
    for k in range(5):
        made.end(f"t{k}", "FAILED", failure=Failure("error", "ValueError: no"))
    made.end("t5", "FAILED", failure=Failure("out_of_memory", "too large"))
    lines = report(capsys, str(made.close()))
    assert "t0, t1, t2 and 2 more failed: ValueError: no" in lines
    assert "t5 failed: too large" in lines


def test_a_failed_trial_is_best_only_among_failed_ones(session: Callable[..., Any], capsys: Captured) -> None:
    made = session({"g": [trial("a", 2), trial("b", 2)]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 0.1}), ("b", 1, 0.0, 1.0, 1.0, (1,), {"loss": 0.9}))
    made.end("a", "FAILED", failure=Failure("error", "no"))
    assert report(capsys, str(made.path))[1] == "best loss 0.9 (less is better): b, at iteration 1 of 2; unfinished"
    made.end("b", "FAILED", failure=Failure("error", "no"))
    assert report(capsys, str(made.close()))[1] == "best loss 0.1 (less is better): a, at iteration 1 of 2; failed"


def test_all_hyperparameters_are_shown_or_counted(
    session: Callable[..., Any], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session({"g": [trial(f"t{k}", 1, **{f"parameter_{n}": n + k for n in range(12)}) for k in range(2)]})
    made.results(("t0", 1, 0.0, 1.0, 1.0, (0,), {"loss": 0.5}))
    path = str(made.close())
    monkeypatch.setenv("COLUMNS", "80")
    lines = report(capsys, path)
    assert "+11 more: --columns parameter_1,parameter_2,parameter_3,parameter_4,..." in lines
    monkeypatch.setenv("COLUMNS", "240")
    wide = report(capsys, path)
    assert not [line for line in wide if line.startswith("+")]
    assert "t0 unfinished 1/1 0.5 0 1 2 3 4 5 6 7 8 9 10 11 1 s" in wide


def test_columns_are_chosen_by_name(small_run: Path, capsys: Captured) -> None:
    lines = report(capsys, str(small_run), "--columns", "lr,eval/f1,time")
    assert "trial state lr best eval/f1 time" in lines
    assert "b done 0.01 0.5 6.00 s" in lines


def test_one_name_of_two_things_is_told_apart_by_a_prefix(session: Callable[..., Any], capsys: Captured) -> None:
    made = session({"g": [trial("a", 1, loss="huber"), trial("b", 1, loss="mse")]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"loss": 0.5}))
    path = str(made.close())
    lines = report(capsys, path, "--columns", "loss,config/loss,metrics/loss")
    assert "trial state loss loss best loss" in lines
    assert "a unfinished huber huber 0.5" in lines


def test_an_unknown_column_is_refused(small_run: Path, capsys: Captured) -> None:
    said = refusal(capsys, str(small_run), "--columns", "lr,depth")
    assert f"columns='depth': is not a column of {small_run}; it has lr, act, loss, eval/f1, epoch" in said
    assert "columns=''" in refusal(capsys, str(small_run), "--columns", "")
    assert "columns='lr'" in refusal(capsys, str(small_run), "--columns", "lr", "--json")


def test_another_metric_judges(small_run: Path, capsys: Captured) -> None:
    assert report(capsys, str(small_run), "--metric", "eval/f1")[1].startswith(
        "best eval/f1 0.5 (more is better): b, at iteration 2"
    )
    assert report(capsys, str(small_run), "--mode", "max")[1].startswith(
        "best loss 0.9 (more is better): a, at iteration 1"
    )


def test_a_metric_that_only_counts_is_not_judged_by(session: Callable[..., Any], capsys: Captured) -> None:
    made = session({"g": [trial("a", 2), trial("b", 2)]})
    made.results(("a", 1, 0.0, 1.0, 1.0, (0,), {"step": 1}), ("b", 1, 0.0, 1.0, 1.0, (1,), {"step": 5}))
    path = str(made.close())
    lines = report(capsys, path)
    assert not [line for line in lines if line.startswith(("best", "importance"))]
    assert [line for line in lines if line.startswith(("a ", "b "))] == ["a unfinished 1/2 1 s", "b unfinished 1/2 1 s"]
    assert report(capsys, path, "--metric", "step", "--mode", "max")[1].startswith("best step 5 (more is better): b")


def test_a_damaged_file_is_told_first(small_run: Path, capsys: Captured) -> None:
    (small_run / "results.jsonl").write_bytes(b"\x00\xff\x01\n" * 45)
    lines = report(capsys, str(small_run))
    assert lines[1] == "Note: results.jsonl is damaged: none of its 45 lines could be read."


def test_the_page_can_go_to_stdout(small_run: Path, capsys: Captured) -> None:
    assert main(["report", str(small_run), "--html", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("<!doctype html>") and out.endswith("</html>\n")
    assert not (small_run / "report.html").exists() and not Path("-").exists()
    assert "html='-'" in refusal(capsys, str(small_run), "--html", "-", "--json")
    assert "png='-'" in refusal(capsys, str(small_run), "--png", "-")


def test_the_last_place_of_a_traceback() -> None:
    chained = 'Traceback:\n  File "a.py", line 3, in f\n    g()\n  File "b.py", line 5, in g\n    1 / 0\n    ~~^~~'
    assert last_frame(chained) == "b.py, line 5, in g: 1 / 0"
    assert last_frame('Traceback:\n  File "<stdin>", line 1, in f\nKeyError: 1') == "<stdin>, line 1, in f"
    assert last_frame("Traceback ...") == ""
