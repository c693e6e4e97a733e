"""Several running trials in one lane, and rounds: through the executor, on simulated lanes and on real ones."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.errors import InvalidFieldError
from fluid.rehearsal import Overheads, RehearsalBackend, ReplayedIteration
from fluid.reports.run.loader import load_run
from fluid.resources import MemoryNeed


class Net:
    """Takes ``s`` seconds an iteration."""

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": 1.0 / each}, seconds=config["s"]) for each in iterations]


class Played(NamedTuple):
    """What happened: the results in order, as ``trial.iteration``; the lanes of each trial; the most at once."""

    order: list[str]
    lanes: dict[str, set[int]]
    makespan: float


def play(
    tmp_path: Path,
    seconds: list[float],
    *,
    budget: int = 3,
    devices: Any = 1,
    memory: MemoryNeed | None = None,
    backend: Any = "simulated",
    **options: Any,
) -> Played:
    """Plays trials that take so many seconds an iteration."""
    trials = [
        Trial(Net, {"s": each}, budget=budget, trial_id=f"t{number}", memory=memory)
        for number, each in enumerate(seconds)
    ]
    devices = None if backend != "simulated" else devices
    with FluidExecutor(backend, devices=devices, verbose=0, run_dir=tmp_path / "run", **options) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        order = [f"{result.trial_id}.{result.iteration}" for result in handle.results()]
        makespan = handle.makespan
    assert makespan is not None
    return Played(order, _lanes_of(tmp_path / "run"), makespan)


def _lanes_of(run: Path) -> dict[str, set[int]]:
    """The lanes of each trial."""
    lanes: dict[str, set[int]] = {}
    for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("what") == "NotePlaced":
            lanes.setdefault(record["trial_id"], set()).update(record["lane_ids"])
    return lanes


def rounds_of(trials: int, iterations: int) -> list[str]:
    return [f"t{trial}.{iteration}" for iteration in range(1, iterations + 1) for trial in range(trials)]


def test_packing_lane_runs_all_trials_in_one_lane_at_a_time(tmp_path: Path) -> None:
    played = play(tmp_path, [1.0] * 5, packing="lane", lane_policy="fair")
    assert {name.split(".")[0] for name in played.order[:5]} == {f"t{number}" for number in range(5)}
    assert all(lanes == {0} for lanes in played.lanes.values())
    assert played.makespan == pytest.approx(15.0)


def test_max_packing_says_how_many_trials_take_turns(tmp_path: Path) -> None:
    played = play(tmp_path, [1.0] * 5, packing="lane", max_packing=2)
    assert {name.split(".")[0] for name in played.order[:5]} == {"t0", "t1"}


def test_srtf_ends_the_shortest_first_once_each_was_measured(tmp_path: Path) -> None:
    played = play(tmp_path, [5.0, 3.0, 1.0, 4.0], packing="lane", lane_policy="srtf")
    assert {name.split(".")[1] for name in played.order[:4]} == {"1"}
    ends = [name.split(".")[0] for name in played.order if name.endswith(".3")]
    assert ends == ["t2", "t1", "t3", "t0"]


def mean_completion(run: Path, jobs: list[tuple[float, float, int]], **options: Any) -> float:
    """Plays jobs of an owner each: when it comes, the seconds of an iteration, and their number; by arrival."""
    ends = dict[str, float]()
    with FluidExecutor("simulated", devices=1, verbose=0, run_dir=run, **options) as executor:
        handles, now = [], 0.0
        for number, (at, seconds, budget) in enumerate(jobs):
            if handles:
                handles[0].wait(timeout=at - now)
            now = at
            trial = Trial(Net, {"s": seconds}, budget=budget, trial_id=f"j{number}", profile_key=f"job-{number}")
            handles.append(executor.submit_trialgroup(TrialGroup([trial])))
        for handle in handles:
            handle.wait()
    for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["what"] == "ReportEnd":
            ends[record["trial_id"]] = record["at"]
    return sum(ends[f"j{number}"] - at for number, (at, *_) in enumerate(jobs)) / len(jobs)


def test_two_options_give_the_mean_completion_of_salus(tmp_path: Path) -> None:
    """The first job runs to the end of the others: what waits behind it under first come, first served is short."""
    jobs = [(float(at), 0.5, budget) for at, budget in enumerate((400, 30, 90, 12, 60, 6, 45, 20))]
    served = mean_completion(tmp_path / "fifo", jobs, planner="fifo", packing="off", group_policy="fifo")
    two = mean_completion(tmp_path / "two", jobs, packing="lane", lane_policy="srtf")
    three = mean_completion(tmp_path / "three", jobs, packing="lane", lane_policy="srtf", group_policy="fifo")
    few = mean_completion(tmp_path / "few", jobs, packing="lane", lane_policy="srtf", max_packing=3)
    assert two == pytest.approx(three, rel=0.03) and served / two > 3.0
    assert served / few > 0.97 * served / two, (
        "which trials take turns is the group policy's: it is shortest first, too"
    )


def test_longest_first_lets_the_longest_end_with_the_others(tmp_path: Path) -> None:
    played = play(tmp_path, [4.0, 1.0, 1.0], packing="lane", lane_policy="longest_first", budget=4)
    assert played.order.index("t0.3") < played.order.index("t1.2")


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "lane"},
        {"packing": "auto"},
        {"packing": "off"},
        {"packing": "lane", "max_packing": 2},
        {"packing": "fused"},
    ],
)
def test_in_rounds_all_trials_advance_by_an_iteration_each_in_turn(tmp_path: Path, options: dict[str, Any]) -> None:
    played = play(tmp_path, [1.0, 2.0, 1.0, 3.0, 1.0], rounds=True, **options)
    assert played.order == rounds_of(5, 3)
    assert played.makespan == pytest.approx(24.0)


def test_rounds_on_several_devices_keep_all_trials_within_an_iteration_of_each_other(tmp_path: Path) -> None:
    played = play(tmp_path, [1.0] * 7, rounds=True, packing="off", devices=2, max_width=1)
    done = {f"t{number}": 0 for number in range(7)}
    for name in played.order:
        trial, iteration = name.split(".")
        done[trial] = int(iteration)
        assert max(done.values()) - min(done.values()) <= 2
    assert played.makespan <= 12.0


def test_trials_that_do_not_fit_at_once_advance_in_rounds_too(tmp_path: Path) -> None:
    # Two of the five fit: 40 + 40 persistent, and 10 more while one of them runs.
    need = MemoryNeed(persistent_bytes=40.0, ephemeral_bytes=10.0)
    devices = [Device(0, kind="gpu", memory_bytes=100.0)]
    played = play(tmp_path, [1.0] * 5, rounds=True, packing="lane", devices=devices, memory=need)
    done = {f"t{number}": 0 for number in range(5)}
    for name in played.order:
        trial, iteration = name.split(".")
        done[trial] = int(iteration)
        assert max(done.values()) - min(done.values()) <= 2
    assert played.makespan == pytest.approx(15.0)


def test_in_a_lane_the_largest_ephemeral_bytes_count_once(tmp_path: Path) -> None:
    # As processes, two of them would fit: 3 * 30 > 90. In turns, all four do: 4 * 10 + 20.
    need = MemoryNeed(persistent_bytes=10.0, ephemeral_bytes=20.0)
    devices = [Device(0, kind="gpu", memory_bytes=100.0)]
    played = play(tmp_path, [1.0] * 4, packing="lane", lane_policy="fair", devices=devices, memory=need, budget=4)
    # The first one runs alone until it was measured; then all four take turns.
    assert played.order.index("t3.1") < played.order.index("t0.4")


def test_auto_uses_as_many_lanes_as_were_measured_to_pay(tmp_path: Path) -> None:
    backend = RehearsalBackend(1, overheads=Overheads(alpha=1.1))
    played = play(tmp_path, [3.0] * 8, backend=backend, rounds=True, packing="auto", max_packing=2, budget=8)
    lanes = set().union(*played.lanes.values())
    assert len(lanes) == 2
    # Two at a time take 1.1x as long: 64 iterations of 3 s, most of them two at a time.
    assert 0.5 * 64 * 3.0 * 1.1 <= played.makespan < 0.75 * 64 * 3.0


def test_auto_takes_turns_in_one_lane_where_further_ones_do_not_pay(tmp_path: Path) -> None:
    backend = RehearsalBackend(1, overheads=Overheads(alpha=1.99))
    played = play(tmp_path, [3.0] * 6, backend=backend, rounds=True, packing="auto", budget=20)
    # Two at a time were tried, for which two trials ran ahead; then one lane serves all.
    assert [name.split(".")[1] for name in played.order[:6]] == ["1"] * 6
    late = [name.split(".")[0] for name in played.order[-16:]]
    assert all(before != after for before, after in itertools.pairwise(late))
    assert played.makespan < 1.02 * 120 * 3.0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rounds": 1}, "rounds"),
        ({"rounds": True, "lane_policy": "srtf"}, "lane_policy"),
        ({"lane_policy": "rounds"}, "lane_policy"),
        ({"packing": "lanes"}, "packing"),
        ({"packing": "lane", "max_packing": 0}, "max_packing"),
    ],
)
def test_options_that_cannot_be_used_are_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        FluidExecutor("simulated", run_dir=tmp_path / "run", verbose=0, **options)


def test_rounds_need_a_backend_object_that_takes_them(tmp_path: Path) -> None:
    backend = LocalBackend(1, run_dir=tmp_path / "run", lane_policy="srtf")
    try:
        with pytest.raises(InvalidFieldError, match='lane_policy="rounds"'):
            FluidExecutor(backend, rounds=True, verbose=0, run_dir=tmp_path / "run")
    finally:
        backend.close()


# -- real lanes --------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for _ in range(100):
        begun = time.perf_counter()
        while time.perf_counter() < begun + 0.01:
            pass
        yield {"pid": os.getpid()}


@pytest.fixture
def in_rounds(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor("local", devices=1, verbose=0, rounds=True, run_dir=tmp_path / "real") as executor:
        yield executor


@pytest.mark.slow
def test_real_trials_take_turns_in_one_process(in_rounds: FluidExecutor) -> None:
    trials = [Trial(train, {}, budget=4, trial_id=f"t{number}") for number in range(4)]
    results = list(in_rounds.submit_trialgroup(TrialGroup(trials)).results())
    assert [f"{result.trial_id}.{result.iteration}" for result in results] == rounds_of(4, 4)
    assert len({result.metrics["pid"] for result in results}) == 1


@pytest.mark.slow
def test_trials_are_stopped_added_and_extended_between_two_iterations(in_rounds: FluidExecutor) -> None:
    handle = in_rounds.submit_trialgroup(
        TrialGroup([Trial(train, {}, budget=30, trial_id=f"t{number}") for number in range(3)])
    )
    seen: dict[str, int] = {}
    for result in handle.results():
        seen[result.trial_id] = result.iteration
        if (result.trial_id, result.iteration) == ("t0", 3):
            handle.stop("t0")
            handle.extend("t1", by=5)
            handle.add(Trial(train, {}, budget=6, trial_id="late"))
        if (result.trial_id, result.iteration) == ("late", 4):
            # It has had four turns, and so have the others meanwhile.
            assert seen["t1"] <= 14
    assert 3 <= seen["t0"] <= 5
    assert seen == {"t0": seen["t0"], "t1": 35, "t2": 30, "late": 6}


def test_a_trial_that_raises_leaves_the_others_in_the_lane_alone(in_rounds: FluidExecutor) -> None:
    def fails(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"loss": 1.0}
        raise ValueError("no luck")

    trials = [
        Trial(train, {}, budget=5, trial_id="good"),
        Trial(fails, {}, budget=5, trial_id="bad", retry_errors=False),
    ]
    handle = in_rounds.submit_trialgroup(TrialGroup(trials))
    done = {result.trial_id: result.iteration for result in handle.results()}
    assert done == {"good": 5, "bad": 1}


@pytest.mark.slow
def test_a_trial_that_waits_for_its_turn_is_not_taken_to_hang(tmp_path: Path) -> None:
    trials = [
        Trial(train, {}, budget=60, trial_id="short", iteration_timeout_s=0.4),
        Trial(train, {}, budget=100, trial_id="long", iteration_timeout_s=0.4),
    ]
    options = {"packing": "lane", "lane_policy": "srtf"}
    with FluidExecutor("local", devices=1, verbose=0, run_dir=tmp_path / "real", **options) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        results = list(handle.results())
    at = [index for index, result in enumerate(results) if result.trial_id == "long"]
    assert max(after - before for before, after in itertools.pairwise(at)) > 50  # It waited for half a second.
    assert len(results) == 160


@pytest.mark.parametrize(("packing", "alpha"), [("lane", 1.0), ("lane", 1.2), ("auto", 1.2)])
def test_a_trial_that_takes_turns_uses_its_lanes_part_of_the_device(tmp_path: Path, packing: str, alpha: float) -> None:
    backend = RehearsalBackend(1, overheads=Overheads(alpha=alpha))
    trials = [Trial(Net, {"s": 3.0}, budget=8) for _ in range(8)]
    options: dict[str, Any] = {"packing": packing, "rounds": True, "max_packing": 64 if packing == "lane" else 2}
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run", price_per_device_hour=3600.0, **options) as ex:
        handle = ex.submit_trialgroup(TrialGroup(trials))
        assert handle.wait()
        done = handle.trials
        table = handle.dataframe()
    lanes = set().union(*_lanes_of(tmp_path / "run").values())
    assert len(lanes) == (1 if packing == "lane" else 2)
    results = [result for trial in done for result in trial.results]
    assert {result.width for result in results} <= {1.0, 1.0 / len(lanes)}
    used = sum(trial.device_seconds for trial in done)
    assert used == pytest.approx(handle.makespan, rel=0.05), "one device was busy all the time"
    assert table["cost_usd"].sum() == pytest.approx(used) == table["device_seconds"].sum()
    run = load_run(tmp_path / "run")
    assert run.paid.busy == pytest.approx(used, rel=0.05)
    assert sum(trial.device_seconds for trial in run.trials) == pytest.approx(used)
    placed = [line for lines in run.stories.values() for line in lines if line.what == "started"]
    assert {line.facts["width"] for line in placed} <= {1.0, 0.5}
