"""Sweeps of which some results, or some trials, or all, lack the metric."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import curve

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult, Trial, TrialGroup
from fluid.search import AskTell, Target, TrialPlateau, uniform
from fluid.sweeping.plan import UnreportedMetricError
from fluid.sweeping.reported import is_misspelt


def every_third(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Validates every third epoch; the loss falls towards ``x``."""
    for epoch in range(1, 100):
        yield {"epoch": epoch, **({"val_loss": config["x"] + 1.0 / epoch} if epoch % 3 == 0 else {})}


def some_never(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reports what it is told to in place of the loss."""
    for epoch in range(1, 100):
        yield {"epoch": epoch, **({"loss": config["x"]} if config.get("instead") is None else config["instead"])}


def once_none(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for i in range(4):
        yield {"loss": None, "other": 1} if config["x"] == 3 and i == 1 else {"loss": float(config["x"] + i)}


def sweep(executor: FluidExecutor | None, trainable: Any = curve, space: Any = None, **options: Any) -> SweepResult:
    arguments: dict[str, Any] = {"metric": "loss", "mode": "min", "samples": 9, "budget": 9, **options}
    return fluid.run(trainable, {"x": uniform(0.0, 1.0)} if space is None else space, executor=executor, **arguments)


def states(result: SweepResult) -> list[str]:
    return [trial.state for trial in result.trials]


def kinds(result: SweepResult) -> dict[str, str]:
    return {trial_id: failure.kind for trial_id, failure in result.failures.items()}


# -- results without the metric


@pytest.mark.slow
def test_asha_with_validation_every_third_epoch(executor: FluidExecutor) -> None:
    result = sweep(executor, every_third, metric="val_loss", samples=9, budget=27, min_budget=3)
    assert not result.failures
    by_x = sorted(result.trials, key=lambda trial: trial.config["x"])
    assert by_x[0].iteration == 27 == result.best.iteration
    assert {trial.iteration for trial in result.trials} <= {3, 9, 27}
    assert result.best.value == by_x[0].config["x"] + 1.0 / 27


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["asha", "sha"])
def test_a_rung_uses_the_last_value(executor: FluidExecutor, algorithm: str) -> None:
    """The rungs are 4 and 8 epochs: at each the last value is that of the epoch before, or two before."""
    result = sweep(
        executor, every_third, metric="val_loss", samples=4, budget=8, min_budget=4, eta=2, algorithm=algorithm
    )
    assert not result.failures
    furthest = [trial.config["x"] for trial in result.trials if trial.iteration == 8]
    assert min(trial.config["x"] for trial in result.trials) in furthest
    assert {trial.iteration for trial in result.trials} == {4, 8}


def test_one_result_without_a_number_ends_nothing(executor: FluidExecutor) -> None:
    space = {"x": list(range(8))}
    result = sweep(executor, once_none, space, samples=None, algorithm="grid", budget=4)
    assert states(result) == ["DONE"] * 8
    assert [[r.metrics["loss"] for r in trial.results] for trial in result.trials[2:4]] == [
        [2.0, 3.0, 4.0, 5.0],
        [3.0, None, 5.0, 6.0],
    ]
    assert result.best.value == 0.0


@pytest.mark.parametrize("odd", [None, "low", True, [1.0], {"a": 1.0}, b"1"])
def test_what_is_no_number_is_an_ordinary_result(executor: FluidExecutor, odd: Any) -> None:
    def train(config: Any) -> Any:
        yield {"loss": config["x"]}
        yield {"loss": config["odd"]}

    result = sweep(executor, train, {"x": uniform(0.0, 1.0), "odd": odd}, samples=2, algorithm="random", budget=2)
    assert states(result) == ["DONE", "DONE"]
    assert result.best.value == min(trial.config["x"] for trial in result.trials)


def test_the_searcher_is_told_the_last_value(executor: FluidExecutor) -> None:
    told: list[Any] = []
    configs = iter([{"x": 0.5}, {"x": 0.25}])
    searcher = AskTell(lambda: next(configs, None), lambda config, value: told.append((config["x"], value)))
    sweep(executor, every_third, {}, metric="val_loss", searcher=searcher, algorithm="full", budget=5, samples=None)
    assert sorted(told) == [(0.25, 0.25 + 1 / 3), (0.5, 0.5 + 1 / 3)]


def test_stop_rules_pass_over_results_without_the_metric(executor: FluidExecutor) -> None:
    plateau = sweep(
        executor,
        every_third,
        metric="val_loss",
        samples=2,
        algorithm="random",
        budget=12,
        stop=TrialPlateau(iterations=1),
    )
    assert states(plateau) == ["DONE", "DONE"], "each value was better than the one before"
    reached = sweep(
        executor, every_third, metric="val_loss", samples=2, algorithm="random", budget=90, stop=Target(1.0 + 1 / 12)
    )
    assert "reached the target" in reached.notes[0]


def test_the_best_checkpoint_is_by_the_last_value(tmp_path: Path) -> None:
    """The state is reported in other iterations than the metric."""

    def train(config: Any) -> Any:
        for epoch in range(1, 7):
            metrics: dict[str, Any] = {"epoch": epoch}
            if epoch % 2:
                fluid.report({**metrics, "loss": 1.0 / epoch})
            else:
                fluid.report(metrics, save=lambda folder, epoch=epoch: Path(folder, "epoch").write_text(str(epoch)))

    with FluidExecutor("local", 1, run_dir=tmp_path / "run", keep="best:1", verbose=0) as made:
        result = sweep(made, train, {}, samples=1, algorithm="random", budget=6)
    assert result.best.iteration == 5 and result.best.checkpoint is None
    with pytest.raises(fluid.FluidError, match=r"the checkpoint of iteration 5, .* those of iterations 6"):
        result.best.load_checkpoint()
    assert Path(result.best.trial.load_checkpoint(), "epoch").read_text() == "6"


# -- trials without the metric


@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband", "random", "grid"])
def test_a_trial_that_never_reports_it_fails_and_the_sweep_goes_on(executor: FluidExecutor, algorithm: str) -> None:
    space = {"x": uniform(0.0, 1.0), "instead": None}
    points = [{"x": 0.0, "instead": {"accuracy": 1.0}}]
    if algorithm == "grid":
        result = sweep(executor, some_never, {"x": [0.1, 0.2], "instead": [{"accuracy": 1.0}, None]}, samples=None,
                       algorithm="grid")  # fmt: skip
        failed = [trial for trial in result.trials if trial.config["instead"]]
        assert len(failed) == 2
    else:
        from fluid.search import choice

        space["instead"] = choice([None, {"accuracy": 1.0}])
        rest = [{"x": x, "instead": None} for x in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)]
        result = sweep(executor, some_never, space, points=points + rest, samples=9, algorithm=algorithm)
        failed = [trial for trial in result.trials if trial.config["instead"]]
        assert len(failed) == 1
    assert [trial.state for trial in failed] == ["FAILED"] * len(failed)
    assert set(kinds(result)) == {trial.trial_id for trial in failed} and set(kinds(result).values()) == {"metric"}
    for trial in failed:
        assert trial.failure is not None
        assert f"metric='loss': was not reported by trial '{trial.trial_id}', but 'epoch', 'accuracy'" in (
            trial.failure.message
        )
    others = [trial for trial in result.trials if trial.trial_id not in result.failures]
    assert {trial.state for trial in others} <= {"DONE", "STOPPED"}
    assert result.best.value == min(trial.config["x"] for trial in others)
    # All who tell of the sweep agree.
    loaded = {trial.trial_id: trial for trial in fluid.load(executor.run_dir).trials}
    handle = executor.handles[-1]
    for trial in failed:
        assert loaded[trial.trial_id].state == "FAILED" == str(handle.states[trial.trial_id])
        assert loaded[trial.trial_id].failure == trial.failure == handle.failures[trial.trial_id]
    assert {t.trial_id: t.state for t in handle.trials} == {t.trial_id: t.state for t in result.trials}


def test_a_trial_fails_three_iterations_after_the_first_that_reported_it(executor: FluidExecutor) -> None:
    def train(config: Any) -> Any:
        if config["late"]:
            while True:
                yield {"epoch": 1}
        for _ in range(5):
            yield {"loss": config["x"]}

    space = {"x": [0.1, 0.2], "late": [False, True]}
    result = sweep(executor, train, space, samples=None, algorithm="grid", budget=10**9)
    assert sorted(states(result)) == ["DONE", "DONE", "FAILED", "FAILED"]
    assert all(trial.iteration >= 4 for trial in result.trials if trial.config["late"])


def test_a_trial_that_ends_by_itself_without_it_fails(executor: FluidExecutor) -> None:
    def train(config: Any) -> Any:
        if config["x"] == 1:
            return
        yield {"loss": config["x"]}

    result = sweep(executor, train, {"x": [0, 1, 2]}, samples=None, algorithm="grid", budget=5)
    assert states(result) == ["DONE", "FAILED", "DONE"]
    (failure,) = result.failures.values()
    assert failure.kind == "metric" and "which reported nothing" in failure.message


def test_a_trial_that_a_rule_stops_without_it_fails(executor: FluidExecutor) -> None:
    space = {"x": [0.1, 0.2], "instead": [None, {"done_at": 1}]}
    result = sweep(executor, some_never, space, samples=None, algorithm="grid", budget=9, stop={"done_at": 0.5})
    assert sorted(states(result)) == ["DONE", "DONE", "FAILED", "FAILED"]


def test_each_of_several_metrics_is_needed(executor: FluidExecutor) -> None:
    def train(config: Any) -> Any:
        for epoch in range(3):
            yield {"loss": config["x"], **({"gain": epoch} if config["x"] and epoch == 1 else {})}

    space = {"x": [0, 1, 2]}
    result = sweep(
        executor, train, space, metric=("loss", "gain"), mode=("min", "max"), samples=None, algorithm="grid", budget=3
    )
    assert states(result) == ["FAILED", "DONE", "DONE"]
    (failure,) = result.failures.values()
    assert "metric='gain': was not reported" in failure.message


def test_the_searcher_is_told_that_such_a_trial_failed(executor: FluidExecutor) -> None:
    failed: list[Any] = []
    configs = iter([{"x": 1.0, "instead": None}, {"x": 2.0, "instead": {"other": 1}}])
    searcher = AskTell(
        lambda: next(configs, None), lambda *_: None, tell_failed=lambda config: failed.append(config["x"])
    )
    sweep(executor, some_never, {}, searcher=searcher, algorithm="full", budget=2, samples=None)
    assert failed == [2.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_a_value(executor: FluidExecutor, value: float) -> None:
    result = sweep(executor, some_never, {"x": [value, 1.0]}, samples=None, algorithm="grid", budget=2)
    assert states(result) == ["DONE", "DONE"] and result.best.value == 1.0


def test_fractions_are_numbers(executor: FluidExecutor) -> None:
    result = sweep(executor, some_never, {"x": [Fraction(1, 2)]}, samples=None, algorithm="grid", budget=2)
    assert result.best.value == 0.5


# -- no trial has it


@pytest.mark.parametrize("text", ["low", "0.5"])
def test_a_metric_that_is_never_a_number(executor: FluidExecutor, text: str) -> None:
    def train(config: Any) -> Any:
        yield {"loss": text}

    with pytest.raises(InvalidFieldError, match=rf"must be a number; trial '.*' reported '{text}'") as caught:
        sweep(executor, train)
    assert states(caught.value.result).count("FAILED") >= 8  # type: ignore[attr-defined]


def test_trials_without_any_metrics(executor: FluidExecutor) -> None:
    def train(config: Any) -> Any:
        yield {}

    with pytest.raises(
        InvalidFieldError, match=r"metric='loss': was not reported by trial '.*', which reported nothing; nor did"
    ):
        sweep(executor, train)


@pytest.mark.parametrize("samples", [1, 3, 30])
def test_a_metric_that_no_trial_reports(executor: FluidExecutor, samples: int) -> None:
    with pytest.raises(
        InvalidFieldError, match=r"metric='acc': was not reported by trial '.*', but 'loss', 'gain',"
    ) as e:
        sweep(executor, metric="acc", budget=2, algorithm="random", samples=samples)
    result = e.value.result  # type: ignore[attr-defined]
    assert len(result.trials) == samples
    failed = [trial for trial in result.trials if trial.state == "FAILED"]
    assert len(failed) >= min(samples, 8)
    assert {trial.failure.kind for trial in failed} == {"metric"}
    assert sweep(executor, samples=1).best.iteration == 9, "the executor goes on"


def test_a_misspelt_metric_is_named_at_once(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError, match=r"metric='los': was not reported .*; did you mean 'loss'\?") as caught:
        sweep(executor, metric="los", budget=10**9, algorithm="random")
    assert isinstance(caught.value.result, SweepResult)  # type: ignore[attr-defined]
    assert sweep(executor, samples=1).best.iteration == 9, "the executor goes on"


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("los", "loss"),
        ("losss", "loss"),
        ("Loss", "loss"),
        ("val-loss", "val_loss"),
        ("valLoss", "val_loss"),
        ("eval/accuracy", "eval_accuracy"),
        ("acuracy", "accuracy"),
        ("accurcy", "accuracy"),
        ("val_acurracy", "val_accuracy"),
        ("top1_acuracy", "top1_accuracy"),
    ],
)
def test_misspelt_names(name: str, metric: str) -> None:
    assert is_misspelt(name, metric) and is_misspelt(metric, name)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("loss", "loss"),
        ("loss", "val_loss"),
        ("train_loss", "val_loss"),
        ("train_accuracy", "val_accuracy"),
        ("accuracy", "balanced_accuracy"),
        ("val_acc", "val_auc"),
        ("mae", "mse"),
        ("mse", "rmse"),
        ("mse", "msle"),
        ("val_f1", "val_f2"),
        ("top1_accuracy", "top5_accuracy"),
        ("best_loss", "test_loss"),
        ("encoder_loss", "decoder_loss"),
        ("f1_macro", "f1_micro"),
        ("acc", "accuracy"),
    ],
)
def test_names_of_other_metrics(name: str, metric: str) -> None:
    assert not is_misspelt(name, metric) and not is_misspelt(metric, name)


def test_a_name_like_the_metrics_does_not_matter_where_that_is_reported(executor: FluidExecutor) -> None:
    def train(config: Any) -> Any:
        for epoch in range(3):
            yield {"loss": 1.0, "los": 2.0} if epoch else {"loss": 1.0}
            yield {"los": 2.0}

    assert sweep(executor, train, samples=2, budget=5).best.value == 1.0


def test_what_no_trial_reported_so_far_is_said(executor: FluidExecutor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fluid.sweeping.loop"):
        sweep(executor, every_third, metric="val_loss", samples=1, budget=30, algorithm="random")
        assert not caplog.records
        with pytest.raises(InvalidFieldError):
            sweep(executor, metric="accuracy", budget=30, samples=1, algorithm="random")
    (record,) = [record for record in caplog.records if record.name == "fluid.sweeping.loop"]
    assert "has reported a number as 'accuracy' so far, but 'loss', 'gain', 'at'" in record.message


def test_the_error_crosses_processes() -> None:
    error = UnreportedMetricError("loss", "was not reported", {"a": 1})
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.value, copied.result) == ("metric='loss': was not reported", "loss", {"a": 1})


# -- errors of the metrics' own classes


def test_numbers_that_cannot_be_made_are_none(executor: FluidExecutor) -> None:
    class Odd:
        def __float__(self) -> float:
            raise RuntimeError("no float")

    def train(config: Any) -> Any:
        yield {"loss": config["x"]}
        yield {"loss": Odd() if config["x"] else config["x"]}

    result = sweep(executor, train, {"x": [0.0, 1.0]}, samples=None, algorithm="grid", budget=2)
    assert states(result) == ["DONE", "DONE"] and result.best.value == 0.0

    def never(config: Any) -> Any:
        yield {"loss": Odd()}

    with pytest.raises(InvalidFieldError, match=r"metric='loss': must be a number; trial '.*' reported .*Odd object"):
        sweep(executor, never, {"x": [0.0]}, samples=None, algorithm="grid", budget=1)


@pytest.mark.slow
def test_a_tensor_of_several_elements_is_no_number(executor: FluidExecutor) -> None:
    torch = pytest.importorskip("torch")

    def train(config: Any) -> Any:
        yield {"loss": torch.ones(2)}

    with pytest.raises(InvalidFieldError, match="metric='loss': must be a number"):
        sweep(executor, train, {"x": [0.0]}, samples=None, algorithm="grid", budget=1)


def test_a_group_whose_search_names_a_metric_goes_on_without_it(executor: FluidExecutor) -> None:
    search = fluid.Search("loss", "min")
    trials = [Trial(some_never, {"x": 1.0, "instead": instead}, budget=2) for instead in (None, {"a": "b"})]
    handle = executor.submit_trialgroup(TrialGroup(trials, search=search))
    assert handle.wait(60)
    assert handle.best().value == 1.0
