"""Trials that ask for devices, through real processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid import Device, FluidExecutor, InvalidFieldError, Requires, Trial, TrialGroup, TrialGroupHandle
from fluid.backends.local import LocalBackend
from fluid.results.records import Result

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 120.0
_THREADS = "OMP_NUM_THREADS"


class Worker:
    """Counts, and says what it sees; waits for files that the test makes."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps = config, 0

    def step(self) -> dict[str, Any]:
        self.steps += 1
        wait = self.config.get("wait")
        if wait is not None and self.steps == self.config.get("wait_at", 1):
            Path(f"{wait}.{os.getpid()}").touch()
            deadline = time.monotonic() + PATIENCE
            while not Path(wait).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return {
            "step": self.steps,
            "pid": os.getpid(),
            "threads": os.environ[_THREADS],
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "steps.json").write_text(json.dumps(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = json.loads((Path(folder) / "steps.json").read_text())


def fluid(devices: Any, **options: Any) -> FluidExecutor:
    return FluidExecutor(backend="local", devices=devices, verbose=0, **options)


@pytest.fixture
def executor() -> Iterator[FluidExecutor]:
    with fluid(4) as made:
        yield made


def results(handle: TrialGroupHandle) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in handle.results():
        found.setdefault(result.trial_id, []).append(result)
    return found


def pids_at(wait: Path) -> list[int]:
    """Processes that wait for a file."""
    return [int(path.suffix[1:]) for path in wait.parent.glob(f"{wait.name}.*")]


def test_a_gang_runs_in_one_process_that_has_all_of_its_devices() -> None:
    trial = Trial(Worker, budget=2, trial_id="gang", devices=3)
    with FluidExecutor(backend=LocalBackend(4, pin_cores=True), verbose=0) as executor:
        (seen,) = results(executor.submit_trialgroup(TrialGroup([trial]))).values()
    assert [result.iteration for result in seen] == [1, 2]
    assert {result.width for result in seen} == {3.0}
    assert all(len(set(result.device_ids)) == 3 for result in seen)
    assert {result.metrics["threads"] for result in seen} == {"3"}
    available = sorted(os.sched_getaffinity(0))
    expected = sorted({available[index % len(available)] for index in seen[0].device_ids})
    assert seen[0].metrics["cores"] == expected


def test_two_gangs_run_side_by_side_and_single_trials_fill_afterwards(executor: FluidExecutor, tmp_path: Path) -> None:
    wait = tmp_path / "go"
    gangs = [Trial(Worker, {"wait": str(wait)}, trial_id=f"gang{k}", devices=2) for k in range(2)]
    singles = [Trial(Worker, trial_id=f"single{k}", budget=2) for k in range(4)]
    handle = executor.submit_trialgroup(TrialGroup([*singles, *gangs]))
    eventually(lambda: len(pids_at(wait)) == 2)
    wait.touch()
    seen = results(handle)
    held = [seen[f"gang{k}"][0].device_ids for k in range(2)]
    assert sorted((*held[0], *held[1])) == [0, 1, 2, 3]
    assert all(len(seen[f"single{k}"]) == 2 for k in range(4))
    assert set(handle.states.values()) == {"DONE"}


def test_a_gang_whose_process_dies_goes_on_from_its_checkpoint(executor: FluidExecutor, tmp_path: Path) -> None:
    wait = tmp_path / "go"
    trial = Trial(Worker, {"wait": str(wait), "wait_at": 3}, budget=4, trial_id="gang", devices=2)
    handle = executor.submit_trialgroup(TrialGroup([trial]))
    eventually(lambda: bool(pids_at(wait)))
    (victim,) = pids_at(wait)
    os.kill(victim, signal.SIGKILL)
    wait.touch()
    seen = results(handle)["gang"]
    assert handle.states == {"gang": "DONE"}
    assert [result.iteration for result in seen] == [1, 2, 3, 4]
    assert seen[-1].metrics["pid"] != victim and len(seen[-1].device_ids) == 2


def test_a_gang_can_be_stopped_and_extended(executor: FluidExecutor, tmp_path: Path) -> None:
    wait = tmp_path / "go"
    trials = [
        Trial(Worker, budget=2, trial_id="extended", devices=2, follow_up_iterations=2),
        Trial(Worker, {"wait": str(wait)}, budget=9, trial_id="stopped", devices=2),
    ]
    handle = executor.submit_trialgroup(TrialGroup(trials))
    eventually(lambda: handle.states.get("extended") == "DONE" and bool(pids_at(wait)))
    handle.extend("extended", 2)
    handle.stop("stopped")
    wait.touch()
    seen = results(handle)
    assert [result.iteration for result in seen["extended"]] == [1, 2, 3, 4]
    assert len({result.metrics["pid"] for result in seen["extended"]}) == 1, "its lane kept its state"
    assert handle.states == {"extended": "DONE", "stopped": "STOPPED"}


def test_the_devices_of_gangs_are_used_singly_and_again_together(executor: FluidExecutor) -> None:
    group = TrialGroup([Trial(Worker, trial_id="gang0", devices=4)])
    handle = executor.submit_trialgroup(group)
    assert handle.wait(PATIENCE)
    for trial in [*(Trial(Worker, trial_id=f"single{k}") for k in range(8)), Trial(Worker, trial_id="g", devices=4)]:
        handle.add(trial)
    assert handle.wait(PATIENCE)
    seen = results(handle)
    assert {len(seen[f"single{k}"][0].device_ids) for k in range(8)} == {1}
    assert seen["g"][0].device_ids == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("asked", "field", "reason"),
    [
        ({"devices": 5}, "devices", "no 5 devices of one host can be had; there are 4 x cpu on 'localhost'"),
        ({"requires": Requires(kind="gpu")}, "requires", "no device has that; there are 4 x cpu on 'localhost'"),
        ({"requires": Requires(host="elsewhere"), "devices": 2}, "requires", "no device has that"),
    ],
)
def test_what_no_device_can_serve_is_refused_at_the_submit(
    executor: FluidExecutor, asked: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as caught:
        executor.submit_trialgroup(TrialGroup([Trial(Worker, trial_id="ok"), Trial(Worker, trial_id="no", **asked)]))
    assert caught.value.field == field
    handle = executor.submit_trialgroup(TrialGroup([Trial(Worker, trial_id="ok")]))
    with pytest.raises(InvalidFieldError, match=reason):
        handle.add(Trial(Worker, trial_id="no", **asked))
    assert handle.wait(PATIENCE)


@pytest.mark.slow
def test_trials_run_only_on_devices_that_meet_what_they_require() -> None:
    devices = [
        Device(index, tags=("fast",) if index % 2 else (), model="X1" if index < 2 else "X2 Pro") for index in range(4)
    ]
    asked: dict[str, tuple[Requires, set[int]]] = {
        "fast": (Requires(tags="fast"), {1, 3}),
        "x2": (Requires(model="X2"), {2, 3}),
        "both": (Requires(model="X2", tags="fast"), {3}),
    }
    trials = [
        Trial(Worker, budget=2, trial_id=f"{name}{k}", requires=requires)
        for name, (requires, _) in asked.items()
        for k in range(4)
    ]
    trials.append(Trial(Worker, trial_id="x2-gang", devices=2, requires=Requires(model="X2")))
    with fluid(devices) as executor:
        seen = results(executor.submit_trialgroup(TrialGroup(trials)))
    for name, (_, allowed) in asked.items():
        for k in range(4):
            assert {device for result in seen[f"{name}{k}"] for device in result.device_ids} <= allowed
    assert set(seen["x2-gang"][0].device_ids) == {2, 3}


@pytest.mark.slow
def test_a_trial_that_asks_for_a_device_has_it_for_itself(executor: FluidExecutor, tmp_path: Path) -> None:
    wait = tmp_path / "go"
    alone = [Trial(Worker, {"wait": str(wait)}, trial_id=f"alone{k}", devices=1) for k in range(3)]
    others = [Trial(Worker, budget=3, trial_id=f"other{k}", devices=1 / 2) for k in range(6)]
    handle = executor.submit_trialgroup(TrialGroup([*alone, *others]))
    eventually(lambda: len(pids_at(wait)) == 3)
    eventually(lambda: sum(state == "DONE" for state in handle.states.values()) == 6)
    wait.touch()
    seen = results(handle)
    held = [seen[f"alone{k}"][0].device_ids[0] for k in range(3)]
    (left,) = {0, 1, 2, 3} - set(held)
    assert {result.device_ids for k in range(6) for result in seen[f"other{k}"]} == {(left,)}


@pytest.mark.slow
def test_threads_are_those_that_a_trial_asks_for_while_it_runs() -> None:
    trials = [Trial(Worker, budget=2, trial_id=name, threads=n) for name, n in (("a", 3), ("b", None), ("c", 2))]
    with fluid(1) as executor:
        seen = results(executor.submit_trialgroup(TrialGroup(trials)))
    threads = {name: {result.metrics["threads"] for result in found} for name, found in seen.items()}
    assert threads == {"a": {"3"}, "b": {"1"}, "c": {"2"}}


def test_omp_num_threads_of_the_driver_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_THREADS, "5")
    trials = [Trial(Worker, trial_id="a"), Trial(Worker, trial_id="b", threads=2)]
    with fluid(1) as executor:
        seen = results(executor.submit_trialgroup(TrialGroup(trials)))
    assert {name: found[0].metrics["threads"] for name, found in seen.items()} == {"a": "5", "b": "2"}


@pytest.mark.slow
def test_a_gang_is_resumed_by_another_driver(tmp_path: Path) -> None:
    wait = tmp_path / "go"
    group = TrialGroup([Trial(Worker, {"wait": str(wait), "wait_at": 3}, budget=4, trial_id="gang", devices=2)])
    with fluid(2, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(group)
        eventually(lambda: bool(pids_at(wait)))
        draining = threading.Thread(target=executor.drain_all, args=(PATIENCE,))
        draining.start()
        wait.touch()
        draining.join()
    with FluidExecutor.resume(tmp_path / "run", backend="local", devices=2, verbose=0) as executor:
        (handle,) = executor.handles
        assert handle.wait(PATIENCE)
        assert handle.states == {"gang": "DONE"}
        assert len(results(handle)["gang"][-1].device_ids) == 2
