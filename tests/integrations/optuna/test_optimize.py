"""Studies of Optuna on real lanes: the behaviour of study.optimize, and what Fluid adds."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fluid._clock import VirtualClock
from fluid.engine import tuning
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import IN_FORCE, FluidExecutor
from fluid.integrations.optuna import optimize
from fluid.session.listeners import LimitReachedError, TrialFailedError

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from optuna_trainables import (  # noqa: E402
    curve,
    fail_above_one,
    give_up_above_one,
    report_what_is_asked,
    sleep_at_the_last,
    train,
    train_both,
    train_for_ever,
    wait_for_a_file,
)

ROOT = Path(__file__).resolve().parents[3]
SPACE = {"x": FloatDistribution(-10.0, 10.0), "lr": FloatDistribution(0.01, 2.0, log=True)}


def suggest(trial: Any) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", -10.0, 10.0), "lr": trial.suggest_float("lr", 0.01, 2.0, log=True)}


def run(study: Any, executor: FluidExecutor, trainable: Any = train, **options: Any) -> Any:
    """Optimizes with the arguments that most tests share."""
    optimize(
        study, trainable, executor=executor, **{"space": SPACE, "metric": "loss", "budget": 9, "n_trials": 4, **options}
    )
    return study


def enqueued(*values: float, **options: Any) -> Any:
    """A study whose first trials have these values of ``x``."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), **options)
    for value in values:
        study.enqueue_trial({"x": value})
    return study


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


# --- The same as study.optimize

PRUNERS = {
    "none": lambda: optuna.pruners.NopPruner(),
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    "percentile": lambda: optuna.pruners.PercentilePruner(30.0, n_startup_trials=2, interval_steps=2),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3),
    "threshold": lambda: optuna.pruners.ThresholdPruner(upper=40.0, n_warmup_steps=2),
    "patient": lambda: optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(n_startup_trials=2), patience=0),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PatientPruner is experimental")
@pytest.mark.parametrize("space", [SPACE, suggest], ids=["distributions", "function"])
@pytest.mark.parametrize("name", PRUNERS)
def test_one_trial_at_a_time_gives_what_study_optimize_gives(executor: FluidExecutor, name: str, space: Any) -> None:
    def objective(trial: Any) -> float:
        config = suggest(trial)
        for step in range(9):
            trial.report(curve(config, step), step)
            if step < 8 and trial.should_prune():  # Fluid does not ask after the last iteration.
                raise optuna.TrialPruned
        return curve(config, 8)

    def study() -> Any:
        sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=4)
        return optuna.create_study(study_name="same", sampler=sampler, pruner=PRUNERS[name]())

    expected = study()
    expected.optimize(objective, n_trials=12)
    got = run(study(), executor, space=space, n_trials=12, n_jobs=1)
    if name != "none":
        assert {"PRUNED", "COMPLETE"} <= set(states(expected)), "nothing was compared"
    assert states(got) == states(expected)
    for mine, theirs in zip(got.trials, expected.trials, strict=True):
        assert mine.params == theirs.params
        assert mine.values == theirs.values
        assert mine.intermediate_values == theirs.intermediate_values


@pytest.mark.slow
def test_maximizing(executor: FluidExecutor) -> None:
    study = run(optuna.create_study(direction="maximize"), executor, n_trials=6)
    assert study.best_value == max(trial.value for trial in study.trials)
    assert study.best_value == curve(study.best_params, 8)


@pytest.mark.slow
def test_a_trial_that_is_pruned_ends_there(executor: FluidExecutor) -> None:
    # Its budget would take a quarter of an hour.
    pruner = optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=3)
    study = run(enqueued(5.0, 6.0, pruner=pruner), executor, train_for_ever, budget=500_000, n_trials=2)
    assert states(study) == ["PRUNED", "PRUNED"]
    assert [sorted(trial.intermediate_values) for trial in study.trials] == [[0, 1, 2, 3]] * 2
    assert [trial.value for trial in study.trials] == [5.0, 6.0]


