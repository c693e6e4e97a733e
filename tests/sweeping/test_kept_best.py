"""The checkpoint of a sweep's best iteration is kept whoever made the executor; and executors that calls are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import curve

import fluid
from fluid import FluidError, FluidExecutor, InvalidFieldError, Search, SweepResult, Trial, TrialGroup
from fluid.loggers import CSV
from fluid.search import uniform

SPACE = {"x": uniform(0.0, 0.1)}


def valley(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """The least loss is that of the second of nine iterations; the state is the number of the iteration."""
    for iteration in range((state or 0) + 1, 10):
        yield {"loss": abs(iteration - 2) + config["x"]}, iteration


def sweep(trainable: Any = valley, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 4, "budget": 9, "algorithm": "random", **options}
    return fluid.run(trainable, SPACE, **arguments)


def new(folder: Path, **options: Any) -> FluidExecutor:
    return FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0, **options)


def passed(folder: Path) -> SweepResult:
    return sweep(executor=new(folder))


def in_force(folder: Path) -> SweepResult:
    with new(folder):
        result = sweep()
        assert result.best.load_checkpoint() == 2, "also while the executor is open"
        return result


def made_by_the_call(folder: Path) -> SweepResult:
    return sweep(run_dir=folder)


@pytest.mark.slow
@pytest.mark.parametrize("run", [passed, in_force, made_by_the_call])
def test_the_best_model_is_kept_whoever_made_the_executor(run: Callable[[Path], SweepResult], tmp_path: Path) -> None:
    for result in (run(tmp_path / "run"), fluid.load(tmp_path / "run")):
        assert (result.best.iteration, result.best.checkpoint_iteration) == (2, 2)
        assert result.best.load_checkpoint() == 2
    kept = {path.parts[-3] for path in tmp_path.glob("run/trials/*/kept/*")}
    assert kept == {result.best.trial_id}, "of the other trials none is"


@pytest.mark.slow
def test_each_sweep_of_an_executor_keeps_its_best_and_plain_groups_keep_none(tmp_path: Path) -> None:
    with new(tmp_path) as executor:
        search = Search("loss", "min")
        group = TrialGroup([Trial(valley, {"x": 0.0}, budget=9, trial_id="plain")], search=search)
        assert executor.submit_trialgroup(group).wait(60.0)
        results = [sweep(name=name) for name in "ab"]
        assert [result.best.load_checkpoint() for result in results] == [2, 2]
    assert not (tmp_path / "trials/plain/kept").exists()


@pytest.mark.slow
def test_a_group_of_ones_own_keeps_its_best_if_its_search_says_so(tmp_path: Path) -> None:
    with new(tmp_path) as executor:
        search = Search("loss", "min", keeps_best=True)
        trials = [Trial(valley, {"x": 0.1 * number}, budget=9, trial_id=f"t{number}") for number in range(3)]
        handle = executor.submit_trialgroup(TrialGroup(trials, search=search))
        assert handle.wait(60.0)
    assert handle.best().trial_id == "t0" and handle.best().load_checkpoint() == 2
    with pytest.raises(InvalidFieldError, match=r"keeps_best=True: .* needs a metric"):
        Search(keeps_best=True)


@pytest.mark.slow
def test_what_the_user_asks_to_keep_is_kept_instead(tmp_path: Path) -> None:
    none = sweep(executor=new(tmp_path / "none", keep="none"))
    assert not list(tmp_path.glob("none/trials/*/kept"))
    with pytest.raises(FluidError, match=r"checkpoint"):
        none.best.load_checkpoint()
    last = sweep(executor=new(tmp_path / "last", keep="last"))
    assert last.best.checkpoint is None and last.best.checkpoint_iteration is None
    problem = r"the checkpoint of iteration 2, the best of trial .*, is not kept; there are those of iterations 9"
    with pytest.raises(FluidError, match=problem):
        last.best.load_checkpoint()
    assert last.best.trial.load_checkpoint() == 9


def test_a_best_without_any_checkpoint_says_how_there_would_be_one(caplog: pytest.LogCaptureFixture) -> None:
    result = sweep(curve)
    with pytest.raises(FluidError, match=r"has no checkpoint: .* a parameter state and yield \(metrics, state\)"):
        result.best.load_checkpoint()
    told = [record.getMessage() for record in caplog.records if "is kept" in record.getMessage()]
    assert told == [
        "no checkpoint of curve is kept: it cannot be saved; to keep its model, give it a parameter state, and yield "
        "(metrics, state)"
    ]


@pytest.mark.slow
def test_a_sweep_that_goes_on_keeps_the_best_of_all_its_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = sweep(run_dir=folder, name="sweep", samples=2)
    second = sweep(run_dir=folder, name="sweep", samples=6, resume=True)
    assert len(first.trials) == 2 and len(second.trials) == 6
    assert second.best.load_checkpoint() == second.best.iteration == 2
    assert len(list(folder.glob("trials/*/kept/*"))) == 1


# -- arguments of an executor, where there is one


@pytest.mark.parametrize("is_passed", [True, False])
def test_what_is_of_an_executor_is_refused_where_there_is_one(is_passed: bool, tmp_path: Path) -> None:
    given = {"run_dir": tmp_path / "other", "loggers": [CSV("tables")], "metrics_port": 0, "devices": 1}
    for name, value in given.items():
        executor = new(tmp_path / name)
        block: AbstractContextManager[Any] = nullcontext() if is_passed else executor
        which = "the one passed" if is_passed else "the one in force"
        with block, pytest.raises(InvalidFieldError, match=rf"{name}=.*{which}: .*FluidExecutor\({name}=\.\.\.\)"):
            sweep(**{name: value}, executor=executor if is_passed else None)


@pytest.mark.slow
def test_a_sweep_that_goes_on_goes_on_in_no_executor_that_there_is(tmp_path: Path) -> None:
    sweep(run_dir=tmp_path / "run", name="sweep", samples=2)
    with pytest.raises(InvalidFieldError, match="resume=True: goes on in an executor made from the folder"):
        sweep(run_dir=tmp_path / "run", name="sweep", resume=True, executor=new(tmp_path / "other"))
    with pytest.raises(InvalidFieldError, match=r"resume=True: needs run_dir, .*, and no other executor"):
        sweep(name="sweep", resume=True, executor=new(tmp_path / "third"))


# -- a call that refuses its arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"space": {"x": [{"k": uniform(0.0, 1.0)}]}},
        {"stop": {"loss": "low"}},
        {"searcher": object()},
        {"callbacks": "none"},
        {"trial_options": {"colour": 1}},
        {"resume": True},
        {"run_dir": "other"},
        {"n_trials": 3},
    ],
)
def test_a_call_that_refuses_its_arguments_leaves_nothing_open(wrong: dict[str, Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"space": SPACE, "metric": "loss", "mode": "min", **wrong}
    executor = new(tmp_path)
    with pytest.raises((FluidError, TypeError)):
        fluid.run(valley, **arguments, executor=executor)
    assert executor.closed
    with pytest.raises(FluidError, match=r"the executor is closed: .* use it in a with block"):
        sweep(executor=executor)


def test_a_call_that_refuses_its_arguments_leaves_an_executor_in_force_open(tmp_path: Path) -> None:
    with new(tmp_path) as executor:
        for given in (None, executor):
            with pytest.raises(InvalidFieldError):
                sweep(budget=0, executor=given)
        assert not executor.closed


@pytest.mark.slow
def test_a_call_that_refuses_its_arguments_leaves_an_executor_open_that_another_sweep_uses(tmp_path: Path) -> None:
    executor = new(tmp_path)

    class Calls(fluid.TrialListener):
        def on_start(self, trial_id: str) -> None:
            with pytest.raises(InvalidFieldError):
                sweep(budget=0, executor=executor)

    result = sweep(executor=executor, samples=2, callbacks=[Calls()])
    assert [trial.state for trial in result.trials] == ["DONE", "DONE"] and executor.closed
