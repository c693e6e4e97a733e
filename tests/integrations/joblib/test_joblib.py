"""joblib on lanes: results, errors, deaths, arrays, generators, executors."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing import TimeoutError as ParallelTimeoutError
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidError, FluidExecutor, InvalidFieldError, Trial, TrialGroup

pytestmark = pytest.mark.frameworks("joblib", "numpy")
joblib = pytest.importorskip("joblib")
dispatch = pytest.importorskip("fluid.integrations.joblib.dispatch")
sys.path.append(str(Path(__file__).parent))

import joblib_tasks as tasks  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def executor() -> Iterator[FluidExecutor]:
    import fluid.integrations.joblib  # noqa: F401

    with FluidExecutor(backend="local", devices=2, verbose=0) as made:
        yield made


@pytest.fixture
def on_lanes(executor: FluidExecutor) -> Iterator[None]:
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor):
        yield


def parallel(function: Any, *columns: Any, **options: Any) -> Any:
    return joblib.Parallel(**options)(joblib.delayed(function)(*row) for row in zip(*columns, strict=True))


def test_tasks_run_in_lanes_in_order(on_lanes: None) -> None:
    assert parallel(pow, range(300), [2] * 300) == [number**2 for number in range(300)]
    found = parallel(tasks.process_of, range(20), batch_size=1)
    assert {lane for _, lane in found} == {True}
    assert os.getpid() not in {process for process, _ in found}


def test_an_iterator_is_read_as_results_come(on_lanes: None) -> None:
    read = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            read.append(number)
            yield number

    results = joblib.Parallel(return_as="generator", batch_size=1, pre_dispatch=4)(
        joblib.delayed(abs)(number) for number in numbers()
    )
    assert next(results) == 0
    assert sum(results) == sum(range(1000))
    assert read == list(range(1000))


def test_unordered_results(on_lanes: None) -> None:
    results = parallel(abs, range(-20, 0), return_as="generator_unordered")
    assert sorted(results) == list(range(1, 21))


def test_a_generator_that_is_not_read_lets_other_calls_run(on_lanes: None) -> None:
    first = parallel(abs, range(8), return_as="generator", batch_size=1)
    assert next(first) == 0
    assert parallel(abs, range(6)) == list(range(6))
    assert list(first) == list(range(1, 8))


def test_workers_without_work_leave_their_lanes_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_IDLE_S", 0.05)

    def numbers() -> Iterator[int]:
        for number in range(6):
            if number == 4:
                assert parallel(abs, range(6)) == list(range(6))  # It needs both lanes.
            yield number

    options: dict[str, Any] = {"n_jobs": 2, "devices": 2, "packing": "off", "verbose": 0}
    with joblib.parallel_config("fluid", **options):
        unread = parallel(tasks.nap, range(8), return_as="generator", batch_size=1)
        assert next(unread) == 0  # Others are not done yet, so that the call keeps its workers.
        assert parallel(tasks.process_of, range(6), batch_size=1)[0][1]
        jobs = (joblib.delayed(tasks.process_of)(number) for number in numbers())
        assert all(in_lane for _, in_lane in joblib.Parallel(batch_size=1, pre_dispatch=2)(jobs))
        assert list(unread) == list(range(1, 8))


def test_a_generator_that_is_dropped_ends_its_tasks(on_lanes: None, tmp_path: Path) -> None:
    results = parallel(tasks.touch_and_wait, range(4), [str(tmp_path)] * 4, return_as="generator", batch_size=1)
    tasks.wait_for(str(tmp_path / "runs-0"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del results
        gc.collect()
    assert any("cancelled" in str(each.message) for each in caught)
    assert parallel(abs, range(6)) == list(range(6))


def test_an_exception_comes_with_its_traceback_and_ends_the_others(on_lanes: None) -> None:
    with pytest.raises(LookupError, match="no 7") as caught:
        parallel(tasks.fail_at, range(40), [7] * 40)
    assert "in fail_at" in str(caught.value.__cause__)
    assert parallel(abs, range(6)) == list(range(6))


def test_an_exception_that_pickle_cannot_make_again_arrives(on_lanes: None) -> None:
    with pytest.raises(tasks.UnpicklableError, match=r"^two arguments are needed$") as caught:
        parallel(tasks.fail_unpicklably, range(2))
    assert "in fail_unpicklably" in str(caught.value.__cause__)
    with pytest.raises(RecursionError):
        parallel(tasks.recurse, range(2))


def test_a_result_that_cannot_be_pickled_is_told(on_lanes: None) -> None:
    with pytest.raises(TypeError, match="pickle"):
        parallel(tasks.return_lock, range(2))


def test_an_argument_that_cannot_be_pickled_is_told(on_lanes: None) -> None:
    with pytest.raises(pickle.PicklingError, match="Could not pickle the task") as caught:
        parallel(abs, [threading.Lock()] * 3)
    assert "lock" in str(caught.value.__cause__)


def test_an_argument_that_cannot_be_pickled_later_is_told(on_lanes: None) -> None:
    with pytest.raises(pickle.PicklingError, match="Could not pickle the task"):
        parallel(abs, [*range(40), threading.Lock()], batch_size=1)


def test_an_exit_reaches_the_caller(on_lanes: None) -> None:
    with pytest.raises(SystemExit):
        parallel(tasks.exit_at_once, range(2))


def test_functions_of_the_caller_are_sent_by_value(on_lanes: None) -> None:
    offset = 3
    assert parallel(lambda number: number + offset, range(5)) == [3, 4, 5, 6, 7]


def test_a_timeout_ends_the_tasks(on_lanes: None, tmp_path: Path) -> None:
    with pytest.raises(ParallelTimeoutError):
        parallel(tasks.touch_and_wait, range(2), [str(tmp_path)] * 2, timeout=0.2)
    assert parallel(abs, range(6)) == list(range(6))


def test_a_block_of_parallel_goes_on_after_an_error(on_lanes: None) -> None:
    with joblib.Parallel() as block:
        assert block(joblib.delayed(abs)(number) for number in range(6)) == list(range(6))
        with pytest.raises(LookupError):
            block([joblib.delayed(tasks.fail_at)(1, 1)])  # Of several, joblib would run the rest in the next call.
        assert block(joblib.delayed(abs)(number) for number in range(6)) == list(range(6))


def test_tasks_of_a_process_that_dies_run_again(on_lanes: None, tmp_path: Path) -> None:
    arguments = range(8), [str(tmp_path)] * 8, [0, 0, 1, 0, 0, 2, 0, 0]
    assert parallel(tasks.die_until, *arguments, batch_size=1) == list(range(8))


def test_tasks_that_kill_their_process_each_time_are_given_up(on_lanes: None, tmp_path: Path) -> None:
    from fluid.integrations.joblib import WorkerDiedError

    with pytest.raises(WorkerDiedError, match="3 processes died that ran the same tasks"):
        parallel(tasks.die_until, range(4), [str(tmp_path)] * 4, [0, 9, 0, 0], batch_size=1)
    assert parallel(abs, range(6)) == list(range(6))


def test_more_deaths_than_a_trial_may_have_end_no_call(on_lanes: None, tmp_path: Path) -> None:
    arguments = range(10), [str(tmp_path)] * 10, [1] * 10
    assert parallel(tasks.die_until, *arguments, batch_size=1) == list(range(10))


def test_large_arrays_are_shared_and_their_files_deleted(on_lanes: None) -> None:
    import numpy as np

    array = np.ones((1000, 300))
    found = parallel(tasks.describe_array, [array] * 6, batch_size=1)
    files = {path for path, _, _ in found}
    assert len(files) == 1 and "" not in files
    assert {(writeable, total) for _, writeable, total in found} == {(False, 300_000.0)}
    assert not any(Path(path).exists() for path in files)
    copied = parallel(tasks.describe_array, [array] * 2, max_nbytes=None)
    assert copied == [("", True, 300_000.0)] * 2


def test_parallel_within_a_task_takes_threads(on_lanes: None) -> None:
    assert parallel(tasks.nested, [4, 3]) == [("ThreadingBackend", [0, 1, 4, 9]), ("ThreadingBackend", [0, 1, 4])]
    assert parallel(tasks.nested_fluid, [4, 3]) == [[0, 1, 4, 9], [0, 1, 4]]


def test_threads_of_a_worker(executor: FluidExecutor) -> None:
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor, inner_max_num_threads=2):
        assert parallel(tasks.threads_of, range(2)) == ["2", "2"]


def test_numbers_of_workers(executor: FluidExecutor) -> None:
    with joblib.parallel_config("fluid", executor=executor):
        assert joblib.effective_n_jobs() == joblib.effective_n_jobs(-1) == 2
        assert joblib.effective_n_jobs(-2) == 1
        assert joblib.effective_n_jobs(5) == 5
        with pytest.raises(ValueError, match="n_jobs == 0"):
            joblib.effective_n_jobs(0)
        assert parallel(abs, range(30), n_jobs=5) == list(range(30))
        assert parallel(tasks.process_of, range(2), n_jobs=1) == [(os.getpid(), False)] * 2


def test_the_executor_in_force_runs_tasks_beside_trials(executor: FluidExecutor) -> None:
    before = len(executor.handles)
    with joblib.parallel_config("fluid", n_jobs=2):
        assert parallel(abs, range(6)) == list(range(6))
    assert len(executor.handles) == before + 1
    handle = executor.submit_trialgroup(TrialGroup([Trial(lambda config: {"loss": 1.0})]))
    assert handle.wait(90.0)
    assert all(handle.done for handle in executor.handles)


def test_an_executor_that_is_made_is_closed_with_its_block() -> None:
    import fluid.integrations.joblib  # noqa: F401

    with joblib.parallel_config("fluid", n_jobs=2, devices=2, verbose=0) as config:
        assert parallel(abs, range(6)) == list(range(6))
        made = config["backend"]._executors.get()
        assert parallel(tasks.process_of, range(6)) and config["backend"]._executors.get() is made
        backend = weakref.ref(config["backend"])
        del config
        assert not made.closed
    gc.collect()
    assert backend() is None
    assert made.closed


def test_an_executor_that_is_closed_ends_the_call(tmp_path: Path) -> None:
    import fluid.integrations.joblib  # noqa: F401

    made = FluidExecutor(backend="local", devices=2, verbose=0)
    with joblib.parallel_config("fluid", n_jobs=2, executor=made):
        results = parallel(tasks.touch_and_wait, range(2), [str(tmp_path)] * 2, return_as="generator", batch_size=1)
        tasks.wait_for(str(tmp_path / "runs-0"))
        made.close()
        with pytest.raises(FluidError, match="the executor ended while tasks ran"):
            list(results)
        with pytest.raises(FluidError, match="closed"):
            parallel(abs, range(6))


def test_arguments_that_cannot_be_used(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError, match="executor='local'"):
        joblib.parallel_config("fluid", executor="local")
    with pytest.raises(InvalidFieldError, match=r"colour=.*: is no argument .*, nor of fluid\.FluidExecutor"):
        joblib.parallel_config("fluid", colour="red")
    with pytest.raises(InvalidFieldError, match="devices=2: is an option of a new executor"):
        joblib.parallel_config("fluid", executor=executor, devices=2)


_INTERRUPTED = """
import sys, joblib, joblib_tasks, fluid.integrations.joblib
with joblib.parallel_config("fluid", n_jobs=2, devices=2, verbose=0):
    try:
        joblib.Parallel()(joblib.delayed(joblib_tasks.touch_and_wait)(number, sys.argv[1]) for number in range(2))
    except KeyboardInterrupt:
        print(joblib.Parallel()(joblib.delayed(abs)(number) for number in range(3)))
"""


def test_ctrl_c_ends_the_call_and_leaves_the_executor(tmp_path: Path) -> None:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    tasks.wait_for(str(tmp_path / "runs-1"))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert output == "[0, 1, 2]\n"


def test_modules_that_a_batch_needs() -> None:
    from fluid.integrations.joblib.task_pickler import modules_of

    data = pickle.dumps([tasks.process_of, tasks.nested, tasks.UnpicklableError, joblib.Parallel, "os", len])
    assert modules_of(data) == ["builtins", "joblib.parallel", "joblib_tasks"]
