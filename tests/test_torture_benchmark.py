"""The torture benchmark: a short run of it, and that its checks find what they look for."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

from torture_checks import Found, check
from torture_files import tear
from torture_plan import draw
from torture_trials import Chain, chain

ROOT = Path(__file__).resolve().parents[1]
#: Seconds after which the run is given up. Far more than it takes, as the machine may be busy.
PATIENCE = 900.0


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """Its faults are the same every time, but for the instants at which they hit."""
    command = [sys.executable, "benchmarks/torture.py", "--seed", "ci", "--faults", "20", "--sessions", "local"]
    command += ["--add-to", str(tmp_path / "totals.json"), "--folder", str(tmp_path / "sessions")]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run,) = json.loads((tmp_path / "totals.json").read_text())["runs"]
    assert sum(run["faults"].values()) >= 20
    assert run["iterations"] > 0
    assert run["drivers"] > sum(run["sessions"].values()), "a session was resumed"


def test_a_session_is_drawn_from_its_seed() -> None:
    def drawn(seed: str) -> Any:
        return draw(seed, faults=None, kinds=set(), skipped=set(), sessions=set()).to_json()

    assert drawn("a/1") == drawn("a/1") != drawn("a/2")


def test_a_session_has_only_the_faults_that_are_wanted() -> None:
    plan = draw("a/1", faults=7, kinds={"kill_lane", "exit"}, skipped={"exit"}, sessions={"local"})
    nasty = [trial["config"]["nasty"] for trials in plan.groups.values() for trial in trials]
    assert (plan.kind, plan.faults, list(plan.fault_weights), any(nasty)) == ("local", 7, ["kill_lane"], False)


# --- What the checks find


class Ended:
    """A session of one trial that has ended; a test changes what was written of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = {"seed": "s/g0-t0", "nasty": {}}
        self.fields = {"id": "g0-t0", "budget": 4, "form": "class", "doomed": False, "config": config}
        self.requests: list[dict[str, Any]] = [{"what": "submit", "group": "g0"}]
        self.requests.append({"what": "submit", "group": "g0", "done": True})
        self.state = "DONE"
        self.results = [self.result(number) for number in range(1, 5)]
        self.told = [self.result(number) for number in range(1, 5)]

    def result(self, number: int) -> dict[str, Any]:
        value = chain("s/g0-t0", number)[-1]
        return {"trial": "g0-t0", "iteration": number, "metrics": {"value": value}, "width": 1.0}

    def check(self) -> Found:
        (self.folder / "disk" / "run").mkdir(parents=True)
        plan = {"kind": "local", "groups": {"g0": [self.fields]}}
        (self.folder / "plan.json").write_text(json.dumps(plan))
        told = [{**told, "value": told["metrics"]["value"], "way": "results"} for told in self.told]
        told.append({"group": "g0", "states": {"g0-t0": self.state}})
        for name, entries in (
            ("requests.jsonl", self.requests),
            ("disk/run/results.jsonl", self.results),
            ("told-0.jsonl", told),
        ):
            (self.folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return check(self.folder)


def extended(ended: Ended) -> None:
    ended.requests += [{"what": "extend", "trial": "g0-t0", "by": 2}] * 2
    ended.requests[-1] = {**ended.requests[-1], "done": True}


def replace_value(entry: dict[str, Any]) -> None:
    entry["metrics"] = {"value": "0" * 16}


CHANGES: dict[str, tuple[str, Callable[[Ended], Any]]] = {
    "an iteration that results.jsonl lacks": ("lost", lambda ended: ended.results.pop(1)),
    "an iteration that no driver was told": ("lost", lambda ended: ended.told.pop(1)),
    "an iteration that is nowhere": ("lost", lambda ended: (ended.results.pop(), ended.told.pop())),
    "an extension that was accepted and not run": ("lost", extended),
    "an iteration that is written twice": ("repeated", lambda ended: ended.results.append(ended.results[2])),
    "an iteration that is told twice": ("repeated", lambda ended: ended.told.append(ended.told[2])),
    "a value that was told wrongly": ("wrong", lambda ended: replace_value(ended.told[2])),
    "a value that was written wrongly": ("wrong", lambda ended: replace_value(ended.results[2])),
    "too many iterations": (
        "others",
        lambda ended: (ended.results.append(ended.result(5)), ended.told.append(ended.result(5))),
    ),
    "a trial that failed": ("others", lambda ended: setattr(ended, "state", "FAILED")),
    "a trial that did not end": ("others", lambda ended: setattr(ended, "state", None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_amiss_is_found(change: str, tmp_path: Path) -> None:
    kind, make = CHANGES[change]
    ended = Ended(tmp_path)
    make(ended)
    found = ended.check()
    assert getattr(found, kind)


def test_what_is_right_is_found_right(tmp_path: Path) -> None:
    found = Ended(tmp_path).check()
    assert found == Found(iterations=4)


def test_half_a_line_of_what_a_driver_was_told_is_passed_over(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    ended.check()
    with (tmp_path / "told-1.jsonl").open("w") as told:
        told.write('{"trial": "g0-t0", "iter')
    (tmp_path / "told-0.jsonl").rename(tmp_path / "told-2.jsonl")
    assert check(tmp_path) == Found(iterations=4)


def test_a_request_that_was_cut_off_may_have_been_heard_or_not(tmp_path: Path) -> None:
    for heard in (False, True):
        ended = Ended(tmp_path / str(heard))
        ended.requests.append({"what": "extend", "trial": "g0-t0", "by": 1})
        if heard:
            ended.results.append(ended.result(5))
            ended.told.append(ended.result(5))
        found = ended.check()
        assert (found.lost, found.others) == ([], [])


def test_a_state_that_was_restored_wrongly_shows_in_every_later_value(tmp_path: Path) -> None:
    trial = Chain()
    trial.setup({"seed": "s", "seconds": 0.0, "padding": 0, "nasty": {}})
    assert [trial.step()["value"] for _ in range(3)] == list(chain("s", 3))
    trial.save_checkpoint(str(tmp_path))
    file = tmp_path / "state.json"
    file.write_text(file.read_text().replace(trial.value, "0" * 16))
    trial.load_checkpoint(str(tmp_path))
    assert [trial.step()["value"] for _ in range(2)] != list(chain("s", 5)[3:])


@pytest.mark.parametrize("kind", ["torn_results", "torn_journal", "torn_trials", "torn_payloads"])
def test_a_torn_file_keeps_all_but_its_last_entry(kind: str, tmp_path: Path) -> None:
    lines = b"".join(b'{"what": "IterationReported", "trial_id": "t", "iteration": %d}\n' % n for n in range(1, 9))
    names = ("results.jsonl", "journal.jsonl", "trials.jsonl", "payloads.pkl")
    for seed in range(30):
        for name in names:
            (tmp_path / name).write_bytes(lines)
        assert tear(kind, random.Random(seed), tmp_path)
        (changed,) = [name for name in names if (tmp_path / name).read_bytes() != lines]
        assert (tmp_path / changed).read_bytes().startswith(lines), "no result is known, so no entry may be lost"