def test_the_pruner_is_not_asked_after_the_last_iteration(executor: FluidExecutor) -> None:
    asked: list[int] = []

    class Strict(optuna.pruners.BasePruner):  # type: ignore[misc]
        def prune(self, study: Any, trial: Any) -> bool:
            asked.append(trial.last_step)
            return True

    study = run(enqueued(5.0, 6.0, pruner=Strict()), executor, budget=1, n_trials=2)
    assert states(study) == ["COMPLETE", "COMPLETE"] and asked == []
    assert [sorted(trial.intermediate_values) for trial in study.trials] == [[0], [0]]
    study = run(enqueued(5.0, pruner=Strict()), executor, budget=2, n_trials=1)
    assert states(study) == ["PRUNED"] and asked == [0]


def test_a_trial_may_prune_itself(executor: FluidExecutor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "optuna"):
        study = run(enqueued(0.5, 5.0), executor, give_up_above_one, n_trials=2)
    assert states(study) == ["COMPLETE", "PRUNED"]
    assert "Trial 1 pruned. hopeless" in caplog.messages
    assert any(message.startswith("Trial 0 finished with value: 0.5 and parameters") for message in caplog.messages)


def test_a_function_may_prune_what_it_suggests(executor: FluidExecutor) -> None:
    def picky(trial: Any) -> dict[str, Any]:
        config = suggest(trial)
        if config["x"] > 1.0:
            raise optuna.TrialPruned("seen already")
        return {**config, "reports": [{"loss": config["x"]}]}

    seen: list[int] = []
    study = run(
        enqueued(5.0, 0.5, 5.0, 0.25),
        executor,
        report_what_is_asked,
        space=picky,
        batch_size=2,
        callbacks=[lambda _, trial: seen.append(trial.number)],
    )
    assert states(study) == ["PRUNED", "COMPLETE", "PRUNED", "COMPLETE"]
    assert sorted(seen) == [0, 1, 2, 3]


def test_several_objectives(executor: FluidExecutor) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    run(study, executor, train_both, metric=["loss", "size"], budget=3, n_trials=3)
    assert [trial.values for trial in study.trials] == [[(trial.params["x"] - 2.0) ** 2, 2.0] for trial in study.trials]
    assert [trial.intermediate_values for trial in study.trials] == [{}] * 3


# --- How many at once


def watched(study: Any, executor: FluidExecutor, **options: Any) -> list[tuple[int, int]]:
    """Records after each trial how many are still running, and how many there are."""
    seen: list[tuple[int, int]] = []

    def note(study: Any, _: Any) -> None:
        seen.append((len(study.get_trials(states=(TrialState.RUNNING,))), len(study.trials)))

    run(study, executor, callbacks=[note], **options)
    return seen


def test_each_trial_that_ends_is_replaced(executor: FluidExecutor) -> None:
    before = len(executor.handles)
    seen = watched(optuna.create_study(study_name="open"), executor, n_trials=7)
    assert seen == [(1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (0, 7)]
    assert [handle.name for handle in executor.handles[before:]] == ["open"]


def test_as_many_at_once_as_wanted(executor: FluidExecutor) -> None:
    seen = watched(optuna.create_study(), executor, n_trials=6, n_jobs=4)
    assert seen == [(3, 4), (3, 5), (3, 6), (2, 6), (1, 6), (0, 6)]


def test_batches_are_groups(executor: FluidExecutor) -> None:
    before = len(executor.handles)
    seen = watched(optuna.create_study(study_name="apart"), executor, n_trials=7, batch_size=3)
    assert seen == [(2, 3), (1, 3), (0, 3), (2, 6), (1, 6), (0, 6), (0, 7)]
    names = [handle.name for handle in executor.handles[before:]]
    assert names == ["apart, batch 1", "apart, batch 2", "apart, batch 3"]
    (owner,) = {group.owner for group in executor.status().groups[before:]}
    assert owner is not None and owner.startswith("apart-"), "they are scheduled as one"


@pytest.mark.slow
def test_batches_of_a_seeded_sampler_are_the_same_each_time(executor: FluidExecutor) -> None:
    def params() -> list[Any]:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=4))
        return [trial.params for trial in run(study, executor, n_trials=12, batch_size=4).trials]

    assert params() == params()


