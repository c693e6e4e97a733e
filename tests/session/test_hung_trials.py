"""Trials that hang, and processes that are stopped: found, ended, and gone on from the checkpoint."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.processes.children import is_stopped
from fluid.session.handle import TrialGroupHandle
from fluid.session.listeners import TrialFailedError
from fluid.trialgroup import Trial, TrialGroup

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class Counter:
    """Counts to its budget, can be saved, and hangs in one iteration: each time, or until a file is there."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps = config, 0

    def step(self) -> dict[str, Any]:
        if self.steps + 1 == self.config.get("hangs_at") and not self._hung_before():
            self.never_returns()
        time.sleep(self.config.get("seconds", 0.01))
        self.steps += 1
        return {"step": self.steps, "pid": os.getpid()}

    def _hung_before(self) -> bool:
        marker = self.config.get("once")
        if marker is None:
            return False
        before = Path(marker).exists()
        Path(marker).touch()
        return before

    def never_returns(self) -> None:
        if self.config.get("how") == "c":
            ctypes.PyDLL(None).sleep(100_000)  # It keeps the interpreter lock.
        while True:
            pass

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "steps").write_text(str(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = int((Path(folder) / "steps").read_text())


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    """One device."""
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        yield executor


def submit(executor: FluidExecutor, budget: int = 4, **configs: dict[str, Any]) -> TrialGroupHandle:
    """Submits a trial per config; ``timeout`` in it is the trial's."""
    return executor.submit_trialgroup(
        TrialGroup(
            [
                Trial(Counter, config, budget, trial_id=name, iteration_timeout_s=config.get("timeout", "auto"))
                for name, config in configs.items()
            ]
        )
    )


def until(holds: Callable[[], Any]) -> Any:
    """What a function returns, once that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def log_of(executor: FluidExecutor, trial_id: str) -> str:
    path = executor.run_dir / "trials" / trial_id / "output.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "c"])
def test_a_trial_that_hangs_once_goes_on_from_its_checkpoint(
    executor: FluidExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="fluid"):
        once = str(tmp_path / "hung")
        handle = submit(executor, a={"hangs_at": 3, "once": once, "how": how, "timeout": 1.0})
        results = [(result.iteration, result.metrics["step"]) for result in handle.results()]
    assert results == [(1, 1), (2, 2), (3, 3), (4, 4)] and handle.states == {"a": "DONE"}
    until(lambda: "never_returns" in log_of(executor, "a"))
    (warning,) = [record.getMessage() for record in caplog.records if "no result" in record.getMessage()]
    assert "'a'" in warning and "output.log" in warning


@pytest.mark.slow
def test_a_trial_that_hangs_twice_has_failed_and_its_neighbour_has_not(executor: FluidExecutor) -> None:
    handle = submit(executor, a={"hangs_at": 2, "timeout": 0.5}, b={"seconds": 0.1, "timeout": None})
    results = [(result.trial_id, result.iteration) for result in handle.results()]
    assert results.count(("a", 1)) == 1 and [i for name, i in results if name == "b"] == [1, 2, 3, 4]
    assert handle.states == {"a": "FAILED", "b": "DONE"}
    failure = handle.failures["a"]
    assert failure.kind == "timeout" and "no result" in failure.message
    with pytest.raises(TrialFailedError, match="'a'") as raised:
        handle.raise_failures()
    assert isinstance(raised.value.__cause__, TimeoutError)
    killed = [entry for entry in journal(executor) if entry["what"] == "NoteHung" and entry["killed"]]
    assert [entry["trial_id"] for entry in killed] == ["a", "a"]


@pytest.mark.parametrize("stops_first", [False, True])
def test_a_trial_that_hangs_can_be_stopped_now(executor: FluidExecutor, stops_first: bool) -> None:
    handle = submit(executor, a={"hangs_at": 1, "how": "c", "timeout": None}, b={})
    until(lambda: any("a" in dict(device.residents) for device in executor.status().devices))
    if stops_first:
        handle.stop("a")
    handle.stop("a", now=True)
    assert handle.wait(PATIENCE) and handle.states == {"a": "STOPPED", "b": "DONE"}
    handle.stop("a", now=True)  # Harmless.


@pytest.mark.slow
def test_a_trial_that_waits_is_stopped_now_as_at_any_time(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, packing="off", run_dir=tmp_path, verbose=0) as executor:
        handle = submit(executor, a={"hangs_at": 1, "timeout": None}, b={})
        handle.stop("b", now=True)
        until(lambda: handle.states["b"] == "STOPPED")
        handle.stop("a", now=True)
        assert handle.wait(PATIENCE) and handle.states == {"a": "STOPPED", "b": "STOPPED"}
        more = submit(executor, c={})
        assert more.wait(PATIENCE) and more.states == {"c": "DONE"}, "the device is free again"


def test_now_must_be_a_bool(executor: FluidExecutor) -> None:
    handle = submit(executor, a={})
    with pytest.raises(InvalidFieldError, match="now='yes'"):
        handle.stop("a", now="yes")  # type: ignore[arg-type]


# -- processes that are stopped ----------------------------------------------------------------------------------------


def journal(executor: FluidExecutor) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (executor.run_dir / "journal.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_stopped_lane_is_killed_and_its_trial_goes_on_blameless(executor: FluidExecutor) -> None:
    handle = submit(executor, 30, a={"seconds": 0.05, "timeout": None})
    results = handle.results()
    os.kill(next(results).metrics["pid"], signal.SIGSTOP)
    assert [result.iteration for result in results] == list(range(2, 31)) and handle.states == {"a": "DONE"}
    (again,) = [entry for entry in journal(executor) if entry["what"] == "NoteQueued"]
    assert "was stopped (SIGSTOP) for 5 s" in again["why"] and again["failures"] == 0


@pytest.mark.slow
def test_a_lane_that_is_continued_in_time_goes_on(executor: FluidExecutor) -> None:
    handle = submit(executor, 30, a={"seconds": 0.02, "timeout": None})
    results = handle.results()
    pid = next(results).metrics["pid"]
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
    assert {result.metrics["pid"] for result in results} == {pid}


@pytest.mark.slow
def test_a_member_that_hangs_costs_the_trial_all_its_lanes_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fluid.elastic import ElasticTrainable

    class Wide(ElasticTrainable):
        def build(self, config: dict[str, Any]) -> None:
            self.marker = Path(config["marker"])
            self.model = torch.nn.Linear(2, 1)

        def train_iteration(self) -> dict[str, Any]:
            time.sleep(0.05)
            if self.size == 2 and self.rank == 1 and not self.marker.exists():
                self.marker.touch()
                time.sleep(100_000.0)
            return {"devices": self.all_reduce_mean(self.size, 1)}

    with FluidExecutor(backend="local", devices=2, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        config = {"marker": str(tmp_path / "hung")}
        trial = Trial(Wide, config, 10**6, trial_id="wide", max_width=2, iteration_timeout_s=3.0)
        handle = executor.submit_trialgroup(TrialGroup([trial]))
        for number, result in enumerate(handle.results(), start=1):
            assert result.iteration == number
            if (tmp_path / "hung").exists() and any(entry.get("kind") == "timeout" for entry in journal(executor)):
                break  # It went on after its lanes were killed.
        assert sum(entry["what"] == "KillLane" for entry in journal(executor)) == 2
        handle.stop("wide")
        assert handle.wait(PATIENCE) and handle.states == {"wide": "STOPPED"}
        until(lambda: "train_iteration" in log_of(executor, "wide"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_member_of_an_elastic_trial_is_found_in_seconds(tmp_path: Path, rank: int) -> None:
    torch = pytest.importorskip("torch")
    from fluid.elastic import ElasticTrainable

    class Wide(ElasticTrainable):
        def build(self, config: dict[str, Any]) -> None:
            self.folder = Path(config["folder"])
            self.model = torch.nn.Linear(2, 1)

        def train_iteration(self) -> dict[str, Any]:
            if self.size == 2:
                (self.folder / str(self.rank)).write_text(f"{os.getpid()} ")
            time.sleep(0.05)
            return {"devices": self.all_reduce_mean(self.size, 1)}

    with FluidExecutor(backend="local", devices=2, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        trial = Trial(Wide, {"folder": str(tmp_path)}, 10**6, trial_id="wide", max_width=2)
        handle = executor.submit_trialgroup(TrialGroup([trial]))
        results, seen, pid = handle.results(), 0, None
        for result in results:
            assert result.iteration == (seen := seen + 1)
            if pid is None and result.width == 2 and (tmp_path / str(rank)).exists():
                pid = int(until(lambda: (tmp_path / str(rank)).read_text()))
                os.kill(pid, signal.SIGSTOP)
                stopped_at = time.monotonic()
            elif pid is not None and time.monotonic() - stopped_at > 4.0:
                break  # It went on without that member.
        handle.stop("wide")
        assert handle.wait(PATIENCE) and handle.states == {"wide": "STOPPED"}
        assert not is_stopped(pid or 0) and handle.failures == {}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["pid", "guardian"])
def test_a_stopped_fork_server_is_continued(
    executor: FluidExecutor, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend: Any = executor._session.backend
    server = backend._host._server
    pid = until(lambda: getattr(server, which))
    with caplog.at_level(logging.WARNING, logger="fluid"):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: is_stopped(pid))
        until(lambda: not is_stopped(pid))
    assert "is continued" in caplog.text
    handle = submit(executor, a={})
    assert handle.wait(PATIENCE) and handle.states == {"a": "DONE"}


SUSPENDED = """
import sys, time
from fluid import FluidExecutor, Trial, TrialGroup

def train(config):
    while True:
        time.sleep(0.02)
        yield {"loss": 1.0}

if __name__ == "__main__":
    with FluidExecutor(backend="local", devices=1, run_dir=sys.argv[1], verbose=0) as executor:
        trial = Trial(train, {}, 200, trial_id="a", iteration_timeout_s=0.5)
        handle = executor.submit_trialgroup(TrialGroup([trial]))
        for result in handle.results():
            if result.iteration == 5:
                print("running", flush=True)
        print(handle.states["a"], flush=True)
"""


@pytest.mark.slow
def test_the_time_in_which_the_driver_is_suspended_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SUSPENDED)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "running\n"
        driver.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # Four times the limit.
        driver.send_signal(signal.SIGCONT)
        assert driver.communicate(timeout=PATIENCE)[0] == "DONE\n"
    assert '"NoteHung"' not in (tmp_path / "run" / "journal.jsonl").read_text()


def test_a_process_under_a_debugger_is_not_stopped() -> None:
    libc, trace_me = ctypes.CDLL(None), 0
    child = os.fork()
    if child == 0:
        libc.ptrace(trace_me, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and not is_stopped(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_stopped_process_is_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(child.pid))
        child.send_signal(signal.SIGCONT)
        until(lambda: not is_stopped(child.pid))
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid)
