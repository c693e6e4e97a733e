"""Trials draw the same random numbers in each run of a seeded program, and others than each other."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.reports.run.loader import load_run
from fluid.reports.tables.why import as_json
from tests.seeded_programs import lines_of, two_runs
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

#: Seeds the generators that its first argument names; draws in trials, also from modules that they load first.
PROGRAM = """
import random, sys
import fluid
from fluid import FluidExecutor, Trial, TrialGroup

def draw(config):
    import numpy, torch
    for _ in range(2):
        yield {"random": random.random(), "numpy": float(numpy.random.normal()), "torch": float(torch.rand(1))}

class Drawing:
    def setup(self, config):
        self.first = random.random()
    def step(self):
        return {"random": self.first + random.random()}

if __name__ == "__main__":
    which, seed = sys.argv[1], None if sys.argv[2] == "None" else int(sys.argv[2])
    if "random" in which:
        random.seed(0)
    if "numpy" in which:
        import numpy
        numpy.random.seed(0)
    if "torch" in which:
        import torch
        torch.manual_seed(0)
    with FluidExecutor(backend="local", devices=2, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(draw, budget=2), Trial(draw, budget=2)]))
        handle.add(Trial(Drawing, budget=2))
        handle.wait()
        options = {"metric": "random", "mode": "min", "algorithm": "random", "samples": 3, "budget": 2}
        swept = fluid.run(draw, {"x": [1, 2]}, seed=seed, **options)
    for trial in (*handle.trials, *swept.trials):
        for metric in which.split(","):
            print(metric, trial.seeds._asdict()[metric], [result.metrics.get(metric) for result in trial.results])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("seeded", ["random,numpy,torch", "torch"])
def test_two_runs_of_a_seeded_program(program: Path, seeded: str) -> None:
    first, second = two_runs(program, seeded, "0")
    assert first == second
    drawn = [line for line in first if "None" not in line]
    assert len(set(drawn)) == len(drawn) >= 5


def test_the_seed_of_a_sweep_adds_to_the_program(program: Path) -> None:
    zero, one, other = (lines_of(program, "random", seed) for seed in ("0", "1", "None"))
    assert zero[:3] == one[:3] == other[:3]  # Those of the group.
    assert not {*zero[3:]} & {*one[3:]} and not {*zero[3:], *one[3:]} & {*other[3:]}


def test_an_unseeded_program_draws_others_in_each_run(tmp_path: Path) -> None:
    program = tmp_path / "unseeded.py"
    program.write_text(PROGRAM.replace("        random.seed(0)", "        pass"))
    first, second = two_runs(program, "random", "0")
    assert not {*first} & {*second}


def once(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"number": random.random()}


def dies_at_first(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    numbers = [random.random(), random.random()]
    with open(config["log"], "a") as log:
        print(numbers, file=log)
    marker = Path(config["log"] + ".died")
    yield {"number": numbers[0]}
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield {"number": numbers[1]}


def test_a_retry_has_the_same_seeds_and_records_show_them(tmp_path: Path) -> None:
    log = tmp_path / "numbers"
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(dies_at_first, {"log": str(log)}, budget=2, trial_id="a"), Trial(once, trial_id="b")]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        assert handle.wait(PATIENCE)
        live = {trial.trial_id: trial.seeds for trial in handle.trials}
    first, second = log.read_text().splitlines()
    assert first == second
    seeds = live["a"]
    assert seeds is not None and live["b"] is not None and not {*seeds} & {*live["b"]}
    stream = random.Random(seeds.random)
    assert json.loads(first) == [stream.random(), stream.random()]  # As random.seed() in the trial would.
    assert {trial.trial_id: trial.seeds for trial in fluid.load(tmp_path / "run").trials} == live
    run = load_run(tmp_path / "run")
    assert {told["trial"]: told["seeds"] for told in as_json(run, run.trials)["trials"]} == {
        name: None if of_trial is None else of_trial._asdict() for name, of_trial in live.items()
    }


def waits(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    number = random.random()
    yield {"number": number}
    threading.Event().wait(None if not Path(config["gate"]).exists() else 0.0)
    yield {"number": number}


def test_a_session_that_is_resumed_keeps_them_and_goes_on_with_the_order(tmp_path: Path) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "run"
    random.seed(0)
    with FluidExecutor(backend="local", devices=1, run_dir=folder, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(waits, {"gate": str(gate)}, budget=2, trial_id="a")]))
        first = next(handle.results()).metrics["number"]
        seeds = handle.seeds["a"]
    gate.touch()
    random.seed(1)
    with FluidExecutor.resume(folder, backend="local", devices=1, verbose=0) as executor:
        (handle,) = executor.handles
        assert handle.wait(PATIENCE)
        assert handle.seeds == {"a": seeds}
        assert {result.metrics["number"] for result in handle.results()} == {first}
        random.seed(0)
        handle.add(Trial(once, trial_id="b"))
        assert handle.wait(PATIENCE)
        assert handle.seeds["b"] != seeds


def test_submissions_from_several_threads_differ() -> None:
    random.seed(0)
    with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        handles: list[Any] = []

        def submit() -> None:
            for _ in range(10):
                handles.append(executor.submit_trialgroup(TrialGroup([Trial(once), Trial(once)])))

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(handle.wait(PATIENCE) for handle in handles)
        numbers = [trial.metrics["number"] for handle in handles for trial in handle.trials]
    assert len(set(numbers)) == len(numbers) == 80