def test_what_is_left_of_a_trial_is_dropped(executor: FluidExecutor) -> None:
    run(optuna.create_study(study_name="dropped"), executor)
    assert executor.handles[-1].name == "dropped"
    assert executor.handles[-1].states == {}


# --- Which executor


@pytest.mark.slow
def test_an_executor_outside_of_a_with_block_is_closed(tmp_path: Path) -> None:
    own = FluidExecutor(backend="local", devices=1, run_dir=tmp_path, verbose=0)
    study = run(optuna.create_study(), own, n_trials=2)
    with pytest.raises(FluidError, match="closed"):
        own.status()
    with pytest.raises(FluidError, match="closed"):
        run(study, own)
    assert states(study) == ["COMPLETE", "COMPLETE"]


def test_the_executor_in_force_is_used(executor: FluidExecutor) -> None:
    before = len(executor.handles)
    study = optuna.create_study()
    optimize(study, train, 2, space=SPACE, metric="loss", budget=2)
    assert len(executor.handles) == before + 1
    assert IN_FORCE.has(executor)
    assert len(executor.devices) == 2


@pytest.mark.slow
def test_an_executor_that_is_closed_meanwhile_fails_what_runs(tmp_path: Path) -> None:
    study = enqueued(5.0, 6.0)
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path, verbose=0) as own:

        class Closing(optuna.pruners.BasePruner):  # type: ignore[misc]
            def prune(self, study: Any, trial: Any) -> bool:
                own.close()
                return False

        study.pruner = Closing()
        with pytest.raises(FluidError, match="executor"):
            run(study, own, train_for_ever, budget=500_000)
    assert states(study) == ["FAIL", "FAIL"]


@pytest.mark.slow
def test_a_deadline_ends_the_study_with_an_error_of_its_own(tmp_path: Path) -> None:
    study = enqueued(5.0, 6.0)
    with (
        FluidExecutor(backend="local", devices=2, run_dir=tmp_path, verbose=0, deadline=2.0) as own,
        pytest.raises(LimitReachedError, match="the deadline of 2 s has come"),
    ):
        run(study, own, train_for_ever, budget=500_000)
    assert states(study) == ["FAIL", "FAIL"]


# --- Failures


def test_a_failed_trial_ends_the_study_with_what_it_raised(executor: FluidExecutor, tmp_path: Path) -> None:
    log = tmp_path / "log"
    space = {"x": SPACE["x"], "log": CategoricalDistribution([str(log)])}
    study = enqueued(0.5, 5.0, *[0.5] * 98)
    called: list[int] = []
    with pytest.raises(ValueError, match="the loss is NaN") as caught:
        run(study, executor, fail_above_one, space=space, n_jobs=2, callbacks=[lambda _, t: called.append(t.number)])
    assert isinstance(caught.value.__cause__, TrialFailedError)
    assert "fail_above_one" in str(caught.value.__cause__)  # The traceback of the lane.
    # The trials under way were finished, no others were begun, and none was tried again.
    begun = [trial for trial in study.trials if trial.state is not TrialState.WAITING]
    assert begun[1].state is TrialState.FAIL
    others = [trial for trial in begun if trial.number != 1]
    assert {trial.state for trial in others} == {TrialState.COMPLETE}
    assert sorted(called) == [trial.number for trial in others]
    assert log.read_text() == "begun\n" * len(begun)
    assert len(begun) < 100


