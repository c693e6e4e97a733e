"""Trials that start from other trials' states, as users see them: real lanes, tiny trainables."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Keep, Search, Trial, TrialGroup, TrialGroupHandle
from fluid.errors import InvalidFieldError
from fluid.lane.checkpoints.paths import own_folder
from fluid.lane.checkpoints.trial_files import copy_trial_files
from fluid.results.records import Result


class Walk:
    """A random walk, which notes its steps in a file; what it draws as it is set up is not in its state."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.split, self.steps, self.at = config, random.sample(range(1_000), 4), 0, 0.0

    def step(self) -> dict[str, Any]:
        time.sleep(self.config.get("sleep", 0.0))
        self.steps += 1
        self.at = 0.9 * self.at + self.config["rate"] * random.random()
        file = Path("walk") if self.config.get("relative") else fluid.trial_dir() / "walk"
        with file.open("a") as walk:
            walk.write(f"{self.steps} {self.at!r}\n")
        noted = hashlib.md5(file.read_bytes()).hexdigest()
        if self.config.get("dies_at") == self.steps and not (died := fluid.trial_dir() / "died").exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"at": self.at, "noted": noted, "split": str(self.split)}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "walk.json").write_text(json.dumps([self.steps, self.at]))

    def load_checkpoint(self, folder: str) -> None:
        self.steps, self.at = json.loads(Path(folder, "walk.json").read_text())


