"""What calls say that cannot be made: in the user's own terms, and without inner frames."""

from __future__ import annotations

import ast
import inspect
import logging
import pickle
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, Search, Sharing, Trial, TrialGroup
from fluid.backends.base import ScalingLimits
from fluid.backends.lanes.pool import require_lane_options
from fluid.directions import mode_word
from fluid.errors import FluidError, WrongCallError, parse_duration, require_one_of
from fluid.integrations.options import require_options
from fluid.search import choice, loguniform, uniform
from fluid.user_calls import hint, names_of, user_call

SPACE = {"lr": [0.1, 0.2]}


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"loss": config["lr"]}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """In force for the tests that need lanes."""
    folder = tmp_path_factory.mktemp("fluid") / "run"
    made = FluidExecutor("local", 1, verbose=0, run_dir=folder)
    yield made
    made.close()


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(FluidError) as raised:
        call(*args, **kwargs)
    inner = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if "/fluid/" in frame.filename]
    assert len(inner) <= 2, "the user sees frames of Fluid's"
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    return str(raised.value)


# -- names of arguments


@pytest.mark.parametrize(
    ("call", "arguments", "meant"),
    [
        (fluid.run, {"num_samples": 3}, "samples=?"),
        (fluid.run, {"n_trials": 3}, "samples=?"),
        (fluid.run, {"n_iter": 3}, "samples=?"),
        (fluid.run, {"max_trials": 3}, "samples=?"),
        (fluid.run, {"objective": train}, "trainable=?"),
        (fluid.run, {"param_space": {}}, "space=?"),
        (fluid.run, {"direction": "minimize"}, "mode=?"),
        (fluid.run, {"scheduler": "asha"}, "algorithm=?"),
        (fluid.run, {"max_t": 9}, "budget=?"),
        (fluid.run, {"num_epochs": 9}, "budget=?"),
        (fluid.run, {"grace_period": 9}, "min_budget=?"),
        (fluid.run, {"timeout": 60}, "time_budget_s=?"),
        (fluid.run, {"study_name": "a"}, "name=?"),
        (fluid.run, {"storage": "a"}, "run_dir=?"),
        (fluid.run, {"n_jobs": 4}, "devices=?"),
        (fluid.run, {"device": "cuda"}, "devices=?"),
        (fluid.run, {"backend": "ray"}, "executor=fluid.FluidExecutor(backend=...)?"),
        (fluid.run, {"max_retries": 2}, "executor=fluid.FluidExecutor(max_failures=...)?"),
        (fluid.run, {"resources_per_trial": {"gpu": 1}}, "trial_options={'devices': ...}?"),
        (fluid.run, {"chdir": True}, "trial_options={'chdir': ...}?"),
        (fluid.run, {"sampels": 3}, "samples=?"),
        (FluidExecutor, {"n_jobs": 4}, "devices=?"),
        (FluidExecutor, {"device": "cuda"}, "devices=?"),
        (FluidExecutor, {"max_workers": 4}, "devices=?"),
        (Trial, {"trainable": train, "params": {}}, "config=?"),
        (TrialGroup, {"experiments": []}, "trials=?"),
        (FluidExecutor, {"samples": 4}, "fluid.run(..., samples=...)?"),
        (FluidExecutor, {"storage": "a"}, "run_dir=?"),
        (FluidExecutor, {"logger": None}, "loggers=?"),
        (Trial, {"trainable": train, "max_epochs": 4}, "budget=?"),
        (Trial, {"objective": train}, "trainable=?"),
        (TrialGroup, {"metric": "loss"}, "fluid.run(..., metric=...)?"),
        (Search, {"direction": "min"}, "mode=?"),
        (Sharing, {"pack": "off"}, "packing=?"),
        (fluid.load, {"run_dir": "x", "direction": "min"}, "mode=?"),
        (fluid.report, {"loss": 0.5}, "report({'loss': ...})?"),
    ],
)
def test_arguments_by_the_names_that_other_libraries_give_them(call: Any, arguments: Any, meant: str) -> None:
    unknown = list(arguments)[-1]
    text = refused(call, **arguments)
    assert text == f"{call.__name__}() got an unexpected keyword argument {unknown!r}: did you mean {meant}"
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        call(**arguments)


def test_integrations_know_the_names_too() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("optuna")
    from fluid.integrations.optuna import optimize
    from fluid.integrations.sklearn import FluidSearchCV

    assert refused(FluidSearchCV, None, {}, n_iter=9).endswith("'n_iter': did you mean samples=?")
    assert refused(FluidSearchCV, None, param_distributions={}).endswith("did you mean space=?")
    assert refused(optimize, None, train, num_samples=9).endswith("'num_samples': did you mean n_trials=?")
    assert list(inspect.signature(FluidSearchCV).parameters)[:2] == ["estimator", "space"]
    with pytest.raises(InvalidFieldError, match=r"is no argument .* nor of fluid.run: did you mean samples=\?"):
        require_options(fluid.run, {"num_samples": 3})


