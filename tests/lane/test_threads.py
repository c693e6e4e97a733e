"""The CPU threads of a lane, against a stand-in for PyTorch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.lane.process import threads as module
from fluid.lane.process.threads import LaneThreads, set_threads
from fluid.resources import available_cores


class Torch:
    def __init__(self) -> None:
        self.threads = 8

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(set_num_threads=self.set, get_num_threads=lambda: self.threads)

    def set(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made.module())
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "8"})
    monkeypatch.setattr(module, "_chosen", cache(module._chosen.__wrapped__))
    return made


def test_the_number_that_a_trial_asks_for_stays_in_force_while_it_runs(torch: Torch) -> None:
    threads = lane(8)
    threads.enter(2, None)
    assert torch.threads == 2
    assert threads.leave().torch == 2 and torch.threads == 8
    threads.enter(None, None)
    assert threads.leave().torch == 8


def test_the_number_that_a_trial_sets_is_its_own_and_of_what_it_set_only(torch: Torch) -> None:
    threads = lane(8)
    threads.enter(None, None)
    torch.set(3)
    left = threads.leave()
    assert torch.threads == 8, "another trial has the lane's own"
    threads.enter(None, left)
    assert torch.threads == 3 and os.environ["OMP_NUM_THREADS"] == "8"
    os.environ["OMP_NUM_THREADS"] = "1"
    left = threads.leave()
    assert torch.threads == 8 and os.environ["OMP_NUM_THREADS"] == "8"
    threads.enter(None, left)
    assert torch.threads == 3 and os.environ["OMP_NUM_THREADS"] == "1"


def lane(threads: int) -> LaneThreads:
    set_threads(threads)
    return LaneThreads(threads)


def test_what_one_trial_sets_in_a_library_does_not_reach_those_that_take_turns_with_it(tmp_path: Path) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    pytest.importorskip("numpy")
    if len(available_cores()) == 1:
        pytest.skip("OpenBLAS has one thread here")

    def look(config: dict[str, Any]) -> Iterator[dict[str, int]]:
        import numpy  # noqa: F401
        import threadpoolctl

        if config["own"] is not None:
            threadpoolctl.threadpool_limits(config["own"])
        while True:
            found = threadpoolctl.threadpool_info()
            yield {"blas": max(library["num_threads"] for library in found if library["user_api"] == "blas")}

    if not [library for library in threadpoolctl.threadpool_info() if library["internal_api"] == "openblas"]:
        pytest.skip("NumPy has no OpenBLAS here")
    with FluidExecutor("local", 1, packing="lane", lane_policy="fair", verbose=0, run_dir=tmp_path / "run") as executor:
        trials = [Trial(look, {"own": own}, budget=3, trial_id=str(own)) for own in (2, None)]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        found = sorted((result.trial_id, result.metrics["blas"]) for result in handle.results())
    assert found == [("2", 2)] * 3 + [("None", 1)] * 3


def test_as_many_processes_compile(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(compile_threads=32)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", compiler)
    set_threads(2)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "2" and compiler.compile_threads == 2


def test_users_choose_how_many_compile(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace(compile_threads=3)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", compiler)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "3"
    for _ in range(2):
        set_threads(2)
        assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3" and compiler.compile_threads == 3
        assert os.environ["LOKY_MAX_CPU_COUNT"] == os.environ["OMP_NUM_THREADS"] == "2"


def test_the_sizes_of_a_lane_are_not_taken_for_those_of_users_in_a_session_that_runs_there(torch: Torch) -> None:
    os.environ["LOKY_MAX_CPU_COUNT"] = os.environ["OMP_NUM_THREADS"]
    set_threads(2)
    assert os.environ["LOKY_MAX_CPU_COUNT"] == "2"


def test_joblib_starts_no_more_processes_in_a_trial_than_its_lane_has_threads(tmp_path: Path) -> None:
    pytest.importorskip("joblib")

    def count(config: dict[str, Any]) -> Iterator[dict[str, int]]:
        import joblib

        yield {"jobs": joblib.effective_n_jobs(-1)}

    with FluidExecutor("local", 1, verbose=0, run_dir=tmp_path / "run") as executor:
        trials = [Trial(count, {}, budget=1, trial_id="a"), Trial(count, {}, budget=1, trial_id="b", threads=2)]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        found = {result.trial_id: result.metrics["jobs"] for result in handle.results()}
    assert found == {"a": 1, "b": min(2, os.cpu_count() or 1)}


def test_libraries_that_are_loaded_later_read_the_number(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "2"
    set_threads(5)
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_numpy_has_the_number_too_where_the_process_that_forks_lanes_had_loaded_it(tmp_path: Path) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    numpy = pytest.importorskip("numpy")
    if not [library for library in threadpoolctl.threadpool_info() if library["internal_api"] == "openblas"]:
        pytest.skip("NumPy has no OpenBLAS here")

    def dot(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        import numpy

        x, y = numpy.random.default_rng(0).standard_normal((2, 1_000_003))
        yield {"dot": float(x @ y)}

    with FluidExecutor("local", 1, verbose=0, run_dir=tmp_path / "run") as executor:
        trials = [Trial(dot, {}, trial_id=f"{threads}", threads=threads) for threads in (2, 1)]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        found = {result.trial_id: result.metrics["dot"] for result in handle.results()}
    x, y = numpy.random.default_rng(0).standard_normal((2, 1_000_003))
    expected = []
    for limit in (1, min(2, len(available_cores()))):
        with threadpoolctl.threadpool_limits(limit):
            expected.append(float(x @ y))
    assert [found["1"], found["2"]] == expected
    assert len(available_cores()) == 1 or expected[0] != expected[1], "the number of threads shows"
