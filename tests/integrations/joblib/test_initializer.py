"""An initializer is called in each process before its first task, as in joblib's own processes."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor, InvalidFieldError
from fluid.session.listeners import TrialFailedError

pytestmark = pytest.mark.frameworks("joblib", "numpy")
joblib = pytest.importorskip("joblib")
sys.path.append(str(Path(__file__).parent))

import joblib_tasks as tasks  # noqa: E402


@pytest.fixture(scope="module")
def executor() -> Iterator[FluidExecutor]:
    import fluid.integrations.joblib  # noqa: F401

    with FluidExecutor(backend="local", devices=2, verbose=0) as made:
        yield made


def begun(**options: Any) -> dict[int, list[Any]]:
    """What initializers were called with in each process that ran tasks, all told."""
    calls = (joblib.delayed(tasks.begun_here)(number) for number in range(20))
    found = joblib.Parallel(batch_size=1, **options)(calls)
    return dict(found)


def test_it_is_called_once_in_a_process(executor: FluidExecutor) -> None:
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor, initializer=tasks.begin, initargs=(1, "x")):
        assert {tuple(each) for each in [*begun().values(), *begun().values()]} == {(1,)}
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor):
        assert all(each in ([1], []) for each in begun().values())
        second = begun(initializer=tasks.begin, initargs=(2,))  # Parallel's own.
    assert all(each[-1] == 2 and each.count(2) == 1 for each in second.values())
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor, initializer=tasks.begin, initargs=(1, "x")):
        assert all(each[-1] == 1 for each in begun().values())


def test_what_it_raises_ends_the_call(executor: FluidExecutor) -> None:
    with (
        joblib.parallel_config("fluid", n_jobs=2, executor=executor, initializer=tasks.fail_to_begin),
        pytest.raises(TrialFailedError, match="no licence"),
    ):
        begun()
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor):
        assert begun()


def test_it_must_be_a_function(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError, match="initializer='begin': must be a function"):
        joblib.parallel_config("fluid", executor=executor, initializer="begin")
    with (
        joblib.parallel_config("fluid", n_jobs=2, executor=executor),
        pytest.raises(InvalidFieldError, match="initializer=3: must be a function"),
    ):
        begun(initializer=3)


def test_filters_of_warnings_hold_in_tasks(executor: FluidExecutor) -> None:
    with joblib.parallel_config("fluid", n_jobs=2, executor=executor):
        calls = [joblib.delayed(tasks.warn_of)(number) for number in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert joblib.Parallel()(calls) == [0, 1, 2, 3]
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(RuntimeWarning, match="number"):
                joblib.Parallel()(calls)


def test_proxies_of_a_manager_of_this_process_work_in_lanes(executor: FluidExecutor) -> None:
    with multiprocessing.Manager() as manager:
        shared = manager.dict()
        options = {"initializer": tasks.put, "initargs": (shared, "begun")}
        with joblib.parallel_config("fluid", n_jobs=2, executor=executor, **options):
            joblib.Parallel()(joblib.delayed(tasks.put)(shared, number) for number in range(4))
        assert dict(shared) == {number: number for number in ("begun", *range(4))}
