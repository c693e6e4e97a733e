"""Drivers of one sweep that are processes of their own: killed, stopped and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joint_members import content, ended, folders, start, told
from waiting import eventually

pytestmark = pytest.mark.slow

SWEEP = """
with FluidExecutor(**options_of(shared)) as executor:
    result = fluid.run(
        slow, {"x": uniform(0, 1)}, metric="loss", mode="min", algorithm=os.environ["ALGORITHM"], samples=9, budget=27,
        executor=executor,
    )
found = [[trial.trial_id, trial.state, len(trial.results)] for trial in result.trials]
"""
#: Kills its driver at its second iteration, where x is 2.
POISON = """
def poison(config):
    for iteration in range(1, 100):
        time.sleep(0.02)
        if config["x"] == 2 and iteration == 2:
            os.kill(int(os.environ["DRIVER"]), signal.SIGKILL)
        yield {"loss": config["x"] + 1 / iteration}

os.environ["DRIVER"] = str(os.getpid())
with FluidExecutor(**options_of(shared)) as executor:
    result = fluid.run(poison, {"x": [1, 2, 3]}, metric="loss", algorithm="grid", budget=4, executor=executor)
found = [[trial.state, None if trial.failure is None else trial.failure.kind] for trial in result.trials]
"""
GROUP = """
with FluidExecutor(**options_of(shared)) as executor:
    trials = [Trial(slow, {"x": 1.0}, budget=60, trial_id=f"t{place}") for place in range(4)]
    handle = executor.submit_trialgroup(TrialGroup(trials, "g"))
    found = sorted([result.trial_id, result.iteration] for result in handle.results())
"""


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    made: list[subprocess.Popen[str]] = []
    yield made
    for member in made:
        if member.poll() is None:
            os.killpg(member.pid, signal.SIGKILL)
        member.communicate()


def begin(folder: Path, members: list[Any], text: str = SWEEP, number: int = 2, algorithm: str = "asha") -> list[Any]:
    fresh = [start(folder, text, ALGORITHM=algorithm) for _ in range(number)]
    members += fresh
    return fresh


def await_results(folder: Path, number: int) -> None:
    def are_there() -> bool:
        shared = folder / "shared"
        if not (shared / "members").is_dir():
            return False
        return any((one / "results.jsonl").exists() and len(told(one)) >= number for one in folders(shared))

    eventually(are_there)


def require_whole(folder: Path, members: int) -> None:
    """Checks that the run folders of the members that ended well hold the same, each iteration once."""
    found = [one for one in folders(folder / "shared") if any(state == "DONE" for state, _ in content(one).values())]
    assert len(found) >= members
    whole = sorted(found, key=lambda one: len(told(one)))[-members:]
    for one in whole:
        lines = told(one)
        assert len(lines) == len(set(lines)) and lines == told(whole[0])
        assert content(one) == content(whole[0])
    for state, results in content(whole[0]).values():
        assert state in ("DONE", "STOPPED")
        assert [iteration for iteration, _ in results] == list(range(1, len(results) + 1))


@pytest.mark.parametrize("algorithm", ["asha", "random"])
def test_others_go_on_with_the_trials_of_one_that_is_killed(tmp_path: Path, members: list[Any], algorithm: str) -> None:
    first, second = begin(tmp_path, members, algorithm=algorithm)
    await_results(tmp_path, 20)
    first.kill()
    found = ended(second)
    assert len(found) == 9 and {state for _, state, _ in found} <= {"DONE", "STOPPED"}
    require_whole(tmp_path, 1)


def test_all_are_killed_and_the_same_call_goes_on(tmp_path: Path, members: list[Any]) -> None:
    for member in begin(tmp_path, members):
        await_results(tmp_path, 20)
        member.kill()
    before = max(len(told(one)) for one in folders(tmp_path / "shared"))
    first, second = map(ended, begin(tmp_path, members))
    assert first == second and len(first) == 9 and sum(number for *_, number in first) > before
    require_whole(tmp_path, 2)


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_others_go_on_with_the_trials_of_one_that_leaves(
    tmp_path: Path, members: list[Any], name: str, status: int
) -> None:
    first, second = begin(tmp_path, members, algorithm="random")
    await_results(tmp_path, 40)
    first.send_signal(getattr(signal, name))
    found = ended(second)
    assert [number for *_, number in found] == [27] * 9
    _, said = first.communicate(timeout=60)
    assert first.returncode == status and "the other drivers of" in said and "resume" not in said
    require_whole(tmp_path, 1)


def test_one_that_was_taken_for_dead_joins_again(tmp_path: Path, members: list[Any]) -> None:
    first, second = begin(tmp_path, members, algorithm="random")
    await_results(tmp_path, 10)
    first.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    first.send_signal(signal.SIGCONT)
    found = [ended(first), ended(second)]
    assert found[0] == found[1] and [number for *_, number in found[0]] == [27] * 9
    require_whole(tmp_path, 2)


def test_a_trial_that_takes_three_drivers_with_it_has_failed(tmp_path: Path, members: list[Any]) -> None:
    made = begin(tmp_path, members, POISON, number=4)
    found = []
    for member in made:
        out, err = member.communicate(timeout=60)
        found.append((member.returncode, out, err))
    alive = [out for status, out, _ in found if not status]
    assert [status for status, _, _ in found].count(-signal.SIGKILL) == 3 and len(alive) == 1, found
    assert alive[0].strip() == '[["DONE", null], ["FAILED", "lane_lost"], ["DONE", null]]'


def test_a_group_goes_on_where_its_member_is_killed(tmp_path: Path, members: list[Any]) -> None:
    first, second = begin(tmp_path, members, GROUP)
    await_results(tmp_path, 60)
    first.kill()
    assert ended(second) == [[f"t{place}", iteration] for place in range(4) for iteration in range(1, 61)]
    require_whole(tmp_path, 1)