def test_an_argument_that_means_nothing_gets_no_hint() -> None:
    assert refused(fluid.run, train, SPACE, metric="loss", zzz=1).endswith("unexpected keyword argument 'zzz'")
    assert hint("zzz", ["samples"]) == ""


def test_too_few_and_too_many_arguments() -> None:
    wrong = "write run(trainable, space, metric=...)"
    assert refused(fluid.run, train, SPACE, "loss") == f"run(): too many positional arguments: {wrong}"
    assert refused(fluid.run, train, SPACE) == f"run(): missing a required argument: 'metric': {wrong}"
    assert refused(choice, 1, 2, 3).endswith("write choice(values)")
    assert refused(uniform, 1.0).endswith("write uniform(low, high)")
    error = WrongCallError("run(): no")
    assert str(pickle.loads(pickle.dumps(error))) == "run(): no"


def test_signatures_are_as_they_are_written() -> None:
    assert list(inspect.signature(fluid.run).parameters)[:3] == ["trainable", "space", "metric"]
    assert list(inspect.signature(Trial).parameters)[:3] == ["trainable", "config", "budget"]
    assert "budget_usd" in names_of(FluidExecutor) and "devices" in names_of(FluidExecutor)
    assert "flat" not in names_of(FluidExecutor) and "self" not in names_of(FluidExecutor)


# -- values


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "27"}, "budget='27': must be a number, without quotes"),
        ({"samples": "nine"}, "samples='nine': must be a number"),
        ({"algorithm": "bayesian"}, "one of asha, bohb, grid, hyperband, pbt, random, sha, tpe; did you mean 'tpe'?"),
        ({"algorithm": "random_search"}, "did you mean 'random'?"),
        ({"algorithm": "TuneBOHB"}, "did you mean 'bohb'?"),
        ({"mode": "auto"}, "mode='auto': must be 'min' (less is better), 'max' (more is better), or None"),
        ({"time_budget_s": "soon"}, 'must be seconds of at least 0, or text such as "2h"'),
        ({"executor": "local"}, "executor='local': must be a FluidExecutor, such as FluidExecutor(devices=2)"),
        ({"executor": FluidExecutor}, "must be a FluidExecutor, such as FluidExecutor(devices=2)"),
        ({"trial_options": {"gpus": 1}}, "did you mean devices=?"),
        ({"resume": True}, "resume=True: needs run_dir, the folder of the sweep"),
    ],
)
def test_values(options: dict[str, Any], text: str) -> None:
    assert text in refused(fluid.run, train, SPACE, metric="loss", **{"mode": "min", **options})


def test_trainables() -> None:
    assert "the space comes behind it" in refused(fluid.run, SPACE, train, metric="loss")
    assert "pass train, and do not call it" in refused(fluid.run, train({"lr": 1}), SPACE, metric="loss")


def test_no_gpu_says_why() -> None:
    for devices in ("cuda", "cuda:0", [fluid.Device(0, kind="gpu")]):
        text = refused(FluidExecutor, "local", devices)
        assert "there are 0 GPUs: there is no NVIDIA driver" in text or "CUDA_VISIBLE_DEVICES" in text


def test_what_cannot_be_pickled_is_said_in_one_line(executor: FluidExecutor) -> None:
    text = refused(executor.submit_trialgroup, TrialGroup([Trial(train, {"db": threading.Lock()})]))
    assert "config['db']=" in text and "cannot be pickled" in text


@pytest.mark.parametrize("said", ["min", "minimize", "Minimise", "MINIMIZE", " minimum ", "lower_is_better"])
def test_modes_in_other_words(said: str) -> None:
    assert mode_word("mode", said) == "min"
    assert Search("loss", said).mode == "min"
    assert Search("loss", "min", besides=[("speed", said)]).besides == (("speed", "min"),)