@pytest.mark.parametrize("catch", [ValueError, (KeyError, ValueError), [Exception]], ids=["one", "several", "list"])
def test_what_is_caught_does_not_end_the_study(
    executor: FluidExecutor, tmp_path: Path, catch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    space = {"x": SPACE["x"], "log": CategoricalDistribution([str(tmp_path / "log")])}
    called: list[str] = []
    study = run(
        enqueued(0.5, 5.0, 0.25, 6.0),
        executor,
        fail_above_one,
        space=space,
        catch=catch,
        callbacks=[lambda _, trial: called.append(trial.state.name)],
    )
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "FAIL"]
    assert sorted(called) == ["COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert sum("because of the following error: ValueError('the loss is NaN')" in text for text in caplog.messages) == 2
    assert "fluid.session" not in [record.name for record in caplog.records]  # Each failure is told once.


def test_a_function_that_raises_fails_its_trial(executor: FluidExecutor) -> None:
    def broken(trial: Any) -> dict[str, Any]:
        raise LookupError("no data")

    study = optuna.create_study()
    with pytest.raises(LookupError, match="no data"):
        run(study, executor, space=broken)
    assert states(study) == ["FAIL"]
    run(study, executor, space=broken, n_trials=2, catch=LookupError)
    assert states(study) == ["FAIL"] * 3


def test_a_sampler_that_raises_ends_the_study_once_all_have_ended(executor: FluidExecutor) -> None:
    class Broken(optuna.samplers.RandomSampler):  # type: ignore[misc]
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            if trial.number == 2:
                raise LookupError("no more")
            return super().sample_independent(study, trial, name, distribution)

    study = optuna.create_study(sampler=Broken(seed=0))
    with pytest.raises(LookupError, match="no more"):
        run(study, executor, n_trials=9)
    assert states(study)[:2] == ["COMPLETE", "COMPLETE"]
    assert len(study.trials) == 3


def test_a_config_must_be_a_dict_and_cross_to_a_lane(executor: FluidExecutor) -> None:
    study = optuna.create_study()
    with pytest.raises(InvalidFieldError, match="must return the config"):
        run(study, executor, space=lambda trial: trial.suggest_float("x", 0.0, 1.0))
    for options in ({"batch_size": 2}, {"n_jobs": 1}):
        with pytest.raises(InvalidFieldError, match=r"config\['lock'\]"):
            run(study, executor, space=lambda trial: {"lock": sys._getframe()}, **options)
    assert states(study) == ["FAIL"] * 4


def reporting(*reports: dict[str, Any]) -> Any:
    return lambda trial: {"reports": list(reports), "x": trial.suggest_float("x", 0.0, 1.0)}


def test_a_metric_that_is_never_reported(executor: FluidExecutor) -> None:
    study = optuna.create_study()
    with pytest.raises(
        InvalidFieldError, match="metric='loss': is not among the metrics that trial 0 reported: accuracy, los"
    ):
        run(study, executor, report_what_is_asked, space=reporting({"los": 1.0}, {"accuracy": 1.0}), n_trials=1)
    with pytest.raises(InvalidFieldError, match="trial 1 reported: nothing"):
        run(study, executor, report_what_is_asked, space=reporting(), n_trials=1)
    assert states(study) == ["FAIL", "FAIL"]


def test_a_metric_may_be_left_out_of_iterations(executor: FluidExecutor) -> None:
    reports = ({"epoch": 1}, {"loss": 3.0}, {"loss": None}, {"loss": 2.0}, {"epoch": 5})
    study = run(optuna.create_study(), executor, report_what_is_asked, space=reporting(*reports), n_trials=1)
    assert study.trials[0].intermediate_values == {1: 3.0, 3: 2.0}
    assert study.trials[0].value == 2.0


def test_a_value_that_is_no_number(executor: FluidExecutor, caplog: pytest.LogCaptureFixture) -> None:
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    run(study, executor, report_what_is_asked, space=reporting({"loss": float("nan")}), n_trials=2)
    assert states(study) == ["FAIL", "FAIL"]  # As with study.optimize, it does not end the study.
    assert any("The value nan is not acceptable" in text for text in caplog.messages)
    with pytest.raises(ValueError, match="could not convert string to float"):
        run(study, executor, report_what_is_asked, space=reporting({"loss": "small"}), n_trials=2)
    assert {*states(study)} == {"FAIL"}


# --- The end of a study


def test_callbacks_may_stop_the_study(executor: FluidExecutor) -> None:
    most = optuna.study.MaxTrialsCallback(3, states=(TrialState.COMPLETE,))
    study = run(optuna.create_study(), executor, n_trials=None, n_jobs=1, callbacks=[most])
    assert states(study) == ["COMPLETE"] * 3
    run(study, executor, n_trials=None, batch_size=2, callbacks=[lambda study, _: study.stop()])
    assert states(study) == ["COMPLETE"] * 5


def test_samplers_may_stop_the_study(executor: FluidExecutor) -> None:
    space = {"x": [0.0, 1.0, 2.0, 3.0], "lr": [0.5]}
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(space))
    run(study, executor, n_trials=None, batch_size=2)
    assert sorted(trial.params["x"] for trial in study.trials) == space["x"]


