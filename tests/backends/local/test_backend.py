"""The local backend, with real processes."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid.backends.base import Backend
from fluid.backends.hosts import host as launcher
from fluid.backends.local import LocalBackend
from fluid.engine.commands import Pause, Report, Resize, RunIteration, Save, StartLane, StartTrial, StopLane, StopTrial
from fluid.engine.events import (
    Checkpoint,
    IterationDone,
    LaneLost,
    LaneOutdated,
    LaneReady,
    PausePurpose,
    ResizeDone,
    TrialFailed,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSetBack,
    TrialStarted,
)
from fluid.errors import FluidError, InvalidFieldError
from fluid.resources import Device
from fluid.trainables.encoded_metrics import NO_METRICS
from fluid.trainables.payload import payload_of

MANY = 10**9


class Counter:
    """Counts, says where it runs, and can be told to misbehave in its second iteration."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = config.get("start", 0)

    def step(self) -> dict[str, Any]:
        self.count += 1
        print("step", self.count)
        if self.count == 2:
            self.misbehave(self.config.get("second"))
        return {"count": self.count, "pid": os.getpid(), "draw": random.random()}

    def misbehave(self, how: str | None) -> None:
        if how == "raise":
            raise ValueError("a bad\nvalue")
        if how == "exit":
            sys.exit(3)
        if how == "memory":
            raise MemoryError("too much")
        if how == "cuda":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            if "begun" in self.config:
                with open(self.config["begun"], "w", encoding="utf-8") as pipe:
                    pipe.write("begun")
            threading.Event().wait()

    def save_checkpoint(self, folder: str) -> dict[str, int]:
        random.random()  # Saving must not change what comes after.
        return {"count": self.count}

    def load_checkpoint(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def cleanup(self) -> None:
        if "farewell" in self.config:
            Path(self.config["farewell"]).write_text("gone", encoding="utf-8")


def two(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"value": 1}
    yield {"value": 2}


def start(drive: Any, trial_id: str, lane: int, iterations: int, trainable: Any = Counter, **config: Any) -> None:
    drive.backend.register(trial_id, payload_of(trainable, config))
    drive.do(StartTrial(trial_id, (lane,), iterations=iterations))


# -- running ----------------------------------------------------------------------------------------------------


def test_it_is_a_backend(drive: Any) -> None:
    assert isinstance(drive.backend, Backend)
    assert [device.kind for device in drive.backend.devices()] == ["cpu", "cpu"]


def test_trials_run_side_by_side(drive: Any) -> None:
    first, second = drive.lanes(0, 1)
    start(drive, "a", first, 3, start=10)
    start(drive, "b", second, 2, start=20)
    a = [drive.of(IterationDone, "a") for _ in range(3)]
    b = [drive.of(IterationDone, "b") for _ in range(2)]
    assert [(done.iteration, done.metrics["count"], done.lane_id) for done in a] == [
        (1, 11, first),
        (2, 12, first),
        (3, 13, first),
    ]
    assert [done.metrics["count"] for done in b] == [21, 22]
    assert a[0].metrics["pid"] != b[0].metrics["pid"]
    assert {done.metrics["pid"] for done in a} == {a[0].metrics["pid"]}
    assert drive.of(TrialStarted, "a").iteration == 0
    assert all(done.seconds >= 0 and not done.finished and done.memory is None for done in a)


def test_time_never_goes_back(drive: Any) -> None:
    lanes = drive.lanes(0, 1)
    for lane in lanes:
        start(drive, f"t{lane}", lane, 200)
    told: list[IterationDone] = []
    while sum(event.count for event in told) < 400:
        told += [event for event in drive.backend.poll(90.0) if isinstance(event, IterationDone)]
    seen = [event.at for event in told]
    assert seen == sorted(seen)
    assert seen[-1] <= drive.backend.now()
    runs = [event.run for event in told if event.run is not None]
    assert runs and all(list(run.at) == sorted(run.at) for run in runs)


def test_a_lane_hosts_several_trials(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    for name in ("a", "b"):
        start(drive, name, lane, 2)
    for name in ("a", "b", "a"):
        drive.do(RunIteration(name, (lane,), 1))
    assert [drive.of(IterationDone, "a").metrics["count"] for _ in range(4)] == [1, 2, 3, 4]
    assert [drive.of(IterationDone, "b").metrics["count"] for _ in range(3)] == [1, 2, 3]


def test_pause_takes_effect_between_iterations_and_resume_goes_on(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, MANY)
    drive.of(IterationDone, "a", iteration=5)
    drive.do(Pause("a", (lane,), purpose=PausePurpose.PREEMPT))
    paused = drive.of(TrialPaused, "a")
    drive.do(RunIteration("a", (lane,), 1))
    drive.of(IterationDone, "a", iteration=paused.iteration + 1)
    drive.do(Pause("a", (lane,), purpose=PausePurpose.PREEMPT))
    assert drive.of(TrialPaused, "a").iteration == paused.iteration + 1


def test_a_trial_that_stops_is_cleaned_up(drive: Any, tmp_path: Path) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, MANY, farewell=str(tmp_path / "farewell"))
    drive.of(IterationDone, "a")
    drive.do(StopTrial("a", (lane,)))
    drive.of(TrialReleased, "a", lane_id=lane)
    assert (tmp_path / "farewell").read_text(encoding="utf-8") == "gone"
    drive.do(StopTrial("a", (lane,)), RunIteration("a", (lane,), 1))  # The lane does not host the trial: nothing to do.
    start(drive, "b", lane, 1)
    drive.of(IterationDone, "b")
    assert not any(isinstance(event, TrialReleased) for event in drive.seen)


def test_a_generator_ends_by_itself(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "g", lane, 5, two)
    done = [drive.of(IterationDone, "g") for _ in range(3)]
    assert [(event.iteration, event.finished) for event in done] == [(1, False), (2, False), (2, True)]
    assert done[2].metrics == {}
    drive.do(RunIteration("g", (lane,), 1))
    assert drive.of(IterationDone, "g").finished


def test_output_goes_to_the_trials_own_log(drive: Any, tmp_path: Path) -> None:
    (lane,) = drive.lanes(0)
    for name in ("a", "b/c"):
        start(drive, name, lane, 1)
    drive.do(RunIteration("a", (lane,), 1))
    drive.of(IterationDone, "a", iteration=2)
    logs = {log.parent.name: log.read_text(encoding="utf-8") for log in (tmp_path / "run/trials").glob("*/output.log")}
    assert logs == {"a": "step 1\nstep 2\n", "b%2Fc": "step 1\n"}


def test_each_trial_has_its_own_random_numbers(drive: Any) -> None:
    lanes = drive.lanes(0, 1)
    for index in range(4):
        start(drive, f"t{index}", lanes[index % 2], 1)
    assert len({drive.until(IterationDone).metrics["draw"] for _ in range(4)}) == 4


def test_wake_ends_a_poll(drive: Any) -> None:
    waker = threading.Thread(target=drive.backend.wake)
    waker.start()
    assert drive.backend.poll(None) == []
    waker.join()
    drive.backend.wake()
    assert drive.backend.poll(None) == []
    assert drive.backend.poll(0.0) == []


@pytest.mark.slow
def test_huge_messages_do_not_block_the_driver(drive: Any) -> None:
    class Echo:
        def __init__(self, config: dict[str, Any]) -> None:
            self.data = config["data"]

        def step(self) -> dict[str, Any]:
            return {"data": self.data}

    (lane,) = drive.lanes(0)
    start(drive, "busy", lane, 2, second="hang")
    drive.of(IterationDone, "busy")
    # The lane does not read any more.
    data = os.urandom(1 << 23)
    start(drive, "big", lane, 1, Echo, data=data)
    assert all(isinstance(event, LaneOutdated) for event in drive.backend.poll(0.0))
    (other,) = drive.lanes(1)
    start(drive, "echo", other, 1, Echo, data=data)
    assert drive.of(IterationDone, "echo").metrics["data"] == data


# -- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", "error", "ValueError: a bad value"),
        ("exit", "error", "SystemExit: 3"),
        ("memory", "out_of_memory", "MemoryError: too much"),
        ("cuda", "out_of_memory", "RuntimeError: CUDA out of memory"),
    ],
)
def test_a_lane_survives_what_a_trial_raises(drive: Any, how: str, kind: str, message: str) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "calm", lane, 1)
    start(drive, "wild", lane, 3, second=how)
    failure = drive.of(TrialFailed, "wild", lane_id=lane).failure
    assert failure.kind == kind
    assert failure.message.startswith(message)
    assert "misbehave" in failure.traceback
    assert len(drive.until(IterationDone, lambda event: event.trial_id == "wild").metrics) == 3
    drive.do(RunIteration("calm", (lane,), 2))
    assert drive.of(IterationDone, "calm", iteration=3).metrics["count"] == 3


