"""However a sweep ends, what it returns, what its run folder says and what it prints agree on what has not ended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.rehearsal import RehearsalBackend, ReplayedIteration
from fluid.search import uniform


class Steps:
    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["x"] / i}, 10.0) for i in iterations]


@pytest.mark.parametrize("algorithm", ["random", "asha"])
@pytest.mark.parametrize("limit", ["deadline", "time_budget_s"])
@pytest.mark.parametrize("seconds", [9.0, 15.0, 21.0, 35.0])
def test_all_words_on_the_end_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, limit: str, seconds: float
) -> None:
    backend, run_dir = RehearsalBackend(2), tmp_path / "run"
    with fluid.FluidExecutor(backend, run_dir=run_dir, verbose=0) as executor:
        result = fluid.run(
            Steps,
            {"x": uniform(0.0, 1.0)},
            metric="loss",
            algorithm=algorithm,
            samples=4,
            budget=2,
            seed=0,
            executor=executor,
            **{limit: seconds},
        )
    # A trial whose budget is used up is done, everywhere; one that waits for a decision may still be extended.
    assert all(trial.state in ("DONE", "STOPPED") for trial in result.trials if trial.iteration == 2)
    stored = {trial.trial_id: trial for trial in fluid.load(run_dir).trials}
    for trial in result.trials:
        assert stored[trial.trial_id].iteration == trial.iteration
        assert (stored[trial.trial_id].state in ("DONE", "STOPPED")) == (trial.state in ("DONE", "STOPPED"))
    open_trials = [trial for trial in result.trials if trial.state in ("UNFINISHED", "PAUSED")]
    said = re.findall(r"(\d+) of (\d+) trials had not ended", capsys.readouterr().err)
    assert said == ([(str(len(open_trials)), str(len(result.trials)))] if open_trials else [])
    assert result.state == ("UNFINISHED" if open_trials else "DONE")


def test_a_session_that_is_drained_after_all_trials_ended_does_not_speak_of_unfinished_ones() -> None:
    error = fluid.LimitReachedError("the deadline of 2 h has come", "runs/1", unfinished=0)
    assert str(error).startswith("the deadline of 2 h has come: all trials had ended;")


#: A program of its own: what ends it is a signal, a limit, or the end of the with block.
_PROGRAM = """
import os, signal, sys, threading, time
import fluid

def counting(config, state=None):
    done = state or 0
    while True:
        time.sleep(0.1)
        done += 1
        yield {"loss": 1.0 / done}, done

way, run_dir = sys.argv[1:]
space = {"x": fluid.search.uniform(0.0, 1.0)}
options = dict(metric="loss", mode="min", algorithm="random", samples=40, budget=4, seed=0)
if hasattr(signal, way):
    threading.Timer(2.0, os.kill, (os.getpid(), getattr(signal, way))).start()
    fluid.run(counting, space, run_dir=run_dir, devices=2, **options)
elif way == "deadline":
    fluid.run(counting, space, run_dir=run_dir, devices=2, deadline=2.0, **options)
elif way == "time_budget_s":
    fluid.run(counting, space, run_dir=run_dir, devices=2, time_budget_s=1.2, **options)
elif way == "budget_usd":
    limits = dict(budget_usd=4.0, price_per_device_hour=3600.0)
    with fluid.FluidExecutor(devices=2, run_dir=run_dir, **limits) as executor:
        fluid.run(counting, space, executor=executor, **options)
else:
    with fluid.FluidExecutor(devices=2, run_dir=run_dir) as executor:
        executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(counting, {"x": x}, budget=4) for x in range(40)]))
        time.sleep(1.2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "deadline", "time_budget_s", "budget_usd", "close"])
def test_words_and_records_agree_on_what_had_not_ended(tmp_path: Path, way: str) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM, encoding="utf-8")
    run_dir = tmp_path / "run"
    ended = subprocess.run(
        [sys.executable, "program.py", way, str(run_dir)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    stored = fluid.load(run_dir)
    assert all(trial.state == "DONE" for trial in stored.trials if trial.iteration == 4)
    unfinished = str(sum(trial.state == "UNFINISHED" for trial in stored.trials))
    trials = str(len(stored.trials))
    assert unfinished != "0" and stored.state == "UNFINISHED", ended.stderr
    said = ended.stdout + ended.stderr
    of_all = re.findall(r"(\d+) of (\d+) trials had not ended", said)
    dropped = re.findall(r"(\d+) trials? that had not ended", said)
    saved = re.findall(r"\d+ of (\d+) unfinished trials", said)
    assert set(of_all) <= {(unfinished, trials)} and {*dropped, *saved} <= {unfinished}, said
    assert of_all or dropped, said