def walk(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    steps, at = state or (0, 0.0)
    while True:
        steps, at = steps + 1, 0.9 * at + config["rate"] * random.random()
        yield {"at": at, "noted": steps}, (steps, at)


def stateless(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    for step in range(100):
        yield {"at": float(step)}


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor(backend="local", devices=2, verbose=0, run_dir=tmp_path / "run") as made:
        yield made


def submit(executor: FluidExecutor, *trials: Trial) -> TrialGroupHandle:
    return executor.submit_trialgroup(TrialGroup(trials, search=Search("at", "min")))


def of(handle: TrialGroupHandle) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Iterations and metrics by trial, once all have ended."""
    assert handle.wait(60)
    assert not handle.failures
    return {trial.trial_id: [_facts(result) for result in trial.results] for trial in handle.trials}


def _facts(result: Result) -> tuple[int, dict[str, Any]]:
    return result.iteration, dict(result.metrics)


def await_iteration(handle: TrialGroupHandle, trial_id: str, iteration: int) -> None:
    next(result for result in handle.results() if (result.trial_id, result.iteration) == (trial_id, iteration))


@pytest.mark.parametrize(
    ("trainable", "config", "fields", "options"),
    [
        (Walk, {}, {}, {}),
        (walk, {}, {}, {}),
        (Walk, {"relative": True}, {"chdir": True}, {}),
        (Walk, {}, {}, {"packing": "lane", "devices": 1}),
        (Walk, {}, {"devices": 2}, {}),
    ],
)
def test_a_fork_of_the_same_config_goes_on_as_its_parent(
    tmp_path: Path, trainable: Any, config: dict[str, Any], fields: dict[str, Any], options: dict[str, Any]
) -> None:
    config = {"rate": 1.0, **config}

    def trial(name: str, start_from: str | None = None, at: int | None = None, rate: float = 1.0) -> Trial:
        facts = {**fields, "start_from": start_from, "at": at}
        return Trial(trainable, {**config, "rate": rate}, budget=8, trial_id=name, **facts)

    with FluidExecutor(
        **{"backend": "local", "devices": 2, "verbose": 0, "run_dir": tmp_path / "run", **options}
    ) as run:
        # The parent's iterations are so short that a lane told later would have left them behind.
        forks = [trial("b", "a", 1), trial("c", "b", 2), trial("d", "a", 7), trial("e", "a", 1, rate=2.0)]
        found = of(submit(run, trial("a"), *forks))
    with FluidExecutor(
        **{"backend": "local", "devices": 2, "verbose": 0, "run_dir": tmp_path / "alone", **options}
    ) as run:
        assert of(submit(run, trial("a")))["a"] == found["a"]
    assert (found["b"], found["c"], found["d"]) == (found["a"][1:], found["a"][2:], found["a"][7:])
    assert [iteration for iteration, _ in found["e"]] == [*range(2, 9)] and found["e"] != found["a"][1:]


def test_a_fork_has_its_parents_seeds_also_from_another_run(executor: FluidExecutor, tmp_path: Path) -> None:
    handle = submit(
        executor, Trial(Walk, {"rate": 1.0, "sleep": 0.01}, budget=6, trial_id="a"), Trial(walk, {"rate": 1.0})
    )
    await_iteration(handle, "a", 2)
    fork = handle.fork("a", at=5)
    assert handle.seeds[fork] == handle.seeds["a"]
    found = of(handle)
    assert found[fork][-1] == found["a"][-1]
    keeping = FluidExecutor(backend="local", devices=1, verbose=0, run_dir=tmp_path / "kept", keep=Keep("last"))
    with keeping as first:
        earlier = submit(
            first, Trial(walk, {"rate": 1.0}, trial_id="o"), Trial(Walk, {"rate": 1.0}, budget=2, trial_id="a")
        )
        splits = {metrics["split"] for _, metrics in of(earlier)["a"]}
    (parent,) = (trial for trial in earlier.trials if trial.trial_id == "a")
    for name, start in {"b": parent, "c": parent.checkpoints[-1], "d": str(parent.checkpoints[-1].path)}.items():
        handle.add(Trial(Walk, {"rate": 1.0}, budget=3, trial_id=name, start_from=start))
        splits |= {metrics["split"] for _, metrics in of(handle)[name]}
        assert handle.seeds[name] == parent.seeds
    assert len(splits) == 1


def test_the_newest_state_of_a_parent_whose_process_died_is_the_last_that_it_had_reported(
    executor: FluidExecutor,
) -> None:
    config = {"rate": 1.0, "sleep": 0.02, "dies_at": 6}
    handle = submit(executor, Trial(Walk, config, budget=8, trial_id="a"))
    pids = {os.getpid()}
    for result in handle.results():
        if result.iteration == 5 and pids:
            pids.clear()
            time.sleep(0.05)  # It dies meanwhile.
            handle.fork("a", fork_id="b")
    found = of(handle)
    assert found["b"][0][0] > 5
    assert [metrics["at"] for _, metrics in found["b"]] == [
        metrics["at"] for iteration, metrics in found["a"] if iteration >= found["b"][0][0]
    ]


def test_a_trial_that_shares_a_run_can_be_forked_within_that(executor: FluidExecutor) -> None:
    def scheduled(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
        steps, at = state or (0, 0.0)
        while True:
            time.sleep(0.02)
            steps, at = steps + 1, at + config["rate"].at(steps)
            yield {"at": at}, (steps, at)

    rates = [fluid.search.schedule({0: 0.1, 5: later}) for later in (0.2, 0.3)]
    handle = submit(
        executor,
        *[
            Trial(scheduled, {"rate": rate}, budget=7, trial_id=rate_id)
            for rate_id, rate in zip("ab", rates, strict=True)
        ],
    )
    await_iteration(handle, "a", 1)
    forks = {handle.fork("a", at=3): 3, handle.fork("a", at=6): 6}
    found = of(handle)
    assert all(found[name] == found["a"][at:] for name, at in forks.items())
    assert {trial.start.parent for trial in handle.trials if trial.trial_id in forks and trial.start} == {"a"}


def test_what_cannot_go_on_is_refused_at_the_call(executor: FluidExecutor) -> None:
    handle = submit(executor, Trial(walk, {"rate": 1.0}, budget=3, trial_id="a"))
    assert handle.wait(30)
    with pytest.raises(InvalidFieldError, match="trainable of trial 's' cannot go on from: give its function a second"):
        handle.add(Trial(stateless, {}, budget=9, trial_id="s", start_from="a"))
    with pytest.raises(InvalidFieldError, match="budget=3: is used up by the 3 iterations of trial 'a'"):
        handle.fork("a")
    with pytest.raises(InvalidFieldError, match="trial_id=\\['a'\\]: is unknown"):
        handle.fork(["a"])  # type: ignore[arg-type]
    assert [*handle.states] == ["a"]
    handle.forget("a")
    with pytest.raises(InvalidFieldError, match="start_from='a': was forgotten"):
        handle.add(Trial(walk, {"rate": 1.0}, budget=9, start_from="a"))


def test_points_that_come_too_late_are_refused_with_what_is_to_be_larger(executor: FluidExecutor) -> None:
    space = {"rate": fluid.search.uniform(0.0, 1.0)}
    facts: dict[str, Any] = {"metric": "noted", "mode": "max", "executor": executor}
    best = fluid.run(walk, space, algorithm="random", samples=1, budget=3, **facts).best
    for algorithm, budget, fix in (("pbt", 9, "ready"), ("random", 3, "a larger budget"), ("asha", 2, "larger budget")):
        with pytest.raises(InvalidFieldError, match=rf"points\[0\]=.*starts after 3 iterations.*{fix}"):
            fluid.run(walk, space, algorithm=algorithm, samples=4, budget=budget, points=[best], name="late", **facts)


def test_what_goes_while_files_are_copied_is_left_out(tmp_path: Path) -> None:
    parent = Path(own_folder(str(tmp_path), "a"))
    (parent / "stays").mkdir(parents=True)
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            (parent / "goes" / "deep").mkdir(parents=True, exist_ok=True)
            (parent / "goes" / "file").write_text("x")
            shutil.rmtree(parent / "goes")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(300):
            copy_trial_files(str(tmp_path), "a", f"b{number}")
            assert Path(own_folder(str(tmp_path), f"b{number}"), "stays").is_dir()
    finally:
        ended.set()
        thread.join()