def test_a_trial_whose_setup_fails(drive: Any) -> None:
    class Bad:
        def setup(self, config: dict[str, Any]) -> None:
            raise LookupError("no data")

        def step(self) -> dict[str, Any]:
            return {}

    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 1, Bad)
    assert drive.of(TrialFailed, "a").failure.message == "LookupError: no data"


def test_metrics_that_cannot_be_sent_fail_their_trial(drive: Any) -> None:
    class Bad:
        def step(self) -> Any:
            return {"fine": 1, "lock": threading.Lock()}

        def __init__(self, config: dict[str, Any]) -> None:
            pass

    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 1, Bad)
    assert "lock" in drive.of(TrialFailed, "a").failure.message


def test_a_lane_killed_in_an_iteration_takes_only_its_own_trials(drive: Any, tmp_path: Path) -> None:
    first, second = drive.lanes(0, 1)
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDONLY | os.O_NONBLOCK)
    start(drive, "bystander", first, 1)
    start(drive, "victim", first, 2, second="hang", begun=str(tmp_path / "begun"))
    start(drive, "other", second, 1)
    pid = drive.of(IterationDone, "victim", iteration=1).metrics["pid"]
    drive.of(IterationDone, "other")
    poller = select.poll()
    poller.register(begun, select.POLLIN)
    assert poller.poll(60_000)
    os.close(begun)
    os.kill(pid, signal.SIGKILL)
    lost = drive.until(LaneLost)
    assert (lost.lane_id, lost.culprit) == (first, "victim")
    assert "SIGKILL" in lost.reason
    drive.do(RunIteration("bystander", (first,), 1))  # On its way when the lane died: not an error.
    drive.do(RunIteration("other", (second,), 1))
    drive.of(IterationDone, "other", iteration=2)


