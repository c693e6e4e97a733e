"""A colleague's quick check beside a long sweep, with default settings: it has its result within an iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.rehearsal import FusedRates, ReplayedFusion, ReplayedIteration
from fluid.rehearsal.outcome import outcome_of


class Constant:
    """A trainable of which every iteration takes as many seconds of the virtual clock as its config says."""

    @staticmethod
    def replay(config: dict[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": 1.0 / each}, config["s"], config["bytes"]) for each in iterations]


class Fused(Constant):
    """The same, as rows of one step: eight take a little more than twice as long as one."""

    fluid_elastic = fluid_fusible = True

    @staticmethod
    def fusion(config: dict[str, Any]) -> ReplayedFusion:
        return ReplayedFusion("one shape", FusedRates((1, 2, 4, 8), (1.0, 1.1, 1.3, 2.2)))


def played(
    folder: Path,
    *,
    trainable: type = Constant,
    after_s: float = 150.0,
    devices: int | list[Device] = 2,
    checks: tuple[int, int, float] = (1, 1, 60.0),
    key: str = "check",
    memory: float | None = None,
    terms: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[float, float]:
    """Seconds of a check, of so many trials and iterations, and those of eight trials of 20 minutes beside it."""
    options = {"packing": "off", "max_width": 1, **options}
    count, iterations, seconds = checks
    with FluidExecutor(backend="simulated", devices=devices, verbose=0, run_dir=folder, **options) as executor:
        trials = [Trial(trainable, {"s": 60.0, "bytes": memory}, budget=20, profile_key="sweep") for _ in range(8)]
        sweep = executor.submit_trialgroup(TrialGroup(trials, name="sweep", owner="ann"))
        sweep.wait(timeout=after_s)
        more = [
            Trial(Constant, {"s": seconds, "bytes": memory}, budget=iterations, profile_key=key) for _ in range(count)
        ]
        check = executor.submit_trialgroup(TrialGroup(more, name="check", owner="bob"), **(terms or {}))
        check.wait()
        sweep.wait()
    return outcome_of(folder, group="check").makespan_s, outcome_of(folder, group="sweep").makespan_s


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"packing": "auto", "max_width": None},
        {"group_policy": "srsf"},
        {"planner": "dynamic"},
        {"group_policy": "srsf", "key": "sweep"},
        {"planner": "dynamic", "key": "sweep"},
        {"terms": {"priority": 10}},
        {"group_policy": "fifo", "terms": {"priority": 10}},
        {"checks": (1, 3, 20.0)},
        {"checks": (3, 1, 20.0)},
        {"devices": 1},
        {"devices": 4},
    ],
    ids=str,
)
def test_a_check_of_a_minute_ends_within_three_and_costs_the_sweep_no_more_than_itself(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    ends, sweep = played(tmp_path / "run", **variant)
    assert ends <= 180.0
    assert sweep <= 9600.0 / variant.get("devices", 2) + 60.0


@pytest.mark.parametrize(
    "sharing",
    [
        {"packing": "auto", "trainable": Fused},
        {"packing": "fused", "trainable": Fused},
        {"packing": "fused", "trainable": Fused, "devices": 2},
        {"packing": "fused", "trainable": Fused, "devices": [Device(0, memory_bytes=12e9)], "memory": 1e9},
        {"packing": "lane", "max_packing": 2},
        {"packing": "lane", "max_packing": 2, "lane_policy": "fair"},
    ],
    ids=str,
)
def test_trials_that_share_a_lane_pause_together_and_go_on_as_they_were(
    tmp_path: Path, sharing: dict[str, Any]
) -> None:
    sharing = {"devices": 1, "after_s": 630.0, **sharing}
    ends, sweep = played(tmp_path / "run", **sharing)
    assert ends <= 180.0
    assert sweep <= played(tmp_path / "later", **{**sharing, "after_s": 1e5})[1] + 60.0


def test_by_order_of_arrival_a_check_of_the_same_priority_waits(tmp_path: Path) -> None:
    assert played(tmp_path / "run", group_policy="fifo")[0] > 4000.0


def test_a_long_newcomer_takes_an_iteration_and_gives_the_device_back(tmp_path: Path) -> None:
    ends, sweep = played(tmp_path / "run", checks=(8, 20, 60.0))
    assert sweep <= 4800.0 + 60.0 < ends


def sleeper(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, float], int]]:
    done = state or 0
    while True:
        time.sleep(config["s"])
        done += 1
        yield {"at": time.time()}, done


@pytest.mark.slow
def test_one_iteration_of_others_ends_before_the_first_result_of_a_check_on_real_lanes(tmp_path: Path) -> None:
    backend = LocalBackend([Device(0, kind="cpu")], preload=[])
    with FluidExecutor(backend, packing="off", verbose=0, run_dir=tmp_path / "run") as executor:
        trials = [Trial(sleeper, {"s": 0.1}, budget=200, profile_key="sweep") for _ in range(2)]
        sweep = executor.submit_trialgroup(TrialGroup(trials, name="sweep", owner="ann"))
        results = sweep.results()
        next(results)
        group = TrialGroup([Trial(sleeper, {"s": 0.1}, budget=1, profile_key="check")], name="check", owner="bob")
        submitted, check = time.time(), executor.submit_trialgroup(group)
        (first,) = check.results()
        for trial_id in sweep.states:
            sweep.stop(trial_id)
        ends = [result.metrics["at"] for result in results]
    between = [at for at in ends if submitted <= at < first.metrics["at"]]
    assert len(between) <= 2, "the iteration under way ends, and one that began before the request was read"
