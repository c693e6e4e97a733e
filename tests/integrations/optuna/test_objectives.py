"""Plain objectives of Optuna on real lanes: the same study as study.optimize makes of them, and what is Fluid's own."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.optuna import optimize

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402
from optuna_trainables import curve, train  # noqa: E402
from same_study import assert_same, everything  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


def pruned_curve(trial: Any) -> float:
    config = {"x": trial.suggest_float("x", -10.0, 10.0), "lr": trial.suggest_float("lr", 0.01, 2.0, log=True)}
    for step in range(9):
        trial.report(curve(config, step), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return curve(config, 8)


def branching(trial: Any) -> float:
    """Suggests of all kinds, depending on each other, and keeps notes."""
    kind = trial.suggest_categorical("kind", ["line", "parabola", None])
    layers = trial.suggest_int("layers", 1, 4)
    total = sum(trial.suggest_float(f"width_{layer}", 0.0, 1.0, step=0.25) for layer in range(layers))
    if kind == "parabola":
        total += (trial.suggest_int("power_of_two", 1, 64, log=True) - 8) ** 2
    assert trial.suggest_int("layers", 1, 4) == layers == trial.params["layers"]
    trial.set_user_attr("layers", layers)
    trial.set_user_attr("known", [sorted(trial.params), sorted(trial.distributions), trial.user_attrs, trial.number])
    assert trial.datetime_start is not None and trial.relative_params is not None
    return float(total)


PRUNERS = {
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3),
    "percentile": lambda: optuna.pruners.PercentilePruner(30.0, n_startup_trials=2, interval_steps=2),
    "threshold": lambda: optuna.pruners.ThresholdPruner(upper=40.0, n_warmup_steps=2),
}
SAMPLERS = {
    "tpe": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=4),
    "multivariate": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=4, multivariate=True, group=True),
    "random": lambda: optuna.samplers.RandomSampler(seed=3),
    "quasi": lambda: optuna.samplers.QMCSampler(seed=3),
    "genetic": lambda: optuna.samplers.NSGAIISampler(seed=3, population_size=4),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore::optuna.exceptions.ExperimentalWarning", "ignore:The parameter.*in trial:UserWarning"
)


@pytest.fixture(autouse=True)
def in_force(executor: FluidExecutor) -> None:
    """The executor of the module is in force."""


# -- the same as study.optimize


@pytest.mark.slow
@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner_decides_as_it_does_there(name: str) -> None:
    def make() -> Any:
        return optuna.create_study(study_name="same", sampler=SAMPLERS["tpe"](), pruner=PRUNERS[name]())

    assert {"PRUNED", "COMPLETE"} <= set(states(assert_same(make, pruned_curve)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_suggests_what_it_does_there(name: str) -> None:
    assert_same(lambda: optuna.create_study(sampler=SAMPLERS[name]()), branching)


@pytest.mark.slow
def test_a_grid_ends_the_study_itself() -> None:
    def objective(trial: Any) -> float:
        return float(trial.suggest_int("x", 0, 2) * trial.suggest_int("y", 0, 1))

    grid = {"x": [0, 1, 2], "y": [0, 1]}
    study = assert_same(lambda: optuna.create_study(sampler=optuna.samplers.GridSampler(grid, seed=0)), objective, 20)
    assert len(study.trials) == 6


def test_several_objectives() -> None:
    def objective(trial: Any) -> tuple[float, float]:
        x = trial.suggest_float("x", 0.0, 5.0)
        assert trial.study._is_multi_objective()
        return x**2, (x - 2.0) ** 2

    def make() -> Any:
        return optuna.create_study(directions=["minimize", "maximize"], sampler=SAMPLERS["tpe"]())

    assert_same(make, objective)


def test_what_is_no_value_fails_as_it_does_there(caplog: pytest.LogCaptureFixture) -> None:
    def objective(trial: Any) -> Any:
        returned = [None, "text", [1.0, 2.0], float("nan"), object, 3, True]
        return returned[trial.number]

    def problems(text: str) -> list[str]:
        return [message.partition("error: ")[2].rstrip(".") for message in caplog.messages if text in message]

    expected, got = (optuna.create_study(sampler=SAMPLERS["random"]()) for _ in range(2))
    with caplog.at_level(logging.INFO, "optuna"):
        expected.optimize(objective, n_trials=7)
        theirs = problems("because of the following error")
        caplog.clear()
        optimize(got, objective, n_trials=7, n_jobs=1)
    assert states(got) == ["FAIL"] * 5 + ["COMPLETE"] * 2
    assert everything(got) == everything(expected)
    assert problems("because of the following error") == theirs


def test_bad_suggestions_and_reports_raise_in_the_objective() -> None:
    def objective(trial: Any) -> float:
        for mistake in (
            lambda: trial.suggest_float("x", 2.0, 1.0),
            lambda: trial.report("text", 0),
            lambda: trial.report(1.0, -1),
            lambda: trial.study.best_value,
        ):
            with pytest.raises((ValueError, TypeError)):
                mistake()
        return trial.suggest_float("y", 0.0, 1.0)

    study = optuna.create_study()
    optimize(study, objective, n_trials=1)
    assert states(study) == ["COMPLETE"]


def test_exceptions_fail_their_trial_and_end_the_study_unless_caught() -> None:
    def objective(trial: Any) -> float:
        if trial.number == 1:
            raise LookupError("no data", trial.number)
        return 1.0

    study = optuna.create_study()
    with pytest.raises(LookupError, match="no data") as caught:
        optimize(study, objective, n_trials=4, n_jobs=1)
    assert caught.value.args == ("no data", 1)
    assert "in objective" in str(caught.value.__cause__)
    assert states(study) == ["COMPLETE", "FAIL"]
    assert_same(lambda: optuna.create_study(sampler=SAMPLERS["random"]()), objective, 4, catch=(LookupError,))


@pytest.mark.slow
def test_a_table_has_the_parameters_that_were_suggested(tmp_path: Path) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), direction="maximize")
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        optimize(study, branching, n_trials=4, executor=executor)
        found = executor.handles[0].trials
    assert [dict(trial.config) for trial in found] == [trial.params for trial in study.trials]
    loaded = fluid.load(tmp_path / "run")
    assert [trial.config for trial in loaded.trials] == [trial.params for trial in study.trials]
    assert (loaded.best.value, loaded.best.config) == (study.best_value, study.best_params)


def test_the_live_view_shows_the_best_parameters(executor: FluidExecutor) -> None:
    shown: list[Any] = []

    def look(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        best = executor.status().groups[-1].best
        assert best is not None
        shown.append((best.value, dict(best.config)))

    study = optuna.create_study()
    optimize(study, lambda trial: trial.suggest_float("x", 0.0, 1.0), 3, callbacks=[look], executor=executor)
    assert shown[-1] == (study.best_value, study.best_params)
    assert all(config.keys() <= {"x"} for _, config in shown)


def test_callbacks_stop_and_the_limit_of_trials() -> None:
    def stop(study: Any, trial: Any) -> None:
        if trial.number == 3:
            study.stop()

    assert len(assert_same(optuna.create_study, lambda trial: 1.0, 9, callbacks=[stop]).trials) == 4
    limit = optuna.study.MaxTrialsCallback(5, states=(TrialState.COMPLETE,))
    assert len(assert_same(optuna.create_study, lambda trial: 1.0, 9, callbacks=[limit]).trials) == 5


@pytest.mark.slow
def test_the_positions_of_arguments_are_those_of_study_optimize(capsys: pytest.CaptureFixture[str]) -> None:
    study, seen = optuna.create_study(), []
    optimize(
        study, lambda trial: 1 / trial.number, 3, 60.0, 1, (ZeroDivisionError,), [lambda *_: seen.append(1)], True, True
    )
    assert states(study) == ["FAIL", "COMPLETE", "COMPLETE"] and len(seen) == 3
    assert "3/3" in capsys.readouterr().err  # The progress bar.


# -- what an objective may be, and what it may do


def test_the_study_of_a_trial() -> None:
    def objective(trial: Any) -> float:
        study = trial.study
        if trial.number:
            assert study.best_value == 10.0 and study.best_trial.number == 0 and study.best_params == {}
            assert [one.state.name for one in study.trials] == ["COMPLETE"] * trial.number + ["RUNNING"]
        assert study.user_attrs == {"data": "digits"}
        assert study.direction.name == "MINIMIZE" and study.study_name == "seen"
        for name in ("ask", "tell", "sampler", "pruner", "no_such_thing"):
            with pytest.raises(AttributeError, match=rf"^study\.{name} is not supported"):
                getattr(study, name)
        with pytest.raises(AttributeError, match=r"trial\.no_such_thing is not supported"):
            trial.no_such_thing  # noqa: B018
        study.set_user_attr("data", "digits")
        if trial.number == 2:
            study.stop()
        return 10.0 + trial.number

    study = optuna.create_study(study_name="seen")
    study.set_user_attr("data", "digits")
    optimize(study, objective, n_trials=10, n_jobs=1)
    assert len(study.trials) == 3


def test_closures_methods_and_objects_are_objectives() -> None:
    large = os.urandom(1 << 20)

    class Search:
        def __init__(self, middle: float) -> None:
            self.middle = middle

        def objective(self, trial: Any) -> float:
            def distance() -> float:
                return abs(float(trial.suggest_float("x", 0.0, 1.0)) - self.middle)

            return distance()

        def __call__(self, trial: Any) -> float:
            return self.objective(trial) + (len(large) - (1 << 20))

    for objective in (Search(0.5).objective, Search(0.25), lambda trial: len(large) * trial.suggest_int("x", 1, 3)):
        assert_same(lambda: optuna.create_study(sampler=SAMPLERS["random"]()), objective, 3)


def test_objectives_run_in_lanes_in_the_main_thread() -> None:
    def objective(trial: Any) -> float:
        trial.set_user_attr("pid", os.getpid())
        trial.set_user_attr("main", threading.current_thread() is threading.main_thread())
        with pytest.raises(Exception, match="cannot be pickled"):
            pickle.dumps(trial)
        assert isinstance(trial, optuna.Trial)
        return 0.0

    study = optuna.create_study()
    optimize(study, objective, n_trials=4)
    processes = {trial.user_attrs["pid"] for trial in study.trials}
    assert os.getpid() not in processes and len(processes) == 4, "each has a process of its own"
    assert all(trial.user_attrs["main"] for trial in study.trials)


@pytest.mark.slow
def test_objectives_share_data_and_processes_if_they_are_to(tmp_path: Path) -> None:
    def load(folder: str) -> list[float]:
        with Path(folder, "loads").open("a") as file:
            file.write("load\n")
        return [1.0, 2.0]

    def objective(trial: Any) -> float:
        trial.set_user_attr("pid", os.getpid())
        return sum(fluid.shared(load, str(tmp_path)))

    for isolation, processes in (("trial", 4), ("lane", 1)):
        study = optuna.create_study()
        with FluidExecutor("local", 1, isolation=isolation, run_dir=tmp_path / isolation, verbose=0) as executor:
            optimize(study, objective, n_trials=4, executor=executor)
        assert [trial.value for trial in study.trials] == [3.0] * 4
        assert len({trial.user_attrs["pid"] for trial in study.trials}) == processes
    assert (tmp_path / "loads").read_text().split() == ["load"] * 2, "once in each session, not in each process"


@pytest.mark.slow
def test_several_trials_at_once(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        (tmp_path / str(trial.number)).touch()
        other = tmp_path / str(trial.number ^ 1)
        while not other.exists():
            trial.study.user_attrs  # noqa: B018
        return trial.suggest_float("x", 0.0, 1.0)

    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    optimize(study, objective, n_trials=6, n_jobs=2)
    assert states(study) == ["COMPLETE"] * 6
    batches = optuna.create_study()
    optimize(batches, lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=6, batch_size=3)
    assert states(batches) == ["COMPLETE"] * 6


def test_an_objective_whose_process_dies_starts_again_with_the_same_parameters(tmp_path: Path) -> None:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        first = tmp_path / "first"
        if not first.exists():
            first.write_text(repr(x))
            os.kill(os.getpid(), signal.SIGKILL)
        assert repr(x) == first.read_text()
        return float(x)

    study = optuna.create_study()
    optimize(study, objective, n_trials=1)
    assert states(study) == ["COMPLETE"]


@pytest.mark.slow
def test_an_interrupt_ends_an_objective_in_the_middle(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import optuna, sys, threading, warnings\n"
        "from fluid import FluidExecutor\n"
        "from fluid.integrations.optuna import optimize\n"
        "def objective(trial):\n"
        "    trial.suggest_float('x', 0, 1)\n"
        "    trial.set_user_attr('begun', True)\n"
        "    threading.Event().wait()\n"
        "class Storage(optuna.storages.InMemoryStorage):\n"
        "    def set_trial_user_attr(self, *args):\n"
        "        super().set_trial_user_attr(*args)\n"
        "        print('begun', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    study = optuna.create_study(storage=Storage())\n"
        f"    with FluidExecutor(backend='local', devices=1, verbose=0, run_dir={str(tmp_path / 'run')!r}):\n"
        "        try:\n"
        "            optimize(study, objective, n_trials=3)\n"
        "        except KeyboardInterrupt:\n"
        "            optimize(study, lambda trial: 1.0, n_trials=1)\n"
        "    print([trial.state.name for trial in study.trials])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        run.send_signal(signal.SIGINT)
        assert run.stdout.read() == "['FAIL', 'COMPLETE']\n"


def test_a_trial_that_was_pruned_shows_as_stopped(executor: FluidExecutor) -> None:
    def objective(trial: Any) -> float:
        raise optuna.TrialPruned("hopeless")

    study = optuna.create_study(study_name="pruned")
    optimize(study, objective, n_trials=1)
    assert states(study) == ["PRUNED"]
    entries = map(json.loads, (executor.run_dir / "journal.jsonl").read_text().splitlines())
    assert [entry["state"] for entry in entries if entry["what"] == "ReportEnd"][-2:] == ["DONE", "STOPPED"]


def test_an_infeasible_trial_is_pruned(executor: FluidExecutor) -> None:
    def objective(trial: Any) -> float:
        if trial.suggest_int("width", 1, 2) == 1:
            raise fluid.Infeasible("too narrow")
        return 1.0

    study = optuna.create_study(study_name="infeasible")
    for width in (1, 2):
        study.enqueue_trial({"width": width})
    optimize(study, objective, n_trials=2)
    assert states(study) == ["PRUNED", "COMPLETE"]
    assert executor.handles[-1].name == "infeasible" and executor.handles[-1].failures == {}


# -- mixing objectives and trainables up


def of_trial(trial: Any) -> float:
    return float(trial.suggest_float("x", 0.0, 1.0))


SPACE = {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}


@pytest.mark.parametrize(
    ("trainable", "options", "field", "says"),
    [
        (of_trial, {"metric": "loss"}, "metric", "goes with space="),
        (of_trial, {"budget": 3}, "budget", "goes with space="),
        (train, {}, "trainable", "pass space=, metric= and budget= with a trainable"),
        (type("Model", (), {"step": of_trial}), {}, "trainable", "pass space=, metric= and budget= with a trainable"),
        (3, {}, "trainable", "not callable"),
        (lambda: 1.0, {}, "trainable", "must take a trial as its only argument"),
        (of_trial, {"space": SPACE, "metric": "loss", "budget": 3}, "trainable", "as an objective does"),
        (train, {"space": SPACE, "budget": 3}, "metric", "is needed with space="),
        (train, {"space": SPACE, "metric": "loss"}, "budget", "is needed with space="),
        (lambda trial: threading.Lock(), {"timeout": -1}, "timeout", "at least"),
    ],
)
def test_the_error_says_which_arguments_belong_together(
    trainable: Any, options: dict[str, Any], field: str, says: str
) -> None:
    study = optuna.create_study()
    with pytest.raises(InvalidFieldError, match=says) as caught:
        optimize(study, trainable, n_trials=1, **options)
    assert caught.value.field == field and study.trials == []


def test_an_executor_is_not_a_timeout(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError, match="pass the executor as executor="):
        optimize(optuna.create_study(), of_trial, 1, executor)  # type: ignore[arg-type]


def test_an_objective_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    study = optuna.create_study()
    with warnings.catch_warnings(), pytest.raises(InvalidFieldError, match="cannot be pickled"):
        optimize(study, lambda trial: float(lock.locked()), n_trials=1)
    assert study.trials == []