def test_what_was_finished_before_a_lane_died_is_reported_first(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 2, second="die")
    lost = drive.until(LaneLost)
    assert lost.culprit == "a"
    assert [event.iteration for event in drive.seen if isinstance(event, IterationDone)] in ([1], [])


def test_nobody_is_blamed_for_an_idle_lane(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 1)
    os.kill(drive.of(IterationDone, "a").metrics["pid"], signal.SIGKILL)
    assert drive.until(LaneLost).culprit is None


def test_a_lane_can_be_ended_and_another_started(drive: Any, processes: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 1)
    processes.watch(drive.of(IterationDone, "a").metrics["pid"])
    drive.do(StopLane(lane))
    assert processes.have_ended(within=30.0)
    (after,) = drive.lanes(0)
    start(drive, "b", after, 1)
    drive.of(IterationDone, "b")
    assert not any(isinstance(event, LaneLost) for event in drive.seen)


# -- saving and moving --------------------------------------------------------------------------------------------


class Draws(Counter):
    """Draws from every generator there is."""

    def step(self) -> dict[str, Any]:
        draws = [random.random()]
        if "numpy" in self.config["packages"]:
            import numpy

            draws.append(float(numpy.random.random()))
        if "torch" in self.config["packages"]:
            import torch

            draws.append(torch.rand(1))
        self.count += 1
        return {"draws": draws, "torch": "torch" in sys.modules}


