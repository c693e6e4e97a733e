"""``fluid.run`` rehearsed: all algorithms, budgets on the virtual clock, slow searchers, memory that is too small."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.rehearsal import ReplayedIteration
from fluid.search import PBT, AskTell, loguniform

SPACE = {"lr": loguniform(1e-4, 1e-1)}


class Model:
    """Learns best at a rate of 0.003; larger rates take longer and need more memory."""

    @staticmethod
    def replay(config: Any, iterations: range) -> list[ReplayedIteration]:
        floor, seconds = abs(math.log10(config["lr"]) + 2.5), 10.0 * (1.0 + 10.0 * config["lr"])
        memory = 1e9 * (1.0 + 10.0 * config["lr"])
        return [ReplayedIteration({"loss": floor + 1.0 / i}, seconds, memory) for i in iterations]


class Even:
    """Each iteration takes a minute, so that trials end together."""

    @staticmethod
    def replay(config: Any, iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["lr"] + 1.0 / i}, 60.0) for i in iterations]


def rehearse(folder: Path, devices: Any = 4, **options: Any) -> Any:
    given = {"metric": "loss", "mode": "min", "samples": 16, "budget": 9, "seed": 1, **options}
    with fluid.FluidExecutor(backend="simulated", devices=devices, run_dir=folder, verbose=0) as executor:
        result = fluid.run(given.pop("trainable", Model), given.pop("space", SPACE), executor=executor, **given)
        return result, executor.session.clock.now()


def table(result: Any) -> list[tuple[Any, ...]]:
    return [
        (trial.state, trial.config["lr"], [(one.iteration, one.metrics["loss"], one.seconds) for one in trial.results])
        for trial in result.trials
    ]


@pytest.mark.parametrize("algorithm", ["asha", "hyperband", "sha", "random", "tpe", PBT(), PBT(synchronous=True)])
def test_the_same_seed_gives_the_same_sweep(algorithm: str | PBT, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    begun = time.monotonic()
    first, end = rehearse(tmp_path / "first", algorithm=algorithm)
    second, same_end = rehearse(tmp_path / "second", algorithm=algorithm)
    assert table(first) == table(second) and end == same_end
    assert 2.0 * (time.monotonic() - begun) < end
    members = {trial.trial_id.rpartition("-")[2].partition(".")[0] for trial in first.trials}
    assert len(members) == 16 and first.best.value < 1.5
    assert len(first.trials) == 16 or isinstance(algorithm, PBT)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_population_advances_evenly_and_exploits_cost_no_iterations(
    devices: int, synchronous: bool, tmp_path: Path
) -> None:
    seen: list[tuple[str, int]] = []

    class Listen(fluid.TrialListener):
        def on_result(self, result: fluid.Result) -> None:
            seen.append((result.trial_id.rpartition("-")[2].partition(".")[0], result.iteration))

    options = PBT(ready=2, synchronous=synchronous)
    given = {"trainable": Even, "samples": 8, "budget": 20, "devices": devices, "callbacks": [Listen()]}
    result, end = rehearse(tmp_path, algorithm=options, **given)
    done = dict.fromkeys((number for number, _ in seen), 0)
    for number, iteration in seen:
        done[number] = iteration
        assert max(done.values()) - min(done.values()) <= 5
    # Alone on a device, each that does not wait is compared with others that have done less.
    assert len(result.trials) > (8 if synchronous or devices > 1 else 7) and set(done.values()) == {20}
    assert end <= 60.0 * 20 * (8 / devices) * 1.2


def test_a_time_budget_is_virtual(tmp_path: Path) -> None:
    result, end = rehearse(tmp_path, algorithm="random", samples=1000, time_budget_s=600.0)
    assert 600.0 <= end < 650.0
    assert 4 < sum(trial.state == "DONE" for trial in result.trials) < 400


def test_a_deadline_is_virtual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        """A machine on which each step takes two minutes."""

        at = 0.0

        def now(self) -> float:
            self.at += 120.0
            return self.at

    monkeypatch.setattr("fluid.sweep._CLOCK", Late())
    result, end = rehearse(tmp_path, trainable=Even, algorithm="random", samples=1000, deadline=605.0)
    assert end == 600.0, "another iteration would end too late"
    assert result.notes == ("The sweep ended early: the deadline of 10 min 5 s has come.",)


def thinking(pause: float, told: list[Any]) -> AskTell:
    """A searcher that takes its time, and notes what it is told."""
    configs = ({"lr": 0.1 / number} for number in range(1, 11))

    def ask() -> Any:
        time.sleep(pause)
        return next(configs, None)

    return AskTell(ask, lambda config, value: told.append((config, value)))


def test_a_searcher_that_thinks_takes_no_virtual_time(tmp_path: Path) -> None:
    found, told = [], list[list[Any]]()
    for name, pause in (("slow", 0.02), ("quick", 0.0)):
        told.append([])
        searcher = thinking(pause, told[-1])
        played = rehearse(tmp_path / name, algorithm="full", space=None, searcher=searcher, samples=None)
        found.append((table(played[0]), played[1]))
    assert found[0] == found[1] and told[0] == told[1] and len(told[0]) == 10


def test_trials_that_end_at_one_instant_are_told_of_in_the_same_order(tmp_path: Path) -> None:
    def played(number: int, pause: float, interval: float) -> Any:
        told: list[Any] = []
        usual = sys.getswitchinterval()
        sys.setswitchinterval(interval)
        try:
            searcher = thinking(pause, told)
            folder, space = tmp_path / str(number), None
            result, end = rehearse(folder, trainable=Even, space=space, searcher=searcher, samples=None, budget=3)
            return table(result), told, end
        finally:
            sys.setswitchinterval(usual)

    first, *rest = [played(number, 0.002 * (number % 2), 10.0 ** -(2 + number)) for number in range(5)]
    assert rest == [first] * 4


@pytest.mark.parametrize("on_oom", ["worst", "fail"])
def test_trials_that_need_more_memory_than_there_is_run_out_of_it(on_oom: str, tmp_path: Path) -> None:
    devices = [fluid.Device(index, kind="gpu", memory_bytes=1.3e9) for index in range(2)]
    result, _ = rehearse(tmp_path, devices=devices, algorithm="random", on_oom=on_oom, max_concurrent=2)
    failed = [trial for trial in result.trials if trial.state == "FAILED"]
    assert 0 < len(failed) < 16
    assert {trial.config["lr"] > 0.03 for trial in failed} == {True}
    assert {trial.failure.kind for trial in failed} == {"out_of_memory"}