def test_optunas_direction_is_a_mode() -> None:
    optuna = pytest.importorskip("optuna")
    assert mode_word("mode", optuna.study.StudyDirection.MAXIMIZE) == "max"
    with pytest.raises(InvalidFieldError, match="mode=<StudyDirection"):
        mode_word("mode", optuna.study.StudyDirection.NOT_SET)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1h", 3600.0),
        ("90s", 90.0),
        ("1h 30m", 5400.0),
        ("1h30min", 5400.0),
        ("1.5 hours", 5400.0),
        ("2 days", 172800.0),
        ("500ms", 0.5),
        ("90", 90.0),
        (timedelta(minutes=2), 120.0),
        (3, 3.0),
    ],
)
def test_times(value: Any, seconds: float) -> None:
    assert parse_duration("timeout", value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "h", "1x", "1 h later", True, None, 0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(InvalidFieldError, match="timeout="):
        parse_duration("timeout", value)


def test_times_are_text_wherever_they_are_taken(tmp_path: Path) -> None:
    assert Trial(train, iteration_timeout_s="90s").iteration_timeout_s == 90.0
    assert Search("loss", "min", time_budget_s="1h").time_budget_s == 3600.0
    assert require_lane_options(grace="2s", lane_policy="fair", process_group="torch") == 2.0
    assert ScalingLimits.of(None, "5m").idle_timeout_s == 300.0
    with FluidExecutor("local", 1, verbose=0, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 1.0})]))
        assert handle.wait("1m") and not handle.await_cleanup("30s")
        result = fluid.run(train, SPACE, metric="loss", algorithm="grid", time_budget_s="5 min", mode="minimise")
        assert result.mode == "min" and result.best.config == {"lr": 0.1}
        assert executor.drain_all("10s")


def test_one_of_several_names() -> None:
    with pytest.raises(InvalidFieldError, match=r"must be one of fifo, portfolio; did you mean 'portfolio'\?"):
        require_one_of("planner", "Portfoli", ("portfolio", "fifo"))


# -- names of attributes


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("quniform", "uniform(low, high, step=...)"),
        ("log_uniform", "loguniform(low, high)"),
        ("Categorical", "choice([a, b])"),
        ("Int", "randint(low, high)"),
    ],
)
def test_distributions_by_other_names(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(fluid.search, name)
    assert str(raised.value) == f"module 'fluid.search' has no attribute {name!r}: did you mean {meant}?"


def test_functions_by_other_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'create_study': did you mean fluid.integrations.optuna"):
        _ = fluid.create_study  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'fluid' has no attribute 'zzz'$"):
        _ = fluid.zzz  # type: ignore[attr-defined]


def test_parts_of_a_result_by_other_names(executor: FluidExecutor) -> None:
    handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.1})], search=Search("loss")))
    assert handle.wait(60)
    result: Any = fluid.load(executor.run_dir)
    for name, meant in {
        "best_params": "best.config",
        "best_value": "best.value",
        "get_best_result": "best",
        "df": "dataframe()",
        "best_estimator_": "best.load_checkpoint()",
    }.items():
        with pytest.raises(AttributeError) as raised:
            getattr(result, name)
        assert str(raised.value) == f"'SweepResult' object has no attribute {name!r}: did you mean {meant}?"
    with pytest.raises(AttributeError, match=r"'BestTrial' object has no attribute 'params': did you mean config\?"):
        _ = result.best.params
    assert pickle.loads(pickle.dumps(result)).best.config == {"lr": 0.1}
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        _ = result.zzz


# -- frames


def test_frames_of_a_bug_stay() -> None:
    @user_call
    def broken() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError) as raised:
        broken()
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-2:] == ["called", "broken"]


def test_frames_of_the_users_code_stay() -> None:
    """An error about an argument that passed code of the user's may be that code's."""

    def users(study: Any) -> None:
        loguniform(0, 1)

    with pytest.raises(InvalidFieldError) as raised:
        user_call(users)(None)
    assert "users" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


def test_the_cause_stays_where_the_users_code_has_raised_it(executor: FluidExecutor) -> None:
    class Unwilling:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    with pytest.raises(InvalidFieldError) as raised:
        executor.submit_trialgroup(TrialGroup([Trial(train, {"it": Unwilling()})]))
    cause = raised.value.__cause__
    assert cause is not None and "__reduce__" in [one.name for one in traceback.extract_tb(cause.__traceback__)]


# -- what all messages have in common


def test_no_message_names_a_page_of_a_checkout() -> None:
    """Who has installed Fluid by pip has no docs folder: a message says the sentence itself."""
    page, named = re.compile(r"docs/\w+\.md"), []
    for folder in ("fluid", "integrations"):
        for path in (Path(fluid.__file__).parents[1] / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if not page.search(text):
                continue
            tree = ast.parse(text)
            prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            named += [
                f"{path}:{node.lineno}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
                if page.search(node.value)
            ]
    assert named == []


def test_a_sweep_that_is_wrong_says_nothing_of_resuming(tmp_path: Path) -> None:
    made = FluidExecutor("local", 1, verbose=0, run_dir=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr(logging.getLogger("fluid.session"), "warning", lambda text, *args: told.append(text % args))
        text = refused(fluid.run, train, {"lr": uniform(0, 1)}, metric="accuracy", samples=99, executor=made)
    assert text.startswith("metric='accuracy': was not reported")
    assert told and not any("resume" in line or "dropped" in line for line in told)
    closed = refused(fluid.run, train, SPACE, metric="loss", executor=made)
    assert "a call closes the executor that it is given at its end; use it in a with block" in closed