@pytest.mark.parametrize("package", ["random", "numpy", "torch"])
def test_a_saved_trial_goes_on_as_if_nothing_had_happened(drive: Any, package: str) -> None:
    if package != "random":
        pytest.importorskip(package)
    if package == "torch":
        drive.backend.register(
            "a", payload_of(Draws, {"packages": [package]})
        )  # Before there are lanes: loaded for all.
    first, second = drive.lanes(0, 1)
    start(drive, "a", first, 2, Draws, packages=[package])
    drive.of(IterationDone, "a", iteration=2)
    drive.do(Save("a", (first,), drop=False))
    saved = drive.until(TrialSaved, lambda event: event.checkpoint.iteration == 2)
    assert not saved.dropped
    drive.do(RunIteration("a", (first,), 3))
    straight = [drive.of(IterationDone, "a", iteration=number).metrics["draws"] for number in (3, 4, 5)]
    drive.do(StartTrial("a", (second,), iterations=3, checkpoint=saved.checkpoint))
    again = [drive.of(IterationDone, "a", lane_id=second) for _ in range(3)]
    assert [event.metrics["draws"] for event in again] == straight
    assert [event.iteration for event in again] == [3, 4, 5]


def test_a_trial_that_is_dropped_leaves_its_lane(drive: Any, tmp_path: Path) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 3, farewell=str(tmp_path / "farewell"))
    drive.of(IterationDone, "a", iteration=3)
    drive.do(Save("a", (lane,), drop=True), RunIteration("a", (lane,), 1))
    saved = drive.of(TrialSaved, "a", dropped=True)
    assert (tmp_path / "farewell").exists()
    drive.do(StartTrial("a", (lane,), iterations=1, checkpoint=saved.checkpoint))
    assert drive.of(TrialStarted, "a", iteration=3)
    assert drive.of(IterationDone, "a", iteration=4).metrics["count"] == 4


def test_a_generator_cannot_be_saved(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "g", lane, 1, two)
    drive.of(IterationDone, "g")
    drive.do(Save("g", (lane,), drop=True))
    assert "cannot be saved" in drive.of(TrialFailed, "g").failure.message


def test_a_move_is_told_as_a_resize(drive: Any) -> None:
    first, second = drive.lanes(0, 1)
    start(drive, "a", first, 2)
    drive.of(IterationDone, "a", iteration=2)
    # Commands that follow at once wait until it has arrived.
    drive.do(Resize("a", (second,), (first,), iterations=1), RunIteration("a", (second,), 1))
    assert drive.of(TrialSaved, "a").dropped is False
    assert drive.of(ResizeDone, "a").seconds > 0
    moved = [drive.of(IterationDone, "a", lane_id=second) for _ in range(2)]
    assert [(event.iteration, event.metrics["count"]) for event in moved] == [(3, 3), (4, 4)]
    assert len([event for event in drive.seen if isinstance(event, TrialStarted)]) == 1


def test_a_trial_whose_state_cannot_be_loaded_where_it_goes_begins_afresh_there(drive: Any) -> None:
    class Stuck(Counter):
        def load_checkpoint(self, state: dict[str, int]) -> None:
            raise OSError("unreadable")

    first, second = drive.lanes(0, 1)
    start(drive, "a", first, 1, Stuck)
    drive.of(IterationDone, "a")
    drive.do(Resize("a", (second,), (first,), iterations=1))
    back = drive.of(TrialSetBack, "a", lane_id=second)
    assert back.checkpoint is None and back.cannot_load and "raised OSError: unreadable" in back.reason
    assert drive.of(ResizeDone, "a").lane_id in (None, second)
    assert drive.of(IterationDone, "a", lane_id=second).iteration == 1


def test_forgetting_a_trial_deletes_its_checkpoints(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 1)
    drive.do(Save("a", (lane,)))
    path = Path(drive.of(TrialSaved, "a").checkpoint.path)
    assert path.stat().st_mode & 0o077 == 0
    drive.do(StopTrial("a", (lane,)))
    drive.backend.forget("a")
    start(drive, "b", lane, 1)
    drive.of(IterationDone, "b")
    eventually(lambda: not path.exists())


