"""A trial's arithmetic sees one number of CPU threads for its life, whatever runs beside it, wherever it goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fluid.backends.base import DeviceBinding  # noqa: E402
from fluid.backends.hosts.host import threads_per_gpu, waiting_variables  # noqa: E402
from fluid.engine.commands import Pause, RunIteration, Save, StartTrial, StopTrial  # noqa: E402
from fluid.engine.events import IterationDone, PausePurpose, TrialPaused, TrialReleased, TrialSaved  # noqa: E402
from fluid.resources import Device, available_cores  # noqa: E402
from fluid.trainables.payload import payload_of  # noqa: E402

SIZE = 200_000
MANY = 10**6
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOKY_MAX_CPU_COUNT", "TORCHINDUCTOR_COMPILE_THREADS")


class Sums:
    """Trains on sums so long that PyTorch divides them among its threads, and their last bits tell among how many."""

    def setup(self, config: dict[str, Any]) -> None:
        self.done, self.w = 0, torch.zeros(SIZE)

    def step(self) -> dict[str, Any]:
        x = torch.sin(torch.arange(float(SIZE)) * (self.done + 1.5)) + 0.3
        error = self.w * x - 1.0
        loss = (error * error).sum()
        self.done, self.w = self.done + 1, self.w - 1e-5 * loss.sqrt() * error * x
        seen = {torch.get_num_threads(), *(int(os.environ.get(name, 0)) for name in VARIABLES)}
        return {"loss": float(loss), "threads": sorted(seen)}

    def save_checkpoint(self, folder: str) -> Any:
        return self.done, self.w

    def load_checkpoint(self, state: Any) -> None:
        self.done, self.w = state


def losses(threads: int, iterations: int) -> list[float]:
    """Those of a trial whose arithmetic sees so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    trial = Sums()
    trial.setup({})
    found = [trial.step()["loss"] for _ in range(iterations)]
    torch.set_num_threads(before)
    return found


class Lanes:
    """Real lanes on devices with so many threads each."""

    def __init__(self, drive: Any, threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        def bind(device: Device) -> DeviceBinding:
            return DeviceBinding((device.index,), "cpu", threads=threads[device.index])

        monkeypatch.setattr(drive.backend._pool, "_bind", bind)
        self.drive = drive

    def add(self, *names: str) -> None:
        for name in names:
            self.drive.backend.register(name, payload_of(Sums, {}))

    def results(self, trial: str, count: int) -> list[dict[str, Any]]:
        return [self.drive.of(IterationDone, trial).metrics for _ in range(count)]

    def pause(self, trial: str, lane: int) -> int:
        self.drive.do(Pause(trial, (lane,), purpose=PausePurpose.PREEMPT))
        return self.drive.of(TrialPaused, trial).iteration


def assert_alike(found: list[dict[str, Any]], threads: int) -> None:
    assert [each["threads"] for each in found] == [[threads]] * len(found)
    assert [each["loss"] for each in found] == losses(threads, len(found)), "bit for bit as alone"


def test_sums_depend_on_the_number_of_threads() -> None:
    assert len({tuple(losses(threads, 6)) for threads in (1, 2, 3)}) == 3


def test_sums_do_not_depend_on_the_cores_that_threads_run_on() -> None:
    expected = losses(2, 6)
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    cores = {task: os.sched_getaffinity(task) for task in tasks}
    try:
        for task in tasks:
            os.sched_setaffinity(task, {min(cores[task])})
        assert losses(2, 6) == expected
    finally:
        for task in tasks:
            os.sched_setaffinity(task, cores[task])


@pytest.mark.slow
def test_a_neighbour_that_comes_and_goes_changes_no_result(
    make_drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = Lanes(make_drive(1, preload=["torch"]), [2], monkeypatch)
    drive = lanes.drive
    lanes.add("a", "neighbour", "later")
    one, other = drive.lanes(0, 0)
    drive.do(StartTrial("a", (one,), iterations=2))
    found = lanes.results("a", 2)
    drive.do(StartTrial("neighbour", (other,), iterations=MANY))
    lanes.results("neighbour", 1)
    drive.do(RunIteration("a", (one,), 3))
    found += lanes.results("a", 3)
    (spare,) = drive.lanes(0)  # It starts beside two that run.
    drive.do(StartTrial("later", (spare,), iterations=4))
    assert_alike(lanes.results("later", 4), 2)
    lanes.pause("neighbour", other)
    drive.do(StopTrial("neighbour", (other,)))
    drive.of(TrialReleased, "neighbour")
    drive.do(RunIteration("a", (one,), 2))
    assert_alike(found + lanes.results("a", 2), 2)


@pytest.mark.slow
def test_a_trial_keeps_its_number_where_it_goes_on_on_an_unlike_device(
    make_drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = Lanes(make_drive(2, preload=["torch"]), [2, 3], monkeypatch)
    drive = lanes.drive
    lanes.add("a", "of the other")
    one, other = drive.lanes(0, 1)
    drive.do(StartTrial("a", (one,), iterations=3))
    found = lanes.results("a", 3)
    drive.do(Save("a", (one,), drop=True))
    saved = drive.of(TrialSaved, "a", dropped=True).checkpoint
    drive.do(StartTrial("of the other", (other,), iterations=2))
    assert_alike(lanes.results("of the other", 2), 3)
    drive.do(StartTrial("a", (other,), iterations=2, checkpoint=saved), RunIteration("of the other", (other,), 1))
    assert_alike(found + lanes.results("a", 2), 2)
    assert lanes.results("of the other", 1)[0]["threads"] == [3], "they take turns in one lane"


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
