"""How the lanes of a device divide its CPU threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fluid.backends.base import DeviceBinding
from fluid.backends.hosts.host import threads_per_gpu, waiting_variables
from fluid.backends.lanes.threads import ThreadShares
from fluid.engine.commands import Pause, Resize, RunIteration, StartTrial
from fluid.engine.events import Failure, IterationDone, PausePurpose, TrialFailed, TrialPaused, TrialReleased
from fluid.resources import Device, available_cores
from fluid.trainables.payload import payload_of


def binding(device: int, threads: int = 16, *, divides: bool = True) -> DeviceBinding:
    return DeviceBinding((device,), "gpu", threads=threads, divides_threads=divides)


def start(trial_id: str, *lane_ids: int, iterations: int = 1) -> StartTrial:
    return StartTrial(trial_id, lane_ids, iterations=iterations)


def done(trial_id: str, lane_id: int, *, finished: bool = False) -> IterationDone:
    return IterationDone(0.0, trial_id, lane_id, iteration=1, seconds=1.0, finished=finished)


@pytest.fixture
def shares() -> ThreadShares:
    """Three lanes on one device of 16 threads, all started before a trial runs."""
    made = ThreadShares()
    assert [made.add(lane, [binding(0)]) for lane in range(3)] == [16, 16, 16]
    return made


def test_lanes_that_run_trials_divide_the_threads(shares: ThreadShares) -> None:
    shares.follow(start("a", 0, iterations=9))
    assert shares.fewer() == [], "lane 0 is alone, however many others are warm"
    shares.follow(start("b", 1))
    assert shares.fewer() == [(0, 8), (1, 8)]
    shares.follow(RunIteration("a", (0,), 5))
    assert shares.fewer() == []
    shares.follow(start("c", 2))
    assert shares.fewer() == [(0, 5), (1, 5), (2, 5)]
    assert shares.add(3, [binding(0)]) == 4, "it is started to run a trial, too"
    assert shares.add(4, [binding(1)]) == 16, "another device"


@pytest.mark.parametrize(
    "end",
    [
        [done("b", 1), done("b", 1)],
        [done("b", 1, finished=True)],
        [TrialPaused(0.0, "b", 1, iteration=1, purpose=PausePurpose.PREEMPT)],
        [TrialReleased(0.0, "b", 1)],
        [TrialFailed(0.0, "b", 1, Failure("error", "it raised"))],
    ],
)
def test_threads_come_back_once_a_trial_has_settled_down(shares: ThreadShares, end: list[Any]) -> None:
    shares.follow(start("a", 0, iterations=9))
    shares.follow(start("b", 1, iterations=2))
    shares.fewer()
    shares.hear([done("a", 0)])
    assert shares.settled() == [], "both run"
    shares.hear(end)
    assert shares.fewer() == [], "b may go on soon"
    assert shares.settled() == [(0, 16)]
    shares.follow(RunIteration("b", (1,), 1))
    assert shares.fewer() == [(0, 8)], "lane 1 has 8 still"


def test_a_lane_that_is_gone_leaves_its_threads_to_the_others(shares: ThreadShares) -> None:
    shares.follow(start("a", 0))
    shares.follow(start("b", 1))
    shares.fewer()
    shares.remove(1)
    assert shares.settled() == [(0, 16)]


def test_a_trial_in_several_lanes_shares_each_of_their_devices(shares: ThreadShares) -> None:
    shares.add(3, [binding(1)])
    shares.follow(start("a", 0))
    shares.follow(start("wide", 1, 3))
    assert shares.fewer() == [(0, 8), (1, 8)]
    shares.follow(Resize("wide", (3,), (1, 3), iterations=5))
    assert shares.settled() == [(0, 16)]


def test_a_lane_of_several_devices_has_a_share_of_each() -> None:
    shares = ThreadShares()
    assert shares.add(0, [binding(0), binding(1, 8)]) == 24
    shares.add(1, [binding(1, 8)])
    shares.follow(start("gang", 0))
    shares.follow(start("a", 1))
    assert shares.fewer() == [(0, 20), (1, 4)]


def test_devices_that_do_not_divide_their_threads_are_left_alone() -> None:
    shares = ThreadShares()
    assert [shares.add(lane, [binding(0, 3, divides=False)]) for lane in range(2)] == [3, 3]
    shares.follow(start("a", 0))
    shares.follow(start("b", 1))
    assert shares.fewer() == shares.settled() == []


def test_there_is_at_least_one_thread() -> None:
    shares = ThreadShares()
    started = []
    for lane in range(3):
        started.append(shares.add(lane, [binding(0, 2)]))
        shares.follow(start(f"t{lane}", lane))
    assert started == [2, 1, 1] and shares.fewer() == [(0, 1)]


# --- Real lanes


def threads_seen(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {"threads": os.environ["OMP_NUM_THREADS"]}


def test_lanes_are_told_while_they_run(make_drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drive = make_drive(1)
    pool = drive.backend._pool

    def bind(device: Device) -> DeviceBinding:
        return DeviceBinding((device.index,), "cpu", threads=8, divides_threads=True)

    monkeypatch.setattr(pool, "_bind", bind)

    def run(trial_id: str, lane: int, *, first: bool = False) -> str:
        drive.do(start(trial_id, lane) if first else RunIteration(trial_id, (lane,), 1))
        return str(drive.of(IterationDone, trial_id).metrics["threads"])

    for name in "abc":
        drive.backend.register(name, payload_of(threads_seen, {}))
    one, other = drive.lanes(0, 0)
    assert run("a", one, first=True) == "8"
    drive.do(start("a", one, iterations=10**6))  # From now on it runs.
    assert run("b", other, first=True) == "4"
    drive.do(Pause("a", (one,), purpose=PausePurpose.PREEMPT))
    drive.of(TrialPaused, "a")
    assert run("b", other) == "4"
    drive.do(RunIteration("b", (other,), 10**6))
    pool._router.settle_threads()
    drive.do(Pause("b", (other,), purpose=PausePurpose.PREEMPT))
    drive.of(TrialPaused, "b")
    assert run("c", other, first=True) == "8"


# --- What the user says


def test_the_threads_of_a_gpu_are_its_share_of_the_cores() -> None:
    cores = len(available_cores())
    assert [threads_per_gpu(gpus) for gpus in (1, cores, 10 * cores)] == [cores, 1, 1]


@pytest.mark.parametrize(
    ("gpus", "variable", "expected"),
    [
        (["GPU-0"], None, (("OMP_WAIT_POLICY", "PASSIVE"),)),
        (["GPU-0"], "KMP_BLOCKTIME", ()),
        ([], None, ()),
    ],
)
def test_threads_sleep_while_they_wait_where_lanes_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], variable: str | None, expected: Any
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "100")
    assert waiting_variables(gpus) == expected