@pytest.mark.slow
def test_a_later_session_finds_what_was_in_memory(make_drive: Callable[..., Any], tmp_path: Path) -> None:
    drive = make_drive(1, run_dir=tmp_path)
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 3)
    drive.do(Save("a", (lane,)))
    checkpoint = drive.of(TrialSaved, "a").checkpoint
    drive.backend.close()
    if checkpoint.in_memory:
        assert not Path(checkpoint.path).exists()
    drive = make_drive(1, run_dir=tmp_path)
    drive.lanes(0)
    drive.backend.register("a", payload_of(Counter, {}))
    drive.do(StartTrial("a", (0,), iterations=1, checkpoint=checkpoint))
    assert drive.of(IterationDone, "a").metrics["count"] == checkpoint.iteration + 1


# -- refusals -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_is_refused(drive: Any) -> None:
    lock = threading.Lock()

    class Locked(Counter):
        def step(self) -> dict[str, Any]:
            with lock:
                return super().step()

    with pytest.raises(InvalidFieldError, match="cannot be pickled") as trainable:
        drive.backend.register("a", payload_of(Locked, {}))
    assert (trainable.value.field, trainable.value.value) == ("trainable", Locked)
    with pytest.raises(InvalidFieldError) as config:
        drive.backend.register("a", payload_of(Counter, {"rate": 0.1, "lock": lock}))
    assert (config.value.field, config.value.value) == ("config['lock']", lock)
    with pytest.raises(InvalidFieldError):
        drive.backend.register("a", payload_of(7, {}))


