"""Searches with a trainer: trials are training runs in lanes, an iteration is an evaluation."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

import fluid
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.search import loguniform
from fluid.user_calls import names_of

pytestmark = pytest.mark.frameworks("transformers", "sklearn", "optuna")


@pytest.fixture(scope="module")
def search() -> Callable[..., Any]:
    pytest.importorskip("transformers")
    from fluid.integrations.transformers import hyperparameter_search

    return hyperparameter_search


def rates(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def state_of(trainer: Any) -> dict[str, Any]:
    return {**vars(trainer), "args": str(trainer.args), "callbacks": list(trainer.callback_handler.callbacks)}


def test_a_search_of_optunas_kind(tasks: Any, search: Any, executor: FluidExecutor, tmp_path: Path) -> None:
    (diary := tmp_path / "diary").mkdir()
    trainer = tasks.make_trainer(tmp_path, callbacks=[tasks.Diary(diary)], save_strategy="epoch")
    before = state_of(trainer)
    found = search(trainer, rates, n_trials=6, executor=executor, algorithm="sha", eta=2)
    assert state_of(trainer) == before
    result = found.run_summary
    # Rungs at 1, 2 and 4 evaluations; trials wait in one process, between their iterations, for those of others.
    assert sorted(trial.iteration for trial in result.trials) == [1, 1, 1, 2, 2, 4]
    assert (found.run_id, found.objective) == (result.best.trial_id, result.best.value)
    assert found.hyperparameters == dict(result.best.config)
    assert all(trial.metrics["objective"] == trial.metrics["eval_loss"] for trial in result.trials)

    # Every trial came to the end of train(), those that were pruned too, and left nothing else.
    ends = {f"run-{trial.trial_id}": f"{3 * trial.iteration}\n" for trial in result.trials}
    assert eventually(lambda: len(list(diary.iterdir())) == len(ends))
    assert {file.name: file.read_text() for file in diary.iterdir()} == ends
    assert not list((tmp_path / "out").iterdir())

    # The losses of the best trial are those of the trainer alone, although it shared its process with five others.
    trainer.args.learning_rate = found.hyperparameters["learning_rate"]
    trainer.args.save_strategy = type(trainer.args.save_strategy)("no")
    assert [each.metrics["eval_loss"] for each in result.best.trial.results] == tasks.losses_alone(trainer)

    # Its checkpoint is the model as it was at its best evaluation.
    trainer.model = type(trainer.model).from_pretrained(result.best.checkpoint)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(found.objective, rel=1e-5)


def test_a_search_of_rays_kind_with_several_objectives(
    tasks: Any, search: Any, executor: FluidExecutor, tmp_path: Path
) -> None:
    trainer = tasks.make_trainer(tmp_path, model_init=tasks.model_of_trial, eval_strategy="no", num_train_epochs=1)
    runs = search(
        trainer,
        lambda _: {"learning_rate": loguniform(1e-3, 1e-2), "width": [4, 8]},
        lambda metrics: (metrics["eval_loss"], metrics["epoch"]),
        n_trials=2,
        direction=["minimize", "maximize"],
        executor=executor,
    )
    (result,) = {id(each.run_summary): each.run_summary for each in runs}.values()
    assert [each.objective[1] for each in runs] == [1.0] * len(runs)
    assert all(each.hyperparameters["width"] in (4, 8) for each in runs)
    # Without an evaluation in training there is one after it.
    assert [len(trial.results) for trial in result.trials] == [1, 1]


def test_a_trial_of_the_default_space(tasks: Any, search: Any, executor: FluidExecutor, tmp_path: Path) -> None:
    trainer = tasks.make_trainer(tmp_path, train=16)
    found = search(trainer, n_trials=1, executor=executor)
    assert found.hyperparameters.keys() == {
        *("learning_rate", "num_train_epochs", "per_device_train_batch_size", "seed"),
    }
    assert len(found.run_summary.trials[0].results) == found.hyperparameters["num_train_epochs"]


@pytest.mark.parametrize(
    ("options", "config", "expected"),
    [
        ({}, {"num_train_epochs": 1.5}, 2),
        ({"gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 4}, 4),
        ({"eval_strategy": "steps", "eval_steps": 5}, {}, 3),
        ({"eval_strategy": "steps", "eval_steps": 0.3}, {"num_train_epochs": 2}, 3),
        ({"max_steps": 7}, {}, 3),
    ],
)
def test_the_budget_is_as_many_evaluations_as_the_trainer_makes(
    tasks: Any, options: dict[str, Any], config: Mapping[str, Any], expected: int, tmp_path: Path
) -> None:
    from fluid.integrations.transformers.search import _evaluations
    from fluid.integrations.transformers.trial import set_hyperparameters

    trainer = tasks.make_trainer(tmp_path, model_init=lambda: tasks.language_model(2), **options)
    assert _evaluations(trainer, config) == expected
    set_hyperparameters(trainer.args, config)
    assert len(tasks.losses_alone(trainer)) == expected


@pytest.mark.parametrize(
    ("name", "before", "value", "expected"),
    [
        ("weight_decay", 0, 0.25, 0.25),
        ("warmup_steps", 0, 3, 3),
        ("weight_decay", 0.0, "1e-4", 1e-4),
        ("num_train_epochs", 3, 1.5, 1.5),
        ("per_device_train_batch_size", 8, 16.0, 16),
        ("eval_steps", None, 0.5, 0.5),
        ("max_grad_norm", 1.0, 2, 2.0),
        ("bf16", False, 1, True),
        ("lr_scheduler_kwargs", None, {"num_cycles": 2}, {"num_cycles": 2}),
    ],
)
def test_a_hyperparameter_keeps_its_value(tasks: Any, name: str, before: Any, value: Any, expected: Any) -> None:
    from transformers import TrainingArguments

    from fluid.integrations.transformers.trial import set_hyperparameters

    args = TrainingArguments("out", use_cpu=True)
    setattr(args, name, before)
    set_hyperparameters(args, {name: value})
    assert getattr(args, name) == expected and type(getattr(args, name)) is type(expected)


def test_a_hyperparameter_with_choices_is_one_of_them(tasks: Any) -> None:
    from transformers import TrainingArguments
    from transformers.trainer_utils import SchedulerType

    from fluid.integrations.transformers.trial import set_hyperparameters

    @dataclasses.dataclass
    class Own(TrainingArguments):
        extra: Unknown = 0  # type: ignore[name-defined] # noqa: F821

    args = Own("out", use_cpu=True)
    set_hyperparameters(args, {"lr_scheduler_type": "cosine", "extra": 0.5})
    assert args.lr_scheduler_type is SchedulerType.COSINE
    assert args.extra == 0.5


def without(name: str) -> Callable[[Any], None]:
    return lambda trainer: setattr(trainer, name, None)


def with_a_lock(trainer: Any) -> None:
    trainer.compute_metrics = threading.Lock()


class Endless:
    """Data without a length."""

    def __iter__(self) -> Any:
        yield from ()


def with_endless_data(trainer: Any) -> None:
    trainer.train_dataset = Endless()


@pytest.mark.parametrize(
    ("change", "arguments", "field"),
    [
        (without("model_init"), {}, "trainer.model_init"),
        (without("eval_dataset"), {}, "trainer.eval_dataset"),
        (without("train_dataset"), {}, "trainer.train_dataset"),
        (with_a_lock, {"direction": "minimize"}, "trainer.compute_metrics"),
        (with_endless_data, {}, "budget"),
        (None, {"hp_space": [1]}, "hp_space"),
        (None, {"hp_space": lambda trial: None}, "hp_space"),
        (None, {"hp_space": {"lr": loguniform(1e-4, 1e-1)}}, "hp_space['lr']"),
        (None, {"hp_space": {"learning_rate": (1e-4, 1e-1)}}, "space['learning_rate']"),
        (None, {"direction": "min"}, "direction"),
        (None, {"n_trials": 0}, "n_trials"),
        (None, {"algorithm": "asha", "direction": ["minimize", "maximize"]}, "metric"),
        (None, {"executor": 2}, "executor"),
        (None, {"backend": "ray"}, "backend"),
        (None, {"hp_name": str}, "hp_name"),
        (None, {"sampler": None}, "sampler"),
        (None, {"metric": "eval_loss"}, "metric"),
        (None, {"hp_space": {"seed": [0.5]}}, "hp_space['seed']"),
        (None, {"hp_space": {"bf16": ["False"]}}, "hp_space['bf16']"),
        (None, {"hp_space": {"lr_scheduler_type": ["cosin"]}}, "hp_space['lr_scheduler_type']"),
    ],
)
def test_an_error_names_the_field(
    tasks: Any, search: Any, change: Any, arguments: dict[str, Any], field: str, tmp_path: Path
) -> None:
    trainer = tasks.make_trainer(tmp_path)
    if change is not None:
        change(trainer)
    before = state_of(trainer)
    with pytest.raises(InvalidFieldError) as error:
        search(trainer, **{"hp_space": {"learning_rate": [0.1]}, "run_dir": tmp_path / "run", **arguments})
    assert error.value.field == field
    assert state_of(trainer) == before


def test_a_new_executor_gets_all_that_fluid_run_would_give_it(search: Any) -> None:
    from fluid.integrations.transformers.search import _OF_EXECUTORS

    assert {*_OF_EXECUTORS} == {*names_of(fluid.run)} & {*names_of(FluidExecutor)}


def test_only_a_trainer_can_be_searched(search: Any) -> None:
    with pytest.raises(InvalidFieldError, match="trainer=3: must be a Trainer"):
        search(3)