def test_a_callback_that_raises_ends_the_study_once_all_have_ended(executor: FluidExecutor) -> None:
    def broken(study: Any, trial: Any) -> None:
        raise LookupError(f"trial {trial.number}")

    study = optuna.create_study()
    with pytest.raises(LookupError, match="trial"):
        run(study, executor, callbacks=[broken], n_trials=9)
    assert states(study) == ["COMPLETE"] * 2


def test_no_nesting(executor: FluidExecutor) -> None:
    study = optuna.create_study()
    with pytest.raises(RuntimeError, match="Nested"):
        run(study, executor, callbacks=[lambda study, _: run(study, executor)])
    with pytest.raises(RuntimeError, match="Nested"):
        study.optimize(lambda trial: run(study, executor), n_trials=1)
    with pytest.raises(RuntimeError, match="supposed to be invoked inside"):
        study.stop()


def test_the_timeout_is_for_new_trials(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(5.0)
    monkeypatch.setattr(executor.session, "clock", clock)

    def pass_time(study: Any, trial: Any) -> None:
        clock.advance_to(clock.now() + 4.0)

    study = run(optuna.create_study(), executor, n_trials=None, timeout=9.0, n_jobs=1, callbacks=[pass_time])
    assert states(study) == ["COMPLETE"] * 3
    run(study, executor, n_trials=None, timeout=0.0)
    run(study, executor, n_trials=0)
    assert states(study) == ["COMPLETE"] * 3


def test_the_timeout_counts_from_the_first_trial(executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(5.0)
    monkeypatch.setattr(executor.session, "clock", clock)

    class SlowAtFirst(optuna.samplers.RandomSampler):
        def before_trial(self, study: Any, trial: Any) -> None:
            clock.advance_to(clock.now() + (100.0 if trial.number == 0 else 0.0))

    def pass_time(study: Any, trial: Any) -> None:
        clock.advance_to(clock.now() + 4.0)

    study = optuna.create_study(sampler=SlowAtFirst())
    run(study, executor, n_trials=None, timeout=9.0, n_jobs=1, callbacks=[pass_time])
    assert states(study) == ["COMPLETE"] * 3


def test_a_trial_that_hangs_fails_by_its_limit(executor: FluidExecutor, tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0.0, 1.0), "go": str(tmp_path / "never")}

    study = optuna.create_study()
    options = {"space": space, "n_trials": 1, "iteration_timeout_s": 0.5}
    run(study, executor, wait_for_a_file, catch=TimeoutError, **options)
    assert states(study) == ["FAIL"]
    with pytest.raises(TimeoutError, match="no result"):
        run(study, executor, wait_for_a_file, **options)


@pytest.mark.slow
def test_an_objective_may_take_far_longer_than_the_others(
    executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "LEAST_DUMP_S", 1.0)  # A minute.
    monkeypatch.setattr(tuning, "LEAST_KILL_S", 4.0)  # Ten minutes.
    study = optuna.create_study()
    optimize(study, sleep_at_the_last, n_trials=7, n_jobs=1, executor=executor)
    assert states(study) == ["COMPLETE"] * 7
    told = [record.getMessage() for record in caplog.records if "has given no result" in record.getMessage()]
    assert len(told) == 1 and "it goes on, unless iteration_timeout_s= sets a limit" in told[0]


@pytest.mark.slow
def test_an_objective_has_the_limit_that_it_is_given(executor: FluidExecutor) -> None:
    study = optuna.create_study()
    with pytest.raises(TimeoutError, match=r"iteration_timeout_s=1\.0; None sets no limit"):
        optimize(study, sleep_at_the_last, n_trials=7, n_jobs=1, executor=executor, iteration_timeout_s=1.0)
    assert states(study) == ["COMPLETE"] * 6 + ["FAIL"]


def test_ctrl_c_fails_what_is_under_way(executor: FluidExecutor, caplog: pytest.LogCaptureFixture) -> None:
    class Interrupting(optuna.pruners.BasePruner):  # type: ignore[misc]
        def prune(self, study: Any, trial: Any) -> bool:
            if study.trials[-1].number == 1 and trial.number == 1:
                raise KeyboardInterrupt
            return False

    study = enqueued(5.0, 6.0, pruner=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        run(study, executor, train_for_ever, budget=500_000)
    assert states(study) == ["FAIL", "FAIL"]
    said = "Interrupted by KeyboardInterrupt: 2 trials were cut off; optimize on this study goes on."
    assert [text for text in caplog.messages if text.startswith("Interrupted")] == [said]
    # A stopped trial makes room for another.
    study.pruner = optuna.pruners.NopPruner()
    assert states(run(study, executor, n_trials=2))[2:] == ["COMPLETE", "COMPLETE"]


# --- Invalid arguments


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"study": "study"}, "study"),
        ({"trainable": 3}, "trainable"),
        ({"trainable": lambda: None}, "trainable"),
        ({"executor": "local"}, "executor"),
        ({"n_trials": -1}, "n_trials"),
        ({"n_trials": 1.5}, "n_trials"),
        ({"batch_size": 0}, "batch_size"),
        ({"n_jobs": 0}, "n_jobs"),
        ({"n_jobs": 2, "batch_size": 2}, "n_jobs"),
        ({"budget": 0}, "budget"),
        ({"timeout": -1.0}, "timeout"),
        ({"iteration_timeout_s": 0.0}, "iteration_timeout_s"),
        ({"space": 3}, "space"),
        ({"space": {"x": (0, 1)}}, "space['x']"),
        ({"space": {1: SPACE["x"]}}, "space"),
        ({"metric": ""}, "metric"),
        ({"metric": 3}, "metric"),
        ({"metric": ["loss", "size"]}, "metric"),
        ({"catch": 3}, "catch"),
        ({"catch": [KeyboardInterrupt]}, "catch"),
        ({"callbacks": print}, "callbacks"),
        ({"callbacks": ["print"]}, "callbacks"),
    ],
)
def test_bad_arguments(executor: FluidExecutor, options: dict[str, Any], field: str) -> None:
    study = optuna.create_study()
    arguments: dict[str, Any] = {
        "study": study,
        "trainable": train,
        "n_trials": 2,
        "executor": executor,
        "space": SPACE,
        "metric": "loss",
        "budget": 2,
    }
    with pytest.raises(InvalidFieldError) as caught:
        optimize(**{**arguments, **options})
    assert caught.value.field == field
    assert study.trials == []


def test_several_objectives_need_several_metrics(executor: FluidExecutor) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(InvalidFieldError, match="the study has 2 objective"):
        run(study, executor)


def test_without_optuna_the_error_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['optuna'] = None\n"
        "from fluid.errors import MissingDependencyError\n"
        "from fluid.integrations.optuna import optimize\n"
        "try: optimize(None, None, space={}, metric='loss', budget=1)\n"
        "except MissingDependencyError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install 'optuna>=3.2'" in done.stdout