def test_bad_commands_are_refused_before_any_is_carried_out(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    drive.backend.register("a", payload_of(Counter, {}))
    good = StartTrial("a", (lane,), iterations=1)
    for bad, reason in [
        (StartTrial("a", (lane, 1), iterations=1), "one lane only"),
        (Resize("a", (lane, 1), (lane,), iterations=1), "one lane only"),
        (StartTrial("b", (lane,), iterations=1), "not registered"),
        (RunIteration("a", (7,), 1), "never started"),
        (StartLane(9, 5), "no device 5"),
        (StartLane(lane, 0), "there is, or was"),
        (
            Report("a", "g", iteration=1, metrics=NO_METRICS, seconds=0.1, width=1.0, device_ids=(0,), at=0.0),
            "no command for a backend",
        ),
    ]:
        with pytest.raises(FluidError, match=reason):
            drive.do(good, bad)
    drive.backend.register("b", payload_of(Counter, {}))
    drive.do(StartTrial("b", (lane,), iterations=1))
    drive.of(IterationDone, "b")
    assert not any(getattr(event, "trial_id", "b") == "a" for event in drive.seen)


def test_devices_can_be_added(drive: Any) -> None:
    drive.backend.add_devices([Device(5)])
    assert [device.index for device in drive.backend.devices()] == [0, 1, 5]
    (lane,) = drive.lanes(5)
    start(drive, "a", lane, 1)
    drive.of(IterationDone, "a")
    with pytest.raises(InvalidFieldError):
        drive.backend.add_devices([Device(6, kind="gpu")])


# -- the end ------------------------------------------------------------------------------------------------------


class Parent(Counter):
    """Starts a process and does not end it."""

    def step(self) -> dict[str, Any]:
        child = subprocess.Popen(["sleep", "1000"])
        return super().step() | {"child": child.pid, "server": os.getppid()}


def pids_of(drive: Any, *lanes: int) -> set[int]:
    pids = set()
    for lane in lanes:
        start(drive, f"parent-{lane}", lane, 1, Parent)
        metrics = drive.of(IterationDone, f"parent-{lane}").metrics
        pids |= {metrics[name] for name in ("pid", "child", "server")}
    return pids


def test_close_leaves_no_process(make_drive: Callable[..., Any], processes: Any, tmp_path: Path) -> None:
    drive = make_drive(2, grace=0.2)
    lanes = drive.lanes(0, 1)
    processes.watch(*pids_of(drive, *lanes))
    start(drive, "busy", lanes[0], 2, second="hang")
    start(drive, "idle", lanes[1], 1, farewell=str(tmp_path / "farewell"))
    drive.of(IterationDone, "busy")
    drive.of(IterationDone, "idle")
    folder = Path(drive.backend.run_folder)
    assert folder.exists()
    drive.backend.close()
    assert processes.have_ended()
    assert (tmp_path / "farewell").exists()
    assert not folder.exists()  # The user did not ask to keep it.
    drive.backend.close()
    drive.backend.wake()
    with pytest.raises(FluidError, match="closed"):
        drive.backend.poll(0.0)


def test_a_lane_that_ends_leaves_no_process_behind(drive: Any, processes: Any) -> None:
    (lane,) = drive.lanes(0)
    start(drive, "a", lane, 1, Parent)
    metrics = drive.of(IterationDone, "a").metrics
    processes.watch(metrics["child"])
    os.kill(metrics["pid"], signal.SIGKILL)
    drive.until(LaneLost)
    assert processes.have_ended(within=30.0)


@pytest.mark.slow
def test_when_the_fork_server_dies_its_lanes_are_lost_and_new_ones_start(drive: Any, processes: Any) -> None:
    lanes = drive.lanes(0, 1)
    pids = pids_of(drive, *lanes)
    start(drive, "a", lanes[0], 1, Parent)
    metrics = drive.of(IterationDone, "a").metrics
    processes.watch(metrics["pid"], metrics["server"], metrics["child"])
    os.kill(metrics["server"], signal.SIGKILL)
    assert {drive.until(LaneLost).lane_id for _ in lanes} == set(lanes)
    assert processes.have_ended(within=30.0)
    (after,) = drive.lanes(0)
    start(drive, "b", after, 1)
    assert drive.of(IterationDone, "b").metrics["pid"] not in pids


DRIVER = """
import os, subprocess, sys
from fluid.backends.local import LocalBackend
from fluid.engine.commands import StartLane, StartTrial
from fluid.engine.events import IterationDone, LaneLost
from fluid.trainables.payload import payload_of

class Parent:
    def setup(self, config): pass
    def step(self):
        child = subprocess.Popen(["sleep", "1000"])
        guardian = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
        return {"pids": [os.getpid(), os.getppid(), guardian, child.pid]}

class Endless(Parent):
    def step(self):
        while True: pass

pids = []
with LocalBackend(2, preload=[], grace=0.2) as backend:
    backend.register("a", payload_of(Parent, {}))
    backend.register("b", payload_of(Endless, {}))
    backend.execute([StartLane(0, 0), StartLane(1, 1), StartTrial("a", (0,), iterations=1)])
    backend.execute([StartTrial("b", (1,), iterations=1)])
    while True:
        for event in backend.poll(None):
            assert not isinstance(event, LaneLost), event
            if isinstance(event, IterationDone):
                print(backend.run_folder, *event.metrics.decode()["pids"], flush=True)
"""


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def read_facts(driver: subprocess.Popen[str]) -> tuple[Path, list[int]]:
    """Its run's folder, and the processes below it."""
    assert driver.stdout is not None
    folder, *pids = driver.stdout.readline().split()
    return Path(folder), [int(pid) for pid in pids]


def test_no_process_outlives_a_killed_driver(driver: subprocess.Popen[str], processes: Any) -> None:
    folder, pids = read_facts(driver)
    assert len(pids) == 4
    processes.watch(*pids)
    driver.kill()
    assert processes.have_ended(within=10.0)
    assert not folder.exists()


def test_an_interrupt_ends_the_driver_and_all_of_its_processes(driver: subprocess.Popen[str], processes: Any) -> None:
    folder, pids = read_facts(driver)
    processes.watch(*pids)
    os.killpg(driver.pid, signal.SIGINT)
    _, errors = driver.communicate(timeout=60)
    assert processes.have_ended()
    assert "KeyboardInterrupt" in errors
    assert "LaneLost" not in errors
    assert not folder.exists()


def test_a_process_forked_from_the_driver_leaves_the_lanes_alone(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    child = os.fork()
    if child == 0:
        try:
            drive.backend.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    start(drive, "a", lane, 1)
    drive.of(IterationDone, "a")


# -- packages that may be missing -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_torch_is_loaded_once_for_all_lanes(make_drive: Callable[..., Any]) -> None:
    pytest.importorskip("torch")

    class Torch:
        def setup(self, config: dict[str, Any]) -> None:
            self.was_there = "torch" in sys.modules
            import torch

            self.torch = torch

        def step(self) -> dict[str, Any]:
            return {
                "was_there": self.was_there,
                "threads": self.torch.get_num_threads(),
                "cuda": self.torch.cuda.is_initialized(),
                "value": self.torch.tensor(0.5),
            }

    drive = make_drive(1)
    drive.backend.register("a", payload_of(Torch, {}))
    drive.lanes(0)
    drive.do(StartTrial("a", (0,), iterations=1))
    metrics = drive.of(IterationDone, "a").metrics
    assert metrics == {"was_there": True, "threads": 1, "cuda": False, "value": 0.5}
    assert type(metrics["value"]) is float


def test_lane_ready_comes_before_its_trials(drive: Any) -> None:
    drive.backend.register("a", payload_of(Counter, {}))
    drive.do(StartLane(0, 0), StartTrial("a", (0,), iterations=1))
    drive.of(IterationDone, "a")
    assert isinstance(drive.seen[0], LaneReady)


def test_a_trial_whose_checkpoint_is_gone_begins_afresh(drive: Any) -> None:
    (lane,) = drive.lanes(0)
    drive.backend.register("a", payload_of(Counter, {}))
    drive.do(StartTrial("a", (lane,), iterations=1, checkpoint=Checkpoint(3, "/nowhere/a/00000003-0-1")))
    back = drive.of(TrialSetBack, "a")
    assert (back.checkpoint, back.reason) == (None, "the checkpoint of iteration 3 is gone") and not back.cannot_load
    assert drive.of(TrialStarted, "a").iteration == 0 and drive.of(IterationDone, "a").iteration == 1


def test_it_closes_itself_when_it_is_let_go(processes: Any) -> None:
    backend = LocalBackend(1, preload=[])
    backend.execute([StartLane(0, 0)])
    backend.register("a", payload_of(Parent, {}))
    backend.execute([StartTrial("a", (0,), iterations=1)])
    events: list[Any] = []
    while not any(isinstance(event, IterationDone) for event in events):
        events += backend.poll(60.0)
    told = next(event.metrics.decode() for event in events if isinstance(event, IterationDone))
    processes.watch(told["pid"], told["server"])
    del backend
    assert processes.have_ended()


def names_a_late_loader(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import late_user

    yield {"loaded": "late_part" in sys.modules, "by": late_user.__name__}


def test_what_a_module_loads_late_is_loaded_ahead_of_later_lanes(
    make_drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch's optimizers do when one is made, in every lane anew; told by what a trainable names."""
    for name in ("late_user", "late_part"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launcher, "_LATE", {"late_user": ("late_part",)})
    drive = make_drive(1)
    lanes = itertools.count()

    def has_late_part() -> bool:
        lane, trial_id = next(lanes), f"trial-{next(lanes)}"
        drive.backend.register(trial_id, payload_of(names_a_late_loader, {}))
        drive.do(StartLane(lane, 0), StartTrial(trial_id, (lane,), iterations=1))
        found = drive.of(IterationDone, trial_id).metrics
        assert found["by"] == "late_user"
        return bool(found["loaded"])

    assert not has_late_part(), "the first lane waits for nothing that comes late"
    eventually(has_late_part)


def test_optimizers_load_dynamo_late() -> None:
    assert launcher._loaded_late_by(["numpy", "torch.nn", "torch.optimum"]) == []
    assert launcher._loaded_late_by(["torch.optim.lr_scheduler", "numpy"]) == ["torch._dynamo"]
    # Trainables whose optimizers Fluid makes name the package only.
    assert launcher._loaded_late_by(["fluid.fused"]) == launcher._loaded_late_by(["fluid.elastic"]) == ["torch._dynamo"]
    assert launcher._loaded_late_by(["fluid.elasticity"]) == []
