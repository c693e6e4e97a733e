"""Which processes trials run in, and which end with a trial: those of gangs, of elastic trials, joblib's workers.

Each process of a trial leaves a file with its id in the folder of the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid import FluidExecutor, Trial, TrialGroup

both = pytest.mark.parametrize("isolation", ["trial", "lane"])


def note_process(folder: str, name: str) -> None:
    Path(folder, f"{name} {os.getpid()}").touch()


def processes(folder: Path, name: str) -> set[int]:
    """The processes in which a trial has run."""
    return {int(path.name.split()[1]) for path in folder.iterdir() if path.name.split()[0] == name}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gang(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two iterations in one process that has all devices."""
    for _ in range(2):
        note_process(config["folder"], config["name"])
        yield {"pid": os.getpid()}


def spreading() -> type:
    """Makes a trainable that can span several devices."""
    pytest.importorskip("torch")
    import torch

    from fluid.elastic import ElasticTrainable

    class Spreading(ElasticTrainable):
        """Notes the process of each of its members in each iteration."""

        def build(self, config: dict[str, Any]) -> None:
            self.folder, self.name = config["folder"], config["name"]
            self.model = torch.nn.Linear(2, 1)

        def train_iteration(self) -> dict[str, Any]:
            import time

            time.sleep(0.05)
            Path(self.folder, f"{self.name} {os.getpid()} {self.rank}").touch()
            return {"members": self.all_reduce_mean(self.size, 1)}

    return Spreading


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (folder := tmp_path / "notes").mkdir()
    return folder


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0) as made:
        yield made


@both
def test_a_gangs_process_ends_with_it_unless_gangs_share_it(
    executor: FluidExecutor, notes: Path, isolation: str
) -> None:
    for name in "ab":
        config = {"folder": str(notes), "name": name}
        trial = Trial(gang, config, budget=2, devices=2, isolation=isolation)
        assert executor.submit_trialgroup(TrialGroup([trial])).wait()
    (first,), (second,) = processes(notes, "a"), processes(notes, "b")
    assert (first == second) is (isolation == "lane")
    if isolation == "trial":
        eventually(lambda: not is_alive(first) and not is_alive(second))


@pytest.mark.slow
@both
def test_members_of_elastic_trials_have_processes_of_their_own_unless_they_share_them(
    executor: FluidExecutor, notes: Path, isolation: str
) -> None:
    trainable = spreading()
    for name in "ab":
        config = {"folder": str(notes), "name": name}
        trial = Trial(trainable, config, budget=3, devices=2, isolation=isolation)
        results = list(executor.submit_trialgroup(TrialGroup([trial])).results())
        assert results[-1].metrics["members"] == 2.0
    first, second = processes(notes, "a"), processes(notes, "b")
    assert len(first) == len(second) == 2
    assert (first == second) if isolation == "lane" else not first & second
    if isolation == "trial":
        eventually(lambda: not any(map(is_alive, first | second)))


@pytest.mark.slow
def test_a_newcomer_takes_an_unused_lane_and_one_that_leaves_ends_it(executor: FluidExecutor, notes: Path) -> None:
    config = {"folder": str(notes), "name": "wide"}
    wide = executor.submit_trialgroup(TrialGroup([Trial(spreading(), config, budget=10**6, max_width=2)]))
    eventually(lambda: len(processes(notes, "wide")) == 2)
    before = processes(notes, "wide")
    narrow = Trial(gang, {"folder": str(notes), "name": "narrow"}, budget=2)
    assert executor.submit_trialgroup(TrialGroup([narrow])).wait()
    (other,) = processes(notes, "narrow")
    assert other not in before, "it runs in no process that a member has left"
    eventually(lambda: len(processes(notes, "wide")) == 3)  # It spreads again, with a newcomer.
    (newcomer,) = processes(notes, "wide") - before
    assert newcomer != other
    eventually(lambda: sum(map(is_alive, before)) == 1 and not is_alive(other))
    assert is_alive(newcomer)
    wide.stop(next(iter(wide.states)))
    assert wide.wait()
    eventually(lambda: not is_alive(newcomer) and not any(map(is_alive, before)))


@pytest.mark.slow
def test_joblibs_workers_run_one_call_after_another_beside_trials_of_their_own(
    executor: FluidExecutor, notes: Path
) -> None:
    joblib = pytest.importorskip("joblib")
    pytest.importorskip("fluid.integrations.joblib")

    def tasks() -> set[int]:
        with joblib.parallel_config("fluid", n_jobs=2, executor=executor):
            return set(joblib.Parallel(batch_size=1)(joblib.delayed(os.getpid)() for _ in range(40)))

    workers = tasks()
    trial = Trial(gang, {"folder": str(notes), "name": "alone"}, budget=2)
    assert executor.submit_trialgroup(TrialGroup([trial])).wait()
    workers |= tasks()
    assert os.getpid() not in workers and len(workers) <= 2, "a worker's process serves the next call"
    assert not workers & processes(notes, "alone")
