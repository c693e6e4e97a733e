"""What only a GPU can show: its memory as PyTorch and NVML report it, NCCL, and the MPS daemon. Needs PyTorch."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_process import CudaProcess

from fluid.gpu.mps_control import PIPE_VARIABLE, STATES, Control
from fluid.gpu.mps_foreign import ForeignDaemon
from fluid.gpu.mps_support import unsupported_reason_here
from fluid.gpu.nvml import cpu_cores, describe_gpus, find_gpus, used_bytes
from fluid.mps import MpsDaemon

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which a test gives up. Far more than anything takes.
PATIENCE = 90.0
MIB = 2**20

#: A client of MPS that computes until it is killed or fails, and stays for a while after a failure.
NEIGHBOUR = """
    import time, torch
    matrix = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    print("up", flush=True)
    try:
        while True:
            matrix @ matrix
            torch.cuda.synchronize()
    except RuntimeError:
        print("failed", flush=True)
        time.sleep(600)
"""
#: A client that reads beyond the end of a tensor.
FAULTY = 'import torch; torch.zeros(1, device="cuda")[torch.tensor([1 << 20], device="cuda")].cpu()'
#: A driver that starts a daemon, tells the processes of it, and waits to be killed.
DRIVER = """
    import sys, time
    from fluid.mps import MpsDaemon
    daemon = MpsDaemon([sys.argv[1]])
    print(daemon.pid, *daemon.servers(), daemon.pipe_folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def cuda() -> Iterator[CudaProcess]:
    made = CudaProcess({"CUDA_VISIBLE_DEVICES": find_gpus()[0].token})
    yield made
    made.close()


# --- Memory


def test_nvml_reports_the_gpu_and_the_memory_that_a_process_takes(cuda: CudaProcess) -> None:
    def take() -> int:
        import torch

        kept.append(torch.ones(512 * MIB, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        return os.getpid()

    kept: list[Any] = []
    (gpu, *_) = describe_gpus()
    before = used_bytes(gpu.token)
    cuda(take)
    after = used_bytes(gpu.token)
    assert gpu.memory_bytes > 4e9 and gpu.capability is not None and gpu.name
    assert set(cpu_cores(gpu.token)) <= set(range(os.cpu_count() or 1))
    assert before is not None and after is not None and after - before >= 500 * MIB


def test_the_meter_measures_a_known_allocation_and_what_stays_reserved(cuda: CudaProcess) -> None:
    def measure() -> list[tuple[float, float] | None]:
        import torch

        from fluid.lane.device.device import make_memory_meter
        from fluid.lane.protocol import LaneOptions

        def work(kept: list[Any], keep: int, take: int) -> tuple[float, float] | None:
            meter.begin()
            kept.append(torch.ones(keep * MIB, dtype=torch.uint8, device="cuda"))
            taken = torch.ones(take * MIB, dtype=torch.uint8, device="cuda")
            del taken
            return meter.end()

        torch.zeros(1, device="cuda")
        meter = make_memory_meter(LaneOptions(0, kind="gpu"))
        meter.release_cached(collect=True)
        kept: list[Any] = []
        first, second = work(kept, 64, 256), work(kept, 0, 32)
        meter.release_cached()
        return [first, second, work(kept, 0, 32)]

    first, cached, released = cuda(measure)
    assert first is not None and cached is not None and released is not None
    assert 64 * MIB <= first[0] <= 68 * MIB and 256 * MIB <= first[1] <= 300 * MIB
    assert cached[0] < MIB and cached[1] >= 250 * MIB, "what PyTorch keeps is for no other process"
    assert 32 * MIB <= released[1] <= 64 * MIB


def test_what_a_trial_holds_is_what_stays_reserved(cuda: CudaProcess) -> None:
    def measure() -> tuple[float, float, float]:
        import torch

        from fluid.lane.device.device import make_memory_meter
        from fluid.lane.protocol import LaneOptions

        torch.zeros(1, device="cuda")
        meter = make_memory_meter(LaneOptions(0, kind="gpu"))
        meter.release_cached(collect=True)
        before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        meter.begin()
        kept, *taken = [torch.ones(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
        del taken
        measured = meter.end(settle=True)
        assert measured is not None and kept.numel() == 2 * MIB
        after = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        return measured[0], float(after[0] - before[0]), float(after[1] - before[1])

    held, reserved, allocated = cuda(measure)
    assert held == reserved >= allocated


def test_what_stays_reserved_at_rest_is_what_nvml_counts_besides_the_lanes_own(cuda: CudaProcess) -> None:
    def measure() -> tuple[float, float, float | None]:
        import torch

        from fluid.lane.device.device import make_memory_meter
        from fluid.lane.device.own_memory import OwnMemory
        from fluid.lane.protocol import LaneOptions

        options = LaneOptions(0, kind="gpu")
        own, meter = OwnMemory(options), make_memory_meter(options)
        torch.zeros(1, device="cuda")
        meter.release_cached(collect=True)
        before = torch.cuda.memory_reserved()
        meter.begin()
        kept, *taken = [torch.ones(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
        measured = meter.end()
        del taken
        assert measured is not None and kept.numel() == 2 * MIB
        return measured[0] + meter.settle(), float(torch.cuda.memory_reserved() - before), own.changed(before)

    held, reserved, own_bytes = cuda(measure)
    assert held == reserved >= 2 * MIB
    if own_bytes is not None:  # NVML lists the process.
        assert 50e6 < own_bytes - reserved < 3e9


def test_a_trial_that_grows_beyond_its_limit_runs_out_of_memory(cuda: CudaProcess) -> None:
    def grow() -> list[bool]:
        import torch

        from fluid.lane.device.device import make_memory_meter
        from fluid.lane.protocol import LaneOptions

        def fits() -> bool:
            try:
                torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                return False
            return True

        torch.zeros(1, device="cuda")
        meter = make_memory_meter(LaneOptions(0, kind="gpu"))
        found = []
        for limit_bytes in (None, torch.cuda.memory_allocated() + 256.0 * MIB, None):
            meter.release_cached(collect=True)
            meter.limit(limit_bytes)
            found.append(fits())
        meter.release_cached(collect=True)
        return found

    assert cuda(grow) == [True, False, True]


# --- Elastic training


def test_a_snapshot_keeps_the_state_of_a_gpu(cuda: CudaProcess) -> None:
    def round_trip() -> tuple[bool, bool, list[str]]:
        import torch

        from fluid.elastic.state import Snapshot

        state = {"weights": torch.randn(1000, 1000, device="cuda"), "steps": torch.tensor(7), "name": "a"}
        expected = state["weights"].clone()
        snapshot = Snapshot.take(state)
        state["weights"].zero_()  # Queued behind the copy, or after it.
        found = snapshot.state()
        again = Snapshot.take(found, snapshot).state()
        kinds = [found["weights"].device.type, found["steps"].device.type]
        return torch.equal(found["weights"], expected), torch.equal(again["weights"], expected), kinds

    assert cuda(round_trip) == (True, True, ["cuda", "cpu"])


def test_nccl_reduces_ends_and_starts_again(cuda: CudaProcess) -> None:
    def reduce_twice() -> list[float]:
        import torch
        import torch.distributed as dist

        found = []
        for name in ("one", "two"):
            store = dist.PrefixStore(name, dist.HashStore())
            group = dist.ProcessGroupNCCL(store, 0, 1)
            ones = torch.ones(1000, device="cuda")
            group.allreduce([ones]).wait()
            found.append(float(ones.sum()))
            group.abort()
        return found

    assert cuda(reduce_twice) == [1000.0, 1000.0]


def test_a_communicator_whose_other_member_never_comes_is_given_up(cuda: CudaProcess) -> None:
    def give_up() -> tuple[str, float]:
        import threading
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from fluid.elastic.groups.generation import GenerationBrokenError, GenerationGuard
        from fluid.elastic.groups.nccl import connect, wait_for_gpu

        def make(size: int, guard: GenerationGuard) -> dist.Backend:
            return connect(dist.HashStore(), 0, size, timedelta(seconds=60), torch.device("cuda"), guard)

        guard = GenerationGuard()
        guard.start(1)
        threading.Timer(2.0, guard.break_).start()  # It waits for rank 1 by then.
        try:
            make(2, guard)
            raised = "nothing"
        except GenerationBrokenError as error:
            raised = str(error)
        ones = torch.ones(1000, device="cuda")
        make(1, GenerationGuard()).allreduce([ones]).wait()
        wait_for_gpu()
        return raised, float(ones.sum())

    assert cuda(give_up) == ("generation 1 was aborted", 1000.0)


def test_two_processes_share_one_gpu_in_an_elastic_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses that, so they communicate through memory."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from elastic_resize_workload import Perceptron

    from fluid.elastic import ElasticRun

    with ElasticRun(Perceptron, {"hidden": 64}, 1, gpus=(find_gpus()[0].token,)) as run:
        results = run.run(2)
        run.prepare(1)
        run.resize(2)
        results += run.run(2)
        run.resize(1)
        results += run.run(1)
    assert [result.width for result in results] == [1, 1, 2, 2, 1]
    assert [result.iteration for result in results] == [1, 2, 3, 4, 5]


# --- MPS


@pytest.fixture
def daemon() -> Iterator[MpsDaemon]:
    """For the first GPU."""
    why_not = unsupported_reason_here(describe_gpus()[:1])
    if why_not:
        pytest.skip(f"MPS cannot be used: {why_not}")
    with MpsDaemon([find_gpus()[0].token]) as made:
        yield made


@pytest.fixture
def client(daemon: MpsDaemon) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts clients of the daemon."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **daemon.lane_environment(daemon.devices[0])}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        started.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_daemon_answers_in_words_that_are_known(
    daemon: MpsDaemon, client: Callable[[str], subprocess.Popen[str]]
) -> None:
    one, other = client(NEIGHBOUR), client(NEIGHBOUR)
    assert said(one) == said(other) == "up"
    servers = daemon.servers()
    assert servers and set(servers.values()) <= set(STATES)
    assert len(daemon.clients()) == 2 and daemon.problem() == ""
    one.kill()
    one.communicate()
    assert daemon.problem() == "", "a client that is killed takes nobody along"
    assert other.poll() is None


def test_a_fault_is_told_and_the_daemon_serves_new_clients_after_a_restart(
    daemon: MpsDaemon, client: Callable[[str], subprocess.Popen[str]]
) -> None:
    neighbour = client(NEIGHBOUR)
    assert said(neighbour) == "up"
    assert client(FAULTY).wait(PATIENCE) != 0
    assert said(neighbour) == "failed", "a fatal fault is one of all clients of the GPU"
    end = time.monotonic() + PATIENCE
    while not daemon.problem():
        assert time.monotonic() < end, f"no fault is told: {daemon.servers()}"
    neighbour.kill()
    neighbour.communicate()
    daemon.restart()
    assert daemon.problem() == ""
    assert said(client(NEIGHBOUR)) == "up"


def test_a_daemon_recovers_by_itself_once_the_clients_that_failed_have_ended(
    daemon: MpsDaemon, client: Callable[[str], subprocess.Popen[str]]
) -> None:
    """One that Fluid did not start is not restarted: new clients wait for that."""
    foreign = ForeignDaemon(daemon.program, daemon.pipe_folder)
    neighbour = client(NEIGHBOUR)
    assert said(neighbour) == "up" and foreign.problem() == ""
    assert client(FAULTY).wait(PATIENCE) != 0
    end = time.monotonic() + PATIENCE
    while not foreign.problem():
        assert time.monotonic() < end, f"no fault is told: {daemon.servers()}"
    neighbour.kill()
    neighbour.communicate()
    foreign.await_recovery(lambda: False)
    assert foreign.problem() == ""
    assert said(client(NEIGHBOUR)) == "up"


def test_the_work_of_one_client_is_ended_and_the_other_computes_on(
    daemon: MpsDaemon, client: Callable[[str], subprocess.Popen[str]]
) -> None:
    one, other = client(NEIGHBOUR), client(NEIGHBOUR)
    assert said(one) == said(other) == "up"
    Control(daemon.program, {**os.environ, PIPE_VARIABLE: daemon.pipe_folder}, PATIENCE).terminate_client(one.pid)
    assert said(one) == "failed"
    one.kill()
    one.wait()
    assert said(client(NEIGHBOUR)) == "up"
    assert other.stdout is not None and not select.select([other.stdout], [], [], 0.0)[0], "it did not fail"
    assert daemon.problem() == "" and other.poll() is None


def test_nothing_of_the_daemon_is_left_when_it_is_closed(daemon: MpsDaemon, processes: Any) -> None:
    assert daemon.pid is not None
    processes.watch(daemon.pid, *daemon.servers())
    daemon.close()
    assert processes.have_ended() and not os.path.exists(daemon.pipe_folder)


def test_nothing_of_the_daemon_is_left_when_its_driver_is_killed(daemon: MpsDaemon, processes: Any) -> None:
    daemon.close()  # It was for the test whether MPS can be used.
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), daemon.devices[0]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as driver:
        *pids, folder = said(driver).split()
        processes.watch(*map(int, pids))
        driver.send_signal(signal.SIGKILL)
    assert processes.have_ended(PATIENCE)
    end = time.monotonic() + PATIENCE
    while os.path.exists(folder):
        assert time.monotonic() < end
